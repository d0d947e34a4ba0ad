"""Sweeps: what a file expands to, what a trial leaves behind, how it is started, and
what is submitted.
"""

import json
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import threading
from dataclasses import replace
from errno import ENOSPC
from math import isnan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest

from hpcfed import cli
from hpcfed.analysis.collect import find
from hpcfed.data.files import TORCHVISION_FILES
from hpcfed.errors import UserError
from hpcfed.options import check, check_unchanged
from hpcfed.plan.work import run_work
from hpcfed.results.claim import claimed
from hpcfed.results.folder import check_export
from hpcfed.results.study import (
    Outcome,
    copy_run,
    read_gathered,
    read_outcome,
    write_outcome,
)
from hpcfed.runtime import launcher
from hpcfed.runtime.launcher import Launch
from hpcfed.studies import attempt, execute, start
from hpcfed.studies.attempt import finished
from hpcfed.studies.dry_run import completed, done, speed
from hpcfed.studies.execute import gather
from hpcfed.studies.plan import (
    Point,
    Study,
    Trial,
    choose,
    flags,
    points,
    read_study,
    trials,
)
from hpcfed.studies.stacks import Stack
from tests.runs import mistake


def planned(folder: Path, text: str) -> list[Point]:
    file = folder / "study.toml"
    file.write_text(text)
    return points(read_study(file), file)


def test_every_variant_meets_every_combination_in_order(tmp_path: Path) -> None:
    made = planned(
        tmp_path,
        "[common]\nrounds = 3\n[variants.a]\nlr = 0.1\n[variants.b]\nmethod = 'fedper'\n"
        "[sweep]\nclients = [10, 20]\nranks = [1, 2]\n",
    )
    assert [point.number for point in made] == list(range(8))
    assert [point.name for point in made][:3] == [
        "a,clients=10,ranks=1",
        "a,clients=10,ranks=2",
        "a,clients=20,ranks=1",
    ]
    assert [(p.settings.config.method, p.settings.config.lr) for p in made[3:5]] == [
        ("fedavg", 0.1),
        ("fedper", 0.05),
    ]
    assert all(point.settings.config.rounds == 3 for point in made)
    assert [(point.settings.config.clients, point.ranks) for point in made[4:]] == [
        (10, 1),
        (10, 2),
        (20, 1),
        (20, 2),
    ]


