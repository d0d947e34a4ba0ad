"""Networks that clients train, and the layout that maps their tensors to columns.

This page is the catalogue and imports no torch, so that a command line is checked at
once.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelInfo:
    summary: str
    smallest: int
    """The smallest image side that the network can take."""
    layers: int
    """Convolutions and linear layers."""
    named: tuple[str, ...] = ()
    """Their names, where they stand one after the other; none for a network of stages.
    """
    norm: bool = False
    """Whether it has batch norm."""


def _row(convolutions: int, hidden: int) -> tuple[str, ...]:
    """Names of the layers of a network that has so many convolutions and then so many
    hidden linear layers.
    """
    first = [f"conv{number + 1}" for number in range(convolutions)]
    return (*first, *(f"fc{number + 1}" for number in range(hidden)), "head")


MODELS: dict[str, ModelInfo] = {
    "mlp": ModelInfo("one hidden layer of 64, for any image shape", 1, 2, _row(0, 1)),
    "cnn-digits": ModelInfo(
        "conv 8, 16 (3×3), FC 32: small, for 8×8 digits", 4, 4, _row(2, 1)
    ),
    "cnn-bn": ModelInfo(
        "cnn-digits with batch norm after its convolutions", 4, 4, _row(2, 1), norm=True
    ),
    "cnn-fmnist": ModelInfo(
        "conv 8, 16 (5×5), FC 16: about 10 k parameters, pFedGPA's Fashion-MNIST",
        14,
        4,
        _row(2, 1),
    ),
    "cnn-emnist": ModelInfo(
        "conv 16, 32 (5×5), FC 128: pFedGPA's EMNIST", 14, 4, _row(2, 1)
    ),
    "cnn-cifar": ModelInfo(
        "conv 16, 32 (5×5), 64 (3×3), FC 128: pFedGPA's CIFAR-10, 107,690 parameters",
        20,
        5,
        _row(3, 1),
    ),
    "cnn-genfed": ModelInfo(
        "conv 32, 32 (3×3), FC 128: GenFed's MNIST and Fashion-MNIST", 10, 4, _row(2, 1)
    ),
    "cnn-genfed-deep": ModelInfo(
        "conv 32, 32 (3×3), FC 256, 64: GenFed's SVHN and CIFAR-10", 10, 5, _row(2, 2)
    ),
    "cnn-pfl": ModelInfo(
        "conv 32, 64 (3×3), dropout, FC 128: the CIFAR-10 network of pfl-research's benchmarks",
        6,
        4,
        _row(2, 1),
    ),
    "resnet18": ModelInfo(
        "ResNet-18 in its CIFAR form (3×3 stem, no max-pool), with batch norm: GENE-FL",
        1,
        21,
        norm=True,
    ),
}
