"""What a method does that leaves a function out."""

from collections.abc import Callable, Iterator
from typing import Any

from numpy import ndarray

from hpcfed.methods._interface import Federation, Positions, Tensor

Finals = Iterator[tuple[str, Tensor]]
Pool = Callable[[Federation, Any, int], ndarray | None]


def all_clients(fed: Federation, state: Any, round: int) -> None:
    """Let every round draw its cohort from all clients."""


def no_finals(fed: Federation, state: Any, clients: Positions) -> Finals:
    """Evaluate nothing at the end beyond a round's evaluation."""
    return iter(())


def not_led(
    fed: Federation, state: Any, update: int, before: Tensor, after: Tensor
) -> Tensor:
    """Leave new clients' rows as their own training made them."""
    return after
