"""What clients train is counted where they train it, and every figure follows from it.

Counts by hand are of clients with 20 samples in minibatches of 8: an epoch is three
steps, and a single step sees 8 samples.
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from torch import nn

from hpcfed import cli, methods
from hpcfed.analysis.groups import Process
from hpcfed.cli import keyword_settings
from hpcfed.clients.schedule import Length, num_samples
from hpcfed.experiment.data import Dealt, deal
from hpcfed.experiment.run import run
from hpcfed.models.cost import cost
from hpcfed.models.own import Sample as Shape
from hpcfed.plan.shares import client_size
from hpcfed.plan.speeds import Ceilings
from hpcfed.plan.work import local_work, run_work
from hpcfed.profile.timeline import Timeline
from hpcfed.profile.verdict import ProfiledRun, workloads
from hpcfed.results.run import RunRecord
from hpcfed.results.stored import read_run
from hpcfed.runtime import machine
from hpcfed.runtime.timer import PHASES
from tests.federations import assembled

CLIENTS, ROUNDS, SIZE, BATCH = 4, 2, 20, 8
COMMON: dict[str, Any] = {
    "dataset": "synthetic",
    "partition": "iid",
    "model": "mlp",
    "clients": CLIENTS,
    "rounds": ROUNDS,
    "epochs": 2,
    "batch_size": BATCH,
    "train_per_client": SIZE,
    "test_per_client": 2,
    "evaluate_every": ROUNDS,
    "device": "cpu",
}
BODY, HEAD = 3 * 32 * 32 * 64, 64 * 10
"""Multiply-adds of a sample's forward pass through each layer of the mlp."""
ALL = 2 * BODY + 3 * HEAD
"""Those of a step: nobody needs the gradient of the images."""
BODY_ALONE = BODY + HEAD + BODY + HEAD
"""Forward, the gradient of the body's weight, and that which leads to it."""
HEAD_ALONE = BODY + HEAD + HEAD


@dataclass(frozen=True)
class ByHand:
    """What one client trains."""

    samples: int
    """In a round."""
    steps: int
    multiply_adds: int
    """In a round, of all samples."""
    judged: int = 0
    """Samples before it is judged."""
    judged_multiply_adds: int = 0
    trained: int = CLIENTS
    """Clients that train in a round."""


def usual(samples: int, steps: int, **more: Any) -> ByHand:
    """Return a count of steps that train the whole network."""
    return ByHand(samples, steps, samples * ALL, **more)


CASES: dict[str, tuple[dict[str, Any], ByHand]] = {
    "fedavg": ({}, usual(40, 6)),
    "scaffold, 1 step": ({"method": "scaffold", "local_steps": 1}, usual(8, 1)),
    # 13 epochs of three steps, and one step.
    "scaffold, 40 steps": ({"method": "scaffold", "local_steps": 40}, usual(268, 40)),
    "scaffold, epochs": ({"method": "scaffold", "local_steps": 0}, usual(40, 6)),
    "ditto": ({"method": "ditto"}, usual(80, 12)),
    "fedavg-ft": (
        {"method": "fedavg-ft", "finetune_epochs": 3},
        usual(40, 6, judged=60, judged_multiply_adds=60 * ALL),
    ),
    "fedavg-ft, head": (
        {"method": "fedavg-ft", "finetune": "head"},
        usual(40, 6, judged=40, judged_multiply_adds=40 * HEAD_ALONE),
    ),
    "per-fedavg": (
        {"method": "per-fedavg", "local_steps": 5, "adapt_steps": 2},
        usual(2 * 5 * 8, 2 * 5, judged=16, judged_multiply_adds=16 * ALL),
    ),
    "apfl": ({"method": "apfl", "local_steps": 5}, usual(2 * 5 * 8, 2 * 5)),
    "pfedme": (
        {"method": "pfedme", "local_rounds": 2, "pfedme_steps": 3},
        usual(2 * 3 * 8, 2 * 3),
    ),
    "fedrep": (
        {"method": "fedrep", "head_epochs": 3, "body_epochs": 1},
        ByHand(80, 12, 60 * HEAD_ALONE + 20 * BODY_ALONE),
    ),
    "fedbabu": (
        {"method": "fedbabu", "finetune_epochs": 1},
        ByHand(40, 6, 40 * BODY_ALONE, judged=20, judged_multiply_adds=20 * ALL),
    ),
    # 6, 6, 6 and 2 samples, then three times 6.
    "pfedhn": (
        {"method": "pfedhn", "inner_steps": 7, "inner_batch": 6},
        usual(38, 7),
    ),
    # A pass over all samples for the Fisher information, which trains nothing.
    "genefl": ({"method": "genefl", "clusters": 1}, ByHand(40, 6, (40 + 20) * ALL)),
    "fedbuff": ({"method": "fedbuff", "buffer": 2}, usual(40, 6)),
    "over-selection": (
        {"cohort": 2, "oversample": 1.5, "devices": "lognormal"},
        usual(40, 6, trained=3),
    ),
}


