"""Objects that a program passes in: a class, a function, or the module of a method.

The object itself runs. It is named by its file, so that anyone can go on with the run.
But a program may have changed the object since it was imported, or its author the file:
then it is recorded as an object that only this program has.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from hpcfed import plugins
from hpcfed.errors import UserError, remark
from hpcfed.methods._spelling import words_in
from hpcfed.runtime.launcher import launched

OURS = "hpcfed.methods."
FUNCTIONS = FunctionType | staticmethod | classmethod
ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def name_of(thing: Any, kind: str, *, resumes: bool) -> str:
    """Return a run's name for an object, by which this process finds the object. A run
    that `resumes` has recorded a name already, which must still mean the same.
    """
    name = _reference(thing)
    if name is None:
        return plugins.give(thing, kind)
    where = name.rpartition(":")[0] or name
    if not plugins.is_file(where):
        return name  # one of ours, or of a package, which is not imported again
    if _source(thing) == _source(_of_file(name, kind)):
        plugins.hand_in(thing, name)
        if resumes:
            plugins.give(thing, kind)
        return name
    given = plugins.give(thing, kind, _source(thing))
    differs = f"the {kind} that was handed in is not what {where} says now"
    if resumes:
        plugins.hand_in(
            UserError(f"{differs}; leave it out to go on with {name}"), name
        )
    elif not launched().rank:
        remark(
            f"hpcfed: {differs}: it runs, and is recorded as {given}; to run the file's, "
            f"give {name!r}"
        )
    return given


def _reference(thing: Any) -> str | None:
    """Return FILE.py, FILE.py:NAME, package.module:NAME or the name of one of our
    methods for an object that can be imported again; None for one that exists only in
    this program.
    """
    if isinstance(thing, ModuleType):
        if thing.__name__.startswith(OURS):
            return thing.__name__.removeprefix(OURS).replace("_", "-")
        file = getattr(thing, "__file__", None) or ""
        return plugins.absolute(file) if plugins.is_file(file) else None
    home, name = _home(thing), getattr(thing, "__qualname__", "")
    module = sys.modules.get(home)
    file = getattr(module, "__file__", None) or _file_of_code(thing)
    # The main program cannot be imported again: it would run once more.
    if home == "__main__" or not (plugins.is_file(file) and name.isidentifier()):
        return None
    in_package = "." in home
    is_lost = module is None and not in_package
    if not is_lost and getattr(module, name, None) is not thing:
        return None
    return f"{home if in_package else plugins.absolute(file)}:{name}"


def _file_of_code(thing: Any) -> str:
    """Return the file of a function or class. Its module may have been forgotten, for
    its file has changed.
    """
    for one in (thing, *getattr(thing, "__dict__", {}).values()):
        if isinstance(one, FunctionType):
            return one.__code__.co_filename
    return ""


def _of_file(name: str, kind: str) -> Any:
    """Return what a file says now; None if it cannot be read any more."""
    try:
        if plugins.is_file(name):
            return plugins.load_file(Path(name))
        return plugins.load_object(name, kind)
    except UserError:
        return None


def _home(thing: Any) -> str:
    """Return the name of the module in which a thing was made."""
    if isinstance(thing, ModuleType):
        return thing.__name__
    return getattr(thing, "__module__", None) or ""


def _source(thing: Any) -> str:
    return "\n".join(_outline(thing))


def _outline(thing: Any) -> Iterator[str]:
    """Yield what an object does, in lines that are equal for equal code."""
    home = _home(thing)
    waiting, known = [("", thing)], set()
    while waiting:
        name, value = waiting.pop()
        parts: dict[str, Any] = {}
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        if isinstance(value, property):
            parts = {"get": value.fget, "set": value.fset}
        elif _home(value) == home and isinstance(value, FunctionType):
            parts = _parts_of_function(value)
        elif _home(value) == home and isinstance(value, type | ModuleType):
            parts = _parts_of_class(value)
        elif _home(value) == home and hasattr(value, "__wrapped__"):
            parts = {"wrapped": value.__wrapped__}  # by functools.cache
        if not parts:
            yield f"{name} = {_text(value, home)}"
        elif id(value) not in known:
            known.add(id(value))
            waiting += [(f"{name}.{each}", parts[each]) for each in sorted(parts)]


def _text(value: Any, home: str) -> str:
    """Return a text that is equal for equal values."""
    # What a module collects as it runs, such as a cache, is no change of it.
    if isinstance(value, list | dict | set):
        return type(value).__name__
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, str | bytes | tuple) and value != home:
        return repr(value)
    # Its module has another name once the file is imported by its path; so have a class
    # and a logger there.
    return re.sub(rf"\b{re.escape(home)}\b", "here", ADDRESS.sub("", repr(value)))


def _parts_of_class(owner: Any) -> dict[str, Any]:
    """Return what a class or a module has."""
    parts = {}
    for name, value in vars(owner).items():
        # Python and libraries keep theirs under such names, some only later.
        if not name.startswith("__") or isinstance(value, FUNCTIONS):
            parts[name] = value
    if isinstance(owner, type):
        parts |= {f"base {n}": base for n, base in enumerate(owner.__bases__)}
        # Options of a method: pydantic takes them out of the class.
        parts |= {
            f"field {n}": f for n, f in getattr(owner, "model_fields", {}).items()
        }
    return parts


def _parts_of_function(function: FunctionType) -> dict[str, Any]:
    """Return a function's code, and what of its module and surroundings it uses."""
    parts: dict[str, Any] = {"code": tuple(_code(function.__code__))}
    for number, value in enumerate(function.__defaults__ or ()):
        parts[f"default {number}"] = value
    for name, value in (function.__kwdefaults__ or {}).items():
        parts[f"default {name}"] = value
    for name in words_in(function.__code__):
        if name in function.__globals__:
            parts[f"global {name}"] = function.__globals__[name]
    for number, cell in enumerate(function.__closure__ or ()):
        # What the function that made it has not set yet is a cell without contents.
        parts[f"cell {number}"] = cell.cell_contents if _is_set(cell) else None
    return parts


def _code(code: CodeType) -> Iterator[Any]:
    """Yield what a piece of code consists of, but for where it stands."""
    yield (code.co_code, code.co_names, code.co_varnames, code.co_flags)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code(constant)
        elif isinstance(constant, frozenset):
            yield sorted(map(repr, constant))
        else:
            yield constant


def _is_set(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
