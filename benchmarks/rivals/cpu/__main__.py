"""hpcfed beside other simulators on a CPU, on the same work, in one call.

  hpcfed        one process, a thread on every core
  pfl           pfl-research, Apple's simulator (package `pfl`): one process with all threads, or one process per core
  flower        Flower's simulation engine on Ray (`flwr[simulation]`): one worker with all threads, or one per core
  fedjax        Google's simulator: compiled steps, one client after the other, or a client on each of two devices

Every round trains all clients for one epoch of SGD and averages them, without evaluation.
All train the same network on as many synthetic images, which are in memory beforehand.
Each simulator sets up in a process of its own. Then they take turns, one round each, and
wait while others compute.

Others get the benefit of the doubt:
- Only hpcfed, Flower and FedJAX shuffle samples, and only hpcfed reports the training loss.
- Several processes of pfl-research share the clients. No all-reduce is made or counted.
- A worker of Flower's keeps network and data.
FedJAX fills the last batch of a client: 80 samples in place of cnn-digits' 72.

A simulator may be installed in an environment of its own:
  python -m venv --system-site-packages others && others/bin/pip install pfl "flwr[simulation]" fedjax

examples:
  python -m benchmarks.rivals.cpu
  python -m benchmarks.rivals.cpu --works cnn-cifar --rounds 5 --json cpu.json
  python -m benchmarks.rivals.cpu --python others/bin/python fedjax=jax/bin/python
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import numpy as np

from benchmarks import launching
from benchmarks.rivals.cpu.work import WORKS, Work
from benchmarks.strict import StrictParser, check_rounds
from hpcfed.errors import UserError

SIMULATORS = {
    "hpcfed": "",
    "pfl": "pip install pfl",
    "flower": 'pip install "flwr[simulation]"',
    "fedjax": "pip install fedjax",
}
"""What installs each; its program is cpu_NAME.py."""
HEADER = (
    f"{'work':11} {'who':8} {'processes × threads':>19} {'ms per round':>12} "
    f"{'lowest … highest':>18} {'slower':>8}"
)
Pythons = dict[str, str]
"""The interpreter of each simulator."""


class Skipped(Exception):
    """A simulator cannot do its work in these settings."""


@dataclass
class Line:
    """A simulator at work, and what it has taken so far."""

    who: str
    work: Work
    processes: int
    threads: int
    seconds: list[float] = field(default_factory=list)
    version: str = ""
    _children: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, python: str, rounds: int) -> None:
        """Start its processes, and wait until they are set up."""
        # Flower and FedJAX share the work within one process.
        ranks = self.processes if self.who == "pfl" else 1
        for rank in range(ranks):
            child = subprocess.Popen(
                self.command(python, rounds, rank),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=self._environment(),
            )
            self._children.append(child)
        for child in self._children:
            self.version = str(self._answer(child)["version"])

    def command(self, python: str, rounds: int, rank: int) -> list[str]:
        """Return the command of one of its processes."""
        options = {"rounds": rounds, "processes": self.processes}
        options |= {"threads": self.threads, "rank": rank}
        words = [python, "-m", f"benchmarks.rivals.cpu.{self.who}", self.work.model]
        for name, value in options.items():
            words += [f"--{name}", str(value)]
        return words

    def _environment(self) -> dict[str, str]:
        # Ray's workers import our modules, too: by PYTHONPATH.
        return launching.environment() | {"OMP_NUM_THREADS": str(self.threads)}

    def round(self) -> float:
        """Do one round; return its seconds, in the slowest process."""
        for child in self._children:
            _pipe(child.stdin).write("go\n")
            _pipe(child.stdin).flush()
        return max(float(self._answer(child)["seconds"]) for child in self._children)

    def _answer(self, child: subprocess.Popen[str]) -> dict[str, Any]:
        line = _pipe(child.stdout).readline()
        if not line:
            raise EOFError(f"{self.who} has ended without an answer")
        found: dict[str, Any] = json.loads(line)
        if "skipped" in found:
            raise Skipped(found["skipped"])
        return found

    def stop(self) -> None:
        for child in self._children:
            _pipe(child.stdin).close()
        for child in self._children:
            try:
                child.wait(timeout=30)
            except subprocess.TimeoutExpired:
                child.kill()
        self._children.clear()

    @property
    def title(self) -> str:
        """The first columns of its line."""
        shares = f"{self.processes:13} × {self.threads:3}"
        return f"{self.work.model:11} {self.who:8} {shares}"

    @property
    def median(self) -> float:
        return 1e3 * float(np.median(self.seconds))

    def told(self, ours: float | None) -> str:
        """Return a line of the table; `ours` are hpcfed's milliseconds."""
        spread = f"{1e3 * min(self.seconds):.1f} … {1e3 * max(self.seconds):.1f}"
        slower = f"{self.median / ours:.2f}×" if ours else ""
        return f"{self.title} {self.median:12.1f} {spread:>18} {slower:>8}"


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None, "opened as a pipe"
    return stream


