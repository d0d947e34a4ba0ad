"""The report in a real browser without a network: what clicks do, and that names from
outside stay names.
"""

from pathlib import Path

from hpcfed.analysis.findings import Table
from hpcfed.analysis.render.charts import Axis, Line, lines
from hpcfed.analysis.render.page import Content, page
from hpcfed.analysis.render.sections.section import Section
from tests.browser import opened

HOSTILE = "</script><script>window.hurt = 1</script><img src=x onerror='window.hurt=1'>"
LINES = "document.querySelectorAll('.drawing path[aria-roledescription=\"line mark\"]').length"
SECOND_NAME = "document.querySelectorAll('.role-legend-label text')[1]"
CELLS = (
    "[...document.querySelectorAll('tbody tr')].map((row) => row.cells[1].textContent)"
)
HEAD = "document.querySelectorAll('thead button')[1]"
INK = "getComputedStyle(document.querySelector('.role-axis-title text')).fill"


def test_clicks_filter_and_sort(tmp_path: Path) -> None:
    both = [Line(HOSTILE, [1, 2], [1.0, 2.0]), Line("b", [1, 2], [3.0, 4.0])]
    drawn = lines(HOSTILE, both, Axis("rounds"), Axis("accuracy, %"))
    rows = [["a", "9.5 [8, 11]"], [HOSTILE, "1,200 [1,100, 1,300]"], ["c", "–"], ["d", "10"]]  # fmt: skip
    section = Section(
        "s", HOSTILE, charts=[drawn], tables=[Table(("name", "ms"), rows)]
    )
    file = tmp_path / "page.html"
    file.write_text(page(Content(HOSTILE, [HOSTILE], [HOSTILE], [section])))
    with opened(file, tmp_path / "profile") as browser:
        browser.until("document.querySelectorAll('.drawn svg').length", 1)
        assert browser.evaluate(LINES) == 2

        browser.click(SECOND_NAME)
        browser.until(LINES, 1)
        browser.click("document.querySelector('.drawing svg')", times=2)
        browser.until(LINES, 2)

        browser.click(HEAD)
        rising = ["9.5 [8, 11]", "10", "1,200 [1,100, 1,300]", "–"]
        assert browser.evaluate(CELLS) == rising, "numbers as numbers"
        # From the keyboard too.
        browser.evaluate(f"{HEAD}.focus()")
        for kind in ("keyDown", "keyUp"):
            browser.call("Input.dispatchKeyEvent", type=kind, key="Enter", text="\r")
        assert browser.evaluate(CELLS) == rising[::-1]

        light = browser.evaluate(INK)
        dark = [{"name": "prefers-color-scheme", "value": "dark"}]
        browser.call("Emulation.setEmulatedMedia", features=dark)
        browser.until(f"{INK} !== {light!r}", True)

        assert browser.evaluate("window.hurt") is None
        assert browser.evaluate("document.title") == HOSTILE
        assert browser.complaints() == []
