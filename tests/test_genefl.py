"""GENE-FL and its baselines against naive loops of their rules; clusters, bytes, new
clients, a server that steals.
"""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcfed import methods
from hpcfed.attacks import idlg
from hpcfed.cli import parse_run
from hpcfed.clients import engine as engines
from hpcfed.clients import fisher as fishers
from hpcfed.clients.engine import Engine
from hpcfed.clients.fisher import Fisher
from hpcfed.clients.job import Recipe, TrainingJob
from hpcfed.clients.pull import Pull, Strengths
from hpcfed.clients.training import StackTraining
from hpcfed.data import PartitionPlan
from hpcfed.data.partition import partition
from hpcfed.experiment import checkpointing, newcomers
from hpcfed.experiment.assemble import Setup
from hpcfed.experiment.evaluate import evaluate, standing_accuracy
from hpcfed.experiment.newcomers import new_rounds
from hpcfed.experiment.opening import opening_lines
from hpcfed.experiment.progress import RunProgress
from hpcfed.experiment.run import run
from hpcfed.federation.clustering import (
    _first_vectors,
    assign,
    canonical,
    nearest_in_turn,
    principal_angles,
)
from hpcfed.federation.cohort import Cohort, Sent
from hpcfed.federation.federation import Federation
from hpcfed.federation.log import RoundLog
from hpcfed.methods import clustered_fedavg, genefl
from hpcfed.models.cost import cost
from hpcfed.models.kernel_layout import KernelLayout
from hpcfed.models.layout import Layout
from hpcfed.models.networks import build
from hpcfed.models.own import Sample
from hpcfed.results.run import RunRecord
from hpcfed.results.stored import read_run
from hpcfed.runtime import randomness
from hpcfed.runtime.signals import Stop
from tests.federations import assembled, rounds, traffic, trained_alone
from tests.naive import batches, make_shard
from tests.runs import UNEVEN, assert_same_run, mistake, same, same_newcomers, started

MIB, GIB = 2**20, 2**30
SHARDS: dict[str, Any] = {
    "partition": "sharding",
    "classes_per_client": 2,
    "clients": 6,
    "participation": 0.7,
}
SMALL: dict[str, Any] = {
    **SHARDS,
    "model": "cnn-bn",
    "epochs": 1,
    "batch_size": 40,
    "clusters": 2,
}
NAMED: dict[str, dict[str, Any]] = {
    "parfed": {"shared_layers": "conv2"},
    "fedfina": {"shared_layers": "conv1,conv2"},
    "fedlg": {"gene_pools": "conv1,conv2/fc1,head", "gene_each": 1},
    "fedlps": {"prune_ratio": 0.5},
}
"""What stands for layers of ResNet-18 in the small network."""
FAMILY = [
    "clustered-fedavg",
    "fedbn",
    "parfed",
    "fedfina",
    "fedlp",
    "fedlps",
    "fedlg",
    "genefl",
]


def small(method: str, **values: Any) -> Setup:
    return assembled(method=method, **SMALL | NAMED.get(method, {}) | values)


def options(**values: Any) -> genefl.Options:
    return genefl.Options(**values)


# The pull in the loss, and the Fisher information


def pulled_alone(
    network: nn.Module,
    row: Tensor,
    client: int,
    shard: Any,
    sgd: Recipe,
    key: Tensor,
    pull: Pull,
) -> Tensor:
    """One client alone in plain torch, with the terms written as in the paper."""
    layout, network = Layout.of(network), copy.deepcopy(network).double().train()
    load(network, layout, row)
    reference, mask = (
        layout.views(own[client][None].double()) for own in (pull.reference, pull.mask)
    )
    optimiser = torch.optim.SGD(
        network.parameters(),
        lr=sgd.lr,
        momentum=sgd.momentum,
        weight_decay=sgd.weight_decay,
    )

    def norm(names: list[str], masked: bool) -> Tensor:
        parts = [
            (p - reference[n][0]) * (mask[n][0] if masked else 1)
            for n, p in network.named_parameters()
            if n in names
        ]
        return (sum(part.square().sum() for part in parts) + 1e-12).sqrt()

    every = [name for name, _ in network.named_parameters()]
    blocks = [
        [n for n in every if n.rpartition(".")[0] in block] for block in layout.blocks
    ]
    for batch in batches(shard, client, sgd, key):
        optimiser.zero_grad()
        loss = F.cross_entropy(network(shard.inputs[batch]), shard.targets[batch])
        loss = loss + pull.strengths.layers * sum(
            norm(block, False) for block in blocks
        )
        loss = (
            loss
            + pull.strengths.whole * norm(every, False)
            + pull.strengths.masked * norm(every, True)
        )
        loss.backward()
        if sgd.clip:
            nn.utils.clip_grad_norm_(network.parameters(), sgd.clip)
        optimiser.step()
    return layout.row(network, dtype=torch.float64)


def load(network: nn.Module, layout: Layout, row: Tensor) -> None:
    own = {name: view[0] for name, view in layout.views(row[None]).items()}
    network.load_state_dict(network.state_dict() | own)


