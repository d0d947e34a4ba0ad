"""`hpcfed benchmark`: its figure, its verification, its rules, and its files."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from math import exp, log, nan, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcfed import cli
from hpcfed.analysis.statistics import Estimate
from hpcfed.benchmark import definition, execute, reference, result, running
from hpcfed.benchmark.comparison import (
    SameWork,
    devices_text,
    read_results,
    relative,
    table,
)
from hpcfed.benchmark.figures import of_times, trimmed, verdict_of
from hpcfed.benchmark.machines_page import machines_page
from hpcfed.benchmark.result import BenchmarkResult, read_result
from hpcfed.benchmark.verification import check_aggregation, check_learning
from hpcfed.errors import UserError
from hpcfed.federation.aggregation import Aggregation
from hpcfed.results.snapshots import Parameters
from hpcfed.results.stored import read_run
from hpcfed.runtime import mpi
from hpcfed.runtime.launcher import launched
from hpcfed.runtime.signals import Stop
from hpcfed.words import DASH
from tests.conftest import Finished
from tests.runs import mistake

TINY = """
title = "A tiny federation"
figure = "target"
quality = "train_loss"
margin = 0.02
[common]
model = "mlp"
device = "cpu"
clients = 4
epochs = 1
lr = 0.05
checkpoint_minutes = 0
[sizes.small]
rounds = 4
target_accuracy = 15
"""


# The figure: worked out by hand.


def test_the_fastest_and_the_slowest_of_five_are_dropped() -> None:
    # Kept: 2, 3, 4. Winsorised: 2, 2, 3, 4, 4, whose variance is 1. The error is
    # 1 / (3/5 √5), and t of 97.5 % with 2 degrees of freedom is 4.30265.
    found = trimmed([3, 100, 2, 4, 1])
    reach = 4.30265 / (0.6 * sqrt(5))
    assert found.centre == 3
    assert found.high == pytest.approx(3 + reach, rel=1e-5)
    assert found.low == pytest.approx(3 - reach, rel=1e-5)


def test_four_runs_all_count() -> None:
    # The variance of 1, 2, 3, 4 is 5/3; t with 3 degrees of freedom is 3.18245.
    found = trimmed([1, 2, 3, 4])
    assert found.centre == 2.5
    assert found.high == pytest.approx(2.5 + 3.18245 * sqrt(5 / 3 / 4), rel=1e-5)


def test_times_are_averaged_on_a_logarithmic_scale() -> None:
    assert of_times([1, 4]).centre == pytest.approx(2)
    inner = [exp(log(2) * power) for power in (1, 2, 3)]
    assert of_times([*inner, 1000.0, 0.001]).centre == pytest.approx(4)


# Learning: two one-sided tests on pairs.


def test_equal_curves_pass_and_shifted_ones_do_not() -> None:
    ours = [0.5, 0.7, 0.6]
    assert check_learning(ours, ours, 0.01).passed
    for shift in (0.011, -0.011):  # better is other work
        assert not check_learning([one + shift for one in ours], ours, 0.01).passed


def test_learning_passes_up_to_the_bound_of_the_interval() -> None:
    # Differences −1, 0, 1: mean 0, error 1 / √3, and t of 95 % with 2 degrees is 2.91999.
    bound = 2.91999 / sqrt(3)
    ours, theirs = [1.0, 2.0, 4.0], [2.0, 2.0, 3.0]
    assert check_learning(ours, theirs, bound * 1.001).passed
    assert not check_learning(ours, theirs, bound * 0.999).passed


def test_runs_without_numbers_do_not_pass() -> None:
    found = check_learning([nan, 1.0], [1.0, 1.0], 10.0)
    assert not found.passed
    assert found.value is None


# Aggregation: rows against float64.


def _recorded(aggregate: np.ndarray) -> Parameters:
    rows = np.array([[1, 2, 0], [3, 6, 0], [np.nan] * 3], np.float32)
    clients = np.array([0, 1, 2])
    return Parameters(1, clients, rows, aggregate.astype(np.float32), {})


def test_a_mean_by_samples_passes_and_an_error_of_a_millionth_does_not() -> None:
    samples = np.array([1, 3, 100])  # the third has not taken part
    right = np.array([2.5, 5, 0])
    assert check_aggregation(_recorded(right), samples, "samples").passed
    assert check_aggregation(_recorded(np.array([2, 4, 0])), samples, "clients").passed
    # Four roundings of 2⁻²⁴ of 2.5 are 6e-7.
    wrong = right * (1 + 1e-6)
    assert not check_aggregation(_recorded(wrong), samples, "samples").passed
    nobodys = right + np.array([0, 0, 1e-30])
    assert not check_aggregation(_recorded(nobodys), samples, "samples").passed


# A whole benchmark, defined here.


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a benchmark, its reference, and a result that passed."""
    folder = tmp_path_factory.mktemp("benchmark")
    (folder / "tiny.toml").write_text(TINY)
    words = ["benchmark", str(folder / "tiny.toml")]
    cli.main([*words, "--reference", "--seeds", "6", "--out", str(folder / "ref")])
    return folder


