"""The parser of one command: its help, its examples, and its error messages."""

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from hpcfed.errors import UserError, did_you_mean


def path_of(text: str) -> Path:
    """Return a path; refuse nothing, as a variable that is not set gives: it would be
    the current folder.
    """
    if not text:
        raise ValueError("must be a path")
    return Path(text)


def positive(text: str) -> int:
    """Return a whole number from 1 on."""
    # Nine digits are enough, and int() is slow on very long numbers.
    if not re.fullmatch("0*[1-9][0-9]{0,8}", text):
        raise ValueError("must be a whole number from 1 on")
    return int(text)


def _reading(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Let argparse report what a reader says of a value that it cannot read."""

    def value(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{error}, got '{text}'") from None

    return value


KINDS: dict[str, Callable[[str], Any]] = {
    "N": int,
    "X": float,
    "SECONDS": float,
    "INCHES": float,
    "DIR": _reading(path_of),
    "FILE": _reading(path_of),
    "PATH": _reading(path_of),
}
"""What a value is, by the word that stands for it in the help; any other is text."""


class _Help(argparse.HelpFormatter):
    """Keep the line breaks of examples, and wrap all other text."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n  hpcfed " in text:
            return text
        return super()._fill_text(text, width, indent)


class FlagParser(argparse.ArgumentParser):
    """A parser of flags that are written as their help shows them."""

    def add_flags(self, text: str, **kinds: Callable[[str], Any]) -> None:
        """Add flags written as their help shows them: a line `--flag VALUE`, then what it
        means. A flag without a value is a switch.

        `kinds` says how to read values that are not among `KINDS`, by their word.
        """
        for block in re.split(r"\n(?=--)", text.strip()):
            head, *lines = block.splitlines()
            flag, _, value = head.partition(" ")
            # argparse would take a single per cent sign for a format.
            meaning = " ".join(map(str.strip, lines)).replace("%", "%%")
            if not value:
                self.add_argument(flag, action="store_true", help=meaning)
                continue
            choices = value[1:-1].split(",") if value.startswith("{") else None
            kind = KINDS.get(value.partition(".")[0], str)
            if value in kinds:
                kind = _reading(kinds[value])
            self.add_argument(
                flag, metavar=value, choices=choices, type=kind, help=meaning
            )


class CommandParser(FlagParser):
    """A parser that ends its help with examples and reports a mistake in one line."""

    def __init__(
        self, command: str, examples: str, *, notes: str = "", **options: Any
    ) -> None:
        """Make the parser of a command; the help ends with `notes` and `examples`."""
        self._command = command
        notes = f"{notes}\n\n" if notes else ""
        super().__init__(
            f"hpcfed {command}".strip(),
            epilog=f"{notes}examples:\n{examples}",
            formatter_class=_Help,
            # An abbreviation that is unique today may be ambiguous with a new option.
            allow_abbrev=False,
            **options,
        )

    def error(self, message: str) -> NoReturn:
        # argparse would print the usage, which has more than a hundred flags, and exit.
        _, required, names = message.partition("arguments are required: ")
        if required:
            message = f"{self._command} needs {names}, as in: {self._first_example()}"
        _, _, strange = message.partition("unrecognized arguments: ")
        if strange:
            message = self._strange(strange.split()[0])
        raise UserError(message)

    def _strange(self, word: str) -> str:
        """Say what is wrong with a word that the command does not know."""
        flag = word.partition("=")[0]
        if not flag.startswith("-"):
            return f"unexpected argument '{word}'; hpcfed {self._command} --help"
        return f"unknown option {flag}{did_you_mean(flag, self._option_string_actions)}"

    def _first_example(self) -> str:
        lines = (self.epilog or "").splitlines()
        first = next(line for line in lines if line.startswith("  hpcfed "))
        # Two spaces separate an example from its explanation.
        return first.strip().partition("  ")[0]
