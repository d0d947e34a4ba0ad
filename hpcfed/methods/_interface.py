"""What a method's file imports: the types it names, and markers for fields of a state.

A state is a frozen dataclass of tensors. A field without a marker is the same on every
rank, and a round leaves it as it was and returns a new one. Markers are combined by |:
`rows: Tensor = field(metadata=OWNED | IN_PLACE)`.
"""

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
    "Cohort",
    "Entry",
    "Federation",
    "Layout",
    "Positions",
    "Tensor",
]

OWNED = {"owned": True}
"""Marks a field with one entry per client of this rank, which goes where its client
goes.
"""
IN_PLACE = {"in_place": True}
"""Marks a field that a round overwrites: the state before the round is gone.

For what is too large to have twice. All clients' rows may fill half of the memory, and
pFedHN's hypernetwork is as large as a hundred rows.
"""
GENERATED = OWNED | {"generated": True}
"""Marks an owned field with the columns that the server generates; it has no columns as
long as the server has generated none.
"""
FIXED = {"fixed": True}
"""Marks a field that follows from the network alone: a checkpoint leaves it out."""
VARIES = {"varies": True}
"""Marks a shared field whose number of rows changes from round to round."""
CLUSTERS = {"row_of": "shared"}
"""Marks a field whose numbers are rows of the field `shared`: a checkpoint in which
they are not is refused.
"""
