"""What `hpcfed watch` finds in the files of runs and studies, and what logs say about the
pace of a run.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from hpcfed import cli
from hpcfed.analysis.render import watch as watching
from hpcfed.analysis.render.watch.frame import curves, run_frame
from hpcfed.analysis.render.watch.looking import LOST, SILENT, Looker
from hpcfed.analysis.render.watch.trials import StudyLooker
from hpcfed.cli import parse_run
from hpcfed.errors import UserError
from hpcfed.experiment.failures import Reporting
from hpcfed.experiment.progress import RunProgress, showing_life
from hpcfed.experiment.serving import what_follows
from hpcfed.results.claim import claimed, hold
from hpcfed.results.folder import (
    CLAIM,
    LEARNING,
    PLAN,
    SIGN,
    STUDY_CLAIM,
    check_out,
    empty,
)
from hpcfed.results.pace import pace, rest
from hpcfed.results.results import ResultsWriter
from hpcfed.results.signs import LearningSign, RunSign, leave_sign, read_sign
from hpcfed.results.stored import read_run
from hpcfed.results.study import write_listing
from hpcfed.runtime.timer import PHASES, Timer
from hpcfed.server.progress import ProgressLines, leaving_signs
from hpcfed.words import duration
from tests.runs import ending, mistake, without_reader

NAN = float("nan")
Words = Callable[..., str]


def begun(
    folder: Path, *, rounds: int = 8, seed: int = 0, **facts: Any
) -> ResultsWriter:
    """Return what writes a run of four clients on two ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"method": "fedavg", "dataset": "digits", "clients": 4, "seed": seed}
    settings |= {"rounds": rounds, "partition": "iid"}
    clients = {"rank": np.arange(4) % 2, "train_samples": np.ones(4, int)}
    return ResultsWriter(
        folder,
        settings=settings,
        environment={"command": ["hpcfed"]},
        clients=clients,
        ranks=2,
        facts={"model": "mlp", "columns": 3, **facts},
    )


def add_round(
    results: ResultsWriter, round: int, *, seconds: float = 2.0, together: int = 1
) -> None:
    """Write a round in which rank 1 trains three times as long as rank 0, and bring it
    to disk.
    """
    take_down(results, round, seconds=seconds, together=together)
    results.publish()


def take_down(
    results: ResultsWriter,
    round: int,
    *,
    seconds: float = 2.0,
    together: int = 1,
    elsewhere: bool = False,
    **more: float,
) -> None:
    """Write such a round, with values of further series; one that ran `elsewhere`, on
    another number of ranks, has no phases.
    """
    phases = np.zeros((2, len(PHASES)))
    phases[:, PHASES.index("train")] = [0.25 * seconds, 0.75 * seconds]
    phases[:, PHASES.index("evaluate")] = [0.75 * seconds, 0.25 * seconds]
    ranks = {"wall": np.full(2, seconds), "peak_memory": np.full(2, 2.0**20)}
    ranks |= {"wire": np.zeros(2), "halvings": np.zeros(2)}
    if elsewhere:
        phases[:] = NAN
    # Evaluated in every second round.
    accuracy = 0.5 + round / 100 if round % 2 else NAN
    values = {"seconds": seconds, "train_loss": 1 / (round + 1), "accuracy": accuracy}
    values |= {"cohort": 4, "bytes_up": 512.0, "bytes_down": 512.0, **more}
    results.write_round(
        round,
        values,
        client_accuracy=None,
        rank_values=ranks,
        phases=phases,
        together=together,
    )


@pytest.fixture
def words(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Words:
    """Run `hpcfed watch` in this process; return what it prints, and check its code."""
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments: object, code: int = 0) -> str:
        ended = 0
        try:
            cli.main(["watch", *map(str, arguments)])
        except SystemExit as end:
            ended = int(end.code or 0)
        said = capsys.readouterr()
        assert ended == code, said.err
        return said.out + said.err

    return run


