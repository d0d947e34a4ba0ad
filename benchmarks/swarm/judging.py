"""Run a combination of options, and judge what came of it.

A run is refused in one line, or completes with finite numbers, or ends because its
numbers diverged, and says so. Beyond that, two runs are compared:

ranks: on two ranks it gives the numbers of one rank.
seeds: of several seeds at once, the first gives the numbers of its own run.
resume: stopped, and gone on with, it gives the bits of the run that was left alone.
off: with everything switched off it gives FedAvg's global model.
names: clients with other names give the same numbers under other names.
"""

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

from benchmarks.harness.waiting import Forking
from benchmarks.swarm import recorded
from benchmarks.swarm.drawing import (
    OWNED,
    OWNERS,
    Case,
    Options,
    refusal,
    without_files,
    words,
)
from benchmarks.swarm.jobs import CRASHED, HUNG, Ended, Job, Order
from hpcfed import methods
from hpcfed.errors import UserError
from hpcfed.results.stored import read_run, runs
from hpcfed.runtime.signals import STOPPED

EXACT = 1e-9
"""How far runs in float64 may differ that add in another order: rows agree to 1e-12 in
a round, and what follows from them doubles that a few times.
"""
LEARNT = 0.05
"""The bound after the server has learnt, which computes in float32."""
GROWN = 1e4
"""A difference is a rounding error that has grown if another engine, whose sums are in
another order, too, differs by more than the GROWN-th part of it.
"""
GOOD = ("completed", "not compared", "refused", "diverged", "grown rounding")
"""Outcomes that are as promised. What is not compared completes in its first run, but is
refused in the second form, such as on two ranks.
"""
REFUSING = ("ranks", "seeds", "off")
"""Comparisons whose second run may be refused although the first completes: it has other
options, or more ranks.
"""
_WARNING = re.compile(r"^.*(?:Warning:|\[W\d|^W\d{4}).*$", re.MULTILINE)
_OF_ANOTHER_RANK = re.compile(r"^hpcfed: rank [1-9]\d*: ")
_DIVERGED = re.compile(r"not finite|diverged")


@dataclass(frozen=True)
class Verdict:
    """What became of a combination."""

    outcome: str
    reason: str = ""
    """The line of a refusal, or what is wrong."""
    commands: tuple[str, ...] = ()
    """The command lines that show it."""
    runs: int = 0
    """How many runs were started."""

    @property
    def good(self) -> bool:
        """Whether all is as promised."""
        return self.outcome in GOOD


class Settled(Exception):
    """Ends the judgement of a combination: it cannot be compared, or differs."""

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.reason = reason


