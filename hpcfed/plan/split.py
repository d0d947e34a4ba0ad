"""How many ranks to give to the server, so that the run ends first."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd

from hpcfed.plan.fits import Range


@dataclass(frozen=True)
class Split:
    """A run with so many ranks for the server."""

    server_ranks: int
    """0: all ranks do both."""
    workers: int
    seconds: Range
    """What all rounds and learnings take."""
    memory: float
    """Bytes of the fullest rank."""


def candidates(ranks: int, batches: Sequence[int]) -> list[int]:
    """Return the numbers of server ranks to compare: none of its own, and those that
    share every network's batch evenly, with two samples at least for the batch norm, and
    leave a worker.
    """
    common, most = gcd(*batches), min(batches) // 2
    own = range(1, min(ranks - 1, most) + 1)
    return [0, *(number for number in own if common % number == 0)]


def best_split(
    numbers: Sequence[int], split: Callable[[int], Split], memory: float
) -> tuple[Split, list[Split]]:
    """Return the split that ends first among those that fit into a rank's `memory`, and
    all of them; 0 bytes: nobody knows how much there is.
    """
    every = [split(number) for number in numbers]
    fitting = [found for found in every if not memory or found.memory <= memory]
    # Where nothing fits, the one that comes nearest.
    if not fitting:
        return min(every, key=lambda found: found.memory), every
    return min(fitting, key=lambda found: found.seconds.middle), every
