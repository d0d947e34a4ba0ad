"""Numbers with units, as a user types them: `20ms`, `5us`, `50GB/s`."""

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator

SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
"""Seconds in each unit of time."""
BYTES_PER_SECOND = {
    "MB/s": 1e6,
    "GB/s": 1e9,
    "TB/s": 1e12,
    "MiB/s": 2.0**20,
    "GiB/s": 2.0**30,
    "Mb/s": 1e6 / 8,
    "Gb/s": 1e9 / 8,
    "Tb/s": 1e12 / 8,
}
"""Bytes per second in each unit of speed; a small b stands for bits."""

# Keyboards type the Greek letter; the micro sign looks the same.
_MICRO = str.maketrans("\N{GREEK SMALL LETTER MU}", "\N{MICRO SIGN}")
_QUANTITY = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?) ?(\S{1,5})", re.ASCII)


def parse_quantity(text: str, units: Mapping[str, float], example: str) -> float:
    """Return the number in the base unit; raise ValueError with an example otherwise.

    Never guess a unit: a wrong factor of 8 or 1000 would go unnoticed.
    """
    found = _QUANTITY.fullmatch(text.strip().translate(_MICRO))
    if found is None or found[2] not in units:
        known = ", ".join(name for name in units if name.isascii())
        raise ValueError(f"must be a number with a unit ({known}), as in {example}")
    number = float(found[1]) * units[found[2]]
    if not number > 0:
        raise ValueError(f"must be above 0, as in {example}")
    return number


def parse_seconds(text: str) -> float:
    """Return a time such as `20ms` in seconds."""
    return parse_quantity(text, SECONDS, "20ms")


def parse_bytes_per_second(text: str, example: str = "50GB/s") -> float:
    """Return a speed such as `50GB/s` in bytes per second."""
    return parse_quantity(text, BYTES_PER_SECOND, example)


def _read_seconds(value: Any) -> Any:
    """Parse text with a unit; keep the plain seconds of a record.

    0 needs no unit: it means "unset", as for other options.
    """
    if isinstance(value, str) and value != "0":
        return parse_seconds(value)
    return value


def _read_bytes_per_second(value: Any) -> Any:
    """Parse text with a unit; a plain number is bytes per second."""
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return parse_bytes_per_second(value, "6Mb/s")


Seconds = Annotated[float | None, BeforeValidator(_read_seconds)]
"""A time as an option of a run: text with a unit, or seconds."""
BytesPerSecond = Annotated[float, BeforeValidator(_read_bytes_per_second)]
"""A speed as an option of a run: text with a unit, or bytes per second."""
