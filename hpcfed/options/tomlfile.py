"""Options from a TOML file."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any

from hpcfed.errors import UserError
from hpcfed.options.tables import is_table

MOST_TOML = 2**20
"""The most bytes of a file of options that are read."""


def load_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file; a file that cannot be read is the user's mistake."""
    try:
        # Look before opening: a pipe may never end, or never begin.
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
    """Read a file of options; options are flat, so most tables are refused."""
    content = load_toml(path)
    for key, value in content.items():
        if isinstance(value, dict) and not is_table(key):
            raise UserError(
                f"{path}: '{key}' is a table; options are plain keys, such as "
                "rounds = 10"
            )
    # A file is shared by many runs; the folder of one of them has no place in it.
    if "resume" in content:
        raise UserError(
            f"{path}: resume goes on the command line alone, as in hpcfed run --resume "
            f"{content['resume']}"
        )
    return by_option(content, f"{path}")


def by_option(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the table with underscores in its keys.

    An option that is spelt with dashes and with underscores has two values: refused.
    """
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
