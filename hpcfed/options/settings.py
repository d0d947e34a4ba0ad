"""Settings: the resolved options of one run and its method."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpcfed.errors import UserError
from hpcfed.options.declare import Choice
from hpcfed.options.method import Options
from hpcfed.options.recording import TRACKERS
from hpcfed.options.runconfig import RunConfig
from hpcfed.options.seeds import seed_folder

_FOLDERS = {"out", "overwrite", "resume", "requeue", "data_root", "download"}
_GOING_ON = {"accept_changes"}
_MACHINE = {"device", "backend"}
_CHECKPOINTS = {"checkpoint_every", "checkpoint_minutes"}
_TRACKERS = set(TRACKERS)
ANYWHERE = _FOLDERS | _GOING_ON | _MACHINE | _CHECKPOINTS | _TRACKERS
"""Options that no figure depends on; they may differ between calls on one folder of
results.
"""

CHOSEN_LATER = {
    "server": "auto",
    "generated_layers": None,
    "autoencoder_samples": None,
    "denoiser_samples": None,
    "denoiser_batch": None,
}
"""Values that a run replaces by its own choice when it knows the device; its record
holds the choice.
"""
CHOSEN_BY_AUTO = {"server_precision": "fp32"}
"""One that only --server auto replaces."""


@dataclass(frozen=True)
class Settings:
    """The options of one run: those that every run has, and those of its method."""

    config: RunConfig
    options: Options
    asked: frozenset[str] = field(default=frozenset(), compare=False)
    """Options that the user gave for this very run; those that cannot act are refused.
    """
    command: tuple[str, ...] = field(default=(), compare=False)
    """The command line that makes this run, where a program has started it."""
    choices: tuple[Choice, ...] = field(default=(), compare=False)
    """What was chosen in place of defaults; the run prints it when it starts."""

    def flat(self) -> dict[str, Any]:
        """Return all options by name, as JSON values."""
        config = self.config.model_dump(mode="json")
        return config | self.options.model_dump(mode="json")

    def of_seed(self, seed: int) -> "Settings":
        """Return the settings of this run with one seed, in that seed's folder."""
        # Resumed, evaluated and reported on, each seed is a run like any other.
        out = self.config.out and seed_folder(self.config.out, seed)
        change = {"seed": seed, "seeds": None, "out": out}
        return replace(self, config=self.config.model_copy(update=change))

    def each_seed(self) -> list["Settings"]:
        """Return the settings of every seed's run; of one seed, these themselves."""
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
    left_open: dict[str, Any] = dict(CHOSEN_LATER)
    if wanted.get("server") == "auto":
        left_open |= CHOSEN_BY_AUTO
    defaults = RunConfig().model_dump(mode="json")
    for name, value in wanted.items():
        # An older version, which did not have the option, did what its default does. One
        # of a method is taken for unchanged.
        before = had.get(name, defaults.get(name, value))
        if before == value or name in ANYWHERE:
            continue
        # A record holds what was chosen later; this call leaves the choice open.
        if name not in left_open or value != left_open[name]:
            raise UserError(
                f"{folder} was run with {name} {before}, not {value}; name another --out"
            )
