"""benchmarks/paper --figures: every kind of picture, of one tiny study."""

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import vector_to_parameters

from benchmarks.paper import __main__ as paper
from benchmarks.paper import drawings
from benchmarks.paper.row_drawings import _losses, principal_axes
from hpcfed.models.networks import build
from hpcfed.results.run import DepthSweep, RunRecord
from hpcfed.results.stored import read_seeds
from tests.federations import assembled

STUDY = """
measures = ["best"]
reading = "a large supplement"
[common]
model = "mlp"
rounds = 3
epochs = 1
batch_size = 64
clients = 4
snapshot_every = 1
target_accuracy = 5
[datasets.digits]
[columns.four]
[columns.two]
clients = 2
[methods.fedavg]
[methods.local]
[figures.digits]
fedavg = { four = [85.1, 0.2], two = 88 }
[[drawings]]
name = "Fig. 6"
kind = "curves"
series = "accuracy"
label = "accuracy of clients"
columns = ["four"]
[[drawings]]
name = "Fig. 7"
kind = "curves"
series = "bytes_up"
cumulative = true
columns = ["two"]
methods = ["fedavg"]
[[drawings]]
name = "Fig. 3"
kind = "bars"
measure = "rounds"
columns = ["four"]
[[drawings]]
name = "Fig. 5"
kind = "across"
measure = "best"
x = "clients"
[[drawings]]
name = "Fig. 4"
kind = "clients"
finals = ["before", "after"]
below = 65
columns = ["four"]
methods = ["fedavg"]
[[drawings]]
name = "Map"
kind = "map"
columns = ["four"]
methods = ["fedavg"]
[[drawings]]
name = "Fig. 1"
kind = "between"
columns = ["four"]
methods = ["fedavg"]
[[drawings]]
name = "Depths"
kind = "depths"
columns = ["two"]
methods = ["fedavg"]
[[drawings]]
name = "Fig. 9"
kind = "curves"
series = "newcomers"
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The words of a study that has run."""
    folder = tmp_path_factory.mktemp("study")
    (folder / "study.toml").write_text(STUDY)
    words = [str(folder / "study.toml"), "--out", str(folder / "out")]
    words += ["--seeds", "0..1", "--device", "cpu"]
    assert paper.main(words) == 0
    return words


def tips(path: Path) -> list[str]:
    """The figures of all points and bars, as they are read aloud."""
    root = ElementTree.parse(path).getroot()
    found = []
    for node in root.iter():
        if node.get("aria-roledescription") in ("point", "bar"):
            found.append(node.get("aria-label", ""))
    return found


def texts(path: Path) -> list[str]:
    root = ElementTree.parse(path).getroot()
    # A text of several lines has each of them in a node of its own.
    found = []
    for kind in ("text", "tspan"):
        for node in root.iter(f"{{http://www.w3.org/2000/svg}}{kind}"):
            found.append(node.text or "")
    return found


