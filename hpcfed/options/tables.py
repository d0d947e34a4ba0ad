"""Options that are tables: the keywords of a network or a data set of the user's.

A table is JSON on the command line, as in `--model-options '{"depth": 4}'`, and a table
in a TOML file. It is kept as JSON text with sorted keys, so that records, comparisons
and columns of a CSV have one plain value.
"""

import json
from typing import Annotated, Any

from pydantic import BeforeValidator

_ENDING = "_options"


def is_table(option: str) -> bool:
    """Tell whether an option is a table, by its name."""
    return option.replace("-", "_").endswith(_ENDING)


def read_table(value: Any) -> str | None:
    """Return a table, or JSON text of one, as JSON text in a fixed order."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError("must be JSON, as in '{\"depth\": 4}'") from None
    if not isinstance(value, dict):
        raise ValueError("must be a table, as in '{\"depth\": 4}'")
    for key in value:
        if not key.isidentifier():
            raise ValueError(f"must have names of keywords as keys, not '{key}'")
    try:
        return json.dumps(value, sort_keys=True, allow_nan=False) if value else None
    except (TypeError, ValueError):
        # TOML has dates, and NaN.
        raise ValueError("must hold plain numbers, texts, lists and tables") from None


def parse_table(text: str | None) -> dict[str, Any]:
    """Return the table that `read_table` has made a text of."""
    table: dict[str, Any] = {} if text is None else json.loads(text)
    return table


Table = Annotated[str | None, BeforeValidator(read_table)]
"""An option that is a table; None: an empty one."""
