"""Reads devices from a CSV file: a line for each client, `client,speed,downlink,uplink`.

Speed is relative (1: a step takes --step-seconds), links are in bytes per second. Two
more columns may say when a client is available: `available`, such as `0-3600;7200-9000`
in seconds of virtual time, and `period`, after which these spans repeat (86400 for
every day). An empty `available` means always, an empty `period` means once.

    client,speed,downlink,uplink,available,period
    0,1.0,750000,250000,,
    1,0.4,200000,50000,0-25200;79200-86400,86400

The file may contain anything: every mistake is reported in one line with its line
number.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, isfinite
from pathlib import Path

import numpy as np

from hpcfed.errors import UserError
from hpcfed.options.devices import LEAST, MOST

# When clients are available: spans of virtual time, once or repeated in every period.


@dataclass(frozen=True)
class Availability:
    """The spans of all clients in flat arrays: one entry per span, in any order.

    A client without a span is always available. A span includes its beginning, but not
    its end.
    """

    num_clients: int
    owner: np.ndarray
    """The client that each span belongs to."""
    begin: np.ndarray
    """Seconds since the start of the run, or of the client's period."""
    end: np.ndarray
    period: np.ndarray
    """Seconds after which the span repeats; infinity: never."""

    def at(self, now: float) -> np.ndarray:
        """Return which clients are available at this moment, [clients]."""
        there = self._always.copy()
        moment = self._within_period(now)
        covered = (self.begin <= moment) & (moment < self.end)
        there[self.owner[covered]] = True
        return there

    def next(self, now: float) -> float:
        """Return when a client is available from `now` on; infinity: never again."""
        if self.at(now).any():
            return now
        moment = self._within_period(now)
        wait = self.begin - moment
        # Spans that are over come again in the next period, if there is one.
        wait = np.where(wait > 0, wait, wait + self.period)
        following = now + float(wait.min())
        # The sum may be rounded to just before the span; then the span would never
        # begin.
        while np.isfinite(following) and not self.at(following).any():
            following = float(np.nextafter(following, np.inf))
        return following

    def of(self, rows: np.ndarray) -> "Availability":
        """Return the availability of these clients, each perhaps several times."""
        order = np.argsort(self.owner, kind="stable")
        counts = np.bincount(self.owner, minlength=self.num_clients)
        first = np.concatenate([[0], np.cumsum(counts)])
        of_each = counts[rows]
        owner = np.repeat(np.arange(len(rows)), of_each)
        # 0, 1, 2 … within the spans of each client.
        begins = np.cumsum(of_each) - of_each
        number = np.arange(len(owner)) - np.repeat(begins, of_each)
        spans = order[np.repeat(first[rows], of_each) + number]
        return Availability(
            len(rows), owner, self.begin[spans], self.end[spans], self.period[spans]
        )

    @cached_property
    def _always(self) -> np.ndarray:
        """Which clients have no span."""
        always = np.ones(self.num_clients, bool)
        always[self.owner] = False
        return always

    @cached_property
    def _periods(self) -> tuple[np.ndarray, np.ndarray]:
        """The distinct periods, usually one, and the index of each span's period."""
        return np.unique(self.period, return_inverse=True)

    def _within_period(self, now: float) -> np.ndarray:
        periods, which = self._periods
        # x mod infinity is x.
        return np.mod(now, periods)[which]


NEEDED = ("client", "speed", "downlink", "uplink")
OPTIONAL = ("available", "period")
MOST_BYTES = 256 * 2**20
"""A trace of millions of phones is smaller; anything larger is not a trace."""


@dataclass(frozen=True)
class Trace:
    """Devices in the order of the file's clients."""

    speed: np.ndarray
    downlink: np.ndarray
    uplink: np.ndarray
    availability: Availability | None
    """None if no client is ever away."""


@dataclass
class _Columns:
    """What has been read so far."""

    client: list[int] = field(default_factory=list)
    speed: list[float] = field(default_factory=list)
    downlink: list[float] = field(default_factory=list)
    uplink: list[float] = field(default_factory=list)
    owner: list[int] = field(default_factory=list)
    begin: list[float] = field(default_factory=list)
    end: list[float] = field(default_factory=list)
    period: list[float] = field(default_factory=list)


