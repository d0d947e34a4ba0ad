"""The file of a paper's study: data sets, columns, methods, and the paper's figures; for
benchmarks/paper.py.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from hpcfed.config import (
    load_toml,
    suggest_option,
)
from hpcfed.errors import UserError, unknown
from hpcfed.record.run import RunRecord

Figures = dict[str, dict[str, dict[str, float]]]
"""A paper's: data set, method, column."""


class Measure(NamedTuple):
    title: str
    value: Callable[[RunRecord], float]
    """Of one seed; NaN when there is none."""
    digits: int = 2


def best(record: RunRecord) -> float:
    """Of the global model, or of the mean client where there is none."""
    return next(
        (
            100 * v
            for v in map(record.best, ("global_accuracy", "accuracy"))
            if not math.isnan(v)
        ),
        math.nan,
    )


def rounds_to_target(record: RunRecord) -> float:
    reached = record.reached()
    return math.nan if reached is None else float(reached.rounds)


MEASURES = {
    "accuracy": Measure(
        "last accuracy of clients, %", lambda record: 100 * record.last("accuracy")
    ),
    "best": Measure("best accuracy, %", best),
    "rounds": Measure("rounds to the target accuracy", rounds_to_target, digits=0),
    "comm": Measure(
        "sent by clients, GiB",
        lambda record: float(record.rounds["bytes_up"].sum()) / 2**30,
    ),
    "given": Measure(
        "sent to a new client to begin with, MiB",
        lambda record: record.newcomer_bytes / 2**20,
    ),
    "joining": Measure(
        "accuracy of new clients as they join, %",
        lambda record: 100 * record.newcomers_first("method"),
    ),
    "joined": Measure(
        "accuracy of new clients over their last ten updates, %",
        lambda record: 100 * record.newcomers_last("method"),
    ),
}


class Ablation(BaseModel):
    """A second table: what one method has judged at the end, by data set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str = ""
    clients: str = ""
    finals: tuple[str, ...] = ()
    figures: dict[str, dict[str, float]] = {}


class Study(BaseModel):
    """What is in the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    datasets: dict[str, dict[str, Any]]
    methods: dict[str, dict[str, Any]]
    """By the name of a row; the method is the key `method`, or the row's own name."""
    clients: dict[str, dict[str, Any]] = {}
    columns: dict[str, dict[str, Any]] = {}
    """In place of numbers of clients: any names, with any options."""
    common: dict[str, Any] = {}
    cells: tuple[str, ...] = ("*",)
    """Patterns, of which a cell's DATASET/CLIENTS/METHOD must fit one."""
    measures: tuple[
        Literal["accuracy", "best", "rounds", "comm", "given", "joining", "joined"], ...
    ] = ("accuracy",)
    """What the tables show, one after the other; `figures` belong to the first."""
    ours: tuple[str, ...] = ()
    """The paper's own methods; the others are its baselines."""
    rival: str = ""
    """The baseline that it is compared with."""
    optional: tuple[str, ...] = ()
    """Data sets that are left out where their files are not there."""
    rows: dict[str, tuple[str, ...]] = {}
    """Finals that stand in the table for a method, in place of its accuracy after the
    last round.
    """
    figures: Figures = {}
    further_figures: dict[str, Figures] = {}
    """Of the other measures."""
    ablation: Ablation = Ablation()

    def rows_of(self, method: str) -> tuple[str, ...]:
        return self.rows.get(method, (method,))

    @field_validator("ours", mode="before")
    @classmethod
    def _several(cls, ours: Any) -> Any:
        return (ours,) if isinstance(ours, str) else ours

    @property
    def across(self) -> dict[str, dict[str, Any]]:
        """What tables have beside each other for a data set."""
        return self.columns or self.clients

    def figure(
        self, dataset: str, clients: str, method: str, *, measure: str = ""
    ) -> float | None:
        figures = (
            self.further_figures.get(measure, {})
            if measure in self.measures[1:]
            else self.figures
        )
        return figures.get(dataset, {}).get(method, {}).get(clients)


def read_study(path: Path) -> Study:
    try:
        study = Study.model_validate(load_toml(path))
    except ValidationError as failure:
        first = failure.errors()[0]
        *_, key = first["loc"]
        guess = suggest_option(str(key), [*Study.model_fields, *Ablation.model_fields])
        reason = (
            f"unknown key{guess}"
            if first["type"] == "extra_forbidden"
            else first["msg"]
        )
        raise UserError(
            f"{path}: {'.'.join(map(str, first['loc']))}: {reason}"
        ) from None
    if bool(study.clients) == bool(study.columns):
        raise UserError(
            f"{path}: a study has tables [clients.N], or [columns.NAME], and not both"
        )
    own = study.ablation
    figures = [
        of
        for every in (study.figures, *study.further_figures.values())
        for of in every.values()
    ]
    named: dict[str, tuple[Mapping[str, Any], Sequence[str]]] = {
        "data set": (study.datasets, [*study.optional, *study.figures, *own.figures]),
        "method": (
            study.methods,
            [
                *study.ours,
                study.rival,
                own.method,
                *study.rows,
                *itertools.chain(*figures),
            ],
        ),
        "number of clients" if study.clients else "column": (
            study.across,
            [own.clients, *(n for of in figures for row in of.values() for n in row)],
        ),
    }
    for kind, (
        known,
        names,
    ) in named.items():  # a slip here would be a missing figure, without a word
        for name in names:
            if name and name not in known:
                raise UserError(f"{path}: {unknown(kind, name, known)}")
    return study
