"""What the round of a method promises; privacy and sign votes rely on it.

The promises are constants in the method's file. `hpcfed.methods` imports this package,
so it passes them in by `facts.ask_methods`.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Promises:
    private_mean: bool = False
    """The server sends one row to all clients, and learns nothing of their uploads but
    one mean of rows. Then noise on the mean hides each upload.
    """
    votes: bool = False
    """A majority of signs can replace that mean: all clients start from one row."""


PromisesOf = Callable[[str], Promises]
promising: list[PromisesOf] = []


def promises_of(method: str) -> Promises:
    """Return what the round of a method promises, by its name."""
    return promising[0](method) if promising else Promises()
