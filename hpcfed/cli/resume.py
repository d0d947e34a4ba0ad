"""Settings of a resumed run, whether the user or Slurm's requeueing resumes it."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcfed import methods, plugins
from hpcfed.errors import UserError, no_checkpoint, remark
from hpcfed.options import Settings, facts, named, resolve
from hpcfed.options.first_weights import kept_weights
from hpcfed.options.rates import RateSchedule
from hpcfed.results import checkpoints
from hpcfed.results.claim import begun_by, this_job, was_requeued
from hpcfed.results.folder import (
    HALF_LEARNT,
    PLAN,
    RECORD,
    RUNS,
    STUDY,
    check_one_kind,
    check_plain,
    holds_run,
    records,
    seed_folder,
)
from hpcfed.results.folder import runs as runs_of
from hpcfed.results.folder import seeds as seeds_of
from hpcfed.results.run import RunRecord
from hpcfed.results.sandbox import try_out
from hpcfed.results.stored import changed_files, is_complete, read_run
from hpcfed.runtime.launcher import launched


def resumed(folder: Path, beside: Mapping[str, Any]) -> Settings:
    """Return the settings of the run in a folder, for all unfinished seeds.

    `beside` are the options that the user gave with --resume.
    """
    check_plain(folder)
    check_one_kind(folder)
    seeds = _seeds_left(folder, beside.get("rounds"))
    runs = [seed_folder(folder, seed) for seed in seeds] or [folder]
    record = _read_first(folder, runs)
    _check_places(folder, record.config)
    if not beside.get("accept_changes"):
        _check_files(folder, record)
    values: dict[str, Any] = {}
    for name, value in record.config.items():
        if value is not None:
            values[name] = value
    values |= {"out": str(folder), "resume": str(folder)}
    for name in named(from_record=False):
        values.pop(name, None)
    # The record may be of a run that was shorter then.
    values["rounds"] = planned = max(record.config["rounds"], _planned(runs))
    values |= beside
    # The record is that of one seed; the resumed run advances all unfinished seeds.
    if seeds:
        del values["seed"]
        values["seeds"] = ",".join(map(str, seeds))
    sources = {name: f"{folder}: {name}" for name in values}
    method_options = methods.load(str(values.get("method"))).Options
    # A record holds all options, also those without effect. `shared` keeps the checks
    # from refusing these.
    settings = resolve(values, sources, method_options, shared=values)
    extended = settings.config.rounds != planned
    if extended:
        _check_longer(folder, settings, planned)
    if not settings.config.overwrite:
        _check_checkpoints(folder, runs, record, extended=extended)
    return settings


def _check_places(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse to run code inside the run folder: the folder may be from someone else."""
    for name, stated in facts().items():
        if not stated.names_code:
            continue
        where = str(config.get(name))
        if plugins.is_reference(where):
            where = where.rpartition(":")[0]
        if not plugins.is_file(where):
            continue
        if folder.resolve() in Path(where).resolve().parents:
            raise UserError(
                f"--resume {folder}: its {name} is {where}, a file of that folder; "
                "hpcfed does not run code that comes with results: begin a new run "
                "with it"
            )


def _planned(runs: Sequence[Path]) -> int:
    """Return the most rounds that any of these runs is planned with; 0 if unknown."""
    planned = [0]
    for run in runs:
        with suppress(UserError):
            try_out(records(run))
            planned.append(read_run(run).config["rounds"])
    return max(planned)


def _check_longer(folder: Path, settings: Settings, planned: int) -> None:
    """Refuse a number of rounds that the run cannot be extended to."""
    config = settings.config
    if config.rounds < planned:
        raise UserError(
            f"--resume {folder} --rounds {config.rounds}: the run has {planned} rounds, "
            "and can only be made longer"
        )
    if settings.options.has_server:
        raise UserError(
            f"--resume {folder} --rounds {config.rounds}: the server of method "
            f"{config.method} learns after the last round, so the run cannot be made "
            "longer; begin a new one"
        )
    if config.target_epsilon is not None:
        raise UserError(
            f"--resume {folder} --rounds {config.rounds}: its noise was chosen for ε "
            f"= {config.target_epsilon:g} after {planned} rounds, so the run cannot "
            "be made longer; begin a new one"
        )
    if launched().rank != 0:
        return
    # Only some methods have a schedule of the server's learning rate.
    none = RateSchedule("constant")
    schedules = {
        "--server-lr-schedule": getattr(settings.options, "server_schedule", none)
    }
    if config.lr_schedule_by == "round":
        schedules["--lr-schedule"] = config.rate_schedule
    for flag, schedule in schedules.items():
        if not schedule.begins_alike(planned, config.rounds):
            remark(
                f"hpcfed: from here on {flag} {schedule.kind} counts {config.rounds} "
                f"rounds; the rounds that are done have counted {planned}"
            )


