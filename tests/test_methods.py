"""FedAvg, FedAvg-FT and Local-only against their definitions, in one process."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hpcfed import cli, methods
from hpcfed.clients.capture import Replays
from hpcfed.clients.job import Losses, TrainingJob
from hpcfed.experiment.evaluate import evaluate
from hpcfed.federation.cohort import shares
from hpcfed.federation.log import RoundLog
from hpcfed.models.networks import build
from hpcfed.results.stored import read_run
from tests.federations import assembled, trained_alone


def test_fedavg_is_the_weighted_mean_of_rows_trained_from_w() -> None:
    s = assembled(alpha=0.3)
    fed, method = s.federation, s.method
    state = method.init(fed)
    for round in range(2):
        expected = torch.zeros_like(state.w)
        for client in range(4):
            expected += (
                fed.sizes[client]
                / fed.sizes.sum()
                * trained_alone(s, state.w, client, round)
            )
        state = method.round(fed, state, fed.sample(round))
        torch.testing.assert_close(state.w, expected, rtol=1e-10, atol=1e-12)


def test_losses_are_means_over_training_data_and_change_nothing() -> None:
    """Each member is judged at its own row; what a method asks for is not the round's loss."""
    s = assembled(alpha=0.3, participation=0.5, model="cnn-bn")
    fed = s.federation
    cohort = fed.sample(0)
    row = fed.initial_row()
    rows = row + 0.01 * torch.arange(len(cohort.here))[:, None]
    network = build("cnn-bn", shape=(1, 8, 8), classes=10, seed=0).double().eval()
    data = fed.training.train_data
    expected = []
    for of_member, client in zip(rows, cohort.here, strict=True):
        views = fed.layout.views(of_member[None])
        weights = {name: tensor[0] for name, tensor in views.items()}
        own = data.index[client, : data.sizes[client]]
        outputs = torch.func.functional_call(network, weights, data.inputs[own])
        expected.append(F.cross_entropy(outputs, data.targets[own]))
    found = fed.losses(rows, cohort)
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-10, atol=1e-12)
    assert cohort.log.summed_losses() == RoundLog().summed_losses()
    assert cohort.log.train_flops > 0


