"""What a benchmark is: a TOML file with settings of `hpcfed run` for every size, the
figure of merit, and what is verified.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hpcfed import methods, shipped
from hpcfed.errors import UserError, unknown
from hpcfed.options import Settings, facts, flag_of, method_of, named, resolve
from hpcfed.options.declare import Facts
from hpcfed.options.tomlfile import load_toml
from hpcfed.results.series import ROUND_SERIES
from hpcfed.runtime.launcher import launched

FOLDER = Path(__file__).parent
SHIPPED_FILE = "benchmarks/"
"""Values that begin with this are files that come with hpcfed."""
FIGURES = {"target": "seconds to the target accuracy", "work": "seconds for all rounds"}
"""Figures of merit. Both are times of rounds on the slowest rank, with evaluations."""
Values = Mapping[str, Any]


class Definition(BaseModel):
    """The content of a benchmark's file."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    title: str
    figure: Literal["target", "work"]
    quality: str
    """The series of rounds whose mean over rounds is verified."""
    margin: float = Field(gt=0)
    """How far the mean quality over seeds may be from the reference's."""
    weights: Literal["samples", "clients"] = "samples"
    """What uploads weigh: by their clients' samples, or all the same."""
    stacked: bool = True
    """Whether seeds can advance together, which makes a reference cheap."""
    common: dict[str, Any]
    check: dict[str, Any] = {}
    """What differs in the short run whose aggregation is checked."""
    sizes: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Benchmark:
    """A benchmark in one size, and the options that a user has changed."""

    name: str
    size: str
    definition: Definition
    given: Values
    """Options of `hpcfed run` that were added on the command line."""
    source: str
    """How messages name the file."""
    word: str
    """How commands name it: as the user has, since a file of one's own has a path."""

    def settings(self, **more: Any) -> Settings:
        """Return the settings of a run with the user's changes, and with `more`."""
        return self._resolved({**self.given, **more})

    def checking(self, **more: Any) -> Settings:
        """Return the settings of one round that records rows and aggregate."""
        short = {"rounds": 1, "snapshot_every": 1, **self.definition.check}
        if "method" in short:
            # The other method may not have all options of the benchmark's.
            known = facts(short["method"])
            given = {name: self.given[name] for name in self.given if name in known}
            return self._resolved({**given, **short, **more}, known)
        return self._resolved({**self.given, **short, **more})

    def work(self) -> dict[str, Any]:
        """Return what the definition sets and the rules fix."""
        settings = self._resolved({})
        stated = facts(settings.config.method)
        values = settings.flat()
        return {
            name: values[name] for name in self._defined() if not _free(stated[name])
        }

    def options(self) -> dict[str, Any]:
        """Return the options that the definition sets or the user has added."""
        defined = {name: _found(value) for name, value in self._defined().items()}
        return defined | dict(self.given)

    def changed(self) -> dict[str, Any]:
        """Return the options whose values the user has changed."""
        before = self._resolved({}).flat()
        after = self.settings().flat()
        # It is about the files of an earlier call, not about these runs.
        names = after.keys() - {"overwrite"}
        return {
            name: after[name]
            for name in sorted(names)
            if after[name] != before.get(name)
        }

    def broken(self) -> list[str]:
        """Say which changes of options break the rules."""
        stated = facts(self.settings().config.method)
        before = self._resolved({}).flat()
        told = []
        for name, value in self.changed().items():
            # What follows from a change that is allowed is allowed: ranks round batches.
            if name in self.given and not _free(stated[name]):
                told.append(f"{name} is {value}, not {before.get(name)}")
        return told

    def _defined(self) -> dict[str, Any]:
        return {**self.definition.common, **self.definition.sizes[self.size]}

    def _resolved(
        self, changes: Values, known: Collection[str] | None = None
    ) -> Settings:
        """Resolve the definition's options, of which some may be unknown, and changes."""
        values = {}
        for name, value in self._defined().items():
            if known is None or name in known:
                values[name] = _found(value)
        values |= changes
        sources = {name: f"{self.source}: {name}" for name in values}
        for name, value in changes.items():
            sources[name] = f"{flag_of(name)} {value}"
        options = methods.load(method_of(values)).Options
        return resolve(values, sources, options, ranks=launched().size)


def _free(stated: Facts) -> bool:
    """Tell whether the rules leave an option to the user."""
    return stated.tunable or stated.changes in ("time", "nothing")


def _found(value: Any) -> Any:
    """Return a value, or where a file that comes with hpcfed lies on this machine."""
    if isinstance(value, str) and value.startswith(SHIPPED_FILE):
        return str(shipped.top() / value)
    return value


def names() -> dict[str, Path]:
    """Return the files of all benchmarks that come with hpcfed, by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}


def read_definition(name: str) -> tuple[str, Definition]:
    """Return the name and content of a benchmark: one of ours, or a FILE.toml."""
    path = Path(name) if name.endswith(".toml") else names().get(name)
    if path is None:
        raise unknown("benchmark", name, names())
    try:
        definition = Definition.model_validate(load_toml(path))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{path}: {where}: {first['msg'].lower()}") from None
    # Now: after the runs it would cost their time.
    if definition.quality not in ROUND_SERIES:
        raise UserError(
            f"{path}: {unknown('quality', definition.quality, ROUND_SERIES)}"
        )
    return path.stem, definition


def read_benchmark(name: str, size: str, given: Values) -> Benchmark:
    """Read a benchmark in a size, with the options that a user has added."""
    own, definition = read_definition(name)
    if size not in definition.sizes:
        raise unknown(f"size of benchmark {own}", size, definition.sizes)
    # A new call may replace the runs of an earlier one.
    own_options = {*named(study_sets=True), *named(changes="draws")} - {"overwrite"}
    for option in sorted(own_options & given.keys()):
        raise UserError(f"{flag_of(option)}: a benchmark sets it for each of its runs")
    return Benchmark(own, size, definition, given, f"{own}.toml", name)