def test_a_run_is_shown_with_pace_and_what_is_left(
    tmp_path: Path, words: Words
) -> None:
    results = begun(tmp_path / "run")
    # The first round warms up, and counts for nothing.
    for round in range(4):
        add_round(results, round, seconds=50.0 if not round else 2.0)
    leave_sign(tmp_path / "run" / SIGN, RunSign("train", 70.0))
    said = words(tmp_path / "run", "--once")
    for told in (
        "fedavg on digits (iid): 4 clients on 2 ranks",
        "running  round 4 of 8",
        "pace 2.00 s/round  ETA 0:08",
        "now: train, for 1:10",
        "clients, own test data  53.00%",
        "train loss  0.2500",
        "slowest rank 1: trains 1.50 × the mean",
        "sent 4.00 KiB",
    ):
        assert told in said, told
    assert "global model" not in said, "nothing is known about it"
    view = Looker().look(tmp_path / "run")
    assert view.phases() == {"train": 1.0, "evaluate": 1.0}
    assert view.left == 8.0 and not view.silent


def test_watching_ends_with_the_run(tmp_path: Path, words: Words) -> None:
    for status, code, hint in (
        ("complete", 0, "hpcfed show"),
        ("failed", 1, "hpcfed show"),
        ("stopped", 1, "hpcfed run --resume"),
    ):
        results = begun(tmp_path / status, rounds=1)
        add_round(results, 0)
        results.finish(status, error="no \x1b[31m memory" if code else "")
        said = words(tmp_path / status, code=code)
        # Not a terminal here: a line, and what to do next.
        assert f"  {status}  round 1/1  loss 1.0000" in said
        assert f"{hint} {tmp_path / status}" in said
        assert ("no � memory" in said or "no �[31m memory" in said) == bool(code)
        assert "\x1b" not in said