def can_be_longer(settings: Settings) -> bool:
    """Tell whether more --rounds can make a resumed run longer."""
    config = settings.config
    if settings.options.has_server or config.target_epsilon is not None:
        return False
    return config.resume is not None and all(
        map(checkpoints.exist, runs_of(config.resume))
    )


def _seeds_left(folder: Path, rounds: Any) -> list[int]:
    """Return the seeds of a folder to resume; none if the folder is a single run.

    Leave finished seeds out, unless all are finished. While a run is made longer, the
    record of one seed may know the new number of rounds before that of another does.
    """
    # A single run: `check_one_kind` has refused a folder with a run and seeds.
    if (folder / RECORD).exists():
        return []
    begun = [seed for seed in seeds_of(folder) if holds_run(seed_folder(folder, seed))]
    if rounds is None:
        rounds = _planned([seed_folder(folder, seed) for seed in begun])
    left = [seed for seed in begun if not complete(seed_folder(folder, seed), rounds)]
    return left or begun


def _read_first(folder: Path, runs: Sequence[Path]) -> RunRecord:
    """Read the record of the first run, after test-reading the files of all runs."""
    # The root checks all files that any rank may read; other ranks only need options.
    record_only = launched().rank > 0
    files: list[Path] = []
    for run in runs:
        files += checkpoints.recorded(run, record_only=record_only)
        if not record_only:
            files.append(run / HALF_LEARNT)
    first = next(path for path in files if path.name == RECORD)
    if not first.is_file():
        if any((folder / name).is_file() for name in (STUDY, PLAN)):
            raise UserError(
                f"--resume {folder}: this is a study; start it again to go on: hpcfed "
                "study FILE.toml"
            )
        raise UserError(f"--resume {folder}: there is no run")
    # A damaged file can crash HDF5: a child process opens it first.
    try_out(filter(Path.is_file, files))
    return read_run(first.parent)


def _check_checkpoints(
    folder: Path, runs: Sequence[Path], record: RunRecord, *, extended: bool
) -> None:
    """Refuse to silently start over if rounds are recorded without a checkpoint."""
    lost = 0 if all(map(checkpoints.exist, runs)) else record.rounds_done
    if lost and (extended or record.status != "complete"):
        raise UserError(no_checkpoint(folder, lost))


def _check_files(folder: Path, record: RunRecord) -> None:
    """Refuse to go on if a file of the user has changed, before it is imported."""
    for path in changed_files(record, kept_weights(folder)):
        raise UserError(
            f"--resume {folder}: {path} has changed since the run began, so its "
            "figures may differ; restore it, or add --accept-changes to go on anyway"
        )


def requeued(settings: Settings) -> Settings:
    """Return the settings of a job that Slurm may requeue.

    The job starts, or resumes in a folder that it began itself. `check` refuses a
    folder that another job began.
    """
    config, job = settings.config, this_job()
    if job is None:
        raise UserError(
            "--requeue is for Slurm jobs, but SLURM_JOB_ID is not set; leave it out"
        )
    if config.resume is not None:
        return settings
    # A requeued job keeps its number, so it finds its folder again.
    out = config.out or RUNS / f"slurm-{job.split()[0]}"
    # Two clusters may use the same job number: `begun_by` compares the cluster, too.
    ours = was_requeued() and begun_by(out) == job
    if ours and any(map(_goes_on, runs_of(out))):
        # A job may overwrite what it began itself, and sends to the same trackers.
        given = {"overwrite": True}
        for name in named(package=True, from_record=False):
            if getattr(config, name) is not None:
                given[name] = getattr(config, name)
        return resumed(out, given)
    changes = {"out": out, "overwrite": config.overwrite or ours}
    return replace(settings, config=config.model_copy(update=changes))


def _goes_on(run: Path) -> bool:
    """Tell whether a run need not begin anew. A server may have stopped in a learning of
    the first round.
    """
    return checkpoints.exist(run) or (run / HALF_LEARNT).exists() or complete(run)


def complete(folder: Path, rounds: Any = None) -> bool:
    """Tell whether a run, or every seed of it, is complete, with `rounds` if given."""
    try:
        try_out(records(folder))
    except UserError:
        return False
    # The number may still be the user's text: `resolve` validates it.
    with suppress(TypeError, ValueError):
        return is_complete(folder, int(rounds))
    return is_complete(folder)
