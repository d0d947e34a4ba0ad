"""Lines and tables on a terminal."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpcfed.analysis import findings
from hpcfed.errors import drop_stdout, printable
from hpcfed.runtime.launcher import launched

WIDEST = 200
"""Most columns of a table, whatever the terminal's width."""
MOST_LETTERS = 4000
"""Most letters of a table's line; longer ones are cut."""


class Piped(Console):
    """A console whose reader may leave, as in `| head`: that is not an error."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # the caller decides; rich would exit with 1


class Output(Piped):
    """A console that prints tables at full width, because a narrow terminal would cut
    digits off numbers. A reader that leaves changes neither files nor the exit code.
    """

    def __init__(self) -> None:
        # Open MPI gives each rank a pseudo-terminal, even if the user's output goes to a
        # file.
        super().__init__(force_terminal=None if launched().alone else False)
        # Lines wrap at the terminal's edge, so no digit is lost.
        self.width = max(self.width, WIDEST)

    def on_broken_pipe(self) -> None:
        drop_stdout()


def say(console: Console, *lines: str) -> None:
    """Print lines unchanged, without rich's styles or line breaks."""
    for line in lines:
        console.print(printable(line), highlight=False, markup=False, soft_wrap=True)


def plain_text(name: str) -> Text:
    """Return a name from a file as text, because rich interprets brackets as styles."""
    return Text(printable(name))


def bare_table(*columns: str | Text, words: bool = False) -> Table:
    """Return a table without lines: the first column left-aligned, numbers
    right-aligned.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), show_edge=False)
    for number, column in enumerate(columns):
        table.add_column(
            column, justify="right" if number and not words else "left", no_wrap=True
        )
    return table


def print_tables(console: Console, tables: Iterable[findings.Table]) -> None:
    """Print tables of findings, each with its caption."""
    for number, table in enumerate(tables):
        if number:
            console.print()
        _print_whole(console, rendered(table))
        if table.caption:
            say(console, table.caption)


def _print_whole(console: Console, table: Table) -> None:
    """Print a table at its full width: a cell with a sentence must not cut the digits of
    others. The terminal wraps its lines.
    """
    usual = console.width
    unlimited = console.options.update(max_width=MOST_LETTERS)
    console.width = max(usual, console.measure(table, options=unlimited).maximum)
    console.print(table)
    console.width = usual


def rendered(found: findings.Table) -> Table:
    """Return findings as a terminal table."""
    table = bare_table(*map(plain_text, found.columns), words=found.words)
    for row in found.texts:
        table.add_row(*map(plain_text, row))
    return table
