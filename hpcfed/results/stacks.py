"""How many runs advanced together in each round: seeds, or points of a study. Seconds,
memory and energy of a round are those of all of them. A run that is resumed may have
others beside it than before, and then only its last rounds compare with each other.
"""

from collections.abc import Sequence

import numpy as np


def first_alike(stacks: np.ndarray) -> int:
    """Return the first of the last rounds in which equally many runs advanced together."""
    changes = np.flatnonzero(np.diff(stacks))
    return int(changes[-1]) + 1 if len(changes) else 0


def stack_text(stacks: np.ndarray) -> str:
    """Return `3 runs at once`, or `3 runs at once up to round 10, then 1` if that changed;
    an empty text if no other run was there.
    """
    if (stacks == 1).all():
        return ""
    starts = [0, *(np.flatnonzero(np.diff(stacks)) + 1)]
    told = f"{stacks[0]} runs at once" if stacks[0] > 1 else "1 run"
    for start in starts[1:]:
        told += f" up to round {start}, then {stacks[start]}"
    return told


def advanced_together(runs: Sequence[np.ndarray]) -> bool:
    """Tell whether the longest of these runs was there in all rounds of the others: none
    was resumed apart from it.
    """
    longest = max(runs, key=len)
    there = np.zeros(len(longest), int)
    for one in runs:
        if not np.array_equal(one, longest[: len(one)]):
            return False
        there[: len(one)] += 1
    # More than advanced together cannot have been in one process.
    return bool((there <= longest).all())
