"""Points of a study that advance as one process are the runs of these points, one by
one: the same numbers, files and ends.
"""

import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from hpcfed import cli
from hpcfed.cli.commands import main
from hpcfed.clients.lockstep import Lockstep, Stopped
from hpcfed.errors import UserError
from hpcfed.experiment.run import run_stacked
from hpcfed.methods import fedavg
from hpcfed.results import checkpoints
from hpcfed.results.claim import claimed, hold, is_held
from hpcfed.results.folder import HALF_LEARNT, STUDY_CLAIM, check_export
from hpcfed.results.stored import is_complete, read_run
from hpcfed.results.study import read_gathered, read_outcome
from hpcfed.runtime.signals import STOPPED, Stop
from hpcfed.runtime.timer import Timer
from hpcfed.studies import attempt, execute
from hpcfed.studies.plan import Trial, points, read_study, trials
from hpcfed.studies.stacks import (
    Begun,
    begun,
    describe,
    in_common,
    read_stack,
    stacked,
    write_stack,
)
from tests.runs import assert_same_run, mistake, started

CPU = torch.device("cpu")
TINY = """
[common]
dataset = "synthetic"
synthetic_shape = "1x4x4"
train_per_client = 20
model = "mlp"
clients = 5
participation = 0.6
rounds = 3
epochs = 1
precision = "fp64"
snapshot_every = 1
checkpoint_every = 1
device = "cpu"
"""
SIX = TINY + "[sweep]\nlr = [0.02, 0.1, 0.4]\nalpha = [0.3, 1.0]\n"


def trials_of(folder: Path, text: str) -> list[Trial]:
    file = folder / "study.toml"
    file.write_text(text)
    study = read_study(file)
    return trials(study, points(study, file), folder / "out")


def numbers(of: Sequence[Any]) -> list[list[int]]:
    return [[trial.point.number for trial in stack.trials] for stack in of]


def test_points_that_differ_in_lr_seed_or_alpha_alone_are_stacked(
    tmp_path: Path,
) -> None:
    """Four points of each number of clients, but those of pFedGPA, whose server has a
    model.
    """
    every = trials_of(
        tmp_path,
        TINY.replace("clients = 5\n", "") + "[variants.plain]\n[variants.server]\n"
        "method = 'pfedgpa'\nserver = 'small'\n"
        "[sweep]\nlr = [0.1, 0.2]\nseed = [1, 2]\nclients = [4, 6]\n",
    )
    assert len(every) == 16
    made = stacked(every, 32)
    assert numbers(made) == [[0, 2, 4, 6], [1, 3, 5, 7], *[[n] for n in range(8, 16)]]
    lines = describe(made)
    assert lines[0] == "8 of 16 trials advance together, in 2 stacks"
    assert lines[-1] == (
        "   alone: server,lr=0.1,seed=1,clients=4/repeat-0 and 7 more: "
        "the server's model of pfedgpa serves one run at a time"
    )
    assert numbers(stacked(every[:8], 3)) == [[0, 2], [4, 6], [1, 3], [5, 7]]


def test_a_point_that_nobody_is_like_says_why(tmp_path: Path) -> None:
    every = trials_of(tmp_path, TINY + "[sweep]\nmomentum = [0.0, 0.9]\nranks = [1]\n")
    assert [stack.alone for stack in stacked(every, 32)] == [
        "others differ in momentum"
    ] * 2
    one = stacked(every[:1], 32)
    assert [stack.alone for stack in one] == ["there is no other"]


def test_every_seed_of_a_trial_counts(tmp_path: Path) -> None:
    text = TINY + "seeds = '0..3'\n[sweep]\nlr = [0.1, 0.2, 0.3, 0.4]\n"
    every = trials_of(tmp_path, text)
    assert numbers(stacked(every, 8)) == [[0, 1], [2, 3]]
    made = stacked(every, 3)
    assert numbers(made) == [[0], [1], [2], [3]]
    assert "--stack is too small" in describe(made)[-1]


