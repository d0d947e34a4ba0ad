"""`hpcfed report --figures`: every chart of the page as a file for a paper."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from re import sub

from hpcfed.analysis.render.charts import Drawing
from hpcfed.analysis.render.charts.images import COLUMN, FORMATS, image
from hpcfed.analysis.render.sections.section import Section
from hpcfed.errors import UserError
from hpcfed.results.folder import check_export

LONGEST_NAME = 80
"""Characters, without the number and the suffix."""
WIDTHS = (1.0, 20.0)
"""Allowed widths of a figure, in inches."""


def check_chart_files(
    folder: Path | None, kinds: str | None, inches: float | None
) -> None:
    """Refuse, before any run is read, what cannot be written."""
    if folder is None:
        for option, value in (("--format", kinds), ("--width", inches)):
            if value is not None:
                raise UserError(
                    f"{option} is for figures; name a folder: --figures DIR"
                )
        return
    formats(kinds)
    if inches is not None and not WIDTHS[0] <= inches <= WIDTHS[1]:
        raise UserError(f"--width {inches:g}: from 1 to 20 inches")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--figures {folder} is a file; name a folder")
    # Whatever the files will be called.
    check_export("--figures", folder / "chart")


def formats(kinds: str | None) -> list[str]:
    """Return the formats in `pdf,png`; PDF if none is named."""
    chosen = [] if kinds is None else [kind.strip() for kind in kinds.split(",")]
    for kind in chosen:
        if kind not in FORMATS:
            raise UserError(f"--format {kind}: choose from {', '.join(FORMATS)}")
    return list(dict.fromkeys(chosen)) or ["pdf"]


def chart_files(
    sections: Sequence[Section], folder: Path, kinds: str | None, inches: float | None
) -> Iterator[tuple[Path, bytes]]:
    """Yield the path and content of every file."""
    for name, drawing in named(sections):
        for kind in formats(kinds):
            path = folder / f"{name}.{kind}"
            check_export("--figures", path)
            yield path, image(drawing, kind, inches=inches or COLUMN)


def named(sections: Sequence[Section]) -> Iterator[tuple[str, Drawing]]:
    """Yield each drawing with a name such as `accuracy-digits-20-clients`."""
    seen: dict[str, int] = {}
    for section in sections:
        for drawing in section.charts:
            name = _plain(drawing.title)
            if not name.startswith(section.id):
                name = f"{section.id}-{name}"
            name = name[:LONGEST_NAME].strip("-")
            seen[name] = seen.get(name, 0) + 1
            # Charts with many lines are split into several with the same title.
            number = f"-{seen[name]}" if seen[name] > 1 else ""
            yield name + number, drawing


def _plain(title: str) -> str:
    """Return a title in characters that any system and any \\includegraphics
    accepts.
    """
    return sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