def test_clients_per_rank_and_server_ranks(tmp_path: Path) -> None:
    made = planned(
        tmp_path,
        "[common]\nclients_per_rank = 5\nmethod = 'pfedgpa'\nserver = 'small'\nserver_ranks = 2\n"
        "[sweep]\nranks = [1, 4]\n",
    )
    assert [point.settings.config.clients for point in made] == [5, 20]
    assert [point.processes for point in made] == [3, 6], (
        "the server's ranks come on top"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[swep]\nclients = [1]", "swep: unknown key; did you mean 'sweep'?"),
        (
            "[sweep]\nclints = [1, 2]",
            "sweep.clints: unknown option; did you mean 'clients'?",
        ),
        (
            "[sweep]\nmethod = ['pfedgpa', 'fedavg']\nserver_every = [0, 2]",
            "sweep.server_every: an option of method pfedgpa, and some points",
        ),
        ("[sweep]\nclients = []", "sweep.clients is empty"),
        ("[common]\nrounds = 3", "nothing is swept"),
        ("[sweep]\nclients = [4, 4]", "has a value twice"),
        ("[sweep]\nclients = 4", "sweep.clients"),
        ("[sweep]\nclients = ['x']", "sweep.clients"),
        (
            "[sweep]\nranks = [0]",
            "sweep.ranks: must be a whole number from 1 on, got 0",
        ),
        (
            "[sweep]\nranks = [4]\nclients = [2]",
            "point ranks=4,clients=2: --clients 2 on 4 ranks",
        ),
        (
            "[common]\nout = 'x'\n[sweep]\nclients = [4]",
            "common.out: the study gives it to every run itself",
        ),
        (
            "[common]\nclients = 3\nclients_per_rank = 2\n[sweep]\nranks = [1]",
            "exclude each other",
        ),
        ("repeats = 0\n[sweep]\nclients = [4]", "repeats"),
        (
            "[sweep]\nmethod = ['fedagv']",
            "sweep.method: unknown method 'fedagv'; did you mean 'fedavg'?",
        ),
        ("[variants.'a b']\n[variants.'a/b']\n", "two points would be called a-b"),
        ("[sweep", "not valid TOML"),
        (
            f"[variants.'{'é' * 200}']\nclients = 4",
            "has 400 bytes, a folder's has 255 at most; give such options in",
        ),
        (
            "title = 'x\\u0000'\n[sweep]\nclients = [4]".replace("'", '"'),
            "title: must be without a null character",
        ),
    ],
)
def test_a_mistake_in_a_study_is_one_line(
    text: str,
    expected: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.toml").write_text(text)
    assert expected in mistake(capsys, "study", "s.toml")
    assert list(tmp_path.iterdir()) == [tmp_path / "s.toml"], (
        "a mistake must leave nothing behind"
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("study nowhere.toml", "cannot read nowhere.toml"),
        (
            "study s.toml --only x*",
            "leaves no point; they have names such as clients=4",
        ),
        ("study s.toml --points 7", "numbered from 0 to 1"),
        ("study s.toml -- --partition gpu", "words after -- are sbatch's"),
        ("study s.toml --launchr mpirun", "--launchr"),
    ],
)
def test_a_mistake_on_the_command_line(
    words: str,
    expected: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.toml").write_text("[sweep]\nclients = [4, 8]\n")
    assert expected in mistake(capsys, *words.split())


def test_options_become_flags_that_parse_back(tmp_path: Path) -> None:
    text = "[common]\nseeds = [3, 5]\ndeterministic = true\ndownload = false\nlr = 1e-3\n[sweep]\nclients = [4]\n"
    point = planned(tmp_path, text)[0]
    assert cli.parse_run(flags(point.given)) == point.settings
    assert "--no-download" in flags(point.given) and "3,5" in flags(point.given)


def test_what_all_points_share_reaches_those_that_have_use_for_it(
    tmp_path: Path,
) -> None:
    text = "[common]\nlr = 0.3\nalpha = 0.1\n[sweep]\nmethod = ['fedavg', 'pfedhn']\npartition = ['iid', 'dirichlet']\n"
    lent = [{"lr", "alpha"} & set(point.given) for point in planned(tmp_path, text)]
    assert lent == [{"lr"}, {"lr", "alpha"}, set(), {"alpha"}]
    for point in planned(tmp_path, text):
        check(cli.parse_run(flags(point.given)), Launch("study", 0, 1))
        assert cli.parse_run(flags(point.given)) == point.settings
    with pytest.raises(
        UserError, match=r"point method=pfedhn,lr=0\.3: --lr changes nothing without"
    ):
        planned(tmp_path, "[sweep]\nmethod = ['pfedhn']\nlr = [0.3]\n")


def test_repeats_go_round(tmp_path: Path) -> None:
    made = planned(tmp_path, "repeats = 2\n[sweep]\nclients = [4, 8]\n")
    order = trials(read_study(tmp_path / "study.toml"), made, tmp_path)
    assert [str(trial) for trial in order] == [
        "clients=4/repeat-0",
        "clients=8/repeat-0",
        "clients=4/repeat-1",
        "clients=8/repeat-1",
    ]


@pytest.mark.parametrize(
    "file",
    sorted(Path("benchmarks/studies").glob("*.toml")),
    ids=lambda path: path.stem,
)
def test_the_studies_that_come_along_are_right(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A plan asks whether a data set is there, and does not read it.
    _, *files = TORCHVISION_FILES["cifar10"]
    for split in ("train", "t10k"):
        for kind in ("images-idx3", "labels-idx1"):
            files.append(f"FashionMNIST/raw/{split}-{kind}-ubyte")
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setenv("HPCFED_DATA", str(tmp_path))
    made = points(read_study(file), file)
    assert len(made) > 3
    if file.stem == "weak":
        assert len({point.settings.config.clients / point.ranks for point in made}) == 1
    if file.stem == "strong":
        assert len({point.settings.config.clients for point in made}) == 1
        assert len({point.ranks for point in made}) == len(made)


def test_a_dry_run_shows_every_command_and_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "s.toml"
    file.write_text(
        "[common]\nmodel = 'mlp'\n[sweep]\nclients = [4, 8]\nranks = [1, 3]\n"
    )
    cli.main(["study", str(file), "--dry-run", "--out", str(tmp_path / "out")])
    said = capsys.readouterr().out
    assert said.count("-m hpcfed run") == 4 and said.count("-n 3 ") == 2
    assert (
        "GFLOP of clients" in said and "a guess, since nothing is measured yet" in said
    )
    assert not (tmp_path / "out").exists()


def test_a_dry_run_counts_the_server_that_fits_its_device(tmp_path: Path) -> None:
    """What p-diff needs for 1.6 million columns exceeds 8 GiB: see `test_config`."""
    text = "[common]\nmethod = 'pfedgpa'\ndataset = 'synthetic'\nmodel = 'cnn-pfl'\n"
    (point,) = planned(tmp_path, f"{text}[sweep]\nclients = [4]\n")
    for memory, model in ((2**33, "span"), (2**40, "p-diff"), (0, "p-diff")):
        found = completed(point, gpu=True, memory=memory)
        assert found.flat()["server_model"] == model


def test_a_dry_run_says_where_clients_may_train_less(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "s.toml"
    file.write_text(
        "[common]\nmodel = 'mlp'\nclients = 4\ndevices = 'lognormal'\ndeadline = 9.0\n"
        "[variants.whole]\npartial = false\n[variants.part]\npartial = true\n"
        "[variants.ends]\ntarget_accuracy = 80.0\nstop_at_target = true\n"
    )
    cli.main(["study", str(file), "--dry-run", "--out", str(tmp_path / "out")])
    said = capsys.readouterr().out
    assert said.count(" GFLOP of clients") == 3 and said.count("at most ") == 2
    # 20 rounds of four clients, 4810 columns of four bytes each way.
    assert said.count("2.94 MiB if clients exchange whole rows") == 3


def test_the_speed_of_a_run_is_that_of_what_it_has_done(finished_trial: Trial) -> None:
    """It planned two rounds; had it ended at its target after one, it did half."""
    (record,) = finished(finished_trial) or []
    planned_work = run_work(finished_trial.point.settings)
    whole = done([record], planned_work)
    assert whole.clients == pytest.approx(planned_work.clients)
    first = {name: values[:1] for name, values in record.rounds.items()}
    half = done([replace(record, rounds=first)], planned_work)
    assert half.clients == pytest.approx(whole.clients / 2)
    unknown = record.rounds | {"train_flops": np.full(2, np.nan)}
    assert done([replace(record, rounds=unknown)], planned_work) == planned_work


def test_work_counts_packed_bytes_of_all_who_are_invited(tmp_path: Path) -> None:
    plain, packed, rare = planned(
        tmp_path,
        "[common]\nmodel = 'mlp'\ndataset = 'synthetic'\nrounds = 2\n"
        "[variants.plain]\nclients = 3\n"
        "[variants.packed]\nclients = 3\ncompress = 'sign'\ncompress_down = 'topk'\n"
        "[variants.rare]\nclients = 30\ncohort = 2\ncompress_down = 'topk'\n"
        "devices = 'lognormal'\noversample = 1.5\n",
    )
    columns = 3 * 32 * 32 * 64 + 64 + 64 * 10 + 10
    dense, signs = 4 * columns, 24_666 + 386 * 4
    top = 2 * 4 * 1974  # values and indices of 1 % of the columns
    assert run_work(plain.settings).sent == 2 * 3 * 2 * dense
    assert run_work(packed.settings).sent == 2 * 3 * (signs + top)
    # Three of thirty are invited, and each has missed ten downloads.
    assert run_work(rare.settings).sent == 2 * 3 * (dense + 10 * top)


def test_work_counts_what_the_options_say(tmp_path: Path) -> None:
    small, double, two_seeds = planned(
        tmp_path,
        "[common]\nmodel = 'mlp'\ndataset = 'synthetic'\npartition = "
        "'iid'\ntrain_per_client = 10\nrounds = 2\n"
        "[variants.small]\nclients = 3\n[variants.double]\nclients = 3\nepochs = 4\n"
        "[variants.seeds]\nclients = 3\nseeds = [0, 1]\n",
    )
    base = run_work(small.settings)
    inputs, hidden, classes = 3 * 32 * 32, 64, 10
    multiply_adds = 2 * inputs * hidden + 3 * hidden * classes
    assert base.clients == 2 * multiply_adds * 3 * 10 * 2 * 2, (
        "two FLOPs each, samples, epochs, rounds"
    )
    assert base.server == 0
    assert run_work(double.settings).clients == 2 * base.clients
    assert run_work(two_seeds.settings).clients == 2 * base.clients
    measured = speed([(small, base, 2.0, 5.0)], cuda=False)
    assert measured.seconds(small, base) == pytest.approx(5.0)
    assert measured.seconds(double, run_work(double.settings)) == pytest.approx(
        3.0 + 4.0
    )


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    made = planned(tmp_path, "[common]\nmodel = 'mlp'\n[sweep]\nclients = [4]\n")
    return trials(read_study(tmp_path / "study.toml"), made, tmp_path / "out")[0]


@pytest.fixture(scope="module")
def finished_trial(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """A trial whose run is complete, and of which no outcome was written."""
    folder = tmp_path_factory.mktemp("finished")
    made = planned(
        folder, "[common]\nmodel = 'mlp'\nrounds = 2\n[sweep]\nclients = [4]\n"
    )
    (only,) = trials(read_study(folder / "study.toml"), made, folder / "out")
    cli.main(only.words)
    return only


def test_a_trial_that_takes_too_long_is_ended(trial: Trial) -> None:
    sleeping = [
        sys.executable,
        "-c",
        "import time; print('started', flush=True); time.sleep(60)",
    ]
    outcome = attempt.attempt(trial, sleeping, limit=1.0, command="run")
    assert outcome.status == "failed" and "limit of 1 s" in outcome.error
    assert read_outcome(trial.outcome) == outcome
    assert trial.log.read_text() == "started\n"


def test_a_process_that_ends_well_without_a_run_has_failed(trial: Trial) -> None:
    words = [sys.executable, "-c", "print('nothing done')"]
    outcome = attempt.attempt(trial, words, limit=60, command="run")
    assert outcome.status == "failed" and "nothing done" in outcome.error
    assert finished(trial) is None


def test_an_outcome_that_somebody_has_broken_is_a_failure(trial: Trial) -> None:
    trial.folder.parent.mkdir(parents=True)
    assert read_outcome(trial.outcome).status == "waiting"
    write_outcome(trial.outcome, Outcome("complete", seconds=2.0))
    assert read_outcome(trial.outcome).seconds == 2.0
    for broken in (
        "{broken",
        "[]",
        '{"status": 1, "seconds": "x"}',
        '{"status": "failed", "seconds": []}',
    ):
        trial.outcome.write_text(broken)
        assert (
            read_outcome(trial.outcome).status == "failed"
            and "cannot be read" in read_outcome(trial.outcome).error
        )
    write_outcome(trial.outcome, Outcome("failed", "\0\ud800", 1.0, "\0"))
    gather(trial.folder.parent / "study.h5", Study(), "", [trial])


@pytest.mark.parametrize(
    "how", [[], ["--gather"], ["--points", "0"]], ids=["again", "gather", "array"]
)
@pytest.mark.parametrize("before", [None, "failed", "complete"])
def test_a_run_that_outlived_its_study_is_not_lost(
    how: list[str],
    before: str | None,
    finished_trial: Trial,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The study was killed while a trial ran; the trial's own processes went on and
    came to their end.
    """
    folder = finished_trial.folder.parents[2]
    finished_trial.outcome.unlink(missing_ok=True)
    if before is not None:  # what an earlier attempt has left
        write_outcome(
            finished_trial.outcome,
            Outcome(before, "exit code 1: x" * (before == "failed"), 2.5, "words"),
        )
    words = ["study", str(folder.parent / "study.toml"), "--out", str(folder)]
    cli.main([*words, *how])
    assert "all of 1 trial complete" in capsys.readouterr().out
    if "--points" in how:
        cli.main([*words, "--gather"])
    found = find([folder])
    assert len(found.processes) == 1 and found.unfinished == []
    outcome = read_gathered(folder / "study.h5").trials[0].outcome
    assert outcome.status == "complete" and outcome.error == ""
    if before == "complete":
        assert outcome.seconds == 2.5, "what was measured stays"
    else:
        assert isnan(outcome.seconds) and "-m hpcfed run" in outcome.command
        assert (
            json.loads(finished_trial.outcome.read_text(), parse_constant=pytest.fail)[
                "seconds"
            ]
            is None
        )
    cli.main([*words, "--dry-run"])
    assert (
        "1 finished" in (said := capsys.readouterr().out)
        and "nan" not in said
        and "nobody knows" not in said
    )


def test_a_new_attempt_forgets_how_the_last_one_went(trial: Trial) -> None:
    """Killed now, the study must not find the old word beside no run."""
    trial.folder.parent.mkdir(parents=True)
    write_outcome(trial.outcome, Outcome("complete", seconds=2.0))
    with pytest.raises(UserError, match="cannot start"):
        attempt.attempt(trial, ["/nowhere/mpirun"], limit=60, command="run")
    assert read_outcome(trial.outcome).status == "waiting"


def test_an_interrupted_attempt_leaves_its_seconds(
    trial: Trial, finished_trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the one that goes on. What began anew, or was killed, has no earlier ones."""
    trial.folder.parent.mkdir(parents=True)
    write_outcome(trial.outcome, Outcome("failed", seconds=2.0))

    def interrupted(*given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(attempt, "run_logged", interrupted)
    with pytest.raises(KeyboardInterrupt):
        attempt.attempt(trial, ["x"], limit=60, command="run", goes_on=True)
    left = read_outcome(trial.outcome)
    assert left.status == "waiting" and left.seconds >= 2.0
    monkeypatch.setattr(attempt, "run_logged", lambda *given: (None, 3.0))
    for goes_on, seconds in ((True, left.seconds + 3.0), (False, 3.0)):
        made = attempt.attempt(trial, ["x"], 60, command="run", goes_on=goes_on)
        assert made.seconds == read_outcome(trial.outcome).seconds == seconds
    trial.outcome.unlink()
    made = attempt.attempt(trial, ["x"], limit=60, command="run", goes_on=True)
    assert isnan(made.seconds) and str(replace(made, error="")) == "failed"
    # The same in a stack.
    monkeypatch.setattr(attempt, "run_logged", interrupted)
    path = trial.folder.parent / "stack.json"
    with pytest.raises(KeyboardInterrupt):
        attempt.attempt_stack(Stack((trial,)), ["x"], path, 60, commands=["run"])
    left = read_outcome(trial.outcome)
    assert left.status == "waiting" and left.seconds >= 0.0
    # Some come to their ends before the others.
    stack = Stack((finished_trial,))
    write_outcome(finished_trial.outcome, Outcome("waiting", seconds=2.0))
    with pytest.raises(KeyboardInterrupt):
        attempt.attempt_stack(stack, ["x"], path, 60, commands=["run"])
    left = read_outcome(finished_trial.outcome)
    assert left.status == "complete" and left.seconds >= 2.0


def test_a_trial_that_another_study_runs_keeps_its_outcome_and_log(
    trial: Trial,
) -> None:
    (trial.folder / "seed-0").mkdir(parents=True)
    write_outcome(trial.outcome, Outcome("failed", seconds=2.0))
    trial.log.write_text("round 1\n")
    for folder in (trial.folder, trial.folder / "seed-0"):
        with claimed(folder), pytest.raises(UserError, match="another run is writing"):
            attempt.attempt(trial, ["true"], limit=60, command="run", goes_on=True)
        assert read_outcome(trial.outcome).seconds == 2.0
        assert trial.log.read_text() == "round 1\n"
    made = attempt.attempt(trial, ["true"], limit=60, command="run", goes_on=True)
    assert made.seconds > 2.0 and trial.log.read_text() == ""


def test_a_study_replaces_no_link(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned(tmp_path, "[sweep]\nclients = [4]\n")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/study.h5").symlink_to("elsewhere")
    said = mistake(capsys, "study", tmp_path / "study.toml", "--out", tmp_path / "out")
    assert "out/study.h5 is a link; name a regular file" in said


@pytest.mark.parametrize("lost", ["repeat-0.json", "study.h5"])
def test_a_full_disk_is_one_line_that_names_the_file(
    lost: str,
    finished_trial: Trial,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = finished_trial.folder.parents[2]
    finished_trial.outcome.unlink(missing_ok=True)
    if lost == "study.h5":
        write_outcome(finished_trial.outcome, Outcome("complete"))

    sync = os.fsync

    def full(file: int) -> None:
        if not stat.S_ISREG(os.fstat(file).st_mode):  # a folder's names are there
            return sync(file)
        raise OSError(ENOSPC, os.strerror(ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SystemExit) as end:
        cli.main(
            [
                "study",
                str(folder.parent / "study.toml"),
                "--out",
                str(folder),
                "--gather",
            ]
        )
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.count("\n") == 1
    assert f"{lost}: {os.strerror(ENOSPC)}" in said


def test_a_study_that_never_ran_has_nothing_to_gather(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "never"
    file = tmp_path / "study.toml"
    file.write_text("[sweep]\nlr = [0.1]\n")
    said = mistake(capsys, "study", file, "--out", out, "--gather")
    assert f"{out} has no run of this study yet; start it without --gather" in said
    assert not out.exists()


def test_a_study_goes_on_where_stdout_is_full(finished_trial: Trial) -> None:
    folder = finished_trial.folder.parents[2]
    words = ["study", str(folder.parent / "study.toml"), "--out", str(folder)]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "hpcfed", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    assert ended.returncode == 0, ended.stderr
    assert (
        ended.stderr.count("\n") == 1
        and "cannot write to stdout: No space left" in ended.stderr
    )


def test_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    in_slurm = launcher.launcher(
        "auto", {"SLURM_JOB_ID": "7", "MPI": "pmi2", "SLURM_CPUS_PER_TASK": "8"}
    )(3)
    assert in_slurm == [
        "srun",
        "--mpi=pmi2",
        "--kill-on-bad-exit=1",
        "--cpus-per-task=8",
        "--ntasks=3",
    ]
    assert launcher.launcher("auto", {})(1) == []
    monkeypatch.setattr(launcher, "_cores", lambda: 4)
    assert launcher.launcher("mpirun", {})(2)[1:] == [
        "--map-by",
        "slot:PE=2",
        "--bind-to",
        "core",
        "-n",
        "2",
    ]
    assert "--oversubscribe" in launcher.launcher("mpirun", {})(5)


def test_mpirun_is_told_that_root_means_it(
    trial: Trial,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Open MPI refuses to run as root, as in a container, without two variables; nobody
    else needs them.
    """
    launcher._remark_root.cache_clear()
    for name in launcher.ALLOW_ROOT:
        monkeypatch.delenv(name, raising=False)
    program = tmp_path / "mpirun"
    program.write_text(
        '#!/bin/sh\necho "told $OMPI_ALLOW_RUN_AS_ROOT$OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(launcher, "mpirun_program", lambda: str(program))
    words = execute.command(
        replace(trial, point=replace(trial.point, ranks=2)),
        launcher.launcher("mpirun", {}),
    )
    for user, told in ((0, "told 11"), (0, "told 11"), (1000, "told ")):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        attempt.attempt(trial, words, limit=60, command="run")
        assert trial.log.read_text().strip() == told.strip()
    assert capsys.readouterr().err.count("hpcfed: we are root") == 1, (
        "one remark for all trials"
    )


def test_submitting_makes_an_array_for_every_number_of_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "s.toml"
    file.write_text("[sweep]\nclients = [4, 8]\nranks = [1, 2]\n")
    cli.main(
        [
            "study",
            str(file),
            "--out",
            str(tmp_path / "out"),
            "--submit",
            "--dry-run",
            "--",
            "--partition",
            "gpu",
        ]
    )
    first, second, gather = capsys.readouterr().out.splitlines()
    assert "--ntasks=1 --array=0,2 " in first and first.count("--partition gpu") == 1
    assert "--ntasks=2 --array=1,3 " in second
    assert "--dependency=afterany:" in gather and "--array" not in gather


def slurm_commands(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, largest: str, refused: int = 0
) -> None:
    """Put an sbatch in front of the path that numbers its jobs from 11 on and refuses
    one of them, and an scontrol that tells the largest array.
    """
    sbatch = f"""#!/bin/sh
    echo >> {folder}/jobs
    number=$(wc -l < {folder}/jobs)
    [ $number = {refused} ] && echo "sbatch: error: too many jobs" >&2 && exit 1
    echo $((10 + number))
    """
    scontrol = f"""#!/bin/sh
    echo "MaxArraySize            = {largest}"
    """
    for name, text in (("sbatch", sbatch), ("scontrol", scontrol)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


@pytest.mark.parametrize("largest", ["16", "17", "1001", "unknown"])
def test_a_study_larger_than_slurm_s_arrays_is_several(
    largest: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each point is a job of one array, with a number that Slurm allows, and each job
    chooses its point.
    """
    monkeypatch.setattr(start, "USUAL_ARRAY", 16)
    slurm_commands(tmp_path, monkeypatch, largest=largest)
    file = tmp_path / "s.toml"
    file.write_text(
        f"[sweep]\nseed = {list(range(17))}\nranks = [1, 2]\n[common]\nmodel = 'mlp'"
    )
    words = ["study", str(file), "--out", str(tmp_path / "out"), "--submit"]
    cli.main(words)
    *arrays, gather = map(shlex.split, capsys.readouterr().out.splitlines())
    sizes = [p.processes for p in points(read_study(file), file)]
    chosen: list[Any] = []
    monkeypatch.setattr(start, "run_points", lambda order: chosen.extend(order.chosen))
    found = []
    for words in arrays:
        (ntasks,) = (word for word in words if word.startswith("--ntasks="))
        (array,) = (word for word in words if word.startswith("--array="))
        numbers = [int(n) for n in array.removeprefix("--array=").split(",")]
        assert max(numbers) < (16 if largest == "unknown" else int(largest))
        asked = words[words.index(str(start.shipped.top() / start.SCRIPT)) + 1 :]
        offset = int(asked[-1]) if "--offset" in asked else 0
        # As the script does it in a job.
        cli.main(["study", *asked, "--points", str(numbers[-1])])
        assert chosen.pop().number == numbers[-1] + offset
        for number in numbers:
            assert ntasks == f"--ntasks={sizes[number + offset]}"
            found.append(number + offset)
    assert sorted(found) == list(range(34))
    assert len(arrays) == {"17": 4, "1001": 2}.get(largest, 6)
    jobs = ":".join(str(11 + number) for number in range(len(arrays)))
    assert f"--dependency=afterany:{jobs}" in gather and "--offset" not in gather


def test_what_slurm_refuses_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It names the arrays that were submitted already, which nothing would gather."""
    file = tmp_path / "s.toml"
    file.write_text("[sweep]\nclients = [4, 8, 12]\n")
    words = ["study", str(file), "--out", str(tmp_path / "out"), "--submit"]

    def refused() -> str:
        with pytest.raises(SystemExit) as ended:
            cli.main(words)
        assert ended.value.code == 2
        return capsys.readouterr().err

    slurm_commands(tmp_path, monkeypatch, largest="1", refused=3)
    assert refused() == (
        "hpcfed: sbatch refused: sbatch: error: too many jobs; to withdraw the rest: "
        "scancel 11 12\n"
    )
    slurm_commands(tmp_path, monkeypatch, largest="0")
    assert "this Slurm has none (MaxArraySize = 0)" in refused()
    words = [*words[:-1], "--offset", "1001"]
    assert "--offset adds to the numbers of --points" in refused()
    words += ["--points", "0"]
    assert "--points 1001: points are numbered from 0 to 2" in refused()


def test_jobs_run_what_was_submitted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A study's file that is edited while its jobs wait changes none of them; submitted
    again, it is a file of its own.
    """
    program = tmp_path / "sbatch"
    program.write_text("#!/bin/sh\necho 11\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    file, out = tmp_path / "s.toml", tmp_path / "out"
    words = []
    for rates in ("0.05, 0.1", "0.01, 0.05, 0.1"):
        file.write_text(f"title = 'η'\n[sweep]\nlr = [{rates}]\n")
        cli.main(["study", "s.toml", "--out", "out", "--submit"])
        array, gathers = map(shlex.split, capsys.readouterr().out.splitlines())
        # After the script: what hpcfed study is told in every job.
        words.append(array[-3:])
        assert gathers[-3:] == array[-3:] and array[-2:] == ["--out", str(out)]
        with pytest.raises(UserError, match="belongs to the study"):
            check_export("--csv", Path(array[-3]))
    file.unlink()
    for told, names in zip(
        words, (["0.05", "0.1"], ["0.01", "0.05", "0.1"]), strict=True
    ):
        asked = read_study(Path(told[0]))
        made = points(asked, Path(told[0]))
        assert [point.name for point in made] == [f"lr={name}" for name in names]
        assert asked.title == "η"


def test_choosing_points(tmp_path: Path) -> None:
    made = planned(tmp_path, "[sweep]\nclients = [4, 8]\nranks = [1, 2]\n")
    assert [p.name for p in choose(made, only="*ranks=2", numbers=None)] == [
        "clients=4,ranks=2",
        "clients=8,ranks=2",
    ]
    assert [p.number for p in choose(made, only="*", numbers=[0, 3])] == [0, 3]
    with pytest.raises(UserError, match="leaves no point"):
        choose(made, only="*ranks=2", numbers=[0])


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            "hpcfed: --lr is bad\n-----\nprterun ended.\nMore of it.\n-----\n",
            "--lr is bad",
        ),
        (
            "prterun has detected an attempt to run as root.\n\nPlease do not.\n-----\n",
            "prterun has detected an at",
        ),
        ("round 1\n-----\nA rank died.\nIts number is 3.\n-----\n", "A rank died."),
        ("Traceback\nValueError: x\n", "ValueError: x"),
        ("-----\n", "-----"),
        ("", "it said nothing"),
        (
            "hpcfed: \x00\x1b[31m",
            "\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}[31m",
        ),
    ],
)
def test_why_a_trial_failed(said: str, reason: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(said)
    assert attempt.exit_reason(log, 1).startswith(f"exit code 1: {reason}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_ends_a_trial_with_the_study(
    number: signal.Signals, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    before = signal.getsignal(number)
    threading.Timer(0.5, os.kill, (os.getpid(), number)).start()
    with pytest.raises(SystemExit) as end:
        attempt.run_logged([sys.executable, "-c", program], log, float("inf"))
    assert end.value.code == 128 + number
    assert not Path("/proc", log.read_text().strip()).exists()
    assert signal.getsignal(number) is before


def test_a_pipe_is_no_run(tmp_path: Path) -> None:
    """Nobody waits for what will never come."""
    os.mkfifo(tmp_path / "run.h5")
    with h5py.File(tmp_path / "study.h5", "w") as file:
        copy_run(tmp_path / "run.h5", file, 0)
        assert "runs" not in file


def test_other_seeds_do_not_replace_a_complete_run(
    finished_trial: Trial, tmp_path: Path
) -> None:
    shutil.copytree(finished_trial.folder.parents[2], tmp_path / "out")
    text = (
        "[common]\nmodel = 'mlp'\nrounds = 2\nseeds = [0, 1]\n[sweep]\nclients = [4]\n"
    )
    (more,) = trials(Study(), planned(tmp_path, text), tmp_path / "out")
    with pytest.raises(UserError, match="was run with other seeds"):
        execute.check_finished([more])


@pytest.fixture
def two_seeds(tmp_path: Path, finished_trial: Trial) -> Trial:
    """A complete trial of two seeds, and its study.h5."""
    text = (
        "[common]\nmodel = 'mlp'\nrounds = 2\nseeds = [0, 1]\n[sweep]\nclients = [4]\n"
    )
    (only,) = trials(Study(), planned(tmp_path, text), tmp_path / "out")
    for seed, folder in enumerate(only.run_folders):
        shutil.copytree(finished_trial.folder, folder)
        with h5py.File(folder / "run.h5", "a") as file:
            file.attrs["seed"] = seed
    write_outcome(only.outcome, Outcome("complete", seconds=2.0))
    gather(tmp_path / "out/study.h5", Study(), "", [only])
    return only


@pytest.mark.parametrize(
    ("lost", "how"), [("", "missing"), ("seed-1", "missing"), ("seed-1", "damaged")]
)
def test_gathering_keeps_a_run_that_only_the_study_has(
    lost: str, how: str, two_seeds: Trial, capsys: pytest.CaptureFixture[str]
) -> None:
    out = two_seeds.folder.parents[2]
    gone = two_seeds.folder / lost
    words = ["study", str(out.parent / "study.toml"), "--out", str(out)]
    cli.main([*words, "--gather"])
    assert "all of 1 trial complete" in capsys.readouterr().out
    before = (out / "study.h5").read_bytes()
    if how == "damaged":
        os.truncate(gone / "run.h5", 5000)
    else:
        shutil.rmtree(gone)
    said = mistake(capsys, *words, "--gather")
    assert f"{gone} is missing or damaged, and only {out}/study.h5 has that run" in said
    said = mistake(capsys, *words, "--only", "clients=4", "--gather")
    assert (out / "study.h5").read_bytes() == before
    # Without it, what is left is no complete trial.
    (out / "study.h5").rename(out / "kept")
    with pytest.raises(SystemExit):
        cli.main([*words, "--gather"])
    assert "1 trial of 1 failed" in capsys.readouterr().out
    (trial,) = read_gathered(out / "study.h5").trials
    assert trial.outcome.status == "failed" and f"is {how}" in trial.outcome.error


def test_a_lost_seed_is_told_as_that(
    two_seeds: Trial, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(two_seeds.run_folders[1])
    out = two_seeds.folder.parents[2]
    said = mistake(capsys, "study", out.parent / "study.toml", "--out", out)
    assert f"{two_seeds.run_folders[1]} is missing beside complete runs of" in said


def test_other_points_do_not_drop_what_only_the_study_has(two_seeds: Trial) -> None:
    """What runs again, or was tried again, is replaced; nothing else is."""
    order: Any = SimpleNamespace(out=two_seeds.folder.parents[2])
    execute.check_kept(order)
    shutil.rmtree(two_seeds.folder)
    execute.check_kept(order, again=[two_seeds.folder])
    with pytest.raises(UserError, match="put the folder back"):
        execute.check_kept(order)
    write_outcome(two_seeds.outcome, Outcome("failed", "exit code 1: x"))
    execute.check_kept(order)
    (order.out / "study.h5").write_text("damaged")
    two_seeds.outcome.unlink()
    execute.check_kept(order)


def test_a_failed_trial_makes_room_for_nobody_else(trial: Trial) -> None:
    """A seed that is at work, and a user's own file, stay where they are."""
    (trial.folder / "seed-0").mkdir(parents=True)
    (trial.folder / "seed-0/run.h5").touch()
    with (
        claimed(trial.folder / "seed-0"),
        pytest.raises(UserError, match="another run is writing to"),
    ):
        attempt.make_room(trial)
    (trial.folder / "notes.md").touch()
    with pytest.raises(UserError, match=r"notes.md was not made by a run"):
        attempt.make_room(trial)
    assert (trial.folder / "seed-0/run.h5").exists()


def test_a_trial_may_have_been_resumed(finished_trial: Trial) -> None:
    (record,) = finished(finished_trial) or []
    had = record.config | {"resume": "somewhere", "requeue": True, "ranks": 1}
    settings = finished_trial.point.settings
    check_unchanged(finished_trial.folder, had, settings.flat() | {"ranks": 1})


def test_what_has_not_run_has_not_failed() -> None:
    order: Any = SimpleNamespace(trials=[1, 2, 3], out=Path("my out"))
    told = start._closing(1, order, left=2)
    assert told.startswith("1 trial of 3 failed, 2 trials of 3 not complete yet; start")
    assert start._closing(0, order) == (
        "all of 3 trials complete; look at them: hpcfed report 'my out'"
    )


def test_an_interrupted_study_says_how_it_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hpcfed.studies.execute.attempt", interrupted)
    words = ["study", "quick", "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match="130"):
        cli.main(words)
    assert "start it again: it goes on from there" in capsys.readouterr().err
