"""Which options a fact holds for.

The options of every run are known here. Those of a method are known to `hpcfed.methods`,
which is above this room and hands its answer down by `ask_methods`.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

from pydantic.fields import FieldInfo

from hpcfed.errors import did_you_mean, plain_name
from hpcfed.options.declare import Facts, facts_of, synonyms
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


# What other tools and papers call our options, to guess what a user means.


WITHOUT_A_MATCH = {
    "config_file",
    "eval_batch_size",
    "num_classes",
    "num_workers",
    "test_batch_size",
    "workers",
}
"""Names of other tools that are spelt nearly like an option which means something else.
"""


def suggest_option(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean '--lr'?` where a known option means the same as the word
    or is spelt nearly so, else nothing.
    """
    # By meaning first: `cohort` is spelt nearly like `smooth`, which misleads.
    names = list(known)
    by_plain = {plain_name(name): name for name in names}
    plain = plain_name(word)
    if plain in WITHOUT_A_MATCH:
        return ""
    for option, words in synonyms().items():
        # Papers tell E, epochs, from e; tools do not tell --LR from --lr.
        means = plain in words or plain.lower() in words
        if means and option in by_plain:
            return f"; did you mean '{by_plain[option]}'?"
    return did_you_mean(word, names)


# What records of older versions say in another way.


def with_old_meaning(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recorded config with what older versions did where an option is missing
    whose default does something else today.
    """
    made = unset_zeros(config)
    for name, stated in facts(config.get("method")).items():
        if stated.before is not None:
            made.setdefault(name, stated.before)
    return made


def unset_zeros(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recorded config with None where 0 meant that an option was unset.

    So runs of old and new versions with equal options compare as equal.
    """
    made = dict(config)
    stated = facts(config.get("method"))
    once = [name for name in config if name in stated and stated[name].zero_was_unset]
    # Records have them all: in one that is so old, others are 0 as well. An amount for
    # which 0 is a value like any other today does not tell.
    telling = [name for name in once if not stated[name].zero]
    if telling and not any(config[name] == 0 for name in telling):
        return made
    for name in once:
        # A damaged record's False is left for the checks to find.
        if made[name] == 0 and made[name] is not False:
            made[name] = None
    return made
