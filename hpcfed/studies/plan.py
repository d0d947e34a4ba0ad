"""What a study file asks for: every point of the sweep, checked before the first one
starts. Does not import torch.

A point is a choice of options; a trial is one run of it. Points multiply: every variant
with every combination of the swept values. Two names are the study's own. `ranks` is
how many MPI ranks host clients (the server's ranks, if the method has any, come on
top). `clients_per_rank` replaces `clients` if the number of ranks determines it.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hpcfed import methods, shipped
from hpcfed.errors import UserError, did_you_mean
from hpcfed.options import (
    RunConfig,
    Settings,
    by_option,
    check,
    facts,
    idle,
    load_toml,
    method_of,
    named,
    resolve,
    suggest_option,
)
from hpcfed.options.declare import flag_text, flags
from hpcfed.results.folder import POINTS, seed_folder
from hpcfed.runtime.launcher import Launch, Start

MOST_RANKS = 1_000_000
"""A larger number of ranks is a typo."""
MOST_NAME = 255
"""Longest folder name on Linux, in bytes."""


class Study(BaseModel):
    """What a study file holds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str = ""
    common: dict[str, Any] = {}
    """Options that all points share."""
    sweep: dict[str, list[Any]] = {}
    """Options with the values that they take in turn."""
    variants: dict[str, dict[str, Any]] = {}
    """Options that change together, such as a method and its own options, by a name."""
    repeats: int = Field(1, ge=1, le=1000)
    """Runs of every point: processes differ more than the rounds of one."""
    warmup: int = Field(1, ge=0)
    """Rounds at the start of a run whose times do not count."""
    limit: float = Field(float("inf"), gt=0)
    """Seconds after which an attempt of a run is ended and counts as failed."""


@dataclass(frozen=True)
class Point:
    """A choice of options."""

    number: int
    name: str
    """Also the name of its folder."""
    given: dict[str, Any]
    """Options as passed to `hpcfed run`."""
    settings: Settings
    ranks: int
    """Ranks that host clients."""

    @property
    def processes(self) -> int:
        """Ranks to start, including the server's."""
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
    def run_folders(self) -> list[Path]:
        """The folders of its runs: with several seeds, each has its own."""
        if self.point.settings.config.seeds is None:
            return [self.folder]
        return [seed_folder(self.folder, seed) for seed in self.seeds]

    @property
    def words(self) -> list[str]:
        """The command line, after `hpcfed`; a failed trial runs again."""
        given = flags(self.point.given)
        return ["run", *given, "--out", str(self.folder), "--overwrite"]

    @property
    def log(self) -> Path:
        return self.folder.with_suffix(".log")

    @property
    def outcome(self) -> Path:
        return self.folder.with_suffix(".json")

    @property
    def claim(self) -> str:
        """The file beside its folder with which a process takes it."""
        return f".{self.folder.name}.claim"


@dataclass(frozen=True)
class StudyOrder:
    """A study to be run: which points, into which folder, and how."""

    study: Study
    path: Path
    text: str
    """The text of the study's file."""
    every: Sequence[Point]
    chosen: Sequence[Point]
    out: Path
    start: Start
    most: int = 1
    """Most trials that may run as one process."""

    @cached_property
    def every_trial(self) -> list[Trial]:
        return trials(self.study, self.every, self.out)

    @cached_property
    def trials(self) -> list[Trial]:
        """The trials of the chosen points."""
        return trials(self.study, self.chosen, self.out)


def find_study(path: Path) -> Path:
    """Return the file itself or, if it does not exist, the ready study of that name."""
    name = str(path)
    is_a_word = name == path.stem
    if path.is_file() or not is_a_word:
        return path
    ready = shipped.ready_studies()
    if name in ready:
        return ready[name]
    hint = did_you_mean(name, ready) or f"; ready ones: {', '.join(ready)}"
    raise UserError(f"there is no study file {path}{hint}")


def read_study(path: Path) -> Study:
    """Read a study file and run the checks that do not need the options."""
    return study_of(load_toml(path), path)


def study_of(tables: Mapping[str, Any], path: Path) -> Study:
    """Make a study from the tables of a file, or from a program's equivalent."""
    try:
        study = Study.model_validate(tables)
    except ValidationError as failure:
        raise UserError(f"{path}: {_reason(failure)}") from None
    if not study.sweep and not study.variants:
        raise UserError(
            f"{path}: nothing is swept; "
            "add a table such as [sweep] with clients = [10, 100]"
        )
    for name, values in study.sweep.items():
        if not values:
            raise UserError(
                f"{path}: sweep.{name} is empty; give it values, as in {name} = [1, 2]"
            )
        different = {repr(value) for value in values}  # lists have no hash
        if len(different) < len(values):
            raise UserError(f"{path}: sweep.{name} has a value twice")
    if "\0" in study.title:  # HDF5 strings cannot hold it
        raise UserError(
            f"{path}: title: must be without a null character, got {study.title!r}"
        )
    return study


def _reason(failure: ValidationError) -> str:
    error = failure.errors()[0]
    where = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        return f"{where}: unknown key{suggest_option(where, Study.model_fields)}"
    # Reword pydantic's message in the tone of our own.
    wanted = error["msg"].replace("Input should be", "must be")
    return f"{where}: {wanted}, got {error['input']!r}"


def points(study: Study, path: Path) -> list[Point]:
    """Return all points in order; refuse a mistake in any of them."""
    made: list[Point] = []
    for variant in study.variants or {"": {}}:
        # The last option of the sweep changes fastest.
        for values in itertools.product(*study.sweep.values()):
            swept = dict(zip(study.sweep, values, strict=True))
            tables = {
                "common": study.common,
                f"variants.{variant}": study.variants.get(variant, {}),
                "sweep": swept,
            }
            name = _name(variant, swept)
            number = len(made)
            made.append(_point(number, name, tables, path))
    _check_names(made, path)
    return made


