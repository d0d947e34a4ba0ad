"""The file of a paper's study: data sets, columns, methods, and the paper's figures."""

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    field_validator,
    model_validator,
)

from benchmarks.paper.measures import MEASURES
from hpcfed.errors import UserError, unknown
from hpcfed.options import load_toml, suggest_option
from hpcfed.results.series import METRIC_SERIES, ROUND_SERIES


class Printed(NamedTuple):
    """A figure as a paper prints it."""

    value: float
    error: float | None = None
    """What stands behind its ±."""


def _read_printed(given: Any) -> Printed:
    """Read 91.2, or [91.2, 0.1] where the paper prints an error, too."""
    numbers = given if isinstance(given, list) else [given]
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ValueError("must be a number, or [number, error]")
    if len(numbers) not in (1, 2):
        raise ValueError("must be a number, or [number, error]")
    return Printed(*map(float, numbers))


Figure = Annotated[Printed, BeforeValidator(_read_printed)]
Figures = dict[str, dict[str, dict[str, Figure]]]
"""A paper's figures, by data set, method and column."""


def _known_measure(name: str) -> str:
    if name not in MEASURES:
        raise ValueError(str(unknown("measure", name, MEASURES)))
    return name


MeasureName = Annotated[str, AfterValidator(_known_measure)]


class Part(BaseModel):
    """Some of a study's cells. A list that is left out stands for all that there are."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = ""
    datasets: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()

    def shows(self, names: tuple[str, str, str]) -> bool:
        """Tell whether a cell belongs to the part."""
        wanted = (self.datasets, self.columns, self.methods)
        for name, those in zip(names, wanted, strict=True):
            if those and name not in those:
                return False
        return True


class Table(Part):
    """One of the paper's tables: a measure in some of the study's cells."""

    measure: MeasureName
    beside: tuple[MeasureName, ...] = ()
    """Measures that stand beside it, in columns of their own."""
    minus: str = ""
    """A method whose values are taken off, seed by seed: paired differences."""


class Drawing(Part):
    """One of the paper's figures, drawn of our runs."""

    kind: Literal["curves", "bars", "across", "clients", "map", "between", "depths"]
    """curves: a series over rounds, a line for every method. bars: a measure, a bar for
    every method. across: a measure over an option that columns set. clients: the finals
    of every client. map: clients' snapshots on two principal axes. between: the loss on
    the line between two clients' rows. depths: accuracy by depth of inversion.
    """
    series: str = ""
    """What `curves` show: a series of rounds, or one of `NEW_SERIES`."""
    cumulative: bool = False
    """Whether `curves` add up what came before."""
    measure: MeasureName | None = None
    """What `bars` and `across` show."""
    x: str = ""
    """The option on the horizontal axis of `across`."""
    finals: tuple[str, ...] = ()
    """The finals that `clients` show."""
    below: float | None = None
    """Per cent; the legend of `clients` counts those with less."""
    label: str = ""
    """The vertical axis, where the series' own description is too long."""

    @model_validator(mode="after")
    def _whole(self) -> "Drawing":
        """Refuse a drawing that lacks what its kind needs."""
        for key in NEEDED_BY[self.kind]:
            if not getattr(self, key):
                raise ValueError(f"a drawing of kind {self.kind} needs {key}")
        known = [*ROUND_SERIES, *METRIC_SERIES, *NEW_SERIES]
        if self.series and self.series not in known:
            raise ValueError(str(unknown("series", self.series, known)))
        return self


NEW_SERIES = {
    "new_accuracy": "accuracy of new clients as they stand",
    "new_trained_accuracy": "accuracy of new clients after their local training",
    "newcomers": "accuracy of new clients that train alone",
}
"""Series of the rounds that new clients make, and what each is."""
NEEDED_BY = {
    "curves": ("name", "series"),
    "bars": ("name", "measure"),
    "across": ("name", "measure", "x"),
    "clients": ("name", "finals"),
    "map": ("name",),
    "between": ("name",),
    "depths": ("name",),
}
"""What a drawing needs, by its kind."""


