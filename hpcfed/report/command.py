"""`hpcfed report` after its command line has been understood: one page that needs
nothing beside it.
"""

import argparse
import time
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from hpcfed import __version__
from hpcfed.errors import UserError, count, printable, remark, say
from hpcfed.record.publish import check_target, publish
from hpcfed.report.charts import COLOURS
from hpcfed.report.collect import Found, Group, find, groups
from hpcfed.report.exports import csv_text, extrap_text, json_text, ranks_csv_text
from hpcfed.report.sections import sections


def report(options: argparse.Namespace) -> int:
    """Writes the page and what else was asked for; the number of files that could not
    be read.
    """
    _check_targets(options)
    found = find(options.paths, unfinished=options.unfinished)
    for line in found.unread:
        remark(f"hpcfed: left out: {printable(line)}")
    if not found.samples:
        more = (
            ""
            if options.unfinished
            else "; --unfinished takes runs with the rounds that they have"
        )
        raise UserError(
            f"there is no {'finished round' if options.unfinished else 'complete run'} "
            f"among them{more}"
        )
    every = groups(found.samples)
    texts = {options.out: page(every, found)}
    if options.csv is not None:
        texts |= {
            options.csv: csv_text(every),
            _of_ranks(options.csv): ranks_csv_text(every),
        }
    for path, make in ((options.json, json_text), (options.extrap, extrap_text)):
        if path is not None:
            texts[path] = make(every)
    for path, text in texts.items():
        content = text.encode(
            errors="replace"
        )  # names of folders may be no text at all
        _write(path, content)
        say(f"{printable(str(path))}: {len(content) / 1024:,.0f} KiB")
    return len(found.unread)


def _check_targets(options: argparse.Namespace) -> None:
    """Refuses, before any run is read, what the page and the exports must not replace."""
    wanted = {
        f"--{name}": getattr(options, name) for name in ("out", "csv", "json", "extrap")
    }
    if options.csv is not None:
        wanted["--csv: its"] = _of_ranks(options.csv)
    seen = set()
    for option, path in wanted.items():
        if path is None:
            continue
        check_target(option, path)
        if path.resolve() in seen:
            raise UserError(f"{path} is named twice; name a file for each")
        seen.add(path.resolve())
        if path.suffix == ".h5":
            raise UserError(
                f"{path} is a name for results, which would be lost; name another file"
            )


def _of_ranks(path: Path) -> Path:
    """`rounds-ranks.csv`, beside `rounds.csv`."""
    return path.parent / f"{path.stem}-ranks{path.suffix}"


def page(every: list[Group], found: Found) -> str:
    titles = [study.title or study.path.parent.name for study in found.studies]
    runs = sum(len(group.samples) for group in every)
    environment = Environment(
        loader=PackageLoader("hpcfed.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    return environment.get_template("page.html").render(
        title="; ".join([*titles, *["other runs"] * bool(found.alone)])
        if titles
        else "Runs",
        lead=f"{count(runs, 'run')} of {count(len(every), 'choice')} of options.",
        warnings=[f"left out: {line}" for line in found.unread]
        + [f"{count(len(found.unfinished), 'run')} not finished; see the overview"]
        * bool(found.unfinished),
        sections=sections(every, found),
        colours=COLOURS,
        footer=f"hpcfed {__version__}, {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}",
    )


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        publish(content, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
