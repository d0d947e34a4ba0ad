"""Settings: the options of one run and its method, made of what a user wrote."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar
from unicodedata import category

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from hpcfed.errors import UserError, shown
from hpcfed.options.adapters import adapter_choices
from hpcfed.options.data import text_choices
from hpcfed.options.declare import Choice, Facts, OptionGroup
from hpcfed.options.malicious import malicious_choices
from hpcfed.options.method import Options
from hpcfed.options.partition import client_choices, partition_choices
from hpcfed.options.privacy import privacy_choices
from hpcfed.options.run import seed_folder
from hpcfed.options.runconfig import (
    RunConfig,
    facts,
    known,
    recorded_order,
    suggest_option,
)
from hpcfed.options.training import optimiser_choices


@dataclass(frozen=True)
class Settings:
    """The options of one run: those that every run has, and those of its method."""

    config: RunConfig
    options: Options
    asked: frozenset[str] = field(default=frozenset(), compare=False)
    """Options that the user gave for this run. They are refused if they cannot act."""
    command: tuple[str, ...] = field(default=(), compare=False)
    """The command line that repeats this run, if a program has started it."""
    choices: tuple[Choice, ...] = field(default=(), compare=False)
    """What was chosen in place of defaults; the run prints it when it starts."""

    def fields(self) -> dict[str, FieldInfo]:
        """Return how each option is declared, by name."""
        return {**RunConfig.model_fields, **type(self.options).model_fields}

    def flat(self) -> dict[str, Any]:
        """Return all options by name, as JSON values, in the order of a record."""
        config = self.config.model_dump(mode="json")
        ordered = {name: config[name] for name in recorded_order()}
        return ordered | self.options.model_dump(mode="json")

    def of_seed(self, seed: int) -> "Settings":
        """Return the settings of this run with one seed, in that seed's folder."""
        # Each seed can be resumed, evaluated and reported on like a run of its own.
        out = self.config.out and seed_folder(self.config.out, seed)
        change = {"seed": seed, "seeds": None, "out": out}
        return replace(self, config=self.config.model_copy(update=change))

    def each_seed(self) -> list["Settings"]:
        """Return the settings of each seed's run; with one seed, only these."""
        seeds = self.config.seeds
        return [self] if seeds is None else [self.of_seed(seed) for seed in seeds]

    def adapted(self, choices: Iterable[Choice]) -> "Settings":
        """Return these settings with the chosen values in place of their own."""
        config, options, made = self.config, self.options, self.choices
        for choice in choices:
            change = {choice.option: choice.value}
            if choice.option in RunConfig.model_fields:
                config = config.model_copy(update=change)
            else:
                options = options.model_copy(update=change)
            made = (*made, choice)
        return replace(self, config=config, options=options, choices=made)


def check_unchanged(
    folder: Path, had: Mapping[str, Any], wanted: Mapping[str, Any]
) -> None:
    """Refuse to mix figures of different options in one folder of results."""
    fields, stated = known(wanted.get("method")), facts(wanted.get("method"))
    defaults = RunConfig().model_dump(mode="json")
    for name, value in wanted.items():
        about = stated.get(name, Facts())
        # A record without the option is from an older version, which did what the
        # default does. A method's option is then taken as unchanged.
        before = had.get(name, defaults.get(name, value))
        if before == value or about.changes in ("time", "nothing"):
            continue
        # The record holds what the run chose; this call may leave the choice open.
        left_open = about.chosen_later and value == fields[name].default
        if about.chosen_with:
            other = about.chosen_with
            left_open = left_open and wanted.get(other) == fields[other].default
        if not left_open:
            raise UserError(
                f"{folder} was run with {name} {before}, not {value}; name another --out"
            )


FLOATS = (2.0**-126, 2.0**128 * (1 - 2.0**-24))
"""The smallest and largest positive float32 of full precision, as in a run."""

MOST = 10**12
"""The largest whole number of an option; products of larger ones overflow 64 bits."""

MOST_SEED = 2**63 - 1
"""The largest seed. Seeds may exceed `MOST`: they are names rather than amounts."""

NUMBERS = {
    "float_parsing": "a number",
    "float_type": "a number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
}
"""What the value must be, by pydantic's type of error."""

T = TypeVar("T", bound=OptionGroup)


def resolve(
    values: Mapping[str, Any],
    sources: Mapping[str, str],
    method_options: type[Options],
    *,
    shared: Collection[str] = (),
    ranks: int = 1,
) -> Settings:
    """Make typed settings from raw values.

    `sources` says how the user wrote each name, for error messages. Values of `shared`
    names were given for several runs, and may have no effect in some of them. Defaults
    that do not suit the run on this number of ranks are replaced.
    """
    # Pydantic would report unknown names, too, but without a suggestion.
    known = [*RunConfig.model_fields, *method_options.model_fields]
    for name in values:
        if name not in known:
            guess = suggest_option(name, known)
            raise UserError(f"{sources[name]}: unknown option{guess}")
    _check_one_of(values, sources, "seed", "seeds")
    own = {name: value for name, value in values.items() if name not in shared}
    # Only what is not shared: a run may override a shared value, and a record holds
    # both options.
    _check_one_of(own, sources, "participation", "cohort")
    common: dict[str, Any] = {}
    of_method: dict[str, Any] = {}
    for name, value in values.items():
        field = method_options.model_fields.get(name)
        # `methods.load` makes sure that no name is in both.
        _check_raw(
            value, field or RunConfig.model_fields[name], sources.get(name, name)
        )
        (common if field is None else of_method)[name] = value
    settings = Settings(
        _validated(RunConfig, common, sources),
        _validated(method_options, of_method, sources),
        asked=frozenset(values) - frozenset(shared),
    )
    return _fitted(settings, values, ranks)


