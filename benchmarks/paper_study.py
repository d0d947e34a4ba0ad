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
"""A paper's figures, by data set, method and column."""


class Measure(NamedTuple):
    """One thing that a table shows."""

    title: str
    value: Callable[[RunRecord], float]
    """Returns it for the run of one seed; NaN when there is none."""
    digits: int = 2


def best(record: RunRecord) -> float:
    """Return the best accuracy of the global model, or of the mean client where there
    is none, in per cent.
    """
    of_global_model = record.best("global_accuracy")
    if not math.isnan(of_global_model):
        return 100 * of_global_model
    return 100 * record.best("accuracy")


def rounds_to_target(record: RunRecord) -> float:
    """Return after how many rounds the target accuracy was reached; NaN if never."""
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
    """A second table: the accuracies that one method judges at its end, by data set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str = ""
    clients: str = ""
    finals: tuple[str, ...] = ()
    figures: dict[str, dict[str, float]] = {}


class Study(BaseModel):
    """The content of a study's file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    datasets: dict[str, dict[str, Any]]
    methods: dict[str, dict[str, Any]]
    """Options by the name of a table's row. The key `method` names the method; without
    it, the row's name does.
    """
    clients: dict[str, dict[str, Any]] = {}
    columns: dict[str, dict[str, Any]] = {}
    """Columns of any name and with any options, in place of numbers of clients."""
    common: dict[str, Any] = {}
    cells: tuple[str, ...] = ("*",)
    """Patterns; a cell's DATASET/CLIENTS/METHOD must fit one of them."""
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
    """Finals (accuracies that a method judges at its end) that the table shows for a
    method, in place of its accuracy after the last round.
    """
    figures: Figures = {}
    further_figures: dict[str, Figures] = {}
    """The paper's figures of the other measures."""
    ablation: Ablation = Ablation()

    def rows_of(self, method: str) -> tuple[str, ...]:
        """Return the names of the table's rows that a method has."""
        return self.rows.get(method, (method,))

    @field_validator("ours", mode="before")
    @classmethod
    def _several(cls, ours: Any) -> Any:
        return (ours,) if isinstance(ours, str) else ours

    @property
    def across(self) -> dict[str, dict[str, Any]]:
        """The columns that tables have for a data set."""
        return self.columns or self.clients

    def figure(
        self, dataset: str, clients: str, method: str, *, measure: str = ""
    ) -> float | None:
        """Return the paper's figure; None where the study has none."""
        figures = self.figures
        if measure in self.measures[1:]:
            figures = self.further_figures.get(measure, {})
        return figures.get(dataset, {}).get(method, {}).get(clients)


def read_study(path: Path) -> Study:
    """Read a study's file, and refuse names in it that stand for nothing."""
    try:
        study = Study.model_validate(load_toml(path))
    except ValidationError as failure:
        first = failure.errors()[0]
        where = [str(key) for key in first["loc"]]
        reason = first["msg"]
        if first["type"] == "extra_forbidden":
            known = [*Study.model_fields, *Ablation.model_fields]
            reason = f"unknown key{suggest_option(where[-1], known)}"
        raise UserError(f"{path}: {'.'.join(where)}: {reason}") from None
    # Tables have columns of one kind.
    if bool(study.clients) == bool(study.columns):
        raise UserError(
            f"{path}: a study has tables [clients.N], or [columns.NAME], and not both"
        )
    # A slip in one of these names would cost a figure of the table, without a word.
    ablation = study.ablation
    datasets = [*study.optional, *study.figures, *ablation.figures]
    methods = [*study.ours, study.rival, ablation.method, *study.rows]
    columns = [ablation.clients]
    for figures in (study.figures, *study.further_figures.values()):
        for rows in figures.values():
            methods += rows
            columns += itertools.chain(*rows.values())
    _check_names(path, "data set", datasets, study.datasets)
    _check_names(path, "method", methods, study.methods)
    kind = "number of clients" if study.clients else "column"
    _check_names(path, kind, columns, study.across)
    return study


def _check_names(
    path: Path, kind: str, names: Sequence[str], known: Mapping[str, Any]
) -> None:
    for name in names:
        if name and name not in known:
            raise UserError(f"{path}: {unknown(kind, name, known)}")
