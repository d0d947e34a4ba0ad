"""One file per method: `init`, `round`, `personal`, `global_row` and `welcome`,
functions from state to state.

A file `name_of_method.py` here is the method `name-of-method`; its docstring's first
line is its line in `hpcfed list`. Files whose name starts with an underscore hold
pieces that methods share. A method imports torch inside its functions, if at all, so
that the command line, which reads the options of all methods, stays quick. Without a
class `Options` it has no flags of its own.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from hpcfed.config import Options, RunConfig
from hpcfed.errors import UserError, one_line, unknown

if TYPE_CHECKING:
    import numpy as np
    from pydantic.fields import FieldInfo
    from torch import Tensor

    from hpcfed.federation.federation import Cohort, Federation

OWNED = {"owned": True}
"""Metadata of a state's field with one entry per client of this rank; other fields are
the same on every rank.
"""
GENERATED = OWNED | {"generated": True}
"""… with the columns that the server generates, or with none as long as it has not
learnt.
"""
FIXED = {"fixed": True}
"""… that follows from the network alone: a run that goes on has it already."""
CLUSTERS = {"row_of": "shared"}
"""… whose numbers say which row of the field `shared` is meant."""


FUNCTIONS = ("init", "round", "personal", "global_row", "welcome")
"""What every method has."""


class Method(Protocol):
    """What a method's module offers. A state is a dataclass of tensors."""

    Options: type[Options]

    def init(self, fed: Federation) -> Any:
        """The state before the first round."""

    def round(self, fed: Federation, state: Any, cohort: Cohort) -> Any:
        """The state after a round with this cohort."""

    def personal(self, fed: Federation, state: Any, clients: np.ndarray) -> Tensor:
        """The rows with which clients of this rank (by position) are judged on their
        own test data.
        """

    def global_row(self, state: Any) -> Tensor | None:
        """The model that is judged on the global test data, or None when the method has
        none.
        """

    def welcome(self, fed: Federation, state: Any, cohort: Cohort) -> Tensor:
        """The rows with which clients that join later start; `cohort` is all of them."""


def names() -> list[str]:
    modules = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(
        name.replace("_", "-") for name in modules if not name.startswith("_")
    )


def summaries() -> dict[str, str]:
    """One line for every method, read from its source without importing it."""
    folder = Path(__file__).parent
    texts = {
        name: (folder / f"{name.replace('-', '_')}.py").read_text() for name in names()
    }
    return {name: _summary(text) for name, text in texts.items()}


def _summary(text: str) -> str:
    try:
        docstring = ast.get_docstring(ast.parse(text)) or ""
    except SyntaxError as error:
        return f"cannot be read: {error}"
    first_paragraph = docstring.partition("\n\n")[0]
    return " ".join(first_paragraph.split())


def load(name: str) -> Method:
    """The method's module, or one line about what it lacks."""
    if name not in names():
        raise unknown("method", name, names())
    try:
        module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    except Exception as error:
        raise UserError(
            f"method {name} cannot be imported: {one_line(error)}"
        ) from error
    if not hasattr(module, "Options"):
        module.Options = Options  # type: ignore[attr-defined]
    if lacking := [
        part for part in FUNCTIONS if not callable(getattr(module, part, None))
    ]:
        raise UserError(
            f"method {name} lacks {', '.join(lacking)}; hpcfed/methods/__init__.py "
            "says what they do"
        )
    for option, field in module.Options.model_fields.items():
        if option in RunConfig.model_fields:
            raise UserError(
                f"method {name}: its option {option} is one of every run; give it another name"
            )
        if field.json_schema_extra is None:
            raise UserError(
                f"method {name}: make its option {option} by "
                "hpcfed.config.option(default, description)"
            )
    return cast(Method, module)


def options() -> dict[str, dict[str, FieldInfo]]:
    """The options of every method; one that cannot be loaded, as while it is being
    written, has none.
    """
    found = {}
    for name in names():
        with suppress(UserError):
            found[name] = dict(load(name).Options.model_fields)
    return found
