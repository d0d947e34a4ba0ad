"""Settings of a run from its command line: a TOML file, flags, or a run to resume."""

import argparse
from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from hpcfed import methods
from hpcfed.cli.flags import all_method_fields, run_parser, unknown_flag
from hpcfed.cli.resume import resumed
from hpcfed.errors import UserError
from hpcfed.options import (
    RunConfig,
    Settings,
    check_text,
    flag_of,
    named,
    read_toml,
    resolve,
)
from hpcfed.runtime.launcher import launched


def parse_run(arguments: list[str]) -> Settings:
    """Read the settings of a run from a TOML file and flags; flags win."""
    path, method = _peek(arguments)
    if path is not None:
        check_text(str(path), "CONFIG.toml")  # it goes into the record
    from_file = {} if path is None else read_toml(path)
    method = _method(method, from_file)
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
    """Make the settings of a run from keywords and a TOML file; keywords win.

    None means that an option is not given.
    """
    given = {}
    for name, value in options.items():
        if value is not None:
            given[name] = _plain(value)
    if "resume" in given:
        return _resume(given, path)
    from_file = {} if path is None else read_toml(path)
    method_options = methods.load(_method(given.get("method"), from_file)).Options
    sources = {name: f"{path}: {name}" for name in from_file}
    for name, value in given.items():
        sources[name] = f"{name}={value!r}"
    values = {**from_file, **given}
    return resolve(values, sources, method_options, ranks=launched().size)


def _plain(value: Any) -> Any:
    """Convert a value to what a TOML file would hold: programs pass paths, ranges and
    numpy numbers.
    """
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, range | tuple | set | frozenset):
        return [_plain(entry) for entry in value]
    # Do not test for numpy's type: most command lines do not import numpy.
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    return value


def _method(named: str | None, from_file: Mapping[str, Any]) -> str:
    """Return the method of a run: the given one, else the file's, else the default."""
    usual = RunConfig.model_fields["method"].default
    return str(named or from_file.get("method", usual))


def _peek(arguments: list[str]) -> tuple[Path | None, str | None]:
    """Find the TOML file and the method, which decide what other options there are.

    So this first pass allows the flags of any method, and leaves --help to the second.
    """
    words = [word for word in arguments if word not in ("-h", "--help")]
    named = _named_methods(words)
    fields: dict[str, FieldInfo] = {}
    for name in named or [_method(None, {})]:
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
        raise UserError(unknown_flag(strange[0], flags))
    path = None if known.config is None else Path(known.config)
    return path, getattr(known, "method", None)


def _parsed(
    words: list[str], method_fields: Mapping[str, FieldInfo]
) -> tuple[argparse.Namespace, list[str], dict[str, str]]:
    """Parse words with these options of methods. Return what was parsed, unknown words,
    and the flags by option.
    """
    flags, parser = run_parser(method_fields, "", add_help=False)
    known, strange = parser.parse_known_args(words)
    return known, strange, flags


def _named_methods(words: list[str]) -> list[str]:
    """Find candidates for the method among the words of a command line. The flags are
    not yet known, because a user's method file adds its own.
    """
    found = []
    for word, following in pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        if name == "--method":
            found.append(value if equals else following)
        elif word.endswith(".toml") and Path(word).is_file():
            # The second pass reports mistakes in the file.
            with suppress(UserError):
                found.append(_method(None, read_toml(Path(word))))
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
            "--resume takes everything from the run that it goes on with; give it no "
            f"other option than {', '.join(map(flag_of, allowed))}"
        )
    folder = str(given["resume"])
    if not folder:
        raise UserError("--resume: must be a path, got nothing")
    check_text(folder, "--resume")
    # --resume names the folder, so --requeue has nothing to look up.
    beside = {name: given[name] for name in allowed if name in given}
    beside.pop("requeue", None)
    return resumed(Path(folder), beside)
