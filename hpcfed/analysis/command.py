"""`hpcfed report` after its command line was parsed: writes one self-contained page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcfed.analysis.collect import Found, find, joined
from hpcfed.analysis.comparison.comparison import Comparison, compare
from hpcfed.analysis.comparison.conditions import Decision, judge_all, read_conditions
from hpcfed.analysis.comparison.shown import print_comparison
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
    telemetry_csv_text,
)
from hpcfed.analysis.render.page import Content, page
from hpcfed.analysis.render.run_page import is_one_run, run_content
from hpcfed.analysis.render.sections import sections
from hpcfed.analysis.render.sections.origin import noise_warnings
from hpcfed.errors import UserError, count, printable, remark, say
from hpcfed.results.folder import check_export
from hpcfed.results.publish import export

UNDECIDED = 3
"""The exit code if a condition is undecided because a side has one run, and none holds.
"""


@dataclass(frozen=True)
class ReportRequest:
    """The arguments of `hpcfed report`; None for files that were not requested."""

    paths: Sequence[Path]
    out: Path
    unfinished: bool
    fail_if: Sequence[str]
    one_run_decides: bool
    figures: Path | None
    """The folder for charts."""
    format: str | None
    width: float | None
    csv: Path | None
    json: Path | None
    extrap: Path | None


def report(asked: ReportRequest) -> int:
    """Write the page and exports, and print a comparison; return the exit code.

    All files are written first: the reader of the output may leave, as in `| head`.
    """
    # First, because reading a thousand runs takes a minute.
    _check_targets(asked)
    check_chart_files(asked.figures, asked.format, asked.width)
    conditions = read_conditions(asked.fail_if, asked.paths)
    if asked.one_run_decides and not conditions:
        raise UserError("--one-run-decides: there is no --fail-if to decide")
    sides, comparison = _read(asked)
    found = joined(sides, apart=comparison is not None)
    for line in found.unread:
        remark(f"hpcfed: left out: {printable(line)}")
    for line in found.copies:
        remark(f"hpcfed: {printable(line)}")
    if not found.processes:
        if asked.unfinished:
            raise UserError("there is no finished round among them")
        raise UserError(f"there is no complete run among them{_take_unfinished(found)}")
    if conditions and comparison is None:
        raise UserError(f"--fail-if {conditions[0].text}: {_not_compared(sides)}")
    judged = judge_all(conditions, comparison, one_run_decides=asked.one_run_decides)
    every = groups(found.processes)
    if comparison is None and len(asked.paths) == 2 and not found.unread:
        # A page about unrelated runs is still a report.
        remark(f"hpcfed: not compared: {_not_compared(sides)}")
    content = content_of(every, found, comparison)
    lines = _write(_texts(asked, every, found, content, comparison))
    if asked.figures is not None:
        lines.append(_write_charts(asked.figures, asked, content))
    if comparison is not None:
        print_comparison(comparison, Output())
    for line in [*lines, *(one.line for one in judged)]:
        say(line)
    # Decisions are ordered: holds, then undecided, then does not hold, from worst to
    # best.
    worst = max((one.decision for one in judged), default=Decision.DOES_NOT_HOLD)
    if found.unread or worst is Decision.HOLDS:
        return 1
    return UNDECIDED if worst is Decision.UNDECIDED else 0


def _read(asked: ReportRequest) -> tuple[list[Found], Comparison | None]:
    """Read all runs; with two paths, compare them as A and B."""
    paths, unfinished = asked.paths, asked.unfinished
    if len(paths) != 2:
        return [find(paths, unfinished=unfinished)], None
    sides = [find([path], unfinished=unfinished) for path in paths]
    before, after = (groups(side.processes) for side in sides)
    # Each side is grouped by itself: its keys must not depend on the other side.
    comparison = compare((str(paths[0]), str(paths[1])), before, after)
    return sides, comparison


def _not_compared(sides: Sequence[Found]) -> str:
    """Return why A and B have no point in common."""
    for name, side in zip("AB", sides, strict=True):
        if not side.processes:
            return f"{name} has no complete run{_take_unfinished(side)}"
    return "no runs of both paths have the same options"


def _take_unfinished(found: Found) -> str:
    """Return how to take runs that are not complete, if there are any with rounds."""
    if not found.usable:
        return ""
    return "; --unfinished takes runs with the rounds that they have"


def _write(texts: Mapping[Path, str]) -> list[str]:
    """Write the files; return a line about each."""
    lines = []
    for path, text in texts.items():
        # Names of folders may not be valid text.
        written = text.encode(errors="replace")
        export(written, path)
        size = len(written) / 1024
        lines.append(f"{printable(str(path))}: {size:,.0f} KiB")
    return lines


def _write_charts(folder: Path, asked: ReportRequest, content: Content) -> str:
    """Write the charts; return a line about them."""
    written = 0
    for path, image in chart_files(content.sections, folder, asked.format, asked.width):
        export(image, path)
        written += 1
    return f"{printable(str(folder))}: {count(written, 'file')}"


def _texts(
    asked: ReportRequest,
    every: list[Group],
    found: Found,
    content: Content,
    comparison: Comparison | None,
) -> dict[Path, str]:
    """Return the texts to write, by file."""
    texts = {asked.out: page(content)}
    if asked.csv is not None:
        texts[asked.csv] = csv_text(every)
        texts[_beside(asked.csv, "ranks")] = ranks_csv_text(every)
        texts[_beside(asked.csv, "points")] = points_csv_text(every)
        texts[_beside(asked.csv, "telemetry")] = telemetry_csv_text(every)
    if asked.json is not None:
        told = json_text(every, comparison, content.sections, found.studies)
        texts[asked.json] = told
    if asked.extrap is not None:
        texts[asked.extrap] = extrap_text(every)
    return texts


def _check_targets(asked: ReportRequest) -> None:
    """Refuse files that the page and the exports must not replace."""
    wanted = {
        "--out": asked.out,
        "--csv": asked.csv,
        "--json": asked.json,
        "--extrap": asked.extrap,
    }
    if asked.csv is not None:
        for what in ("ranks", "points", "telemetry"):
            wanted[f"--csv: its {what} in"] = _beside(asked.csv, what)
    seen = set()
    for option, path in wanted.items():
        if path is None:
            continue
        check_export(option, path)
        # Compare files, not names: a/../b and b are the same.
        if path.resolve() in seen:
            raise UserError(f"{path} is named twice; name a file for each")
        seen.add(path.resolve())


def _beside(path: Path, what: str) -> Path:
    """Return `rounds-ranks.csv`, beside `rounds.csv`."""
    return path.parent / f"{path.stem}-{what}{path.suffix}"


def content_of(
    every: list[Group], found: Found, comparison: Comparison | None = None
) -> Content:
    """Return the content of the page about these groups."""
    if comparison is None and is_one_run(every, found):
        return run_content(every[0], found)
    runs = sum(len(group.processes) for group in every)
    lead = f"{count(runs, 'run')} of {count(len(every), 'point')}{_shared(every)}."
    made = sections(every, found, comparison)
    title = _title(found) if comparison is None else _sides(comparison)
    warnings = [*_warnings(found), *noise_warnings(every)]
    return Content(title, [lead], warnings, made)


def _sides(comparison: Comparison) -> str:
    """Return the title of a comparison: the folders' names, or paths if equal."""
    before, after = (Path(name).name for name in comparison.names)
    if before == after:
        before, after = comparison.names
    return f"{after} compared with {before}"


def _shared(every: list[Group]) -> str:
    """Return `: digits, 20 clients`: the data set and clients, if all share them."""
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
    warnings = [*(f"left out: {line}" for line in found.unread), *found.copies]
    if found.unfinished:
        unfinished = count(len(found.unfinished), "run")
        warnings.append(f"{unfinished} not finished; see the overview")
    return warnings