def test_every_kind_of_figure_is_drawn(
    runs: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def with_finals(folder: Path) -> list[RunRecord]:
        finals = {"before": np.array([0.5, 0.6, 0.7, 0.8]), "after": np.ones(4)}
        finals["upload"] = finals["after"]
        # Rows of half and of all answers, at two depths.
        halves = np.array([[0.25, 0.75], [1, 1]])
        swept = DepthSweep(np.array([50, 100]), np.ones(2), halves, halves, halves)
        return [
            replace(record, finals=finals, depths=swept)
            for record in read_seeds(folder)
        ]

    monkeypatch.setattr(drawings, "read_seeds", with_finals)
    assert paper.main([*runs, "--table", "--figures", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "Fig. 9: no run has what it shows" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "depths-digits-two-fedavg.svg",
        "fig-1-digits-four-fedavg.svg",
        "fig-3-digits-four.svg",
        "fig-4-digits-four-fedavg.svg",
        "fig-5-digits.svg",
        "fig-6-digits-four.svg",
        "fig-7-digits-two.svg",
        "map-digits-four-fedavg.svg",
    ]
    written = texts(tmp_path / "fig-6-digits-four.svg")
    assert "Fig. 6: accuracy of clients, digits, four" in written
    assert "2 seeds (mean, standard error), 3 rounds" in written
    assert {"a large supplement", "fedavg", "local", "rounds"} <= set(written)
    records = read_seeds(Path(runs[2]) / "digits/four/fedavg")
    # Rounds count from 1, and a point is the mean of both seeds in per cent.
    second = 50 * sum(record.rounds["accuracy"][1] for record in records)
    points = tips(tmp_path / "fig-6-digits-four.svg")
    assert len(points) == 2 * 3
    assert points[1].startswith(f"rounds: 2; accuracy of clients, %: {second:.3f}"[:-1])
    assert "title: fedavg; standard error from: " in points[1]

    # 4,810 floats of two clients and three rounds, in GiB.
    last = tips(tmp_path / "fig-7-digits-two.svg")[-1]
    assert f"{3 * 2 * 4810 * 4 / 2**30:.3g}"[:3] in last
    # The target of 5 % is reached in round 1 by anything.
    assert len(tips(tmp_path / "fig-3-digits-four.svg")) == 2
    across = texts(tmp_path / "fig-5-digits.svg")
    assert {"fedavg", "fedavg (paper)", "local", "clients"} <= set(across)
    assert "local (paper)" not in across
    of_clients = tmp_path / "fig-4-digits-four-fedavg.svg"
    assert len(tips(of_clients)) == 2 * 4
    # 50 and 60 % are below 65, in both seeds.
    assert "before (4 of 8 below 65 %)" in texts(of_clients)
    # Four clients in three rounds, and one seed.
    assert len(tips(tmp_path / "map-digits-four-fedavg.svg")) == 12
    assert "1 seed, 3 rounds" in texts(tmp_path / "map-digits-four-fedavg.svg")

    swept = tips(tmp_path / "depths-digits-two-fedavg.svg")
    assert "50; accuracy, %: 50;" in swept[0] and "100; accuracy, %: 100;" in swept[1]
    assert "upload" in texts(tmp_path / "depths-digits-two-fedavg.svg")
    line = texts(tmp_path / "fig-1-digits-four-fedavg.svg")
    assert "of both" in line and "1 seed, 3 rounds" in line


def test_losses_between_rows_are_those_of_plain_torch() -> None:
    s = assembled(clients=3)
    data = s.federation.training.test_data
    rows = torch.stack([s.federation.initial_row(), 2 * s.federation.initial_row()])
    found = _losses(s.settings, rows.numpy(), [2, 0])
    for client, losses in zip([2, 0], found, strict=True):
        own = data.index[client, : data.sizes[client]]
        for row, loss in zip(rows, losses, strict=True):
            network = build("mlp", shape=(1, 8, 8), classes=10, seed=0).double()
            vector_to_parameters(row, network.parameters())
            expected = F.cross_entropy(network(data.inputs[own]), data.targets[own])
            assert loss == pytest.approx(expected.item(), rel=1e-9)


def test_principal_axes_of_a_cross() -> None:
    # Along x ±3 and along y ±1: 18 of 20 parts of the variance lie on the first axis.
    rows = np.array([[3.0, 0, 5], [-3, 0, 5], [0, 1, 5], [0, -1, 5]])
    points, shares = principal_axes(rows)
    np.testing.assert_allclose(np.abs(points), np.abs(rows[:, :2]), atol=1e-12)
    np.testing.assert_allclose(shares, [0.9, 0.1])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (('series = "accuracy"', ""), "a drawing of kind curves needs series"),
        (('series = "accuracy"', "series = 'acuracy'"), "unknown series 'acuracy'"),
        (('name = "Fig. 7"', 'name = "Fig. 6"'), "two drawings are called Fig. 6"),
        (('kind = "bars"', 'kind = "pie"'), "drawings.2.kind: Input should be"),
    ],
)
def test_a_mistake_in_a_drawing_is_one_line(
    change: tuple[str, str],
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "study.toml"
    path.write_text(STUDY.replace(*change))
    assert paper.main([str(path), "--out", str(tmp_path / "out"), "--table"]) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1
