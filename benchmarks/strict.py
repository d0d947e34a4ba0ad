"""Arguments of programs that tell a mistake in one line."""

import argparse
from typing import NoReturn

from hpcfed.cli.parser import FlagParser
from hpcfed.errors import UserError


class StrictParser(FlagParser):
    """Raises UserError for a mistake, which a program tells in one line. Its help is the
    program's docstring, line by line.
    """

    def __init__(self, docstring: str | None) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(
            description=docstring, formatter_class=formatter, allow_abbrev=False
        )

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def check_rounds(options: argparse.Namespace) -> None:
    """Refuse --rounds and --warmup below 1, and a --json whose folder is not there."""
    for name in ("rounds", "warmup"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name} {getattr(options, name)}: use 1 or more")
    if options.json and not options.json.absolute().parent.is_dir():
        raise UserError(f"--json {options.json}: its folder does not exist")
