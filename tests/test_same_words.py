"""Terminal, page and JSON of a run say the same numbers in the same words."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hpcfed import cli
from hpcfed.analysis.findings import Cell, Table
from hpcfed.analysis.run_findings import read_files, run_findings
from hpcfed.results.stored import read_run, read_seeds
from tests.runs import one_reading

RUN = ["run", "--model", "mlp", "--clients", "4", "--rounds", "3", "--epochs", "1"]
# A run that happens to last a second would have telemetry; this one has it at once.
READ = "hpcfed.experiment.run.sampling"
# Clocks, late uploads and privacy give tables of their own.
RICH = [
    *RUN,
    *[
        "--devices",
        "lognormal",
        "--privacy",
        "central",
        "--clip-norm",
        "1",
        "--target-epsilon",
        "8",
        "--metrics",
        "f1",
    ],
]
NOT_OF_THE_RUN = {"environment", "reproduce"}
"""Sections of a page about machines and command lines; JSON has them in its config."""


class Tables(HTMLParser):
    """Collects the texts and raw numbers of the cells of a page, by section."""

    def __init__(self) -> None:
        super().__init__()
        self.section = ""
        self.found: dict[str, list[list[tuple[str, str]]]] = {}
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if tag == "section":
            self.section = named["id"] or ""
        elif tag == "tr":
            self.found.setdefault(self.section, []).append([])
        elif tag in ("td", "th", "caption"):
            if tag == "caption":
                self.found.setdefault(self.section, []).append([])
            self.found[self.section][-1].append(("", named.get("data-number") or ""))
            self._inside = True

    def handle_data(self, data: str) -> None:
        if self._inside:
            text, number = self.found[self.section][-1][-1]
            self.found[self.section][-1][-1] = (text + data, number)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th", "caption"):
            self._inside = False


def words_of(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


@pytest.mark.parametrize("seeds", [False, True])
def test_terminal_page_and_json_say_the_same(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    seeds: bool,
) -> None:
    monkeypatch.setattr(READ, one_reading)
    folder = tmp_path / "run"
    words = [*RUN, "--seeds", "1,2"] if seeds else RICH
    cli.main([*words, "--out", str(folder)])
    capsys.readouterr()
    cli.main(["show", str(folder)])
    terminal = [words_of(line) for line in capsys.readouterr().out.splitlines()]
    cli.main(["show", str(folder), "--json"])
    told = json.loads(capsys.readouterr().out)["tables"]
    cli.main(["report", str(folder), "--out", str(tmp_path / "page.html")])
    page = Tables()
    page.feed((tmp_path / "page.html").read_text())

    runs = read_seeds(folder) if seeds else [read_run(folder)]
    found = run_findings(runs, read_files(runs))
    shown = {section for section, tables in found.items() if tables}
    needed = {"accuracy", "clients", "classes", "time", "costs", "machine"}
    assert shown == (needed if seeds else needed | {"virtual-time", "privacy"})
    assert page.found.keys() - NOT_OF_THE_RUN == shown

    # The page has the rows of the terminal, and no others.
    rows = [row for name, rows in page.found.items() if name in shown for row in rows]
    for row in rows:
        line = words_of(" ".join(text for text, _ in row))
        assert line in terminal, line
    figures = sum(bool(number) for row in rows for _, number in row)
    assert figures > 30, "or this test looks at nothing"

    # JSON has the same tables: names as they are, and the raw value of every figure.
    every = [(name, table) for name, tables in found.items() for table in tables]
    assert len(told) == len(every)
    for content, (section, table) in zip(told, every, strict=True):
        assert (content["section"], content["columns"]) == (
            section,
            list(table.columns),
        )
        check_rows(content["rows"], table)
    raw = [cell["value"] for table in told for row in table["rows"] for cell in row if isinstance(cell, dict)]  # fmt: skip
    of_page = [number for row in rows for _, number in row if number]
    assert [float(number) for number in of_page] == pytest.approx(raw, nan_ok=True)


def check_rows(rows: list[list[object]], table: Table) -> None:
    """Check that every raw value of JSON is written as the table's text is."""
    for values, cells in zip(rows, table.rows, strict=True):
        for value, cell in zip(values, cells, strict=True):
            if not isinstance(cell, Cell):
                assert value == cell
                continue
            assert isinstance(value, dict) and value["unit"] == cell.kind.unit
            number = float("nan") if value["value"] is None else value["value"]
            # A text of its own, such as "12 (75.0%)", is more than the number.
            if not cell.told:
                assert str(cell.kind(number)) == str(cell)
