"""One file per method: functions from state to state over rows, which `Method` names.

A file `name_of_method.py` here is the method `name-of-method`; the first paragraph of
its docstring is its line in `hpcfed list`. Files whose name starts with an underscore
hold pieces that methods share. A method may as well be any file of the user's,
`--method FILE.py`, or a module that an installed package announces as an entry point of
`hpcfed.methods`.

A file may leave functions to another method: `EXTENDS = fedavg` takes from FedAvg
whatever the file does not define itself. Without a class `Options` a method adds no
options of its own. This module has what a method's file imports: other methods, types,
markers of fields of a state, `Options` and `option`.

A file imports what it needs at its top. What is heavy among it, such as torch, is
imported when it is first used, see `_late`: the command line reads the options of methods
and has to answer at once.
"""

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic.fields import FieldInfo

from hpcfed import plugins
from hpcfed.errors import UserError, unknown
from hpcfed.methods import _late  # noqa: F401 - later imports go through it
from hpcfed.methods._interface import (
    CLUSTERS,
    FIXED,
    GENERATED,
    IN_PLACE,
    OWNED,
    VARIES,
    Cohort,
    Entry,
    Federation,
    Layout,
    Positions,
    Tensor,
)
from hpcfed.options import (
    Choice,
    LocalWork,
    Need,
    Options,
    Promises,
    RunConfig,
    Switch,
    Training,
    ask_methods,
    is_option,
    option,
)

__all__ = [
    "CLUSTERS",
    "FIXED",
    "GENERATED",
    "IN_PLACE",
    "OWNED",
    "VARIES",
    "Choice",
    "Cohort",
    "Entry",
    "Federation",
    "Finals",
    "Layout",
    "LocalWork",
    "Method",
    "Need",
    "Options",
    "Positions",
    "RunConfig",
    "Switch",
    "Tensor",
    "Training",
    "load",
    "names",
    "option",
    "options",
    "owners",
    "summaries",
]

Finals = Iterator[tuple[str, Tensor]]


def no_finals(fed: Federation, state: Any, clients: Positions) -> Finals:
    """Judge nothing at the end beyond a round's evaluation."""
    return iter(())


def not_led(
    fed: Federation, state: Any, update: int, before: Tensor, after: Tensor
) -> Tensor:
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
    figures: Callable[[Federation, Any, Positions], Finals] = no_finals
    """Yields names and a number, not negative, for each of these clients, which are
    recorded after the last round; NaN where a client has none.
    """
    FIGURES: tuple[str, ...] = ()
    """All names that `figures` may yield."""
    lead: Callable[[Federation, Any, int, Tensor, Tensor], Tensor] = not_led
    """Returns new clients' rows after a local update, as the server leads them on;
    takes the last state, the update's number, and the rows before and after it.
    """
    adopt: Callable[[Federation, Any, Cohort], Any] | None = None
    """Returns the state with which clients that join later begin rounds of their own,
    after those of the known clients; the cohort is all of them, in a federation of their
    own. None for methods whose new clients only train by themselves.
    """
    VALIDATES: bool = False
    """Whether the server judges uploads on a validation set of its own."""
    PRIVATE_MEAN: bool = False
    """Whether all that the server learns of a round's uploads is one `fed.mean` of rows,
    after it has sent one row to all: then noise on the mean hides each of them. It
    belongs to the file that defines `round`.
    """
    VOTES: bool | None = None
    """Whether a majority of signs can replace that mean, because all rows start from
    one; None: as PRIVATE_MEAN says.
    """
    Options: type[Options] = Options
    """The options that the method adds to those of every run."""


REQUIRED = [f.name for f in fields(Method) if f.default is MISSING]
"""What every method has."""


def names() -> list[str]:
    """Return the names of all methods of this package, in alphabetical order."""
    found = []
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith("_"):
            found.append(module.name.replace("_", "-"))
    return sorted(found)


def announced() -> dict[str, EntryPoint]:
    """Return the methods that installed packages announce, by name; ours come first
    where both have a name.
    """
    found = {}
    ours = names()
    for name, entry in sorted(plugins.installed("methods").items()):
        if name not in ours:
            found[name] = entry
    return found


def summaries() -> dict[str, str]:
    """Return one line for every method, read from its source without importing it.

    Plugins are imported; one that fails has a line that says so.
    """
    folder = Path(__file__).parent
    lines = {}
    # Parsing is enough: importing all methods would make `hpcfed list` wait.
    for name in names():
        source = folder / f"{name.replace('-', '_')}.py"
        lines[name] = _summary(source.read_text())
    for name, entry in announced().items():
        try:
            module = _module(name)
            docstring = _first_paragraph(module.__doc__ or "")
            lines[name] = f"{docstring} (plugin {entry.value})".strip()
        except UserError as error:
            lines[name] = f"cannot be used: {error}"
    return lines


def _summary(text: str) -> str:
    try:
        docstring = ast.get_docstring(ast.parse(text)) or ""
    except SyntaxError as error:
        return f"cannot be read: {error}"
    return _first_paragraph(docstring)


def _first_paragraph(docstring: str) -> str:
    first = docstring.strip().partition("\n\n")[0]
    return " ".join(first.split())


def load(name: str) -> Method:
    """Import a method: one of ours, a file FILE.py, a plugin, or a module that was
    handed in. A UserError says in one line what it lacks.
    """
    module = _module(name)
    offered = _offered(name, module)
    lacking = [hook for hook in REQUIRED if not callable(offered.get(hook))]
    if lacking:
        raise UserError(
            f"method {name} lacks {', '.join(lacking)}; define them, or take them from "
            "another method, as by: from hpcfed.methods import fedavg; EXTENDS = fedavg"
        )
    method = Method(**offered)
    _check_init(name, module, method)
    _check_kinds(name, method)
    _check_options(name, method.Options)
    return method


