"""What every rank did when, coarse enough for a page: what took most of each moment.

trace.json has every span; of a long run they are too many to be drawn.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hpcfed.profile.timeline import PROFILER, Timeline

MOMENTS = 400
"""Pieces that the whole time is cut into."""
TRACKS = ("phases", "server", PROFILER)
"""Tracks that a lane is made of, outer ones first. Others are kernels and operators."""


class Lane(NamedTuple):
    """A piece of time; seconds count from the start of the run."""

    name: str
    begin: float
    end: float


def lanes(timelines: Sequence[Timeline]) -> list[list[Lane]]:
    """Return what took most of each moment, of every rank."""
    end = 0.0
    for line in timelines:
        for span in line.spans:
            if span.track in TRACKS:
                end = max(end, span.begin + span.seconds)
    return [_of_rank(line, end / MOMENTS) for line in timelines]


def _of_rank(line: Timeline, moment: float) -> list[Lane]:
    found: list[Lane] = []
    # Without times, as of a run that failed at once, there is nothing to cut.
    for number, name in enumerate(_names(line, moment) if moment > 0 else ()):
        begin, end = number * moment, (number + 1) * moment
        if found and (found[-1].name, found[-1].end) == (name, begin):
            begin = found.pop().begin
        if name:
            found.append(Lane(name, begin, end))
    return found


def _names(line: Timeline, moment: float) -> list[str]:
    """Return what took most of each moment; nothing where the rank was idle."""
    names = [""] * MOMENTS
    # A later track lies within an earlier one: the server's parts in its phase, and what
    # the profiler takes in either.
    for track in TRACKS:
        took: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(MOMENTS))
        for span in line.spans:
            if span.track == track:
                end = span.begin + span.seconds
                name = PROFILER if track == PROFILER else span.name
                took[name] += _shares(span.begin / moment, end / moment)
        for number in np.flatnonzero(sum(took.values()) >= 0.5) if took else ():
            names[number] = max(took, key=lambda name: float(took[name][number]))
    return names


def _shares(begin: float, end: float) -> np.ndarray:
    """Return the share of every moment that lies between two times, in moments."""
    starts = np.arange(MOMENTS)
    inside = np.minimum(starts + 1, end) - np.maximum(starts, begin)
    shares: np.ndarray = inside.clip(0, 1)
    return shares
