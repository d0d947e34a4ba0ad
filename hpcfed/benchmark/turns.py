"""Whether this program is slower than another, on a machine whose load changes.

Both make the same runs by turns: a run of this one, then the other's with the same seed,
and the other way round. What slows the machine slows both of a pair, or a few pairs,
which are dropped. Time on cores is compared beside wall time, because others on the host
hardly prolong it. `benchmarks/harness/noise.py` shows how often this is right.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from types import FrameType
from typing import Literal

from hpcfed.analysis.statistics import CONFIDENCE, Estimate
from hpcfed.benchmark.definition import Benchmark
from hpcfed.benchmark.figures import detectable, ratio, verdict_of
from hpcfed.benchmark.reference import portable, quality_of
from hpcfed.benchmark.result import (
    PartOfResult,
    TimedRun,
    UsedMachine,
    UsedSoftware,
    machine_of,
    software_of,
    timed,
)
from hpcfed.benchmark.running import ANEW, Say
from hpcfed.benchmark.verification import Check, check_learning
from hpcfed.errors import UserError, count, printable, remark
from hpcfed.results.run import RunRecord
from hpcfed.results.stored import check_start, read_run
from hpcfed.runtime.launcher import launched
from hpcfed.runtime.machine import load
from hpcfed.runtime.signals import SIGNALS, STOPPED
from hpcfed.version import PACKAGE
from hpcfed.words import interval
from hpcfed.words import ratio as ratio_text

SIDE = Path(__file__).with_name("side.py")
FILE = "turns.json"
THIS, OTHER = "this", "other"
Sided = Literal["this", "other"]
Verdict = Literal["FAILED", "SLOWER", "FASTER", "within noise"]
LAST_BYTES = 4000
PATIENCE = 10.0
"""Seconds that a program may take to end."""


@dataclass(frozen=True)
class Installation:
    """An hpcfed that can be started: an interpreter, and what comes first on its path."""

    python: str
    path: Path | None


def program_of(given: Path) -> Installation:
    """Return the program of a checkout, or of the Python of another environment."""
    if (given / "hpcfed" / "__init__.py").is_file():
        return Installation(sys.executable, given.resolve())
    if given.is_file() and os.access(given, os.X_OK):
        # Not resolved: a virtual environment's Python is a link.
        return Installation(str(given.absolute()), None)
    raise UserError(
        f"--by-turns {given}: name a folder with hpcfed/ in it, as a checkout has, or "
        "the python of an environment in which another hpcfed is installed"
    )


class Ratio(PartOfResult):
    """How many times as long this program takes as the other."""

    name: Literal["wall seconds", "seconds on cores"]
    ratio: float
    low: float
    high: float
    confidence: float
    detectable: float | None
    """What four of five such calls would tell apart."""

    @property
    def estimate(self) -> Estimate:
        """The ratio with its interval."""
        return Estimate(self.ratio, self.low, self.high)

    @property
    def verdict(self) -> Literal["slower", "faster", "within noise"]:
        """What the interval says."""
        return verdict_of(self.estimate)


class TurnsResult(PartOfResult):
    """What came of two programs' turns."""

    format: Literal["hpcfed turns"] = "hpcfed turns"
    version: Literal[2] = 2
    benchmark: str
    size: str
    verdict: Verdict
    machine: UsedMachine
    software: dict[Sided, UsedSoftware]
    runs: dict[Sided, list[TimedRun]]
    ratios: list[Ratio]
    learning: Check
    """Whether both have learnt the same: else their times say nothing."""


