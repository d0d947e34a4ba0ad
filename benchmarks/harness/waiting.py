"""What the harness itself costs: ranks that wait in place of training, from one to 128
on one machine.

For every number of ranks: seconds to the first round and to the end, milliseconds of a
round beyond the wait, by phase, memory of a rank. With --stop a run is told to stop
(SIGTERM, exit code 75), resumed, and compared with one that was left alone.

    python -m benchmarks.harness.waiting --ranks 1 2 4 8 16 32 64 128
    python -m benchmarks.harness.waiting --ranks 64 --stop

With --forked ranks are forked from one process (see forked.py), so that 128 of them fit
into a small machine; then the start is without imports.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from benchmarks import launching
from benchmarks.arguments import parser_of
from hpcfed.options.declare import flags
from hpcfed.results.run import RunRecord
from hpcfed.results.stored import read_run
from hpcfed.runtime.launcher import environment_of, launcher, mpirun_program
from hpcfed.runtime.signals import STOPPED
from hpcfed.runtime.timer import PHASES

WAIT = 0.02
FORKED = str(Path(__file__).with_name("forked.py"))
OPTIONS = {
    "method": "fedavg",
    "device": "cpu",
    "dataset": "synthetic",
    "synthetic_shape": "1x8x8",
    "model": "mlp",
    "partition": "iid",
    "train_per_client": 8,
    "test_per_client": 4,
    "evaluate_every": 10,
    "checkpoint_every": 10,
    "simulate_training": "20ms",
}
WORDS = flags(OPTIONS)


class Forking(NamedTuple):
    """A process that forks ranks."""

    socket: str
    process: int


def command(ranks: int, *words: str, server: Forking | None = None) -> list[str]:
    """Return the words that start a run of waiting ranks; `server` forks them."""
    rank = [sys.executable, "-m", "hpcfed", "run", *words]
    if server is not None:
        # Without site-packages, which a proxy has no use for.
        proxy = [sys.executable, "-S", "-E", FORKED, server.socket]
        rank = [*proxy, "-m", "hpcfed", "run", *words]
    started = launcher("auto")(ranks)
    return [*(started or [mpirun_program(), "-n", "1"]), *rank]


@contextmanager
def fork_server(folder: Path, *modules: str) -> Iterator[Forking]:
    """Run a process that forks ranks, and has imported these modules, too."""
    path = folder / "socket"
    variables = launching.environment() | {"OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, FORKED, "serve", path, *modules],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,  # a pipe, since that is what programs write to
        env=variables,
    )
    try:
        while not path.exists():
            assert server.poll() is None, "see its traceback above"
            time.sleep(0.1)
        yield Forking(str(path), server.pid)
    finally:
        server.kill()
        server.wait()


def start(words: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a run whose output goes to a file."""
    variables = {**environment_of(words), "OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:
        return subprocess.Popen(
            words, stdout=file, stderr=subprocess.STDOUT, env=variables
        )


def until(log: Path, text: str, process: subprocess.Popen[bytes]) -> float:
    """Wait until the log has the text, or the process ends; return the time."""
    while process.poll() is None and text not in log.read_text(errors="replace"):
        time.sleep(0.05)
    return time.perf_counter()


def ranks_of(out: Path) -> list[Path]:
    """Return the folders in /proc of a run's ranks, without their launcher."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended
        is_rank = b"hpcfed" in words[:4] or FORKED.encode() in words[:4]
        if is_rank and str(out).encode() in words:
            found.append(folder)
    return found


def forked_from(server: int) -> list[Path]:
    """Return the folders in /proc of the processes that a server has forked."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # The name is in brackets and may hold anything; then state and parent.
            rest = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(rest[1]) == server:
            found.append(folder)
    return found


def resident(processes: list[Path]) -> float:
    """Return the mean memory of processes in MiB; what they share counts in parts."""
    found = []
    for folder in processes:
        try:
            lines = (folder / "smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        pss = next(line for line in lines if line.startswith("Pss:"))
        found.append(int(pss.split()[1]) / 1024)
    return sum(found) / max(1, len(found))


def measure(
    ranks: int, asked: argparse.Namespace, folder: Path, server: Forking | None
) -> None:
    """Run once, and print a line."""
    out, log = folder / f"run-{ranks}", folder / f"log-{ranks}"
    words = [*WORDS, "--clients", str(asked.clients), "--rounds", str(asked.rounds)]
    begin = time.perf_counter()
    process = start(command(ranks, *words, "--out", str(out), server=server), log)
    first = until(log, "round 1/", process) - begin
    memory = resident(forked_from(server.process) if server else ranks_of(out))
    code = process.wait()
    whole = time.perf_counter() - begin
    if code:
        print(log.read_text(errors="replace")[-2000:])
        print(f"{ranks} ranks: exit code {code}")
        return
    record = read_run(out)
    plain = ~evaluated(record)
    plain[:2] = False
    wall = record.wall[plain].max(1)
    phases = np.median(record.phases[plain].max(1), 0)
    told = {
        name: f"{1e3 * seconds:.2f}"
        for name, seconds in zip(PHASES, phases, strict=True)
        if seconds > 1e-4 and name != "train"
    }
    own = 1e3 * (median(wall) - WAIT)
    judged = record.phases[~plain][1:, :, PHASES.index("evaluate")].max()
    print(
        f"{ranks:5} ranks  start {first:6.1f} s  all {whole:6.1f} s  "
        f"own {own:7.2f} ms a round ({1e3 * own / ranks:7.1f} µs a rank)  "
        f"evaluation {1e3 * judged:6.1f} ms  {memory:5.0f} MiB a rank  {told}",
        flush=True,
    )


def evaluated(record: RunRecord) -> np.ndarray:
    """Return which rounds were evaluated, or followed a checkpoint."""
    numbers = np.arange(record.rounds_done)
    return np.isin(numbers % 10, (9, 0))


def stop_and_resume(
    ranks: int, asked: argparse.Namespace, folder: Path, server: Forking | None
) -> None:
    """Stop a run, resume it, and compare it with one that was left alone."""
    rounds = asked.rounds
    words = [*WORDS, "--clients", str(asked.clients), "--rounds", str(rounds)]
    whole, parted = folder / "whole", folder / "parted"
    log = folder / "log"
    begin = time.perf_counter()
    code = start(command(ranks, *words, "--out", str(whole), server=server), log).wait()
    print(f"left alone: exit code {code}, {time.perf_counter() - begin:.1f} s")
    process = start(command(ranks, *words, "--out", str(parted), server=server), log)
    until(log, "round 1/", process)
    # To every rank, as Slurm does: mpirun would end with a code of its own.
    for rank in ranks_of(parted):
        os.kill(int(rank.name), signal.SIGTERM)
    asked_at = time.perf_counter()
    code = process.wait()
    print(
        f"SIGTERM: exit code {code} (should be {STOPPED}) after "
        f"{time.perf_counter() - asked_at:.1f} s, "
        f"{read_run(parted).rounds_done} of {rounds} rounds"
    )
    code = start(command(ranks, "--resume", str(parted), server=server), log).wait()
    print(f"resumed: exit code {code}, {read_run(parted).rounds_done} rounds")
    a, b = np.load(whole / "model.npz"), np.load(parted / "model.npz")
    differ = max(float(np.abs(a[name] - b[name]).max()) for name in a.files)
    print(f"largest difference of the global models: {differ:g}")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--stop", action="store_true")
    parser.add_argument("--forked", action="store_true")
    asked = parser.parse_args()
    how = "forked" if asked.forked else "started one by one"
    print(
        f"{os.cpu_count()} cores, wait of {1e3 * WAIT:g} ms, {asked.clients} clients, "
        f"ranks {how}"
    )
    with ExitStack() as within:
        folder = Path(within.enter_context(tempfile.TemporaryDirectory()))
        server = within.enter_context(fork_server(folder)) if asked.forked else None
        for ranks in asked.ranks:
            act = stop_and_resume if asked.stop else measure
            act(ranks, asked, folder, server)


if __name__ == "__main__":
    main()