def test_lines_come_now_and_then_and_at_the_end(
    tmp_path: Path, words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first and the last look are told of a run that ends at the fourth look."""
    results, looks = begun(tmp_path, rounds=3), iter(range(3))

    def pause(seconds: float) -> None:
        assert seconds >= watching.LOOK_EVERY
        round = next(looks)
        add_round(results, round)
        if round == 2:
            results.finish("complete")

    monkeypatch.setattr(
        watching, "time", SimpleNamespace(**vars(time) | {"sleep": pause})
    )
    lines = words(tmp_path, "--every", 100).splitlines()
    assert len(lines) == 3 and "running  round 0/3" in lines[0]
    assert "complete  round 3/3" in lines[1] and "pace 2.00 s/round" in lines[1]


def test_the_end_of_a_watcher_is_not_the_runs(
    tmp_path: Path, words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_round(begun(tmp_path), 0)

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(
        watching, "time", SimpleNamespace(**vars(time) | {"sleep": interrupt})
    )
    assert "which goes on undisturbed" in words(tmp_path)


def test_a_reader_that_leaves_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is `head` in `hpcfed watch DIR --once | head -1`."""
    add_round(begun(tmp_path / "run"), 0)
    for more in (["--once"], []):
        with without_reader(monkeypatch):
            assert ending("watch", tmp_path / "run", *more) == 0
    begun(tmp_path / "bad").finish("failed")
    for more in (["--once"], []):
        with without_reader(monkeypatch):
            assert ending("watch", tmp_path / "bad", *more) == 1, "the verdict is known"


def test_a_folder_is_waited_for_and_a_strange_one_refused(
    tmp_path: Path,
    words: Words,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, asked = tmp_path / "frist", tmp_path / "first"
    run.mkdir()
    assert "holds neither a run nor a study" in mistake(capsys, "watch", run)
    assert "did you mean 'frist'?" in mistake(capsys, "watch", asked, "--once")
    (tmp_path / "file").touch()
    assert "is a file" in mistake(capsys, "watch", tmp_path / "file")
    assert "must be seconds above 0" in mistake(capsys, "watch", run, "--every", "0")
    monkeypatch.chdir(tmp_path)
    assert "there is no run in runs/" in mistake(capsys, "watch")

    steps = iter([asked.mkdir, lambda: begun(asked, rounds=1).finish("complete")])
    clock = vars(time) | {"sleep": lambda seconds: next(steps)()}
    monkeypatch.setattr(watching, "time", SimpleNamespace(**clock))
    said = words(asked)
    assert said.count("waiting for a run") == 1 and "complete  round 0/1" in said


def test_without_a_folder_the_newest_is_watched(
    tmp_path: Path, words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    for age, name in enumerate(("old", "new/seed-3", "older")):
        begun(tmp_path / "runs" / name, rounds=1).finish("complete")
        os.utime(tmp_path / "runs" / name, (1e9 + age % 2, 1e9 + age % 2))
        os.utime(tmp_path / "runs" / name.split("/")[0], (1e9 + age % 2, 1e9 + age % 2))
    (tmp_path / "runs/notes").mkdir()
    monkeypatch.chdir(tmp_path)
    assert "watching runs/new, the newest" in words("--once")


def test_a_silent_run_is_told_of_and_a_killed_one_ends(tmp_path: Path) -> None:
    """Its age counts from when we saw a file change, whatever the file's clock says."""
    import socket

    results = begun(tmp_path)
    results._environment["ranks"] = [{"host": socket.gethostname()}]
    del results._file["environment"]
    results._file["environment"] = json.dumps(results._environment)
    add_round(results, 0)
    looker = Looker()
    hour_ago = time.time() - 3600
    os.utime(tmp_path / "run.h5", (hour_ago, hour_ago))
    with claimed(tmp_path):
        view = looker.look(tmp_path)
        assert view.status == "running" and view.silent and view.age > 3500
        os.utime(tmp_path / "run.h5", (hour_ago + 5, hour_ago + 5))
        view = looker.look(tmp_path)
        assert not view.silent and view.age < SILENT
    (tmp_path / ".claim").touch()
    assert Looker().look(tmp_path).status == "interrupted", "nobody holds its claim"


def test_seeds_are_shown_together_as_far_as_all_have_come(
    tmp_path: Path, words: Words
) -> None:
    for seed, rounds in {3: 4, 11: 2}.items():
        results = begun(tmp_path / f"seed-{seed}", seed=seed, stacked_seeds=2)
        for round in range(rounds):
            add_round(results, round, seconds=1.0, together=2)
    said = words(tmp_path, "--once")
    assert "2 seeds at once" in said and "round 2 of 8" in said
    assert "ETA 0:06" in said
    rows = [line.split() for line in said.splitlines() if ", round " in line]
    assert [(row[0], row[3], row[4]) for row in rows] == [
        ("3", "4", "53.00%"),
        ("11", "2", "51.00%"),
    ]


def test_a_seed_that_has_ended_early_does_not_hold_the_others_up(
    tmp_path: Path,
) -> None:
    """The last accuracies of two and of four rounds are 0.51 and 0.53."""
    writers = {}
    for seed, rounds in {3: 2, 11: 4}.items():
        # The second was made longer.
        folder, planned = tmp_path / f"seed-{seed}", 6 if seed == 3 else 8
        writers[seed] = begun(folder, rounds=planned, seed=seed, stacked_seeds=2)
        for round in range(rounds):
            add_round(writers[seed], round, seconds=1.0 if round < 2 else 3.0)
    writers[3].finish("complete")
    console = Console(width=120)
    with console.capture() as caught:
        console.print(run_frame(Looker().look(tmp_path), console))
    # Two rounds of one and four of the other, of 1024 bytes each.
    assert "sent 6.00 KiB" in caught.get()
    view = Looker().look(tmp_path)
    assert (view.status, view.done, view.left) == ("running", 4, 4 * (1 + 3 + 3) / 3)
    # Of the rounds since the other ended, too: half of 1, 3 and 3 s.
    assert view.phases() == {"train": 3.5 / 3, "evaluate": 3.5 / 3}
    np.testing.assert_allclose(view.series("accuracy"), [NAN, 0.51, NAN, 0.53])
    assert view.last("accuracy") == pytest.approx(0.52)
    writers[11].finish("complete")
    view = Looker().look(tmp_path)
    assert (view.status, view.done) == ("complete", 4)


def test_the_pace_is_that_of_the_ranks_that_a_run_goes_on_with(tmp_path: Path) -> None:
    """Twelve rounds of 50 s on other ranks, a first one here of 9 s, and two of 2 s."""
    results = begun(tmp_path, rounds=20)
    for round, seconds in enumerate([50.0] * 12 + [9.0, 2.0, 2.0]):
        take_down(results, round, seconds=seconds, elsewhere=round < 12)
    results.publish()
    view = Looker().look(tmp_path)
    assert (view.pace, view.left) == (2.0, 10.0)
    assert view.phases() == {"train": 1.0, "evaluate": 1.0}


def test_what_the_server_learns_is_shown(tmp_path: Path, words: Words) -> None:
    """Signs are left now and then, and removed at the end."""
    add_round(begun(tmp_path), 0)
    losses = torch.tensor([4.0, NAN, 0.5])
    with leaving_signs(tmp_path / LEARNING) as leave:
        leave("denoiser", 1, 3, losses)
        assert read_sign(tmp_path / LEARNING, LearningSign) == LearningSign(
            "denoiser", 1, 3, 4.0, 0.0
        )
        leave("denoiser", 2, 3, losses)
        sign = read_sign(tmp_path / LEARNING, LearningSign)
        assert sign is not None and sign.step == 1, "too soon for another one"
        said = words(tmp_path, "--once")
        assert "the server learns: denoiser step 1 of 3, loss 4, ETA ?" in said
        leave("autoencoder", 3, 9, losses)  # steps 1 and 2 were made by an earlier run
        said = " ".join(words(tmp_path, "--once").split())
        assert "autoencoder step 3 of 9, loss 0.5 (learning resumed at step 2)" in said
    assert read_sign(tmp_path / LEARNING, LearningSign) is None
    assert LearningSign("denoiser", 101, 301, None, 50.0).left == 100.0
    assert LearningSign("denoiser", 101, 301, None, 50.0, resumed=50).left == 200.0


def test_the_server_tells_its_loss_and_what_is_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 10.0, 11.0, 20.0])
    monkeypatch.setattr("hpcfed.server.progress.time.monotonic", lambda: next(clock))
    lines, losses = ProgressLines(visible=True), torch.tensor([3.0, 2.0, 1.5, 1.0])
    for step in range(1, 5):
        lines("denoiser", step, 4, losses)
    assert capsys.readouterr().err.splitlines() == [
        "server: denoiser step 2/4  loss 2  ETA 0:20",
        "server: denoiser step 4/4  loss 1",
    ]


def test_signs_of_life_last_as_long_as_the_run(tmp_path: Path) -> None:
    timer, seen = Timer(torch.device("cpu")), threading.Event()

    def phase() -> str:
        seen.set()
        return "train"

    with showing_life([tmp_path], Reporting(phase), [timer], visible=False):
        assert not seen.is_set(), "the root alone shows them"
    with showing_life([tmp_path], Reporting(phase), [timer], visible=True):
        assert seen.wait(5)
        end = time.monotonic() + 5
        while not (tmp_path / SIGN).exists() and time.monotonic() < end:
            time.sleep(0.001)
        sign = read_sign(tmp_path / SIGN, RunSign)
        assert sign is not None and sign.phase == "train"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[1]",
        '{"phase": 3, "seconds": 1}',
        '{"phase": "train"}',
        "[" * 10_000,
        '{"phase": "\\ud800", "seconds": 1}',
        "x" * 100_000,
    ],
)
def test_what_is_no_sign_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / SIGN).write_text(content)
    assert read_sign(tmp_path / SIGN, RunSign) is None


