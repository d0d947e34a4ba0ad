"""The result of a benchmark as a file: JSON whose schema is the model below."""

from collections.abc import Collection
from datetime import UTC, datetime
from math import isnan
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hpcfed.analysis.statistics import Estimate
from hpcfed.benchmark.definition import FIGURES, Benchmark
from hpcfed.benchmark.figures import INTERVAL, dropped, of_times
from hpcfed.benchmark.reference import Reference, content_of, first_problem, quality_of
from hpcfed.benchmark.running import Finished, checks_of, seconds_of
from hpcfed.benchmark.verification import Check
from hpcfed.errors import UserError
from hpcfed.results.run import RunRecord

JOULES_PER_WH = 3600.0
LEAST_RUNS = 5
"""Fewer runs break the rules."""
COUNTERS = {"energy": "GPUs", "cpu_energy": "CPUs"}
"""What a record's joules are of."""
BUSY = 0.5
"""Load of an idle host, at most."""
FILE = "result.json"
Seconds = Annotated[float, Field(ge=1e-9, le=1e9)]
"""Seconds of a run: others are divided by them, and intervals of such ratios are finite."""
NotNegative = Annotated[float, Field(ge=0)]


class PartOfResult(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class TimedRun(PartOfResult):
    """One counted run."""

    seed: int
    seconds: Seconds | None
    """Its figure of merit; null if the target was not reached."""
    rounds: int
    """Rounds up to the figure."""
    all_seconds: NotNegative
    """All rounds."""
    cpu_seconds: NotNegative | None = None
    """Time of all rounds that the ranks with clients have spent on cores; null in older
    results.
    """
    quality: float | None
    """Mean over rounds; null if no round has it."""
    samples: NotNegative
    """Samples of all steps of local training."""
    energy_wh: NotNegative | None
    """Energy of what `energy_of` names, from just before the first round to the end; null where
    no counter is readable.
    """


class FigureOfMerit(PartOfResult):
    """The benchmark's one figure, in seconds: less is better."""

    meaning: str
    seconds: Seconds | None
    low: NotNegative | None
    high: NotNegative | None
    interval: str
    dropped: int
    """Fastest and slowest runs that do not count."""

    @property
    def estimate(self) -> Estimate:
        """The figure with its interval; NaN for what is unknown."""
        unknown = float("nan")
        ends = (self.seconds, self.low, self.high)
        return Estimate(*(unknown if end is None else end for end in ends))


class KeptRules(PartOfResult):
    """Whether the rules were kept, and what was changed."""

    kept: bool
    broken: list[str]
    changed: dict[str, Any]
    """All options that differ from the benchmark's, also those that may."""


class UsedMachine(PartOfResult):
    """Where the benchmark ran."""

    hosts: list[str]
    ranks: int
    devices: list[str]
    """The device of every rank."""
    cpus: list[str]
    """The processor of every host."""
    cores_per_rank: int
    threads_per_rank: int
    backend: str
    load: NotNegative | None
    """How busy the first host was before: runnable processes, over a minute."""

    @property
    def busy(self) -> bool:
        """Whether others may have slowed the runs."""
        return self.load is not None and self.load > BUSY


class UsedSoftware(PartOfResult):
    """What ran."""

    version: str
    commit: str | None
    changed: bool | None
    """Whether files differ from the commit."""
    sha256: str
    python: str
    platform: str
    cuda: str | None
    nccl: str | None
    packages: dict[str, str]


class BenchmarkResult(PartOfResult):
    """A result that can be handed in and compared."""

    format: Literal["hpcfed benchmark"] = "hpcfed benchmark"
    version: Literal[1] = 1
    benchmark: str
    size: str
    title: str
    verdict: Literal["PASSED", "FAILED"]
    figure: FigureOfMerit
    energy_wh: NotNegative | None
    """Mean over counted runs."""
    energy_of: str | None = None
    """What it is counted of, as in `GPUs and CPUs`: of CPUs with their memory and with
    whatever else ran there. Null without it, and in older results.
    """
    checks: list[Check]
    rules: KeptRules
    runs: list[TimedRun]
    reference: str
    """What made it, and how many seeds it has."""
    precision: str
    machine: UsedMachine
    software: UsedSoftware
    settings: dict[str, Any]
    finished: str
    """UTC."""


def result_of(
    benchmark: Benchmark, finished: Finished, reference: Reference, *, own: bool
) -> BenchmarkResult:
    """Judge finished runs. `own`: the user has named the definition or the reference."""
    checks = checks_of(benchmark, finished, reference)
    # What only some runs have counted would make them look as if they took more.
    counters = [
        name
        for name in COUNTERS
        if all(_joules(record, name) is not None for record in finished.counted)
    ]
    each = [timed(record, benchmark, counters) for record in finished.counted]
    broken = _broken(benchmark, len(each), own=own)
    right = all(check.passed for check in checks)
    record = finished.counted[0]
    spent = [run.energy_wh for run in each if run.energy_wh is not None]
    return BenchmarkResult(
        benchmark=benchmark.name,
        size=benchmark.size,
        title=benchmark.definition.title,
        verdict="PASSED" if right and not broken else "FAILED",
        figure=_figure(each, benchmark.definition.figure),
        energy_wh=sum(spent) / len(spent) if spent else None,
        energy_of=_whose(record, counters) if spent else None,
        checks=checks,
        rules=KeptRules(kept=not broken, broken=broken, changed=benchmark.changed()),
        runs=each,
        reference=f"{len(reference.curves)} seeds, {reference.made_by}",
        precision=str(record.config["precision"]),
        machine=machine_of(record, finished.load),
        software=software_of(record),
        settings=dict(record.config),
        finished=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _broken(benchmark: Benchmark, number: int, *, own: bool) -> list[str]:
    told = benchmark.broken()
    if number < LEAST_RUNS:
        told.append(f"{number} runs, not {LEAST_RUNS} or more")
    if own:
        told.append("the definition or the reference is not the one that comes with it")
    return told


def timed(
    record: RunRecord, benchmark: Benchmark, counters: Collection[str] = tuple(COUNTERS)
) -> TimedRun:
    """Return the figures of a counted run, with the energy of these counters."""
    definition = benchmark.definition
    reached = record.reached() if definition.figure == "target" else None
    return TimedRun(
        seed=int(record.facts["seed"]),
        seconds=seconds_of(record, definition.figure),
        rounds=record.rounds_done if reached is None else reached.rounds,
        all_seconds=record.timed_seconds(),
        # NaN if the file is older.
        cpu_seconds=_known(float(record.rounds["cpu_seconds"][record.untimed :].sum())),
        quality=_known(quality_of(record, definition.quality)),
        samples=float(record.rounds["trained_samples"].sum()),
        energy_wh=_energy(record, counters),
    )


def _joules(record: RunRecord, counter: str) -> float | None:
    """Return what a counter says; None if it says nothing."""
    joules: float | None = getattr(record, counter)
    # 0 means that no counter moved, not that a run was free.
    return joules if joules is not None and joules > 0 else None


def _energy(record: RunRecord, counters: Collection[str]) -> float | None:
    found = [_joules(record, name) for name in counters]
    known = [joules for joules in found if joules is not None]
    return sum(known) / JOULES_PER_WH if known else None


def _whose(record: RunRecord, counters: Collection[str]) -> str:
    whose = " and ".join(COUNTERS[name] for name in counters)
    # Ranks of the server do not count theirs; one process plays both roles.
    apart = record.config.get("server_ranks") and len(record.environment["ranks"]) > 1
    return f"{whose} of workers" if apart else whose


def _figure(each: list[TimedRun], kind: str) -> FigureOfMerit:
    seconds = [run.seconds for run in each if run.seconds is not None]
    # Without the runs that miss their target the rest would look fast.
    whole = len(seconds) == len(each)
    found = of_times(seconds) if whole else Estimate(float("nan"))
    return FigureOfMerit(
        meaning=FIGURES[kind],
        seconds=_known(found.centre),
        low=_known(found.low),
        high=_known(found.high),
        interval=INTERVAL,
        dropped=2 * dropped(len(seconds)) if whole else 0,
    )


def _known(value: float) -> float | None:
    return None if isnan(value) else value


def machine_of(record: RunRecord, load: float) -> UsedMachine:
    """Return where a run ran; `load` is the first host's, before."""
    environment = record.environment
    ranks = environment["ranks"]
    cpu_of = {rank["host"]: rank["cpu"] for rank in ranks}
    return UsedMachine(
        hosts=list(cpu_of),
        ranks=len(ranks),
        devices=[rank["device"] for rank in ranks],
        cpus=list(cpu_of.values()),
        cores_per_rank=min(rank["cores"] for rank in ranks),
        threads_per_rank=environment["threads_per_rank"],
        backend=environment["backend"],
        load=_known(load),
    )


def software_of(record: RunRecord) -> UsedSoftware:
    """Return what a run ran with."""
    environment = record.environment
    source = environment["source"]
    return UsedSoftware(
        version=source["version"],
        commit=source.get("commit"),
        changed=source.get("changed"),
        sha256=source["sha256"],
        python=environment["python"],
        platform=environment["platform"],
        cuda=environment["cuda"],
        nccl=environment["nccl"],
        packages=environment["packages"],
    )


def read_result(path: Path) -> BenchmarkResult:
    """Read a result file; refuse anything else."""
    try:
        # Not json.loads: it takes halves of characters, which no page can hold.
        return BenchmarkResult.model_validate_json(content_of(path))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        reason = first_problem(error)
    raise UserError(f"{path} is not a benchmark's result: {reason}")
