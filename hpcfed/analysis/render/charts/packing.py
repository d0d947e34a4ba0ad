"""Charts as one JSON text for a page, with their data packed: columns instead of records,
and every name once.
"""

import json
from collections.abc import Sequence
from typing import Any

from hpcfed.analysis.render.charts.drawing import Drawing, Record


def packed(drawings: Sequence[Drawing]) -> str:
    """Return all drawings as JSON that may stand inside a script of a page."""
    every = []
    for drawing in drawings:
        spec = _pack(drawing.spec)
        every.append({"title": drawing.title, "dense": drawing.dense, "spec": spec})
    text = json.dumps(every, allow_nan=False, separators=(",", ":"))
    # A name such as `</script>` must not end the script that it stands in.
    return text.replace("<", "\\u003c")


def _pack(part: Any) -> Any:
    """Replace every list of records in a description by its columns."""
    if isinstance(part, dict):
        packed = {key: _pack(value) for key, value in part.items()}
        if isinstance(part.get("data"), dict) and "values" in part["data"]:
            packed["data"] = _columns(part["data"]["values"])
        return packed
    if isinstance(part, list):
        return [_pack(value) for value in part]
    return part


def _columns(records: Sequence[Record]) -> dict[str, Any]:
    """Return columns by field. Words are numbers in a column, and stand in `words`."""
    fields: dict[str, None] = {}
    for record in records:
        fields |= dict.fromkeys(record)
    columns: dict[str, list[Any]] = {}
    words: dict[str, list[str]] = {}
    for field in fields:
        values = [record.get(field) for record in records]
        if any(isinstance(value, str) for value in values):
            words[field] = list(dict.fromkeys(map(str, values)))
            number = {word: place for place, word in enumerate(words[field])}
            values = [number[str(value)] for value in values]
        columns[field] = values
    return {"columns": columns, "words": words}
