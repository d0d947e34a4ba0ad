"""Partitions: who holds what is complete, disjoint, of the promised shape, and a
function of the seed alone.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcfed.data import PartitionPlan, schemes
from hpcfed.data.partition import Partition, partition
from hpcfed.data.schemes import dominant_groups
from hpcfed.errors import UserError
from hpcfed.runtime.randomness import generator

OPTIONS: dict[str, Any] = {
    "classes": 10,
    "clients": 5,
    "seed": 0,
    "alpha": 0.3,
    "classes_per_client": 2,
    "uniform_share": 0.2,
    "train_per_client": 60,
    "test_per_client": 20,
    "validation": 0,
}
TRAIN = np.random.default_rng(1).permutation(np.arange(1000) % 10)
TEST = np.random.default_rng(2).permutation(np.arange(300) % 10)

classes_and_labels = st.builds(
    lambda classes, train, test, seed: (
        classes,
        np.random.default_rng(seed).integers(0, classes, train),
        np.random.default_rng(seed + 1).integers(0, classes, test),
    ),
    classes=st.integers(2, 12),
    train=st.integers(0, 400),
    test=st.integers(0, 200),
    seed=st.integers(0, 1000),
)
clients_ = st.integers(1, 30)
seeds = st.integers(0, 2**31)
quick = settings(max_examples=40, deadline=None)


def deal(
    kind: str, train: np.ndarray = TRAIN, test: np.ndarray = TEST, **options: Any
) -> Partition:
    plan = PartitionPlan(scheme=kind, **{**OPTIONS, **options})
    return partition(plan, train, test)


def assert_each_once(parts: Sequence[np.ndarray], samples: int) -> None:
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(samples))


def histogram(labels: np.ndarray, samples: np.ndarray, classes: int = 10) -> np.ndarray:
    return np.bincount(labels[samples], minlength=classes)


@quick
@given(data=classes_and_labels, clients=clients_, seed=seeds)
def test_iid_uses_each_sample_once_in_equal_parts(
    data: Any, clients: int, seed: int
) -> None:
    classes, train, test = data
    dealt = deal("iid", train, test, classes=classes, clients=clients, seed=seed)
    for lists, labels in ((dealt.train, train), (dealt.test, test)):
        assert_each_once(lists, len(labels))
        sizes = [len(own) for own in lists]
        assert len(sizes) == clients
        assert max(sizes) - min(sizes) <= 1


def test_iid_mixes_the_classes() -> None:
    labels = np.repeat(np.arange(10), 100)
    for own in deal("iid", labels, labels).train:
        assert (histogram(labels, own) > 0).all()


@quick
@given(
    data=classes_and_labels,
    clients=clients_,
    seed=seeds,
    alpha=st.sampled_from([1e-3, 0.1, 1.0, 1e4]),
)
def test_dirichlet_uses_each_sample_once_and_test_follows_train(
    data: Any, clients: int, seed: int, alpha: float
) -> None:
    classes, train, test = data
    dealt = deal(
        "dirichlet",
        train,
        test,
        classes=classes,
        clients=clients,
        seed=seed,
        alpha=alpha,
    )
    assert_each_once(dealt.train, len(train))
    assert_each_once(dealt.test, len(test))
    of_train, of_test = (
        np.bincount(train, minlength=classes),
        np.bincount(test, minlength=classes),
    )
    for own_train, own_test in zip(dealt.train, dealt.test, strict=True):
        # Both are the same share p of the class to within one sample: |a - pA| <= 1 and
        # |b - pB| <= 1.
        a, b = histogram(train, own_train, classes), histogram(test, own_test, classes)
        assert (np.abs(a * of_test - b * of_train) <= of_train + of_test).all()


def test_small_alpha_is_uneven_and_large_alpha_even() -> None:
    def spread(alpha: float) -> float:
        own = deal("dirichlet", clients=10, alpha=alpha).train
        return float(np.mean([histogram(TRAIN, samples).std() for samples in own]))

    assert spread(0.05) > 15 > 2 > spread(1e5)


@quick
@given(data=classes_and_labels, clients=clients_, seed=seeds, portion=st.floats(0, 1))
def test_sharding_splits_classes_evenly_among_their_holders(
    data: Any, clients: int, seed: int, portion: float
) -> None:
    classes, train, test = data
    each = max(1, round(portion * classes))
    # With as many samples in every class as clients, each holder has some, so that
    # holders can be counted.
    train = np.concatenate([train, np.tile(np.arange(classes), clients)])
    test = np.concatenate([test, np.tile(np.arange(classes), clients)])
    dealt = deal(
        "sharding",
        train,
        test,
        classes=classes,
        clients=clients,
        seed=seed,
        classes_per_client=each,
    )
    counts = np.array([histogram(train, own, classes) for own in dealt.train])
    test_counts = np.array([histogram(test, own, classes) for own in dealt.test])
    assert ((counts > 0).sum(axis=1) == each).all()
    assert ((counts > 0) == (test_counts > 0)).all()
    holders = (counts > 0).sum(axis=0)
    assert holders.max() - holders.min() <= 1
    for label in np.flatnonzero(holders):
        for of_clients, labels in ((counts, train), (test_counts, test)):
            held = of_clients[of_clients[:, label] > 0, label]
            assert held.sum() == (labels == label).sum()
            assert held.max() - held.min() <= 1
    if clients * each >= classes:
        assert_each_once(dealt.train, len(train))
        assert_each_once(dealt.test, len(test))


def test_sharding_with_fewer_holdings_than_classes_leaves_classes_out() -> None:
    dealt = deal("sharding", clients=2, classes_per_client=3)
    held = [set(TRAIN[own]) for own in dealt.train]
    assert [len(classes) for classes in held] == [3, 3]
    assert not held[0] & held[1]


@quick
@given(
    classes=st.integers(2, 14),
    clients=st.integers(1, 12),
    seed=seeds,
    share=st.floats(0, 1),
    sizes=st.tuples(st.integers(1, 90), st.integers(0, 60)),
)
def test_dominant_sizes_and_shares(
    classes: int, clients: int, seed: int, share: float, sizes: tuple[int, int]
) -> None:
    train, test = np.arange(100 * classes) % classes, np.arange(70 * classes) % classes
    dealt = deal(
        "dominant",
        train,
        test,
        classes=classes,
        clients=clients,
        seed=seed,
        uniform_share=share,
        train_per_client=sizes[0],
        test_per_client=sizes[1],
    )
    groups = dominant_groups(classes)
    for lists, labels, size in (
        (dealt.train, train, sizes[0]),
        (dealt.test, test, sizes[1]),
    ):
        for client, own in enumerate(lists):
            assert len(own) == size
            assert (
                len(np.unique(own)) == size
            )  # no client needs more than a class holds
            inside = np.isin(labels[own], groups[client % len(groups)])
            assert inside.sum() >= (1 - share) * size - 1e-6
            # What is not from the group is spread evenly over the other classes.
            counts = np.delete(
                histogram(labels, own, classes), groups[client % len(groups)]
            )
            assert not len(counts) or counts.max() - counts.min() <= 1


def test_dominant_test_shares_follow_train() -> None:
    dealt = deal("dominant", train_per_client=60, test_per_client=30)
    for own_train, own_test in zip(dealt.train, dealt.test, strict=True):
        assert (
            np.abs(histogram(TRAIN, own_train) - 2 * histogram(TEST, own_test)) <= 4
        ).all()


def test_dominant_uniform_share_comes_from_all_classes() -> None:
    dealt = deal("dominant", clients=5, train_per_client=100, uniform_share=0.2)
    for own in dealt.train:
        assert (histogram(TRAIN, own) >= 2).all()


def test_dominant_clients_are_disjoint_while_the_data_suffices_and_spread_when_it_does_not() -> (
    None
):
    enough = deal("dominant", clients=5, train_per_client=100)
    assert len(np.unique(np.concatenate(enough.train))) == 500
    scarce = deal("dominant", clients=50, train_per_client=200)
    drawn = np.bincount(np.concatenate(scarce.train), minlength=len(TRAIN))
    for label in range(10):
        times = drawn[label == TRAIN]
        assert (
            times.max() - times.min() <= 2
        )  # a refilled pool is dealt as fairly as a fresh one
    assert all(len(np.unique(own)) == 200 for own in scarce.train)


def test_dominant_client_larger_than_a_class_takes_all_of_it_before_any_twice() -> None:
    labels = np.arange(20) % 2
    dealt = deal(
        "dominant",
        labels,
        labels,
        classes=2,
        clients=2,
        uniform_share=0.0,
        train_per_client=25,
    )
    for client in range(2):
        times = np.bincount(dealt.train[client], minlength=20)
        assert set(times[labels == client]) == {2, 3}
        assert not times[labels != client].any()


def test_dominant_groups() -> None:
    assert dominant_groups(10) == [
        [0, 1, 2],
        [2, 3, 4],
        [4, 5, 6],
        [6, 7, 8],
        [8, 9, 0],
    ]
    assert [len(group) for group in dominant_groups(62)] == [10, 26, 26]
    assert dominant_groups(2) == [[0], [1]]
    assert dominant_groups(4) == [[0, 1], [1, 2], [2, 3], [3, 0]]
    for classes in (3, 7, 47, 100):
        groups = dominant_groups(classes)
        assert set().union(*groups) == set(range(classes))
        for group, following in zip(groups, groups[1:] + groups[:1], strict=True):
            assert group[-1] == following[0]
            assert len(set(group)) == len(group) < classes


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "sharding", "dominant"])
def test_validation_is_balanced_and_held_by_no_client(kind: str) -> None:
    dealt = deal(kind, validation=105)
    assert (histogram(TRAIN, dealt.validation) == 10).all()
    held = np.concatenate(dealt.train)
    assert not np.isin(dealt.validation, held).any()
    if kind != "dominant":
        assert_each_once([held, dealt.validation], len(TRAIN))
    assert len(deal(kind).validation) == 0


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "sharding", "dominant"])
def test_the_seed_alone_decides(kind: str) -> None:
    def bytes_of(**options: Any) -> list[bytes]:
        dealt = deal(kind, validation=100, **options)
        return [own.tobytes() for own in (*dealt.train, *dealt.test, dealt.validation)]

    first = bytes_of(seed=3)
    np.random.seed(99)  # noqa: NPY002 - the global state is what must not matter
    torch.manual_seed(99)
    assert bytes_of(seed=3) == first
    other = bytes_of(seed=4)
    assert other[0] != first[0]
    assert other[5] != first[5]
    assert other[-1] != first[-1]


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "sharding", "dominant"])
def test_lists_are_sorted_sample_numbers(kind: str) -> None:
    dealt = deal(kind, clients=40, train_per_client=7, test_per_client=0)
    assert len(dealt.train) == len(dealt.test) == 40
    for own in (*dealt.train, *dealt.test):
        assert own.dtype == np.int64
        assert (np.diff(own) > 0).all()


@pytest.mark.parametrize(
    ("kind", "options", "part"),
    [
        ("dirichle", {}, "did you mean 'dirichlet'"),
        ("xyz", {}, "known: iid, dirichlet, sharding, dominant"),
        ("iid", {"clients": 0}, "at least 1 client"),
        ("dirichlet", {"alpha": 0.0}, "alpha must be above 0"),
        ("dirichlet", {"alpha": float("nan")}, "alpha must be above 0"),
        ("sharding", {"classes_per_client": 11}, "1 to 10 classes, not 11"),
        ("sharding", {"classes_per_client": 0}, "1 to 10 classes, not 0"),
        ("dominant", {"uniform_share": 1.1}, "uniform share"),
        ("dominant", {"train_per_client": 0}, "training samples"),
        ("dominant", {"validation": 1000}, "class 0 has no train samples"),
        ("iid", {"validation": 9}, "cannot hold all 10 classes"),
        ("iid", {"validation": -1}, "cannot hold all 10 classes"),
        ("iid", {"validation": 1010}, "class 0 has only 100"),
    ],
)
def test_wrong_input_is_one_line(kind: str, options: dict[str, Any], part: str) -> None:
    with pytest.raises(UserError) as caught:
        deal(kind, **options)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


# Every scheme against a naive loop that draws the same numbers: recorded seeds keep
# their federations.


def pools_of(labels: np.ndarray) -> list[np.ndarray]:
    return [np.flatnonzero(labels == label) for label in range(10)]


def as_lists(parts: Sequence[np.ndarray]) -> list[list[int]]:
    return [part.tolist() for part in parts]


def plan_of(kind: str, **options: Any) -> PartitionPlan:
    return PartitionPlan(scheme=kind, **{**OPTIONS, **options})


def dealt(kind: str, **options: Any) -> tuple[list[list[int]], list[list[int]]]:
    pools = pools_of(TRAIN), pools_of(TEST)
    train, test = schemes.SCHEMES[kind](plan_of(kind, **options), *pools)
    return as_lists(train), as_lists(test)


def test_iid_is_one_shuffle_cut_into_lists_of_which_the_first_may_be_longer() -> None:
    for split, stream, labels in (
        (0, "partition", TRAIN), (1, "partition test", TEST),
    ):  # fmt: skip
        shuffled = generator(3, stream).permutation(np.arange(len(labels))).tolist()
        expected = []
        for client in range(7):
            size = len(labels) // 7 + (client < len(labels) % 7)
            own, shuffled = shuffled[:size], shuffled[size:]
            expected.append(sorted(own))
        assert dealt("iid", clients=7, seed=3)[split] == expected


def cut_by_hand(
    pools: list[np.ndarray], cuts: Sequence[Sequence[int]], stream: str
) -> list[list[int]]:
    rng = generator(3, stream)
    expected: list[list[int]] = [[] for _ in range(len(cuts[0]) + 1)]
    for pool, own in zip(pools, cuts, strict=True):
        shuffled = rng.permutation(pool).tolist()
        bounds = [0, *own, len(shuffled)]
        for client, (begin, end) in enumerate(pairwise(bounds)):
            expected[client] += shuffled[begin:end]
    return [sorted(own) for own in expected]


@pytest.mark.parametrize("alpha", [0.05, 100.0])
def test_dirichlet_cuts_each_class_at_its_own_draw(alpha: float) -> None:
    rng = generator(3, "partition")
    shares = [rng.dirichlet(np.full(6, alpha)) for _ in range(10)]
    found = dealt("dirichlet", clients=6, seed=3, alpha=alpha)
    for parts, labels, stream in (
        (found[0], TRAIN, "shuffle"), (found[1], TEST, "shuffle test"),
    ):  # fmt: skip
        pools = pools_of(labels)
        cuts = [
            [round(min(1.0, float(end)) * len(pool)) for end in np.cumsum(share)[:-1]]
            for share, pool in zip(shares, pools, strict=True)
        ]
        assert parts == cut_by_hand(pools, cuts, stream)


@pytest.mark.parametrize(("clients", "each"), [(6, 3), (3, 2), (12, 10)])
def test_sharding_takes_the_classes_with_the_fewest_holders(
    clients: int, each: int
) -> None:
    rng, held = generator(3, "partition"), np.zeros((clients, 10), bool)
    for client in range(clients):
        ties, holders = rng.random(10), held.sum(0)
        order = sorted(range(10), key=lambda label: (holders[label], ties[label]))
        held[client, order[:each]] = True
    assert np.ptp(held.sum(0)) <= 1
    found = dealt("sharding", clients=clients, seed=3, classes_per_client=each)
    for parts, labels, stream in (
        (found[0], TRAIN, "shuffle"), (found[1], TEST, "shuffle test"),
    ):  # fmt: skip
        pools = [
            pool if count else pool[:0]
            for pool, count in zip(pools_of(labels), held.sum(0), strict=True)
        ]
        cuts = [
            [
                int(held[: client + 1, label].sum())
                * len(pool)
                // max(1, held[:, label].sum())
                for client in range(clients - 1)
            ]
            for label, pool in enumerate(pools)
        ]
        assert parts == cut_by_hand(pools, cuts, stream)


@pytest.mark.parametrize(
    ("share", "each"), [(0.2, 60), (0.29, 100), (0.0, 7), (1.0, 333)]
)
def test_dominant_deals_each_class_from_its_own_deck(share: float, each: int) -> None:
    """And shuffles a deck again once it is used up; who has drawn last gets what it has
    not drawn yet.
    """
    rng = generator(3, "partition")
    orders = [rng.permutation(10).tolist() for _ in range(8)]
    found = dealt(
        "dominant", clients=8, seed=3, uniform_share=share, train_per_client=each,
        test_per_client=20,
    )  # fmt: skip
    for name, parts, labels, samples in (
        ("train", found[0], TRAIN, each), ("test", found[1], TEST, 20),
    ):  # fmt: skip
        rng, pools = generator(3, f"shuffle {name}"), pools_of(labels)
        decks = [rng.permutation(pool).tolist() for pool in pools]
        for client, order in enumerate(orders):
            group = dominant_groups(10)[client % 5]
            counts = dict.fromkeys(range(10), 0)
            uniform = int(share * samples + 1e-9)
            inside = [label for label in order if label in group]
            for total, among in ((uniform, order), (samples - uniform, inside)):
                for number in range(total):
                    counts[among[number % len(among)]] += 1
            own: list[int] = []
            for label, count in counts.items():
                drawn: list[int] = []
                while len(drawn) < count:
                    if not decks[label]:
                        again = rng.permutation(pools[label]).tolist()
                        fresh = [one for one in again if one not in drawn]
                        decks[label] = fresh + [one for one in again if one in drawn]
                    drawn.append(decks[label].pop(0))
                own += drawn
            assert parts[client] == sorted(own)


def test_owners_are_a_sample_and_new_clients_come_last() -> None:
    drawn = generator(3, "natural clients").permutation(9).tolist()
    plan = plan_of("natural", clients=6, new_clients=2, seed=3)
    expected = sorted(drawn[:4]) + sorted(drawn[4:6])
    assert schemes.natural_clients(plan, 9).tolist() == expected
    everybody = schemes.natural_clients(plan_of("natural", clients=9, seed=3), 9)
    assert everybody.tolist() == list(range(9))
    with pytest.raises(UserError, match="natural: 6 clients of 5 owners"):
        schemes.natural_clients(plan, 5)
    owners = np.array([4, 1, 4, 0, 1, 4, 2])
    found = schemes.samples_of(np.array([4, 0, 3]), np.array([0, 2, 3, 4, 6]), owners)
    assert as_lists(found) == [[0, 2], [3], []]


def test_bounds_of_schemes_are_allowed() -> None:
    for kind, options in (
        ("sharding", {"classes_per_client": 1}), ("sharding", {"classes_per_client": 10}),
        ("dominant", {"uniform_share": 0.0}), ("dominant", {"uniform_share": 1.0}),
        ("dominant", {"train_per_client": 1, "test_per_client": 0}),
    ):  # fmt: skip
        train, test = dealt(kind, **options)
        assert len(train) == len(test) == 5
    for kind, options in (
        ("sharding", {"classes_per_client": 0}), ("sharding", {"classes_per_client": 11}),
        ("dominant", {"uniform_share": -0.1}), ("dominant", {"uniform_share": 1.1}),
        ("dominant", {"train_per_client": 0}), ("dominant", {"test_per_client": -1}),
        ("dirichlet", {"alpha": 0.0}), ("dirichlet", {"alpha": np.inf}),
    ):  # fmt: skip
        with pytest.raises(UserError, match=kind):
            dealt(kind, **options)
    assert len(schemes.merged([])) == 0
    assert schemes.merged([np.array([3, 1]), np.array([2])]).tolist() == [1, 2, 3]


def test_groups_of_classes_by_hand() -> None:
    assert dominant_groups(1) == [[0]] and dominant_groups(2) == [[0], [1]]
    assert dominant_groups(3) == [[0, 1], [1, 2], [2, 0]]
    assert dominant_groups(7) == [[0, 1], [1, 2], [2, 3, 4], [4, 5], [5, 6, 0]]
    letters = dominant_groups(62)
    assert [len(group) for group in letters] == [10, 26, 26]
    assert [label for group in letters for label in group] == list(range(62))
