"""Signs of life in a run's folder, for those who watch it: small JSON files that are
replaced every few seconds.

Nothing depends on them. They are written whole but not synced, because a sign that is
lost in a crash is no loss. Whoever reads them takes them for any other file that may
have been handed in.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from hpcfed.results.json_values import parsed, plain
from hpcfed.results.publish import replace_quickly
from hpcfed.results.safe import check_file

EVERY = 2.0
"""Seconds between two signs of life."""
MOST_BYTES = 2**16
"""Largest sign that is read."""


@dataclass(frozen=True)
class RunSign:
    """What the root of a run is doing."""

    phase: str
    seconds: float
    """For how long it has been in this phase, as far as was seen."""


@dataclass(frozen=True)
class LearningSign:
    """How far the server's model has learnt."""

    network: str
    step: int
    steps: int
    loss: float | None
    """The last step's loss; None where it is not finite."""
    seconds: float
    """Since this network's first step."""

    @property
    def left(self) -> float:
        """Seconds that the rest of the steps will take; NaN after the first."""
        if self.step < 2:
            return float("nan")
        return self.seconds / (self.step - 1) * (self.steps - self.step)


Sign = TypeVar("Sign", RunSign, LearningSign)


def leave_sign(path: Path, sign: RunSign | LearningSign) -> None:
    """Replace a sign; that it cannot be written ends nothing."""
    replace_quickly(json.dumps(plain(asdict(sign))), path)


def remove_sign(path: Path) -> None:
    """Remove a sign, because what it speaks of is over."""
    with suppress(OSError):
        path.unlink(missing_ok=True)


def read_sign(path: Path, kind: type[Sign]) -> Sign | None:
    """Read a sign; None if it does not exist, or is something else."""
    try:
        check_file(path, MOST_BYTES)
        told: Mapping[str, Any] = parsed(path.read_text())
        return TypeAdapter(kind).validate_python(told)
    except (OSError, ValueError):
        return None
