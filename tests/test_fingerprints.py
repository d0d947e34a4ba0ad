"""benchmarks/harness/fingerprints.py: equal runs have equal fingerprints, and its runs
are those that hpcfed has.
"""

import sys

import pytest

from benchmarks.harness import fingerprints
from benchmarks.launching import ROOT
from hpcfed import cli, methods


def test_every_method_is_fingerprinted_and_every_run_understood() -> None:
    assert set(fingerprints.METHODS) == set(methods.names())
    for ranks, words in fingerprints.cases().values():
        if ranks == 1:
            cli.parse_run([*fingerprints.COMMON.split(), *words.split()])


def test_equal_runs_have_equal_fingerprints(
    warm_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though they took other times, and other processes made them."""
    monkeypatch.setattr(sys, "executable", warm_python)
    words = "--method fedper --model mlp --new-clients 2 --new-updates 1"
    one, again = (fingerprints.measure(ROOT, 1, words) for _ in range(2))
    assert "run.h5:rounds/accuracy" in one
    assert fingerprints.compare({"fedper": one}, {"fedper": again}) == 0
    changed = again | {"run.h5:rounds/accuracy": "another"}
    assert fingerprints.compare({"fedper": one}, {"fedper": changed}) == 1


def test_a_run_that_fails_says_why() -> None:
    failed = fingerprints.measure(ROOT, 1, "--method fedper --clients 0")
    assert failed.keys() == {"failed"} and "clients" in failed["failed"]