def _check_one_of(
    values: Mapping[str, Any], sources: Mapping[str, str], one: str, other: str
) -> None:
    """Refuse two options that set the same thing."""
    if one in values and other in values:
        raise UserError(
            f"{sources[one]} and {sources[other]} exclude each other; keep one of them"
        )


def _fitted(settings: Settings, given: Mapping[str, Any], ranks: int) -> Settings:
    """Replace defaults that do not suit the run; keep what the user gave."""
    # The data first: later choices read the number of clients.
    settings = _adapted(settings, text_choices(settings.config), given)
    settings = _adapted(settings, partition_choices(settings.config), given)
    settings = _adapted(settings, client_choices(settings.config), given)
    # And adapters that the run starts from: methods about adapters read their rank.
    settings = _adapted(settings, adapter_choices(settings.config.first_weights), given)
    wanted = [
        *malicious_choices(settings.config),
        *privacy_choices(settings.config),
        *optimiser_choices(settings.config),
        *settings.options.fit(settings.config, ranks),
    ]
    return _adapted(settings, wanted, given)


def _adapted(
    settings: Settings, wanted: Iterable[Choice], given: Mapping[str, Any]
) -> Settings:
    """Apply the choices for options that the user did not give."""
    # A user who gives `auto` leaves the choice to us, too.
    choices = [
        choice for choice in wanted if given.get(choice.option, "auto") == "auto"
    ]
    return settings.adapted(choices)


def _check_raw(value: Any, field: FieldInfo, source: str) -> None:
    """Refuse raw values that pydantic would accept but misunderstand."""
    # Pydantic takes true for 1.
    if isinstance(value, bool) and field.annotation is not bool:
        raise UserError(f"{source}: must have a value, got {str(value).lower()}")
    # An unset shell variable gives ""; Path("") would be the current folder.
    if value == "" and field.annotation == Path | None:
        raise UserError(f"{source}: must be a path, got nothing")
    if isinstance(value, str):
        check_text(value, source)


def check_text(text: str, source: str) -> None:
    """Refuse text that a record cannot hold, and control characters of a terminal."""
    if "\0" in text:
        raise UserError(f"{source}: must be without a null character, got {text!r}")
    kinds = set(map(category, text))
    # Python keeps bytes of the command line that are not UTF-8 as lone surrogates.
    if "Cs" in kinds:
        raise UserError(f"{source}: must be UTF-8, got {text!r}")
    if "Cc" in kinds:
        raise UserError(f"{source}: must be without control characters, got {text!r}")


def _validated(
    group: type[T], values: Mapping[str, Any], sources: Mapping[str, str]
) -> T:
    try:
        found = group.model_validate(values)
    except ValidationError as failure:
        raise _refusal(failure.errors()[0], group, sources) from None
    # Only given values: our defaults are fine.
    for name in values:
        whole = MOST_SEED if "seed" in name else MOST
        _check_number(getattr(found, name), sources.get(name, name), whole=whole)
    return found


def _check_number(value: Any, source: str, *, whole: int) -> None:
    """Refuse numbers that no run can compute with."""
    least, largest = FLOATS
    if isinstance(value, int) and abs(value) > whole:
        raise UserError(f"{source}: must be at most {whole:,}")
    if isinstance(value, float) and value and not least <= abs(value) <= largest:
        raise UserError(
            f"{source}: must be 0 or between {least:.2g} and {largest:.2g}, the range "
            "of float32"
        )


def _refusal(
    error: ErrorDetails, group: type[OptionGroup], sources: Mapping[str, str]
) -> UserError:
    """Put pydantic's first complaint into our words."""
    # A location is the option's name, then perhaps a position in its list.
    name = str(error["loc"][0]) if error["loc"] else ""
    source = sources.get(name, name)
    kind = NUMBERS.get(error["type"])
    if kind is not None:
        # A flag's source shows the value already.
        told = source.endswith(f" {error['input']}")
        got = "" if told else f", got {shown(error['input'])}"
        return UserError(f"{source}: must be {kind}{got}")
    if error["type"] == "string_pattern_mismatch":
        # The default shows the pattern better than a regular expression does.
        message = f"must look like {group.model_fields[name].default}"
    else:
        message = error["msg"].replace("Input should be", "must be")
        message = message.replace("Value error, ", "")
    return UserError(f"{source}: {message}, got {shown(error['input'])}")
