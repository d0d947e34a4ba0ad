"""The profile on a run's page: what it says, and files that are no profile."""

import json
from pathlib import Path
from typing import Any

import pytest

from hpcfed.errors import UserError
from hpcfed.record.folder import PROFILE
from hpcfed.record.profiles import read_profile
from hpcfed.report.sections.profile import MOST_OPERATORS, profile


def _content() -> dict[str, Any]:
    """Return a profile of one rank: two parts, and ten operators of 1 to 10 ms."""
    operators = []
    for number in range(1, 11):
        name = f"void kernel{number}"
        operators.append({"name": name, "seconds": number / 1e3, "calls": number})
    session = {"name": "denoiser", "number": 3, "operators": operators}
    short = {"name": "clients' training", "seconds": 2.0, "warm": 1.5, "busy": 0.5}
    long = {"name": "denoiser", "seconds": 8.0, "warm": None, "busy": None}
    rest = {"compute": 0.25, "bandwidth": None, "words": "it waits", "next": ["bf16"]}
    return {
        "device": "cpu",
        "parts": [short | rest, long | rest],
        "ranks": [{"rank": 0, "role": "server", "sessions": [session, session]}],
    }


def _write(folder: Path, content: object) -> Path:
    (folder / PROFILE).write_text(json.dumps(content))
    return folder


def test_longest_part_first_and_other_operators_together(tmp_path: Path) -> None:
    found = read_profile(_write(tmp_path, _content()))
    assert found is not None
    section = profile(found)
    assert section.text == ["It waits. Next: bf16."] * 2
    assert section.tables[0].rows == [
        ["clients' training", "2", "1.5", "50", "25", "–"],
        ["denoiser", "8", "–", "–", "25", "–"],
    ]
    # Two sessions of a kind are one chart: ranks do the same work.
    (drawn,) = section.charts
    bars = {row["x"]: row["y"] for row in drawn.spec["data"]["values"]}
    assert len(bars) == MOST_OPERATORS + 1
    assert next(iter(bars.items())) == ("kernel10 (10 calls)", 10)
    assert bars["2 others"] == pytest.approx(1 + 2)


def test_no_profile_and_what_is_none(tmp_path: Path) -> None:
    assert read_profile(tmp_path) is None
    for content in ([], {}, _content() | {"parts": [{"name": 3}]}):
        with pytest.raises(UserError, match="no profile of a run"):
            read_profile(_write(tmp_path, content))
    (tmp_path / PROFILE).unlink()
    (tmp_path / PROFILE).symlink_to("/etc/passwd")
    with pytest.raises(UserError, match="link"):
        read_profile(tmp_path)
