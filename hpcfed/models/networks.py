"""The catalogue's networks, built as ordinary torch modules."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn

from hpcfed.models import MODELS, ConvNet, ResNet18, hugging_face
from hpcfed.models.blocks import is_large
from hpcfed.models.own import (
    Sample,
    build_own,
    check_drawn_alike,
    construct,
    load_builder,
)
from hpcfed.runtime import draws, randomness

Shape = tuple[int, ...]
"""A sample's shape: channels, height and width of an image, or a table's features."""


def build(
    name: str,
    *,
    shape: Shape,
    classes: int,
    seed: int,
    options: Mapping[str, Any] | None = None,
    sample: Sample | None = None,
    onto: torch.device | None = None,
) -> nn.Module:
    """Return the named network on the CPU; its first weights depend only on the seed.

    A user's network is tried out on a `sample`, by default an image to classify;
    `options` are its builder's keywords. `onto`: see `build_own`.
    """
    if name not in MODELS:
        # Before the seed: lines of a user's file may draw when it is loaded.
        with torch.random.fork_rng(devices=[]):
            load_builder(name)
    draw = int(randomness.generator(seed, "initial weights").integers(2**62))
    if name not in MODELS:
        sample = sample or Sample(shape, (classes,))
        with _drawing(draw):
            network = build_own(name, sample, classes, options or {}, onto)
        # The folder of transformers' networks holds their weights.
        if not hugging_face.is_hugging_face(name) and not is_large(network):
            with _drawing(draw):
                again = construct(name, sample, classes, options or {})
            check_drawn_alike(network, again, name)
        return network
    with _drawing(draw):
        structure = MODELS[name].structure
        if isinstance(structure, ConvNet):
            return _conv_net(structure, shape, classes)
        return _resnet18(structure, shape, classes)


@contextmanager
def _drawing(number: int) -> Iterator[None]:
    """Let a network draw what follows from a number, torch's or anybody's."""
    with draws.seeded(number % 2**32, torch.device("cpu")):
        torch.manual_seed(number)
        yield


def _conv_net(structure: ConvNet, shape: Shape, classes: int) -> nn.Sequential:
    """Return a sequence of layers, named as `structure.layer_names` promises.

    Layers are created in order, because each draws its first weights when it is
    created.
    """
    activation = nn.LeakyReLU if structure.leaky else nn.ReLU
    dropout_after_convs, dropout_before_head = structure.dropout
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    # A table's row is treated as an image of one pixel, with a channel per feature.
    channels, height, width = shape if len(shape) == 3 else (prod(shape), 1, 1)
    for i, conv in enumerate(structure.convs, 1):
        layers[f"conv{i}"] = nn.Conv2d(
            channels, conv.channels, conv.kernel, padding=conv.padding
        )
        if structure.norm:
            layers[f"bn{i}"] = nn.BatchNorm2d(conv.channels)
        layers[f"act{i}"] = activation()
        channels = conv.channels
        grow = 2 * conv.padding - conv.kernel + 1
        height += grow
        width += grow
        if conv.pool:
            layers[f"pool{i}"] = nn.MaxPool2d(2)
            height //= 2
            width //= 2
    if dropout_after_convs:
        layers["drop1"] = nn.Dropout(dropout_after_convs)
    layers["flatten"] = nn.Flatten()
    # So the image size determines the network, including its number of parameters.
    features = channels * height * width
    for i, units in enumerate(structure.hidden, 1):
        layers[f"fc{i}"] = nn.Linear(features, units)
        layers[f"fc{i}_act"] = activation()
        features = units
    if dropout_before_head:
        layers["drop2"] = nn.Dropout(dropout_before_head)
    layers["head"] = nn.Linear(features, classes)
    return nn.Sequential(layers)


def _resnet18(structure: ResNet18, shape: Shape, classes: int) -> nn.Module:
    # Takes a second to import, and only this network needs it.
    from torchvision.models import resnet18

    norm = partial(nn.GroupNorm, structure.groups) if structure.groups else None
    net: nn.Module = resnet18(num_classes=classes, norm_layer=norm)
    kernel, stride, padding = (7, 2, 3) if structure.wide_stem else (3, 1, 1)
    net.conv1 = nn.Conv2d(shape[0], 64, kernel, stride, padding, bias=False)
    # Initialise it like torchvision's stem, which it replaces.
    nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")
    if not structure.wide_stem and not structure.max_pool:
        net.maxpool = nn.Identity()
    return net
