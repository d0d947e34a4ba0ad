"""Makes the runs of a benchmark in this process, one after the other, on all ranks.

First a run of one round whose rows are checked, then a whole run that warms up: it loads
libraries, compiles kernels and fills caches. Neither is on the clock. Each counted run
has its own seed, and only its rounds are timed, not its start.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from hpcfed.benchmark.definition import Benchmark
from hpcfed.benchmark.reference import Reference, curve, portable
from hpcfed.benchmark.verification import (
    Check,
    check_aggregation,
    check_learning,
    check_target,
)
from hpcfed.errors import UserError, count
from hpcfed.options import Settings
from hpcfed.results.folder import runs
from hpcfed.results.run import RunRecord
from hpcfed.results.snapshots import read_parameters
from hpcfed.results.stored import check_start, read_run
from hpcfed.runtime import mpi
from hpcfed.runtime.launcher import launched
from hpcfed.runtime.machine import load
from hpcfed.runtime.signals import Stop

CHECK, WARMUP = "check", "warm-up"
"""Folders of the runs that are not counted."""
ANEW = "the same command and --overwrite, which begins anew"
"""How to go on after Ctrl-C: single runs can be resumed, but a benchmark cannot."""
Say = Callable[[str], None]
Found = TypeVar("Found")


@dataclass(frozen=True)
class Finished:
    """What the runs of a benchmark have left."""

    checked: RunRecord
    counted: list[RunRecord]
    load: float
    """Runnable processes of the root's host over a minute, before the first run; NaN if
    unknown.
    """


def run_folder(out: Path, seed: int) -> Path:
    """Return the folder of the counted run with this seed."""
    return out / f"run-{seed}"


def make_runs(
    benchmark: Benchmark, number: int, out: Path, say: Say, *, stale: Sequence[Path]
) -> Finished | None:
    """Make all runs on all ranks; return what they have left, on the root alone.

    `stale`: files of an earlier call, which do not belong to the new runs.
    """
    seeds = range(number)
    warmup = benchmark.settings(seed=0, out=str(out / WARMUP))
    each = [
        benchmark.settings(seed=seed, out=str(run_folder(out, seed))) for seed in seeds
    ]
    checking = benchmark.checking(seed=0, out=str(out / CHECK))
    # All before the first: a mistake in the last run must not cost the time of others.
    for settings in (checking, warmup, *each):
        check_start(settings, launched())
    on_root(partial(_remove, stale))
    if launched().rank == 0:
        say(
            f"benchmark {benchmark.name} {benchmark.size}: a round to check, a run to "
            f"warm up, then {count(number, 'run')} that count"
        )
    before = load()
    checked = _run(checking)
    _run(warmup)
    counted = []
    for settings in each:
        record = _run(settings)
        if record is not None:
            counted.append(record)
            seconds = seconds_of(record, benchmark.definition.figure)
            seed = settings.config.seed
            say(f"run {len(counted)} of {number}, seed {seed}: {_text(seconds)}")
    if checked is None:
        return None
    return Finished(checked, counted, before)


def _remove(files: Sequence[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)


def on_root(work: Callable[[], Found]) -> Found | None:
    """Do work on the root alone, the same call on every rank; return None elsewhere.

    If it fails, every rank ends: the others would wait for the root in the next
    collective. They end silently, because the root says why.
    """
    found, failure = None, None
    if launched().rank == 0:
        try:
            found = work()
        except Exception as error:
            failure = error
    code = 0 if failure is None else 2 if isinstance(failure, UserError) else 1
    code = mpi.from_root(launched(), code)
    if failure is not None:
        raise failure
    if code:
        raise SystemExit(code)
    return found


def _text(seconds: float | None) -> str:
    return "the target was not reached" if seconds is None else f"{seconds:.4g} s"


def _run(settings: Settings) -> RunRecord | None:
    """Make a run; return its record on the root, None elsewhere."""
    found = records_of(settings)
    return found[0] if found else None


def records_of(settings: Settings, *, together: bool = True) -> list[RunRecord]:
    """Make a run of one or several seeds, together or one after the other; return their
    records on the root.
    """
    # Late: this loads torch, and MPI starts.
    from hpcfed.experiment.run import run
    from hpcfed.runtime.device import leaving_unchanged

    records = []
    for one in [settings] if together else settings.each_seed():
        with leaving_unchanged():
            folder = run(one, Stop(go_on=ANEW), quiet=True)
        records += on_root(partial(_read, folder)) or []
    return records


def _read(folder: Path | None) -> list[RunRecord]:
    return [] if folder is None else [read_run(path) for path in runs(folder)]


def seconds_of(record: RunRecord, figure: str) -> float | None:
    """Return a run's figure of merit; None if it has not reached its target."""
    if figure == "work":
        return record.timed_seconds()
    reached = record.reached()
    return None if reached is None else reached.seconds


def checks_of(
    benchmark: Benchmark, finished: Finished, reference: Reference
) -> list[Check]:
    """Verify what the runs have learnt and aggregated."""
    definition, counted = benchmark.definition, finished.counted
    checked = finished.checked
    rows = read_parameters(checked.folder, 1)
    found = [reference.quality_like(record) for record in counted]
    checks = [
        check_learning(found, reference.means(len(counted)), definition.margin),
        check_aggregation(rows, checked.train_samples, definition.weights),
    ]
    if definition.figure == "target":
        reached = [record.reached() for record in counted]
        rounds = [None if one is None else one.rounds for one in reached]
        checks.append(check_target(rounds, counted[0].target or 0.0))
    return checks


def make_reference(benchmark: Benchmark, seeds: int, out: Path) -> Reference | None:
    """Run all seeds, together if they can; return their curves, on the root alone."""
    if changed := benchmark.broken():
        raise UserError(f"--reference must do the benchmark's own work: {changed[0]}")
    together = benchmark.settings(
        seeds=list(range(seeds)), out=str(out), precision="fp32"
    )
    check_start(together, launched())
    records = records_of(together, together=benchmark.definition.stacked)
    if not records:
        return None
    quality = benchmark.definition.quality
    first = records[0]
    source = first.environment["source"]
    device = first.environment["ranks"][0]["device"]
    precision = first.config["precision"]
    version = f"hpcfed {source['version']} ({source.get('commit', 'no commit')[:10]})"
    work = {name: portable(value) for name, value in benchmark.work().items()}
    return Reference(
        benchmark=benchmark.name,
        size=benchmark.size,
        quality=quality,
        made_by=f"{version} on {device}, precision {precision}",
        work=work,
        curves={int(one.facts["seed"]): curve(one, quality) for one in records},
    )
