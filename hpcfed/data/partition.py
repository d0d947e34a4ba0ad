"""Who holds which samples: the partitions of the papers, a function of the labels and
the seed alone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hpcfed.data import PARTITIONS
from hpcfed.errors import UserError, unknown
from hpcfed.runtime import randomness


@dataclass(frozen=True)
class Partition:
    """Sample numbers, sorted."""

    train: list[np.ndarray]
    """Of each client, into the training set."""
    test: list[np.ndarray]
    """Of each client, into the test set, with the client's own distribution of labels.
    """
    validation: np.ndarray
    """Held by the server: balanced, taken from the training set, disjoint from all
    clients.
    """


def partition(
    kind: str,
    train_labels: np.ndarray,
    test_labels: np.ndarray,
    *,
    classes: int,
    clients: int,
    seed: int,
    alpha: float,
    classes_per_client: int,
    uniform_share: float,
    train_per_client: int,
    test_per_client: int,
    validation: int,
    new_clients: int = 0,
    new_classes: int = 0,
) -> Partition:
    """Deal the samples out; `alpha` is dirichlet's, `classes_per_client` sharding's,
    the next three are dominant's.

    Of the clients the last `new_clients` share `new_classes` classes, drawn at random,
    and the others the rest.
    """
    if kind not in PARTITIONS:
        raise unknown("partition", kind, PARTITIONS)
    if clients < 1:
        raise UserError(f"a federation needs at least 1 client, not {clients}")
    train, held_out = _carve_validation(
        _by_class(train_labels, classes), validation, seed=seed
    )
    test = _by_class(test_labels, classes)

    def deal(train: Pools, test: Pools, clients: int) -> Lists:
        if kind == "iid":
            return _iid(train, test, clients=clients, seed=seed)
        if kind == "dirichlet":
            return _dirichlet(train, test, clients=clients, seed=seed, alpha=alpha)
        if kind == "sharding":
            return _sharding(
                train,
                test,
                clients=clients,
                seed=seed,
                classes_per_client=classes_per_client,
            )
        sizes = (train_per_client, test_per_client)
        return _dominant(
            train,
            test,
            clients=clients,
            seed=seed,
            uniform_share=uniform_share,
            sizes=sizes,
        )

    if not new_classes:
        return Partition(*deal(train, test, clients), validation=held_out)
    drawn = randomness.generator(seed, "new classes").permutation(classes)
    known, new = np.sort(drawn[new_classes:]), np.sort(drawn[:new_classes])
    (known_train, known_test), (new_train, new_test) = (
        deal([train[label] for label in own], [test[label] for label in own], number)
        for own, number in ((known, clients - new_clients), (new, new_clients))
    )
    return Partition(
        known_train + new_train, known_test + new_test, validation=held_out
    )


def dominant_groups(classes: int) -> list[list[int]]:
    """pFedGPA's groups of dominant classes; client i belongs to group i mod their
    number.

    62 classes (EMNIST by class) are digits, upper case and lower case. Otherwise the
    classes form a ring, cut into five (or as many as there are classes, if fewer)
    windows of about classes/5, each reaching one class into the next: for ten {0,1,2},
    {2,3,4}, {4,5,6}, {6,7,8}, {8,9,0}. Two classes are a group each, without the
    overlap.
    """
    if classes == 62:
        return [list(range(10)), list(range(10, 36)), list(range(36, 62))]
    if classes <= 2:
        return [[label] for label in range(classes)]
    windows = min(5, classes)
    bounds = [window * classes // windows for window in range(windows + 1)]
    return [
        [label % classes for label in range(start, stop + 1)]
        for start, stop in pairwise(bounds)
    ]


Pools = list[np.ndarray]  # of each class: its samples
Lists = tuple[
    list[np.ndarray], list[np.ndarray]
]  # of each client: its training and its test samples


def _by_class(labels: np.ndarray, classes: int) -> Pools:
    return [np.flatnonzero(np.asarray(labels) == label) for label in range(classes)]


def _carve_validation(
    pools: Pools, samples: int, *, seed: int
) -> tuple[Pools, np.ndarray]:
    """The pools without the validation set, and the validation set: as many of each
    class.
    """
    share = samples // len(pools)
    if samples < 0 or (samples and not share):
        raise UserError(
            f"validation: {samples} samples cannot hold all {len(pools)} classes; give "
            "0 or more of each"
        )
    for label, pool in enumerate(pools):
        if len(pool) < share:
            raise UserError(
                f"validation: {share} samples per class, but class {label} has only "
                f"{len(pool)}; ask fewer"
            )
    rng = randomness.generator(seed, "validation")
    shuffled = [rng.permutation(pool) for pool in pools]
    return [np.sort(pool[share:]) for pool in shuffled], _sorted(
        [pool[:share] for pool in shuffled]
    )


def _sorted(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.sort(np.concatenate([np.empty(0, dtype=np.int64), *parts]))


def _iid(train: Pools, test: Pools, *, clients: int, seed: int) -> Lists:
    def deal(pools: Pools, rng: np.random.Generator) -> list[np.ndarray]:
        return [
            np.sort(part)
            for part in np.array_split(rng.permutation(_sorted(pools)), clients)
        ]

    return deal(train, randomness.generator(seed, "partition")), deal(
        test, randomness.generator(seed, "partition test")
    )


def _dirichlet(
    train: Pools, test: Pools, *, clients: int, seed: int, alpha: float
) -> Lists:
    if not (alpha > 0 and math.isfinite(alpha)):
        raise UserError(
            f"dirichlet: alpha must be above 0, not {alpha}; 0.1 is very uneven, 100 nearly even"
        )
    draw = randomness.generator(seed, "partition")
    ends = np.array([np.cumsum(draw.dirichlet(np.full(clients, alpha))) for _ in train])

    def cuts(label: int, samples: int) -> np.ndarray:
        return np.rint(ends[label, :-1].clip(max=1.0) * samples).astype(np.int64)

    return _cut(train, test, cuts, seed=seed)


def _cut(
    train: Pools, test: Pools, cuts: Callable[[int, int], np.ndarray], *, seed: int
) -> Lists:
    """Split each class at `cuts(label, samples)`: one piece per client, by the same
    proportions in both sets.
    """

    def deal(pools: Pools, rng: np.random.Generator) -> list[np.ndarray]:
        pieces = [
            np.split(rng.permutation(pool), cuts(label, len(pool)))
            for label, pool in enumerate(pools)
        ]
        return [_sorted(own) for own in zip(*pieces, strict=True)]

    return deal(train, randomness.generator(seed, "shuffle")), deal(
        test, randomness.generator(seed, "shuffle test")
    )


def _sharding(
    train: Pools, test: Pools, *, clients: int, seed: int, classes_per_client: int
) -> Lists:
    classes = len(train)
    if not 1 <= classes_per_client <= classes:
        raise UserError(
            f"sharding: a client can hold 1 to {classes} classes, not {classes_per_client}"
        )
    held = _held_classes(
        clients, classes, classes_per_client, randomness.generator(seed, "partition")
    )
    holders = held.sum(axis=0)
    ends = np.cumsum(held, axis=0)

    def cuts(label: int, samples: int) -> np.ndarray:
        return ends[:-1, label] * samples // max(1, holders[label])

    def kept(pools: Pools) -> Pools:
        return [
            pool if count else pool[:0]
            for pool, count in zip(pools, holders, strict=True)
        ]

    return _cut(kept(train), kept(test), cuts, seed=seed)


def _held_classes(
    clients: int, classes: int, each: int, rng: np.random.Generator
) -> np.ndarray:
    """[clients, classes] of booleans: every client takes the classes with the fewest
    holders, ties at random.

    Holders of any two classes then never differ by more than one.
    """
    held = np.zeros((clients, classes), dtype=bool)
    holders = np.zeros(classes, dtype=np.int64)
    for client in range(clients):
        own = np.lexsort((rng.random(classes), holders))[:each]
        held[client, own] = True
        holders[own] += 1
    return held


def _dominant(
    train: Pools,
    test: Pools,
    *,
    clients: int,
    seed: int,
    uniform_share: float,
    sizes: tuple[int, int],
) -> Lists:
    if not 0 <= uniform_share <= 1:
        raise UserError(
            f"dominant: the uniform share must lie in 0 to 1, not {uniform_share}"
        )
    if sizes[0] < 1 or sizes[1] < 0:
        raise UserError(
            f"dominant: a client needs training samples, not {sizes[0]} (and "
            f"{sizes[1]} test samples)"
        )
    groups = dominant_groups(len(train))
    order = randomness.generator(seed, "partition")
    orders = [order.permutation(len(train)) for _ in range(clients)]

    def deal(split: str, pools: Pools, samples: int) -> list[np.ndarray]:
        deck = _Deck(split, pools, randomness.generator(seed, f"shuffle {split}"))
        counts = [
            _dominant_counts(orders[i], groups[i % len(groups)], samples, uniform_share)
            for i in range(clients)
        ]
        return [
            _sorted(
                [deck.draw(label, count) for label, count in enumerate(own) if count]
            )
            for own in counts
        ]

    return deal("train", train, sizes[0]), deal("test", test, sizes[1])


def _dominant_counts(
    order: np.ndarray, group: list[int], samples: int, uniform_share: float
) -> np.ndarray:
    """Samples of each class: both parts as even as they can be; what remains goes to
    the first classes of `order`.
    """
    uniform = math.floor(uniform_share * samples + 1e-9)
    own = order[np.isin(order, group)]
    counts = np.zeros(len(order), dtype=np.int64)
    for part, labels in ((uniform, order), (samples - uniform, own)):
        counts[labels] += part // len(labels)
        counts[labels[: part % len(labels)]] += 1
    return counts


class _Deck:
    """Shuffled samples of each class, dealt without replacement; a class that is used
    up is shuffled anew.
    """

    def __init__(self, split: str, pools: Pools, rng: np.random.Generator) -> None:
        self._split = split
        self._pools = pools
        self._rng = rng
        self._left = [rng.permutation(pool) for pool in pools]

    def draw(self, label: int, count: int) -> np.ndarray:
        """`count` samples, none of them twice unless there are fewer in the class."""
        if not len(self._pools[label]):
            raise UserError(
                f"dominant: class {label} has no {self._split} samples left; use another partition"
            )
        drawn = self._left[label][:count]
        self._left[label] = self._left[label][count:]
        while len(drawn) < count:
            again = self._rng.permutation(self._pools[label])
            # What this client has just drawn comes last, so that only a client larger
            # than the class gets it twice.
            again = np.concatenate(
                [again[~np.isin(again, drawn)], again[np.isin(again, drawn)]]
            )
            missing = count - len(drawn)
            drawn, self._left[label] = (
                np.concatenate([drawn, again[:missing]]),
                again[missing:],
            )
        return drawn
