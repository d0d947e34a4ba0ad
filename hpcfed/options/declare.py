"""How an option is declared: one typed field with a help text, limits, and all facts
about it that other code asks for.

Nothing else in the package keeps a list of options. To learn which options define the
problem, or may be given with --resume, ask `named` in `runconfig.py`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from inspect import get_annotations
from typing import Any, ClassVar, Final, Literal, NamedTuple, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo

AS_GIVEN: Final = object()
"""A calibration's short runs use the run's value of the option."""
LEFT_OUT: Final = object()
"""A calibration's short runs do not get the option."""


@dataclass(frozen=True)
class Need:
    """What an option needs in order to act."""

    wanted: str | Callable[[Any], str]
    """What the user types to turn it on, or a function of the run that returns it."""
    met: Callable[[Any], bool]
    """Tells whether a run, with the options of its method, meets the need."""

    def text(self, run: Any) -> str:
        """Return what turns the option on in this run."""
        return self.wanted if isinstance(self.wanted, str) else self.wanted(run)


@dataclass(frozen=True)
class Facts:
    """What is known about an option besides its type, limits and help text."""

    group: str = "method"
    """The heading of a method's option in the help; other options have a `title`."""
    needs: tuple[Need, ...] = ()
    """The option acts only if all are met. Messages name the last unmet one."""
    replaces: tuple[str, ...] = ()
    """Options of local training that it replaces; they still act on new clients."""

    # What its values mean.
    zero: bool = False
    """0 is an ordinary value although the default is None."""
    off: bool = False
    """The default means off although it is truthy, such as "none"."""
    chosen_later: bool = False
    """The run replaces the default once it knows its device; the record says how."""
    chosen_with: str = ""
    """The run chooses only if this other option has its default, too."""
    counts: Literal["", "clients", "uploads", "clusters", "rounds"] = ""
    """What its value counts. A run with fewer of these needs another value."""
    names_code: str = ""
    """What messages call it if it may name the user's own Python code: a file, an
    object in a package, or one that a program passes in.
    """

    # What depends on it.
    acts_on: Literal["", "uploads", "downloads", "means"] = ""
    """What it changes between clients and server, or in the server's means of rows."""
    changes: Literal["figures", "which figures", "draws", "time", "nothing"] = "figures"
    """What changes in the results when it changes. `draws`: the run becomes a repeat
    with other random numbers. `time` and `nothing`: later calls on the same results
    folder may change it.
    """
    problem: bool = False
    """It defines the problem: runs that differ in it are not compared."""
    tunable: bool = False
    """A benchmark's rules allow another value: it is how a machine works, not at what.
    They also allow all options that change nothing but the time.
    """
    told: Literal["", "always", "beside the data set"] = ""
    """Names of runs show it whenever it differs, even if other options already tell the
    runs apart. `beside the data set`: unless it follows from the data set.
    """
    stackable: bool = False
    """Trials of one stack may differ in it: the engine still trains all their clients
    in one call. Any other option would need a call for each trial, or another engine.
    """
    shapes_server: bool = False
    """A saved server cannot be used with another value of it."""
    follows_network: bool = False
    """An option of the server whose default follows from the clients' network."""

    # Who sets it.
    beside_resume: bool = False
    """It may be given with --resume."""
    from_record: bool = True
    """A resumed run takes it from the record. False for options that download,
    overwrite or send: a run folder from someone else must not trigger these.
    """
    study_sets: bool = False
    """A study sets it for each of its runs."""
    calibration: Any = AS_GIVEN
    """What a calibration's short runs get: `AS_GIVEN`, `LEFT_OUT`, or this value.
    Options are left out if calibration sets them itself, or if no plan predicts their
    cost.
    """
    package: bool = False
    """It needs a package of the same name."""

    # What records of older versions say, and what other tools call it.
    in_every_record: bool = False
    """Every version has recorded it."""
    zero_was_unset: bool = False
    """Older versions recorded 0 if it was not given. Never set it for a new option."""
    before: Any = None
    """The value that matches older versions without this option; None: the default."""
    also: str = ""
    """What other tools and papers call it, separated by spaces."""


def option(
    default: Any,
    description: str,
    *,
    needs: Need | tuple[Need, ...] = (),
    replaces: str | tuple[str, ...] = (),
    **more: Any,
) -> Any:
    """Declare an option with its help text.

    `more` takes fields of `Facts` and pydantic's limits: ge, gt, le, lt, pattern. A
    default of None means that something else decides; the help text says what. A user
    types 0 for None, unless `zero` makes 0 an ordinary value.
    """
    # Use a default of 0 for amounts and for a plain "off", as in --clip 0 or
    # --snapshot-every 0: nothing else decides there.
    stated = {name: more.pop(name) for name in list(more) if name in _FACTS}
    if strange := more.keys() - _LIMITS:
        raise TypeError(f"option() takes no {', '.join(sorted(strange))}")
    facts = Facts(
        needs=needs if isinstance(needs, tuple) else (needs,),
        replaces=(replaces,) if isinstance(replaces, str) else replaces,
        **stated,
    )
    # Pydantic does not touch this dictionary, and we never generate a JSON schema.
    extra = cast(JsonDict, {"facts": facts})
    return Field(default, description=description, json_schema_extra=extra, **more)