def test_signs_are_the_runs_own_files(tmp_path: Path) -> None:
    """--overwrite removes what a killed run has left; a link is refused, and never
    written through.
    """
    run, victim = tmp_path / "run", tmp_path / "victim"
    run.mkdir()
    victim.write_text("mine")
    for name in (SIGN, LEARNING, f".{SIGN}.host.1.tmp"):
        (run / name).write_text("{}")
    check_out(run, overwrite=True)
    empty(run)
    assert not list(run.iterdir())
    (run / SIGN).symlink_to(victim)
    leave_sign(run / SIGN, RunSign("train", 0.0))
    assert victim.read_text() == "mine" and not (run / SIGN).is_symlink()


def study(folder: Path, *names: str) -> None:
    trials = [f"{name}/repeat-0" for name in names]
    folder.mkdir()
    (folder / PLAN).write_text(json.dumps({"title": "a sweep", "trials": trials}))


def ended(trial: Path, status: str, *, seconds: float, error: str = "") -> None:
    trial.parent.mkdir(parents=True, exist_ok=True)
    told = {"status": status, "error": error, "seconds": seconds, "command": ""}
    trial.with_suffix(".json").write_text(json.dumps(told))


def test_a_study_is_shown_by_its_trials(tmp_path: Path, words: Words) -> None:
    """Two that are done took 10 and 20 s, one runs with 8 s left, and two wait: 38 s."""
    out = tmp_path / "out"
    study(out, "a", "b", "bad", "now", "next", "last")
    at = {name: out / f"points/{name}/repeat-0" for name in ("a", "b", "bad", "now")}
    for name, seconds in {"a": 10.0, "b": 20.0}.items():
        results = begun(at[name], rounds=2)
        for round in range(2):
            add_round(results, round)
        results.finish("complete")
        ended(at[name], "complete", seconds=seconds)
    ended(at["bad"], "failed", seconds=1.0, error="exit code 2: \x1b[2J no such file")
    results = begun(at["now"])
    for round in range(4):
        add_round(results, round)
    view = StudyLooker().look(out)
    assert view.counts() == "2 of 6 complete, 1 running, 2 waiting, 1 failed"
    assert view.left == 8 + 2 * 15 and view.status == "running"
    said = words(out, "--once")
    rows = {line.split()[0]: line for line in said.splitlines() if "/repeat-0" in line}
    assert "complete" in rows["a/repeat-0"] and "10.0 s" in rows["a/repeat-0"]
    assert "4/8" in rows["now/repeat-0"] and "53.00%" in rows["now/repeat-0"]
    assert "exit code 2" in rows["bad/repeat-0"] and "\x1b" not in said
    assert "ETA about 0:38" in said
    for name in ("now", "next", "last"):
        ended(out / f"points/{name}/repeat-0", "complete", seconds=1.0)
    said = words(out, code=1)
    assert "5 of 6 complete, 1 failed" in said and f"hpcfed report {out}" in said


