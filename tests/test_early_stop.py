"""Runs that end when nothing gets better."""

import io
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from hpcfed import cli
from hpcfed.analysis.render.show import show, show_seeds
from hpcfed.analysis.run_findings import read_files
from hpcfed.experiment.early_end import Patience, judged_figure
from hpcfed.experiment.evaluate import Evaluation
from hpcfed.experiment.run import run, run_setup
from hpcfed.results.stored import read_run, read_seeds
from tests.federations import assembled
from tests.runs import flags, mistake, one_reading, same, started
from tests.stopped_run import StopAfter

IDLE: dict[str, Any] = {
    "clients": 3,
    "rounds": 12,
    "lr": 1e-12,
    "early_stop": 4,
    "precision": "fp32",
}
"""Clients that learn nothing: the first evaluation stays the best."""


def evaluation(
    accuracy: float, of_global: float = nan, loss: float = nan
) -> Evaluation:
    return Evaluation(accuracy, np.array([accuracy]), of_global, loss)


def test_patience_counts_from_the_best() -> None:
    patience = Patience(2)
    ends = [patience.ends_with(evaluation(a)) for a in (0.1, 0.3, 0.2, 0.4, 0.4, 0.3)]
    assert ends == [False, False, False, False, False, True]
    assert not patience.ends_with(evaluation(0.5)), "a better one starts anew"
    assert not patience.ends_with(None)


def test_patience_goes_on_from_what_is_recorded() -> None:
    """Rounds between evaluations, which are NaN, do not count."""
    patience = Patience(2, [0.1, nan, 0.3, nan, nan, 0.2])
    assert patience.ends_with(evaluation(0.3))
    assert not Patience(None).ends_with(evaluation(0.0))


def test_what_a_run_is_judged_by() -> None:
    assert judged_figure(0.3, 0.5, 2.0) == 0.3
    assert judged_figure(nan, 0.5, 2.0) == 0.5
    assert judged_figure(nan, nan, 2.0) > judged_figure(nan, nan, 3.0)


def test_a_run_that_learns_nothing_ends_early(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_setup(assembled(**IDLE), tmp_path)
    said = capsys.readouterr().err
    assert "no better accuracy for 4 evaluations: stopped in round 5" in said
    record = read_run(tmp_path)
    assert (record.status, record.rounds_done) == ("complete", 5)
    text = io.StringIO()
    show(record, Console(file=text, width=200))
    assert "status: complete, 5 of 12 rounds, stopped early" in text.getvalue()


def test_a_run_that_learns_goes_on(tmp_path: Path) -> None:
    run_setup(
        assembled(clients=3, rounds=8, lr=0.02, early_stop=5), tmp_path, quiet=True
    )
    record = read_run(tmp_path)
    accuracy = record.rounds["accuracy"]
    assert record.rounds_done == 8 and accuracy.argmax() >= 2


@pytest.mark.parametrize("every", [1, 2])
def test_a_resumed_run_stops_in_the_same_round(every: int, tmp_path: Path) -> None:
    options = {**IDLE, "evaluate_every": every}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    run_setup(assembled(**options), whole, quiet=True)
    run_setup(assembled(**options), cut, quiet=True, stop=StopAfter(3))
    run_setup(assembled(**options, resume=str(cut), out=str(cut)), cut, quiet=True)
    assert read_run(cut).rounds_done == 5 * every
    same(whole, cut)


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize(
    "ending", [{"early_stop": 2}, {"target_accuracy": 25, "stop_at_target": True}]
)
def test_a_run_that_ended_early_can_be_made_longer(
    ending: dict[str, Any],
    killed: bool,
    tmp_path: Path,
) -> None:
    """It equals one that nothing has ended, and so does one that is killed on the way:
    a target that was reached ends it no more, and patience begins anew.
    """
    common = {"clients": 3, "participation": 0.4, "lr": 0.1, "precision": "fp64"}
    short, long = tmp_path / "short", tmp_path / "long"
    started(*flags(**common, **ending, rounds=8, out=short))
    ended = read_run(short)
    assert ended.status == "complete" and ended.rounds_done < 7
    more = ["--resume", short, "--rounds", 9]
    if killed:
        with pytest.raises(SystemExit):
            run(cli.parse_run(list(map(str, more))), StopAfter(ended.rounds_done + 1))
        more = ["--resume", short]
    started(*more)
    record = read_run(short)
    assert record.status == "complete"
    assert record.rounds_done > ended.rounds_done
    assert record.rounds_done == 9 or "early_stop" in ending
    started(*flags(**common, rounds=record.rounds_done, out=long))
    expected = read_run(long).rounds
    for name in ("accuracy", "global_loss", "train_loss", "bytes_up"):
        np.testing.assert_array_equal(record.rounds[name], expected[name])


def test_seeds_that_ended_apart_are_made_longer_by_themselves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = flags(clients=3, rounds=30, participation=0.4, early_stop=1, lr=0.1)
    out = started(*words, "--seeds", "0..2", "--out", tmp_path / "run")
    before = [record.rounds_done for record in read_seeds(out)]
    capsys.readouterr()
    with pytest.raises(SystemExit):
        cli.main(["run", "--resume", str(out), "--rounds", "31"])
    said = capsys.readouterr().err
    assert "resume each of them by itself: --resume" in said
    started("--resume", out / "seed-0", "--rounds", 31)
    after = [record.rounds_done for record in read_seeds(out)]
    assert after[0] > before[0] and after[1:] == before[1:]


def test_seeds_stop_by_themselves(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each has a status of its own, and the machine is told of until the last ends."""
    monkeypatch.setattr("hpcfed.experiment.run.sampling", one_reading)
    words = flags(clients=3, rounds=30, participation=0.4, early_stop=1, lr=0.1)
    # Whether a round is better may hang on one image, and in float32 on a rounding.
    words += ["--precision", "fp64"]
    together = started(*words, "--seeds", "0..2", "--out", tmp_path / "together")
    said = capsys.readouterr().err
    records = read_seeds(together)
    rounds = [record.rounds_done for record in records]
    assert len(set(rounds)) > 1 and max(rounds) < 30
    for record in records:
        at_work = [
            sum(done > round for done in rounds) for round in range(record.rounds_done)
        ]
        assert record.stacks.tolist() == at_work
        # All rounds are those of one process: the ends of others cut no figures short.
        assert (record.stacked_seeds, record.untimed) == (3, 0)
    text = io.StringIO()
    show_seeds(records, together, Console(file=text, width=300))
    for seed, done in enumerate(rounds):
        assert f"seed {seed}: status: complete, {done} of 30 rounds" in text.getvalue()
    fewer = f"From round {min(rounds) + 1} to {max(rounds)} fewer seeds advanced."
    assert fewer in text.getvalue()
    shortest_first = sorted(records, key=lambda record: record.rounds_done)
    telemetry = read_files(shortest_first).details.telemetry
    assert telemetry is not None
    assert telemetry.moments["rounds"][-1] == max(rounds)
    assert said.count("has stopped early in round") == 3
    words += ["--seed", "1", "--out", str(tmp_path / "alone")]
    assert read_run(started(*words)).rounds_done == rounds[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--early-stop 5 --rounds 6", "changes nothing without --rounds 7 or more"),
        ("--early-stop -1", "must be greater than or equal to 0"),
        ("--early-stop 3 --method pfedgpa", "--early-stop: the server of method"),
        ("--patience 3", "did you mean '--early-stop'?"),
    ],
)
def test_an_early_stop_that_cannot_be(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in mistake(capsys, "run", *words.split())