@pytest.mark.parametrize("mode", ["batched", "loop"])
def test_the_pull_is_the_gradient_of_its_terms(
    mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard, network = (
        make_shard((1, 8, 8), (5, 9, 12, 3), torch.float64),
        build("cnn-bn", shape=(1, 8, 8), classes=10, seed=0),
    )
    layout = Layout.of(network)
    engine = Engine(network, layout, shape=(1, 8, 8), mode=mode)
    # Stacks of two, so that references and masks must follow their clients.
    monkeypatch.setattr(engines, "CPU_ACTIVATIONS", 2 * 4 * engine.cost.activations)
    first = layout.row(network, dtype=torch.float64)
    rows = first + 0.1 * torch.rand(4, layout.num_columns, dtype=torch.float64)
    pull = Pull(
        Strengths(0.3, 0.2, 0.5),
        first + 0.1 * torch.rand_like(rows),
        torch.rand_like(rows) < 0.4,
    )
    keys, sgd = (
        torch.arange(4) + 77,
        Recipe(2, 4, 0.05, momentum=0.9, weight_decay=0.01, clip=1.0),
    )
    trained, losses = engine.train(
        TrainingJob(rows, shard, np.arange(4), sgd, keys=keys, pull=pull)
    )
    for client in range(4):
        expected = pulled_alone(
            network, rows[client], client, shard, sgd, keys[client], pull
        )
        torch.testing.assert_close(trained[client], expected, rtol=1e-9, atol=1e-11)
    free, _ = engine.train(TrainingJob(rows, shard, np.arange(4), sgd, keys=keys))
    assert not torch.allclose(free, trained) and losses.mean.isfinite().all()


def test_fisher_information_leaves_cudnn_as_it_is() -> None:
    network, seen = build("cnn-bn", shape=(1, 8, 8), classes=10, seed=0), list[bool]()
    network.register_forward_hook(lambda *_: seen.append(torch.backends.cudnn.enabled))
    shard, layout = make_shard((1, 8, 8), (5,), torch.float64), Layout.of(network)
    engine = Engine(network, layout, shape=(1, 8, 8))
    seen.clear()
    engine.fisher(layout.row(network, dtype=torch.float64)[None], shard, np.arange(1))
    assert seen and all(seen)


def test_a_client_that_diverged_leaves_nothing_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows as they lie on a GPU, with columns without meaning between the tensors."""
    monkeypatch.setattr(
        engines,
        "KernelLayout",
        lambda layout, device: KernelLayout(layout, torch.device("cuda")),
    )
    shard, network = (
        make_shard((1, 8, 8), (9, 12), torch.float64),
        build("cnn-bn", shape=(1, 8, 8), classes=10, seed=0),
    )
    layout = Layout.of(network)
    rows = layout.row(network, dtype=torch.float64) + 0.1 * torch.rand(
        2, layout.num_columns, dtype=torch.float64
    )
    pull = Pull(
        Strengths(0.3, 0.2, 0.5), torch.zeros_like(rows), torch.rand_like(rows) < 0.4
    )
    sgd, clients, keys = (
        Recipe(2, 4, 0.05, momentum=0.9, weight_decay=0.01, clip=1.0),
        np.arange(2),
        torch.arange(2),
    )

    def after(*starts: Tensor) -> Tensor:
        engine = Engine(network, layout, shape=(1, 8, 8), mode="batched")
        *_, (trained, _) = [
            engine.train(TrainingJob(start, shard, clients, sgd, keys=keys, pull=pull))
            for start in starts
        ]
        return trained

    expected = after(rows)
    assert expected.isfinite().all() and torch.equal(
        after(torch.full_like(rows, torch.nan), rows), expected
    )


def test_frozen_columns_keep_their_bits_under_a_pull() -> None:
    shard, network = (
        make_shard((1, 8, 8), (9, 12), torch.float64),
        build("cnn-bn", shape=(1, 8, 8), classes=10, seed=0),
    )
    layout = Layout.of(network)
    engine = Engine(network, layout, shape=(1, 8, 8))
    rows = layout.row(network, dtype=torch.float64) + torch.rand(
        2, layout.num_columns, dtype=torch.float64
    )
    columns, pull = (
        layout.mask(["conv2", "head"]),
        Pull(Strengths(whole=1.0), torch.zeros_like(rows)),
    )
    columns[layout.entries[0].start + 3] = True  # within a tensor
    sgd = Recipe(6, 4, 1e-3, momentum=0.9, weight_decay=0.01, clip=1.0)
    trained, _ = engine.train(
        TrainingJob(
            rows,
            shard,
            np.arange(2),
            sgd,
            keys=torch.arange(2),
            columns=columns,
            pull=pull,
        )
    )
    assert torch.equal(trained[:, ~columns], rows[:, ~columns])
    assert trained.isfinite().all() and (trained[:, columns] != rows[:, columns]).all()


@pytest.mark.parametrize("mode", ["batched", "loop"])
def test_gates_hold_what_a_client_has_not_at_zero(mode: Any) -> None:
    """As if each client was trained alone with these columns frozen."""
    shard, network = (
        make_shard((1, 8, 8), (9, 12), torch.float64),
        build("cnn-bn", shape=(1, 8, 8), classes=10, seed=0),
    )
    layout = Layout.of(network)
    engine = Engine(network, layout, shape=(1, 8, 8), mode=mode)
    gates = torch.rand(2, layout.num_columns) < 0.7
    gates[:, layout.num_parameters :] = True  # running statistics are not gated
    rows = layout.row(network, dtype=torch.float64) * gates
    sgd = Recipe(2, 4, 0.05, momentum=0.9, weight_decay=0.01, clip=1.0)
    trained, _ = engine.train(
        TrainingJob(rows, shard, np.arange(2), sgd, keys=torch.arange(2), gates=gates)
    )
    assert not trained[~gates].any() and not torch.equal(trained, rows)
    for client in range(2):
        alone, _ = engine.train(
            TrainingJob(
                rows[[client]],
                shard,
                np.array([client]),
                sgd,
                keys=torch.tensor([client]),
                columns=gates[client],
            )
        )
        torch.testing.assert_close(trained[client], alone[0], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("floats", [1, 30_000, 2**28])
@pytest.mark.parametrize("model", ["mlp", "cnn-bn"])
def test_fisher_information_is_the_mean_of_squared_gradients_of_samples(
    model: str, floats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fishers, "CPU_FLOATS", floats)
    sizes = (5, 0, 7, 1)
    shard, network = (
        make_shard((1, 8, 8), sizes, torch.float64),
        build(model, shape=(1, 8, 8), classes=10, seed=0),
    )
    layout = Layout.of(network)
    fisher = Fisher(network, layout, Engine(network, layout, shape=(1, 8, 8)).cost)
    rows = layout.row(network, dtype=torch.float64) + 0.1 * torch.rand(
        4, layout.num_columns, dtype=torch.float64
    )
    clients = np.array([2, 1, 3, 0])
    found = fisher(rows, shard, clients)
    for row, client, own in zip(rows, clients, found, strict=True):
        plain = copy.deepcopy(network).double().eval()
        load(plain, layout, row)
        total = torch.zeros(layout.num_columns, dtype=torch.float64)
        for sample in shard.index[client, : sizes[client]]:
            plain.zero_grad()
            F.log_softmax(plain(shard.inputs[sample][None]), 1)[
                0, shard.targets[sample]
            ].backward()
            total[: layout.num_parameters] += torch.cat(
                [p.grad.flatten() for p in plain.parameters()]
            ).square()
        torch.testing.assert_close(
            own, total / max(1, sizes[client]), rtol=1e-10, atol=1e-14
        )
    assert network.training, "the network of others stays as it is"


@pytest.mark.parametrize(
    "convolution",
    [
        nn.Conv2d(1, 4, (3, 2), stride=(1, 2), padding=(1, 0), dilation=(2, 1)),
        nn.Conv2d(1, 4, 3, padding="same"),
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3, groups=2)),
    ],
    ids=["uneven", "same", "grouped"],
)
def test_fisher_information_of_any_convolution(convolution: nn.Module) -> None:
    network = nn.Sequential(convolution, nn.Flatten(), nn.LazyLinear(10))
    network(torch.zeros(1, 1, 8, 8))
    shard = make_shard((1, 8, 8), (3,), torch.float64)
    layout = Layout.of(network)
    row = layout.row(network, dtype=torch.float64)
    fisher = Fisher(network, layout, cost(network, Sample((1, 8, 8), ())))
    found = fisher(row[None], shard, np.array([0]))
    network.double()
    squares = torch.zeros_like(row)
    for sample in shard.index[0]:
        answer = network(shard.inputs[sample][None])
        loss = F.cross_entropy(answer, shard.targets[sample][None])
        gradients = torch.autograd.grad(loss, list(network.parameters()))
        squares += torch.cat([g.flatten() for g in gradients]).square()
    torch.testing.assert_close(found[0], squares / 3, rtol=1e-10, atol=1e-14)


def test_fisher_information_of_resnet18() -> None:
    """Residual sums, activations in place and batch norm by its running statistics."""
    shard, network = (
        make_shard((3, 4, 4), (2,), torch.float64),
        build("resnet18", shape=(3, 4, 4), classes=10, seed=0),
    )
    layout = Layout.of(network)
    row = layout.row(network, dtype=torch.float64)
    found = Fisher(network, layout, Engine(network, layout, shape=(3, 4, 4)).cost)(
        row[None], shard, np.arange(1)
    )[0]
    plain, total = (
        copy.deepcopy(network).double().eval(),
        torch.zeros(layout.num_parameters, dtype=torch.float64),
    )
    for sample in shard.index[0]:
        plain.zero_grad()
        F.cross_entropy(
            plain(shard.inputs[sample][None]), shard.targets[sample][None]
        ).backward()
        total += torch.cat([p.grad.flatten() for p in plain.parameters()]).square()
    torch.testing.assert_close(
        found[: layout.num_parameters], total / 2, rtol=1e-10, atol=1e-16
    )
    assert not found[layout.num_parameters :].any()


def test_blocks_follow_each_other_in_plain_rows_and_in_the_kernels_layout() -> None:
    layout = Layout.of(build("cnn-bn", shape=(1, 8, 8), classes=10, seed=0))
    assert layout.blocks == (("conv1", "bn1"), ("conv2", "bn2"), ("fc1",), ("head",))
    for number, (start, stop) in enumerate(layout.block_spans):
        assert layout.block_of[start:stop].unique().tolist() == [number]
    assert layout.block_spans[-1][1] == layout.num_parameters
    aligned = KernelLayout(layout, torch.device("cuda"))
    for (start, stop), block in zip(aligned.block_spans, layout.blocks, strict=True):
        own = [e for e in aligned.entries if e.trainable and e.layer in block]
        assert start == own[0].start and own[-1].stop <= stop < own[-1].stop + 4


# Clusters


def three_groups(seed: int = 0) -> np.ndarray:
    """Bases of ten clients [10, 20, 3] around three centres."""
    draw = np.random.default_rng(seed)
    centres = [np.linalg.qr(draw.standard_normal((20, 3)))[0] for _ in range(3)]
    noisy = [centres[i % 3] + 0.05 * draw.standard_normal((20, 3)) for i in range(10)]
    return np.stack(
        [canonical(torch.from_numpy(np.linalg.qr(base)[0])).numpy() for base in noisy]
    )


@pytest.mark.parametrize("how", ["kmeans", "angles"])
def test_clusters_do_not_depend_on_the_order_of_clients(how: Any) -> None:
    bases, order = three_groups(), np.random.default_rng(1).permutation(10)
    found = assign(bases, 3, how=how, seed=5)
    assert len({tuple(np.flatnonzero(found == k) % 3) for k in range(3)}) == 3
    assert all(len(set(found[i::3])) == 1 for i in range(3)), (
        "clients of a group are together"
    )
    np.testing.assert_array_equal(
        assign(bases[order], 3, how=how, seed=5), found[order]
    )


def test_clusters_do_not_depend_on_the_signs_of_singular_vectors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, eigh = [0], torch.linalg.eigh
    expected = small("clustered-fedavg", clients=9, clusters=3)
    before = expected.method.init(expected.federation)

    def flipped(matrix: Tensor) -> tuple[Tensor, Tensor]:
        calls[0] += 1
        values, vectors = eigh(matrix)
        return values, vectors * (-1.0 if calls[0] % 2 else 1.0)

    monkeypatch.setattr(torch.linalg, "eigh", flipped)
    after = expected.method.init(expected.federation)
    assert (
        calls[0] == 9
        and torch.equal(before.cluster, after.cluster)
        and torch.equal(before.centres, after.centres)
    )
    assert sorted(before.members.tolist())[-1] < 9, "the case needs several clusters"


def test_a_basis_is_the_left_singular_vectors_of_features_by_samples() -> None:
    s = small("clustered-fedavg", clients=3)
    fed, data = s.federation, s.federation.train_data
    bases = fed.bases(5)
    assert bases.shape == (3, 64, 5)
    for client in range(3):
        x = data.inputs[data.index[client, : data.sizes[client]]].flatten(1).numpy()
        values, vectors = np.linalg.eigh(x.T @ x)
        for k in range(5):
            expected, own = vectors[:, np.argsort(-values)[k]], bases[client, :, k]
            assert own[np.abs(own).argmax()] > 0 and abs(
                expected @ own
            ) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("samples", [0, 2, 12, 30, 200])
def test_a_basis_is_the_same_from_few_and_from_many_samples(samples: int) -> None:
    """And has zeros where there are no more directions in the data, as in copies of
    three samples.
    """
    draw = torch.Generator().manual_seed(samples)
    images = torch.randn(samples, 1, 5, 6, generator=draw) * torch.arange(1, 31).view(
        1, 5, 6
    )
    found, rank = _first_vectors(images, 4), min(samples, 4)
    left = np.linalg.svd(
        images.flatten(1).numpy().T.astype(float), full_matrices=False
    )[0][:, :4]
    np.testing.assert_allclose(
        np.abs((left * found.numpy()[:, :rank]).sum(0)), np.ones(rank), rtol=1e-9
    )
    assert found.shape == (30, 4) and not found[:, rank:].any()
    if samples:
        thrice = _first_vectors(images[:3].repeat(20, 1, 1, 1), 4)
        torch.testing.assert_close(
            thrice, _first_vectors(images[:3], 4), rtol=0, atol=1e-9
        )
        assert not thrice[:, 3].any()


def test_angles_between_lines_and_planes_by_hand() -> None:
    e = np.eye(4)
    bases = np.stack([e[:, [0, 1]], e[:, [0, 2]], e[:, [2, 3]], np.zeros((4, 2))])
    np.testing.assert_allclose(
        principal_angles(bases),
        [[0, 45, 90, 90], [45, 0, 45, 90], [90, 45, 0, 90], [90, 90, 90, 0]],
        atol=1e-9,
    )


def test_new_clients_go_to_the_nearest_mean_which_then_moves() -> None:
    """Centres 0 and 10 of one client each: 4 goes to 0, whose mean becomes 2; then 5.9
    is nearer to it than to 10.
    """
    centres, points = np.array([[0.0], [10.0], [5.0]]), np.array([[4.0], [5.9], [6.9]])
    assert nearest_in_turn(points, centres, np.array([1, 1, 0]))[0].tolist() == [
        0,
        0,
        1,
    ]
    _, moved, members = nearest_in_turn(points, centres, np.array([1, 1, 0]))
    # (0 + 4 + 5.9) / 3, and (10 + 6.9) / 2.
    np.testing.assert_allclose(moved[:, 0], [3.3, 8.45, 5.0])
    assert members.tolist() == [3, 2, 0]
    assert centres[0] == 0, "the caller's stay"


@pytest.mark.parametrize("how", ["kmeans", "angles"])
def test_clients_without_data_make_no_cluster_and_move_none(how: Any) -> None:
    bases = three_groups()
    expected = assign(bases, 3, how=how, seed=5)
    with_empty = np.concatenate([np.zeros((2, 20, 3)), bases, np.zeros((3, 20, 3))])
    found = assign(with_empty, 3, how=how, seed=5)
    np.testing.assert_array_equal(found[2:-3], expected)
    assert set(found[[0, 1, -3, -2, -1]]) == {np.bincount(expected).argmax()}
    assert (
        assign(bases[:2], 5, how=how, seed=5).max() <= 1
        and not assign(0 * bases, 3, how=how, seed=5).any()
    )
    points, centres = np.array([[0.0, 0], [3, 3.1]]), np.array([[0.1, 0], [3.0, 3]])
    assert nearest_in_turn(points, centres, np.array([2, 5]))[0].tolist() == [1, 1]


def test_eq_10_by_hand() -> None:
    """Three clients in clusters 0, 0, 1 of 2 (and 2, where nobody is); parts are
    columns {0, 1} and {2}.
    """
    s = assembled(clients=3)
    rows = torch.tensor([[1.0, 2, 3], [5, 6, 7], [9, 9, 9]], dtype=torch.float64)
    parts = torch.tensor([[True, False], [True, True], [False, True]])
    previous = torch.tensor([[-1.0, -2, -3]], dtype=torch.float64).repeat(3, 1)
    sent, cluster = Sent(parts, torch.tensor([0, 0, 1])), torch.tensor([0, 0, 1])
    cohort = s.federation.sample(0).equally()
    means, weights = s.federation.cluster_means(rows, cohort, cluster, previous, sent)
    torch.testing.assert_close(
        means,
        torch.tensor([[3.0, 4, 7], [-1, -2, 9], [-1, -2, -3]], dtype=torch.float64),
    )
    torch.testing.assert_close(
        3 * weights, torch.tensor([[2.0, 1], [0, 1], [0, 0]], dtype=torch.float64)
    )
    s.federation.upload(rows, cohort, sent)
    assert int(cohort.log.bytes_up_here) == 8 * (2 + 3 + 1)
    assert cohort.log.bytes_up == 0


@pytest.mark.parametrize("method", ["genefl", "fedlp", "fedlps", "fedlg"])
def test_a_client_without_data_has_no_say_in_its_cluster(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = small(method, clients=4, clusters=1, participation=1.0)
    fed, means, weights = s.federation, s.federation.cluster_means, list[np.ndarray]()
    fed.sizes[2] = 0

    def listening(rows: Tensor, cohort: Cohort, *rest: Any) -> tuple[Tensor, Tensor]:
        weights.append(cohort.weights)
        return means(rows, cohort, *rest)

    monkeypatch.setattr(fed, "cluster_means", listening)
    s.method.round(fed, s.method.init(fed), fed.sample(0))
    np.testing.assert_allclose(weights[0], [1 / 3, 1 / 3, 1 / 3])


# The methods' rules


class Naive:
    """A federation by dictionaries and loops over clients and layers."""

    def __init__(self, s: Setup, method: str) -> None:
        self.s, self.method, self.fed = s, method, s.federation
        opts, first = s.settings.options, s.federation.initial_row()
        self.group = s.method.init(s.federation).cluster.tolist()
        self.theta = {k: first.clone() for k in range(opts.clusters)}
        self.own = {i: first.clone() for i in range(len(self.group))}
        self.kept, self.seen = dict[int, Tensor](), set[int]()
        self.gene: dict[int, Tensor] = {}
        self.columns = {e.name: slice(e.start, e.stop) for e in self.fed.layout.entries}
        self.shared = dict.fromkeys(self.columns, True)
        if method == "fedbn":
            self.shared = {name: "bn" not in name for name in self.columns}
        elif method in ("parfed", "fedfina"):
            self.shared = {
                name: name.split(".")[0] in opts.names for name in self.columns
            }
        elif method == "fedlg":
            layers = ("conv1", "conv2", "fc1", "head")
            self.shared = {name: name.split(".")[0] in layers for name in self.columns}

    def start(self, i: int) -> Tensor:
        theta = self.theta[self.group[i]]
        if self.method == "genefl":
            return self.own[i].clone() if i in self.seen else theta.clone()
        row = self.own[i].clone()
        for name, at in self.columns.items():
            if self.shared[name]:
                row[at] = theta[at]
        return row * self.kept[i] if i in self.kept else row

    def round(self, round: int, cohort: list[int]) -> None:
        s, method, theta = self.s, self.method, self.theta
        told: dict[int, list[tuple[Tensor, Tensor, float]]] = {k: [] for k in theta}
        for i in cohort:
            k, start, pull = self.group[i], self.start(i), None
            if method == "genefl":
                pull = naive_pull(s, self.fed, start, theta[k], i)
            after = trained(self.fed, start, i, round, pull)
            if method == "fedlps":
                self.kept.setdefault(i, naive_channels(s, after))
                after = after * self.kept[i]
            self.own[i] = after
            sent = naive_sent(s, method, start, after, i, round, self.kept.get(i))
            told[k].append((after, sent, float(self.fed.sizes[i])))
            self.seen.add(i)
        weighted = method in ("clustered-fedavg", "fedbn", "parfed", "fedfina")
        for k, uploads in told.items():
            if uploads:
                self.gene[k] = torch.stack([sent for _, sent, _ in uploads]).all(0)
            for name, at in self.columns.items():
                for column in range(at.start, at.stop) if method == "fedlps" else [at]:
                    mine = [
                        (n if weighted else 1, row[column])
                        for row, sent, n in uploads
                        if sent[column].all()
                    ]
                    if mine and self.shared[name]:
                        total = sum(weight for weight, _ in mine)
                        theta[k][column] = sum(
                            weight / total * part for weight, part in mine
                        )

    def adopt(self, state: Any) -> None:
        """Put new clients in the place of the known ones: each joins the cluster whose
        mean is nearest, inherits its gene, and draws the rest for itself.
        """
        assert self.s.newcomers is not None
        self.fed = self.s.newcomers.federation
        points = self.fed.bases(5).reshape(len(self.fed.sizes), -1)
        centres, members = state.centres.clone().numpy(), state.members.tolist()
        self.group, self.own = [], {}
        for i, point in enumerate(points):
            k = int(np.argmin([np.linalg.norm(centre - point) for centre in centres]))
            centres[k] = (members[k] * centres[k] + point) / (members[k] + 1)
            members[k] += 1
            self.group.append(k)
            self.own[i] = fresh(self.s, i)
            if self.method == "genefl":
                self.own[i][self.gene[k]] = self.theta[k][self.gene[k]]
        self.kept, self.seen = {}, set(self.own)


def fresh(s: Setup, client: int) -> Tensor:
    """The weights that a new client draws: a network of another seed."""
    draw = randomness.generator(s.settings.config.seed, "fresh weights", client)
    seed = int(draw.integers(2**32))
    network = build("cnn-bn", shape=(1, 8, 8), classes=10, seed=seed)
    return s.federation.layout.row(network, dtype=torch.float64)


def trained(
    fed: Federation, row: Tensor, client: int, round: int, pull: Pull | None
) -> Tensor:
    return fed.train_alone(row, client, round, pull=pull)


def naive_pull(
    s: Setup, fed: Federation, before: Tensor, cluster: Tensor, client: int
) -> Pull:
    opts, layout = s.settings.options, s.federation.layout
    fisher = s.engine.fisher(before[None], fed.train_data, np.array([client]))[
        0, : layout.num_parameters
    ]
    normal = (fisher - fisher.min()) / (fisher.max() - fisher.min())
    mask = torch.zeros_like(before, dtype=torch.bool)
    mask[: layout.num_parameters] = normal <= opts.epsilon
    assert 0 < mask.sum() < layout.num_parameters, "the case needs an ε that divides"
    return Pull(
        Strengths(whole=opts.lambda1, masked=opts.lambda2), cluster[None], mask[None]
    )


def naive_channels(s: Setup, row: Tensor) -> Tensor:
    """Half of the channels of both convolutions, with all that belongs to them."""
    kept = torch.ones_like(row)
    for number in (1, 2):
        tensors = {
            e.name: (e, row[e.start : e.stop].view(e.shape))
            for e in s.federation.layout.entries
        }
        weak = tensors[f"conv{number}.weight"][1].abs().sum((1, 2, 3)).argsort()
        for channel in weak[: len(weak) // 2]:
            for name, (e, _) in tensors.items():
                if name.startswith((f"conv{number}.", f"bn{number}.")):
                    kept[e.start : e.stop].view(e.shape)[channel] = 0
    return kept


def naive_sent(
    s: Setup,
    method: str,
    start: Tensor,
    after: Tensor,
    client: int,
    round: int,
    kept: Tensor | None,
) -> Tensor:
    """Which columns a client sends."""
    fed, layout, opts = s.federation, s.federation.layout, s.settings.options
    sent = torch.ones_like(after, dtype=torch.bool)
    if method == "fedlp":
        key = randomness.client_keys(
            fed.config.seed, "layers sent", round, torch.tensor([client])
        )
        sent = (randomness.uniform(key, 4)[0] < opts.send_probability)[layout.block_of]
    elif method == "fedlps":
        assert kept is not None
        sent = kept.bool()
    elif method == "fedlg":
        change = (after - start)[: layout.num_parameters].abs()
        share = {
            layer: torch.cat(
                [change[e.start : e.stop] for e in layout.entries if e.layer == layer]
            )
            .gt(change.mean())
            .double()
            .mean()
            for layer in ("conv1", "conv2", "fc1", "head")
        }
        best = {
            max(pool, key=lambda layer: share[layer])
            for pool in (("conv1", "conv2"), ("fc1", "head"))
        }
        sent = layout.mask(best)
    elif method == "genefl":
        score = {}
        for number, (a, b) in enumerate(layout.block_spans):
            score[number] = float(
                after[a:b]
                @ start[a:b]
                / after[a:b].norm()
                / start[a:b].norm()
                / (b - a)
            )
        gamma = max(opts.gene_layers, 4 - round)
        best_blocks = sorted(score, key=lambda number: -score[number])[:gamma]
        sent = torch.isin(layout.block_of, torch.tensor(best_blocks))
    return sent


@pytest.mark.parametrize("method", FAMILY)
def test_the_published_rule(method: str) -> None:
    """Three rounds of known clients, and three of new ones, who join in the first two:
    two, one, and in the end two of the three again.
    """
    more: dict[str, Any] = (
        {"epsilon": 0.003, "lambda2": 0.3, "gene_layers": 2}
        if method == "genefl"
        else {}
    )
    later = {"new_clients": 3, "new_rounds": 3, "join_rounds": 2, "new_classes": 0.5}
    s = small(method, **more, **later)
    naive = Naive(s, method)
    for round, after in rounds(s, 3):
        state = after
        naive.round(round, s.federation.sample(round).clients.tolist())
    assert len(set(state.cluster.tolist())) == 2, "the case needs two clusters"
    same_rows(s, s.federation, state, naive)
    assert np.isfinite(evaluate(s, state).accuracy)

    assert s.newcomers is not None and s.method.adopt is not None
    fed = s.newcomers.federation
    naive.adopt(state)
    state = s.method.adopt(fed, state, fed.everyone(3))
    cohorts = []
    for new in new_rounds(s, fed, state):
        cohorts.append(new.cohort.clients.tolist())
        naive.round(3 + new.number, cohorts[-1])
    assert cohorts[:2] == [[0, 1], [2]] and len(cohorts[2]) == 2
    same_rows(s, fed, new.state, naive)
    judged = standing_accuracy(s, fed, new.state, np.arange(3))
    assert new.trained is not None
    took_part = ~np.isnan(new.trained.accuracy())
    assert np.isfinite(judged).all() and took_part.nonzero()[0].tolist() == cohorts[2]


def same_rows(s: Setup, fed: Federation, state: Any, naive: Naive) -> None:
    rows = s.method.personal(fed, state, np.arange(len(fed.sizes)))
    for client, row in enumerate(rows):
        expected = naive.start(client)
        torch.testing.assert_close(
            row,
            expected,
            rtol=1e-8,
            atol=1e-10,
            msg=lambda m, c=client: f"{c}: {m}",
        )


@pytest.mark.parametrize("method", ["clustered-fedavg", "fedlp", "genefl"])
def test_one_cluster_that_sends_everything_is_fedavg(method: str) -> None:
    """Weighted for FedAvg's own, and uniform where every sender counts alike; GENE-FL
    in the first round, from Θ.
    """
    own = {
        "fedlp": {"send_probability": 1.0},
        "genefl": {"gene_layers": 4, "lambda1": 0.0, "lambda2": 0.0},
    }
    s = small(method, clusters=1, **own.get(method, {}))
    fed, cohort = s.federation, s.federation.sample(0)
    rows = torch.stack(
        [trained_alone(s, fed.initial_row(), client, 0) for client in cohort.clients]
    )
    weights = torch.from_numpy(
        cohort.weights if method == "clustered-fedavg" else cohort.equally().weights
    )
    state = s.method.round(fed, s.method.init(fed), cohort)
    torch.testing.assert_close(state.shared[0], weights @ rows, rtol=1e-10, atol=1e-12)
    if method == "clustered-fedavg":
        plain = assembled(
            **{name: value for name, value in SMALL.items() if name != "clusters"}
        )
        same = plain.federation.sample(0)
        np.testing.assert_array_equal(same.clients, cohort.clients)
        expected = plain.method.round(
            plain.federation, plain.method.init(plain.federation), same
        )
        torch.testing.assert_close(
            s.method.global_row(state), expected.w, rtol=1e-12, atol=1e-14
        )
        assert traffic([cohort.log]) == traffic([same.log])


def test_fedlp_that_sends_nothing_leaves_the_model() -> None:
    s = small("fedlp", send_probability=0.0)
    logs = list[RoundLog]()
    for _, state in rounds(s, 2, logs):
        assert torch.equal(state.shared, s.federation.initial_row().expand(2, -1))
    up, up_here, down = traffic(logs)
    assert up == up_here == 0 < down


@pytest.mark.parametrize("per", ["upload", "cluster", "run"])
def test_what_fedlp_draws_its_layers_for(
    per: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 4 layers all uploads of a run, or of a cluster, send the same ones in all
    rounds; bytes are those of their columns.
    """
    s = small("fedlp", mask_per=per, participation=1.0)
    fed, layout, uploads = s.federation, s.federation.layout, list[Sent]()
    upload = fed.upload
    monkeypatch.setattr(
        fed, "upload", lambda rows, cohort, sent: uploads.append(sent) or rows
    )
    by_cluster: dict[int, set[tuple[bool, ...]]] = {0: set(), 1: set()}
    for _, state in rounds(s, 2):
        for k, groups in zip(state.cluster.tolist(), uploads[-1].groups, strict=True):
            by_cluster[k].add(tuple(groups.tolist()))
    sent = by_cluster[0] | by_cluster[1]
    assert len(sent) == {"run": 1, "cluster": 2}.get(per, len(sent))
    if per == "upload":
        assert len(by_cluster[0]) > 1 and len(by_cluster[1]) > 1
    if per == "run":
        cohort = fed.sample(2)
        upload(torch.zeros(6, layout.num_columns).double(), cohort, uploads[-1])
        widths = torch.bincount(layout.block_of)
        columns = int(widths[list(sent.pop())].sum())
        assert int(cohort.log.bytes_up_here) == 6 * 8 * columns > 0


def test_fedbn_keeps_batch_norm_where_it_is_bit_for_bit() -> None:
    s = small("fedbn")
    norm = s.federation.layout.mask(["bn1", "bn2"])
    kept = s.federation.initial_row().repeat(6, 1)
    train, seen = s.federation.train, []
    s.federation.train = lambda rows, cohort, **how: (
        seen.append((rows, train(rows, cohort, **how))) or seen[-1][1]
    )
    for round, state in rounds(s, 3):
        here = s.federation.sample(round).here
        started_from, trained_to = seen[round]
        assert torch.equal(started_from[:, norm], kept[here][:, norm])
        kept[here] = trained_to
        assert torch.equal(state.private, kept[:, norm])
        assert torch.equal(
            s.method.personal(s.federation, state, np.arange(6))[:, norm], kept[:, norm]
        )
    assert len(kept[:, norm].unique(dim=0)) == 6


def test_without_batch_norm_fedbn_is_fedavg_in_clusters_and_says_so() -> None:
    found = []
    for method in ("fedbn", "clustered-fedavg"):
        s = small(method, model="cnn-digits")
        *_, (_, state) = rounds(s, 1)
        found.append(state.shared)
        said = [line for line in opening_lines(s) if "no batch norm" in line]
        assert len(said) == (method == "fedbn")
    assert torch.equal(*found)


@pytest.mark.parametrize("method", FAMILY)
def test_the_family_makes_do_with_a_small_network(method: str) -> None:
    """Methods that name layers of ResNet-18 choose others by themselves."""
    s = assembled(
        method=method,
        model="cnn-cifar",
        dataset="synthetic",
        synthetic_shape="3x20x20",
        train_per_client=4,
        test_per_client=1,
        clients=3,
        clusters=2,
        epochs=1,
    )
    s.settings.options.check_layout(s.federation.layout, "cnn-cifar")
    logs = list[RoundLog]()
    *_, (_, state) = rounds(s, 1, logs)
    rows = s.method.personal(s.federation, state, np.arange(3))
    assert rows.isfinite().all()
    up, up_here, _ = traffic(logs)
    assert 0 < up + up_here <= 3 * 8 * s.federation.layout.num_columns


def test_channels_that_fedlps_has_dropped_stay_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever training makes of them later."""
    s = small("fedlps", participation=1.0)
    draw = torch.Generator().manual_seed(0)
    monkeypatch.setattr(
        s.federation,
        "train",
        lambda rows, cohort, **how: torch.randn(
            rows.shape, generator=draw, dtype=rows.dtype
        ),
    )
    history = [state.channels.clone() for _, state in rounds(s, 3)]
    assert (
        torch.equal(history[0], history[2]) and (history[0].sum(1) == 1 + 4 + 8).all()
    )
    assert len(history[0].unique(dim=0)) > 1, "clients choose for themselves"


@pytest.mark.parametrize("pruned", [True, False])
def test_channels_that_fedlps_has_dropped_are_not_trained(
    pruned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leaky network: its channels of zeros have gradients."""
    s = assembled(
        method="fedlps",
        model="cnn-fmnist",
        dataset="synthetic",
        synthetic_shape="1x14x14",
        train_per_client=8,
        test_per_client=1,
        clients=2,
        clusters=1,
        epochs=1,
        train_pruned=pruned,
    )
    train, seen = s.federation.train, list[Tensor]()
    monkeypatch.setattr(
        s.federation,
        "train",
        lambda rows, cohort, **how: seen.append(train(rows, cohort, **how)) or seen[-1],
    )
    for _, after in rounds(s, 2):
        state = after
    dropped = ~state.channels[:, state.group_of]
    # Of 8 and 16 channels 6 and 12 are dropped.
    assert (state.channels.sum(1) == 1 + 2 + 4).all()
    assert seen[0][dropped].all(), "all are there at first"
    assert bool(seen[1][dropped].any()) == (not pruned)


# learnGene


def layers_of(*widths: int) -> Layout:
    return Layout.of(
        nn.Sequential(*[nn.Linear(width, 1, bias=False) for width in widths])
    )


def test_an_unchanged_layer_outranks_a_changed_one_of_equal_size() -> None:
    layout, before = layers_of(6, 6, 6), torch.arange(1.0, 19)[None].double()
    after = before.clone()
    after[:, 6] += 5
    after[:, 12] += 1
    score = genefl.scores(options(), layout, after, before)
    assert score[0, 0] > score[0, 2] > score[0, 1] and score.sum() == pytest.approx(1)
    opposite = options(gene_score="changed")
    assert genefl.scores(opposite, layout, after, before)[0].argsort(
        descending=True
    ).tolist() == [0, 2, 1]
    for choice in (
        options(gene_layers=2),
        options(gene_layers=2, gene_score="changed"),
    ):
        sent = genefl.gene(
            choice, genefl.scores(choice, layout, after, before), round=9
        )
        assert sent.tolist() == [[True, False, True]]


def test_scores_by_hand() -> None:
    """Cosines 1, 0.6 and 1 by dimensions 2, 2 and 4."""
    before = torch.tensor([[1.0, 0, 1, 0, 1, 1, 1, 1]], dtype=torch.float64)
    after = torch.tensor([[2.0, 0, 3, 4, 2, 2, 2, 2]], dtype=torch.float64)
    expected = torch.tensor([[0.5, 0.3, 0.25]], dtype=torch.float64) / 1.05
    torch.testing.assert_close(
        genefl.scores(options(), layers_of(2, 2, 4), after, before), expected
    )


def test_the_gene_shrinks_to_sixteen_of_resnets_layers() -> None:
    assert [options().num_sent(round, 21) for round in (0, 1, 4, 5, 6, 99)] == [
        21,
        20,
        17,
        16,
        16,
        16,
    ]
    slow = options(gene_layers=2, gene_every=3)
    assert [slow.num_sent(round, 4) for round in (0, 2, 3, 5, 6, 99)] == [
        4,
        4,
        3,
        3,
        2,
        2,
    ]


def test_epsilon_divides_by_normalised_fisher_information() -> None:
    layout, fisher = (
        layers_of(3, 2),
        torch.tensor([[2.0, 6, 10, 2, 4], [0, 0, 0, 0, 0]]),
    )
    assert genefl.elastic(options(), layout, fisher).tolist() == [
        [True, True, False, True, True],
        [True] * 5,
    ]
    by_layer = genefl.elastic(options(fisher="layer", epsilon=0.4), layout, fisher)
    assert by_layer[0].tolist() == [True, False, False, True, False]
    high = genefl.elastic(options(elastic="high"), layout, fisher)
    assert high[0].tolist() == [False, False, True, False, False]
    assert not high[1].any(), "where all are alike none is high"
    assert not genefl.elastic(options(epsilon=-0.1), layout, fisher[:1]).any()
    assert genefl.elastic(options(epsilon=1.0), layout, fisher).all()


@pytest.mark.parametrize(
    ("scale", "normalised"),
    [
        # (F − 0) / 1.
        ("minmax", [0.0, 1e-4, 1e-2, 1.0]),
        # 0, 1, 2 and 3 are smaller, of three others.
        ("rank", [0.0, 1 / 3, 2 / 3, 1.0]),
        # log10: −4 (0 counts as the least above it), −4, −2 and 0, from −4 to 0.
        ("log", [0.0, 0.0, 0.5, 1.0]),
    ],
)
def test_scales_of_fisher_information_by_hand(
    scale: Any, normalised: list[float]
) -> None:
    layout, fisher = layers_of(4), torch.tensor([[1e-2, 1.0, 0, 1e-4], [0, 0, 0, 0]])
    expected = [normalised[place] for place in (2, 3, 0, 1)]
    for value in normalised:
        for epsilon in (value - 1e-5, value + 1e-5):
            own = options(fisher_scale=scale, epsilon=epsilon)
            mask = genefl.elastic(own, layout, fisher)
            assert mask[0].tolist() == [number <= epsilon for number in expected]
            assert mask[1].all() or epsilon < 0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            {"lambda1": 0.4, "lambda2": 0.3, "epsilon": -1.0},
            {"lambda1": 0.4, "lambda2": 0.0},
        ),
        (
            {"lambda1": 0.0, "lambda2": 0.3, "epsilon": 1.0},
            {"lambda1": 0.3, "lambda2": 0.0, "smooth": "whole"},
        ),
    ],
    ids=["ε below 0 is no term", "ε of 1 is the whole norm"],
)
def test_what_epsilon_means_at_its_ends(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    rows = []
    for own in (one, other, {"lambda1": 0.0, "lambda2": 0.0}):
        s = small("genefl", **own)
        *_, (_, state) = rounds(s, 2)
        rows.append(state.rows)
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-9, atol=1e-11)
    assert not torch.allclose(rows[0], rows[2], rtol=1e-4)


