"""The flags of `hpcfed run`: one for every option, made from the options' own types."""

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from hpcfed import methods, plugins
from hpcfed.cli.parser import CommandParser
from hpcfed.options import GROUPS, flag_of, suggest_option
from hpcfed.options.declare import facts_of, zero_unsets

EXAMPLES = """\
  hpcfed run --method fedavg-ft --clients 20 --rounds 10      alone, on the digits that come with it
  mpirun -n 4 python -m hpcfed run my.toml --clients 100      options from a file; flags win
  srun --mpi=pmix -n 16 python -m hpcfed run --dataset cifar10 --data-root /data --out runs/first
  mpirun -n 3 python -m hpcfed run --method pfedgpa --server-ranks 1 --server small
  hpcfed run --seeds 0..4 --out runs/five                     five seeds at once, a folder each
  hpcfed run --method genfed --attack ipm --target-accuracy 80   attackers; when is 80 % reached?"""

METHOD_TITLES = {
    "method": "options of method {method}",
    "server": "the server's model, of method {method}",
}
"""Headings of the groups of a method's options."""

# Any other type, such as seeds, is a list.
METAVARS: dict[Any, str] = {int: "N", float: "X", str: "NAME", Path: "PATH"}


def run_parser(
    method_fields: Mapping[str, FieldInfo], method: str, *, add_help: bool = True
) -> tuple[dict[str, str], CommandParser]:
    """Return the flags by option, and their parser.

    Values stay text here; the options' types validate them later.
    """
    parser = CommandParser(
        "run",
        f"examples:\n{EXAMPLES}",
        usage="hpcfed run [CONFIG.toml] [options]",
        description="One run: alone, or on every rank that mpirun or srun starts. "
        "Options of another method: hpcfed run --method NAME --help, or FILE.py for NAME.",
        add_help=add_help,
    )
    parser.add_argument(
        "config",
        nargs="?",
        metavar="CONFIG.toml",
        help="options as keys, e.g. rounds = 10; flags win",
    )
    # Flags have no types or limits here: pydantic checks values of files and flags
    # alike, and its messages name either.
    flags = {}
    for title, fields in _titled(method_fields, method):
        group = parser.add_argument_group(title)
        for name, field in fields.items():
            flags[name] = flag_of(name)
            _add_flag(group, name, field)
    return flags, parser


def _titled(
    method_fields: Mapping[str, FieldInfo], method: str
) -> Iterator[tuple[str, dict[str, FieldInfo]]]:
    """Yield each group's heading and its options, those of every run first."""
    for group in GROUPS:
        yield group.title, group.declared()
    for kind, title in METHOD_TITLES.items():
        fields = {}
        for name, field in method_fields.items():
            if facts_of(field).group == kind:
                fields[name] = field
        if fields:
            yield title.format(method=plugins.label(method)), fields


def _add_flag(group: argparse._ArgumentGroup, name: str, field: FieldInfo) -> None:
    # argparse would take a single per cent sign for a format.
    text = str(field.description).replace("%", "%%")
    if field.annotation is bool:
        if field.default:
            text += " (default: True)"
        group.add_argument(
            flag_of(name),
            dest=name,
            action=argparse.BooleanOptionalAction,
            # A flag that is not given stays absent, so that the file's value counts.
            default=argparse.SUPPRESS,
            help=text,
        )
        return
    if zero_unsets(field) and _takes_zero(field):
        text += " (0: as if it were not given)"
    if field.default not in (None, ""):
        text += f" (default: {field.default})"
    group.add_argument(
        flag_of(name),
        dest=name,
        default=argparse.SUPPRESS,
        metavar=_metavar(field),
        help=text,
    )


def _takes_zero(field: FieldInfo) -> bool:
    """Tell whether this option is a number that may be 0."""
    for limit in field.metadata:
        above = getattr(limit, "gt", None)
        if (above is not None and above >= 0) or (getattr(limit, "ge", None) or 0) > 0:
            return False
    return bool({int, float} & set(get_args(field.annotation)))


def _metavar(field: FieldInfo) -> str:
    kind = field.annotation
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    # Show `int | None` as `int`: None cannot be typed.
    members = [member for member in get_args(kind) if member is not NoneType]
    if len(members) == 1:
        kind = members[0]
    elif get_origin(members[-1] if members else None) is Literal:
        # A number, or one of a few words.
        words = map(str, get_args(members[-1]))
        return "|".join([METAVARS[members[0]], *words])
    return METAVARS.get(kind, "LIST")


def all_method_fields(*more: str) -> dict[str, FieldInfo]:
    """Return the options of all our methods together, and of `more`."""
    fields: dict[str, FieldInfo] = {}
    # The first pass only needs the names, and which options are bools.
    for declared in methods.options(*more).values():
        fields |= declared
    return fields


def unknown_flag(word: str, flags: Mapping[str, str]) -> str:
    """Say what is wrong with a word of the command line, and suggest what was meant."""
    flag = word.partition("=")[0]
    if not flag.startswith("-"):
        return (
            f"unexpected argument '{word}'; options start with --, and there is one "
            "CONFIG.toml"
        )
    # --no-direct is the other form of a bool.
    name = flag.lstrip("-").removeprefix("no-").replace("-", "_")
    having = methods.owners(name)
    if having:
        listed = ", ".join(having)
        return f"{flag} is an option of method {listed}; add --method {having[0]}"
    return f"unknown option {flag}{suggest_option(flag, flags.values())}"
