"""The project's README pages, taken apart: blocks, commands with what they print, and
links.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("benchmarks", "hpcfed", "launch", "slurm", "tests")
PAGES = [
    ROOT / "README.md",
    *sorted(page for name in FOLDERS for page in (ROOT / name).rglob("README.md")),
]
"""The page to start from comes first: others go on with its files."""
ELISION = "…"
MARKS = ("# needs ", "# takes minutes")
"""How the first line of a block begins whose commands no test can run."""
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_STARTERS = (
    "hpcfed ", "python -m hpcfed", "python -m benchmarks.", "mpirun ", "srun ", "sbatch ",
)  # fmt: skip
"""How a span of code begins that is a command."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    language: str
    text: str

    @property
    def first_line(self) -> str:
        return self.text.partition("\n")[0]

    @property
    def is_marked(self) -> bool:
        """Whether a reader is told that the commands need more than this machine has."""
        return self.first_line.startswith(MARKS)

    @property
    def file_name(self) -> str | None:
        """The name of the file that the block is, if its first line says so."""
        found = re.fullmatch(r"# ([\w.]+\.(?:py|toml))", self.first_line)
        return found[1] if found else None


@dataclass(frozen=True)
class Command:
    """A command line, and the lines that the page shows of its output."""

    page: Path
    words: list[str]
    is_marked: bool = False
    shown: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {shlex.join(self.words)}"


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page."""
    found = _FENCE.findall(page.read_text())
    return [Block(page, language, text) for language, text in found]


def commands(block: Block) -> Iterator[Command]:
    """Yield the commands of a block of `bash`, or of a `console` with their output."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        yield from _session(block, lines)
        return
    for line in lines:
        words = shlex.split(line, comments=True)
        if words:
            yield Command(block.page, words, block.is_marked)


def _session(block: Block, lines: list[str]) -> Iterator[Command]:
    command: Command | None = None
    for line in lines:
        if line.startswith("$ "):
            if command is not None:
                yield command
            words = shlex.split(line.removeprefix("$ "), comments=True)
            command = Command(block.page, words, block.is_marked)
        elif line.strip() and line != ELISION and command is not None:
            command.shown.append(line)
    if command is not None:
        yield command


def prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return _FENCE.sub("", page.read_text())


def spans(page: Path) -> list[str]:
    """Return the spans of code in a page's prose, each on one line."""
    # In tables a bar within a span is escaped.
    found = _SPAN.findall(prose(page).replace("\\|", "|"))
    return [" ".join(span.split()) for span in found]


def spoken_commands(page: Path) -> Iterator[Command]:
    """Yield commands that stand in a page's prose."""
    for span in spans(page):
        # Variables may stand before the program.
        line = re.sub(r"^([A-Z_]+=\S* )+", "", span)
        if line.startswith(_STARTERS):
            yield Command(page, shlex.split(line.replace(ELISION, "")))


def links(page: Path) -> list[str]:
    """Return where the links and pictures of a page lead."""
    return _LINK.findall(prose(page))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = _HEADING.findall(prose(page))
    kept = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in kept}


def table_rows(text: str) -> Iterator[list[str]]:
    """Yield the cells of every row of a page's tables."""
    for line in text.splitlines():
        if line.startswith("|"):
            cells = re.split(r"(?<!\\)\|", line.strip("|"))
            yield [cell.strip() for cell in cells]


def same_but_for_numbers(text: str) -> str:
    """Return a line without what differs from machine to machine, and from a long run
    to a short one.
    """
    without = re.sub(r"-?\d[\d.,]*", "#", text)
    without = re.sub("▇+", "▇", re.sub("[KMG]iB", "bytes", without))
    return " ".join(without.split())