# Bytes


@pytest.fixture(scope="module")
def resnet() -> Setup:
    """ResNet-18 with so little data that nobody is trained."""
    values = {
        "dataset": "synthetic",
        "synthetic_shape": "3x4x4",
        "train_per_client": 6,
        "test_per_client": 1,
    }
    return assembled(
        **values,
        model="resnet18",
        clients=1,
        precision="fp32",
        clusters=1,
        method="clustered-fedavg",
    )


@pytest.mark.parametrize(
    ("method", "columns", "mib"),
    [
        ("clustered-fedavg", 11_183_562, 42.66),
        ("fedbn", 11_167_946, 42.60),
        ("fedfina", 8_257_536, 31.50),
        ("parfed", 3_133_440, 11.95),
        ("fedlg", 4_792_320, 18.28),
        ("genefl", 2_326_986, 8.88),
    ],
)
def test_bytes_of_an_upload_of_resnet18(
    method: str, columns: int, mib: float, resnet: Setup, monkeypatch: Any
) -> None:
    """To the byte; GENE-FL's is that of its last size when no layer changes much: the
    sixteen smallest.
    """
    module, fed = methods.load(method), resnet.federation
    monkeypatch.setattr(
        fed,
        "options",
        module.Options(clusters=1, **({"lambda2": 0.0} if method == "genefl" else {})),
    )
    changed = 1e-3 * torch.rand(1, fed.layout.num_columns)
    monkeypatch.setattr(fed, "train", lambda rows, cohort, **how: rows + changed)
    state = module.init(fed)
    cohort = fed.sample(99)
    state = module.round(fed, state, cohort)
    up = cohort.log.bytes_up + int(cohort.log.bytes_up_here)
    assert up == 4 * columns and round(up / MIB, 2) == mib
    newcomers = fed.everyone(100)
    rows = module.welcome(fed, state, newcomers)
    assert newcomers.log.bytes_down == up and rows.shape == (1, 11_183_562)
    if method == "clustered-fedavg":
        assert round(100 * 10 * up / GIB, 2) == 41.66


