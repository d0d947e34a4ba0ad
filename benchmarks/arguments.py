"""Arguments that the programs of this folder share."""

import argparse
import os
from pathlib import Path
from typing import NoReturn

from hpcfed.errors import UserError


def parser_of(docstring: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is a program's docstring, line by line."""
    return argparse.ArgumentParser(
        description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter
    )


class StrictParser(argparse.ArgumentParser):
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


def add_device(parser: argparse.ArgumentParser) -> None:
    """Let the user choose the device; `auto` takes a GPU if there is one."""
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")


def add_set(parser: argparse.ArgumentParser, example: str) -> None:
    """Let the user give options of all runs."""
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="OPTION=VALUE",
        help=f"options of all runs, such as {example}",
    )


def add_data_root(parser: argparse.ArgumentParser) -> None:
    """Let the user name the folder of real data sets."""
    parser.add_argument(
        "--data-root",
        type=Path,
        default=os.environ.get("HPCFED_DATA"),
        help="folder of the data sets; synthetic samples stand in for those that are "
        "not there (default: HPCFED_DATA)",
    )