def read_trace(path: Path) -> Trace:
    """Read the devices of a file; UserError names the line of the first mistake."""
    columns = _Columns()
    seen: set[int] = set()
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UserError(f"{path}: a trace may have at most {MOST_BYTES:,} bytes")
        # -sig: spreadsheets begin their files with a byte order mark.
        with open(path, encoding="utf-8-sig", newline="") as file:
            for number, row in _rows(file, path):
                try:
                    _read_row(columns, row, seen)
                except ValueError as mistake:
                    raise UserError(f"{path}, line {number}: {mistake}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(f"{path}: {reason}") from None
    if not columns.client:
        raise UserError(f"{path}: there is no client below the heading")
    if max(columns.client) >= len(columns.client):
        missing = min(set(range(len(columns.client))) - seen)
        raise UserError(
            f"{path}: clients count from 0 without gaps, and {missing} is missing"
        )
    return _trace(columns)


def _rows(file: Iterator[str], path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield each line's number and its cells by name; refuse a wrong heading."""
    # Strict: an unclosed quote would swallow the rest of the file.
    reader = csv.reader(file, strict=True)
    try:
        heading = [cell.strip() for cell in next(reader, [])]
        known = (*NEEDED, *OPTIONAL)
        fits = set(NEEDED) <= set(heading) <= set(known)
        if not fits or len(set(heading)) < len(heading):
            raise UserError(
                f"{path}, line 1: must name the columns {', '.join(NEEDED)}, and may "
                f"name {' and '.join(OPTIONAL)}"
            )
        for cells in reader:
            if not cells:  # an empty line
                continue
            if len(cells) != len(heading):
                raise UserError(
                    f"{path}, line {reader.line_num}: {len(cells)} cells, but the "
                    f"heading has {len(heading)}"
                )
            yield reader.line_num, dict(zip(heading, cells, strict=True))
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: {error}") from None


def _read_row(columns: _Columns, row: dict[str, str], seen: set[int]) -> None:
    """Add a line's device; ValueError says what is wrong with it."""
    client = row["client"].strip()
    # isdecimal accepts digits of all scripts, and int any number of digits.
    if not (client.isascii() and client.isdecimal() and len(client) <= 9):
        raise ValueError(f"client must be a number from 0 on, got {client[:40]!r}")
    if int(client) in seen:
        raise ValueError(f"client {client} is listed twice")
    seen.add(int(client))
    columns.client.append(int(client))
    for name in ("speed", "downlink", "uplink"):
        getattr(columns, name).append(_positive(row[name], name))
    period = inf
    if row.get("period", "").strip():
        period = _positive(row["period"], "period")
    for begin, end in _spans(row.get("available", ""), period):
        columns.owner.append(int(client))
        columns.begin.append(begin)
        columns.end.append(end)
        columns.period.append(period)


def _positive(text: str, name: str) -> float:
    number = _number(text, name)
    if not LEAST <= number <= MOST:
        raise ValueError(f"{name} must be from {LEAST:g} to {MOST:g}, got {number:g}")
    return number


def _number(text: str, name: str) -> float:
    try:
        # float() accepts 1_000 and digits of other scripts.
        number = float(text) if text.isascii() and "_" not in text else inf
    except ValueError:
        number = inf
    if not isfinite(number):
        raise ValueError(f"{name} must be a number, got {text.strip()[:40]!r}")
    return number


def _spans(text: str, period: float) -> Iterator[tuple[float, float]]:
    """Yield beginning and end of each span of `0-3600;7200-9000`."""
    for span in filter(None, map(str.strip, text.split(";"))):
        first, dash, last = span.partition("-")
        if not dash:
            raise ValueError(f"available must look like 0-3600, got {span[:40]!r}")
        begin, end = _number(first, "available"), _number(last, "available")
        if not 0 <= begin < end <= MOST:
            raise ValueError(f"available must begin before it ends, got {span[:40]!r}")
        if end > period:
            raise ValueError(
                f"available must end within the period of {period:g}, got {span[:40]!r}"
            )
        yield begin, end


def _trace(columns: _Columns) -> Trace:
    """Sort what was read by client."""
    order = np.argsort(columns.client)
    availability = None
    if columns.owner:
        availability = Availability(
            num_clients=len(columns.client),
            owner=np.array(columns.owner),
            begin=np.array(columns.begin),
            end=np.array(columns.end),
            period=np.array(columns.period),
        )
    return Trace(
        speed=np.array(columns.speed)[order],
        downlink=np.array(columns.downlink)[order],
        uplink=np.array(columns.uplink)[order],
        availability=availability,
    )
