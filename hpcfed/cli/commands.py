"""Finds the command and reports how it ended; nothing heavy is imported before that."""

import argparse
import platform
import sys
from collections.abc import Sequence
from errno import EACCES, EIO, ENAMETOOLONG, ENOSPC, EPERM
from importlib import metadata
from io import TextIOWrapper
from types import ModuleType
from typing import Any, NoReturn

from hpcfed.cli import (
    attack,
    benchmark,
    catalogue,
    doctor,
    examples,
    plan,
    privacy,
    profile,
    report,
    run,
    show,
    study,
    watch,
)
from hpcfed.cli.parser import CommandParser
from hpcfed.errors import UserError, drop_stdout, remark, tell, unknown
from hpcfed.runtime.launcher import is_copy, launched, leave, telling_a_good_end
from hpcfed.version import source

COMMANDS: dict[str, ModuleType] = {
    "run": run,
    "watch": watch,
    "show": show,
    "profile": profile,
    "benchmark": benchmark,
    "study": study,
    "plan": plan,
    "doctor": doctor,
    "report": report,
    "privacy": privacy,
    "attack": attack,
    "list": catalogue,
    "examples": examples,
}
"""A command's module has SUMMARY, EXAMPLES and a function `command(arguments)`."""
UNLISTED = {"stack": study.run_stack}
"""Commands that hpcfed starts itself; the help does not list them."""
ALONE = {"watch", "show", "report", "privacy", "attack", "list", "examples"}
"""Commands of one process: of several ranks, only the first runs them."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; exit with 0, 1 after a failure, or 2 after a user's mistake."""
    # Tests and users' programs call this with their own arguments.
    words = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, TextIOWrapper):
        # A locale may lack ← or ö: replace them. Python's stderr already does.
        sys.stdout.reconfigure(errors="replace")
    if _is_for_one(words) and is_copy(words):
        return
    try:
        with telling_a_good_end():
            _dispatch(words)
    except UserError as error:
        _refuse(error)
    except KeyboardInterrupt:
        remark("hpcfed: interrupted")
        sys.exit(130)  # 128 + SIGINT, as shells expect
    except BrokenPipeError:
        # The reader of our output has closed it, as in `hpcfed list | head`. What prints
        # beside other work, or before a verdict, goes on without a reader.
        drop_stdout()
        sys.exit(0)
    except OSError as error:
        _fail(error)


def _is_for_one(words: Sequence[str]) -> bool:
    """Tell whether one process is enough for a command, as for any command's help."""
    name = words[0] if words else "--help"
    asked = {"-h", "--help"}
    if name == "benchmark":
        asked |= set(benchmark.FLAGS_ALONE)
    return name in ALONE or name.startswith("-") or not asked.isdisjoint(words)


def _refuse(error: UserError) -> NoReturn:
    launch = launched()
    tell(error, launch.rank)
    leave(launch, 2)


def _fail(error: OSError) -> NoReturn:
    """Exit with one line if a file system error has a simple cause; else raise it."""
    # Only a path from the command line can be too long, or another user's.
    theirs = error.errno in (ENAMETOOLONG, EACCES, EPERM)
    if theirs and error.filename is not None:
        _refuse(UserError(f"{error.filename}: {error.strerror}"))
    # Without a file name, the error was on stdout.
    if error.filename is None and error.errno in (ENOSPC, EIO):
        remark(f"hpcfed: cannot write to stdout: {error.strerror}")
        sys.exit(1)
    raise error


def _dispatch(arguments: list[str]) -> None:
    # Not argparse's subcommands: they would build all parsers for every command, also
    # the hundred flags of `run`.
    if not arguments or arguments[0].startswith("-"):
        parser = _parser()
        parser.parse_args(arguments)
        parser.print_help()
        return
    name, *rest = arguments
    if name not in COMMANDS and name not in UNLISTED:
        raise unknown("command", name, COMMANDS)
    command = UNLISTED.get(name) or COMMANDS[name].command
    command(rest)


def _parser() -> CommandParser:
    """Return the parser of `hpcfed` without a command, whose help shows them all."""
    summaries, examples = ["commands:"], []
    for name, module in COMMANDS.items():
        summaries.append(f"  {name:9} {module.SUMMARY}")
        lines = module.EXAMPLES.splitlines()
        # All examples of `run`, the first of every other command.
        examples += lines if name == "run" else lines[:1]
    parser = CommandParser(
        "",
        "\n".join(examples),
        notes="\n".join(summaries),
        description="Benchmarks of federated learning on clusters. Hundreds of clients "
        "are the rows of one matrix.",
    )
    parser.add_argument(
        "--version",
        action=_Version,
        help="print the version, its commit, and those of Python and torch",
    )
    parser.add_argument(
        "command", nargs="?", metavar="COMMAND", help="COMMAND --help says more"
    )
    return parser


class _Version(argparse.Action):
    """Print versions and exit. An action, so that git runs only on demand."""

    def __init__(self, **options: Any) -> None:
        super().__init__(nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        torch = metadata.version("torch")  # importing it would take seconds
        python = platform.python_version()
        print(f"hpcfed {source()}, Python {python}, torch {torch}")
        parser.exit()
