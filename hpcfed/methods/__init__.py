"""One file per method, with the functions that `Method` lists: state in, state out.

A file `name_of_method.py` here is the method `name-of-method`; the first paragraph of
its docstring is its line in `hpcfed list`. Files whose name starts with an underscore
hold code that methods share. A method may also be the user's own file, `--method
FILE.py`, or a module that an installed package announces as an entry point of
`hpcfed.methods`.

A file may reuse functions of another method: `EXTENDS = fedavg` takes from FedAvg
whatever the file does not define itself. Without a class `Options` a method adds no
options. A method's file imports all it needs from this module: other methods, types,
markers for fields of a state, `Options` and `option`.

Write imports at the top of the file. Heavy modules such as torch are really imported
when they are first used, see `_late`: the command line reads the options of methods and
must answer quickly.
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
from hpcfed.methods._defaults import Finals, Pool, all_clients, no_finals, not_led
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
from hpcfed.methods._spelling import check_spelling
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


@dataclass(frozen=True)
class Method:
    """What a method's file defines; fields are named as in the file."""

    init: Callable[[Federation], Any]
    """Returns the state before the first round, a dataclass of tensors."""
    round: Callable[[Federation, Any, Cohort], Any]
    """Returns the state after a round with this cohort."""
    personal: Callable[[Federation, Any, Positions], Tensor]
    """Returns the rows to evaluate on the test data of these clients of this rank."""
    global_row: Callable[[Any], Tensor | None]
    """Returns the row to evaluate on global test data; None without a global model."""
    welcome: Callable[[Federation, Any, Cohort], Tensor]
    """Returns the first rows of clients that join later. The cohort is all of them, in
    a federation of their own.
    """
    pool: Pool = all_clients
    """Returns the ids that a round draws its cohort from, ascending; None: all."""
    finals: Callable[[Federation, Any, Positions], Finals] = no_finals
    """Yields names and rows to evaluate after the last round."""
    FINALS: tuple[str, ...] = ()
    """All names that `finals` may yield."""
    figures: Callable[[Federation, Any, Positions], Finals] = no_finals
    """Yields a name and one number per client, to record after the last round. Numbers
    are not negative; NaN for a client without one.
    """
    FIGURES: tuple[str, ...] = ()
    """All names that `figures` may yield."""
    depths: Callable[[Federation, Any, Positions], Iterator[Any]] = no_finals
    """Yields an `AtDepth` for each depth of inversion to record after the last round."""
    lead: Callable[[Federation, Any, int, Tensor, Tensor], Tensor] = not_led
    """Returns new clients' rows after a local update, as the server guides them. Takes
    the last state, the update's number, and the rows before and after it.
    """
    adopt: Callable[[Federation, Any, Cohort], Any] | None = None
    """Returns the state with which clients that join later begin their own rounds,
    after those of the known clients. The cohort is all of them, in a federation of
    their own. None for methods whose new clients only train by themselves.
    """
    VALIDATES: bool = False
    """Whether the server evaluates uploads on its own validation set."""
    PRIVATE_MEAN: bool = False
    """Whether the server sends one row to all clients, and learns nothing of their
    uploads but one `fed.mean` of rows. Then noise on the mean hides each upload. Set it
    in the file that defines `round`.
    """
    VOTES: bool | None = None
    """Whether a majority of signs can replace that mean, because all clients start from
    one row; None: as PRIVATE_MEAN.
    """
    Options: type[Options] = Options
    """The options that the method adds to those of every run."""


REQUIRED = [f.name for f in fields(Method) if f.default is MISSING]
"""What every method must define."""


def names() -> list[str]:
    """Return the names of all methods of this package, in alphabetical order."""
    return [*_names_in(tuple(__path__))]


@cache
def _names_in(folders: tuple[str, ...]) -> list[str]:
    """Look into folders only once: whoever loads all methods asks for each."""
    found = [module.name for module in pkgutil.iter_modules(folders)]
    return sorted(name.replace("_", "-") for name in found if name[0] != "_")