def recorded(tmp_path: Path, **options: Any) -> RunRecord:
    folder = run(keyword_settings({**COMMON, **options, "out": tmp_path / "run"}))
    assert folder is not None
    return read_run(folder)


@pytest.mark.parametrize("name", CASES)
def test_what_methods_train_by_hand(name: str, tmp_path: Path) -> None:
    options, one = CASES[name]
    record = recorded(tmp_path, **options)
    counted = record.rounds
    trained = one.trained
    for of_round in range(ROUNDS):
        assert counted["trained_samples"][of_round] == trained * one.samples
        assert counted["trained_steps"][of_round] == trained * one.steps
        assert counted["train_flops"][of_round] == 2 * trained * one.multiply_adds
    if name != "fedbuff":  # where a client may train twice in a round
        assert counted["longest_steps"].tolist() == [one.steps] * ROUNDS
    # The last round is evaluated, and no other.
    judged = [0, CLIENTS * one.judged]
    assert counted["finetuned_samples"].tolist() == judged
    assert counted["finetune_flops"][-1] == 2 * CLIENTS * one.judged_multiply_adds
    samples = counted["trained_samples"] + counted["finetuned_samples"]
    assert counted["engine_samples"].tolist() == samples.tolist()
    # Figures: samples by the seconds of rounds, MFU by those of training.
    rate = np.median(samples / counted["seconds"])
    assert Process((record,), 0, "").samples_per_second == pytest.approx(rate)
    assert utilisation(record, options) == pytest.approx(
        2 * ROUNDS * trained * one.multiply_adds / train_seconds(record) / 1e9
    )
    # What the method declares comes to the same, before it runs.
    planned = run_work(keyword_settings({**COMMON, **options}))
    flops = counted["train_flops"].sum() + counted["finetune_flops"].sum()
    assert planned.clients == pytest.approx(flops, rel=1e-12)


DEALT: dict[str, dict[str, Any]] = {
    "new clients hold a share": {"new_clients": 4, "new_updates": 1},
    "the method validates": {"method": "genfed"},
    "validation": {"validation": 300},
    "supplement": {
        "supplement": True,
        "supplement_below": 1000,
        "supplement_share": 0.5,
    },
    "synthetic": {
        "dataset": "synthetic",
        "train_per_client": 40,
        "test_per_client": 2,
        "validation": 80,
    },
}


@pytest.mark.parametrize("name", DEALT)
def test_plans_count_what_is_dealt_out(name: str, tmp_path: Path) -> None:
    options = {"partition": "iid", "model": "mlp", "clients": 4, "rounds": 2}
    options |= {"epochs": 1, "device": "cpu", "evaluate_every": 2, **DEALT[name]}
    folder = run(keyword_settings({**options, "out": tmp_path / "run"}))
    assert folder is not None
    counted = read_run(folder).rounds
    flops = counted["train_flops"].sum() + counted["finetune_flops"].sum()
    planned = run_work(keyword_settings(options)).clients
    assert planned == pytest.approx(flops, rel=1e-12)


def test_points_that_differ_in_other_options_deal_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dealt = []

    def dealing(*args: Any, **more: Any) -> Dealt:
        dealt.append(args)
        return deal(*args, **more)

    monkeypatch.setattr("hpcfed.plan.shares.deal", dealing)
    for lr in (0.1, 0.2):
        for alpha in (0.51, 0.52):
            run_work(keyword_settings({"model": "mlp", "lr": lr, "alpha": alpha}))
    assert len(dealt) == 2


