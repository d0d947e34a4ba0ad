"""`hpcfed benchmark --by-turns`: two programs at the same work, and what is told apart."""

import signal
import sys
from math import exp, inf, log, nan, sqrt
from pathlib import Path

import numpy as np
import pytest

import hpcfed
from hpcfed import cli
from hpcfed.analysis.statistics import Estimate
from hpcfed.benchmark import turns
from hpcfed.benchmark.definition import Benchmark, read_benchmark
from hpcfed.benchmark.figures import detectable, trimmed
from hpcfed.benchmark.result import TimedRun
from hpcfed.benchmark.turns import Installation, program_of, ratios_of
from hpcfed.errors import UserError
from hpcfed.results.stored import read_run
from hpcfed.runtime.signals import STOPPED
from tests.runs import mistake

TINY = """
title = "A tiny federation"
figure = "work"
quality = "train_loss"
margin = 0.02
[common]
model = "mlp"
device = "cpu"
clients = 3
epochs = 1
lr = 0.05
checkpoint_minutes = 0
[sizes.small]
rounds = 2
"""
PAIRS = 20


# The statistics: by hand, and on synthetic series.


def test_a_fifth_is_dropped_at_either_end() -> None:
    # Kept of ten: 3 to 8, mean 5.5. Winsorised 3, 3, 3, 4, 5, 6, 7, 8, 8, 8: squares
    # around 5.5 add up to 3 · 6.25 + 2.25 + .25, twice. t of 97.5 % with 5 degrees of
    # freedom is 2.57058.
    found = trimmed([1000, 9, 7, 5, 3, 4, 6, 8, 2, -1000])
    error = sqrt(2 * 21.25 / 9) / (0.6 * sqrt(10))
    assert found.centre == 5.5
    assert found.high == pytest.approx(5.5 + 2.57058 * error, rel=1e-5)
    assert trimmed([1, 2, 3, 4]).centre == 2.5


def test_what_can_be_told_apart_follows_from_the_interval() -> None:
    # With six degrees of freedom t is 2.44691 at 97.5 % and 0.90570 at 80 %.
    found = detectable(Estimate(1.0, 1 / 1.2, 1.2), 11)
    assert found == pytest.approx(exp(log(1.2) * (1 + 0.90570 / 2.44691)), rel=1e-4)
    assert np.isnan(detectable(Estimate(1.0), 5))


def series(
    seconds: np.ndarray, cores: np.ndarray | None = None, *, slower: float = 1.0
) -> list[TimedRun]:
    """Return runs with these wall seconds and seconds on cores."""
    runs = []
    for seed, wall in enumerate(seconds):
        runs.append(
            TimedRun(
                seed=seed,
                seconds=None,
                rounds=1,
                all_seconds=slower * wall,
                cpu_seconds=None if cores is None else slower * cores[seed],
                quality=None,
                samples=1,
                energy_wh=None,
            )
        )
    return runs


def loads(seed: int, spread: float) -> tuple[np.ndarray, np.ndarray]:
    """Return how many times as long the two runs of every pair take."""
    rng = np.random.default_rng(seed)
    first, second = np.exp(spread * rng.standard_normal((2, PAIRS)))
    return first, second


WORK = np.linspace(1.0, 2.0, PAIRS)
"""Seconds of every seed's work on an idle machine."""


def test_a_tenth_is_told_apart_where_the_load_changes() -> None:
    # The machine grows four times as slow in a call; a pair meets the same machine, up
    # to a few per cent, and three pairs meet a burst on one side.
    drift = np.linspace(1.0, 4.0, PAIRS)
    ours, theirs = loads(0, 0.05)
    theirs[[3, 9]] *= 5
    ours[14] *= 5
    these, others = WORK * drift * ours, WORK * drift * theirs
    (same,) = ratios_of(series(these), series(others), on_cpu=True)
    assert same.verdict == "within noise"
    assert same.detectable is not None and same.detectable < 1.1
    (slow,) = ratios_of(series(these, slower=1.1), series(others), on_cpu=True)
    assert slow.verdict == "slower"
    assert slow.ratio == pytest.approx(1.1 * same.ratio)
    (fast,) = ratios_of(series(these), series(others, slower=1.1), on_cpu=True)
    assert fast.verdict == "faster"


