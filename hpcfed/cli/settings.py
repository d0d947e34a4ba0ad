"""Settings of a run from its command line: a TOML file, flags, or a run to resume."""

import argparse
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from hpcfed import methods, plugins
from hpcfed.cli.parser import CommandParser
from hpcfed.cli.resume import resumed
from hpcfed.errors import UserError, shown
from hpcfed.options import (
    GROUPS,
    Settings,
    check_text,
    flag_of,
    method_of,
    named,
    read_toml,
    resolve,
    suggest_option,
)
from hpcfed.options.declare import facts_of, zero_unsets
from hpcfed.runtime.launcher import launched

RUN_EXAMPLES = """\
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
    """Return the flags of `hpcfed run` by option, and a parser that keeps text."""
    parser = CommandParser(
        "run",
        RUN_EXAMPLES,
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


def parse_run(arguments: list[str]) -> Settings:
    """Read the settings of a run from a TOML file and flags; flags win."""
    path, method = _peek(arguments)
    if path is not None:
        check_text(str(path), "CONFIG.toml")  # it goes into the record
    from_file = {} if path is None else read_toml(path)
    method = method or method_of(from_file)
    method_options = methods.load(method).Options
    flags, parser = run_parser(method_options.model_fields, method)
    # Our message for unknown words has a suggestion; argparse's has none.
    known, strange = parser.parse_known_args(arguments)
    if strange:
        raise UserError(unknown_flag(strange[0], flags))
    # Flags that were not given are absent, not None.
    given = vars(known)
    del given["config"]
    if "resume" in given:
        return _resume(given, path)
    # How the user wrote each option, for messages.
    sources = {}
    for name in from_file:
        _check_owner(name, method, flags, path)
        sources[name] = f"{path}: {name}"
    for name, value in given.items():
        sources[name] = f"{flags[name]} {value}"
    values = {**from_file, **given}
    return resolve(values, sources, method_options, ranks=launched().size)


def keyword_settings(options: Mapping[str, Any], path: Path | None = None) -> Settings:
    """Make settings from keywords and a TOML file; keywords win unless None."""
    given = {}
    for name, value in options.items():
        if value is not None:
            given[name] = plain(value)
    if "resume" in given:
        return _resume(given, path)
    from_file = {} if path is None else read_toml(path)
    sources = {name: f"{path}: {name}" for name in from_file}
    for name, value in given.items():
        sources[name] = f"{name}={shown(value)}"
    values = {**from_file, **given}
    method_options = methods.load(method_of(values)).Options
    return resolve(values, sources, method_options, ranks=launched().size)


def plain(value: Any) -> Any:
    """Convert paths, ranges and numpy numbers to what a TOML file would hold."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, range | tuple | set | frozenset):
        return [plain(entry) for entry in value]
    # Do not test for numpy's type: most command lines do not import numpy.
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    return value


def _peek(arguments: list[str]) -> tuple[Path | None, str | None]:
    """Find the TOML file and the method, which decide what other options there are.

    So this first pass allows the flags of any method, and leaves --help to the second.
    """
    words = [word for word in arguments if word not in ("-h", "--help")]
    named = _named_methods(words)
    fields: dict[str, FieldInfo] = {}
    for name in named or [method_of({})]:
        # The second pass reports a method that does not exist.
        with suppress(UserError):
            fields |= methods.load(name).Options.model_fields
    known, strange, flags = _parsed(words, fields)
    if strange:
        # Import all methods only if necessary: it takes a tenth of a second.
        ours = methods.names()
        others = [name for name in named if name not in ours]
        known, strange, flags = _parsed(words, all_method_fields(*others))
    if strange:
        # It may be an option of a method that cannot be loaded: then say why.
        for name in named:
            methods.load(name)
        raise UserError(unknown_flag(strange[0], flags))
    path = None if known.config is None else Path(known.config)
    return path, getattr(known, "method", None)


def _parsed(
    words: list[str], method_fields: Mapping[str, FieldInfo]
) -> tuple[argparse.Namespace, list[str], dict[str, str]]:
    """Return what was parsed, words that are unknown, and the flags by option."""
    flags, parser = run_parser(method_fields, "", add_help=False)
    known, strange = parser.parse_known_args(words)
    return known, strange, flags


def _named_methods(words: list[str]) -> list[str]:
    """Find candidates for the method, whose file decides which flags there are."""
    found = []
    for word, following in pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        if name == "--method":
            found.append(value if equals else following)
        elif word.endswith(".toml") and Path(word).is_file():
            # The second pass reports mistakes in the file.
            with suppress(UserError):
                found.append(method_of(read_toml(Path(word))))
    return found


def _check_owner(
    name: str, method: str, flags: Mapping[str, str], path: Path | None
) -> None:
    """Refuse an option in the file that belongs to another method."""
    having = [] if name in flags else methods.owners(name)
    if having:
        raise UserError(
            f"{path}: {name} is an option of method {', '.join(having)}, and the "
            f"method is {method}"
        )


def _resume(given: Mapping[str, Any], path: Path | None) -> Settings:
    allowed = named(beside_resume=True)
    others = set(given) - {"resume", *allowed}
    if others or path is not None:
        raise UserError(
            "--resume takes all options from the run; you may only add "
            f"{', '.join(map(flag_of, allowed))}"
        )
    folder = str(given["resume"])
    if not folder:
        raise UserError("--resume: must be a path, got nothing")
    check_text(folder, "--resume")
    # --resume names the folder, so --requeue has nothing to look up.
    beside = {name: given[name] for name in allowed if name in given}
    beside.pop("requeue", None)
    return resumed(Path(folder), beside)
