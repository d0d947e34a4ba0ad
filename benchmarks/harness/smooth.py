"""Networks without a kink, and a few digits for them: every layer can be differentiated
as often as one likes, and no maximum chooses among inputs. A small change of weights
flips nothing inside them, so what they learn changes in proportion.
"""

from collections import OrderedDict

import numpy as np
from torch import nn

from hpcfed.data.loading import digits_table

TRAIN, TEST = 320, 120
"""Samples for training and for tests."""


def digits() -> dict[str, np.ndarray]:
    """Return the first of scikit-learn's digits; their pixels are sixteenths, exact in
    every precision.
    """
    table = digits_table()[: TRAIN + TEST]
    images = (table[:, :64] / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    labels = table[:, 64].astype(np.int64)
    return {
        "train_images": images[:TRAIN],
        "train_labels": labels[:TRAIN],
        "test_images": images[TRAIN:],
        "test_labels": labels[TRAIN:],
    }


def dense(shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """Return one hidden layer, named like the catalogue's mlp."""
    channels, height, width = shape
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["flatten"] = nn.Flatten()
    layers["fc1"] = nn.Linear(channels * height * width, 12)
    layers["fc1_act"] = nn.Tanh()
    layers["head"] = nn.Linear(12, classes)
    return nn.Sequential(layers)


def convolved(
    shape: tuple[int, ...], classes: int, *, norm: bool = False
) -> nn.Sequential:
    """Return two convolutions and a hidden layer, named like those of cnn-digits; with
    `norm`, batch norm after each convolution.
    """
    channels, height, width = shape
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number, wide in enumerate((4, 6), 1):
        layers[f"conv{number}"] = nn.Conv2d(channels, wide, 3, padding=1)
        if norm:
            layers[f"bn{number}"] = nn.BatchNorm2d(wide)
        layers[f"act{number}"] = nn.Tanh()
        layers[f"pool{number}"] = nn.AvgPool2d(2)
        channels, height, width = wide, height // 2, width // 2
    layers["flatten"] = nn.Flatten()
    layers["fc1"] = nn.Linear(channels * height * width, 12)
    layers["fc1_act"] = nn.Tanh()
    layers["head"] = nn.Linear(12, classes)
    return nn.Sequential(layers)
