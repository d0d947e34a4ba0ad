"""JSON out of files that anybody may have handed in, and figures as JSON knows them."""

import json
from typing import Any

import numpy as np

MOST_DEPTH = 32
"""Levels of JSON that is read."""


def parsed(text: str) -> dict[str, Any]:
    """Parse a JSON object; a ValueError for anything else."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("its JSON is not an object")
    _check_depth(found)
    # Encoding refuses halves of characters, which nothing could print.
    json.dumps(found, ensure_ascii=False).encode()
    return found


def _check_depth(value: Any) -> None:
    """Refuse JSON that is nested so deeply that recursive code could not walk it."""
    # Level by level, because recursion is what it must protect from.
    level = [value]
    for _ in range(MOST_DEPTH):
        below: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                below += one.values()
            elif isinstance(one, list):
                below += one
        if not below:
            return
        level = below
    raise ValueError("its JSON is nested too deeply")


def plain(value: Any) -> Any:
    """Return a value as JSON knows it: NaN and infinite numbers as null."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return numbers(value)
    # numpy's own numbers are no JSON.
    if isinstance(value, np.generic):
        value = value.item()
    return number(value) if isinstance(value, float) else value


def number(value: float) -> float | None:
    """Return a number, or null for one that JSON does not know."""
    return float(value) if np.isfinite(value) else None


def numbers(values: np.ndarray) -> list[float | None]:
    """Return each number, or null for those that JSON does not know."""
    return [number(value) for value in values]
