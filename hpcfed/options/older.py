"""What records of older versions say in another way."""

from collections.abc import Mapping
from typing import Any

from hpcfed.options.facts import facts


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
