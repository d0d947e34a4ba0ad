"""Which columns of a row the server generates."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hpcfed.models.layout import Layout
from hpcfed.server.options import ServerOptions

WHOLE_UP_TO = 20_000
"""Columns up to which the whole network is generated when nothing is said."""


@dataclass(frozen=True)
class Generated:
    at: Tensor
    """Positions of the columns, ascending."""
    widths: list[int]
    """Columns of each generated tensor, in order."""


def generated(layout: Layout, options: ServerOptions) -> Generated:
    """Learnt columns of the last layers; running statistics of batch norm are left to
    aggregation.
    """
    wanted = options.generated_layers or (
        2 if layout.num_parameters > WHOLE_UP_TO else 0
    )
    layers = set(layout.last(wanted) if wanted else layout.layers)
    entries = [e for e in layout.entries if e.trainable and e.layer in layers]
    at = torch.cat([torch.arange(e.start, e.stop) for e in entries])
    return Generated(at, [e.stop - e.start for e in entries])
