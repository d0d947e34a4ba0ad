"""--depth-sweep: what one model generates from several depths of inversion."""

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from benchmarks.server import rivals
from benchmarks.server.rivals import accuracies, paired
from hpcfed import cli
from hpcfed.experiment.run import run_setup
from hpcfed.methods import pfedgpa
from hpcfed.results.stored import read_run
from tests.federations import assembled
from tests.pfedgpa_runs import EVERYONE, TINY, states
from tests.runs import flags, mistake

pytestmark = pytest.mark.usefixtures("one_thread")

SWEEP = {"depth_sweep": [1, 10, 50]}
"""Of fifty steps; the run itself inverts from ten."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same run without and with a sweep; two clients are not in the bank."""
    found = {}
    options = TINY | {"bank_rounds": 2, "participation": 0.34, "new_clients": 2}
    for name, more in {"plain": {}, "swept": SWEEP}.items():
        found[name] = tmp_path_factory.mktemp(name)
        setup = assembled(**options, memorisation=True, **more)
        run_setup(setup, found[name], quiet=True)
    return found


def test_rows_from_the_runs_own_depth_are_the_runs_own_rows() -> None:
    s = assembled(**TINY, **SWEEP)
    fed, state = s.federation, states(s)[-1]
    clients = np.array([4, 1])
    shallow, own, deepest = pfedgpa.depths(fed, state, clients)
    assert torch.equal(own.rows, s.method.personal(fed, state, clients))
    # 1000 / 50 steps in one: β is 20 times 1e-4 in the first.
    assert shallow.signal == pytest.approx((1 - 20e-4) ** 0.5, rel=1e-12)
    assert shallow.signal > own.signal > deepest.signal
    updates, _ = fed.server.recall(fed.clients)
    everyones = list(pfedgpa.depths(fed, state, EVERYONE))
    for found, depth in zip(everyones, SWEEP["depth_sweep"], strict=True):
        assert found.depth == depth
        made = fed.server.invert(fed.clients, depth=depth)
        torch.testing.assert_close(found.rows, state.starts + made.rows)
        far = (made.rows - updates).norm(dim=1) / updates.norm(dim=1)
        torch.testing.assert_close(found.distance, far)
        assert found.recognised.mean().item() == pytest.approx(made.recognised)


MEASURED = (
    "timing/",
    "telemetry/",
    "rounds/seconds",
    "rounds/cpu_seconds",
    "rounds/imbalance",
    "server/seconds",
    "server/samples_per_second",
    "server/peak_memory",
)
"""Times and memory differ from run to run."""


def numbers(path: Path) -> dict[str, np.ndarray]:
    """Return all numbers of a file that a second run would repeat."""
    found = {}

    def keep(name: str, data: Any) -> None:
        is_data = isinstance(data, h5py.Dataset) and data.dtype.kind in "fiu"
        if is_data and not name.startswith(MEASURED):
            found[name] = data[()]

    with h5py.File(path) as file:
        file.visititems(keep)
    return found


def test_a_sweep_changes_no_other_number(runs: dict[str, Path]) -> None:
    """To the bit, also in what is measured after it."""
    for file in ("run.h5", "server.h5"):
        plain, swept = (numbers(folder / file) for folder in runs.values())
        extra = {name for name in swept if name.startswith("depths/")}
        assert swept.keys() - plain.keys() == extra
        for name, values in plain.items():
            np.testing.assert_array_equal(swept[name], values, name)
    assert "newcomers/accuracy" in numbers(runs["plain"] / "run.h5")


def test_depths_are_recorded_and_shown(
    runs: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = read_run(runs["swept"])
    sweep = record.depths
    assert sweep is not None and sweep.depth.tolist() == [1, 10, 50]
    assert read_run(runs["plain"]).depths is None
    np.testing.assert_array_equal(sweep.accuracy[1], record.finals["pFedGPA"])
    figures = record.figures["distance to own upload"]
    np.testing.assert_allclose(sweep.distance[1], figures, rtol=1e-5)
    # Clients that are not in the bank have no row of their own.
    unknown = np.isnan(figures)
    assert 0 < unknown.sum() < 6
    np.testing.assert_array_equal(np.isnan(sweep.own), [unknown] * 3)
    known = sweep.own[1][~unknown]
    assert known.mean() == pytest.approx(record.learnings[-1].own)
    monkeypatch.setenv("COLUMNS", "80")
    cli.main(["show", str(runs["swept"])])
    text = capsys.readouterr().out
    assert "…" not in text
    lines = [line.split() for line in text.splitlines()]
    cli.main(["show", str(runs["swept"]), "--json"])
    summary = json.loads(capsys.readouterr().out)["depths"]
    for number, depth in enumerate((1, 10, 50)):
        assert [
            str(depth),
            f"{summary['signal'][number]:.1%}",
            f"{np.nanmean(sweep.accuracy[number]):.2%}",
            f"{np.nanmean(sweep.own[number]):.1%}",
            f"{summary['distance'][number]:.3f}",
        ] in lines
    page = runs["swept"] / "page.html"
    cli.main(["report", str(runs["swept"]), "--out", str(page)])
    assert "Depth of inversion" in page.read_text()


@pytest.mark.parametrize(
    ("sweep", "words"),
    [
        ("100,50", "--depth-sweep 100,50: must rise"),
        ("10,10", "must rise"),
        ("0,10", "--depth-sweep"),
        ("deep", "--depth-sweep"),
        ("10,51", "--depth-sweep 51 is beyond --diffusion-steps 50"),
    ],
)
def test_mistakes(sweep: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = mistake(capsys, "run", *flags(**TINY, depth_sweep=sweep))
    assert words in told


def test_paired_differences_by_hand() -> None:
    """Differences of 1 and 3 have the mean 2 and a standard deviation of √2."""
    assert paired([2.0, 4.0], [1.0, 1.0]) == "+2.00 ± 1.00 (2/2)"
    assert paired([1.0, 1.0], [1.0, 3.0]) == "-1.00 ± 1.00 (0/2)"


def test_help_names_the_settings_of_a_contest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["rivals", "--help"])
    with pytest.raises(SystemExit):
        rivals.main()
    assert "10 %, 5 %" in capsys.readouterr().out


def test_a_contest_counts_clients_that_the_bank_knows(runs: dict[str, Path]) -> None:
    record = read_run(runs["swept"])
    known = ~np.isnan(record.figures["distance to own upload"])
    found = accuracies(record)
    expected = 100 * np.nanmean(record.finals["upload"][known])
    assert found["upload"] == pytest.approx(expected)
    assert found["pFedGPA, 10 steps"] == pytest.approx(
        100 * np.nanmean(record.finals["pFedGPA"][known])
    )