def test_time_on_cores_tells_what_wall_time_cannot() -> None:
    ours, theirs = loads(1, 0.4)
    here, there = loads(2, 0.05)
    these = series(WORK * ours, WORK * here, slower=1.1)
    others = series(WORK * theirs, WORK * there)
    wall, cores = ratios_of(these, others, on_cpu=True)
    assert (wall.verdict, cores.verdict) == ("within noise", "slower")
    # Two chances of a false alarm: each may take half of it.
    assert wall.confidence == cores.confidence == pytest.approx(0.975)


def test_only_wall_time_counts_on_a_gpu_and_beside_an_older_program() -> None:
    (wall,) = ratios_of(series(WORK, WORK), series(WORK, 2 * WORK), on_cpu=False)
    assert (wall.name, wall.ratio, wall.confidence) == ("wall seconds", 1, 0.95)
    (wall,) = ratios_of(series(WORK, WORK), series(WORK), on_cpu=True)
    assert wall.name == "wall seconds"


# Two programs.


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a benchmark, and its runs with two seeds."""
    folder = tmp_path_factory.mktemp("turns")
    (folder / "tiny.toml").write_text(TINY)
    options = benchmark_of(folder).options()
    for seed in range(2):
        hpcfed.run(
            progress=False, **options, seed=seed, out=str(folder / f"made-{seed}")
        )
    return folder


def benchmark_of(folder: Path) -> Benchmark:
    return read_benchmark(str(folder / "tiny.toml"), "small", {})


COPIES = """
import atexit
import shutil
import time
from pathlib import Path

# Programs on a busy machine take their time to leave. Nobody may wait for that: this is
# longer than a test may take.
atexit.register(time.sleep, 600)
MADE, JOURNAL, NAME, LOSES = {made!r}, {journal!r}, {name!r}, {loses!r}

def run(*, progress, seed, out, overwrite=False, **options):
    assert not progress and options["lr"] == 0.05
    print("noise that is no answer")
    with open(JOURNAL, "a") as journal:
        print(f"{{NAME}} {{seed}}", file=journal)
    if seed == LOSES:
        raise ValueError("it broke\\x1b")
    shutil.copytree(f"{{MADE}}/made-{{seed}}", out, dirs_exist_ok=overwrite)
