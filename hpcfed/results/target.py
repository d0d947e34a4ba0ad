"""The target accuracy: when a run first reaches it, and from when on it stays there."""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Reached:
    """The cost of the target accuracy, up to a round."""

    rounds: int
    seconds: float
    """Wall time of these rounds on the slowest rank."""
    bytes: float
    """Sent by clients and to clients."""
    virtual_seconds: float = float("nan")
    """End of the last of these rounds on the virtual clock; NaN without a clock."""


def judged_series(global_accuracy: np.ndarray | float) -> str:
    """Return the series that a target is for: the global model's, or else that of the
    clients' mean.
    """
    has_global = not np.isnan(global_accuracy).all()
    return "global_accuracy" if has_global else "accuracy"


def at_target(
    accuracy: np.ndarray | float, global_accuracy: np.ndarray | float, target: float
) -> Any:
    """Tell where the judged accuracy reaches a target in per cent."""
    of_global = judged_series(global_accuracy) == "global_accuracy"
    return (global_accuracy if of_global else accuracy) >= target / 100


def first_round(curve: np.ndarray, target: float) -> int | None:
    """Return the first round, from 1, whose accuracy reaches the target in per cent;
    None if none does. NaN stands where a round was not evaluated.
    """
    there = np.flatnonzero(curve >= target / 100)
    return int(there[0]) + 1 if len(there) else None


def stays_from(curve: np.ndarray, target: float) -> int | None:
    """Return the round, from 1, of the first evaluation from which on all reach the
    target; None if the last one does not.
    """
    evaluated = np.flatnonzero(~np.isnan(curve))
    below = np.flatnonzero(curve[evaluated] < target / 100)
    final_stretch = evaluated[below[-1] + 1 :] if len(below) else evaluated
    return int(final_stretch[0]) + 1 if len(final_stretch) else None
