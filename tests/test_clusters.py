"""Clusters of clients by their data's subspaces."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hpcfed.cli import parse_run
from hpcfed.federation.clustering import (
    _first_vectors,
    assign,
    canonical,
    nearest_in_turn,
    principal_angles,
)
from hpcfed.federation.cohort import Cohort, Sent
from hpcfed.methods import load
from hpcfed.methods._clusters import _clustered, arrive, global_row, inherited
from tests.federations import assembled
from tests.genefl_runs import small
from tests.runs import mistake


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


def test_clusters_take_turns_and_a_round_is_of_one_alone() -> None:
    common = {"clients": 9, "clusters": 3, "participation": 0.2}
    s = small("clustered-fedavg", cluster_turns=True, **common)
    fed, state = s.federation, s.method.init(s.federation)
    cluster, seen = state.cluster.numpy(), []
    for round in range(6):
        cohort = fed.sample(round, pool=s.method.pool(fed, state, round))
        (own,) = set(cluster[cohort.clients])
        assert len(cohort.clients) == min(2, (cluster == own).sum())
        before, state = state, s.method.round(fed, state, cohort)
        others = [k for k in range(3) if k != own]
        assert torch.equal(before.shared[others], state.shared[others])
        assert not torch.equal(before.shared[own], state.shared[own])
        seen.append(int(own))
    assert sorted(seen[:3]) == [0, 1, 2] and seen[3:] == seen[:3]
    usual = small("clustered-fedavg", **common)
    assert usual.method.pool(usual.federation, state, 0) is None


def test_a_cluster_without_data_has_no_turn() -> None:
    s = small("clustered-fedavg", clients=4, clusters=2, cluster_turns=True)
    fed, state = s.federation, s.method.init(s.federation)
    state = replace(state, cluster=torch.tensor([0, 0, 1, 1]))
    fed.members.sizes = np.array([5, 0, 0, 0])
    for round in range(3):
        pool = s.method.pool(fed, state, round)
        assert pool is not None and pool.tolist() == [0, 1]


def test_a_basis_is_the_left_singular_vectors_of_features_by_samples() -> None:
    s = small("clustered-fedavg", clients=3)
    fed, data = s.federation, s.federation.training.train_data
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


def clustered(**values: Any) -> Any:
    """A federation of six clients in some clusters, and its first state."""
    s = small("clustered-fedavg", clients=6, **{"clusters": 2, **values})
    return s, s.method.init(s.federation)


def test_means_of_clusters_are_of_clients_with_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whose bases are 0 are in a cluster, and neither counted nor averaged."""
    s, state = clustered(clusters=4)
    fed, seeds = s.federation, list[int]()
    fed.bases = lambda size, by_class=False: np.array(  # type: ignore[method-assign]
        [
            [[2.0], [0]],
            [[4.0], [0]],
            [[0], [0]],
            [[0], [6.0]],
            [[0], [8.0]],
            [[7.0], [7.0]],
        ]
    )

    def assigned(*_: Any, seed: int, how: str) -> np.ndarray:
        seeds.append(seed)
        return np.array([0, 0, 0, 1, 1, 2])

    monkeypatch.setattr("hpcfed.methods._clusters.assign", assigned)
    cluster, centres, members = _clustered(fed)
    assert cluster.tolist() == [0, 0, 0, 1, 1, 2] and members.tolist() == [2, 2, 1, 0]
    assert centres.tolist() == [[3.0, 0], [0, 7.0], [7.0, 7.0], [0, 0]]
    assert seeds == [int(fed.generator("clusters").integers(2**32))]
    assert state.group_of.unique().tolist() == [0], "all columns are one group"
    assert state.gene.shape == (4, 1) and bool(state.gene.all())