def test_data_that_is_to_be_downloaded_is_dealt_evenly(tmp_path: Path) -> None:
    config = keyword_settings(
        {
            "dataset": "mnist",
            "data_root": tmp_path,
            "download": True,
            "clients": 4,
            "new_clients": 6,
            "validation": 1000,
        }
    ).config
    assert client_size(config) == 5900


def train_seconds(record: RunRecord) -> float:
    return float(record.phases[:, :, PHASES.index("train")].mean(1).sum())


def utilisation(record: RunRecord, options: dict[str, Any]) -> float:
    """Return the MFU of clients' training that a profile tells, on a device that does
    10⁹ operations a second.
    """
    seen = Timeline(rank=0, role="worker", host="", device="")
    ceilings = Ceilings(flops=1e9, bytes_per_second=1e9)
    settings = keyword_settings({**COMMON, **options})
    measured = ProfiledRun(settings, record, [seen], {"float32": ceilings}, cuda=False)
    return workloads(measured)[0].compute


def test_clients_that_lack_time_are_counted_for_what_they_did(tmp_path: Path) -> None:
    record = recorded(
        tmp_path,
        batch_size=5,
        devices="lognormal",
        speed_spread=2.0,
        step_seconds=1.0,
        deadline=8.0,
        partial=True,
    )
    with h5py.File(record.folder / "run.h5") as file:
        taken = np.nansum(file["clock/steps"][:], 1)
    assert 0 < taken[0] < CLIENTS * 8, "some have no time for all eight steps"
    assert record.rounds["trained_steps"].tolist() == taken.tolist()
    # All minibatches are full.
    assert record.rounds["trained_samples"].tolist() == (5 * taken).tolist()
    assert record.rounds["engine_samples"].tolist() == (5 * taken).tolist()


def brute(size: int, length: Length, most: int) -> int:
    """Count the samples of a client's steps one after the other."""
    per_epoch = -(-size // length.batch_size)
    steps = length.steps or length.epochs * per_epoch * length.repeat
    seen = 0
    for step in range(min(steps, most) if size else 0):
        first = step // length.repeat % per_epoch * length.batch_size
        seen += min(size - first, length.batch_size)
    return seen


@pytest.mark.parametrize("repeat", [1, 3])
@pytest.mark.parametrize(("epochs", "steps"), [(2, 0), (0, 6), (0, 21)])
def test_samples_of_limited_steps(epochs: int, steps: int, repeat: int) -> None:
    length = Length(epochs, BATCH, steps, repeat)
    sizes = np.array([0, 1, 7, 8, 9, 20, 24])
    for most in (0, 1, 4, 7, 1000):
        found = num_samples(sizes, length, np.full(len(sizes), most))
        assert found.tolist() == [brute(size, length, most) for size in sizes]
    assert num_samples(sizes, length).tolist() == [
        brute(size, length, 1000) for size in sizes
    ]


VARIANTS: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in methods.names()]
VARIANTS += [
    ("scaffold", {"variates": "gradient"}),
    ("per-fedavg", {"hessian": "difference"}),
    ("fedavg-ft", {"finetune_epochs": 0}),
]


@pytest.mark.parametrize(("name", "more"), VARIANTS)
def test_every_method_declares_what_it_trains(name: str, more: dict[str, Any]) -> None:
    """A round and an evaluation of an uneven federation."""
    model = "cnn-digits" if name == "fedlps" else "mlp"
    s = assembled(method=name, model=model, clients=4, batch_size=60, epochs=3, **more)
    fed, settings = s.federation, s.settings
    cohort = fed.sample(0)
    log = cohort.log
    state = s.method.round(fed, s.method.init(fed), cohort)
    with s.timer.phase("evaluate"):
        s.method.personal(fed, state, np.arange(4))
    declared = [local_work(settings, float(size)) for size in fed.sizes]
    if settings.options.asynchronous:
        # Who arrives twice is drawn: none has more than the largest.
        each = [one.samples for one, _ in declared]
        assert 4 * min(each) <= log.trained_samples <= 4 * max(each)
        return
    for counted, part, index in (
        (log.trained_samples, "samples", 0),
        (log.trained_steps, "steps", 0),
        (log.train_flops, "flops", 0),
        (log.finetuned_samples, "samples", 1),
        (log.finetune_flops, "flops", 1),
    ):
        planned = sum(getattr(one[index], part) for one in declared)
        assert counted == pytest.approx(planned, rel=1e-12), part