def test_comm_is_what_clients_sent_and_the_printed_formula_another(
    tmp_path: Path,
) -> None:
    words = "--method clustered-fedavg --model mlp --clusters 2 --clients 10"
    words += " --participation 0.5 --rounds 3 --device cpu"
    record = read_run(started(*words.split(), "--out", tmp_path / "run"))
    assert record.rounds["bytes_up"].sum() == 3 * 5 * 4 * 4810
    assert record.printed_comm() == 3 * 2 * 4 * 4810 == record.summary()["printed_comm"]


# Known and new clients


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "sharding", "dominant"])
def test_new_clients_hold_other_classes_than_known_ones(kind: str) -> None:
    labels = np.random.default_rng(0).integers(0, 10, 2000)
    plan = PartitionPlan(
        scheme=kind,
        classes=10,
        clients=9,
        new_clients=4,
        new_classes=5,
        seed=3,
        alpha=0.5,
        classes_per_client=2,
        uniform_share=0.2,
        train_per_client=30,
        test_per_client=10,
    )
    parts = partition(plan, labels, labels[:500])
    for lists, of in ((parts.train, labels), (parts.test, labels[:500])):
        known, new = (
            {int(c) for own in some for c in of[own]} for some in (lists[:5], lists[5:])
        )
        assert len(known) == len(new) == 5 and not known & new
    if kind != "dominant":
        assert (
            sum(map(len, parts.train)) == 2000 == len(set(np.concatenate(parts.train)))
        )


