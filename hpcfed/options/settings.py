"""Settings: the resolved options of one run and its method."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from hpcfed.errors import UserError
from hpcfed.options.declare import Choice, Facts
from hpcfed.options.facts import facts, known
from hpcfed.options.method import Options
from hpcfed.options.runconfig import RunConfig, recorded_order
from hpcfed.options.seeds import seed_folder


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
