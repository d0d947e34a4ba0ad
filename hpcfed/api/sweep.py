"""A study started from a program or a notebook."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import nan
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Any

from hpcfed.api.opened import Run, path_of, table_of
from hpcfed.cli.settings import plain
from hpcfed.errors import UserError, shown
from hpcfed.options.metrics import global_name
from hpcfed.results.folder import records
from hpcfed.studies.attempt import outcome_of
from hpcfed.studies.plan import Trial
from hpcfed.studies.start import order_of, run_study


@dataclass(frozen=True)
class Sweep:
    """The trials of a study, in the order of its points."""

    folder: Path
    trials: tuple[Trial, ...]

    def __fspath__(self) -> str:
        """Return its folder, so that a study can be used wherever a path can."""
        return str(self.folder)

    @property
    def runs(self) -> list[Run]:
        """The runs of all trials that have written a record."""
        return [Run(trial.folder) for trial in self.trials if records(trial.folder)]

    def __iter__(self) -> Iterator[Run]:
        return iter(self.runs)

    def __len__(self) -> int:
        return len(self.runs)

    @property
    def table(self) -> Any:
        """A row per trial and seed: swept options, its end, and its last figures."""
        swept = _swept(self.trials)
        rows: list[dict[str, Any]] = []
        for trial in self.trials:
            about: dict[str, Any] = {
                "trial": str(trial),
                "status": outcome_of(trial).status,
            }
            for name in swept:
                about[name] = trial.point.given.get(name)
            figures = _figures(trial)
            rows += [about | of_seed for of_seed in figures]
        return table_of(rows, unknown=nan)

    def __repr__(self) -> str:
        return f"<study in {self.folder}, trials: {len(self.trials)}>"

    def _repr_html_(self) -> str:
        shown = self.table
        as_html = getattr(shown, "_repr_html_", None)
        return str(as_html()) if as_html is not None else f"<pre>{shown}</pre>"


def study(
    study: str | PathLike[str] | Mapping[str, Any],
    *,
    out: str | PathLike[str] | None,
    only: str,
    launcher: str,
    stack: int,
) -> Sweep:
    """Run the unfinished trials, and gather all into study.h5."""
    asked: Path | Mapping[str, Any]
    if isinstance(study, Mapping):
        if out is None:
            raise UserError("a study from a dict needs a folder, as in out='runs/mine'")
        asked = {name: _plain(entry, name) for name, entry in study.items()}
    else:
        wanted = "a TOML file, the name of a ready study, or a dict"
        asked = path_of(study, "hpcfed.study", wanted)
    order = order_of(
        asked,
        out=None if out is None else path_of(out, "out", "a folder"),
        only=only,
        numbers=None,
        starter=launcher,
        most=stack,
    )
    run_study(order)
    return Sweep(order.out, tuple(order.trials))


def _plain(value: Any, key: str) -> Any:
    """Return a study's value as its file would hold it, as `hpcfed.run` takes it; refuse
    objects, because the runs of a study are separate processes.
    """
    if isinstance(value, PathLike):
        return str(Path(value))
    # Values to sweep over may be an array.
    if len(getattr(value, "shape", ())) == 1:
        value = value.tolist()
    value = plain(value)
    if isinstance(value, Mapping):
        return {name: _plain(entry, f"{key}.{name}") for name, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry, key) for entry in value]
    if callable(value) or isinstance(value, ModuleType):
        raise UserError(
            f"{key}: {value!r}: a study starts every run in a process of its own; put "
            "this into a file, and give FILE.py or FILE.py:NAME"
        )
    if value is not None and not isinstance(value, str | int | float):
        raise UserError(
            f"{key}: must be text, numbers, lists or tables, got {shown(value)}, of type "
            f"{type(value).__name__}"
        )
    return value


def _swept(every: tuple[Trial, ...]) -> list[str]:
    """Return the options in which trials differ."""
    names: dict[str, set[str]] = {}
    for trial in every:
        for name in trial.point.given:
            names[name] = set()
    for name, values in names.items():
        # As text, because a list, such as --seeds, cannot be in a set.
        values.update(repr(trial.point.given.get(name)) for trial in every)
    return [name for name, values in names.items() if len(values) > 1]


def _figures(trial: Trial) -> list[dict[str, Any]]:
    """Return the last figures of each seed; nothing for a trial without a record."""
    if not records(trial.folder):
        # Not NaN, which would turn the seeds of all rows into floats.
        return [{"seed": -1, "accuracy": nan, "global_accuracy": nan}]
    found = []
    for record in Run(trial.folder).records:
        figures: dict[str, Any] = {"seed": record.facts["seed"]}
        for name in ("accuracy", "trained_accuracy", "global_accuracy", "train_loss"):
            figures[name] = record.last(name)
        for name in record.metrics:
            for series in (name, global_name(name)):
                figures[series] = record.last(series)
        figures["seconds"] = float(record.rounds["seconds"].sum())
        found.append(figures)
    return found