@pytest.mark.parametrize("new_classes", [0, 2])
def test_a_client_may_be_judged_on_all_of_its_classes(new_classes: int) -> None:
    plan = PartitionPlan(
        scheme="dirichlet",
        classes=4,
        clients=6,
        new_clients=3,
        new_classes=new_classes,
        seed=3,
        alpha=0.1,
        classes_per_client=2,
        uniform_share=0.2,
        train_per_client=30,
        test_per_client=10,
    )
    labels, judged = np.arange(80) % 4, np.arange(20) % 4
    share = partition(plan, labels, judged)
    held = partition(replace(plan, test_classes="held"), labels, judged)
    for client in range(6):
        np.testing.assert_array_equal(share.train[client], held.train[client])
        classes = set(labels[share.train[client]].tolist())
        # Test samples 0, 4, 8 … are of class 0, and so on.
        expected = [sample for sample in range(20) if sample % 4 in classes]
        assert held.test[client].tolist() == expected
    assert sum(map(len, held.test)) > 20 == sum(map(len, share.test))


def test_without_new_classes_the_partition_is_what_it_was() -> None:
    plan = PartitionPlan(
        scheme="dirichlet",
        classes=10,
        clients=9,
        seed=3,
        alpha=0.5,
        classes_per_client=2,
        uniform_share=0.2,
        train_per_client=30,
        test_per_client=10,
    )
    labels = np.random.default_rng(0).integers(0, 10, 500)
    one = partition(plan, labels, labels)
    other = partition(replace(plan, new_clients=4), labels, labels)
    assert all(
        np.array_equal(a, b) for a, b in zip(one.train, other.train, strict=True)
    )


