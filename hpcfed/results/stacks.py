"""How many runs advanced together in each round: seeds, or points of a study. Seconds,
memory and energy of a round are those of all of them. Some may end before others. A run
that is resumed may have others beside it than before, and then only the rounds since
compare with each other.
"""

from collections.abc import Sequence

import numpy as np


def first_alike(stacks: np.ndarray, resumed: Sequence[int]) -> int:
    """Return the first of the last rounds that the same runs began together: since the
    run was `resumed`, after one of these rounds, with another number of them.
    """
    changes = {0}
    for round in resumed:
        if 0 < round < len(stacks) and stacks[round - 1] != stacks[round]:
            changes.add(int(round))
    return max(changes)


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