def test_fedavg_on_a_quadratic_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients with targets 0, 10 and 4 and one exact step each: the mean is weighted by
    their samples.
    """
    s = assembled(clients=3)
    fed = s.federation
    targets = torch.tensor([0.0, 10.0, 4.0], dtype=torch.float64)
    fed.members.sizes = fed.members.weights = np.array([1, 3, 0])

    def to_target(job: TrainingJob) -> tuple[Tensor, Losses]:
        goals = targets[torch.from_numpy(job.clients)].unsqueeze(1)
        nothing = torch.zeros(len(job.rows))
        return 0.5 * (goals + job.rows), Losses(nothing, nothing)

    monkeypatch.setattr(s.engine, "train", to_target)
    state = s.method.init(fed)
    start = state.w.clone()
    state = s.method.round(fed, state, fed.sample(0))
    torch.testing.assert_close(state.w, 0.5 * start + 0.5 * (0.25 * 0 + 0.75 * 10))


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=300))
def test_weights_sum_to_one_and_follow_sizes(sizes: list[int]) -> None:
    weights = shares(np.array(sizes))
    assert weights.sum() == pytest.approx(1, abs=1e-12)
    if sum(sizes):
        assert all((w == 0) == (n == 0) for w, n in zip(weights, sizes, strict=True))
        assert weights.max() == weights[int(np.argmax(sizes))]


def test_a_client_without_data_changes_nothing() -> None:
    """Twenty clients of which many are empty: only the others are in the cohort, in its
    weights and in its bytes.
    """
    s = assembled(clients=20, alpha=0.01, participation=0.5, method="fedau")
    fed = s.federation
    holders = np.flatnonzero(fed.sizes)
    assert len(holders) < 20, (
        "the partition has no empty client: choose a smaller alpha"
    )
    whole, state = (
        assembled(clients=20, alpha=100.0, participation=0.5).federation,
        s.method.init(fed),
    )
    for round in range(6):
        drawn, cohort = whole.sample(round).clients, fed.sample(round)
        assert len(drawn) == 10, "where all have data, all that are drawn take part"
        assert np.array_equal(cohort.clients, np.intersect1d(drawn, holders)), (
            "the draw is the same"
        )
        assert np.array_equal(
            cohort.weights, fed.weights[cohort.clients] / fed.weights[drawn].sum()
        )
        before, state = state, s.method.round(fed, state, cohort)
        log = cohort.log
        assert log.cohort_size == len(cohort.clients) < 10
        expected = log.cohort_size * fed.layout.num_columns * 8
        assert log.bytes_up == log.bytes_down == expected
        two_epochs = fed.recipe(round, 2)
        rows = torch.stack(
            [
                fed.train_alone(before.w, client, round, recipe=two_epochs)
                for client in cohort.here
            ]
        )
        step = before.omega[cohort.clients] @ (rows - before.w) / len(holders)
        torch.testing.assert_close(state.w, before.w + step, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", ["fedavg", "fedper", "fedlp", "genfed", "fedumf"])
def test_a_cohort_in_which_nobody_has_data_counts_for_nothing(method: str) -> None:
    s = assembled(clients=20, alpha=0.01, participation=0.05, method=method)
    fed, state = s.federation, s.method.init(s.federation)
    round = next(
        round for round in range(100) if not fed.sizes[fed.sample(round).clients].any()
    )
    before = s.method.personal(fed, state, np.arange(20)).clone()
    cohort = fed.sample(round)
    state, log = s.method.round(fed, state, cohort), cohort.log
    torch.testing.assert_close(s.method.personal(fed, state, np.arange(20)), before)
    assert (log.cohort_size, log.bytes_up, int(log.bytes_up_here)) == (0, 0, 0)
    everyone = np.count_nonzero(fed.sizes) * fed.layout.num_columns * 8
    assert log.bytes_down == (everyone if method == "fedumf" else 0)
    assert log.selected is None or not len(log.selected)


def test_clients_without_data_are_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--model",
        "mlp",
        "--clients",
        "2500",
        "--new-clients",
        "2500",
        "--rounds",
        "1",
        "--epochs",
        "1",
    ]
    cli.main(
        [
            "run",
            *words,
            "--new-updates",
            "1",
            "--device",
            "cpu",
            "--out",
            str(tmp_path / "many"),
        ]
    )
    said, record = capsys.readouterr().err, read_run(tmp_path / "many")
    empty, unjudged = (
        np.count_nonzero(record.train_samples == 0),
        np.count_nonzero(np.isnan(record.client_accuracy[0])),
    )
    assert f"2,500 clients, {empty:,} without training data (never trained)" in said
    assert f" {unjudged:,} without test data (never judged); use fewer clients" in said
    assert "2,500 new clients, " in said
    assert record.rounds["cohort"].tolist() == [2500 - empty]
    assert record.newcomer_bytes == 4 * record.facts["columns"], (
        "of those that have data, each is sent a row"
    )
    cli.main(
        [
            "run",
            "--model",
            "mlp",
            "--clients",
            "4",
            "--alpha",
            "9",
            "--rounds",
            "1",
            "--out",
            str(tmp_path / "few"),
        ]
    )
    assert "without training data" not in capsys.readouterr().err


def test_a_cohort_without_any_data_keeps_the_model() -> None:
    s = assembled()
    s.federation.members.sizes = np.zeros(4, np.int64)
    cohort = s.federation.sample(0)
    w = s.federation.initial_row()
    rows = w.repeat(len(cohort.here), 1)
    torch.testing.assert_close(s.federation.mean(rows, cohort), w, rtol=1e-15, atol=0)


def test_both_ways_of_summing_agree() -> None:
    plain, ordered = assembled(clients=7), assembled(clients=7, deterministic=True)
    rows = torch.randn(7, plain.federation.layout.num_columns, dtype=torch.float64)
    means = [s.federation.mean(rows, s.federation.sample(0)) for s in (plain, ordered)]
    torch.testing.assert_close(*means, rtol=1e-12, atol=1e-14)
    torch.set_deterministic_debug_mode("default")


def test_the_cohort_depends_on_seed_and_round_alone() -> None:
    cohorts = [
        assembled(clients=50, participation=0.3, seed=seed).federation.sample(4).clients
        for seed in (0, 0, 1)
    ]
    assert len(cohorts[0]) == 15 and len(np.unique(cohorts[0])) == 15
    assert np.array_equal(cohorts[0], cohorts[1])
    assert not np.array_equal(cohorts[0], cohorts[2])
    later = assembled(clients=50, participation=0.3).federation.sample(5).clients
    assert not np.array_equal(cohorts[0], later)


def test_participation_never_samples_nobody() -> None:
    assert (
        len(assembled(clients=10, participation=0.01).federation.sample(0).clients) == 1
    )


def test_local_clients_never_hear_of_each_other() -> None:
    s = assembled(method="local", participation=0.5)
    fed = s.federation
    state = s.method.init(fed)
    cohort = fed.sample(0)
    rows = state.rows.clone()
    state = s.method.round(fed, state, cohort)
    for client in range(4):
        expected = (
            trained_alone(s, rows[client], client, 0)
            if client in cohort.clients
            else rows[client]
        )
        torch.testing.assert_close(state.rows[client], expected, rtol=1e-10, atol=1e-12)
    assert cohort.log.bytes_up == cohort.log.bytes_down == 0
    assert s.method.global_row(state) is None


@pytest.mark.parametrize("method", ["fedavg", "pfedhn"])
def test_augmented_training_is_another_training(method: str) -> None:
    """Also where a method brings its own SGD; black is what raw zeros have become."""
    plain, augmented = (
        assembled(method=method, clients=3, rounds=1, model="mlp", augment=how)
        for how in ("none", "crop-flip")
    )
    rows = []
    for s in (plain, augmented):
        fed = s.federation
        state = s.method.round(fed, s.method.init(fed), fed.sample(0))
        rows.append(s.method.personal(fed, state, np.arange(3)))
        blank = fed.training.train_data.blank
        assert blank is not None and float(blank) == pytest.approx(
            float(fed.training.train_data.inputs.min()), abs=1e-6
        )
    assert not torch.allclose(rows[0], rows[1])


def test_fine_tuning_is_judged_but_not_kept() -> None:
    s = assembled(method="fedavg-ft", alpha=0.1)
    state = s.method.init(s.federation)
    before = state.w.clone()
    tuned = s.method.personal(s.federation, state, np.arange(4))
    assert torch.equal(state.w, before)
    assert all(not torch.equal(row, before) for row in tuned)
    assert evaluate(s, state).accuracy > 1.5 * evaluate(s, state).global_accuracy


def test_head_only_fine_tuning_keeps_the_body() -> None:
    none = assembled(method="fedavg-ft", finetune_epochs=0)
    rows = none.method.personal(
        none.federation, none.method.init(none.federation), np.arange(4)
    )
    assert torch.equal(rows, none.federation.initial_row().expand(4, -1))
    s = assembled(method="fedavg-ft", finetune="head", finetune_epochs=3)
    state = s.method.init(s.federation)
    tuned = s.method.personal(s.federation, state, np.arange(4))
    head = s.federation.layout.mask([s.federation.layout.head])
    assert torch.equal(tuned[:, ~head], state.w[~head].expand(4, -1))
    assert not torch.equal(tuned[0, head], state.w[head])


def test_accuracy_is_the_mean_over_clients_with_test_data() -> None:
    s = assembled(clients=30, alpha=0.02)
    state = s.method.init(s.federation)
    result = evaluate(s, state)
    tested = s.clients.test_samples > 0
    assert 0 < tested.sum() < 30, "the case needs clients with and without test data"
    assert np.isnan(result.client_accuracy[~tested]).all()
    assert result.accuracy == pytest.approx(result.client_accuracy[tested].mean())
    # Dirichlet spreads the test set completely, so the clients' answers add up to the
    # global model's.
    right = np.nansum(result.client_accuracy * s.clients.test_samples)
    assert right == pytest.approx(result.global_accuracy * s.global_test_size)


def test_every_method_has_a_line_and_welcomes_newcomers() -> None:
    named = {
        "fedlg": {"gene_pools": "fc1"},
        **{name: {"shared_layers": "fc1"} for name in ("parfed", "fedfina")},
    }
    for name, line in methods.summaries().items():
        assert line, f"{name} has no docstring"
        s = assembled(method=name, **named.get(name, {}))
        state = s.method.init(s.federation)
        cohort = s.federation.everyone(0).only(np.arange(2))[1]
        rows = s.method.welcome(s.federation, state, cohort)
        assert (
            rows.shape == (2, s.federation.layout.num_columns) and rows.isfinite().all()
        )
        # pFedHN generates rows, and in clusters everybody draws the head for itself.
        layout = s.federation.layout
        # Adapters are layers inside of it.
        known = layout.mask(name for name in layout.layers if name.startswith("fc1"))
        expected = s.federation.initial_row()[known]
        if name == "hetlora":
            # A client of a lower rank gets the first components.
            there = rows[0, known] != 0
            assert torch.equal(rows[0, known][there], expected[there])
            continue
        assert torch.equal(rows[0, known], expected) or name == "pfedhn", name


def test_bytes_are_what_the_method_sends() -> None:
    s = assembled(clients=10, participation=0.3)
    state = s.method.init(s.federation)
    cohort = s.federation.sample(0)
    s.method.round(s.federation, state, cohort)
    expected = 3 * s.federation.layout.num_columns * 8
    assert cohort.log.bytes_up == cohort.log.bytes_down == expected


def test_layout_matches_the_papers_counts() -> None:
    from hpcfed.models.layout import Layout
    from hpcfed.models.networks import build

    def layout(name: str, shape: tuple[int, int, int], classes: int) -> Layout:
        return Layout.of(build(name, shape=shape, classes=classes, seed=0))

    cifar = layout("cnn-cifar", (3, 32, 32), 10)
    assert cifar.num_columns == 107_690
    assert int(cifar.mask(["fc1", "head"]).sum()) == 75_146
    assert (
        int(layout("cnn-emnist", (1, 28, 28), 62).mask(["fc1", "head"]).sum())
        == 110_526
    )
    resnet = layout("resnet18", (3, 32, 32), 10)
    assert resnet.num_columns == 11_183_562
    assert resnet.num_columns - resnet.num_parameters == 9_600
    assert resnet.head == "fc"
    # Convolutions 3 · 32 · 9 + 32 = 896 and 32 · 32 · 9 + 32 = 9,248 leave 32 · 6 · 6 =
    # 1,152 features (32 → 30 → 15 → 13 → 6 pixels); then 1,152 · 256 + 256 = 295,168,
    # 256 · 128 + 128 = 32,896, 128 · 64 + 64 = 8,256 and 64 · 10 + 10 = 650.
    three = layout("cnn-genfed-three", (3, 32, 32), 10)
    assert three.num_columns == 896 + 9_248 + 295_168 + 32_896 + 8_256 + 650 == 347_114
    assert 9_000 < layout("cnn-fmnist", (1, 28, 28), 10).num_columns < 12_500
    # Convolutions 3 · 6 · 25 + 6 = 456 and 6 · 16 · 25 + 16 = 2,416 leave 16 · 5 · 5 =
    # 400 features; then 400 · 120 + 120 = 48,120, 10,164 and 850.
    lenet = layout("cnn-lenet", (3, 32, 32), 10)
    assert lenet.num_columns == 456 + 2_416 + 48_120 + 10_164 + 850 == 62_006
    # Convolutions 1 · 32 · 25 + 32 = 832 and 32 · 64 · 25 + 64 = 51,264 leave 64 · 4 · 4 =
    # 1,024 features; then 1,024 · 512 + 512 = 524,800 and 5,130.
    pfllib = layout("cnn-pfllib", (1, 28, 28), 10)
    assert pfllib.num_columns == 832 + 51_264 + 524_800 + 5_130 == 582_026
    # Group norm has no running statistics. The wide stem has 3 · 64 · (49 − 9) = 7,680
    # weights more, a head for 100 classes 90 · 513 = 46,170.
    groups = layout("resnet18-gn", (3, 32, 32), 100)
    assert groups.num_columns == groups.num_parameters
    assert groups.num_columns == resnet.num_parameters + 7_680 + 46_170
    # A max-pool has no weights, and halves the sides of all stages.
    pooled = build("resnet18-pool", shape=(3, 32, 32), classes=10, seed=0).eval()
    assert Layout.of(pooled).num_columns == resnet.num_columns
    sizes = []
    pooled.layer1.register_forward_hook(lambda _, __, out: sizes.append(out.shape))
    pooled(torch.zeros(1, 3, 32, 32))
    assert sizes == [(1, 64, 16, 16)]


def test_rows_and_networks_round_trip() -> None:
    from hpcfed.models.layout import Layout
    from hpcfed.models.networks import build

    network = build("resnet18", shape=(3, 32, 32), classes=10, seed=3)
    layout = Layout.of(network)
    views = layout.views(layout.row(network).unsqueeze(0))
    for name, tensor in network.state_dict().items():
        if tensor.is_floating_point():
            assert torch.equal(views[name][0], tensor)
    again = build("resnet18", shape=(3, 32, 32), classes=10, seed=3)
    assert torch.equal(layout.row(again), layout.row(network))
    assert not torch.equal(
        layout.row(build("resnet18", shape=(3, 32, 32), classes=10, seed=4)),
        layout.row(network),
    )


def test_the_learning_rate_decays_by_round(monkeypatch: pytest.MonkeyPatch) -> None:
    s = assembled(lr=0.5, lr_decay=0.9)
    rates = []
    original = s.engine.train

    def noting_the_rate(job: TrainingJob) -> tuple[Tensor, Losses]:
        rates.append(job.recipe.lr)
        return original(job)

    monkeypatch.setattr(s.engine, "train", noting_the_rate)
    state = s.method.init(s.federation)
    for round in range(3):
        state = s.method.round(s.federation, state, s.federation.sample(round))
    assert rates == pytest.approx([0.5, 0.45, 0.405])


def test_a_client_that_diverged_does_not_lower_the_training_loss() -> None:
    log = RoundLog()
    means = torch.tensor([2.0, torch.nan, torch.nan, torch.inf])
    log.add_losses(Losses(means, torch.tensor([100, 100, 0, 50])))
    log.add_losses(Losses(torch.tensor([5.0]), torch.tensor([50])))
    assert float(log.loss_sum) / int(log.samples_seen) == pytest.approx(3.0)


def test_a_round_like_the_last_ones_uploads_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keys, clients, sizes, weights and rates are on the device already. Without a GPU:
    a replay does nothing, since only what the host prepares for it counts.
    """

    def recorded(function: Callable[[], None]) -> SimpleNamespace:
        return SimpleNamespace(replay=lambda: None)

    def begin(self: Replays, *_: object, **__: object) -> None:
        self._on, self._may_fail, self._graphs = True, False, {}
        self._recorder = SimpleNamespace(record=recorded, forget=lambda: None)

    monkeypatch.setattr(Replays, "__init__", begin)
    s = assembled(participation=1.0)
    fed, state, uploads = s.federation, s.method.init(s.federation), []

    def uploading(array: np.ndarray) -> Tensor:
        uploads.append(array)
        return on_host(array)

    on_host = torch.from_numpy
    monkeypatch.setattr(torch, "from_numpy", uploading)
    in_round = []
    for round in range(10):
        cohort = fed.sample(round)
        state = s.method.round(fed, state, cohort)
        assert cohort.log.loss_sum > 0
        in_round.append(len(uploads))
        uploads.clear()
    # The first rounds prepare what the others find there: the second one, keys ahead.
    assert in_round[0] and in_round[1] and not any(in_round[4:]), in_round