"""
"""A program that copies runs in place of making them, and keeps a journal."""


def program(folder: Path, made: Path, name: str, loses: int | None = None) -> Path:
    package = folder / name / "hpcfed"
    package.mkdir(parents=True)
    text = COPIES.format(
        made=str(made), journal=str(folder / "journal"), name=name, loses=loses
    )
    (package / "__init__.py").write_text(text)
    return folder / name


def by_turns(tiny: Path, other: Path, out: Path) -> list[str]:
    """Return the command line that measures two runs of each program."""
    words = ["benchmark", str(tiny / "tiny.toml"), "--by-turns", str(other)]
    return [*words, "--runs", "2", "--out", str(out)]


def test_programs_take_turns_with_the_same_seeds(
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ours, theirs = (program(tmp_path, tiny, name) for name in ("ours", "theirs"))
    monkeypatch.setattr(turns, "PACKAGE", ours / "hpcfed")
    monkeypatch.setattr(turns, "PATIENCE", 0.1)
    # It returns: exit code 0.
    cli.main(by_turns(tiny, theirs, tmp_path / "out"))
    told = (tmp_path / "journal").read_text().split("\n")
    warmed = ["ours 0", "theirs 0"]
    assert told == [*warmed, "ours 0", "theirs 0", "theirs 1", "ours 1", ""]
    *_, last = capsys.readouterr().out.strip().splitlines()
    assert last == f"within noise: this program beside {theirs}, 2 pairs"
    found = turns.TurnsResult.model_validate_json(
        (tmp_path / "out/turns.json").read_bytes()
    )
    assert found.verdict == "within noise"
    assert found.machine.ranks == 1 and found.machine.load is not None
    assert [one.ratio for one in found.ratios] == [1, 1]
    assert [run.seed for run in found.runs["other"]] == [0, 1]
    assert all(run.cpu_seconds for run in found.runs["this"])


def test_a_program_that_fails_is_one_line(
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ours, theirs = program(tmp_path, tiny, "ours"), program(tmp_path, tiny, "theirs", 1)
    monkeypatch.setattr(turns, "PACKAGE", ours / "hpcfed")
    with pytest.raises(SystemExit) as ended:
        cli.main(by_turns(tiny, theirs, tmp_path / "out"))
    assert ended.value.code == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "a run has failed: ValueError: it broke" in said
    assert "other.log" in said
    assert not (tmp_path / "out/turns.json").exists()


def test_a_signal_ends_both_programs_and_says_what_stays(
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ours, theirs = (program(tmp_path, tiny, name) for name in ("ours", "theirs"))
    # In the midst of the first run of the second pair.
    package = theirs / "hpcfed/__init__.py"
    text = package.read_text()
    signals = "if seed: import os; os.kill(os.getppid(), 15); time.sleep(600)"
    package.write_text(text.replace("    shutil", f"    {signals}\n    shutil"))
    monkeypatch.setattr(turns, "PACKAGE", ours / "hpcfed")
    out = tmp_path / "out"
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit) as ended:
            cli.main(by_turns(tiny, theirs, out))
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == STOPPED
    (said,) = capsys.readouterr().err.splitlines()
    assert f"stopped; the runs in {out} stay, without a verdict; go on with: " in said
    assert said.endswith("the same command and --overwrite, which begins anew")
    assert read_run(out / "this-0").status == "complete"
    assert not (out / "turns.json").exists()


def test_a_slower_or_wrong_program_is_told_and_other_work_is_refused(
    tiny: Path,
) -> None:
    benchmark = benchmark_of(tiny)
    records = [read_run(tiny / f"made-{seed}") for seed in range(2)]
    again = [read_run(tiny / f"made-{seed}") for seed in range(2)]
    assert turns.judge(benchmark, records, again).verdict == "within noise"
    for record in again:
        for name in ("seconds", "cpu_seconds"):
            record.rounds[name] = 1.1 * record.rounds[name]
    # Both pairs have the same ratio, so its interval has no width.
    assert turns.judge(benchmark, again, records).verdict == "SLOWER"
    assert turns.judge(benchmark, records, again).verdict == "FASTER"
    again[0].rounds["train_loss"] = again[0].rounds["train_loss"] + 0.1
    assert turns.judge(benchmark, again, records).verdict == "FAILED"
    again[0].config["lr"] = 0.1
    with pytest.raises(UserError, match=r"lr is 0\.1 here and 0\.05 in the other"):
        turns.judge(benchmark, again, records)


def test_a_program_is_a_checkout_or_a_python(tmp_path: Path) -> None:
    checkout = Path(hpcfed.__file__).parent.parent
    assert program_of(checkout) == Installation(sys.executable, checkout)
    python = Path(sys.executable)
    assert program_of(python) == Installation(str(python), None)
    for wrong in (tmp_path, tmp_path / "nowhere", Path(__file__)):
        with pytest.raises(UserError, match="name a folder with hpcfed/ in it"):
            program_of(wrong)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--by-turns", "nowhere"], "--by-turns nowhere: name a folder"),
        (["--by-turns", "x", "--mllog"], "--by-turns does not take --mllog"),
        (["--by-turns", "x", "--runs", "1"], "--runs 1: must be from 2"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in mistake(capsys, "benchmark", "fedavg", *words)
    assert list(tmp_path.iterdir()) == []


def test_ratios_without_an_interval_are_within_noise() -> None:
    for ends in ((nan, nan), (0.0, inf)):
        found = turns.Ratio.model_construct(
            name="wall seconds",
            ratio=2.0,
            low=ends[0],
            high=ends[1],
            confidence=0.95,
            detectable=None,
        )
        assert found.verdict == "within noise"
