"""The parser of one command: its help, its examples, and its error messages."""

import argparse
from typing import Any, NoReturn

from hpcfed.errors import UserError, did_you_mean


class _Help(argparse.HelpFormatter):
    """Keep the line breaks of examples, and wrap all other text."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n  hpcfed " in text:
            return text
        return super()._fill_text(text, width, indent)


class CommandParser(argparse.ArgumentParser):
    """A parser that ends its help with examples and reports a mistake in one line."""

    def __init__(self, command: str, epilog: str, **options: Any) -> None:
        self._command = command
        super().__init__(
            f"hpcfed {command}".strip(),
            epilog=epilog,
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
