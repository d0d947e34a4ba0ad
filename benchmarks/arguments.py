"""Arguments that the programs of this folder share. Imports nothing of hpcfed: what is
imported already, benchmarks.mutation could not change.
"""

import argparse
import os
from pathlib import Path


def parser_of(docstring: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is a program's docstring, line by line."""
    return argparse.ArgumentParser(
        description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter
    )


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
