"""How an option is declared: one typed field with a help text, limits, and all facts that
others ask about it.

Nothing else in the package keeps a list of options. Who needs to know which of them pose
the problem, or may stand beside --resume, asks `named` in `facts.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import get_annotations
from typing import Any, ClassVar, Final, Literal, NamedTuple, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo

AS_GIVEN: Final = object()
"""Short runs of a calibration have the option as the run has it."""
LEFT_OUT: Final = object()
"""Short runs of a calibration go without the option."""


@dataclass(frozen=True)
class Need:
    """What an option needs in order to act."""

    wanted: str | Callable[[Any], str]
    """What turns it on, as one types it; or a function of the run that says so."""
    met: Callable[[Any], bool]
    """Tells whether a run has it. The run offers all options of every run and those of
    its method as attributes.
    """

    def text(self, run: Any) -> str:
        """Return what turns the option on in this run."""
        return self.wanted if isinstance(self.wanted, str) else self.wanted(run)


@dataclass(frozen=True)
class Facts:
    """What is known about an option beside its type, limits and help text."""

    group: str = "method"
    """The heading in the help of a method's options; options of every run stand under
    their class's `title`.
    """
    needs: tuple[Need, ...] = ()
    """The option acts only if all of these are met; messages name the last that is not."""
    replaces: tuple[str, ...] = ()
    """Options of local training in whose place the method trains by this one. They then
    act on new clients only.
    """

    # What its values mean.
    zero: bool = False
    """0 is a value like any other although the default is None."""
    off: bool = False
    """The default means off although it is neither None, 0, False nor empty."""
    chosen_later: bool = False
    """A run replaces the default by its own choice when it knows its device; the record
    holds the choice.
    """
    chosen_with: str = ""
    """It does so only if this option is left to it, too."""
    counts: Literal["", "clients", "uploads", "clusters", "rounds"] = ""
    """What its value is a number of; so runs with fewer of them need another value."""
    names_code: str = ""
    """What it is in messages if it may name Python of the user's: a file, an object in a
    package, or one that a program hands in.
    """

    # What depends on it.
    changes: Literal["figures", "which figures", "draws", "time", "nothing"] = "figures"
    """What runs that differ in it differ in. `draws`: they are repeats with other random
    numbers. `time` and `nothing`: calls on one folder of results may differ in it.
    """
    problem: bool = False
    """It poses the problem: runs with other values of it do not compete."""
    told: Literal["", "always", "beside the data set"] = ""
    """Names of runs have it wherever it differs, even if other options tell them apart;
    `beside the data set`: unless it follows from the data set.
    """
    stackable: bool = False
    """Trials of one stack may differ in it: the engine trains all their clients in one
    call. With any other option it would be called for each trial, or would be another
    engine.
    """
    shapes_server: bool = False
    """A saved server's networks mean something else with another value."""

    # Who sets it.
    beside_resume: bool = False
    """It may stand beside --resume."""
    from_record: bool = True
    """A resumed run takes it from the record. Else it does not: a folder that somebody
    hands in must not make us fetch, overwrite or send anything.
    """
    study_sets: bool = False
    """A study gives it to every run itself."""
    calibration: Any = AS_GIVEN
    """What the short runs of a calibration have: as given, left out because they set it
    themselves or it costs time that no plan predicts, or this value.
    """
    package: bool = False
    """It is called like a package that it needs."""

    # What records of older versions say, and what other tools call it.
    in_every_record: bool = False
    """Every version has recorded it."""
    zero_was_unset: bool = False
    """Older versions recorded 0 where it was not given. Options that are added today
    never do.
    """
    before: Any = None
    """What older versions did, which did not have it; None: what its default does."""
    also: str = ""
    """What other tools and papers call it; words are separated by spaces."""