def test_a_study_that_was_stopped_is_over(tmp_path: Path, words: Words) -> None:
    """It counts as stopped once its trial could have gone on, and did not."""
    out = tmp_path / "out"
    study(out, "now", "next")
    results = begun(out / "points/now/repeat-0")
    add_round(results, 0)
    results.finish("stopped")
    view = StudyLooker().look(out)
    assert (view.status, view.counts()) == (
        "running",
        "0 of 2 complete, 1 running, 1 waiting",
    )
    for path in (out / "points/now/repeat-0").iterdir():
        long_ago = time.time() - 2 * SILENT
        os.utime(path, (long_ago, long_ago))
    view = StudyLooker().look(out)
    assert (view.status, view.over) == ("stopped", True)
    with pytest.raises(
        UserError, match=r"runs without study.h5; make it: hpcfed study"
    ):
        read_run(out)
    said = words(out, code=1)
    assert "0 of 2 complete, 1 stopped, 1 waiting" in said
    assert "start the study again to go on" in said


def test_a_run_starts_only_while_it_is_claimed(tmp_path: Path, words: Words) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    said = words(run, "--once")
    assert "starting" not in said and "there is no run.h5, and no process here" in said
    assert f"hpcfed run --resume {run}" in " ".join(said.split())
    for claim in (run, run / "seed-1"):
        claim.mkdir(exist_ok=True)
        with claimed(claim):
            assert "a run is starting" in words(run, "--once")


def aged(folder: Path, seconds: float) -> None:
    """Let nothing have happened in a folder, nor in its log, for so long."""
    then = time.time() - seconds
    for path in (folder, *folder.parent.glob(f"{folder.name}.*"), *folder.iterdir()):
        os.utime(path, (then, then))


def test_a_run_that_died_before_its_first_round_is_told_with_its_log(
    tmp_path: Path, words: Words
) -> None:
    run = tmp_path / "lr=0.1"
    run.mkdir()
    (run / CLAIM).touch()  # nobody holds it
    (tmp_path / "lr=0.1.log").write_text("killed\n")
    aged(run, 3600.0)
    line = watching.run_line(Looker().look(run))
    for said in (line, " ".join(words(run, "--once").split())):
        assert "no process here is writing one" in said
        assert "nothing has happened for 1:00:0" in said
        assert f"lookat{run}.log" in "".join(said.split())
    with claimed(run):
        aged(run, 3600.0)
        line = watching.run_line(Looker().look(run))
        assert "a run is starting" in line and "nothing has happened for 1:00" in line
        assert "look at" not in line
    (run / CLAIM).touch()
    (run / "error-0.txt").write_text("MemoryError: no room\nTraceback\n")
    said = words(run, code=1)
    assert "MemoryError: no room" in said and "error-0.txt" in said


