"""Which columns of a row the server generates."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hpcfed.models.layout import Layout
from hpcfed.server.options import ServerOptions

WHOLE_UP_TO = 20_000
"""Columns up to which the whole network is generated unless --generated-layers says."""


@dataclass(frozen=True)
class Generated:
    """The generated columns, in the order of the client's tensors."""

    at: Tensor
    """Positions of the columns, ascending."""
    widths: list[int]
    """Columns of each generated tensor, in order."""


def generated(layout: Layout, options: ServerOptions) -> Generated:
    """Return the trainable columns of the last layers; running statistics of batch
    norm are left to aggregation.
    """
    last = options.generated_layers
    # The paper's choice for CIFAR-10 and EMNIST: the server's networks grow with the
    # number of generated columns.
    if not last and layout.num_parameters > WHOLE_UP_TO:
        last = min(2, len(layout.blocks))
    layers = layout.last(last) if last else layout.layers
    positions = []
    widths = []
    for entry in layout.entries:
        # Running means and variances are no outcome of gradient descent.
        if entry.trainable and entry.layer in layers:
            columns = torch.arange(entry.start, entry.stop)
            positions.append(columns)
            widths.append(len(columns))
    return Generated(torch.cat(positions), widths)