def _check_init(name: str, module: ModuleType, method: Method) -> None:
    """Refuse a state of one's own that another method's `init` would not make."""
    state = vars(module).get("State")
    own = isinstance(state, type) and state.__module__ == module.__name__
    if own and method.init.__module__ != module.__name__:
        raise UserError(
            f"method {name} has a State of its own, but its init is that of "
            f"{method.init.__module__.rpartition('.')[2]}; define init(fed), which "
            "returns the first State"
        )


def _module(name: str) -> ModuleType:
    """Import the module of a method."""
    if plugins.is_file(name):
        return plugins.load_file(Path(name))
    if plugins.is_given(name):
        module: ModuleType = plugins.given(name, "method")
        return module
    if name in names():
        with plugins.one_line_of(f"method {name} cannot be imported"):
            return importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    plugin = announced().get(name)
    if plugin is None:
        raise unknown("method", name, [*names(), *announced()])
    loaded = plugins.load_installed(plugin)
    if not isinstance(loaded, ModuleType):
        raise UserError(
            f"plugin {name} ({plugin.value}) is not a module; an entry point of "
            "hpcfed.methods names the module of a method"
        )
    return loaded


def _offered(name: str, module: ModuleType) -> dict[str, Any]:
    """Collect what a method's file defines, and what the methods that it extends do."""
    parent = getattr(module, "EXTENDS", None)
    offered: dict[str, Any] = {}
    if isinstance(parent, ModuleType):
        offered = _offered(name, parent)
    elif parent is not None:
        raise UserError(
            f"method {name}: EXTENDS is {parent!r}, not a module; write: from "
            "hpcfed.methods import fedavg; EXTENDS = fedavg"
        )
    if "round" in vars(module):
        # What the round of another method promises need not hold for this one.
        for promise in ("PRIVATE_MEAN", "VOTES"):
            offered.pop(promise, None)
    # Read at the time of loading, so that a test may replace a function of a module.
    for field in fields(Method):
        if hasattr(module, field.name):
            offered[field.name] = getattr(module, field.name)
    # Files that were written for older versions promise it in their Options.
    own = vars(module).get("Options")
    if isinstance(own, type) and vars(own).get("private_mean"):
        offered["PRIVATE_MEAN"] = True
    return offered


def _check_kinds(name: str, method: Method) -> None:
    """Refuse what a file defines under our names and that is of another kind."""
    options = method.Options
    if not isinstance(options, type) or not issubclass(options, Options):
        raise UserError(
            f"method {name}: its Options are not a class of options; write: class "
            "Options(hpcfed.methods.Options)"
        )
    for what in ("FINALS", "FIGURES"):
        given = getattr(method, what)
        if not isinstance(given, tuple) or not all(isinstance(n, str) for n in given):
            raise UserError(f"method {name}: {what} must be a tuple of names")
    for hook, takes in _TAKES.items():
        function = getattr(method, hook)
        if function is not None:
            _check_takes(name, hook, function, takes)


_TAKES = {
    "init": "fed",
    "round": "fed, state, cohort",
    "personal": "fed, state, clients",
    "global_row": "state",
    "welcome": "fed, state, cohort",
    "adopt": "fed, state, cohort",
    "finals": "fed, state, clients",
    "figures": "fed, state, clients",
    "lead": "fed, state, update, before, after",
}
"""The arguments of every function, by position."""


def _check_takes(name: str, hook: str, function: Any, takes: str) -> None:
    """Refuse a function that cannot be called with our arguments, before a round is."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # not callable, or written in C: calling it will tell
    try:
        signature.bind(*takes.split(", "))
    except TypeError:
        raise UserError(
            f"method {name}: {hook}{signature} must take ({takes})"
        ) from None


def _check_options(name: str, options: type[Options]) -> None:
    """Refuse options that the command line could not tell from others, or explain."""
    for own, field in options.model_fields.items():
        if own in RunConfig.model_fields:
            raise UserError(
                f"method {name}: its option {own} is one of every run; give it "
                "another name"
            )
        if not is_option(field):
            raise UserError(
                f"method {name}: make its option {own} by "
                "hpcfed.methods.option(default, description)"
            )


def options(*more: str) -> dict[str, dict[str, FieldInfo]]:
    """Return the options of all our methods, and of `more`.

    One that cannot be loaded, as while somebody writes it, has none.
    """
    found = {}
    for name in (*names(), *more):
        with suppress(UserError):
            found[name] = dict(load(name).Options.model_fields)
    return found


def owners(wanted: str) -> list[str]:
    """Return the methods that have an option, plugins included."""
    having = []
    for name, declared in options(*announced()).items():
        if wanted in declared:
            having.append(name)
    return having


@cache
def _declared(name: str) -> dict[str, FieldInfo]:
    """Return the options that a method of ours adds; none for any other.

    Records are read with this: a file that a record names is not imported for it.
    """
    return dict(load(name).Options.model_fields) if name in names() else {}


def _promises(name: str) -> Promises:
    """Return what the round of a method promises."""
    method = load(name)
    votes = method.PRIVATE_MEAN if method.VOTES is None else method.VOTES
    return Promises(private_mean=method.PRIVATE_MEAN, votes=votes)


ask_methods(_declared, _promises)