def _check_names(made: Sequence[Point], path: Path) -> None:
    """Refuse names that cannot be folders side by side."""
    seen = set()
    for point in made:
        name = point.name
        if name in seen:
            raise UserError(
                f"{path}: two points would be called {name}; "
                "give the variants clearer names"
            )
        seen.add(name)
        # Counted in bytes, as file systems do.
        size = len(name.encode())
        if size > MOST_NAME:
            raise UserError(
                f"{path}: the name of point {name[:40]}… has {size} bytes, "
                f"a folder's has {MOST_NAME} at most; "
                "give such options in [variants.NAME] with a short name"
            )


def choose(
    every: Sequence[Point], *, only: str, numbers: Sequence[int] | None
) -> list[Point]:
    """Return the points with a matching name and, if given, one of these numbers."""
    for number in numbers or ():
        if not 0 <= number < len(every):
            raise UserError(
                f"--points {number}: points are numbered from 0 to {len(every) - 1}"
            )
    chosen = [point for point in every if fnmatchcase(point.name, only)]
    if numbers is not None:
        chosen = [point for point in chosen if point.number in numbers]
    if not chosen:
        raise UserError(
            f"--only {only} leaves no point; they have names such as {every[0].name}"
        )
    return chosen


def trials(study: Study, chosen: Sequence[Point], out: Path) -> list[Trial]:
    """Return the runs of all points. Repeats are interleaved: all points once, then all
    again, so that a slow hour of the machine does not fall on one point.
    """
    made = []
    for repeat in range(study.repeats):
        for point in chosen:
            folder = out / POINTS / point.name / f"repeat-{repeat}"
            made.append(Trial(point, repeat, folder))
    return made


def _point(
    number: int, name: str, tables: Mapping[str, Mapping[str, Any]], path: Path
) -> Point:
    """Make a point from the options of all its tables; later tables override."""
    values, sources = _merge(tables, path)
    ranks = _ranks(values, sources)
    try:
        kind = methods.load(method_of(values)).Options
    except UserError as error:
        raise UserError(f"{sources.get('method', path)}: {error}") from None
    _check_known(values, sources, kind)
    # Not checked yet: `resolve` reports what is wrong with it, but needs the number.
    servers = values.get("server_ranks")
    processes = ranks + (servers if isinstance(servers, int) else 0)
    shared = []
    for option in values:
        if sources[option] == f"{path}: common.{option}":
            shared.append(option)
    # Shared options may be meant for other points' methods, so here they may have no
    # effect.
    settings = resolve(values, sources, kind, shared=shared, ranks=processes)
    # A shared option may be needed by some points and have no effect in this one. Then
    # it is left out of the command.
    for option in set(idle(settings)).intersection(shared):
        del values[option]
    settings = resolve(values, sources, kind, ranks=processes)
    # Jobs may start in another folder, so paths of the user's files are absolute.
    for option, stated in facts().items():
        if stated.names_code and option in values:
            values[option] = getattr(settings.config, option)
    point = Point(number, name, values, settings, ranks)
    try:
        check(point.settings, Launch("study", 0, point.processes))
    except UserError as error:
        raise UserError(f"{path}: point {name}: {error}") from None
    return point


def _merge(
    tables: Mapping[str, Mapping[str, Any]], path: Path
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the options' values, and the source of each for messages."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for table, given in tables.items():
        for option, value in by_option(given, f"{path}: {table}").items():
            values[option] = value
            sources[option] = f"{path}: {table}.{option}"
    for option in named(study_sets=True):
        if option in values:
            raise UserError(
                f"{sources[option]}: the study gives it to every run itself"
            )
    return values, sources


def _ranks(values: dict[str, Any], sources: dict[str, str]) -> int:
    """Take the study's own options out of the values; return the number of ranks."""
    ranks = _number(values.pop("ranks", 1), sources.get("ranks", ""))
    if "clients_per_rank" in values:
        if "clients" in values:
            raise UserError(
                f"{sources['clients']} and clients_per_rank exclude each other; "
                "keep one of them"
            )
        source = sources["clients_per_rank"]
        each = _number(values.pop("clients_per_rank"), source)
        values["clients"] = ranks * each
        sources["clients"] = source
    return ranks


def _check_known(
    values: Mapping[str, Any], sources: Mapping[str, str], kind: type[BaseModel]
) -> None:
    """Refuse options that exist neither for all runs nor for the point's method."""
    known = [*RunConfig.model_fields, *kind.model_fields]
    for option in values:
        if option not in known:
            if having := methods.owners(option):
                raise UserError(
                    f"{sources[option]}: an option of method {', '.join(having)}, and "
                    "some points have another; give both together, in [variants.NAME]"
                )
            names = [*known, "ranks", "clients_per_rank"]
            raise UserError(
                f"{sources[option]}: unknown option{suggest_option(option, names)}"
            )


def _number(value: Any, source: str) -> int:
    # In Python, True and False are integers.
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not 1 <= value <= MOST_RANKS:
        raise UserError(f"{source}: must be a whole number from 1 on, got {value!r}")
    return int(value)


def _name(variant: str, swept: Mapping[str, Any]) -> str:
    """Return `fedavg,clients=10`, a folder name that is valid on any file system."""
    words = [variant] if variant else []
    for name, value in swept.items():
        words.append(f"{name}={flag_text(value)}")
    # A restarted study finds its points' folders by this name.
    return re.sub(r"[^\w.,=+-]", "-", ",".join(words))