class Ablation(BaseModel):
    """A second table: the accuracies that one method judges at its end, by data set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str = ""
    clients: str = ""
    finals: tuple[str, ...] = ()
    figures: dict[str, dict[str, Figure]] = {}


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
    measures: tuple[MeasureName, ...] = ("accuracy",)
    """What the tables show, one after the other; `figures` belong to the first."""
    tables: tuple[Table, ...] = ()
    """The paper's tables, in place of one table of all cells for every measure."""
    drawings: tuple[Drawing, ...] = ()
    """The paper's figures."""
    reading: str = ""
    """How the paper's gaps are read, in a few words that stand in every figure."""
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
    further_figures: dict[MeasureName, Figures] = {}
    """The paper's figures of the other measures."""
    figures_of: dict[str, str] = {}
    """Columns that are other readings of a column: the paper's figures are the same."""
    ablation: Ablation = Ablation()

    def rows_of(self, method: str) -> tuple[str, ...]:
        """Return the names of the table's rows that a method has."""
        return self.rows.get(method, (method,))

    @field_validator("ours", mode="before")
    @classmethod
    def _several(cls, ours: Any) -> Any:
        return (ours,) if isinstance(ours, str) else ours

    @property
    def all_measures(self) -> tuple[str, ...]:
        """Everything that any table or figure shows, each once."""
        names = [*self.measures]
        for table in self.tables:
            names += [table.measure, *table.beside]
        names += [drawing.measure for drawing in self.drawings if drawing.measure]
        return tuple(dict.fromkeys(names))

    @property
    def across(self) -> dict[str, dict[str, Any]]:
        """The columns that tables have for a data set."""
        return self.columns or self.clients

    def figure(
        self, dataset: str, clients: str, method: str, *, measure: str = ""
    ) -> Printed | None:
        """Return the paper's figure, of the first measure unless another is named; None
        where the study has none.
        """
        if measure:
            measure = MEASURES[measure].reading_of or measure
        figures = self.figures
        if measure not in ("", self.measures[0]):
            figures = self.further_figures.get(measure, {})
        column = self.figures_of.get(clients, clients)
        return figures.get(dataset, {}).get(method, {}).get(column)


def read_study(path: Path) -> Study:
    """Read a study's file, and refuse unknown names in it."""
    try:
        study = Study.model_validate(load_toml(path))
    except ValidationError as failure:
        raise UserError(f"{path}: {_mistake(failure)}") from None
    # Tables have columns of one kind.
    if bool(study.clients) == bool(study.columns):
        raise UserError(
            f"{path}: a study has tables [clients.N], or [columns.NAME], and not both"
        )
    for measure in study.all_measures:
        if MEASURES[measure].relative and not study.rival:
            raise UserError(f"{path}: {measure} needs a rival")
    names = [drawing.name for drawing in study.drawings]
    for name in names:
        # The second file would replace the first.
        if names.count(name) > 1:
            raise UserError(f"{path}: two drawings are called {name}")
    _check_all_names(path, study)
    return study


def _mistake(failure: ValidationError) -> str:
    """Say where the first mistake of a file is, and what."""
    first = failure.errors()[0]
    where = [str(key) for key in first["loc"]]
    reason = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        known: list[str] = []
        for kind in (Study, Table, Drawing, Ablation):
            known += kind.model_fields
        reason = f"unknown key{suggest_option(where[-1], known)}"
    return f"{'.'.join(where)}: {reason}"


def _check_all_names(path: Path, study: Study) -> None:
    """Refuse unknown names: a slip in one would cost a figure of a
    table, without a word.
    """
    ablation = study.ablation
    datasets = [*study.optional, *ablation.figures]
    methods = [*study.ours, study.rival, ablation.method, *study.rows]
    columns = [ablation.clients, *study.figures_of, *study.figures_of.values()]
    for figures in (study.figures, *study.further_figures.values()):
        datasets += figures
        for rows in figures.values():
            methods += rows
            columns += itertools.chain(*rows.values())
    for part in (*study.tables, *study.drawings):
        datasets += part.datasets
        methods += part.methods
        columns += part.columns
    methods += [table.minus for table in study.tables]
    _check_names(path, "data set", datasets, study.datasets)
    _check_names(path, "method", methods, study.methods)
    kind = "number of clients" if study.clients else "column"
    _check_names(path, kind, columns, study.across)


def _check_names(
    path: Path, kind: str, names: Iterable[str], known: Mapping[str, Any]
) -> None:
    for name in names:
        if name and name not in known:
            raise UserError(f"{path}: {unknown(kind, name, known)}")
