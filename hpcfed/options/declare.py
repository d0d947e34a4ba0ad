"""How an option is declared: one typed field with a help text and limits."""

from inspect import get_annotations
from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo


def option(
    default: Any,
    description: str,
    *,
    group: str = "method",
    zero: bool = False,
    **limits: Any,
) -> Any:
    """Declare an option with its help text.

    `limits` are pydantic's: ge, gt, le, lt, pattern. A default of None means that
    something else decides; the help text says what. Then 0 says so, too, unless `zero`
    is a value of the option like any other. `group` is the heading in the help
    of a method's options; options of every run stand under their class's `title`.
    """
    # A default of 0 is for amounts and for a plain "off", as in --clip 0 or
    # --snapshot-every 0, where nothing else decides.
    # `methods.load` tells options by their `json_schema_extra` from other fields.
    extra: JsonDict = {"group": group, "zero": zero}
    return Field(default, description=description, json_schema_extra=extra, **limits)


def zero_unsets(field: FieldInfo) -> bool:
    """Return whether 0 stands for None, so that something else decides."""
    extra = field.json_schema_extra
    has_zero = isinstance(extra, dict) and extra.get("zero")
    return field.default is None and not has_zero


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
