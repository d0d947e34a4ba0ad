"""All options of every run, in one flat class, and how to find them by their facts."""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from hpcfed import plugins
from hpcfed.errors import did_you_mean, plain_name
from hpcfed.options.aggregation import AggregationOptions
from hpcfed.options.compression import CompressionOptions
from hpcfed.options.data import DataOptions
from hpcfed.options.declare import Facts, OptionGroup, facts_of, synonyms
from hpcfed.options.devices import DeviceOptions
from hpcfed.options.machine import MachineOptions
from hpcfed.options.malicious import MaliciousOptions
from hpcfed.options.partition import PartitionOptions
from hpcfed.options.privacy import PrivacyOptions
from hpcfed.options.recording import RecordingOptions
from hpcfed.options.run import NewcomerOptions, RunOptions
from hpcfed.options.training import OptimiserOptions, TrainingOptions
from hpcfed.options.traits import PromisesOf, promising

GROUPS: tuple[type[OptionGroup], ...] = (
    RunOptions, NewcomerOptions, RecordingOptions, DataOptions, PartitionOptions,
    TrainingOptions, OptimiserOptions, AggregationOptions, MaliciousOptions,
    PrivacyOptions, CompressionOptions, DeviceOptions, MachineOptions,
)  # fmt: skip
"""The groups in the order of `hpcfed run --help`."""

# Records list these groups last; the help has its own order, above.
_LAST: tuple[type[OptionGroup], ...] = (
    CompressionOptions, DeviceOptions, PrivacyOptions, RecordingOptions,
    MachineOptions,
)  # fmt: skip
RECORDED = (*(group for group in GROUPS if group not in _LAST), *_LAST)
"""The groups in the order in which records list their options."""


class RunConfig(MachineOptions, PrivacyOptions, OptimiserOptions):
    """The options that every run has, whatever its method."""

    @field_validator("*")
    @classmethod
    def whole_path(cls, value: Any, info: ValidationInfo) -> Any:
        """Make a file's path absolute: the record must be valid in any folder."""
        assert info.field_name is not None
        names_code = facts_of(cls.model_fields[info.field_name]).names_code
        return plugins.absolute(value) if names_code else value

    @field_validator("init", "tokeniser")
    @classmethod
    def whole_folder(cls, value: Path | None) -> Path | None:
        """Make these paths absolute, for the same reason."""
        return None if value is None else value.expanduser().resolve()


def method_of(values: Mapping[str, Any]) -> str:
    """Return the method that these options name, else the default."""
    return str(values.get("method", RunConfig.model_fields["method"].default))


@cache
def recorded_order() -> tuple[str, ...]:
    """Return all options of every run in the order of a record."""
    return tuple(name for group in RECORDED for name in group.declared())


OfMethod = Callable[[str], Mapping[str, FieldInfo]]
_asked: list[OfMethod] = []


def ask_methods(of_method: OfMethod, promises: PromisesOf) -> None:
    """Register the functions that look up a method by name: the options that a shipped
    method adds, and the promises of any method's round.

    `hpcfed.methods` calls this, because it imports this package.
    """
    _asked.append(of_method)
    promising.append(promises)


def known(method: object = None) -> dict[str, FieldInfo]:
    """Return the options of every run, and those that a shipped method adds."""
    fields = {name: RunConfig.model_fields[name] for name in recorded_order()}
    for of_method in _asked:
        fields |= of_method(str(method))
    return fields


def facts(method: object = None) -> dict[str, Facts]:
    """Return the facts of the options of every run and of the method's own options."""
    return {name: facts_of(field) for name, field in known(method).items()}


@cache
def named(**wanted: Any) -> tuple[str, ...]:
    """Return the options of every run that have these facts, in the order of a record.

    `named(stackable=True)` returns those in which trials of a stack may differ.
    """
    found = []
    for name, stated in facts().items():
        if all(getattr(stated, fact) == value for fact, value in wanted.items()):
            found.append(name)
    return tuple(found)


# What other tools and papers call our options, to guess what a user means.


WITHOUT_A_MATCH = {
    "config_file", "eval_batch_size", "num_classes", "num_workers", "test_batch_size",
    "workers",
}  # fmt: skip
"""Other tools' names that look like one of our options but mean something else."""


def suggest_option(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean '--lr'?` if an option means or is spelt about the same."""
    # Try synonyms first: by spelling, `cohort` would suggest `smooth`.
    names = list(known)
    by_plain = {plain_name(name): name for name in names}
    plain = plain_name(word)
    if plain in WITHOUT_A_MATCH:
        return ""
    for option, words in synonyms().items():
        # Papers distinguish E (epochs) from e; tools treat --LR and --lr alike.
        means = plain in words or plain.lower() in words
        if means and option in by_plain:
            return f"; did you mean '{by_plain[option]}'?"
    return did_you_mean(word, names)


# How to read records of older versions.


def with_old_meaning(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in options that an older record lacks, with what that version did."""
    made = unset_zeros(config)
    for name, stated in facts(config.get("method")).items():
        if stated.before is not None:
            made.setdefault(name, stated.before)
    return made


def unset_zeros(config: Mapping[str, Any]) -> dict[str, Any]:
    """Replace each 0 of a recorded config that meant "unset" by None.

    Then runs of old and new versions with the same options compare as equal.
    """
    made = dict(config)
    stated = facts(config.get("method"))
    once = [name for name in config if name in stated and stated[name].zero_was_unset]
    # A record holds all options, so an old one has a 0 among these, too. An option for
    # which 0 is an ordinary value today does not tell how old the record is.
    telling = [name for name in once if not stated[name].zero]
    if telling and not any(config[name] == 0 for name in telling):
        return made
    for name in once:
        # False == 0, too: leave the False of a damaged record for the checks to find.
        if made[name] == 0 and made[name] is not False:
            made[name] = None
    return made