def announced() -> dict[str, EntryPoint]:
    """Return methods that installed packages announce; of equal names, ours wins."""
    found = {}
    ours = names()
    for name, entry in sorted(plugins.installed("methods").items()):
        if name not in ours:
            found[name] = entry
    return found


def summaries() -> dict[str, str]:
    """Return one line for every method, read from its source without importing it.

    Plugins are imported; the line of one that fails says so.
    """
    folder = Path(__file__).parent
    lines = {}
    # Parsing is enough: importing all methods would make `hpcfed list` slow.
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
    """Import a method: one of ours, a file FILE.py, a plugin, or a module that a
    program passed in. Raise a one-line UserError if it lacks something.
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
    check_spelling(name, module, HOOKS)
    _check_kinds(name, method)
    _check_options(name, method.Options)
    return method


def _check_init(name: str, module: ModuleType, method: Method) -> None:
    """Refuse a file that defines its own State but takes `init` from another method."""
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
    """Collect what a method's file and the methods that it extends define."""
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
        # Promises of the parent's round need not hold for this one.
        for promise in ("PRIVATE_MEAN", "VOTES"):
            offered.pop(promise, None)
    # Read attributes when loading, so that a test may replace a module's function.
    for field in fields(Method):
        if hasattr(module, field.name):
            offered[field.name] = getattr(module, field.name)
    # Files for older versions set it in their Options.
    own = vars(module).get("Options")
    if isinstance(own, type) and vars(own).get("private_mean"):
        offered["PRIVATE_MEAN"] = True
    return offered


def _check_kinds(name: str, method: Method) -> None:
    """Refuse definitions of the wrong kind, such as Options that are not a class."""
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
    for hook, takes in HOOKS.items():
        function = getattr(method, hook)
        if function is not None:
            _check_takes(name, hook, function, takes)


HOOKS = {
    "init": "fed",
    "round": "fed, state, cohort",
    "personal": "fed, state, clients",
    "global_row": "state",
    "welcome": "fed, state, cohort",
    "pool": "fed, state, round",
    "adopt": "fed, state, cohort",
    "finals": "fed, state, clients",
    "figures": "fed, state, clients",
    "depths": "fed, state, clients",
    "lead": "fed, state, update, before, after",
}
"""Every function of a method, and its arguments by position."""


def _check_takes(name: str, hook: str, function: Any, takes: str) -> None:
    """Refuse a function that does not take our arguments, before any round starts."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # not callable, or written in C: the call itself will tell
    try:
        signature.bind(*takes.split(", "))
    except TypeError:
        raise UserError(
            f"method {name}: {hook}{signature} must take ({takes})"
        ) from None


def _check_options(name: str, options: type[Options]) -> None:
    """Refuse options that clash with those of every run, or lack a help text."""
    for own, field in options.model_fields.items():
        if own in RunConfig.model_fields:
            raise UserError(
                f"method {name}: every run already has an option {own}; give this one "
                "another name"
            )
        if not is_option(field):
            raise UserError(
                f"method {name}: make its option {own} by "
                "hpcfed.methods.option(default, description)"
            )


def options(*more: str) -> dict[str, dict[str, FieldInfo]]:
    """Return the options of all our methods, and of `more`.

    A method that cannot be loaded, perhaps because it is unfinished, is left out.
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
    """Return the options that a shipped method adds; none for any other.

    Reading a record uses this, and must not import a file that the record names.
    """
    return dict(load(name).Options.model_fields) if name in names() else {}


def _promises(name: str) -> Promises:
    """Return what the round of a method promises."""
    method = load(name)
    votes = method.PRIVATE_MEAN if method.VOTES is None else method.VOTES
    return Promises(private_mean=method.PRIVATE_MEAN, votes=votes)


ask_methods(_declared, _promises)