class Judge:
    """Runs cases in a folder of its own, by jobs of one and of two ranks."""

    def __init__(
        self, folder: Path, server: Forking, faults: Sequence[str] = ()
    ) -> None:
        """`faults` names functions, as MODULE:FUNCTION, that plant faults in the jobs."""
        self._folder = folder
        self._jobs = {
            ranks: Job(ranks, folder / f"job-{ranks}", server, faults)
            for ranks in (1, 2)
        }
        self._commands: list[str] = []
        self._runs = 0

    def judge(self, case: Case) -> Verdict:
        """Return what became of a combination."""
        self._commands, self._runs = [], 0
        outcome, reason = "completed", ""
        try:
            self._judge(case)
        except Settled as found:
            outcome, reason = found.outcome, found.reason
        return Verdict(outcome, reason, tuple(self._commands), self._runs)

    def end(self) -> None:
        """End the jobs."""
        for job in self._jobs.values():
            job.end()

    def _judge(self, case: Case) -> None:
        first = case.first()
        one = self._run("one", first, ranks=case.ranks, names=range(OWNERS))
        try:
            self._compare(case, one)
        except Settled as found:
            if found.outcome == "refused" and case.relation in REFUSING:
                raise Settled("not compared", found.reason) from None
            if found.outcome in ("refused", "diverged"):
                raise Settled(
                    f"{case.relation}: {found.outcome}", found.reason
                ) from None
            raise

    def _compare(self, case: Case, one: Path) -> None:
        match case.relation:
            case "ranks":
                self._compare_ranks(case, one)
            case "seeds":
                self._compare_seeds(case)
            case "resume":
                self._compare_resumed(case, one)
            case "off":
                self._compare_off(case, one)
            case "names":
                self._compare_names(case, one)

    def _compare_ranks(self, case: Case, one: Path) -> None:
        second = case.first() | case.more
        if said := refusal(second, case.others):
            raise Settled("not compared", said)
        two = self._run("two", second, ranks=case.others)
        self._check_same("ranks", case, one, two, recorded.OF_PLACEMENT)

    def _compare_seeds(self, case: Case) -> None:
        first = case.first()
        seed = int(first.get("seed", 0))
        several = {name: value for name, value in first.items() if name != "seed"}
        several["seeds"] = f"{seed},{seed + 1}"
        if said := refusal(several):
            raise Settled("not compared", said)
        two = self._run("two", several)
        one, two = self._folder / "one", two / f"seed-{seed}"
        # How many samples the engine takes at once depends on its stack.
        self._check_same("seeds", case, one, two, ("rounds/engine_samples",))

    def _compare_resumed(self, case: Case, one: Path) -> None:
        first = case.first()
        ranks = _possible(first, case.ranks)
        ended = self._start("two", first, ranks, stop_after=case.stop_after)
        two = self._folder / "two"
        if ended.code != STOPPED:
            # A run that ends early by itself has nothing to be stopped in.
            check(ended, two)
        else:
            check_said(ended)
            others = _possible(first, case.others)
            ended = self._start_words(["run", "--resume", str(two)], others)
            check(ended, two)
        self._check_same("resume", case, one, two)

    def _compare_off(self, case: Case, one: Path) -> None:
        fedavg = case.fedavg()
        if said := refusal(fedavg):
            raise Settled("not compared", said)
        two = self._run("two", fedavg)
        found, expected = recorded.numbers(one), recorded.numbers(two)
        part = next((part for part in ("model/", "rows/") if _has(part, found)), "")
        name, size = recorded.difference(
            {key: value for key, value in found.items() if key.startswith(part)},
            {key: value for key, value in expected.items() if key.startswith(part)},
            EXACT,
        )
        self._tell_difference("off", case, name, size)

    def _compare_names(self, case: Case, one: Path) -> None:
        two = self._run("two", case.first(), names=case.names)
        found = recorded.with_names(recorded.numbers(two), _inverse(case.names))
        name, size = recorded.difference(recorded.numbers(one), found, EXACT)
        self._tell_difference("names", case, name, size)

    def _check_same(
        self,
        relation: str,
        case: Case,
        one: Path,
        two: Path,
        ignored: Sequence[str] = (),
    ) -> None:
        served = _serves(case)
        exact = relation == "resume"
        tolerance = 0.0 if exact else LEARNT if served else EXACT
        if served and not exact:
            ignored = (*ignored, "server/", "finals/", "figures/", "clients/", "rows/")
        name, size = recorded.difference(
            recorded.numbers(one), recorded.numbers(two), tolerance, ignored
        )
        self._tell_difference(relation, case, name, size)

    def _tell_difference(
        self, relation: str, case: Case, name: str, size: float
    ) -> None:
        if not name:
            return
        told = f"{name} differs by {size:.1e}"
        if relation != "resume" and size < np.inf and self._grows(case) > size / GROWN:
            raise Settled("grown rounding", told)
        raise Settled(f"{relation}: differs", told)

    def _grows(self, case: Case) -> float:
        """Return by how much another order of sums changes the first run."""
        first = case.first()
        engine = "batched" if first.get("engine") == "loop" else "loop"
        commands = list(self._commands)
        try:
            other = self._run("other", {**first, "engine": engine})
        except Settled:
            return 0.0
        finally:
            self._commands = commands
        return recorded.difference(
            recorded.numbers(self._folder / "one"), recorded.numbers(other), 0.0
        )[1]

    def _run(
        self, name: str, options: Options, *, ranks: int = 1, names: Sequence[int] = ()
    ) -> Path:
        """Make a run and return its folder, if it completes as promised."""
        ended = self._start(name, options, _possible(options, ranks), names=names)
        folder = self._folder / name
        check(ended, folder)
        return folder

    def _start(
        self,
        name: str,
        options: Options,
        ranks: int,
        *,
        stop_after: int = 0,
        names: Sequence[int] = (),
    ) -> Ended:
        folder = self._folder / name
        shutil.rmtree(folder, ignore_errors=True)
        typed: dict[str, Any] = dict(options)
        renames: Sequence[int] = ()
        if typed.get("dataset") == f"file:{OWNED}":
            data = self._folder / f"{name}-{OWNED}"
            _write_owned(data, names or range(OWNERS))
            typed["dataset"] = f"file:{data}"
            renames = [] if list(names) == list(range(OWNERS)) else list(names)
        typed |= {"device": "cpu", "out": str(folder)}
        return self._start_words(
            words(typed), ranks, stop_after=stop_after, names=renames
        )

    def _start_words(
        self,
        typed: list[str],
        ranks: int,
        *,
        stop_after: int = 0,
        names: Sequence[int] = (),
    ) -> Ended:
        begin = "hpcfed" if ranks == 1 else f"mpirun -n {ranks} python -m hpcfed"
        aside = f"   # told to stop in round {stop_after}" if stop_after else ""
        if names:
            aside = f"   # its clients are those of the other file by {list(names)}"
        self._commands.append(f"{begin} {' '.join(typed)}{aside}")
        self._runs += 1
        return self._jobs[ranks].run(Order(typed, stop_after, list(names)))


