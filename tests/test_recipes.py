"""The figures of merit of a study, and the recipes that hand them to ReFrame and JUBE.

The recipes run with the real tools, on a program that stands for hpcfed and answers at
once; they are skipped where the tools are not installed.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcfed.analysis.groups import Process
from hpcfed.analysis.render.console import Output
from hpcfed.analysis.study_points import show_study, study_points, summary
from hpcfed.results.run import RunRecord
from hpcfed.results.stored import read_run
from hpcfed.results.study import Outcome, StudyRecord, TrialRecord
from hpcfed.studies.plan import points, read_study
from tests.runs import flags, mistake, started

RECIPES = Path(__file__).parents[1] / "benchmarks"
SAMPLES = 30
"""Training samples of every client."""


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    """A run whose figures are replaced by ones that are easy to reckon with."""
    out = tmp_path_factory.mktemp("recipes") / "run"
    return read_run(started(*flags(clients=4, rounds=3, epochs=2, out=out)))


def trial(
    record: RunRecord, ranks: int, repeat: int, seconds: Sequence[float]
) -> TrialRecord:
    """Return a finished trial on these ranks with these seconds of rounds."""
    run = replace(
        record,
        facts=record.facts | {"ranks": ranks},
        rounds=record.rounds
        | {
            "seconds": np.array(seconds),
            "accuracy": np.array([0.5, 0.6, 0.75]),
            "global_accuracy": np.full(3, np.nan),
            "engine_samples": np.full(3, 4.0 * SAMPLES * 2),
        },
        train_samples=np.full(4, SAMPLES),
        peak_memory=np.array([1.0, ranks]) * 2**20,
    )
    name = f"ranks={ranks}/repeat-{repeat}"
    return TrialRecord(name, Outcome("complete"), {}, (run,))


def study(record: RunRecord, *more: TrialRecord) -> StudyRecord:
    """Return a study with rounds of 4 s and 1 s on one rank, and of 1 s on two."""
    trials = [
        trial(record, 1, 0, [9, 4, 4]),
        trial(record, 1, 1, [9, 1, 1]),
        trial(record, 2, 0, [9, 1, 1]),
        trial(record, 2, 1, [9, 1, 1]),
    ]
    return StudyRecord(Path("s/study.h5"), "two", 1, "", (*trials, *more))


def test_figures_are_those_of_all_repeats_without_warm_up(record: RunRecord) -> None:
    one, two = study_points(study(record))
    assert (one["point"], one["ranks"], one["repeats"]) == ("ranks=1", 1, 2)
    assert one["seconds_per_round"].centre == pytest.approx(2), "√(4 · 1)"
    assert two["speedup"].centre == pytest.approx(2) and two["scaling"] == "strong"
    assert two["efficiency"].centre == pytest.approx(1)
    # Four clients see their samples twice, in the two seconds of a round.
    assert one["samples_per_second"] == pytest.approx(4 * SAMPLES * 2 / 2)
    # Whatever --epochs says: half as much was trained.
    half = {**record.rounds, "engine_samples": np.full(3, 4.0 * SAMPLES)}
    fewer = replace(record, rounds=half)
    assert record.config["epochs"] == 2
    assert Process((fewer,), 0, "").samples_per_second == pytest.approx(
        np.median(4 * SAMPLES / record.rounds["seconds"])
    )
    assert one["accuracy"] == 0.75 and isnan(one["global_accuracy"])
    assert two["peak_memory"] == 2 * 2**20


def test_a_study_is_shown_with_what_failed(
    record: RunRecord, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bad = TrialRecord("ranks=4/repeat-0", Outcome("failed", "no room"), {}, ())
    told = summary(study(record, bad))
    assert (told["complete"], told["trials"]) == (4, 5)
    assert told["unfinished"] == [
        {"trial": "ranks=4/repeat-0", "status": "failed", "error": "no room"}
    ]
    assert [point["point"] for point in told["points"]] == ["ranks=1", "ranks=2"]
    assert told["points"][0]["global_accuracy"] is None, "JSON has no NaN"
    show_study(study(record, bad), Output())
    said = capsys.readouterr().out
    assert "two: 4 of 5 trials complete" in said
    line = next(line for line in said.splitlines() if "ranks=2" in line)
    assert " ".join(line.split()) == "ranks=2 1 1 – 1 2.00 100% 240 75.00% 2.00 MiB"
    (tmp_path / "study.h5").write_bytes(b"")
    assert "study.h5 cannot be read as a study" in mistake(capsys, "show", tmp_path)


@pytest.fixture
def stand_in(record: RunRecord, tmp_path: Path) -> Path:
    """Return a program that takes the place of Python with hpcfed: it answers `show`."""
    answer = tmp_path / "answer.json"
    answer.write_text(json.dumps(summary(study(record)), indent=1))
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\n[ "$3" = show ] && cat {answer} || true\n')
    program.chmod(0o755)
    return program


def reframe(folder: Path, *words: object) -> dict[str, Any]:
    """Run the check, and return what ReFrame reports of it."""
    program = Path(sys.executable).with_name("reframe")
    if not program.exists():
        pytest.skip("no ReFrame beside Python; pip install reframe-hpc")
    recipe = RECIPES / "reframe"
    report = folder / "report.json"
    command = [program, "-C", recipe / "settings.py", "--system=local", "-r"]
    command += ["-c", recipe / "hpcfed_study.py", f"--report-file={report}", *words]
    subprocess.run(list(map(str, command)), cwd=folder, capture_output=True)
    told: dict[str, Any] = json.loads(report.read_text())
    case: dict[str, Any] = told["runs"][0]["testcases"][0]
    return case


def test_reframe_reads_the_figures(stand_in: Path, tmp_path: Path) -> None:
    """Two ranks are twice as fast, but the site wants ten times."""
    references = tmp_path / "references.json"
    wanted = {"speedup(ranks=1)": [1, -0.1, 0.1, "x"]}
    wanted["speedup(ranks=2)"] = [10, -0.1, None, "x"]
    references.write_text(json.dumps({"local": wanted}))
    python = f"-Spython={stand_in}"
    case = reframe(tmp_path, python, "-S", f"references={references}")
    assert case["result"] == "fail" and case["fail_phase"] == "performance"
    values = {
        name.split(":")[-1]: found[0] for name, found in case["perfvalues"].items()
    }
    assert values["seconds_per_round(ranks=1)"] == 2
    assert values["speedup(ranks=2)"] == 2
    assert values["accuracy(ranks=2)"] == 75 and values["peak_memory(ranks=2)"] == 2
    assert case["job_exitcode"] == 0 and case["num_tasks"] == 2
    # What it ran is a study that hpcfed understands.
    written = Path(case["stagedir"]) / "study.toml"
    assert [point.name for point in points(read_study(written), written)] == [
        "clients=20,ranks=1",
        "clients=20,ranks=2",
    ]


def test_reframe_refuses_what_has_not_learned(stand_in: Path, tmp_path: Path) -> None:
    case = reframe(tmp_path, f"-Spython={stand_in}", "-S", "least_accuracy=0.8")
    assert case["fail_phase"] == "sanity"
    assert "ranks=1: accuracy 0.75 is too low" in case["fail_reason"]


def test_jube_makes_a_table_of_the_figures(stand_in: Path, tmp_path: Path) -> None:
    program = shutil.which("jube")
    if program is None:
        pytest.skip("no JUBE on this machine (Debian: jube)")
    command = [program, "run", RECIPES / "jube/hpcfed.xml", "-o", tmp_path / "out"]
    ended = subprocess.run(
        [*map(str, command), "-a", "-r"],
        env=os.environ | {"HPCFED_PYTHON": str(stand_in)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    rows = [line for line in ended.stdout.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    heads, _, first, second = cells
    table = dict(zip(heads, first, strict=True))
    assert table["clients"] == "20" and second[0] == "100"
    assert table["s/round, fewest"] == "2.0000" and table["s/round, most"] == "1.0000"
    assert table["speed-up"] == "2.00" and table["accuracy"] == "0.7500"
    written = next((tmp_path / "out").rglob("study.toml"))
    assert [point.name for point in points(read_study(written), written)] == [
        "ranks=1",
        "ranks=2",
    ]
