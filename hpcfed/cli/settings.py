"""Settings of a run from its command line: a TOML file, flags, or a run to resume."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcfed import methods
from hpcfed.cli.flags import all_method_fields, owners, run_parser, unknown_flag
from hpcfed.cli.resume import BESIDE_RESUME, resumed
from hpcfed.config import RunConfig, Settings, check_text, read_toml, resolve
from hpcfed.errors import UserError
from hpcfed.runtime.launcher import launched


def parse_run(arguments: list[str]) -> Settings:
    """Read the settings of a run from a TOML file and flags; flags win."""
    path, method = _peek(arguments)
    if path is not None:
        check_text(str(path), "CONFIG.toml")  # the record keeps the command line
    from_file = {} if path is None else read_toml(path)
    usual = RunConfig.model_fields["method"].default
    method = str(method or from_file.get("method", usual))
    method_options = methods.load(method).Options
    flags, parser = run_parser(method_options.model_fields, method)
    # Words that argparse does not know get a message with a guess.
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


def _peek(arguments: list[str]) -> tuple[Path | None, str | None]:
    """Find the TOML file and the method: they decide which other options there are.

    So the flags of all methods are allowed here, and help waits for the second look.
    """
    flags, parser = run_parser(all_method_fields(), "", add_help=False)
    words = [word for word in arguments if word not in ("-h", "--help")]
    known, strange = parser.parse_known_args(words)
    if strange:
        raise UserError(unknown_flag(strange[0], flags))
    path = None if known.config is None else Path(known.config)
    return path, getattr(known, "method", None)


def _check_owner(
    name: str, method: str, flags: Mapping[str, str], path: Path | None
) -> None:
    """Refuse an option in the file that belongs to another method."""
    having = [] if name in flags else owners(name)
    if having:
        raise UserError(
            f"{path}: {name} is an option of method {', '.join(having)}, and the "
            f"method is {method}"
        )


def _resume(given: Mapping[str, Any], path: Path | None) -> Settings:
    others = set(given) - {"resume", "requeue", *BESIDE_RESUME}
    if others or path is not None:
        raise UserError(
            "--resume takes everything from the run that it goes on with; give it no "
            "other option than --device, --backend, --overwrite and --requeue"
        )
    if not given["resume"]:
        raise UserError("--resume: must be a path, got nothing")
    check_text(given["resume"], "--resume")
    beside = {name: given[name] for name in BESIDE_RESUME if name in given}
    return resumed(Path(given["resume"]), beside)