@pytest.mark.parametrize(
    ("status", "told"),
    [("complete", "complete"), ("failed", "failed"), ("running", "stopped")],
)
def test_a_point_that_leaves_no_outcome_does_not_run_for_ever(
    status: str, told: str, tmp_path: Path
) -> None:
    """Its rounds are shown while they are written, whatever the outcomes say."""
    out = tmp_path / "out"
    study(out, "now", "next")
    now = out / "points/now/repeat-0"
    results = begun(now)
    add_round(results, 0)
    view = StudyLooker().look(out)
    assert view.counts() == "0 of 2 complete, 1 running, 1 waiting"
    if status != "running":
        results.finish(status, error="killed" if status == "failed" else "")
    for seconds in (2 * SILENT, 2 * LOST):
        aged(now, seconds)
        (trial, _) = StudyLooker().look(out).trials
        goes_on = status == "running" and seconds < LOST
        assert trial.status == ("running" if goes_on else told)
        assert trial.error == ("killed" if status == "failed" else "")
    # Its process is still there.
    (now / CLAIM).unlink(missing_ok=True)
    with claimed(now):
        aged(now, 2 * LOST)
        assert StudyLooker().look(out).trials[0].status == "running"


def test_a_point_that_died_as_it_started_does_not_start_for_ever(
    tmp_path: Path,
) -> None:
    """Jobs run the study, so its own process tells nothing."""
    out = tmp_path / "out"
    study(out, "now", "next")
    now = out / "points/now/repeat-0"
    now.mkdir(parents=True)
    now.with_suffix(".log").write_text("Killed\n")
    assert StudyLooker().look(out).status == "running"
    aged(now, 2 * LOST)
    view = StudyLooker().look(out)
    assert view.counts() == "0 of 2 complete, 1 stopped, 1 waiting"
    with open(now.with_suffix(".log")) as log:
        hold(log.fileno())
        assert StudyLooker().look(out).trials[0].status == "running"


def test_points_that_ran_by_their_numbers_are_a_study(tmp_path: Path) -> None:
    (tmp_path / "points/lr=0.1/repeat-0").mkdir(parents=True)
    with pytest.raises(UserError, match="study whose runs are not gathered yet"):
        read_run(tmp_path)


@pytest.mark.parametrize("begun_already", [False, True])
def test_a_study_without_its_process_is_over(
    begun_already: bool, tmp_path: Path, words: Words
) -> None:
    """Interrupted between two trials, or before the first round of one; not while a
    process of it is at work, nor if another machine or jobs of Slurm run it.
    """
    out = tmp_path / "out"
    study(out, "now", "next")
    log = out / "points/now/repeat-0.log"
    log.parent.mkdir(parents=True)
    if begun_already:
        log.touch()
    for host in ("", "elsewhere"):
        write_listing(out, "a sweep", ["now/repeat-0", "next/repeat-0"], host=host)
        assert StudyLooker().look(out).status == "running"
    here = socket.gethostname()
    write_listing(out, "a sweep", ["now/repeat-0", "next/repeat-0"], host=here)
    with claimed(out, STUDY_CLAIM):
        assert StudyLooker().look(out).status == "running"
    if begun_already:
        with open(log, "a") as file:
            hold(file.fileno())
            assert StudyLooker().look(out).status == "running"
    (out / STUDY_CLAIM).touch()  # as if it had been killed
    view = StudyLooker().look(out)
    assert (view.status, view.over) == ("stopped", True)
    counts = "0 of 2 complete, 2 waiting"
    if begun_already:
        counts = "0 of 2 complete, 1 stopped, 1 waiting"
    said = words(out, "--once", code=1)
    assert counts in said and "start the study again to go on" in said
    rows = [line.split()[:2] for line in said.splitlines() if "/repeat-0" in line]
    first = "stopped" if begun_already else "waiting"
    assert rows == [["now/repeat-0", first], ["next/repeat-0", "waiting"]]