def lines_of(work: Work, simulators: Sequence[str], cores: int) -> Iterator[Line]:
    """Yield every simulator in its sensible settings for a number of cores."""
    for who in simulators:
        yield Line(who, work, processes=1, threads=cores)
        if who != "hpcfed" and cores > 1:
            yield Line(who, work, processes=cores, threads=1)


def measure(work: Work, options: argparse.Namespace, pythons: Pythons) -> list[Line]:
    """Let all simulators take turns at one piece of work; return those that did it."""
    cores = len(os.sched_getaffinity(0))
    rounds = options.warmup + options.rounds
    at_work = []
    for line in lines_of(work, options.simulators, cores):
        try:
            line.start(pythons[line.who], rounds)
            for _ in range(options.warmup):
                line.round()
            at_work.append(line)
        except Skipped as reason:
            line.stop()
            print(f"{line.title} skipped: {reason}", flush=True)
        except (EOFError, BrokenPipeError):
            line.stop()
            words = " ".join(line.command(pythons[line.who], rounds=1, rank=0))
            print(f"{line.title} failed; to see why: echo go | {words}", flush=True)
    try:
        for _ in range(options.rounds):
            for line in at_work:
                line.seconds.append(line.round())
    finally:
        for line in at_work:
            line.stop()
    return at_work


def present(who: str, python: str) -> bool:
    """Return whether a simulator can be imported; tell how to install it if not."""
    if who == "hpcfed":
        return True
    package = {"flower": "flwr"}.get(who, who)
    command = [python, "-c", f"import {package}"]
    try:
        found = subprocess.run(command, capture_output=True, text=True)
        if not found.returncode:
            return True
        why = (found.stderr.strip().splitlines() or ["no reason given"])[-1]
    except OSError as error:
        why = str(error)
    print(f"{who} is skipped ({why}); to install it: {SIMULATORS[who]}")
    return False


def compare(options: argparse.Namespace, pythons: Pythons) -> int:
    """Measure and print everything; return the exit code."""
    options.simulators = [
        who for who in options.simulators if present(who, pythons[who])
    ]
    cores = len(os.sched_getaffinity(0))
    machine = f"{platform.machine()}, {cores} cores, Python {platform.python_version()}"
    header = f"{datetime.now(UTC):%Y-%m-%d}  {machine}"
    print(f"{header}\n{HEADER}", flush=True)
    lines: list[Line] = []
    for name in options.works:
        found = measure(WORKS[name], options, pythons)
        ours = next((line.median for line in found if line.who == "hpcfed"), None)
        for line in found:
            print(line.told(ours), flush=True)
        lines += found
    for who, version in {line.who: line.version for line in lines}.items():
        print(f"{who}: {version}")
    if options.json:
        results = []
        for line in lines:
            values: dict[str, Any] = {
                "work": line.work.model,
                "who": line.who,
                "version": line.version,
            }
            values |= {"processes": line.processes, "threads": line.threads}
            results.append(values | {"seconds": line.seconds})
        options.json.write_text(json.dumps({"header": header, "results": results}))
    return 0


def parse(words: Sequence[str]) -> tuple[argparse.Namespace, Pythons]:
    """Return the options, checked, and each simulator's interpreter."""
    parser = StrictParser(__doc__)
    add = parser.add_argument
    add("--works", nargs="+", choices=WORKS, default=list(WORKS))
    add("--simulators", nargs="+", choices=SIMULATORS, default=list(SIMULATORS))
    add("--rounds", type=int, default=7, help="counted rounds (default: 7)")
    add("--warmup", type=int, default=2, help="rounds before (default: 2)")
    own = (
        "interpreter of the other simulators, or of one: NAME=PATH (default: this one)"
    )
    add("--python", nargs="+", default=[], metavar="PATH", help=own)
    add("--json", type=Path, help="also write every round to this file")
    options = parser.parse_args(words)
    check_rounds(options)
    return options, interpreters(options.python)


def interpreters(words: Sequence[str]) -> Pythons:
    """Return whose interpreter is where; hpcfed runs in this one unless named."""
    pythons = dict.fromkeys(SIMULATORS, sys.executable)
    for word in words:
        who, equals, path = word.partition("=")
        if not equals:
            for other in SIMULATORS:
                if other != "hpcfed":
                    pythons[other] = word
        elif who not in SIMULATORS:
            raise UserError(f"--python {word}: use one of {', '.join(SIMULATORS)}")
        else:
            pythons[who] = path
    return pythons


def main(words: Sequence[str]) -> int:
    try:
        return compare(*parse(words))
    except UserError as error:
        print(f"cpu.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