def test_repeats_of_a_point_are_apart(tmp_path: Path) -> None:
    every = trials_of(tmp_path, "repeats = 2\n" + TINY + "[sweep]\nlr = [0.1, 0.2]\n")
    assert numbers(stacked(every, 32)) == [[0, 1], [0, 1]]


def words(**values: object) -> list[str]:
    shared: dict[str, object] = {
        "dataset": "synthetic",
        "synthetic_shape": "1x4x4",
        "train_per_client": 20,
        "model": "mlp",
        "clients": 5,
        "participation": 0.6,
        "rounds": 2,
        "precision": "fp64",
        "snapshot_every": 1,
        "device": "cpu",
    }
    found = []
    for name, value in (shared | values).items():
        found += [f"--{name.replace('_', '-')}", str(value)]
    return found


def run_points(every: Sequence[list[str]]) -> list[Path]:
    return run_stacked([cli.parse_run(one) for one in every], quiet=True)


@pytest.mark.parametrize(
    "more",
    [
        {"epochs": 1},
        {"epochs": 1, "lr_schedule": "cosine", "lr_schedule_by": "step"},
        {"epochs": 1, "engine": "loop", "optimiser": "adam", "method": "fedper"},
    ],
    ids=["sgd", "schedule", "adam-loop"],
)
def test_points_at_once_are_the_same_runs(
    more: dict[str, object], tmp_path: Path
) -> None:
    grid = [(lr, alpha) for lr in (0.02, 0.1, 0.4) for alpha in (0.3, 1.0)]
    together = []
    for lr, alpha in grid:
        out = tmp_path / f"together/{lr}-{alpha}"
        together.append(words(lr=lr, alpha=alpha, out=out, **more))
    # Of all points where it is cheapest, else of the first and the last.
    compared = grid if more == {"epochs": 1} else [grid[0], grid[-1]]
    for (lr, alpha), folder in zip(grid, run_points(together), strict=True):
        if (lr, alpha) not in compared:
            continue
        out = tmp_path / f"alone/{lr}-{alpha}"
        alone = started(*words(lr=lr, alpha=alpha, out=out, **more))
        assert_same_run(folder, alone, tolerance=1e-12)
        assert read_run(folder).config["lr"] == lr
        made = {path.relative_to(folder) for path in folder.rglob("*")}
        assert made == {path.relative_to(alone) for path in alone.rglob("*")}


def test_shares_weights_and_schedules_at_once_are_the_same_runs(tmp_path: Path) -> None:
    """Selection, supplement and weights are each run's own, whatever others have."""
    points: dict[str, dict[str, object]] = {
        "small": {"supplement_share": 0.1},
        "large": {"supplement_share": 0.5, "supplement_below": 30},
        "equal": {"supplement_share": 0.5, "weights": "uniform"},
        "all": {"schedule": "constant", "rho_max": 5},
        "slow": {"schedule_rounds": 2},
    }
    shared: dict[str, object] = {"method": "genfed", "epochs": 1, "batch_size": 20}
    shared |= {"validation": 20, "supplement_below": "mean", "supplement_share": 0.2}
    together = []
    for name, options in points.items():
        given = words(out=tmp_path / "together" / name, **(shared | options))
        together.append([*given, "--supplement"])
    common = [in_common(cli.parse_run(one)) | {"out": ""} for one in together]
    assert all(one == common[0] for one in common), "the study's points are a stack"
    different = set()
    for folder, options in zip(run_points(together), points.values(), strict=True):
        different.add(tuple(read_run(folder).rounds["global_loss"]))
        out = tmp_path / "alone" / folder.name
        given = words(out=out, **(shared | options))
        alone = started(*given, "--supplement")
        assert_same_run(folder, alone, tolerance=1e-12)
    assert len(different) == len(points), "each option does something"


