"""What `hpcfed profile` leaves in a run's folder. It is read back as a file that
anybody may have handed in.
"""

from math import nan
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, Field

from hpcfed.errors import UserError
from hpcfed.results.folder import PROFILE
from hpcfed.results.json_values import parsed
from hpcfed.results.safe import check_file

MOST_BYTES = 2**26
"""Largest profile that is read: a day of a hundred ranks is some megabytes."""


class Part(BaseModel):
    """The clients' training, or one of the server's networks, beside the device's
    ceilings; None for what is unknown.
    """

    name: str
    seconds: float
    warm: float | None
    """Seconds at the pace of the last rounds or steps."""
    busy: float | None
    compute: float | None
    bandwidth: float | None
    numbers: str = "float32"
    """The type of number whose products are the ceiling of its arithmetic."""
    words: str
    """What limits it, in a sentence."""
    next: list[str]
    """What to try."""


class Operator(BaseModel):
    """A kernel on a GPU, an operator on a CPU, over a whole session."""

    name: str
    seconds: float
    """Its own time, without what it calls."""
    calls: int


class Session(BaseModel):
    """Some rounds, or steps of one of the server's networks, under torch's profiler."""

    name: str
    number: int
    """How many rounds or steps."""
    seconds: float = nan
    busy: float = nan
    """The share of that time in which the device (on a CPU: an operator of torch) was
    at work.
    """
    operators: list[Operator]


class Lane(NamedTuple):
    """What a rank did from one time to another, in seconds since the start."""

    name: str
    begin: float
    end: float


class Rank(BaseModel):
    rank: int
    role: str
    sessions: list[Session]
    lanes: list[Lane] = []
    """Older profiles have none."""


class Ceiling(BaseModel):
    """The speeds that the device was measured to reach with a type of number."""

    bytes_per_second: float = Field(gt=0)
    flops: float = Field(gt=0)
    variation: float = 0.0
    """By how much the trials vary."""


class Profile(BaseModel):
    device: str
    ceilings: dict[str, Ceiling] = {}
    """By type of number; older profiles have none."""
    parts: list[Part]
    ranks: list[Rank]

    @property
    def sessions(self) -> list[Session]:
        """A session of every kind, of the first rank that has one: other ranks do the
        same work.
        """
        found: dict[str, Session] = {}
        for rank in self.ranks:
            for session in rank.sessions:
                found.setdefault(session.name, session)
        return list(found.values())


def read_profile(folder: Path) -> Profile | None:
    """Read the profile of a run; None where it was not profiled."""
    path = folder / PROFILE
    if not path.exists():
        return None
    try:
        check_file(path, MOST_BYTES)
        return Profile.model_validate(parsed(path.read_text()))
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path}: not a profile of a run: {reason}") from None
