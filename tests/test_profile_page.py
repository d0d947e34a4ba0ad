"""The profile on a run's page: what it says, and files that are no profile."""

import json
from pathlib import Path
from typing import Any

import pytest

from hpcfed.analysis.collect import Found
from hpcfed.analysis.groups import Process, groups
from hpcfed.analysis.render.run_page import run_content
from hpcfed.analysis.render.run_page.profile import MOST_OPERATORS, operators, profile
from hpcfed.errors import UserError
from hpcfed.profile.timeline import MOMENTS, PROFILER, Span, Timeline, lanes
from hpcfed.results.folder import PROFILE
from hpcfed.results.profiles import Lane, read_profile
from hpcfed.results.stored import RunDetails
from tests.points import run_of


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
    assert section.text[:2] == ["It waits. Next: bf16."] * 2
    assert section.tables[0].texts == [
        ["clients' training", "2.00", "1.50", "50.0%", "25.0%", "–"],
        ["denoiser", "8.00", "–", "–", "25.0%", "–"],
    ]
    # Two sessions of a kind are one chart: ranks do the same work.
    (drawn,) = operators(found).charts
    bars = {row["x"]: row["y"] for row in drawn.spec["data"]["values"]}
    assert len(bars) == MOST_OPERATORS + 1
    assert next(iter(bars.items())) == ("kernel10 (10 calls)", 10)
    assert bars["2 others"] == pytest.approx(1 + 2)


def test_no_profile_and_what_is_none(tmp_path: Path) -> None:
    assert read_profile(tmp_path) is None
    for content in ([], {}, _content() | {"parts": [{"name": 3}]}):
        with pytest.raises(UserError, match="not a profile of a run"):
            read_profile(_write(tmp_path, content))
    (tmp_path / PROFILE).unlink()
    (tmp_path / PROFILE).symlink_to("/etc/passwd")
    with pytest.raises(UserError, match="link"):
        read_profile(tmp_path)


CEILINGS = {
    "float32": {"bytes_per_second": 1e9, "flops": 4e9, "variation": 0.02},
    "bfloat16": {"bytes_per_second": 1e9, "flops": 16e9},
}


def _with_ceilings() -> dict[str, Any]:
    content = _content() | {"ceilings": CEILINGS}
    # A quarter of 4 and of 16 GFLOP/s, at half and a tenth of 1 GB/s.
    content["parts"][0]["bandwidth"] = 0.5
    content["parts"][1] |= {"bandwidth": 0.1, "numbers": "bfloat16"}
    return content


def test_parts_lie_under_the_roofs_that_shares_are_of(tmp_path: Path) -> None:
    found = read_profile(_write(tmp_path, _with_ceilings()))
    assert found is not None
    section = profile(found)
    assert section.tables[1].texts == [
        ["float32", "0.004", "1", "2.0%"],
        ["bfloat16", "0.016", "1", "0.0%"],
    ]
    drawn = section.charts[0].spec
    points = {row["name"]: (row["x"], row["y"]) for row in drawn["data"]["values"]}
    assert points == {"clients' training": (2, 1), "denoiser": (40, 4)}
    roofs = [layer["data"]["values"] for layer in drawn["layer"] if "data" in layer]
    # Slope up to the corner, where copies bring as much as products take; then level.
    assert [(row["x"], row["y"]) for row in roofs[0]][1:] == [(16, 16), (160, 16)]
    assert [(row["x"], row["y"]) for row in roofs[2]] == [(0.5, 0.5), (4, 4), (160, 4)]
    names = [row["series"] for roof in roofs for row in roof if "series" in row]
    assert names == ["bfloat16 products", "float32 products"]
    assert "Left out" not in " ".join(section.text)


def test_a_roofline_tells_what_it_leaves_out_and_names_near_roofs_once(
    tmp_path: Path,
) -> None:
    content = _with_ceilings()
    fast = CEILINGS["bfloat16"] | {"flops": 1.1 * CEILINGS["float32"]["flops"]}
    content["ceilings"] = CEILINGS | {"bfloat16": fast}
    content["parts"][1] |= {"bandwidth": None}
    found = read_profile(_write(tmp_path, content))
    assert found is not None
    section = profile(found)
    assert "Left out: denoiser, whose bytes are not counted." in " ".join(section.text)
    layers = [layer for layer in section.charts[0].spec["layer"] if "data" in layer]
    names = [layer["data"]["values"][0].get("series") for layer in layers]
    assert names == [None, None, "bfloat16, float32 products"]


def test_numbers_too_small_for_a_roof_are_left_out(tmp_path: Path) -> None:
    content = _with_ceilings()
    tiny = CEILINGS["float32"] | {"bytes_per_second": 1e-300}
    content["ceilings"] = {"float32": tiny}
    content["parts"][0]["bandwidth"] = 1e-300
    found = read_profile(_write(tmp_path, content))
    assert found is not None and profile(found).charts == []


@pytest.mark.parametrize("variation", [0.1, 0.2])
def test_ceilings_that_vary_are_told_on_the_page(
    variation: float, tmp_path: Path
) -> None:
    content = _with_ceilings()
    noisy = CEILINGS["float32"] | {"variation": variation}
    content["ceilings"] = {"float32": noisy}
    found = read_profile(_write(tmp_path, content))
    assert found is not None
    told = " ".join(profile(found).text)
    assert ("The machine was not quiet" in told) == (variation > 0.1)


def test_every_rank_is_drawn_with_the_servers(tmp_path: Path) -> None:
    content = _content()
    content["ranks"] = [
        {"rank": 0, "role": "worker", "sessions": [], "lanes": [["train", 0.0, 2.0]]},
        {"rank": 1, "role": "server", "sessions": [], "lanes": [["invert", 2.0, 3.0]]},
    ]
    found = read_profile(_write(tmp_path, content))
    assert found is not None
    (drawn,) = profile(found).charts
    rows = [(row["row"], row["series"]) for row in drawn.spec["data"]["values"]]
    assert rows == [("rank 0, clients", "train"), ("rank 1, server", "invert")]


def test_a_moment_belongs_to_what_took_most_of_it() -> None:
    """400 seconds, so that a moment is one: training for 300.4, then a learning."""
    spans = [
        Span("phases", "train", 0.0, 300.4),
        Span("phases", "server", 300.4, 99.6),
        Span("server", "denoiser", 310.0, 20.0),
        Span(PROFILER, "denoiser", 330.0, 1.0),
        Span("kernels, stream 7", "gemm", 0.0, 400.0),
    ]
    alone = Timeline(0, "worker", "host", "cpu", spans=spans)
    idle = Timeline(1, "server", "host", "cpu")
    ours, theirs = lanes([alone, idle])
    assert theirs == [] and MOMENTS == 400
    assert ours == [
        Lane("train", 0, 300),
        Lane("server", 300, 310),
        Lane("denoiser", 310, 330),
        # The profiler's own time is no work of the phase around it.
        Lane(PROFILER, 330, 331),
        Lane("server", 331, 400),
    ]
    assert lanes([idle]) == [[]]


def test_a_profiled_run_shows_its_profile_first_and_all_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A run in memory has no file with details.
    nothing = RunDetails.nothing()
    monkeypatch.setattr("hpcfed.analysis.run_findings.read_details", lambda _: nothing)
    run = run_of(folder=_write(tmp_path, _with_ceilings()), server_ranks=1)
    group = groups([Process((run,), 1, "run")])[0]
    content = run_content(group, Found())
    assert [section.id for section in content.sections][:3] == [
        "profile",
        "operators",
        "accuracy",
    ]
    assert "on 1 rank and 1 server rank" in content.title
