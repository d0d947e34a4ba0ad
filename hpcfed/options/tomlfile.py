"""Options from a TOML file."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Annotated, Any

from pydantic import BeforeValidator

from hpcfed.errors import UserError

# Options that are tables: keywords for the user's own network or data set.
#
# A table is JSON on the command line, as in `--model-options '{"depth": 4}'`, and a table
# in a TOML file. It is kept as JSON text with sorted keys, so that records, comparisons
# and columns of a CSV have one plain value.


_ENDING = "_options"


def is_table(option: str) -> bool:
    """Tell whether an option is a table, by its name."""
    return option.replace("-", "_").endswith(_ENDING)


def read_table(value: Any) -> str | None:
    """Return a table, or its JSON text, as JSON text with sorted keys."""
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
        # TOML has dates and NaN, JSON does not.
        raise ValueError("must hold plain numbers, texts, lists and tables") from None


def parse_table(text: str | None) -> dict[str, Any]:
    """Return the table of a text from `read_table`."""
    table: dict[str, Any] = {} if text is None else json.loads(text)
    return table


Table = Annotated[str | None, BeforeValidator(read_table)]
"""An option that is a table; None means an empty one."""


MOST_TOML = 2**20
"""The largest size of an options file in bytes."""


def load_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file; raise UserError if it cannot be read."""
    try:
        # Check before opening: reading a pipe may block forever.
        found = path.stat()
        if not S_ISREG(found.st_mode) and not S_ISDIR(found.st_mode):
            raise UserError(
                f"{path} is not a regular file; options are read from a file of text"
            )
        if found.st_size > MOST_TOML:
            raise UserError(
                f"{path} has {found.st_size:,} bytes, too many for a file of options"
            )
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    # TOML's own errors, text that is not UTF-8, and endlessly nested lists.
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from None


def read_toml(path: Path) -> dict[str, Any]:
    """Read an options file; options are flat, so refuse most tables."""
    content = load_toml(path)
    for key, value in content.items():
        if isinstance(value, dict) and not is_table(key):
            study = key in ("common", "sweep", "variants")
            advice = f"; run a study by: hpcfed study {path}" if study else ""
            raise UserError(
                f"{path}: '{key}' is a table; options are plain keys, such as "
                f"rounds = 10{advice}"
            )
    # Many runs may share a file, so it must not name the folder of one of them.
    if "resume" in content:
        raise UserError(
            f"{path}: give resume only on the command line, as in hpcfed run --resume "
            f"{content['resume']}"
        )
    return by_option(content, f"{path}")


def by_option(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Replace dashes in keys by underscores; refuse an option that is there twice."""
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name in values:
            raise UserError(
                f"{where}: {name} is there twice, once as {name.replace('_', '-')}; "
                "keep one of them"
            )
        values[name] = value
    return values
