"""Reading JSON from untrusted files, and figures as JSON values."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from hpcfed.results.safe import check_file

MOST_DEPTH = 32
"""Deepest nesting of JSON to read."""


def read_json(path: Path, kind: Any, most: int) -> Any:
    """Read a JSON file of at most `most` bytes as this type; raise an OSError or a
    ValueError for anything else.
    """
    check_file(path, most)
    return TypeAdapter(kind).validate_python(_loaded(path.read_text()))


def parsed(text: str) -> dict[str, Any]:
    """Parse a JSON object; raise a ValueError for anything else."""
    found = _loaded(text)
    if not isinstance(found, dict):
        raise ValueError("its JSON is not an object")
    return found


def _loaded(text: str) -> Any:
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    _check_depth(found)
    # Encoding rejects lone surrogates, which cannot be printed.
    json.dumps(found, ensure_ascii=False).encode()
    return found


def _check_depth(value: Any) -> None:
    """Refuse JSON nested so deeply that recursive code could not walk it."""
    # Level by level: recursion here would fail on what it should refuse.
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
    """Return a value that JSON can represent: NaN and infinite numbers become null."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return [_number(item) for item in value]
    # JSON does not know numpy's number types.
    if isinstance(value, np.generic):
        value = value.item()
    return _number(value) if isinstance(value, float) else value


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