def take_turns(
    benchmark: Benchmark, other: Path, number: int, out: Path, say: Say
) -> TurnsResult:
    """Make pairs of runs of this program and of another, and compare them."""
    if not launched().alone:
        raise UserError(
            "--by-turns starts two programs itself; start it without mpirun"
        )
    programs = {
        THIS: Installation(sys.executable, PACKAGE.parent),
        OTHER: program_of(other),
    }
    # Before the first run: a mistake in the last must not cost the time of others.
    for side in programs:
        for seed in range(number):
            folder = str(_folder(out, side, seed))
            check_start(benchmark.settings(seed=seed, out=folder), launched())
    before = load()
    out.mkdir(parents=True, exist_ok=True)
    (out / FILE).unlink(missing_ok=True)
    say(
        f"benchmark {benchmark.name} {benchmark.size} by turns with {other}: each warms "
        f"up, then {count(number, 'pair')} of runs"
    )
    records: dict[str, list[RunRecord]] = {THIS: [], OTHER: []}
    with ExitStack() as players:
        players.enter_context(_stopping(out))
        made = {}
        for side, program in programs.items():
            made[side] = players.enter_context(_started(program, out / f"{side}.log"))
        for side, player in made.items():
            player.run(_options(benchmark, out, side, 0, overwrite=True))
        for seed in range(number):
            # By turns, too: who begins a pair may meet another machine.
            for side in (THIS, OTHER) if seed % 2 == 0 else (OTHER, THIS):
                # The first run of all was warming up, in the same folder.
                made[side].run(_options(benchmark, out, side, seed, overwrite=not seed))
                records[side].append(read_run(_folder(out, side, seed)))
            ours, theirs = (records[side][seed].timed_seconds() for side in made)
            say(
                f"pair {seed + 1} of {number}, seed {seed}: {ours:.4g} s, {theirs:.4g} s"
            )
    return judge(benchmark, records[THIS], records[OTHER], before)