def test_a_plan_leads_nowhere_else(tmp_path: Path) -> None:
    begun(tmp_path / "elsewhere/repeat-0", rounds=1).finish("complete")
    out = tmp_path / "out"
    study(out, "../../elsewhere", "..", ".hidden", "a/../..", "good")
    assert [trial.name for trial in StudyLooker().look(out).trials] == ["good/repeat-0"]
    (out / PLAN).write_text("[" * 100_000)
    ended(out / "points/begun/repeat-0", "complete", seconds=1.0)
    assert [trial.name for trial in StudyLooker().look(out).trials] == [
        "begun/repeat-0"
    ], "without a plan those are there that have begun"


def test_curves_go_where_the_values_are() -> None:
    """A rise from the lower left to the upper right, in two by two cells of 2 × 4 dots;
    what is not known is passed over.
    """
    lines, low, high = curves(
        {"red": np.array([0.0, NAN, 3.0])}, width=2, height=1, ascii_only=False
    )
    assert (low, high) == (0.0, 3.0)
    # One dot up from column to column, each joined to the last: ⣠⠞ without gaps.
    assert [ord(letter) - 0x2800 for letter in lines[0].plain] == [
        0x40 | 0x20 | 0x80,
        0x02 | 0x04 | 0x08 | 0x10,
    ]
    flat, low, high = curves(
        {"red": np.array([5.0])}, width=3, height=2, ascii_only=True
    )
    assert [line.plain for line in flat] == ["*  ", "   "] and low == high == 5.0
    nothing, low, _ = curves(
        {"red": np.full(4, NAN)}, width=2, height=1, ascii_only=True
    )
    assert nothing[0].plain == "  " and np.isnan(low)


def test_a_terminal_without_unicode_gets_letters(tmp_path: Path) -> None:
    import io

    from hpcfed.analysis.render.watch.frame import run_frame

    results = begun(tmp_path)
    for round in range(4):
        add_round(results, round)
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding="ascii", errors="replace") as file:
        console = Console(file=file, width=100)
        console.print(run_frame(Looker().look(tmp_path), console))
        file.flush()
        said = raw.getvalue().decode()
    assert "*" in said and "round 4 of 8" in said


def test_pace_and_durations() -> None:
    assert pace([9.0, 1.0, 3.0]) == 2.0, "the first round warms up"
    assert pace([9.0]) == 9.0 and np.isnan(pace([])) and np.isnan(rest([], 3))
    # Of forty later rounds the last twenty count.
    assert pace([9.0, *[5.0] * 20, *[1.0] * 20]) == 1.0
    # One round in which the server learns says nothing of others, but may come again.
    assert pace([1.0, 1.0, 1.0, 97.0]) == 1.0 and rest([1.0, 1.0, 1.0, 97.0], 2) == 66
    told = [duration(seconds) for seconds in (7.4, 59.6, 3723, 274_000, NAN)]
    assert told == ["0:07", "1:00", "1:02:03", "3 d 04:06", "?"]


def test_log_lines_come_at_first_at_once_and_then_every_ten_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("hpcfed.experiment.progress.time.monotonic", lambda: now[0])
    follows = what_follows(parse_run(["--method", "pfedgpa"]))
    assert not what_follows(parse_run([]))
    assert not what_follows(parse_run(["--method", "pfedgpa", "--server-every", "1"]))
    progress = RunProgress(100, visible=True, then=follows)
    for round in range(40):
        now[0] += 1.0
        accuracy = 0.25 if round == 1 else NAN
        values = {"train_loss": 2.0, "seconds": 1.0, "accuracy": accuracy}
        # The third round is on disk only with the fourth.
        progress.round(round, values, on_disk=round != 2)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == [
        f"{round}/100" for round in (1, 2, 4, 14, 24, 34)
    ]
    assert (
        lines[1]
        == "round 2/100  loss 2.0000  clients 25.00%  pace 1.00 s/round  ETA 1:38, then "
        "the server learns"
    )
    # What was last evaluated is told with its round.
    assert "clients 25.00% (round 2)  pace 1.00 s/round  ETA 1:06, " in lines[-1]
