"""What `hpcfed profile` writes to a run's folder, read as untrusted files."""

from math import nan
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, Field

from hpcfed.errors import UserError
from hpcfed.results.as_json import read_json
from hpcfed.results.folder import PROFILE

MOST_BYTES = 2**26
"""Largest profile to read: a day of a hundred ranks is some megabytes."""


class Part(BaseModel):
    """Clients' training or a network of the server, by the device's ceilings."""

    name: str
    seconds: float
    warm: float | None
    """Seconds at the pace of the last rounds or steps."""
    busy: float | None
    compute: float | None
    bandwidth: float | None
    numbers: str = "float32"
    """The number type whose matrix products set the ceiling of its arithmetic."""
    words: str
    """What limits it, in a sentence."""
    next: list[str]
    """What to try."""


class Operator(BaseModel):
    """A kernel on a GPU or an operator on a CPU, over a whole session."""

    name: str
    seconds: float
    """Its own time, excluding what it calls."""
    calls: int


ROUNDS = "rounds"
"""The session of clients' rounds; others have the names of the server's networks."""


class Session(BaseModel):
    """Some rounds, or steps of one of the server's networks, under torch's profiler."""

    name: str
    number: int
    """Number of rounds or steps."""
    seconds: float = nan
    busy: float = nan
    """The share of that time in which the device, or torch on a CPU, was busy."""
    operators: list[Operator]

    @property
    def unit(self) -> str:
        """What it has some of: rounds, or steps of a network."""
        return ROUNDS if self.name == ROUNDS else f"steps of the {self.name}"


class Lane(NamedTuple):
    """What a rank did during an interval, in seconds since the start."""

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
    """The speeds that the device reached in measurements with a number type."""

    bytes_per_second: float = Field(gt=0)
    flops: float = Field(gt=0)
    variation: float = 0.0
    """Relative variation of the trials."""


class Profile(BaseModel):
    device: str
    ceilings: dict[str, Ceiling] = {}
    """By number type; older profiles have none."""
    parts: list[Part]
    ranks: list[Rank]

    @property
    def sessions(self) -> list[Session]:
        """One session of each kind; other ranks do the same work."""
        found: dict[str, Session] = {}
        for rank in self.ranks:
            for session in rank.sessions:
                found.setdefault(session.name, session)
        return list(found.values())


def read_profile(folder: Path) -> Profile | None:
    """Read the profile of a run; None if it was not profiled."""
    path = folder / PROFILE
    if not path.exists():
        return None
    try:
        found: Profile = read_json(path, Profile, MOST_BYTES)
        return found
    except (OSError, ValueError) as error:
        # pydantic writes several lines, but an error has one.
        reason = str(error).splitlines()[0]
        raise UserError(f"{path}: not a profile of a run: {reason}") from None