NEW = "--clients 6 --new-clients 5 --new-updates 12 --rounds 3 --epochs 1 --device cpu --participation 0.7"


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    words = f"--method genefl --model cnn-bn --clusters 2 --gene-layers 2 --join-rounds 3 --new-classes 0.5 {NEW}"
    return read_run(
        started(*words.split(), "--out", tmp_path_factory.mktemp("joined") / "run")
    )


def test_new_clients_join_as_many_in_each_update(joined: RunRecord) -> None:
    absent = np.isnan(joined.newcomers["method"])
    assert absent.sum(1).tolist() == [3, 1, 0, *[0] * 10], "two, two and one"
    assert (
        not absent[0, :2].any()
        and not absent[1:, 2:4].any()
        and not absent[2:, 4].any()
    )
    accuracy = joined.newcomers["method"]
    assert joined.newcomers_last("method") == pytest.approx(accuracy[3:].mean())
    assert joined.newcomers_first("method") == pytest.approx(
        np.mean([*accuracy[0, :2], *accuracy[1, 2:4], accuracy[2, 4]])
    )
    assert np.nanmean(accuracy[-1]) > 0.8 > np.nanmean(accuracy[0])


@pytest.mark.parametrize(("given", "layers"), [("common", [1]), ("any", [0, 1, 2])])
def test_what_a_new_client_is_given(
    given: str, layers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three clients of one cluster send layers {0, 1}, {1, 2} and {1}: common to them
    is layer 1, sent by any are 0, 1 and 2. Others are drawn by each for itself.
    """
    s = small("genefl", clients=3, clusters=1, participation=1.0, gene_given=given)
    fed, none = s.federation, [False, True, False, False]
    sent = torch.tensor([[True, True, False, False], [False, True, True, False], none])
    monkeypatch.setattr(genefl, "gene", lambda *_: sent)
    state = s.method.round(fed, s.method.init(fed), fed.sample(0))
    assert state.gene[0].nonzero()[:, 0].tolist() == layers
    everyone = fed.everyone(1)
    rows = s.method.welcome(fed, state, everyone)
    has = torch.isin(fed.layout.block_of, torch.tensor(layers))
    for client, row in enumerate(rows):
        assert torch.equal(row[has], state.shared[0][has])
        assert torch.equal(row[~has], fresh(s, client)[~has])
    assert everyone.log.bytes_down == 3 * 8 * int(has.sum())
    weights = fed.layout.mask(["head"])
    assert len(rows[:, weights].unique(dim=0)) == 3, "everyone draws for itself"


def test_clients_that_send_nothing_in_common_leave_nothing_to_a_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    s = small("genefl", clients=2, clusters=1, participation=1.0)
    fed, sent = s.federation, torch.eye(4, dtype=torch.bool)[:2]
    monkeypatch.setattr(genefl, "gene", lambda *_: sent)
    state = s.method.round(fed, s.method.init(fed), fed.sample(0))
    everyone = fed.everyone(1)
    rows = s.method.welcome(fed, state, everyone)
    assert everyone.log.bytes_down == 0 and torch.equal(rows[0], fresh(s, 0))


@pytest.mark.parametrize(
    ("method", "columns"), [("fedavg", 4810), ("fedper", 4160), ("local", 0)]
)
def test_other_methods_are_compared_on_new_clients_too(
    method: str, columns: int, tmp_path: Path
) -> None:
    words = ["--method", method, "--model", "mlp", *NEW.split(), "--new-updates", 5]
    once = read_run(started(*words, "--out", tmp_path / "once"))
    assert once.newcomer_bytes == 4 * columns
    late = read_run(
        started(
            *words,
            "--join-rounds",
            5,
            "--new-starts",
            "method",
            "--out",
            tmp_path / "late",
        )
    )
    assert late.newcomers.keys() == {"method"} and once.newcomers.keys() >= {
        "method",
        "random",
    }
    assert not np.isnan(once.newcomers["method"]).any()
    for update in range(6):
        there = ~np.isnan(late.newcomers["method"][update])
        assert there.tolist() == [client <= update for client in range(5)]
    np.testing.assert_array_equal(
        late.newcomers["method"][0, 0], once.newcomers["method"][0, 0]
    )


def test_an_adopted_state_is_that_of_the_new_clients() -> None:
    """GENE-FL's with what other methods adopt has still the rows of known clients."""
    s = small("genefl", new_clients=2, new_rounds=1)
    s.method = replace(s.method, adopt=clustered_fedavg.EXTENDS.adopt)
    state = s.method.init(s.federation)
    progress = RunProgress(1, visible=False)
    assert s.newcomers is not None
    with pytest.raises(RuntimeError, match="rows of method genefl has 6 rows after"):
        newcomers.collaborate(s, s.newcomers, state, None, progress, Stop())


@pytest.mark.parametrize("killed", [True, False])
@pytest.mark.parametrize("early", [False, True])
def test_new_clients_go_on_after_a_stop_as_if_there_was_none(
    early: bool, killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut short in their first round, of six: known clients' rounds are not repeated,
    and what they sent is counted apart. One that is killed writes nothing any more.
    Known clients may have ended early, at their target.
    """
    monkeypatch.setattr(checkpointing, "LAST_BYTES", 0)  # as if rows were large
    words = "--method genefl --model mlp --clusters 2 --clients 4 --rounds 2 --epochs 1"
    words += " --device cpu --new-clients 4 --new-rounds 6 --join-rounds 2"
    words += " --participation 0.5 --evaluate-every 100"
    words += f" --checkpoint-minutes {60 if killed else 0}"
    if early:
        words = words.replace("--rounds 2", "--rounds 4").replace(
            "every 100", "every 2"
        )
        words += " --target-accuracy 2 --stop-at-target"
    whole = started(*words.split(), "--out", tmp_path / "whole")
    assert not any((whole / "checkpoints").glob("*")), "of no use when all is done"
    stop, there = Stop(), tmp_path / "stopped"

    def stopping(*given: Any) -> np.ndarray:
        if killed:
            raise MemoryError
        stop.asked = True
        return standing_accuracy(*given)

    with monkeypatch.context() as patched, pytest.raises(SystemExit):
        patched.setattr(newcomers, "standing_accuracy", stopping)
        run(parse_run([*words.split(), "--out", str(there)]), stop)
    assert stop.agreed == (not killed)
    first = read_run(there)
    assert first.status == ("failed" if killed else "stopped")
    assert first.new_rounds is not None
    assert np.isfinite(first.new_rounds.bytes_up).sum() == 1
    started("--resume", there)
    same(whole, there)
    record = read_run(there)
    assert record.facts["resumed"].tolist() == [2] and record.new_rounds is not None
    new = record.new_rounds
    # The first two clients, then the other two; two of four in each round.
    assert np.isnan(new.accuracy).sum(1).tolist() == [2, 0, 0, 0, 0, 0]
    assert np.isnan(new.trained_accuracy).sum(1).tolist() == [2] * 6
    assert new.last("accuracy") == pytest.approx(new.curve("accuracy").mean())
    assert len(record.rounds["bytes_up"]) == 2
    # Two clients get all 4810 columns of the cluster's row.
    assert new.bytes_down.tolist() == [2 * 4 * 4810] * 6
    assert (new.bytes_up > 0).all()


# Seeds and ranks


@pytest.mark.parametrize(
    "words", ["genefl --lambda2 0.3 --epsilon 0.01", "fedlg --gene-pools conv1,conv2"]
)
def test_seeds_at_once_are_the_same_runs(words: str, tmp_path: Path) -> None:
    common = [
        "--method",
        *words.split(),
        *UNEVEN,
        "--model",
        "cnn-bn",
        "--clusters",
        2,
        "--epochs",
        1,
    ]
    common += ["--new-clients", 3, "--new-rounds", 2]
    together = started(*common, "--seeds", "0,5", "--out", tmp_path / "together")
    for seed in (0, 5):
        alone = started(*common, "--seed", seed, "--out", tmp_path / f"alone-{seed}")
        assert_same_run(together / f"seed-{seed}", alone, tolerance=1e-10)
        same_newcomers(together / f"seed-{seed}", alone)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "words",
    [
        "genefl --lambda2 0.3 --epsilon 0.01",
        "fedlps",
        "fedlp",
        "fedlg --gene-pools conv1",
        "fedbn",
    ],
)
def test_a_gpu_computes_what_a_cpu_does(
    words: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on the CPU, with rows that lie as on a GPU and the few shapes of steps that
    are captured there.
    """
    common = [
        "--method",
        *words.split(),
        *UNEVEN,
        "--model",
        "cnn-bn",
        "--clusters",
        2,
        "--epochs",
        1,
    ]
    common += ["--new-clients", 3, "--new-rounds", 2]
    expected = started(*common, "--out", tmp_path / "expected")
    if device == "cpu":
        monkeypatch.setattr(
            engines,
            "KernelLayout",
            lambda layout, device: KernelLayout(layout, torch.device("cuda")),
        )
        monkeypatch.setattr(
            StackTraining,
            "_captured_shape",
            lambda self, *shape: (self._capacity, self._slots, False),
        )
    there = started(*common, "--device", device, "--out", tmp_path / device)
    assert_same_run(there, expected, tolerance=1e-9)
    same_newcomers(there, expected)


# A server that steals


def test_psnr_by_hand() -> None:
    image = torch.full((1, 3, 4, 4), 0.5)
    assert idlg.psnr(image + 0.1, image) == pytest.approx(20, abs=1e-4)
    assert idlg.psnr(image, image) == float("inf")


def test_a_whole_upload_gives_the_image_away_and_a_part_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from hpcfed import cli

    figure = tmp_path / "figures" / "stolen.png"
    words = f"attack idlg --steps 8 --images 1 --device cpu --out {figure}"
    cli.main(words.split())
    lines = capsys.readouterr().out.splitlines()
    table = {line.split()[0]: line.split()[1:] for line in lines[2:7]}
    assert list(table) == ["fedavg", "fedavg-noise", "parfed", "fedlg", "genefl"]
    psnr = {name: float(values[2]) for name, values in table.items()}
    assert (
        psnr["fedavg"]
        > 40
        > psnr["fedavg-noise"]
        > 20
        > max(psnr[name] for name in ("parfed", "fedlg", "genefl"))
    )
    assert table["fedavg"][:2] == ["100.0%", "found"] and table["genefl"][1] == "given"
    from PIL import Image

    drawn = Image.open(figure)
    assert drawn.size == (150 + 104, 8 + 6 * 104)
    pixels = np.asarray(drawn.convert("L"), np.float64) / 255
    original, whole, *_, part = (
        pixels[8 + 104 * n : 104 + 104 * n, 150:246] for n in range(6)
    )
    assert (
        np.abs(original - whole).max() < 0.02 < 0.2 < np.abs(original - part).mean()
    ), "rows are where their names stand"
    assert pixels[:, :150].min() < 0.1, "which are written at the left"


def test_the_label_follows_from_the_gradient() -> None:
    from hpcfed.data.loading import load as load_data
    from hpcfed.data.synthetic import SyntheticSize

    digits = load_data(
        "digits",
        root=None,
        download=False,
        seed=0,
        synthetic=SyntheticSize((1, 1, 1), 2, 1, 1),
    )
    network = idlg.smooth(digits.shape, 10, 0).double()
    weights = {name: p.detach() for name, p in network.named_parameters()}
    images = digits.inputs(
        "test", np.arange(40), device=torch.device("cpu"), dtype=torch.float64
    )
    for image, label in zip(images, digits.labels("test")[:40], strict=True):
        gradient = idlg._gradient(
            network, weights, image[None], torch.tensor([int(label)])
        )
        assert int(gradient["head.weight"].sum(1).argmin()) == label


# Mistakes


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "run --method genefl --clients 3 --clusters 4",
            "--clusters 4, but there are 3 clients",
        ),
        (
            "run --method genefl --gene-layers 5",
            "--gene-layers 5, but cnn-digits has 4 layers with weights",
        ),
        (
            "run --method parfed --shared-layers layer1.1.conv2",
            "model cnn-digits has no layer 'layer1.1.conv2'; name others, as in "
            "--shared-layers conv1",
        ),
        ("run --method fedfina --shared-layers conv1,cnv2", "has no layer 'cnv2'"),
        ("run --method fedlg --gene-pools conv1/conv9", "has no layer 'conv9'"),
        ("run --method fedlps --model mlp", "model mlp has no convolutions"),
        (
            "run --new-clients 4 --new-classes 0.5 --partition sharding --classes-per-client 6",
            "--classes-per-client 6, but digits leaves 5 of 10 classes",
        ),
        (
            "run --new-clients 4 --new-classes 0.3 --partition sharding --classes-per-client 4",
            "leaves 3 of 10 classes for new clients",
        ),
        ("run --new-clients 4 --new-classes 0.01", "leaves none to one of the two"),
        (
            "run --new-classes 0.5",
            "--new-classes changes nothing without --new-clients 10",
        ),
        ("run --join-rounds 3", "--join-rounds"),
        (
            "run --new-clients 2 --join-rounds 3",
            "--join-rounds 3 are more than --new-clients 2",
        ),
        (
            "run --method genefl --new-clients 4 --new-rounds 2 --join-rounds 3",
            "--join-rounds 3 are more than --new-clients 4 or --new-rounds 2",
        ),
        (
            "run --method fedper --new-clients 4 --new-rounds 2",
            "new clients of method fedper only train by themselves",
        ),
        (
            "run --method pfedgpa --new-clients 4 --join-rounds 2",
            "guides all new clients at once",
        ),
        (
            "run --method genefl --aggregation median",
            "method genefl takes no mean of uploads",
        ),
        ("attack", "attack needs idlg, as in: hpcfed attack idlg --out"),
        ("attack dlg", "did you mean 'idlg'?"),
        ("attack idlg --methods fedavgg", "did you mean 'fedavg'?"),
        ("attack idlg --model mlp", "unknown model 'mlp'"),
        ("attack idlg --steps 0", "--steps 0: must be at least 1"),
        ("attack idlg --dataset digts", "did you mean 'digits'?"),
    ],
)
def test_a_mistake_is_one_line(
    words: str,
    expected: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert expected in mistake(capsys, *words.split())
    assert list(tmp_path.iterdir()) == []