_FACTS = frozenset(get_annotations(Facts))
_LIMITS = frozenset({"ge", "gt", "le", "lt", "pattern"})


def is_option(field: FieldInfo) -> bool:
    """Tell whether a field was made by `option`."""
    extra = field.json_schema_extra
    return isinstance(extra, dict) and "facts" in extra


def facts_of(field: FieldInfo) -> Facts:
    """Return what an option's declaration states."""
    return cast(dict[str, Facts], field.json_schema_extra)["facts"]


_synonyms: dict[str, set[str]] = {}


def synonyms() -> dict[str, set[str]]:
    """Return other tools' names of our options, including methods loaded so far."""
    return _synonyms


def _state(field: FieldInfo, **facts: Any) -> None:
    """Replace some facts of an option."""
    # Facts are frozen: a copy takes their place.
    made = replace(facts_of(field), **facts)
    field.json_schema_extra = cast(JsonDict, {"facts": made})


def zero_unsets(field: FieldInfo) -> bool:
    """Tell whether 0 stands for None, so that something else decides."""
    return field.default is None and not facts_of(field).zero


def means_off(field: FieldInfo, value: Any) -> bool:
    """Tell whether a value means off: a default such as 0, None or False."""
    default = field.default
    # 0, None, False and "" mean off by themselves; words such as "none" say so by a
    # fact.
    return bool(value == default and (not default or facts_of(field).off))


def flag_of(option: str) -> str:
    """Return the flag of an option: `--batch-size` for `batch_size`."""
    return f"--{option.replace('_', '-')}"


class Choice(NamedTuple):
    """A value that replaces a default if the default does not suit the run."""

    option: str
    value: Any
    because: str
    """The reason, and how to choose otherwise; empty if another choice says it."""

    def __str__(self) -> str:
        return f"{flag_of(self.option)} is {self.value}: {self.because}"


class Switch(NamedTuple):
    """An option that acts only if something else is on."""

    option: str
    wanted: str
    """What the user must type to turn it on."""
    on: bool


class OptionGroup(BaseModel):
    """Some options that belong together.

    A group inherits from the groups whose options its checks read, so that its file
    says what it depends on. All options of a run are fields of one flat `RunConfig`.
    """

    # extra: a typo must not pass silently. frozen: threads of several seeds share the
    # settings. allow_inf_nan: NaN would only fail later, far from the command line.
    # defer_build: most groups and methods' options are never validated on their own.
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True
    )

    title: ClassVar[str] = ""
    """The heading of the group in `hpcfed run --help`."""
    poses_problem: ClassVar[bool] = False
    """Whether all options of the group define the problem."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        # `vars`, not `getattr`: a subgroup must not inherit this from its base group.
        poses = vars(cls).get("poses_problem", False)
        for name, field in cls.declared().items():
            if not is_option(field):
                continue  # `methods.load` refuses it, and names the method
            if poses:
                _state(field, problem=True)
            # As classes are made: methods that are never loaded cost nothing.
            _synonyms.setdefault(name, set()).update(facts_of(field).also.split())

    @field_validator("*")
    @classmethod
    def zero_is_unset(cls, value: Any, info: ValidationInfo) -> Any:
        """Take 0 for None if the default is None.

        Command lines and TOML files cannot write None, so 0 means "unset" there. It
        also does in the records of older versions.
        """
        assert info.field_name is not None
        unset = zero_unsets(cls.model_fields[info.field_name])
        # Paths and tuples of seeds never equal 0, and no bool has a default of None.
        return None if unset and value == 0 else value

    @classmethod
    def declared(cls) -> dict[str, FieldInfo]:
        """Return the options that this class itself declares, without inherited ones."""
        # `model_fields` includes all bases, `get_annotations` only this class.
        names = get_annotations(cls)
        return {
            name: field for name, field in cls.model_fields.items() if name in names
        }


def flag_text(value: Any) -> str:
    """Return a value as it is typed after its flag."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    if isinstance(value, dict):
        return json.dumps(value)
    return str(value)


def flags(given: Mapping[str, Any]) -> list[str]:
    """Return options as words of a command line."""
    words = []
    for name, value in given.items():
        option = name.replace("_", "-")
        text = flag_text(value)
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif text.startswith("-"):  # argparse would take it for an option
            words.append(f"--{option}={text}")
        else:
            words += [f"--{option}", text]
    return words
