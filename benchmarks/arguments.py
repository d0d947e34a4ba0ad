"""Arguments that the programs of this folder share."""

import argparse


def parser_of(docstring: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is a program's docstring, line by line."""
    return argparse.ArgumentParser(
        description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    """Let the user choose the device; `auto` takes a GPU if there is one."""
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
