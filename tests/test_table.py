"""The table of figures beside their goals: its data, its bounds and its lines."""

import json
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import data
from benchmarks.measuring import LEAST, milliseconds, settings_of
from benchmarks.rivals import published
from benchmarks.speed import clients, table
from benchmarks.speed.engine import Uneven, measure_uneven
from benchmarks.speed.round import WORKS
from benchmarks.speed.table import Bench, Found, Row
from hpcfed.data import files
from hpcfed.runtime import world as worlds

SMALL = {
    "dataset": "synthetic",
    "synthetic_shape": "1x8x8",
    "model": "mlp",
    "partition": "iid",
    "clients": 4,
    "train_per_client": 25,
    "test_per_client": 1,
    "epochs": 3,
    "batch_size": 10,
    "device": "cpu",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with CIFAR-10's files, as far as names go."""
    for name in files.TORCHVISION_FILES["cifar10"]:
        path = tmp_path / "data" / name
        if "/" not in name:
            path.mkdir(parents=True)
        else:
            path.touch()
    return tmp_path / "data"


def bench(tmp_path: Path, **changes: Any) -> Bench:
    options = {
        "seconds": 0.0,
        "rounds": 4,
        "warmup": 1,
        "data_root": None,
        "device": "cpu",
        "json": tmp_path / "table.json",
    }
    world = worlds.enter(device="cpu")
    return Bench(world, Namespace(**options | changes), tmp_path)


def test_synthetic_data_is_as_large_as_the_real_set(tmp_path: Path) -> None:
    assert data.real("cifar100", tmp_path) == {}
    made = data.synthetic("cifar100", clients=500)
    # 50,000 and 10,000 images among 500 clients.
    assert (made["train_per_client"], made["test_per_client"]) == (100, 20)
    assert (made["synthetic_shape"], made["synthetic_classes"]) == ("3x32x32", 100)
    assert data.told(made, "cifar100") == "like cifar100"


def test_real_data_takes_the_place_of_synthetic_data(root: Path) -> None:
    for values in (*WORKS.values(), clients.settings("mlp", 30)):
        for partition in ("dominant", "dirichlet"):
            made = data.dealt(values, "cifar10", root, partition=partition)
            config = settings_of(made).config
            assert config.dataset == "cifar10" and config.root == root
            assert config.partition == partition and config.model == values["model"]
            assert config.clients == values["clients"]
            if partition == "dominant":
                assert config.train_per_client == values["train_per_client"]
    assert data.told(made, "cifar10") == "cifar10"
    nowhere = data.dealt(values, "cifar10", root / "no", partition="dominant")
    assert nowhere == values


def test_the_bound_is_all_samples_at_an_even_pace_or_the_longest_client() -> None:
    # 400 samples take 8 ms (one round was slow), so 500 take 10.
    made = Uneven(
        even=np.array([8.0, 8.0, 50.0]),
        found=np.array([20.0]),
        alone=np.array([9.0]),
        even_sizes=np.array([200, 200]),
        sizes=np.array([450, 50]),
    )
    assert made.bound == 10.0 and made.limit == "all samples"
    chained = replace(made, alone=np.array([16.0]))
    assert chained.bound == 16.0 and chained.limit == "the longest client"


def test_uneven_clients_are_measured_beside_even_ones_and_their_longest() -> None:
    seen = []

    def timed(setup: Any) -> np.ndarray:
        seen.append(setup.federation.sizes.tolist())
        return np.array([1.0 / len(seen)])

    made = measure_uneven(worlds.enter(device="cpu"), timed, SMALL)
    even, dirichlet, alone, two = seen
    assert even == [25] * 4
    assert sum(dirichlet) == 100 and max(dirichlet) > 25
    assert alone == [max(dirichlet)] and two == [max(dirichlet)] * 2
    assert made.alone == [1 / 4], "the shorter one"
    assert made.all_work == pytest.approx(1.0)


def test_rounds_end_in_time_but_a_few_are_always_counted() -> None:
    done: list[int] = []
    device = torch.device("cpu")
    late = time.perf_counter() - 1
    counted = milliseconds(done.append, device, rounds=50, warmup=2, until=late)
    assert len(counted) == LEAST and done == list(range(2 + LEAST))
    assert len(milliseconds(done.append, device, rounds=50)) == 50


def test_genfed_is_measured_by_the_papers_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = tmp_path / "genfed.toml"
    study.write_text(
        "[common]\nclients = 4\ncohort = 2\npartition = 'iid'\nvalidation = 20\n"
        "supplement_below = 'mean'\nepochs = 3\nbatch_size = 10\n"
        "[datasets.fashion-mnist]\nmodel = 'mlp'\n[methods.genfed]\nsupplement = false\n"
    )
    size = {name: value for name, value in SMALL.items() if "_" in name}
    size = {"dataset": "synthetic", **size}
    del size["batch_size"]
    monkeypatch.setattr(table, "GENFED", study)
    monkeypatch.setattr(data, "real", lambda name, root: {})
    monkeypatch.setattr(data, "synthetic", lambda name, number: size)
    found = table.genfed(bench(tmp_path))
    assert len(found.values) == LEAST and min(found.values) > 0
    # 4 × 25 samples less 20: two steps an epoch for each of 4 × 20, three epochs.
    assert list(found.steps) == [6] * LEAST
    assert found.longest.startswith("6 × ") and found.data == "like fashion-mnist"


def test_the_papers_settings_and_all_works_are_understood(root: Path) -> None:
    """No row is refused for its options, with synthetic data and with real data."""

    def checked(values: dict[str, Any], name: str, bench: Bench) -> Found:
        configs.append(settings_of(values | {"device": "cpu"}).config)
        return Found([1.0], "")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "_rounds", checked)
        for place in (None, root):
            configs: list[Any] = []
            on = bench(root, data_root=place)
            names = ["pfl-cifar10", "pfedgpa-cifar10", "genfed-fmnist"]
            names += ["mlp-10", "mlp-30", "mlp-100", "mlp-300"]
            for name in names:
                table.ROWS[name].measure(on)
            assert [c.clients for c in configs] == [1000, 100, 100, 10, 30, 100, 300]
    paper = configs[2]
    assert (paper.method, paper.cohort, paper.batch_size) == ("genfed", 10, 10)
    assert (paper.epochs, paper.alpha, paper.model) == (5, 0.1, "cnn-genfed")


