"""benchmarks/server/guidance.py: readings of guidance beside plain local training."""

from pathlib import Path
from typing import Any, cast
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks.server import guidance
from benchmarks.server.guidance import PLAIN, Curves, sharing, table
from hpcfed.experiment.assemble import assemble
from hpcfed.experiment.newcomers import welcome
from hpcfed.runtime import world as worlds
from hpcfed.runtime.timer import Timer
from tests.pfedgpa_runs import TINY, states

pytestmark = pytest.mark.usefixtures("one_thread")

GIVEN = {name: str(value) for name, value in TINY.items()}
GIVEN |= {"model": "mlp", "device": "cpu", "batch_size": "64"}
GIVEN |= {"new_clients": "3", "new_updates": "2", "guided_updates": "1"}
MOVED = "guided_reference=before,guided_return=moved"


class Notes:
    """Keeps what a run would write to its results about new clients."""

    def __init__(self) -> None:
        self.curves: dict[str, list[float]] = {}

    def write_newcomer_bytes(self, given: float) -> None:
        pass

    def write_newcomers(self, start: str, update: int, accuracy: np.ndarray) -> None:
        self.curves.setdefault(start, []).append(100 * float(accuracy.mean()))


def test_curves_are_those_of_a_run() -> None:
    plan = {name: guidance.settings(GIVEN, name, 0) for name in ("default", MOVED)}
    world = worlds.enter(device="cpu")
    [group] = sharing(plan)
    found = guidance.measure(group, world)
    assert set(found) == {PLAIN, *plan}
    for name, settings in plan.items():
        s = assemble(settings, world, Timer(world.device))
        assert s.newcomers is not None
        notes = Notes()
        welcome(s, s.newcomers, states(s)[-1], cast(Any, notes))
        curves = {
            "method": found[name]["fedavg"],
            "global model": found[PLAIN]["fedavg"],
            "random": found[PLAIN]["random"],
            "random, guided": found[name]["random"],
        }
        for start, curve in curves.items():
            np.testing.assert_allclose(curve, notes.curves[start], err_msg=start)


def test_readings_share_a_learning_if_only_guidance_differs() -> None:
    names = ["default", "guidance=-1", "bank_of=uploads", MOVED]
    plan = {name: guidance.settings(GIVEN, name, 0) for name in names}
    assert [list(group) for group in sharing(plan)] == [
        ["default", "guidance=-1", MOVED],
        ["bank_of=uploads"],
    ]
    assert plan["guidance=-1"].flat()["guidance"] == -1


def curves(plain: list[float], guided: list[float]) -> Curves:
    return {PLAIN: {"fedavg": plain}, "default": {"fedavg": guided}}


def test_differences_are_paired_by_seed() -> None:
    """After the first update guidance adds 1 and 3: 2 ± 1. After the second it takes 1
    from each, whatever the seeds themselves are.
    """
    measured = [curves([0, 50, 60], [0, 51, 59]), curves([0, 70, 90], [0, 73, 89])]
    assert table(measured, "fedavg", ["default"]) == [
        "| after local updates | 1 | 2 | lowest |",
        "|---|---:|---:|---:|",
        f"| {PLAIN} | 60.00 | 75.00 | |",
        "| default | +2.00 ± 1.00 | -1.00 ± 0.00 | -1.00 |",
    ]


def test_what_was_measured_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def measure(group: Any, world: Any) -> Curves:
        calls.append(list(group))
        curve = {"fedavg": [1.0, 2.0], "random": [1.0, 3.0]}
        return {name: curve for name in (PLAIN, *group)}

    monkeypatch.setattr(guidance, "measure", measure)
    monkeypatch.setattr(worlds.World, "close", lambda self: None)
    words = ["guidance.py", "--out", str(tmp_path / "new"), "--seeds", "0", "1"]
    words += ["--readings", "default", "--set", "device=cpu"]
    for _ in range(2):
        monkeypatch.setattr("sys.argv", words)
        guidance.main()
    assert calls == [["default"], ["default"]], "one call a seed"
    assert "| default | +0.00 ± 0.00 | +0.00 |" in capsys.readouterr().out
    ElementTree.parse(tmp_path / "new" / "from-random.svg")
    monkeypatch.setattr("sys.argv", [*words, "rounds=3"])
    with pytest.raises(SystemExit, match=r"has other options; use another --out"):
        guidance.main()
