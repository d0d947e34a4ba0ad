"""`hpcfed benchmark`: fixed work, one figure of merit, and a proof that it was done."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcfed import methods
from hpcfed.cli.parser import CommandParser, path_of
from hpcfed.cli.settings import run_parser, unknown_flag
from hpcfed.errors import UserError
from hpcfed.options import flag_of, method_of

SUMMARY = "fixed work with rules: one figure of merit, verified"
EXAMPLES = """\
  hpcfed benchmark fedavg                                     five runs, on 2 cores about a minute
  mpirun -n 4 python -m hpcfed benchmark ranks --size medium --out runs/four
  hpcfed benchmark --list                                     all benchmarks and their sizes
  hpcfed benchmark --compare h200/*.json x86/*.json --html machines.html
  hpcfed benchmark fedavg --by-turns ../before                is this checkout slower than that one?
  hpcfed benchmark fedavg --size large --reference            what other machines must learn"""

FLAGS = """\
--size NAME
  small (default), medium or large
--runs N
  counted runs, each with its own seed (default: 5); from 5 on the fastest and the slowest
  fifth are dropped
--out DIR
  folder of all runs and of result.json (default: runs/benchmark-NAME-SIZE, and
  runs/reference-NAME-SIZE with --reference)
--mllog
  also write OUT/mllog.txt, in the format of MLPerf's logs
--against FILE
  verify against this reference, which breaks the rules
--by-turns OTHER
  compare with another program, whose runs take turns with ours: a checkout's folder, or
  the python of another environment; --runs are then pairs (default: 20), exit code 1 says
  that this one is slower
--reference
  make the reference of this benchmark and size: OUT/reference.json
--seeds N
  with --reference: its seeds (default: 20)
--list
  list all benchmarks
--compare
  compare result files, of each benchmark the others with the first
--html FILE
  with --compare: also write a page of all benchmarks and machines, for publication
--schema
  print the JSON schema of a result file
"""
USUAL_RUNS, USUAL_PAIRS, USUAL_SEEDS = 5, 20, 20
RESULTS = "result.json", "reference.json", "turns.json"
"""What calls write into their folders."""
LEAST, MOST = 2, 1000
"""An interval needs two runs."""


TAKEN = {
    "list": (),
    "schema": (),
    "compare": ("html",),
    "reference": ("size", "out", "seeds"),
    "by_turns": ("size", "out", "runs"),
}
"""Flags that a call takes beside the one that says what it does."""
FLAGS_ALONE = ("--list", "--schema", "--compare")
"""Flags of calls that run no benchmark."""
TAKEN_BY_RUNS = ("size", "out", "runs", "mllog", "against")


def command(arguments: list[str]) -> None:
    options, words = _parser().parse_known_args(arguments)
    _check_flags(options)
    if options.list or options.schema:
        if options.names or words:
            asked = "--list" if options.list else "--schema"
            more = " ".join([*options.names, *words])
            raise UserError(f"{asked} takes nothing else, got {more}")
        _print_known(schema=options.schema)
    elif options.compare:
        _compare([*options.names, *words], options.html)
    else:
        _benchmark(options, words)


def _check_flags(options: argparse.Namespace) -> None:
    """Refuse flags that would be ignored."""
    flags = {name: value for name, value in vars(options).items() if name != "names"}
    # Not by equality: 0 equals False.
    given = [
        name
        for name, value in flags.items()
        if value is not None and value is not False
    ]
    asked = next((name for name in TAKEN if name in given), None)
    taken = TAKEN_BY_RUNS if asked is None else (asked, *TAKEN[asked])
    for name in given:
        if name in taken:
            continue
        if asked is not None:
            raise UserError(f"{flag_of(asked)} does not take {flag_of(name)}")
        needed = next(other for other in TAKEN if name in TAKEN[other])
        raise UserError(f"{flag_of(name)} needs {flag_of(needed)}")


def _parser() -> CommandParser:
    parser = CommandParser(
        "benchmark",
        EXAMPLES,
        usage="hpcfed benchmark NAME [--size SIZE] [--runs N] [options of hpcfed run]",
        description="A benchmark is fixed settings of hpcfed run, and rules. It ends with "
        "PASSED or FAILED (exit code 1), one figure of merit, and a result file. Options "
        "of hpcfed run that are about the machine may be changed, such as --precision, "
        "--engine, --server-engine; any other breaks the rules, and the result says so.",
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="a benchmark that --list names, or a FILE.toml of your own; result files "
        "with --compare",
    )
    parser.add_flags(FLAGS, OTHER=path_of)
    return parser


def _print_known(*, schema: bool) -> None:
    from hpcfed.benchmark.definition import names, read_definition

    if schema:
        from hpcfed.benchmark.result import BenchmarkResult

        print(json.dumps(BenchmarkResult.model_json_schema(), indent=1))
        return
    for name in names():
        _, definition = read_definition(name)
        print(f"{name:9} {definition.title} ({', '.join(definition.sizes)})")


def _compare(names: Sequence[str], html: Path | None) -> None:
    from hpcfed.analysis.render.console import Output, print_tables
    from hpcfed.analysis.render.console import say as print_lines
    from hpcfed.benchmark.comparison import NOTE, read_results, table
    from hpcfed.benchmark.machines_page import machines_page
    from hpcfed.results.folder import check_export
    from hpcfed.results.publish import export

    for word in names:
        if word.startswith("-"):
            raise UserError(f"{word}: --compare takes result files and --html")
    if html is not None:
        check_export("--html", html)
    groups = read_results([Path(name) for name in names])
    if html is not None:
        export(machines_page(groups).encode(), html)
    output = Output()
    print_tables(output, [table(group) for group in groups])
    print_lines(output, NOTE)
    if html is not None:
        print(f"wrote {html}")


def _benchmark(options: argparse.Namespace, words: list[str]) -> None:
    from hpcfed.benchmark.definition import names, read_benchmark, read_definition
    from hpcfed.results.folder import RUNS
    from hpcfed.results.publish import check_folder

    if len(options.names) != 1:
        known = ", ".join(names())
        found = " ".join(options.names) or "none"
        raise UserError(f"benchmark needs one NAME of {known}; got {found}")
    size = "small" if options.size is None else options.size
    name = options.names[0]
    _, definition = read_definition(name)
    given = _given(words, method_of(definition.common))
    benchmark = read_benchmark(name, size, given)
    # A reference is a run of its own, with a folder of its own.
    kind = "reference" if options.reference else "benchmark"
    out = options.out or RUNS / f"{kind}-{benchmark.name}-{size}"
    check_folder("--out", out)
    _check_results(out, overwrite=bool(given.get("overwrite")))
    # Late: this loads what reads and judges runs.
    from hpcfed.benchmark.execute import (
        compare_programs,
        run_benchmark,
        write_reference,
    )

    if options.reference:
        write_reference(benchmark, _number("--seeds", options.seeds, USUAL_SEEDS), out)
        return
    if options.by_turns is not None:
        pairs = _number("--runs", options.runs, USUAL_PAIRS)
        if not compare_programs(benchmark, options.by_turns, pairs, out):
            sys.exit(1)
        return
    passed = run_benchmark(
        benchmark,
        _number("--runs", options.runs, USUAL_RUNS),
        out,
        against=options.against,
        own=name.endswith(".toml") or options.against is not None,
        write_mllog=options.mllog,
    )
    if not passed:
        sys.exit(1)


def _check_results(out: Path, *, overwrite: bool) -> None:
    """Refuse to replace what an earlier call has found: its runs may be gone."""
    from hpcfed.results.folder import check_export

    for name in RESULTS:
        path = out / name
        kept = path.is_file() and not path.is_symlink()
        if kept and not overwrite:
            raise UserError(
                f"--out {out} already holds {name}; add --overwrite to replace it, or "
                "name another folder"
            )
        if not kept:
            check_export("--out", path)


def _given(words: list[str], method: str) -> dict[str, Any]:
    """Return the options of `hpcfed run` that were added."""
    flags, parser = run_parser(methods.load(method).Options.model_fields, method)
    known, strange = parser.parse_known_args(words)
    given = vars(known)
    if strange or given.pop("config") is not None:
        raise UserError(unknown_flag((strange or words)[0], flags))
    return given


def _number(flag: str, given: int | None, usual: int) -> int:
    number = usual if given is None else given
    if not LEAST <= number <= MOST:
        raise UserError(f"{flag} {number}: must be from {LEAST} to {MOST}")
    return number
