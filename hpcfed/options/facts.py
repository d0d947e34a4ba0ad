"""Which options a fact holds for.

The options of every run are known here. Those of a method are known to `hpcfed.methods`,
which is above this room and hands its answer down by `ask_methods`.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from pydantic.fields import FieldInfo

from hpcfed.options.declare import Facts, facts_of
from hpcfed.options.promises import PromisesOf, promising
from hpcfed.options.runconfig import RunConfig, recorded_order

OfMethod = Callable[[str], Mapping[str, FieldInfo]]
_asked: list[OfMethod] = []


def ask_methods(of_method: OfMethod, promises: PromisesOf) -> None:
    """Have these functions tell the options that a method of ours adds, by its name, and
    what the round of any method promises.
    """
    _asked.append(of_method)
    promising.append(promises)


def known(method: object = None) -> dict[str, FieldInfo]:
    """Return the options of every run, and those that a method of ours adds to them."""
    fields = {name: RunConfig.model_fields[name] for name in recorded_order()}
    for of_method in _asked:
        fields |= of_method(str(method))
    return fields


def facts(method: object = None) -> dict[str, Facts]:
    """Return the facts of all options of every run, and of a method's own."""
    return {name: facts_of(field) for name, field in known(method).items()}


@cache
def named(**wanted: Any) -> tuple[str, ...]:
    """Return the options of every run that have these facts, in the order of a record.

    `named(stackable=True)` are those in which trials of a stack may differ.
    """
    found = []
    for name, stated in facts().items():
        if all(getattr(stated, fact) == value for fact, value in wanted.items()):
            found.append(name)
    return tuple(found)
