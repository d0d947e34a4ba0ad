"""What benchmarks look up by its name, where no type checker sees it."""

from argparse import Namespace
from collections.abc import Callable
from importlib import import_module
from operator import attrgetter
from typing import Any

import numpy as np
import pytest

from benchmarks import measuring
from benchmarks.harness.milestones import FUNCTIONS
from benchmarks.speed import kernels
from benchmarks.speed.clock import CALLS
from hpcfed.runtime import own_kernels
from hpcfed.runtime import world as worlds


def test_functions_that_benchmarks_watch_exist() -> None:
    for function in FUNCTIONS:
        module, _, path = function.partition(":")
        assert callable(attrgetter(path)(import_module(module)))
    for owner, names in CALLS.items():
        for name in names:
            assert callable(getattr(owner, name))


@pytest.mark.own_kernels
def test_a_round_is_measured_with_our_kernels_and_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each round computes in its way, and trains the clients that were asked for."""
    ways = []

    def once(work: Callable[[int], Any], *_: Any, **__: Any) -> np.ndarray:
        work(0)
        ways.append(own_kernels.are_allowed())
        return np.array([1.0, 2.0, 9.0])

    monkeypatch.setattr(measuring, "milliseconds", once)
    options = Namespace(clients=2, samples=4, rounds=1, seconds=1)
    world = worlds.enter(device="cpu")
    ours = kernels.measure("gru", "auto", options, world)
    alone = kernels.measure("gru", "torch", options, world)
    assert ways == [True, False]
    assert (ours.kernels, alone.kernels) == ("auto", "torch")
    assert ours.median == 2 and ours.rounds == 3