@contextmanager
def _stopping(out: Path) -> Iterator[None]:
    """Let a signal end the block, and say what stays."""

    def heard(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one must not disturb the end
        raise _Heard

    before = {number: signal.signal(number, heard) for number in SIGNALS}
    try:
        yield
    except _Heard:
        remark(
            f"hpcfed: stopped; the runs in {out} stay, without a verdict; go on with: {ANEW}"
        )
        raise SystemExit(STOPPED) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Heard(BaseException):
    """A signal has come."""


def _folder(out: Path, side: str, seed: int) -> Path:
    return out / f"{side}-{seed}"


def _options(
    benchmark: Benchmark, out: Path, side: str, seed: int, *, overwrite: bool
) -> dict[str, object]:
    options = benchmark.options() | {"seed": seed, "out": str(_folder(out, side, seed))}
    return options | ({"overwrite": True} if overwrite else {})


class _Player:
    """A process that makes one program's runs."""

    def __init__(self, program: Installation, log: Path) -> None:
        variables = dict(os.environ)
        variables.pop("PYTHONPATH", None)
        if program.path is not None:
            variables["PYTHONPATH"] = str(program.path)
        self._log = log
        with log.open("wb") as file:
            # -P: what lies beside the script must not hide other modules.
            self._process = subprocess.Popen(
                [program.python, "-P", str(SIDE)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=variables,
                text=True,
            )

    def run(self, options: dict[str, object]) -> None:
        """Make a run, and wait for its end."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            print(
                json.dumps(options, default=str), file=self._process.stdin, flush=True
            )
        if not self._process.stdout.readline():
            raise UserError(f"a run has failed: {self._last_line()} (see {self._log})")

    def _last_line(self) -> str:
        text = self._log.read_bytes()[-LAST_BYTES:].decode(errors="replace").strip()
        return printable(text.splitlines()[-1]) if text else "it said nothing"

    def end(self) -> None:
        """Let the process end. Its runs are done: one that is slow to leave costs nothing."""
        with suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._process.communicate(timeout=PATIENCE)

    def kill(self) -> None:
        """End the process now, whatever it does."""
        self._process.kill()
        self._process.wait()


@contextmanager
def _started(program: Installation, log: Path) -> Iterator[_Player]:
    player = _Player(program, log)
    try:
        yield player
        player.end()
    finally:
        player.kill()


def judge(
    benchmark: Benchmark,
    ours: Sequence[RunRecord],
    theirs: Sequence[RunRecord],
    load_before: float = nan,
) -> TurnsResult:
    """Compare pairs of runs with the same seeds."""
    _check_same_work(benchmark, ours[0], theirs[0])
    runs: dict[Sided, list[TimedRun]] = {
        "this": [timed(record, benchmark) for record in ours],
        "other": [timed(record, benchmark) for record in theirs],
    }
    on_cpu = all(rank["device"] == "cpu" for rank in ours[0].environment["ranks"])
    quality, margin = benchmark.definition.quality, benchmark.definition.margin
    learnt = [quality_of(record, quality) for record in ours]
    others = [quality_of(record, quality) for record in theirs]
    ratios = ratios_of(runs["this"], runs["other"], on_cpu=on_cpu)
    learning = check_learning(learnt, others, margin, beside="the other program")
    return TurnsResult(
        benchmark=benchmark.name,
        size=benchmark.size,
        verdict=_verdict(ratios, learning),
        machine=machine_of(ours[0], load_before),
        software={"this": software_of(ours[0]), "other": software_of(theirs[0])},
        runs=runs,
        ratios=ratios,
        learning=learning,
    )


def _verdict(ratios: Sequence[Ratio], learning: Check) -> Verdict:
    """Return what all ratios say together. One that is slower is enough."""
    found = {one.verdict for one in ratios}
    if not learning.passed:
        return "FAILED"
    if "slower" in found:
        return "SLOWER"
    return "FASTER" if "faster" in found else "within noise"


def _check_same_work(benchmark: Benchmark, ours: RunRecord, theirs: RunRecord) -> None:
    """Refuse a version in which the benchmark does other work."""
    for name in benchmark.work():
        here, there = (portable(one.config.get(name)) for one in (ours, theirs))
        if here != there:
            raise UserError(
                f"--by-turns: {name} is {here} here and {there} in the other program; "
                "compare programs that do the same work"
            )


def ratios_of(
    ours: Sequence[TimedRun], theirs: Sequence[TimedRun], *, on_cpu: bool
) -> list[Ratio]:
    """Return how many times as long this program takes.

    On a GPU only wall time counts: there the host mostly waits, which costs it time, too.
    Two ratios share the chance of a false alarm.
    """
    wall = [
        (one.all_seconds, other.all_seconds)
        for one, other in zip(ours, theirs, strict=True)
    ]
    cores = [
        (one.cpu_seconds, other.cpu_seconds)
        for one, other in zip(ours, theirs, strict=True)
        if one.cpu_seconds and other.cpu_seconds
    ]
    if not on_cpu or len(cores) < len(wall):
        return [_ratio("wall seconds", wall, CONFIDENCE)]
    each = 1 - (1 - CONFIDENCE) / 2
    return [_ratio("wall seconds", wall, each), _ratio("seconds on cores", cores, each)]


def _ratio(
    name: Literal["wall seconds", "seconds on cores"],
    pairs: Sequence[tuple[float, float]],
    confidence: float,
) -> Ratio:
    ours, theirs = zip(*pairs, strict=True)
    found = ratio(theirs, ours, confidence)
    least = detectable(found, len(pairs), confidence)
    return Ratio(
        name=name,
        ratio=found.centre,
        low=found.low,
        high=found.high,
        confidence=confidence,
        detectable=None if isnan(least) else least,
    )


def lines(result: TurnsResult, other: Path) -> list[str]:
    """Return what a terminal shows; the last line is the verdict."""
    told = []
    for one in result.ratios:
        found = interval(one.estimate, write=ratio_text)
        line = f"{one.name}: {found} times the other's, {one.verdict}"
        if one.detectable is not None:
            line += f"; four of five such calls tell {one.detectable - 1:.1%} apart"
        told.append(line)
    learning = result.learning
    told.append(f"learning: {'ok' if learning.passed else 'WRONG'}: {learning.said}")
    pairs = count(len(result.runs["this"]), "pair")
    told.append(f"{result.verdict}: this program beside {other}, {pairs}")
    return told