def check(ended: Ended, folder: Path) -> None:
    """Raise Settled unless a run is complete; a refusal and a divergence, too, end what
    is judged.
    """
    check_said(ended)
    if ended.code == 2:
        lines = without_echoes(ended.err.splitlines())
        refusals = [line for line in lines if line.startswith("hpcfed: ")]
        if ended.out or len(refusals) != 1 or refusals != lines[-1:]:
            raise Settled("many lines", ended.err[-600:])
        raise Settled("refused", refusals[0].removeprefix("hpcfed: "))
    if ended.code == 1:
        raise Settled(*_failure(ended, folder))
    if ended.code:
        raise Settled("exit code", f"{ended.code}: {ended.err[-600:]}")
    try:
        found = runs(folder)
        states = {read_run(run).status for run in found}
    except UserError as error:
        raise Settled("not readable", str(error)) from None
    if states != {"complete"}:
        raise Settled("not complete", f"exit code 0, but {states}")
    if bad := recorded.not_finite(recorded.numbers(folder)):
        raise Settled("not finite", bad)


def without_echoes(lines: Sequence[str]) -> list[str]:
    """Leave out what another rank repeats of the first one's lines: it does so where the
    launcher is slow to end it.
    """
    plain = [_OF_ANOTHER_RANK.sub("hpcfed: ", line) for line in lines]
    return [
        line
        for line, text in zip(lines, plain, strict=True)
        if line == text or text not in lines
    ]


def check_said(ended: Ended) -> None:
    """Raise Settled where a run hangs or crashes, or says what no run should."""
    if ended.code == HUNG:
        raise Settled("hangs", ended.err[-600:])
    if ended.code == -1 or "Traceback (most recent" in ended.err:
        last = ended.err.strip().splitlines()[-1:]
        raise Settled("traceback", "".join(last))
    if ended.code == CRASHED or ended.code < 0:
        raise Settled("crash", f"{ended.code}: {ended.err[-600:]}")
    leak = _WARNING.search(ended.err) or _WARNING.search(ended.out)
    if leak:
        raise Settled("warning", leak[0])


def _failure(ended: Ended, folder: Path) -> tuple[str, str]:
    """Return what a run that has failed amounts to."""
    lines = ended.err.strip().splitlines()
    last = lines[-1] if lines else ""
    if not _DIVERGED.search(last):
        return "failed", last
    if (folder / "model.npz").exists():
        return "failed", f"left a model.npz: {last}"
    failed = [run for run in runs(folder) if read_run(run).status == "failed"]
    if not failed:
        return "failed", f"its record does not say so: {last}"
    return "diverged", last


def _possible(options: Options, ranks: int) -> int:
    """Return the number of ranks, or 1 if they would be refused: each rank would say
    so, because the root does not exit here.
    """
    return 1 if refusal(without_files(options), ranks) else ranks


def _serves(case: Case) -> bool:
    """Tell whether the run's server learns a model, which it does in float32."""
    return methods.load(str(case.first()["method"])).Options.has_server


def _has(part: str, found: Mapping[str, np.ndarray]) -> bool:
    return any(name.startswith(part) for name in found)


def _inverse(names: Sequence[int]) -> list[int]:
    return np.argsort(names).tolist()


def _write_owned(path: Path, names: Sequence[int]) -> None:
    """Write digits of uneven clients, of whom client i has the samples that are of
    client `names[i]` in the order of names.
    """
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8)
    owner = np.arange(400) % 20 % OWNERS
    owner = np.where(np.arange(400) % 7 == 0, 0, owner)
    renamed = np.asarray(_inverse(names))
    np.savez(
        path,
        train_images=images[:400],
        train_labels=labels[:400],
        train_clients=renamed[owner],
        test_images=images[400:600],
        test_labels=labels[400:600],
        test_clients=renamed[np.arange(200) % OWNERS],
    )