def _run(folder: Path, out: str, *more: str) -> BenchmarkResult:
    """Run the tiny benchmark, and return what it wrote; its files break the rules."""
    words = ["benchmark", str(folder / "tiny.toml"), "--out", str(folder / out)]
    words += ["--against", str(folder / "ref/reference.json"), *more]
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 1
    return read_result(folder / out / "result.json")


def test_a_benchmark_says_what_was_done(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = _run(tiny, "right", "--mllog")
    assert [check.passed for check in found.checks] == [True] * 3, found.checks
    # Only that the files are the test's own breaks the rules.
    assert len(found.rules.broken) == 1
    assert found.rules.changed == {}
    seconds = [run.seconds for run in found.runs if run.seconds is not None]
    assert found.figure.seconds == pytest.approx(of_times(seconds).centre)
    assert found.figure.dropped == 2
    assert [run.seed for run in found.runs] == [0, 1, 2, 3, 4]
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("FAILED: ")
    lines = (tiny / "right/mllog.txt").read_text().splitlines()
    logged = [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]
    keys = [line["key"] for line in logged]
    assert keys.count("run_start") == keys.count("run_stop") == 5
    assert keys.count("eval_accuracy") == 5 * 4


def test_the_schema_describes_the_file(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    validate = pytest.importorskip("jsonschema").validate
    invalid = pytest.importorskip("jsonschema").ValidationError
    content = _content(tiny)
    capsys.readouterr()
    cli.main(["benchmark", "--schema"])
    schema = json.loads(capsys.readouterr().out)
    validate(content, schema)
    with pytest.raises(invalid):
        validate(content | {"verdict": "perhaps"}, schema)


def test_a_planted_error_in_aggregation_fails(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Aggregation.mean

    def wrong(self: Aggregation, *given: Any) -> Any:
        return right(self, *given) * 1.00001

    monkeypatch.setattr(Aggregation, "mean", wrong)
    found = _run(tiny, "wrong", "--runs", "2")
    assert {check.name: check.passed for check in found.checks}["aggregation"] is False


def test_another_learning_rate_fails_and_is_named(tiny: Path) -> None:
    found = _run(tiny, "rate", "--runs", "3", "--lr", "0.035", "--precision", "fp32")
    assert {check.name: check.passed for check in found.checks}["learning"] is False
    assert found.rules.changed == {"lr": 0.035, "precision": "fp32"}
    assert found.rules.broken[:2] == ["lr is 0.035, not 0.05", "3 runs, not 5 or more"]


def test_a_result_passes_if_all_is_right_and_kept() -> None:
    benchmark = definition.read_benchmark("fedavg", "small", {"precision": "fp32"})
    assert result._broken(benchmark, 5, own=False) == []
    assert result._broken(benchmark, 4, own=False) == ["4 runs, not 5 or more"]
    slow = replace(benchmark, given={"rounds": 3})
    assert result._broken(slow, 5, own=False) == ["rounds is 3, not 30"]


def test_what_follows_from_other_ranks_is_allowed_but_not_fewer_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("server_batch", "denoiser_batch"):
        large = definition.read_benchmark("server", "small", {name: 1000})
        (told,) = large.broken()
        assert told.startswith(f"{name} is 1000, not ")
    # Three server ranks share batches of 51 evenly, and not those of 50.
    four = replace(launched(), size=4)
    monkeypatch.setattr(definition, "launched", lambda: four)
    ranks = definition.read_benchmark("server", "small", {"server_ranks": 3})
    assert ranks.changed().keys() > {"server_ranks"}
    assert not definition.read_benchmark(
        "fedavg", "small", {"overwrite": True}
    ).changed()
    assert ranks.broken() == []


@pytest.fixture
def shipped(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny benchmark as if it came with hpcfed, and a call of it that has passed."""
    (tiny / "tiny-small.json").write_text((tiny / "ref/reference.json").read_text())
    monkeypatch.setattr(definition, "FOLDER", tiny)
    monkeypatch.setattr(reference, "FOLDER", tiny)
    if not (tiny / "passed").exists():
        # It returns: exit code 0.
        cli.main(["benchmark", "tiny", "--out", str(tiny / "passed"), "--mllog"])
    return tiny / "passed"


def test_a_benchmark_that_comes_with_it_passes(shipped: Path) -> None:
    found = read_result(shipped / "result.json")
    assert found.verdict == "PASSED"
    assert found.rules.kept


def _finished(shipped: Path) -> running.Finished:
    counted = [read_run(running.run_folder(shipped, seed)) for seed in range(5)]
    return running.Finished(read_run(shipped / running.CHECK), counted, nan)


def test_one_failed_check_fails_the_benchmark(shipped: Path) -> None:
    benchmark = definition.read_benchmark("tiny", "small", {})
    stored = reference.read_reference(benchmark, None)
    finished = _finished(shipped)
    judged = result.result_of(benchmark, finished, stored, own=False)
    assert judged.verdict == "PASSED"
    curves = {seed: [one + 1 for one in curve] for seed, curve in stored.curves.items()}
    other = stored.model_copy(update={"curves": curves})
    judged = result.result_of(benchmark, finished, other, own=False)
    assert judged.verdict == "FAILED"
    assert judged.rules.kept


@pytest.mark.parametrize(
    ("energy", "cpu_energy", "server_ranks", "wh", "whose"),
    [
        ([3600.0] * 5, [nan] * 5, 0, 1.0, "GPUs"),
        ([nan] * 5, [7200.0] * 5, 0, 2.0, "CPUs"),
        ([3600.0] * 5, [7200.0] * 5, 0, 3.0, "GPUs and CPUs"),
        # A counter that did not move in one run, or was not there, counts in none.
        ([3600.0] * 4 + [0.0], [7200.0] * 5, 0, 2.0, "CPUs"),
        ([3600.0] * 5, [7200.0] * 4 + [nan], 0, 1.0, "GPUs"),
        ([3600.0] * 5, [nan] * 5, 1, 1.0, "GPUs of workers"),
        ([nan] * 4 + [3600.0], [nan] * 5, 0, None, None),
    ],
)
def test_energy_is_told_with_what_it_is_of(
    energy: list[float],
    cpu_energy: list[float],
    server_ranks: int,
    wh: float | None,
    whose: str | None,
    shipped: Path,
) -> None:
    finished = _finished(shipped)
    counted = []
    for record, joules, cpu_joules in zip(
        finished.counted, energy, cpu_energy, strict=True
    ):
        config = record.config | {"server_ranks": server_ranks}
        ranks = record.environment["ranks"] * (1 + server_ranks)
        counted.append(
            replace(
                record,
                energy=joules,
                cpu_energy=cpu_joules,
                config=config,
                environment=record.environment | {"ranks": ranks},
            )
        )
    benchmark = definition.read_benchmark("tiny", "small", {})
    stored = reference.read_reference(benchmark, None)
    found = result.result_of(
        benchmark, replace(finished, counted=counted), stored, own=False
    )
    assert (found.energy_wh, found.energy_of) == (wh, whose)
    row = table(group_of(a=found)).rows[0]
    assert str(row[6]) == (whose or DASH)
    (line,) = [line for line in execute._lines(found) if line.startswith("energy")]
    if wh is None:
        assert line == "energy: no counter that could be read in every run"
    else:
        assert f" Wh per run, {whose}, from just before its first round" in line


@pytest.mark.parametrize(
    ("dropped", "told"),
    [
        (0, "5 runs; "),
        (2, "5 runs, fastest and slowest dropped; "),
        (4, "5 runs, 2 fastest and 2 slowest dropped; "),
    ],
)
def test_dropped_runs_are_counted(dropped: int, told: str, shipped: Path) -> None:
    found = read_result(shipped / "result.json")
    figure = found.figure.model_copy(update={"dropped": dropped})
    assert told in execute._lines(found.model_copy(update={"figure": figure}))[-1]


def test_a_round_without_a_number_fails(shipped: Path) -> None:
    benchmark = definition.read_benchmark("tiny", "small", {})
    stored = reference.read_reference(benchmark, None)
    finished = _finished(shipped)
    finished.counted[2].rounds["train_loss"][1] = nan
    learning, *others = running.checks_of(benchmark, finished, stored)
    assert not learning.passed
    assert all(check.passed for check in others)


def test_a_new_call_removes_the_old_result_before_its_first_run(
    shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first_run(*_: object) -> None:
        raise InterruptedError

    old = [tmp_path / "result.json", tmp_path / "mllog.txt"]
    for file in old:
        file.write_text((shipped / file.name).read_text())
    (tmp_path / "run-0").mkdir()
    (tmp_path / "run-0/run.h5").touch()
    monkeypatch.setattr(running, "_run", first_run)
    words = ["benchmark", "tiny", "--out", str(tmp_path)]
    # A call that is refused leaves the old result.
    with pytest.raises(SystemExit):
        cli.main(words)
    assert all(file.exists() for file in old)
    with pytest.raises(InterruptedError):
        cli.main([*words, "--overwrite"])
    assert not any(file.exists() for file in old)


def test_ctrl_c_says_how_to_begin_anew(
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Stop, "after", lambda self, round: True)
    benchmark = definition.read_benchmark(str(tiny / "tiny.toml"), "small", {})
    with pytest.raises(SystemExit) as ended:
        running.records_of(benchmark.settings(seed=0, out=str(tmp_path / "x")))
    assert ended.value.code == 75
    said = capsys.readouterr().err
    assert "--overwrite, which begins anew" in said
    assert "--resume" not in said


# Comparison.


def group_of(**results: BenchmarkResult) -> SameWork:
    return SameWork("tiny", "small", [*results.items()])


def test_a_failed_result_is_neither_faster_nor_slower(tiny: Path) -> None:
    passed = BenchmarkResult.model_validate(_content(tiny) | {"verdict": "PASSED"})
    failed = passed.model_copy(update={"verdict": "FAILED"})
    for first, other, told in (
        (passed, passed.model_copy(), "1.000 [1.000, 1.000]"),
        (passed, failed, DASH),
        (failed, passed, DASH),
    ):
        row = table(group_of(a=first, b=other)).rows[1]
        assert str(row[3]) == told


def test_results_of_other_work_are_not_compared(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = _content(tiny) | {"benchmark": "fedavg"}
    (tiny / "a.json").write_text(json.dumps(content))
    content["settings"]["rounds"] = 31
    (tiny / "b.json").write_text(json.dumps(content))
    files = [str(tiny / "a.json"), str(tiny / "b.json")]
    assert "has rounds 31, and" in mistake(capsys, "benchmark", "--compare", *files)


def _content(tiny: Path) -> dict[str, Any]:
    if not (tiny / "right/result.json").exists():
        _run(tiny, "right")
    content: dict[str, Any] = json.loads((tiny / "right/result.json").read_text())
    return content


def _with_seconds(content: dict[str, Any], seconds: list[float]) -> BenchmarkResult:
    runs = []
    for run, value in zip(content["runs"], seconds, strict=True):
        runs.append(run | {"seconds": value})
    return BenchmarkResult.model_validate(content | {"runs": runs})


def test_a_tenth_is_told_apart_where_pairs_agree(tiny: Path) -> None:
    content = _content(tiny)
    work = [1.0, 2.0, 3.0, 1.5, 2.5]  # seeds differ, their ratios hardly
    noise = [1.01, 0.99, 1.0, 1.02, 0.98]
    first = _with_seconds(content, work)
    same = _with_seconds(content, [a * b for a, b in zip(work, noise, strict=True)])
    slow = [1.1 * a * b for a, b in zip(work, noise, strict=True)]
    slower = _with_seconds(content, slow)
    assert verdict_of(relative(first, same)) == "within noise"
    assert verdict_of(relative(first, slower)) == "slower"
    assert verdict_of(relative(slower, first)) == "faster"
    middle = exp(log(1.1) + (log(1.01) + log(0.99)) / 3)
    assert relative(first, slower).centre == pytest.approx(middle)
    assert verdict_of(Estimate(2.0)) == "within noise"


def test_machines_are_compared_on_a_terminal_and_on_a_page(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = _content(tiny)
    content["verdict"] = "PASSED"
    first, other, page = (tiny / name for name in ("1.json", "2.json", "machines.html"))
    first.write_text(json.dumps(content))
    content["machine"]["devices"] = ["<b>GPU</b>"]
    other.write_text(json.dumps(content))
    words = ["--compare", str(first), str(other)]
    cli.main(["benchmark", *words, "--html", str(page)])
    said = capsys.readouterr().out
    assert "1.000 [1.000, 1.000]" in said
    assert "within noise" in said
    text = page.read_text()
    assert "&lt;b&gt;GPU" in text
    assert "<b>GPU" not in text


def test_a_page_names_a_few_of_hundreds_of_devices_and_counts_failed_results_out(
    tiny: Path,
) -> None:
    passed = BenchmarkResult.model_validate(_content(tiny) | {"verdict": "PASSED"})
    machine = passed.machine.model_copy(
        update={
            "hosts": [f"node{n}" for n in range(128)],
            "devices": ["H200"] * 510 + ["A100", "cpu"],
            "cpus": ["Grace"] * 128,
        }
    )
    large = passed.model_copy(update={"machine": machine})
    assert devices_text(large) == "510 × H200, 1 × A100, 1 × cpu (Grace)"
    text = machines_page([group_of(small=passed, large=large)])
    assert "node0, node1, node2, node3, and 124 more" in text
    assert "not measured" in text
    assert "2 results, 2 PASSED" in text
    failed = passed.model_copy(update={"verdict": "FAILED"})
    assert "2 results, 0 PASSED" in machines_page([group_of(a=failed, b=failed)])
    # Names that all differ, as only a hostile file has them.
    strange = machine.model_copy(update={"devices": [str(n) for n in range(200_000)]})
    told = devices_text(large.model_copy(update={"machine": strange}))
    assert told == "1 × 0, 1 × 1, 1 × 2, 1 × 3, and 199996 more"


# What is shipped, and mistakes.


def test_every_benchmark_that_comes_with_it_can_start() -> None:
    found = definition.names()
    assert sorted(found) == ["adapters", "fedavg", "genefl", "ranks", "server"]
    for name in found:
        for size in ("small", "medium", "large"):
            benchmark = definition.read_benchmark(name, size, {})
            assert benchmark.broken() == []
            assert benchmark.checking().config.snapshot_every == 1
        small = definition.read_benchmark(name, "small", {})
        stored = reference.read_reference(small, None)
        assert len(stored.curves) >= 20
        rounds = small.settings().config.rounds
        assert {len(curve) for curve in stored.curves.values()} == {rounds}


def test_a_reference_of_other_work_is_refused(tiny: Path) -> None:
    stored = json.loads((tiny / "ref/reference.json").read_text())
    stored["work"]["lr"] = 0.1
    (tiny / "other-work.json").write_text(json.dumps(stored))
    benchmark = definition.read_benchmark(str(tiny / "tiny.toml"), "small", {})
    with pytest.raises(Exception, match=r"is for lr 0\.1, not 0\.05"):
        reference.read_reference(benchmark, tiny / "other-work.json")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "benchmark needs one NAME"),
        (["fedagv"], "did you mean 'fedavg'"),
        (["fedavg", "--size", "huge"], "unknown size of benchmark fedavg"),
        (["fedavg", "--runs", "1"], "--runs 1: must be from 2"),
        (["fedavg", "--runs", "999"], "has only"),
        (["fedavg", "--seed", "3"], "--seed: a benchmark sets it"),
        (["fedavg", "--seeds", "3"], "--seeds needs --reference"),
        (["fedavg", "--seeds", "0"], "--seeds needs --reference"),
        (["fedavg", "--out", ""], "argument --out: must be a path, got ''"),
        (["fedavg", "--by-turns", ""], "--by-turns: must be a path, got ''"),
        (["fedavg", "--size", ""], "unknown size of benchmark fedavg ''"),
        (["--list", "--runs", "0"], "--list does not take --runs"),
        (["fedavg", "--lr", "fast"], "--lr fast"),
        (["fedavg", "--leraning-rate", "1"], "unknown option"),
        (["fedavg", "--reference", "--lr", "1"], "must do the benchmark's own work"),
        (["fedavg", "--against", "nowhere.json"], "there is no reference"),
        (["fedavg", "--html", "page.html"], "--html needs --compare"),
        (["no-such.toml"], "cannot read no-such.toml"),
        (["fedavg", "ranks"], "got fedavg ranks"),
        (["fedavg", "--list"], "--list takes nothing else, got fedavg"),
        (["--schema", "--list"], "--list does not take --schema"),
        (["fedavg", "--reference", "--runs", "9"], "--reference does not take --runs"),
        (["fedavg", "--reference", "--by-turns", "."], "does not take --by-turns"),
        (["--compare", "a", "b", "--out", "c"], "--compare does not take --out"),
        (["fedavg", "--out", "file/below"], "--out file/below: file is a file"),
        (["--compare", "one.json"], "takes two result files"),
        (["--compare", "one.json", "two.json"], "cannot read one.json"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("in the way")
    assert said in mistake(capsys, "benchmark", *words)


ROOT_ALONE_FAILS = """
from hpcfed.benchmark.running import on_root
from hpcfed.cli import commands
from hpcfed.errors import UserError

def fail():
    raise UserError("only the root knows")

commands._dispatch = lambda words: on_root(fail)
commands.main(["benchmark"])
"""


def test_a_mistake_that_only_the_root_finds_ends_all_ranks(
    mpirun: Callable[..., Finished], tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(ROOT_ALONE_FAILS)
    found = mpirun(2, program, timeout=60)
    assert found.returncode == 2, found.stderr
    assert found.stderr.count("only the root knows") == 1


def test_other_ranks_end_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(launched(), rank=1)
    monkeypatch.setattr(running, "launched", lambda: other)
    for code in (0, 1, 2):
        monkeypatch.setattr(mpi, "from_root", lambda launch, own, code=code: code)
        if code:
            with pytest.raises(SystemExit) as ended:
                running.on_root(list)
            assert ended.value.code == code
        else:
            assert running.on_root(list) is None


def test_a_missing_reference_is_made_by_the_command_that_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.toml"
    file.write_text(TINY)
    said = mistake(capsys, "benchmark", str(file))
    assert f"make one: hpcfed benchmark {file} --size small --reference, then" in said


def test_a_quality_that_no_run_records_is_found_before_the_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.toml"
    file.write_text(TINY.replace("train_loss", "train_los"))
    assert "did you mean 'train_loss'" in mistake(capsys, "benchmark", str(file))
    assert list(tmp_path.iterdir()) == [file]


def test_one_page_has_all_benchmarks_of_all_machines(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = _content(tiny) | {"verdict": "PASSED"}
    files = []
    for machine, benchmark in (("old", "work"), ("old", "more"), ("new", "work")):
        content |= {"benchmark": benchmark, "energy_wh": 0.25}
        content["machine"]["cpus"] = [f"processor of {machine}"]
        path = tiny / "machines" / machine / f"{benchmark}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
        files.append(str(path))
    page = tiny / "all.html"
    cli.main(["benchmark", "--compare", *files, "--html", str(page)])
    said = capsys.readouterr().out
    assert "work small: seconds to the target accuracy" in said
    assert said.count("Ratios: pairs of runs with the same seed") == 1
    text = page.read_text()
    assert "2 benchmarks, 3 results, 3 PASSED" in text
    header, work, more = re.findall(r"<tr>(.*)</tr>", text)[:3]
    assert re.findall(r"<th[^>]*>([^<]*)", header) == ["benchmark", "old", "new"]
    assert work.count("data-number") == 2
    assert more.count("data-number") == 1 and f">{DASH}<" in more
    for which in ("work small, old", "work small, new", "more small, old"):
        assert text.count(f">{which}<") > 3, "figures, machine, software, verification"
    assert ">0.25<" in text and ">processor of new<" in text
    assert ">float32<" in text and ">tf32<" not in text, "as processors compute it"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"a.json": "x", "b.json": "x"}, ["a", "b"]),
        ({"a/result.json": "x", "b/result.json": "x"}, ["a", "b"]),
        ({"a/x.json": "x", "a/y.json": "y"}, ["a", "a"]),
        (
            {"a/x.json": "x", "a/y.json": "y", "b/x.json": "x", "b/y.json": "y"},
            ["a", "a", "b", "b"],
        ),
        ({"a/x/result.json": "x", "b/x/result.json": "x"}, ["a", "b"]),
    ],
    ids=str,
)
def test_results_are_named_by_what_tells_machines_apart(
    files: dict[str, str], expected: list[str], tiny: Path, tmp_path: Path
) -> None:
    for name, benchmark in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_content(tiny) | {"benchmark": benchmark}))
    groups = read_results([tmp_path / name for name in files])
    found = sorted(name for group in groups for name, _ in group.results)
    assert found == expected


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("seconds", ["0", "-1", "NaN", "Infinity", "1e-320", "1e308"])
def test_times_that_are_none_are_refused(
    seconds: str, first: bool, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = _content(tiny)
    content["runs"][0]["seconds"] = "HERE"
    bad = tiny / "bad.json"
    bad.write_text(json.dumps(content).replace('"HERE"', seconds))
    files = [str(bad), str(tiny / "right/result.json")]
    said = mistake(
        capsys, "benchmark", "--compare", *(files if first else reversed(files))
    )
    assert "runs: 0: seconds: input should be" in said


def test_a_page_that_cannot_be_written_is_one_line(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tiny / "good.json").write_text(json.dumps(_content(tiny)))
    words = ["--compare", *2 * [str(tiny / "good.json")], "--html"]
    said = mistake(capsys, "benchmark", *words, str(tiny / "good.json/page.html"))
    assert said.startswith("hpcfed: cannot write ")
    page = tiny / "new/folder/page.html"
    cli.main(["benchmark", *words, str(page)])
    assert page.is_file()


def test_a_page_or_another_call_does_not_replace_a_result(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slip of a shell's pattern names one: `--html *.json`."""
    monkeypatch.chdir(tiny)
    content = json.dumps(_content(tiny), indent=1)
    Path("mine").mkdir(exist_ok=True)
    for name in ("first.json", "mine/result.json"):
        Path(name).write_text(content)
    files = ["first.json", "mine/result.json"]
    capsys.readouterr()
    for words in (
        ["benchmark", "--compare", *files, "--html", "mine/result.json"],
        ["doctor", "--json", "mine/result.json"],
    ):
        said = mistake(capsys, *words)
        assert "mine/result.json is a benchmark's result, which would be lost" in said
    # Its runs are gone, as where only results are kept.
    said = mistake(capsys, "benchmark", "tiny.toml", "--out", "mine")
    assert "--out mine already holds result.json; add --overwrite" in said
    assert Path("mine/result.json").read_text() == content


def test_half_a_character_is_refused(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tiny / "half.json"
    bad.write_text(json.dumps(_content(tiny) | {"title": "\ud800"}))
    words = ["--compare", str(bad), str(bad), "--html", str(tiny / "half.html")]
    assert "invalid json" in mistake(capsys, "benchmark", *words)


@pytest.mark.parametrize(
    ("curves", "said"),
    [
        ({}, "curves: dictionary should have at least 1 item"),
        ({"0": []}, "curves: 0: list should have at least 1 item"),
        ({"1": [1.0], "2": [1.0]}, "seeds must be 0, 1, 2"),
        ({"0": [nan]}, "curves: 0: 0: input should be"),
        ({"0": [1e308, 1e308]}, "curves: 0: 0: input should be"),
    ],
)
def test_what_is_no_reference_is_refused(
    curves: dict[str, list[float]], said: str, tiny: Path
) -> None:
    stored = json.loads((tiny / "ref/reference.json").read_text())
    bad = tiny / "bad-reference.json"
    bad.write_text(json.dumps(stored | {"curves": curves}))
    benchmark = definition.read_benchmark(str(tiny / "tiny.toml"), "small", {})
    with pytest.raises(UserError, match=said):
        reference.read_reference(benchmark, bad)


def test_what_is_no_result_is_refused(tmp_path: Path) -> None:
    for text in ("[]", "{", '{"format": "hpcfed benchmark"}', "[" * 100_000):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(Exception, match="is not a benchmark's result"):
            read_result(tmp_path / "x.json")


def test_a_file_without_end_is_refused() -> None:
    with pytest.raises(UserError, match="/dev/zero is not a benchmark's result: it is"):
        read_result(Path("/dev/zero"))
