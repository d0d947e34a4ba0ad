"""benchmarks/speed/zoo.py: a row for every network, whatever becomes of it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from benchmarks.speed import zoo
from benchmarks.speed.zoo_networks import TORCHVISION, TRANSFORMERS, ZOO

FEW = ["--clients", "2", "--samples", "2", "--batch", "2"]
VIT = "torchvision:vision_transformer"


def test_the_zoo_has_twenty_of_each() -> None:
    assert len(TORCHVISION) == len(TRANSFORMERS) == 20
    assert len(ZOO) == 40


def test_a_network_of_the_zoo(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "zoo.json"
    words = ["--networks", VIT, *FEW, "--json", str(path)]
    assert zoo.main(words) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(row["network"], row["adapters"]) for row in rows] == [
        (VIT, False),
        (VIT, True),
    ]
    for row in rows:
        assert row["way"] == "vmap" and row["why"]
        assert row["ours_ms"] > 0 and row["loop_ms"] > 0
    before = path.read_text()
    assert zoo.main([*words, "--resume"]) == 0
    assert path.read_text() == before, "nothing is measured twice"
    assert "4 rows" not in capsys.readouterr().out


def test_a_network_that_fails_is_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> nn.Module:
        raise ValueError("cannot be built")

    monkeypatch.setitem(ZOO, VIT, replace(ZOO[VIT], build=fails))
    assert zoo.main(["--networks", VIT, *FEW]) == 1
    printed = capsys.readouterr().out
    assert printed.count("**failed** ValueError: cannot be built") == 2
    with pytest.raises(SystemExit, match="no such network: elephant"):
        zoo.main(["--networks", "elephant"])