def option(
    default: Any,
    description: str,
    *,
    needs: Need | tuple[Need, ...] = (),
    replaces: str | tuple[str, ...] = (),
    **more: Any,
) -> Any:
    """Declare an option with its help text.

    `more` are facts, see `Facts`, and limits of pydantic's: ge, gt, le, lt, pattern. A
    default of None means that something else decides; the help text says what. Then 0
    says so, too, unless `zero` is a value of the option like any other.
    """
    # A default of 0 is for amounts and for a plain "off", as in --clip 0 or
    # --snapshot-every 0, where nothing else decides.
    stated = {name: more.pop(name) for name in list(more) if name in _FACTS}
    if strange := more.keys() - _LIMITS:
        raise TypeError(f"option() takes no {', '.join(sorted(strange))}")
    facts = Facts(
        needs=needs if isinstance(needs, tuple) else (needs,),
        replaces=(replaces,) if isinstance(replaces, str) else replaces,
        **stated,
    )
    # Pydantic keeps this dictionary as it is, and nobody makes a JSON schema.
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
    """Return what others call our options, of those methods that have been loaded."""
    return _synonyms


def _state(field: FieldInfo, **facts: Any) -> None:
    """State more facts of an option."""
    made = replace(facts_of(field), **facts)
    field.json_schema_extra = cast(JsonDict, {"facts": made})


def zero_unsets(field: FieldInfo) -> bool:
    """Return whether 0 stands for None, so that something else decides."""
    return field.default is None and not facts_of(field).zero


def means_off(field: FieldInfo, value: Any) -> bool:
    """Return whether a value stands for none: a default such as 0, None or False."""
    default = field.default
    return bool(value == default and (not default or facts_of(field).off))


def flag_of(option: str) -> str:
    """Return the flag of an option: `--batch-size` for `batch_size`."""
    return f"--{option.replace('_', '-')}"


class Choice(NamedTuple):
    """A value that replaces a default which does not suit the run."""

    option: str
    value: Any
    because: str
    """The reason, and how to get something else; empty where another choice says it."""

    def __str__(self) -> str:
        return f"{flag_of(self.option)} is {self.value}: {self.because}"


class Switch(NamedTuple):
    """An option that acts only where something else is on."""

    option: str
    wanted: str
    """What turns it on, as one types it."""
    on: bool


class OptionGroup(BaseModel):
    """Some options that belong together.

    A group inherits from the groups whose options its checks read, so that its file
    says what it depends on. All options of a run are fields of one flat `RunConfig`.
    """

    # A typo must not pass silently, settings are shared by threads of several seeds, and
    # NaN or infinity would only fail far from the command line. Validators are built
    # when first used: most groups and most methods' options never are.
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True
    )

    title: ClassVar[str] = ""
    """The heading of the group in `hpcfed run --help`."""
    poses_problem: ClassVar[bool] = False
    """Whether all options of the group pose the problem."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        # Not what it inherits: other groups inherit from one that poses the problem.
        poses = vars(cls).get("poses_problem", False)
        for name, field in cls.declared().items():
            if not is_option(field):
                continue  # `methods.load` refuses it, and names the method
            if poses:
                _state(field, problem=True)
            _synonyms.setdefault(name, set()).update(facts_of(field).also.split())

    @field_validator("*")
    @classmethod
    def zero_is_unset(cls, value: Any, info: ValidationInfo) -> Any:
        """Take 0 for None where the default is None.

        Command lines and TOML files have no word for None, so 0 says "unset" there. It
        does so in the records of older versions, too.
        """
        assert info.field_name is not None
        unset = zero_unsets(cls.model_fields[info.field_name])
        # Paths and tuples of seeds never equal 0, and no bool has a default of None.
        return None if unset and value == 0 else value

    @classmethod
    def declared(cls) -> dict[str, FieldInfo]:
        """Return the options that this class itself declares, without inherited ones."""
        # `model_fields` has those of all bases, `get_annotations` this class's only.
        names = get_annotations(cls)
        return {
            name: field for name, field in cls.model_fields.items() if name in names
        }
