"""`hpcfed report` after its command line has been understood: one page that needs
nothing beside it.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from hpcfed.analysis.collect import Found, find, joined
from hpcfed.analysis.comparison import (
    Comparison,
    Decision,
    compare,
    judge_all,
    print_comparison,
    read_conditions,
)
from hpcfed.analysis.groups import Group, groups
from hpcfed.analysis.labels import condition_text
from hpcfed.analysis.render.chart_files import chart_files, check_chart_files
from hpcfed.analysis.render.console import Output
from hpcfed.analysis.render.exports import (
    csv_text,
    extrap_text,
    json_text,
    points_csv_text,
    ranks_csv_text,
)
from hpcfed.analysis.render.page import Content, page
from hpcfed.analysis.render.run_page import is_one_run, run_content
from hpcfed.analysis.render.sections import sections
from hpcfed.analysis.render.sections.origin import noise_warnings
from hpcfed.errors import UserError, count, printable, remark, say
from hpcfed.results.folder import check_export
from hpcfed.results.publish import publish

UNDECIDED = 3
"""The exit code where one run of a side would fail a condition, and nothing else does."""


def report(options: argparse.Namespace) -> int:
    """Write the page and the exports that were asked for, and print the comparison of
    two paths; return the exit code.
    """
    # First, because reading a thousand runs takes a minute.
    _check_targets(options)
    check_chart_files(options.figures, options.format, options.width)
    conditions = read_conditions(options.fail_if, options.paths)
    if options.one_run_decides and not conditions:
        raise UserError("--one-run-decides: there is no --fail-if to decide")
    sides, comparison = _read(options)
    found = joined(sides, apart=comparison is not None)
    for line in found.unread:
        remark(f"hpcfed: left out: {printable(line)}")
    if not found.processes:
        raise UserError(_nothing(options.unfinished))
    if conditions and comparison is None:
        raise UserError(f"--fail-if {conditions[0].text}: {_not_compared(sides)}")
    judged = judge_all(conditions, comparison, one_run_decides=options.one_run_decides)
    every = groups(found.processes)
    if comparison is not None:
        print_comparison(comparison, Output())
    elif len(options.paths) == 2 and not found.unread:
        # One page of different things is a report all the same.
        remark(f"hpcfed: not compared: {_not_compared(sides)}")
    content = content_of(every, found, comparison)
    for path, text in _texts(options, every, content, comparison).items():
        # Names of folders may be no text at all.
        written = text.encode(errors="replace")
        _write(path, written)
        size = len(written) / 1024
        say(f"{printable(str(path))}: {size:,.0f} KiB")
    if options.figures is not None:
        _write_figures(options, content)
    for one in judged:
        say(one.line)
    worst = max((one.decision for one in judged), default=Decision.DOES_NOT_HOLD)
    if found.unread or worst is Decision.HOLDS:
        return 1
    return UNDECIDED if worst is Decision.UNDECIDED else 0


def _read(options: argparse.Namespace) -> tuple[list[Found], Comparison | None]:
    """Read all runs, those of two paths as A and B, which are compared."""
    paths, unfinished = options.paths, options.unfinished
    if len(paths) != 2:
        return [find(paths, unfinished=unfinished)], None
    sides = [find([path], unfinished=unfinished) for path in paths]
    before, after = (groups(side.processes) for side in sides)
    comparison = compare((str(paths[0]), str(paths[1])), before, after)
    return sides, comparison


def _not_compared(sides: Sequence[Found]) -> str:
    """Return why A and B have no point in common."""
    for name, side in zip("AB", sides, strict=True):
        if not side.processes:
            return (
                f"{name} has no complete run; "
                "--unfinished takes runs with the rounds that they have"
            )
    return "no runs of both paths have the same options"


def _nothing(unfinished: bool) -> str:
    if unfinished:
        return "there is no finished round among them"
    return (
        "there is no complete run among them; "
        "--unfinished takes runs with the rounds that they have"
    )


def _write_figures(options: argparse.Namespace, content: Content) -> None:
    written = 0
    for path, figure in chart_files(
        content.sections, options.figures, options.format, options.width
    ):
        _write(path, figure)
        written += 1
    say(f"{printable(str(options.figures))}: {count(written, 'file')}")


def _texts(
    options: argparse.Namespace,
    every: list[Group],
    content: Content,
    comparison: Comparison | None,
) -> dict[Path, str]:
    """Return what is to be written, by file."""
    texts = {options.out: page(content)}
    if options.csv is not None:
        texts[options.csv] = csv_text(every)
        texts[_beside(options.csv, "ranks")] = ranks_csv_text(every)
        texts[_beside(options.csv, "points")] = points_csv_text(every)
    if options.json is not None:
        texts[options.json] = json_text(every, comparison)
    if options.extrap is not None:
        texts[options.extrap] = extrap_text(every)
    return texts


def _check_targets(options: argparse.Namespace) -> None:
    """Refuse, before any run is read, what the page and the exports must not replace."""
    wanted = {
        "--out": options.out,
        "--csv": options.csv,
        "--json": options.json,
        "--extrap": options.extrap,
    }
    if options.csv is not None:
        for what in ("ranks", "points"):
            wanted[f"--csv: its {what} in"] = _beside(options.csv, what)
    seen = set()
    for option, path in wanted.items():
        if path is None:
            continue
        check_export(option, path)
        # By the file, not by the name: a/../b and b are the same.
        if path.resolve() in seen:
            raise UserError(f"{path} is named twice; name a file for each")
        seen.add(path.resolve())


def _beside(path: Path, what: str) -> Path:
    """Return `rounds-ranks.csv`, beside `rounds.csv`."""
    return path.parent / f"{path.stem}-{what}{path.suffix}"


def content_of(
    every: list[Group], found: Found, comparison: Comparison | None = None
) -> Content:
    """Return what the page about these groups holds."""
    if comparison is None and is_one_run(every, found):
        return run_content(every[0], found)
    runs = sum(len(group.processes) for group in every)
    lead = f"{count(runs, 'run')} of {count(len(every), 'point')}{_shared(every)}."
    made = sections(every, found, comparison)
    title = _title(found) if comparison is None else _sides(comparison)
    warnings = [*_warnings(found), *noise_warnings(every)]
    return Content(title, [lead], warnings, made)


def _sides(comparison: Comparison) -> str:
    """Return the title of a comparison: folders' names, or paths where these are equal."""
    before, after = (Path(name).name for name in comparison.names)
    if before == after:
        before, after = comparison.names
    return f"{after} compared with {before}"


def _shared(every: list[Group]) -> str:
    """Return `: digits, 20 clients`: what all points have in common, of the options that
    people ask for first.
    """
    shared = []
    for name in ("dataset", "clients"):
        if len({group.options[name] for group in every}) == 1:
            shared.append(name)
    if not shared:
        return ""
    return f": {condition_text(every[0].options.only(shared))}"


def _title(found: Found) -> str:
    if not found.studies:
        return "Runs"
    titles = []
    for study in found.studies:
        folder = study.path.parent.name
        titles.append(study.title or folder)
    if found.single_runs:
        titles.append("other runs")
    return "; ".join(titles)


def _warnings(found: Found) -> list[str]:
    warnings = [f"left out: {line}" for line in found.unread]
    if found.unfinished:
        unfinished = count(len(found.unfinished), "run")
        warnings.append(f"{unfinished} not finished; see the overview")
    return warnings


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        publish(content, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
