"""What a tracker is told about a run, and what it has to do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol


class Figures(NamedTuple):
    """Figures of one round or step."""

    step: int
    """The round, counted from 1, or the step of the server's networks."""
    values: Mapping[str, float]
    """By name, such as `rounds/accuracy` or `phases/train`."""


@dataclass(frozen=True)
class Tracked:
    """What trackers are told about a run before its first round."""

    folder: Path
    options: Mapping[str, Any]
    command: str
    seed: int | None
    """The seed, if several run at once and each is a separate run."""

    @property
    def name(self) -> str:
        """What trackers call the run."""
        if self.seed is None:
            return self.folder.name
        return f"{self.folder.parent.name}/{self.folder.name}"


class Tracker(Protocol):
    """One tracker of one run. If it raises anything, only the tracker is turned off."""

    @property
    def id(self) -> str:
        """The tracker's name for the run, to continue it after a resume; may be
        empty.
        """

    def rounds(self, figures: Sequence[Figures]) -> None:
        """Write the figures of rounds, in order."""

    def losses(self, figures: Sequence[Figures]) -> None:
        """Write losses of the server's networks, by their steps."""

    def close(self, status: str) -> None:
        """Write everything out; the run is `complete`, `stopped` or `failed`."""
