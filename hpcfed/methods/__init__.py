"""One file per method: functions from state to state over rows, which `Method` names.

A file `name_of_method.py` here is the method `name-of-method`; the first paragraph of
its docstring is its line in `hpcfed list`. Files whose name starts with an underscore
hold pieces that methods share.

A file may leave functions to another method: `EXTENDS = fedavg` takes from FedAvg
whatever the file does not define itself. Without a class `Options` a method adds no
options of its own.

A method imports torch inside its functions, if at all: the command line reads the
options of all methods, and has to answer at once.
"""

import ast
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic.fields import FieldInfo

from hpcfed.config import Options, RunConfig
from hpcfed.errors import UserError, one_line, unknown
from hpcfed.methods._interface import Cohort, Federation, Positions, Tensor

Finals = Iterator[tuple[str, Tensor]]


def no_finals(fed: Federation, state: Any, clients: Positions) -> Finals:
    """Judge nothing at the end beyond a round's evaluation."""
    return iter(())


def not_led(fed: Federation, update: int, before: Tensor, after: Tensor) -> Tensor:
    """Leave new clients' rows as their own training made them."""
    return after


@dataclass(frozen=True)
class Method:
    """What a method's file offers, under the names that it has there."""

    init: Callable[[Federation], Any]
    """Returns the state before the first round, a dataclass of tensors."""
    round: Callable[[Federation, Any, Cohort], Any]
    """Returns the state after a round with this cohort."""
    personal: Callable[[Federation, Any, Positions], Tensor]
    """Returns the rows with which clients of this rank are judged on their own test
    data.
    """
    global_row: Callable[[Any], Tensor | None]
    """Returns the row that is judged on the global test data; None for methods that
    have no such row.
    """
    welcome: Callable[[Federation, Any, Cohort], Tensor]
    """Returns the rows with which clients that join later start; the cohort is all of
    them, in a federation of their own.
    """
    finals: Callable[[Federation, Any, Positions], Finals] = no_finals
    """Yields names and rows that are judged after the last round."""
    FINALS: tuple[str, ...] = ()
    """All names that `finals` may yield."""
    lead: Callable[[Federation, int, Tensor, Tensor], Tensor] = not_led
    """Returns new clients' rows after a local update, as the server leads them on;
    takes the update's number, and the rows before and after it.
    """
    VALIDATES: bool = False
    """Whether the server judges uploads on a validation set of its own."""
    Options: type[Options] = Options
    """The options that the method adds to those of every run."""


REQUIRED = [f.name for f in fields(Method) if f.default is MISSING]
"""What every method has."""


def names() -> list[str]:
    """Return the names of all methods, in alphabetical order."""
    found = []
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith("_"):
            found.append(module.name.replace("_", "-"))
    return sorted(found)


def summaries() -> dict[str, str]:
    """Return one line for every method, read from its source without importing it."""
    folder = Path(__file__).parent
    lines = {}
    # Parsing is enough: importing all methods would make `hpcfed list` wait.
    for name in names():
        source = folder / f"{name.replace('-', '_')}.py"
        lines[name] = _summary(source.read_text())
    return lines


def _summary(text: str) -> str:
    try:
        docstring = ast.get_docstring(ast.parse(text)) or ""
    except SyntaxError as error:
        return f"cannot be read: {error}"
    first_paragraph = docstring.partition("\n\n")[0]
    return " ".join(first_paragraph.split())


def load(name: str) -> Method:
    """Import a method; a UserError says in one line what its file lacks."""
    if name not in names():
        raise unknown("method", name, names())
    try:
        module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    except Exception as error:
        raise UserError(
            f"method {name} cannot be imported: {one_line(error)}"
        ) from error
    offered = _offered(module)
    lacking = [hook for hook in REQUIRED if not callable(offered.get(hook))]
    if lacking:
        raise UserError(
            f"method {name} lacks {', '.join(lacking)}; hpcfed/methods/__init__.py "
            "says what they do"
        )
    method = Method(**offered)
    _check_options(name, method.Options)
    return method


def _offered(module: ModuleType) -> dict[str, Any]:
    """Collect what a method's file defines, and what the methods that it extends do."""
    parent = getattr(module, "EXTENDS", None)
    offered = {} if parent is None else _offered(parent)
    # Read at the time of loading, so that a test may replace a function of a module.
    for field in fields(Method):
        if hasattr(module, field.name):
            offered[field.name] = getattr(module, field.name)
    return offered


def _check_options(name: str, options: type[Options]) -> None:
    """Refuse options that the command line could not tell from others, or explain."""
    for option, field in options.model_fields.items():
        if option in RunConfig.model_fields:
            raise UserError(
                f"method {name}: its option {option} is one of every run; give it "
                "another name"
            )
        if field.json_schema_extra is None:
            raise UserError(
                f"method {name}: make its option {option} by "
                "hpcfed.config.option(default, description)"
            )


def options() -> dict[str, dict[str, FieldInfo]]:
    """Return the options of every method.

    One that cannot be loaded, as while somebody writes it, has none.
    """
    found = {}
    for name in names():
        with suppress(UserError):
            found[name] = dict(load(name).Options.model_fields)
    return found