def test_points_with_several_seeds_each(tmp_path: Path) -> None:
    shared: dict[str, object] = {"seeds": "3,1", "epochs": 1, "rounds": 1}
    every = [words(lr=lr, out=tmp_path / f"{lr}", **shared) for lr in (0.1, 0.2)]
    for folder, lr in zip(run_points(every), (0.1, 0.2), strict=True):
        alone = started(*words(lr=lr, out=tmp_path / f"alone-{lr}", **shared))
        for seed in (1, 3):
            assert_same_run(
                folder / f"seed-{seed}", alone / f"seed-{seed}", tolerance=1e-12
            )
        assert read_run(folder / "seed-1").stacked_seeds == 4


def failing(lr: float, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have runs with this rate fail in their second round."""
    original = fedavg.round

    def round(fed: Any, state: Any, cohort: Any) -> Any:
        if fed.config.lr == lr and cohort.round == 1:
            raise error
        return original(fed, state, cohort)

    monkeypatch.setattr(fedavg, "round", round)


def test_a_point_that_fails_ends_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = (0.1, 0.2, 0.4)
    alone = {lr: started(*words(lr=lr, out=tmp_path / f"a-{lr}")) for lr in rates[::2]}
    failing(0.2, FloatingPointError("planted failure"), monkeypatch)
    folders = run_points([words(lr=lr, out=tmp_path / f"{lr}") for lr in rates])
    for lr, folder in zip(rates[::2], folders[::2], strict=True):
        assert_same_run(folder, alone[lr], tolerance=1e-12)
    failed = read_run(folders[1])
    assert failed.status == "failed" and failed.rounds_done == 1
    assert "planted failure (in lr 0.2)" in failed.error
    assert "hpcfed: rank 0" in capsys.readouterr().err


def test_too_little_memory_is_no_points_own_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(0.2, torch.OutOfMemoryError("planted"), monkeypatch)
    with pytest.raises(SystemExit) as ended:
        run_points([words(lr=lr, out=tmp_path / f"{lr}") for lr in (0.1, 0.2)])
    assert ended.value.code == 1
    assert read_run(tmp_path / "0.1").status == "failed"


class Rank:
    """Programs of one of two ranks, in a thread. Each program calls four collectives;
    one program fails before its third, on the second rank alone.
    """

    def __init__(self, number: int, exchange: Callable) -> None:
        names = ["a", "b", "c"]
        engine: Any = type("Engine", (), {"layout": None})()
        self._number = number
        self._exchange = partial(exchange, number)
        self._lockstep = Lockstep(engine, names, [Timer(CPU) for _ in names])
        self.called: list[tuple[int, int]] = []
        self.failed: dict[int, Exception] = {}

    def run(self) -> None:
        self._lockstep.run(
            [partial(self._program, number) for number in range(3)],
            CPU,
            on_failure=self.failed.__setitem__,
            exchange=self._exchange,
        )

    def _program(self, number: int) -> None:
        for collective in range(4):
            if (self._number, number, collective) == (1, 1, 2):
                raise ValueError("planted")
            turn = self._lockstep.programs[number].turn
            turn(partial(self.called.append, (collective, number)))


def test_a_program_that_fails_on_one_rank_ends_on_all() -> None:
    """Else the other rank would wait for ever for its third collective."""
    said: list[dict[int, str]] = [{}, {}]
    meeting = threading.Barrier(2, timeout=10)

    def exchange(rank: int, failed: dict[int, str]) -> list[dict[int, str]]:
        said[rank] = dict(failed)
        meeting.wait()
        everyones = list(said)
        meeting.wait()
        return everyones

    ranks = [Rank(number, exchange) for number in range(2)]
    threads = [threading.Thread(target=rank.run) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    expected = [(k, n) for k in range(4) for n in range(3) if n != 1 or k < 2]
    assert ranks[0].called == ranks[1].called == expected
    assert isinstance(ranks[1].failed.pop(1), ValueError)
    stopped = ranks[0].failed.pop(1)
    assert isinstance(stopped, Stopped) and "planted (in b)" in str(stopped)
    assert not ranks[0].failed and not ranks[1].failed


Started = list[tuple[list[str], Path]]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Started:
    """Have a study run its processes as calls in this one; return what it started."""
    processes: Started = []

    def run(
        command: Sequence[str], log: Path, limit: float
    ) -> tuple[int | None, float]:
        # After the words that start Python.
        arguments = list(command[command.index("hpcfed") + 1 :])
        processes.append((arguments, log))
        log.write_text("")
        try:
            main(arguments)
        except SystemExit as ended:
            code = ended.code
            assert isinstance(code, int)
            return code, 1.0
        return 0, 1.0

    monkeypatch.setattr(attempt, "run_logged", run)
    return processes


def study(folder: Path, text: str, *more: str) -> list[Trial]:
    """Run a study with stacks; return its trials."""
    every = trials_of(folder, text)
    words = ["study", str(folder / "study.toml"), "--out", str(folder / "out")]
    main([*words, "--stack", *more])
    return every


def test_a_study_with_a_stack_is_the_study_without(
    tmp_path: Path, here: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    every = study(tmp_path, SIX)
    assert [arguments[0] for arguments, _ in here] == ["stack"]
    assert "6 of 6 trials advance together, in 1 stack" in capsys.readouterr().out
    gathered = read_gathered(tmp_path / "out/study.h5")
    assert [one.outcome.status for one in gathered.trials] == ["complete"] * 6
    assert [one.outcome.seconds for one in gathered.trials] == [1 / 6] * 6
    for trial, stored in zip(every, gathered.trials, strict=True):
        # Each has the command that makes it alone.
        assert stored.outcome.command.endswith(f"{trial.folder} --overwrite")
        assert stored.runs[0].environment["command"] == ["hpcfed", *trial.words]
        assert "together with 5 other trials" in trial.log.read_text()
    lr, alpha = every[3].point.given["lr"], every[3].point.given["alpha"]
    shared = {"epochs": 1, "rounds": 3, "checkpoint_every": 1}
    alone = started(*words(lr=lr, alpha=alpha, out=tmp_path / "alone", **shared))
    assert_same_run(every[3].folder, alone, tolerance=1e-12)
    here.clear()
    study(tmp_path, SIX)
    assert not here, "what is finished is not run again"
    # Neither the study's own files nor its trials' are overwritten by exports.
    written = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert {"plan.json", "repeat-0.log", "run.h5"} <= {path.name for path in written}
    for path in [*written, tmp_path / "out/slurm-7-1.log"]:
        with pytest.raises(UserError, match="name a"):
            check_export("--json", path)
    check_export("--json", tmp_path / "out/figures.json")


def test_a_trial_that_fails_in_a_stack_fails_as_it_would_alone(
    tmp_path: Path, here: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(0.1, FloatingPointError("planted failure"), monkeypatch)
    with pytest.raises(SystemExit) as ended:
        study(tmp_path, TINY + "[sweep]\nlr = [0.02, 0.1, 0.4]\n")
    assert ended.value.code == 1 and len(here) == 1
    every = trials_of(tmp_path, TINY + "[sweep]\nlr = [0.02, 0.1, 0.4]\n")
    outcomes = [read_outcome(trial.outcome) for trial in every]
    assert [outcome.status for outcome in outcomes] == [
        "complete",
        "failed",
        "complete",
    ]
    assert "planted failure" in outcomes[1].error


def test_a_stack_that_fails_as_a_whole_is_halved(
    tmp_path: Path, here: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four points have too little memory; two have enough, but for the last point."""
    text = TINY + "[sweep]\nlr = [0.02, 0.05, 0.1, 0.4]\n"
    run = attempt.run_logged

    def crowded(
        command: Sequence[str], log: Path, limit: float
    ) -> tuple[int | None, float]:
        code, seconds = 1, 1.0
        is_stack = command[-2] == "stack"
        lines = [{"lr": 0.4 if "0.4" in command else 0.0}]
        if is_stack:
            lines = read_stack(Path(command[-1]))
        greedy = any(line["lr"] == 0.4 for line in lines)
        if len(lines) < 4 and not greedy:
            return run(command, log, limit)
        log.write_text("hpcfed: out of memory\n")
        here.append((["too large", str(len(lines))], log))
        return code, seconds

    monkeypatch.setattr(attempt, "run_logged", crowded)
    with pytest.raises(SystemExit):
        study(tmp_path, text)
    tried = []
    for arguments, _ in here:
        tried.append(arguments[1] if arguments[0] == "too large" else arguments[0])
    assert tried == ["4", "stack", "2", "run", "1"]
    outcomes = [read_outcome(trial.outcome) for trial in trials_of(tmp_path, text)]
    assert [one.status for one in outcomes] == ["complete"] * 3 + ["failed"]
    assert outcomes[3].error == "exit code 1: out of memory"


def test_a_stack_that_was_stopped_goes_on(
    tmp_path: Path, here: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = TINY + "[sweep]\nlr = [0.02, 0.1, 0.4]\n"
    with monkeypatch.context() as stopping:
        stopping.setattr(Stop, "after", lambda self, round: round == 1)
        with pytest.raises(SystemExit):
            study(tmp_path, text)
    every = trials_of(tmp_path, text)
    assert {read_outcome(trial.outcome).status for trial in every} == {"failed"}
    assert f"exit code {STOPPED}" in read_outcome(every[0].outcome).error
    assert {read_run(trial.folder).status for trial in every} == {"stopped"}
    # One of them has failed: its disk may have been full.
    (every[2].folder / "error-0.txt").write_text("rank 0 failed\n")
    assert read_run(every[2].folder).status == "failed"
    assert numbers(stacked(every, 32)) == [[0, 1, 2]]
    here.clear()
    study(tmp_path, text)
    (resumed,) = map(read_stack, (tmp_path / "out/stacks").glob("*.json"))
    assert resumed == [{"resume": str(trial.folder)} for trial in every]
    assert len(here) == 1
    took = [read_outcome(trial.outcome).seconds for trial in every]
    assert took == [1 / 3 + 1 / 3] * 3
    shared = {"epochs": 1, "rounds": 3, "checkpoint_every": 1}
    for trial in every:
        assert read_outcome(trial.outcome).status == "complete"
        lr = trial.point.given["lr"]
        alone = started(*words(lr=lr, out=tmp_path / f"alone-{lr}", **shared))
        assert_same_run(trial.folder, alone, tolerance=1e-12)


def test_a_study_without_stacks_goes_on_too(tmp_path: Path, here: Started) -> None:
    """A point may take twelve hours, and be nearly done."""
    every = trials_of(tmp_path, TINY + "[sweep]\nlr = [0.02, 0.1]\n")
    told = ["study", str(tmp_path / "study.toml"), "--out", str(tmp_path / "out")]
    with pytest.MonkeyPatch.context() as stopping:
        stopping.setattr(Stop, "after", lambda self, round: round == 1)
        with pytest.raises(SystemExit):
            main(told)
    # A checkpoint has a copy of a damaged record, and of one that is gone.
    os.truncate(every[0].folder / "run.h5", 5000)
    (every[1].folder / "run.h5").unlink()
    here.clear()
    main(told)
    for (arguments, _), trial in zip(here, every, strict=True):
        assert arguments[:3] == ["run", "--resume", str(trial.folder)]
        outcome = read_outcome(trial.outcome)
        # Two attempts of a second; the command is that of the whole run.
        assert outcome.status == "complete" and outcome.seconds == 2.0
        assert outcome.command.endswith(shlex.join(["hpcfed", *trial.words]))
        lr = trial.point.given["lr"]
        shared = {"epochs": 1, "rounds": 3, "checkpoint_every": 1}
        alone = started(*words(lr=lr, out=tmp_path / f"alone-{lr}", **shared))
        assert_same_run(trial.folder, alone, tolerance=0.0)


def test_a_trial_whose_checkpoints_are_damaged_begins_anew(
    tmp_path: Path, here: Started
) -> None:
    """Alone, after the stack has failed for it; the other one goes on."""
    text = TINY + "[sweep]\nlr = [0.02, 0.1]\n"
    with pytest.MonkeyPatch.context() as stopping:
        stopping.setattr(Stop, "after", lambda self, round: round == 1)
        with pytest.raises(SystemExit):
            study(tmp_path, text)
    every = trials_of(tmp_path, text)
    for array in every[1].folder.glob("checkpoints/*/*.npy"):
        array.write_bytes(b"damaged")
    here.clear()
    study(tmp_path, text)
    assert [arguments[1:3] for arguments, _ in here[1:]] == [
        ["--resume", str(trial.folder)] for trial in every
    ]
    for trial in every:
        assert read_outcome(trial.outcome).status == "complete"
        assert read_run(trial.folder).rounds_done == 3


def test_a_run_of_other_options_does_not_go_on(tmp_path: Path, here: Started) -> None:
    """A study whose file has changed begins its unfinished points anew."""
    text = TINY + "[sweep]\nlr = [0.02, 0.1]\n"
    with pytest.MonkeyPatch.context() as stopping:
        stopping.setattr(Stop, "after", lambda self, round: round == 1)
        with pytest.raises(SystemExit):
            study(tmp_path, text)
    changed = trials_of(tmp_path, text.replace("clients = 5", "clients = 4"))
    assert numbers(stacked(changed, 32)) == [[0, 1]]
    study(tmp_path, text.replace("clients = 5", "clients = 4"))
    assert read_run(changed[0].folder).config["clients"] == 4


def cut(folder: Path, rounds: int) -> None:
    """Leave of a complete run what it had after these rounds, when it was killed."""
    checkpoints.discard_after(folder, rounds)
    with h5py.File(folder / "run.h5", "r+") as file:
        file.attrs["status"] = "running"


def test_a_study_keeps_seeds_that_are_complete(tmp_path: Path, here: Started) -> None:
    """Seeds may end early, each in another round."""
    text = TINY + "seeds = [0, 1]\n[sweep]\nlr = [0.02, 0.1]\n"
    every = study(tmp_path, text)
    first, second = every[0].run_folders
    kept = (first / "run.h5").read_bytes()
    for run in (second, *every[1].run_folders):
        cut(run, 2)
    assert numbers(stacked(every, 32)) == [[0], [1]], "they have different seeds left"
    here.clear()
    study(tmp_path, text, "--points", "0")
    assert here[0][0][:3] == ["run", "--resume", str(every[0].folder)]
    assert read_outcome(every[0].outcome).status == "complete"
    assert (first / "run.h5").read_bytes() == kept
    assert read_run(second).facts["resumed"].tolist() == [2]
    cut(second, 0)
    assert begun(every[0]) == Begun(0, complete=1) and begun(every[0]).goes_on


def test_a_study_keeps_what_a_server_has_half_learnt(
    tmp_path: Path, here: Started
) -> None:
    """Also in the first round, before any checkpoint."""
    (trial,) = study(tmp_path, TINY + "[sweep]\nlr = [0.02]\n")
    cut(trial.folder, 0)
    assert not begun(trial).goes_on
    (trial.folder / HALF_LEARNT).touch()
    assert begun(trial) == Begun(half_learnt=True) and begun(trial).goes_on


def test_a_study_never_replaces_a_complete_seed(
    tmp_path: Path, here: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    text = TINY + "seeds = [0, 1]\n[sweep]\nlr = [0.02]\n"
    (trial,) = study(tmp_path, text)
    first, second = trial.run_folders
    cut(second, 2)
    (tmp_path / "study.toml").write_text(text.replace("clients = 5", "clients = 4"))
    here.clear()
    capsys.readouterr()
    words = ["study", tmp_path / "study.toml", "--out", tmp_path / "out"]
    assert f"{first} is complete, but the rest of" in mistake(capsys, *words)
    # Where another process completes one meanwhile, it is found under the claim.
    with pytest.raises(UserError, match="is complete, but the rest of"):
        attempt.make_room(trial)
    assert not here and is_complete(first) and checkpoints.exist(second)


FAILING = """
import os
from hpcfed.methods import fedavg
from hpcfed.methods.fedavg import State, init, global_row, personal, welcome

def round(fed, state, cohort):
    on_second_rank = os.environ.get("OMPI_COMM_WORLD_RANK") == "1"
    if fed.config.lr == 0.2 and cohort.round == 1 and on_second_rank:
        raise FloatingPointError("planted failure")
    return fedavg.round(fed, state, cohort)
"""


def test_a_stack_on_two_ranks_loses_only_the_point_that_fails(
    tmp_path: Path, warm_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real processes; the point fails on one of the ranks, and the other goes on without
    it.
    """
    method = tmp_path / "failing.py"
    method.write_text(FAILING)
    text = TINY.replace("[common]", f"[common]\nranks = 2\nmethod = '{method}'")
    text += "[sweep]\nlr = [0.1, 0.2, 0.4]\n"
    monkeypatch.setattr(sys, "executable", warm_python)
    with pytest.raises(SystemExit) as ended:
        study(tmp_path, text)
    assert ended.value.code == 1
    every = trials_of(tmp_path, text)
    outcomes = [read_outcome(trial.outcome) for trial in every]
    assert [one.status for one in outcomes] == ["complete", "failed", "complete"]
    assert "planted failure" in outcomes[1].error
    for trial in every[::2]:
        lr = trial.point.given["lr"]
        out = tmp_path / f"alone-{lr}"
        alone = started(*words(lr=lr, out=out, epochs=1, rounds=3, method=method))
        assert_same_run(trial.folder, alone, tolerance=1e-12)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--stack", "--submit"], "--stack runs points as one process here"),
        (["--stack", "--gather"], "--gather runs none; leave one of them out"),
        (["--stack", "0"], "must be a number of points from 1 to 256, got '0'"),
        (["--stack", "my.toml"], "must be a number of points"),
    ],
)
def test_stacks_that_make_no_sense_are_one_line(
    more: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert expected in mistake(capsys, "study", "quick", *more)


def test_a_file_that_is_no_stack_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "stack.json"
    for content in ("{", "[]", "[1]", '{"lr": 1}'):
        file.write_text(content)
        assert "holds no" in mistake(capsys, "stack", file)
    file.write_text('[{"lr": 0.1, "rm": "-r"}]')
    assert "unknown option" in mistake(capsys, "stack", file)


@pytest.mark.gpu
def test_rates_per_row_on_a_gpu_are_the_same_runs(tmp_path: Path) -> None:
    """The captured steps read a rate per client, also in layers that update themselves."""
    more: dict[str, object] = {
        "dataset": "synthetic",
        "synthetic_shape": "3x32x32",
        "model": "cnn-pfl",
        "train_per_client": 40,
        "batch_size": 10,
        "precision": "fp32",
        "device": "cuda",
        "momentum": 0.9,
    }
    rates = (0.002, 0.005, 0.01)
    every = [words(lr=lr, out=tmp_path / f"{lr}", **more) for lr in rates]
    for lr, folder in zip(rates, run_points(every), strict=True):
        alone = read_run(started(*words(lr=lr, out=tmp_path / f"a-{lr}", **more)))
        found = read_run(folder)
        np.testing.assert_allclose(
            found.rounds["train_loss"], alone.rounds["train_loss"], rtol=1e-3
        )


def test_a_second_study_is_refused_as_a_whole(
    tmp_path: Path, here: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    text = TINY + "[sweep]\nlr = [0.02, 0.1]\n"
    out = tmp_path / "out"
    out.mkdir()
    trials_of(tmp_path, text)
    capsys.readouterr()
    with claimed(out, STUDY_CLAIM):
        said = mistake(capsys, "study", tmp_path / "study.toml", "--out", out)
    assert f"another study is writing to {out}" in said
    assert not here and not (out / "plan.json").exists()
    study(tmp_path, text)
    assert here and not (out / STUDY_CLAIM).exists()


def test_a_study_waits_for_what_a_killed_one_has_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that outlives its study holds its log, from its first moment on."""
    text = TINY + "[sweep]\nlr = [0.02, 0.1]\n"
    every = trials_of(tmp_path, text)
    out, (stack,) = tmp_path / "out", stacked(every, 2)
    path = out / "stacks" / stack.file
    path.parent.mkdir(parents=True)
    write_stack(path, stack)
    # As `attempt` starts it; whoever is killed leaves the descriptor to it alone.
    with open(path.with_suffix(".log"), "w") as log:
        hold(log.fileno())
        left = subprocess.Popen(["sleep", "30"], stdout=log)
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            left.kill()
        left.wait(0.001 if len(pauses) < 3 else None)

    def waiting(seconds: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            pause(seconds)

    monkeypatch.setattr(execute.time, "sleep", waiting)
    execute.wait_for_runs(every[:1], out)
    assert len(pauses) == 3 and "still at work" in capsys.readouterr().out
    execute.wait_for_runs(every, out)
    assert len(pauses) == 3, "nobody is left"


@pytest.mark.parametrize("stack", [[], ["--stack"]], ids=["alone", "stacked"])
def test_what_another_process_finishes_meanwhile_is_left(
    stack: list[str],
    tmp_path: Path,
    here: Started,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Jobs of an array may have a point in common."""
    every = trials_of(tmp_path, TINY + "[sweep]\nlr = [0.02, 0.1]\n")
    finished = every[1].folder / "run.h5"
    waited = []

    def finishing(trials: Sequence[Trial], out: Path) -> None:
        # The first call is before all points, the second before the first point.
        waited.append(trials)
        if len(waited) == 2:
            main(every[1].words)

    monkeypatch.setattr(execute, "wait_for_runs", finishing)
    words = ["study", str(tmp_path / "study.toml"), "--out", str(tmp_path / "out")]
    main([*words, "--points", "0,1", *stack])
    assert f"[2/2] {every[1]}: finished already" in capsys.readouterr().out
    (started,) = [arguments for arguments, _ in here]
    assert started[-2:] == [str(every[0].folder), "--overwrite"]
    assert finished.stat().st_mtime_ns < (every[0].folder / "run.h5").stat().st_mtime_ns
    assert all(read_outcome(trial.outcome).status != "failed" for trial in every)


def test_a_point_that_another_process_runs_comes_later(
    tmp_path: Path,
    here: Started,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    every = trials_of(tmp_path, TINY + "[sweep]\nlr = [0.02, 0.1]\n")
    theirs = every[0]
    theirs.folder.parent.mkdir(parents=True)
    words = ["study", str(tmp_path / "study.toml"), "--out", str(tmp_path / "out")]
    with ExitStack() as claims:
        claims.enter_context(claimed(theirs.folder.parent, theirs.claim))
        monkeypatch.setattr(execute.time, "sleep", lambda _: claims.close())
        main([*words, "--points", "0,1"])
    told = capsys.readouterr().out
    assert told.count(f"[1/2] {theirs}: another process runs it") == 1
    assert "all of 2 trials complete" in told
    ran = [arguments[-2] for arguments, _ in here]
    assert ran == [str(every[1].folder), str(theirs.folder)]
    assert not list((tmp_path / "out").rglob("*.claim"))


def test_a_study_that_cannot_claim_its_folder_is_one_line(
    tmp_path: Path, here: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    (out / STUDY_CLAIM).mkdir(parents=True)
    trials_of(tmp_path, TINY + "[sweep]\nlr = [0.02, 0.1]\n")
    said = mistake(capsys, "study", tmp_path / "study.toml", "--out", out)
    assert f"cannot write to --out {out}: Is a directory" in said and not here


def test_a_process_of_a_study_holds_its_log(tmp_path: Path) -> None:
    log = tmp_path / "repeat-0.log"
    looks = (
        "import sys; from hpcfed.results.claim import is_held; from pathlib import Path"
    )
    looks += f"; sys.exit(7 if is_held(Path({str(log)!r})) else 8)"
    code, _ = attempt.run_logged([sys.executable, "-c", looks], log, 60)
    assert code == 7, log.read_text()
    assert not is_held(log)