def test_steps_of_dp_sgd_are_counted_too() -> None:
    s = assembled(clients=3, batch_size=60, epochs=2, momentum=0.0, sample_noise=1.0)
    s.method.round(s.federation, s.method.init(s.federation), s.federation.sample(0))
    assert s.engine.samples == 2 * s.federation.sizes.sum()


def test_frozen_layers_cost_less() -> None:
    """By hand: forward, the weight's own gradient, and the gradient that leads to what
    is trained below.
    """
    network = nn.Sequential(
        nn.Conv2d(1, 2, 3, bias=False),  # 2 · 9 · 4 positions
        nn.BatchNorm2d(2),
        nn.Flatten(),
        nn.Linear(8, 5),
        nn.Linear(5, 3),
    )
    found = cost(network, Shape((1, 4, 4), ()))
    conv, first, last = 72, 40, 15
    forward = conv + first + last
    everything = {name for name, _ in network.named_parameters()}
    assert found.training == found.training_of(everything)
    assert found.training == forward + conv + 2 * first + 2 * last
    assert found.training_of({"4.weight"}) == forward + last
    assert found.training_of({"3.bias"}) == forward + last, "no product makes it"
    assert found.training_of({"1.weight"}) == forward + first + last
    network[0].requires_grad_(False)
    network[1].requires_grad_(False)
    assert cost(network, Shape((1, 4, 4), ())).training == forward + first + 2 * last


def test_seeds_that_advance_together_share_seconds_and_not_samples(
    tmp_path: Path,
) -> None:
    options = {**COMMON, "seeds": [0, 1, 2], "out": tmp_path / "run"}
    run(keyword_settings(options))
    for seed in range(3):
        rounds = read_run(tmp_path / "run" / f"seed-{seed}").rounds
        assert rounds["trained_samples"].tolist() == [160, 160]
        assert rounds["engine_samples"].tolist() == [480, 480]


def test_counts_go_on_after_a_resume(tmp_path: Path) -> None:
    options = {"method": "ditto", "checkpoint_every": 1}
    whole = recorded(tmp_path / "whole", **options)
    half = recorded(tmp_path / "half", **options, rounds=1)
    run(keyword_settings({"resume": half.folder, "rounds": ROUNDS}))
    for name in ("trained_samples", "trained_steps", "train_flops", "longest_steps"):
        counted = read_run(half.folder).rounds[name]
        assert counted.tolist() == whole.rounds[name].tolist(), name


def test_older_files_say_that_nobody_has_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = recorded(tmp_path).folder
    cli.main(["show", str(folder)])
    said = capsys.readouterr().out
    assert "samples trained on" in said and " 320 " in f"{said} ".replace("\n", " ")
    with h5py.File(folder / "run.h5", "r+") as file:
        for group in ("rounds", "timing"):
            for name in list(file[group]):
                if "samples" in name or "steps" in name or "flops" in name:
                    del file[group][name]
    cli.main(["show", str(folder)])
    said = capsys.readouterr().out
    assert "unknown: an older version did not count them" in said
    assert "FLOP" not in said and "local steps" not in said
    sample = Process((read_run(folder),), 0, "")
    assert np.isnan(sample.samples_per_second)


def test_a_run_does_not_inherit_the_peak_memory_of_its_parent(tmp_path: Path) -> None:
    """As Linux would have it by getrusage: a study's runs would all have the study's."""
    large = 300 * 2**20
    held = np.ones(large, np.uint8)  # every page of it is touched
    program = "from hpcfed.runtime.machine import peak; print(peak())"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert 2**20 < int(done.stdout) < large <= machine.peak()
    assert held[-1] == 1
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmHWM:\t   12 kB\nVmRSS:\t   8 kB\n")
    assert machine.peak(status) == 12 * 1024
    assert machine.peak(tmp_path / "none") > large, "where there is no such file"