def test_only_one_cluster_without_private_columns_has_a_global_model() -> None:
    _, state = clustered()
    assert global_row(state) is None
    one = replace(state, shared=state.shared[:1])
    expected = global_row(one)
    assert expected is not None and torch.equal(expected, state.shared[0])
    assert global_row(replace(one, private_at=torch.arange(2))) is None


def test_clusters_without_uploads_keep_their_gene() -> None:
    _, state = clustered()
    state = replace(state, gene=torch.tensor([[True, False], [False, True]]))
    new = torch.tensor([[False, False], [True, True]])
    weights = torch.tensor([[0.0, 0.3], [0.0, 0.0]])
    assert inherited(state, weights, new).tolist() == [[False, False], [False, True]]
    assert inherited(state, weights.flip(0), new).tolist() == [
        [True, False],
        [True, True],
    ]


def test_new_clients_are_sent_their_clusters_columns_and_these_are_counted() -> None:
    """Clients without data are sent nothing."""
    s, state = clustered()
    fed, width = s.federation, s.federation.layout.num_columns
    cohort = fed.members.everyone(0)
    state = replace(
        state,
        gene=torch.tensor([[True, False], [True, True]]),
        group_of=(torch.arange(width) >= 100).long(),
    )
    sent: list[int] = []
    fed.greet = lambda rows, cohort, columns: sent.append(columns)  # type: ignore[method-assign]
    fed.members.sizes = fed.sizes.copy()
    fed.members.sizes[1] = 0
    state, rows = arrive(fed, state, cohort)
    cluster = state.cluster.tolist()
    expected = [(100, width)[k] for at, k in enumerate(cluster) if at != 1]
    assert sent == [sum(expected)] and set(cluster) == {0, 1}
    for client, row in enumerate(rows):
        given = (100, width)[cluster[client]]
        assert torch.equal(row[:given], state.shared[cluster[client]][:given])
        assert torch.equal(row[given:], fed.fresh_row(client)[given:])


CLUSTERED = "--method clustered-fedavg --clients 6 --dataset digits"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--clusters 0", "greater than or equal to 1"),
        ("--clusters 7", "--clusters 7, but there are 6 clients"),
        ("--basis 0", "greater than or equal to 1"),
        ("--basis 10001", "less than or equal to 10000"),
        ("--clusters 1 --basis 3", "--basis changes nothing without --clusters 2"),
    ],
)
def test_numbers_of_clusters_and_of_vectors_have_bounds(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in mistake(capsys, "run", *CLUSTERED.split(), *words.split())


@pytest.mark.parametrize(
    "words", ["--clusters 1", "--clusters 6", "--basis 10000", "--basis 1"]
)
def test_bounds_of_clusters_are_allowed(words: str) -> None:
    parse_run([*CLUSTERED.split(), *words.split()])


def test_clusters_have_the_papers_numbers() -> None:
    options = parse_run(CLUSTERED.split()).options
    assert (options.clusters, options.basis, options.clustering) == (4, 5, "kmeans")


def test_networks_without_stages_share_their_last_convolutions() -> None:
    """Four of them at most; without any, the first layer."""
    usual = "--method parfed --clients 6 --clusters 2 --dataset digits"
    for model, expected in (("cnn-bn", "conv1,conv2"), ("mlp", "fc1")):
        options = parse_run([*usual.split(), "--model", model]).options
        assert options.shared_layers == expected


def test_defaults_that_do_not_suit_a_run_are_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As many clusters as clients are enough; the last four convolutions are shared."""
    layers = [f"conv{number}" for number in range(1, 7)] + ["head"]
    monkeypatch.setattr("hpcfed.methods._clusters.layers_of", lambda _: layers)
    options = load("parfed").Options(clusters=4)
    for clients, expected in ((3, {"clusters": 3}), (4, {}), (5, {})):
        config = assembled(clients=clients).settings.config
        found = {choice.option: choice.value for choice in options.fit(config, 1)}
        assert found == {**expected, "shared_layers": "conv3,conv4,conv5,conv6"}
