"""What the round of a method promises; privacy and votes rest on it.

The promises stand in the method's file, as constants. `hpcfed.methods`, which is above
this room, hands them down by `facts.ask_methods`.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Promises:
    private_mean: bool = False
    """All that the server learns of a round's uploads is one mean of rows, after it has
    sent one row to all: then noise on the mean hides each of them.
    """
    votes: bool = False
    """A majority of signs can replace that mean, because all rows start from one."""


PromisesOf = Callable[[str], Promises]
promising: list[PromisesOf] = []


def promises_of(method: str) -> Promises:
    """Return what the round of a method promises, by its name."""
    return promising[0](method) if promising else Promises()
