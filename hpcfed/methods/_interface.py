"""What a method's file imports: types, and markers for the fields of a state.

A state is a frozen dataclass of tensors. A field without a marker is the same on every
rank. A round does not change it in place, but returns a new one. Combine markers by |:
`rows: Tensor = field(metadata=OWNED | IN_PLACE)`.
"""

from dataclasses import dataclass

from numpy import ndarray as Positions  # clients of this rank, counted from 0
from torch import Tensor

from hpcfed.federation.cohort import Cohort
from hpcfed.federation.federation import Federation
from hpcfed.models.layout import Entry, Layout

__all__ = [
    "CLUSTERS",
    "FIXED",
    "GENERATED",
    "IN_PLACE",
    "OWNED",
    "VARIES",
    "AtDepth",
    "Cohort",
    "Entry",
    "Federation",
    "Layout",
    "Positions",
    "Tensor",
]

OWNED = {"owned": True}
"""Marks a field with one entry per client of this rank, which moves with it."""
IN_PLACE = {"in_place": True}
"""Marks a field that a round overwrites: the state before the round is lost.

Use it for tensors that are too large to keep twice. All clients' rows may fill half of
the memory, and pFedHN's hypernetwork is as large as a hundred rows.
"""
GENERATED = OWNED | {"generated": True}
"""Marks an owned field with the columns that the server generates. It has no columns
until the server has generated some.
"""
FIXED = {"fixed": True}
"""Marks a field that `init` always makes anew the same: a checkpoint leaves it out."""
VARIES = {"varies": True}
"""Marks a shared field whose number of rows changes from round to round."""
CLUSTERS = {"row_of": "shared"}
"""Marks row numbers of the field `shared`: a checkpoint's must be in range."""


@dataclass(frozen=True)
class AtDepth:
    """Rows that the server generates from one depth of inversion, and figures of them
    by client; NaN for clients that are not in the bank.
    """

    depth: int
    signal: float
    """√ᾱ: how much of a latent is still there."""
    rows: Tensor
    recognised: Tensor
    """1 for updates that have their own client's direction."""
    distance: Tensor
    """To the client's newest upload, relative to the length of its update."""
