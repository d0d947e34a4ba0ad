"""The networks, as ordinary torch modules."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from hpcfed.errors import unknown
from hpcfed.models import MODELS
from hpcfed.runtime import randomness

Shape = tuple[int, int, int]


class Conv(NamedTuple):
    channels: int
    kernel: int
    padding: int = 0
    pool: bool = True


def build(name: str, *, shape: Shape, classes: int, seed: int) -> nn.Module:
    """The named network on the CPU, with initial weights that depend on the seed alone."""
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(
            int(randomness.generator(seed, "initial weights").integers(2**62))
        )
        return _build(name, shape, classes)


def _build(name: str, shape: Shape, classes: int) -> nn.Module:
    match name:
        case "mlp":
            return _convnet(shape, classes, convs=(), hidden=(64,))
        case "cnn-digits":
            return _convnet(
                shape, classes, convs=(Conv(8, 3, 1), Conv(16, 3, 1)), hidden=(32,)
            )
        case "cnn-bn":
            two = (Conv(8, 3, 1), Conv(16, 3, 1))
            return _convnet(shape, classes, convs=two, hidden=(32,), norm=True)
        case "cnn-fmnist":
            return _convnet(
                shape,
                classes,
                convs=(Conv(8, 5), Conv(16, 5, 1)),
                hidden=(16,),
                activation=nn.LeakyReLU,
            )
        case "cnn-emnist":
            return _convnet(
                shape,
                classes,
                convs=(Conv(16, 5), Conv(32, 5, 1)),
                hidden=(128,),
                activation=nn.LeakyReLU,
            )
        case "cnn-cifar":
            three = (Conv(16, 5), Conv(32, 5, 1), Conv(64, 3, 1))
            return _convnet(
                shape, classes, convs=three, hidden=(128,), activation=nn.LeakyReLU
            )
        case "cnn-genfed":
            return _convnet(
                shape, classes, convs=(Conv(32, 3), Conv(32, 3)), hidden=(128,)
            )
        case "cnn-genfed-deep":
            return _convnet(
                shape, classes, convs=(Conv(32, 3), Conv(32, 3)), hidden=(256, 64)
            )
        case "cnn-pfl":
            two = (Conv(32, 3, pool=False), Conv(64, 3))
            return _convnet(
                shape, classes, convs=two, hidden=(128,), dropout=(0.25, 0.5)
            )
        case "resnet18":
            return _resnet18(shape, classes)
    raise AssertionError(f"{name} is in the catalogue but not built")


def _convnet(
    shape: Shape,
    classes: int,
    *,
    convs: Sequence[Conv],
    hidden: Sequence[int],
    activation: type[nn.Module] = nn.ReLU,
    dropout: tuple[float, float] = (0.0, 0.0),
    norm: bool = False,
) -> nn.Sequential:
    """Convolutions with activation and pooling, then fully connected layers; dropout
    after each of the two parts.

    `norm` puts batch norm after every convolution.
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    channels, height, width = shape
    for i, conv in enumerate(convs, 1):
        layers[f"conv{i}"] = nn.Conv2d(
            channels, conv.channels, conv.kernel, padding=conv.padding
        )
        if norm:
            layers[f"bn{i}"] = nn.BatchNorm2d(conv.channels)
        layers[f"act{i}"] = activation()
        channels = conv.channels
        height, width = (
            side + 2 * conv.padding - conv.kernel + 1 for side in (height, width)
        )
        if conv.pool:
            layers[f"pool{i}"] = nn.MaxPool2d(2)
            height, width = height // 2, width // 2
    if dropout[0]:
        layers["drop1"] = nn.Dropout(dropout[0])
    layers["flatten"] = nn.Flatten()
    features = channels * height * width
    for i, units in enumerate(hidden, 1):
        layers[f"fc{i}"] = nn.Linear(features, units)
        layers[f"fc{i}_act"] = activation()
        features = units
    if dropout[1]:
        layers["drop2"] = nn.Dropout(dropout[1])
    layers["head"] = nn.Linear(features, classes)
    return nn.Sequential(layers)


def _resnet18(shape: Shape, classes: int) -> nn.Module:
    from torchvision.models import (
        resnet18,
    )  # takes a second to import, and only this network needs it

    net: nn.Module = resnet18(num_classes=classes)
    net.conv1 = nn.Conv2d(shape[0], 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")
    net.maxpool = nn.Identity()
    return net
