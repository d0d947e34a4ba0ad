"""Signs of life in a run's folder, for programs that watch it: small JSON files,
replaced every few seconds.

Nothing depends on them. They are written whole but not synced, because losing one in a
crash does not matter. Readers treat them as untrusted files.
"""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

from hpcfed.results.as_json import plain, read_json
from hpcfed.results.publish import replace_quickly

EVERY = 2.0
"""Seconds between two signs of life."""
MOST_BYTES = 2**16
"""Largest sign to read."""


@dataclass(frozen=True)
class RunSign:
    """What the root of a run is doing."""

    phase: str
    seconds: float
    """Time spent in this phase, as far as observed."""
    machine: dict[str, float | None] = field(default_factory=dict)
    """What the root's GPU, process and host did in the last second, by the names of
    telemetry; None: unknown. Older runs leave it out.
    """


@dataclass(frozen=True)
class LearningSign:
    """How far the training of the server's model has come."""

    network: str
    step: int
    steps: int
    loss: float | None
    """The last step's loss; None if it is not finite."""
    seconds: float
    """Since this network's first step in this run."""
    resumed: int = 0
    """Steps that an earlier run has made. Older runs leave it out."""

    @property
    def left(self) -> float:
        """Seconds that the remaining steps will take; NaN after the first step."""
        timed = self.step - self.resumed - 1
        if timed < 1:
            return float("nan")
        return self.seconds / timed * (self.steps - self.step)


Sign = TypeVar("Sign", RunSign, LearningSign)


def leave_sign(path: Path, sign: RunSign | LearningSign) -> None:
    """Replace a sign; ignore a failure to write."""
    replace_quickly(json.dumps(plain(asdict(sign))), path)


def remove_sign(path: Path) -> None:
    """Remove a sign, because what it describes is over."""
    with suppress(OSError):
        path.unlink(missing_ok=True)


def read_sign(path: Path, kind: type[Sign]) -> Sign | None:
    """Read a sign; None if it does not exist or is something else."""
    try:
        found: Sign = read_json(path, kind, MOST_BYTES)
        return found
    except (OSError, ValueError):
        return None
