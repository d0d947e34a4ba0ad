"""What a study file asks for: every point of the sweep, checked before the first one
starts. Imports no torch.

A point is a choice of options; a trial is one run of it. Points multiply: every variant
with every combination of the swept values. Two names are the study's own: `ranks` is
how many MPI ranks host clients (the server's ranks, if the method has any, come on
top), and `clients_per_rank` stands for `clients` where the number of ranks decides it.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hpcfed import methods
from hpcfed.config import (
    RunConfig,
    Settings,
    by_option,
    check,
    idle,
    load_toml,
    resolve,
    suggest_option,
)
from hpcfed.errors import UserError
from hpcfed.runtime.launcher import Launch

OWN = ("out", "overwrite", "resume", "requeue")
"""Options that the study gives to every run itself."""
MOST_RANKS = 1_000_000
"""Beyond that a number of ranks is a slip."""

MOST_NAME = 255
"""Bytes of a folder's name on Linux."""


class Study(BaseModel):
    """What is in the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str = ""
    common: dict[str, Any] = {}
    """Options that all points share."""
    sweep: dict[str, list[Any]] = {}
    """Options with the values that they take in turn."""
    variants: dict[str, dict[str, Any]] = {}
    """Options that change together, such as a method and what belongs to it, by a name.
    """
    repeats: int = Field(1, ge=1, le=1000)
    """Runs of every point: processes differ more than the rounds of one."""
    warmup: int = Field(1, ge=0)
    """Rounds at the start of a run whose times do not count."""
    limit: float = Field(float("inf"), gt=0)
    """Seconds after which a run is ended and counts as failed."""


@dataclass(frozen=True)
class Point:
    number: int
    name: str
    given: dict[str, Any]
    """Options as they are handed to `hpcfed run`."""
    settings: Settings
    ranks: int
    """That host clients."""

    @property
    def processes(self) -> int:
        return self.ranks + self.settings.config.server_ranks


@dataclass(frozen=True)
class Trial:
    """One run of a point."""

    point: Point
    repeat: int
    folder: Path

    def __str__(self) -> str:
        return f"{self.point.name}/{self.folder.name}"

    @property
    def seeds(self) -> tuple[int, ...]:
        config = self.point.settings.config
        return config.seeds or (config.seed,)

    @property
    def words(self) -> list[str]:
        """Of `hpcfed run`."""
        return [
            "run",
            *flags(self.point.given),
            "--out",
            str(self.folder),
            "--overwrite",
        ]

    @property
    def log(self) -> Path:
        return self.folder.with_suffix(".log")

    @property
    def outcome(self) -> Path:
        return self.folder.with_suffix(".json")


def read_study(path: Path) -> Study:
    try:
        study = Study.model_validate(load_toml(path))
    except ValidationError as failure:
        raise UserError(f"{path}: {_reason(failure)}") from None
    if not study.sweep and not study.variants:
        raise UserError(
            f"{path}: nothing is swept; add a table such as [sweep] with clients = [10, 100]"
        )
    for name, values in study.sweep.items():
        if not values:
            raise UserError(
                f"{path}: sweep.{name} is empty; give it values, as in {name} = [1, 2]"
            )
        if len({repr(value) for value in values}) < len(values):
            raise UserError(f"{path}: sweep.{name} has a value twice")
    if "\0" in study.title:  # which HDF5 cannot hold
        raise UserError(
            f"{path}: title: must be without a null character, got {study.title!r}"
        )
    return study


def _reason(failure: ValidationError) -> str:
    error = failure.errors()[0]
    where = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        return f"{where}: unknown key{suggest_option(where, Study.model_fields)}"
    return f"{where}: {error['msg'].replace('Input should be', 'must be')}, got {error['input']!r}"


def points(study: Study, path: Path) -> list[Point]:
    """All points in order; a mistake in any of them ends the study before it begins."""
    swept = [
        [(name, value) for value in values] for name, values in study.sweep.items()
    ]
    made: list[Point] = []
    for variant, *chosen in itertools.product(study.variants or {"": {}}, *swept):
        tables = {
            "common": study.common,
            f"variants.{variant}": study.variants.get(variant, {}),
            "sweep": dict(chosen),
        }
        made.append(_point(len(made), _name(variant, chosen), tables, path))
    seen = set()
    for name in (point.name for point in made):
        if name in seen:
            raise UserError(
                f"{path}: two points would be called {name}; give the variants clearer names"
            )
        if (size := len(name.encode())) > MOST_NAME:
            raise UserError(
                f"{path}: the name of point {name[:40]}… has {size} bytes, a folder's "
                f"has {MOST_NAME} at most; "
                "give such options in [variants.NAME] with a short name"
            )
        seen.add(name)
    return made


def choose(
    every: Sequence[Point], *, only: str, numbers: Sequence[int] | None
) -> list[Point]:
    """The points whose name fits the pattern and, where numbers are given, whose number
    is one of them.
    """
    for number in numbers or ():
        if not 0 <= number < len(every):
            raise UserError(
                f"--points {number}: points are numbered from 0 to {len(every) - 1}"
            )
    chosen = [
        p
        for p in every
        if fnmatchcase(p.name, only) and (numbers is None or p.number in numbers)
    ]
    if not chosen:
        raise UserError(
            f"--only {only} leaves no point; they have names such as {every[0].name}"
        )
    return chosen


def trials(study: Study, chosen: Sequence[Point], out: Path) -> list[Trial]:
    """Repeats go round: all points once, then all again, so that a machine's slow hour
    does not fall on one point.
    """
    return [
        Trial(point, repeat, out / "points" / point.name / f"repeat-{repeat}")
        for repeat in range(study.repeats)
        for point in chosen
    ]


def _point(
    number: int, name: str, tables: Mapping[str, Mapping[str, Any]], path: Path
) -> Point:
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for table, given in tables.items():
        for option, value in by_option(given, f"{path}: {table}").items():
            values[option], sources[option] = value, f"{path}: {table}.{option}"
    for option in OWN:
        if option in values:
            raise UserError(
                f"{sources[option]}: the study gives it to every run itself"
            )
    ranks = _number(values.pop("ranks", 1), sources.get("ranks", ""))
    if "clients_per_rank" in values:
        if "clients" in values:
            raise UserError(
                f"{sources['clients']} and clients_per_rank exclude each other; keep one of them"
            )
        values["clients"] = ranks * _number(
            values.pop("clients_per_rank"), sources["clients_per_rank"]
        )
        sources["clients"] = sources["clients_per_rank"]
    kind = methods.load(
        str(values.get("method", RunConfig.model_fields["method"].default))
    ).Options
    for option in values:
        if option not in RunConfig.model_fields and option not in kind.model_fields:
            known = [
                *RunConfig.model_fields,
                *kind.model_fields,
                "ranks",
                "clients_per_rank",
            ]
            raise UserError(
                f"{sources[option]}: unknown option{suggest_option(option, known)}"
            )
    servers = values.get("server_ranks")
    processes = ranks + (servers if isinstance(servers, int) else 0)
    shared = [
        option for option in values if sources[option] == f"{path}: common.{option}"
    ]
    settings = resolve(values, sources, kind, shared=shared, ranks=processes)
    unused = {
        option for option in idle(settings) if option in shared
    }  # what some points need, and this one does not
    values = {option: value for option, value in values.items() if option not in unused}
    point = Point(
        number, name, values, resolve(values, sources, kind, ranks=processes), ranks
    )
    try:
        check(point.settings, Launch("study", 0, point.processes))
    except UserError as error:
        raise UserError(f"{path}: point {name}: {error}") from None
    return point


def _number(value: Any, source: str) -> int:
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or not 1 <= value <= MOST_RANKS
    ):
        raise UserError(f"{source}: must be a whole number from 1 on, got {value!r}")
    return value


def _name(variant: str, chosen: Sequence[tuple[str, Any]]) -> str:
    """`fedavg,clients=10`: a folder's name on any file system."""
    parts = [variant] * bool(variant) + [
        f"{name}={_text(value)}" for name, value in chosen
    ]
    return re.sub(r"[^\w.,=+-]", "-", ",".join(parts))


def _text(value: Any) -> str:
    """As a flag takes it."""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def flags(given: Mapping[str, Any]) -> list[str]:
    """Options as words of a command line."""
    words = []
    for name, value in given.items():
        flag, text = f"--{name.replace('_', '-')}", _text(value)
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag.removeprefix('--')}")
        else:
            words += [f"{flag}={text}"] if text.startswith("-") else [flag, text]
    return words
