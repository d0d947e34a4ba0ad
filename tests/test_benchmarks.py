"""What benchmarks look up by its name, where no type checker sees it."""

from importlib import import_module
from operator import attrgetter

from benchmarks.harness.milestones import FUNCTIONS
from benchmarks.speed.clock import CALLS


def test_functions_that_benchmarks_watch_exist() -> None:
    for function in FUNCTIONS:
        module, _, path = function.partition(":")
        assert callable(attrgetter(path)(import_module(module)))
    for owner, names in CALLS.items():
        for name in names:
            assert callable(getattr(owner, name))