def test_a_start_is_timed_with_an_empty_or_a_filled_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches: list[Path] = []

    def run(name: str, *words: Any, **keywords: Any) -> published.Outcome:
        assert name == "pfl-cifar10" and keywords["rounds"] == table.START_ROUNDS
        caches.append(Path(keywords["variables"]["HPCFED_CACHE"]))
        caches[-1].mkdir(exist_ok=True)
        return replace(MADE, command=100.0 * len(caches))

    monkeypatch.setattr(published, "run", run)
    # The clock hardly moves, so calls of 100 and 200 s let another one begin.
    on = bench(tmp_path, seconds=250.0)
    cold = table.start(on, kept=False)
    assert cold.values == [97.0, 197.0, 297.0] and len(set(caches)) == 3
    assert cold.more == {"command_s": 200.0, "rounds_s": 2.0}
    caches.clear()
    warm = table.start(on, kept=True)
    assert warm.values == [97.0, 197.0, 297.0]
    assert set(caches) == {tmp_path / "cache"}, "the first call above has filled it"
    caches.clear()
    (tmp_path / "cache").rmdir()
    assert table.start(on, kept=True).values == [197.0, 297.0]


MADE = published.Outcome(
    rounds=50,
    all_rounds=1500,
    command=10.0,
    training=2.0,
    evaluation=1.0,
    typical=0.04,
    remaining=60.0,
    accuracy=0.5,
    gib=1.0,
    data="like cifar10",
)


def test_a_part_of_a_published_run_is_extrapolated_and_told() -> None:
    # Two of six evaluations take a second after the first, so half a second a round.
    share = published.evaluation_share(np.array([0, 9.0, 0, 1.0, 0, 1.0]))
    assert share == pytest.approx(0.5)
    assert published.evaluation_share(np.zeros(3)) == 0
    part = published.line("pfl-cifar10", MADE)
    assert "| 50 of 1500 |" in part and "| 70 s, extrapolated |" in part
    assert "50.0 %" not in part, "accuracy on synthetic samples says nothing"
    whole = published.line(
        "pfl-cifar10", replace(MADE, all_rounds=50, remaining=0.0, data="cifar10")
    )
    assert "| 50 |" in whole and "extrapolated" not in whole and "50.0 %" in whole


def test_a_row_stands_beside_its_goal_and_what_was_before() -> None:
    found = Found([1.0, 2.0, 6.0], "like cifar10", steps=[4, 4, 4])
    row = table.figures(table.ROWS["mlp-10"], found, before=4.0)
    assert table.line("mlp-10", row) == (
        "| mlp-10 | 2 ms | 1.2 to 5.2 | 3 | ≤ 0.8 | no | 4 | 4 × 500 µs | like cifar10 |"
    )
    shares = table.figures(table.ROWS["uneven"], Found([81.0, 85.0], "cifar10"), None)
    assert "| ≥ 80 | yes |  |" in table.line("uneven", shares)
    unknown = table.figures(table.ROWS["genfed-fmnist"], found, None)
    assert unknown["goal"] is None and unknown["reached"] is None
    half = table.figures(table.ROWS["genfed-fmnist"], found, before=5.0)
    assert half["goal"] == 2.5 and half["reached"] is True


def test_a_row_that_fails_is_told_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(bench: Bench) -> Found:
        raise RuntimeError("no memory")

    good = Row("ms", 1.0, lambda bench: Found([0.5, 0.5, 0.5], "cifar10"))
    monkeypatch.setitem(table.ROWS, "mlp-10", Row("ms", 1.0, fails))
    monkeypatch.setitem(table.ROWS, "mlp-30", good)
    rows, complete = table.measure(["mlp-10", "mlp-30"], bench(tmp_path), {})
    assert not complete and rows["mlp-30"]["reached"]
    first, second = capsys.readouterr().out.splitlines()
    assert first == "| mlp-10 | failed: RuntimeError: no memory |"
    assert second.startswith("| mlp-30 | 0.5 ms |")
    written = tmp_path / "table.json"
    assert json.loads(written.read_text())["rows"] == rows
    assert table.medians(written) == {"mlp-30": 0.5}
