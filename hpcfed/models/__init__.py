"""The catalogue of networks that clients train.

It does not import torch, so that a command line is checked quickly. `networks` builds
from the structures below, so names and numbers of layers are defined only here.
"""

from dataclasses import dataclass
from typing import NamedTuple


class Conv(NamedTuple):
    """A convolution, its activation, and usually 2×2 max pooling."""

    channels: int
    kernel: int
    padding: int = 0
    pool: bool = True


@dataclass(frozen=True)
class ConvNet:
    """Convolutions, then fully connected layers, the last without activation."""

    convs: tuple[Conv, ...]
    hidden: tuple[int, ...]
    """Units of the fully connected layers before the last."""
    leaky: bool = False
    """Leaky ReLU instead of ReLU."""
    dropout: tuple[float, float] = (0.0, 0.0)
    """Rates after the convolutions, and before the last layer."""
    norm: bool = False
    """Batch norm after every convolution."""

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Convolutions and linear layers in order."""
        # As `networks` names them, counted from 1.
        convs = [f"conv{i}" for i, _ in enumerate(self.convs, 1)]
        hidden = [f"fc{i}" for i, _ in enumerate(self.hidden, 1)]
        return (*convs, *hidden, "head")

    @property
    def num_layers(self) -> int:
        return len(self.layer_names)


@dataclass(frozen=True)
class ResNet18:
    """torchvision's ResNet-18, usually with a 3×3 stem and no max-pool.

    A test compares these figures with the network.
    """

    layer_names: tuple[str, ...] = ()
    """Empty: its layers form stages, not a sequence that could be cut anywhere."""
    num_layers: int = 21
    groups: int = 0
    """Groups of group norm, which then replaces batch norm; 0: batch norm."""
    wide_stem: bool = False
    """Keep torchvision's stem, made for ImageNet: 7×7, stride 2, then max-pool."""
    max_pool: bool = False
    """Keep the max-pool behind a 3×3 stem, too: a quarter of the pixels in each stage."""

    @property
    def norm(self) -> bool:
        """Whether it has batch norm."""
        return not self.groups


@dataclass(frozen=True)
class ModelInfo:
    summary: str
    """One line for `hpcfed list`."""
    smallest: int
    """The smallest image side that the network takes."""
    structure: ConvNet | ResNet18

    @property
    def layers(self) -> int:
        """Convolutions and linear layers."""
        return self.structure.num_layers

    @property
    def named(self) -> tuple[str, ...]:
        """Names of the layers of a sequence; empty for a network of stages."""
        return self.structure.layer_names

    @property
    def convolves(self) -> bool:
        """Whether the network has convolutions."""
        return isinstance(self.structure, ResNet18) or bool(self.structure.convs)

    @property
    def norm(self) -> bool:
        """Whether the network has batch norm."""
        return self.structure.norm


MODELS: dict[str, ModelInfo] = {
    "mlp": ModelInfo(
        "one hidden layer of 64, for any image shape",
        smallest=1,
        structure=ConvNet(convs=(), hidden=(64,)),
    ),
    "cnn-digits": ModelInfo(
        "conv 8, 16 (3×3), FC 32: small, for 8×8 digits",
        smallest=4,
        structure=ConvNet(convs=(Conv(8, 3, 1), Conv(16, 3, 1)), hidden=(32,)),
    ),
    "cnn-bn": ModelInfo(
        "cnn-digits with batch norm after its convolutions",
        smallest=4,
        structure=ConvNet(
            convs=(Conv(8, 3, 1), Conv(16, 3, 1)), hidden=(32,), norm=True
        ),
    ),
    "cnn-fmnist": ModelInfo(
        "conv 8, 16 (5×5), FC 16: about 10 k parameters, pFedGPA's Fashion-MNIST",
        smallest=14,
        structure=ConvNet(convs=(Conv(8, 5), Conv(16, 5, 1)), hidden=(16,), leaky=True),
    ),
    "cnn-emnist": ModelInfo(
        "conv 16, 32 (5×5), FC 128: pFedGPA's EMNIST",
        smallest=14,
        structure=ConvNet(
            convs=(Conv(16, 5), Conv(32, 5, 1)), hidden=(128,), leaky=True
        ),
    ),
    "cnn-cifar": ModelInfo(
        "conv 16, 32 (5×5), 64 (3×3), FC 128: pFedGPA's CIFAR-10, 107,690 parameters",
        smallest=20,
        structure=ConvNet(
            convs=(Conv(16, 5), Conv(32, 5, 1), Conv(64, 3, 1)),
            hidden=(128,),
            leaky=True,
        ),
    ),
    "cnn-genfed": ModelInfo(
        "conv 32, 32 (3×3), FC 128: GenFed's MNIST and Fashion-MNIST",
        smallest=10,
        structure=ConvNet(convs=(Conv(32, 3), Conv(32, 3)), hidden=(128,)),
    ),
    "cnn-genfed-deep": ModelInfo(
        "conv 32, 32 (3×3), FC 256, 64: GenFed's SVHN and CIFAR-10",
        smallest=10,
        structure=ConvNet(convs=(Conv(32, 3), Conv(32, 3)), hidden=(256, 64)),
    ),
    # The paper says "three fully connected layers, and an output layer", but no width.
    "cnn-genfed-three": ModelInfo(
        "conv 32, 32 (3×3), FC 256, 128, 64: GenFed's SVHN and CIFAR-10, with all of "
        "the paper's fully connected layers",
        smallest=10,
        structure=ConvNet(convs=(Conv(32, 3), Conv(32, 3)), hidden=(256, 128, 64)),
    ),
    "cnn-pfl": ModelInfo(
        "conv 32, 64 (3×3), dropout, FC 128: the CIFAR-10 network of pfl-research's "
        "benchmarks",
        smallest=6,
        structure=ConvNet(
            convs=(Conv(32, 3, pool=False), Conv(64, 3)),
            hidden=(128,),
            dropout=(0.25, 0.5),
        ),
    ),
    "cnn-pfllib": ModelInfo(
        "conv 32, 64 (5×5), FC 512: PFLlib's CNN, 582,026 parameters on MNIST",
        smallest=16,
        structure=ConvNet(convs=(Conv(32, 5), Conv(64, 5)), hidden=(512,)),
    ),
    "cnn-lenet": ModelInfo(
        "conv 6, 16 (5×5), FC 120, 84: LeNet-5 with ReLU and max-pool, as in torch's "
        "tutorial and BlazeFL's benchmark",
        smallest=16,
        structure=ConvNet(convs=(Conv(6, 5), Conv(16, 5)), hidden=(120, 84)),
    ),
    "resnet18": ModelInfo(
        "ResNet-18 in its CIFAR form (3×3 stem, no max-pool), with batch norm: GENE-FL",
        smallest=1,
        structure=ResNet18(),
    ),
    "resnet18-pool": ModelInfo(
        "ResNet-18 with a 3×3 stem and max-pool, and batch norm: another reading of "
        "GENE-FL's",
        smallest=1,
        structure=ResNet18(max_pool=True),
    ),
    "resnet18-gn": ModelInfo(
        "ResNet-18 with ImageNet's stem (7×7, max-pool) and group norm of two groups: "
        "FedML's and FLUTE's CIFAR-100",
        smallest=1,
        structure=ResNet18(groups=2, wide_stem=True),
    ),
}
