"""The settings of published benchmarks: what they say, and that a run takes them."""

import tomllib
from argparse import Namespace
from pathlib import Path

import pytest

import hpcfed
from benchmarks.rivals import published
from benchmarks.speed import clients
from hpcfed.analysis.costmodel import Measured

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SETTINGS = sorted((BENCHMARKS / "published").glob("*.toml"))

TINY = {
    "dataset": "synthetic",
    "synthetic_shape": "3x16x16",
    "clients": 2,
    "cohort": 1,
    "train_per_client": 20,
    "test_per_client": 5,
    "validation": 0,
    "batch_size": 20,
    "epochs": 1,
    "rounds": 1,
    "evaluate_every": 1,
    "device": "cpu",
}
"""A published benchmark in one round of one client with small images."""


def test_every_file_has_a_published_figure_beside_it() -> None:
    assert {path.stem for path in SETTINGS} == published.PUBLISHED.keys()


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        # Images of a client / batch · epochs · cohort · rounds, by hand.
        ("pfl-cifar10", 50 // 10 * 1 * 50 * 1500),
        ("blazefl-cnn", 500 // 50 * 5 * 100 * 5),
        ("blazefl-resnet18", 500 // 50 * 5 * 100 * 5),
        ("flute-cifar100", 100 // 20 * 1 * 10 * 4000),
    ],
)
def test_files_ask_for_the_published_local_steps(name: str, steps: int) -> None:
    told = tomllib.loads((BENCHMARKS / "published" / f"{name}.toml").read_text())
    images = 50_000 // told["clients"]
    of_client = -(-images // told["batch_size"]) * told["epochs"]
    cohort = told.get("cohort", told["clients"])
    assert of_client * cohort * told["rounds"] == steps
    assert told["lr"] == 0.1 and told["momentum"] == 0.0


def test_pfllibs_quick_start_trains_on_as_many_images_by_its_defaults() -> None:
    told = tomllib.loads((BENCHMARKS / "published/pfllib-mnist.toml").read_text())
    # It trains on 75 % of MNIST's 60,000 + 10,000 images.
    assert 60_000 - told["validation"] == 0.75 * 70_000
    assert (told["clients"], told["alpha"], told["rounds"]) == (20, 0.1, 2000)
    assert (told["batch_size"], told["epochs"], told["lr"]) == (10, 1, 0.005)
    assert "cohort" not in told and told["evaluate_every"] == 1


@pytest.mark.parametrize("path", SETTINGS, ids=lambda path: path.stem)
def test_a_plain_run_takes_every_file(path: Path, tmp_path: Path) -> None:
    run = hpcfed.run(path, progress=False, out=tmp_path / "run", **TINY)
    made = published.outcome(
        tmp_path / "run", command=100.0, all_rounds=3, told="cifar10"
    )
    seconds = float(run.rounds["seconds"].sum())
    assert made.rounds == 1
    assert made.training + made.evaluation == pytest.approx(seconds)
    assert made.start == pytest.approx(100 - seconds)
    # Two more rounds like the only one.
    assert made.remaining == pytest.approx(2 * seconds)
    assert 0 <= made.accuracy <= 1
    assert path.stem in published.line(path.stem, made)


def test_cost_by_clients_predicts_leaves_out_and_names_what_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """10 ms a round and 1 ms a client, in two steps; 500 clients are too many."""

    def measured(network: str, number: int, *rest: object) -> clients.Point | None:
        if number == 500:
            return None
        # 400 clients take longer than those before would make believe.
        seconds = 0.5 if number == 400 else 0.010 + 0.001 * number
        return clients.Point(Measured(number, 1, 9.0, seconds, steps=2), gib=1.5)

    monkeypatch.setattr(clients, "measured_or_none", measured)
    options = Namespace(clients=[10, 30, 100, 400, 500, 2000], fit_to=100, longest=1.0)
    clients.sweep("mlp", options, None)
    assert capsys.readouterr().out.splitlines() == [
        "| mlp | 10 | 20.00 | 2.0000 | 1.50 |  |  |",
        "| mlp | 30 | 40.00 | 1.3333 | 1.50 |  |  |",
        "| mlp | 100 | 110.00 | 1.1000 | 1.50 |  |  |",
        "| mlp | 400 | 500.00 | 1.2500 | 1.50 | 410.0 | -18.0 % |",
        "| mlp | 500 | does not fit | | | | |",
        "| mlp | 2,000 | left out: 2.0 s expected | | | | |",
    ]
