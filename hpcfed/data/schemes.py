"""The partition schemes of the papers: how the samples of each class reach the clients.

A scheme gets the samples of each class in both splits and returns sorted sample numbers
per client. It draws from random streams keyed by the seed, in a fixed order: another
order would change the federation of every recorded seed.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from hpcfed.data import PartitionPlan
from hpcfed.errors import UserError
from hpcfed.runtime import randomness

ClassPools = list[np.ndarray]
"""Per class: the numbers of its samples."""
ClientLists = list[np.ndarray]
"""Per client: the numbers of its samples, sorted."""
TrainAndTest = tuple[ClientLists, ClientLists]


def merged(lists: Sequence[np.ndarray]) -> np.ndarray:
    """Return all samples of several lists as one sorted list, perhaps empty."""
    # numpy cannot concatenate zero arrays, and an empty list would be float64.
    nothing = np.empty(0, dtype=np.int64)
    return np.sort(np.concatenate([nothing, *lists]))


def by_owner(samples: np.ndarray, owner: np.ndarray, clients: int) -> ClientLists:
    """Return the sorted samples of every client, given the owner of each sample.

    One sort for all: cutting and merging one by one would take two minutes for a
    million clients, each with pieces of ten classes.
    """
    order = np.lexsort((samples, owner))
    joined = samples[order]
    ends = np.cumsum(np.bincount(owner, minlength=clients)).tolist()
    return [joined[start:end] for start, end in pairwise([0, *ends])]


def iid(plan: PartitionPlan, train: ClassPools, test: ClassPools) -> TrainAndTest:
    """Shuffle all samples and cut them into equal lists."""

    def split(pools: ClassPools, rng: np.random.Generator) -> ClientLists:
        shuffled = rng.permutation(merged(pools))
        # Sizes differ by at most one, and the first clients have more.
        each, more = divmod(len(shuffled), plan.clients)
        sizes = np.full(plan.clients, each)
        sizes[:more] += 1
        owner = np.repeat(np.arange(plan.clients), sizes)
        return by_owner(shuffled, owner, plan.clients)

    # Separate streams, so that the training data does not depend on the amount of test
    # data.
    return (
        split(train, randomness.generator(plan.seed, "partition")),
        split(test, randomness.generator(plan.seed, "partition test")),
    )


def dirichlet(plan: PartitionPlan, train: ClassPools, test: ClassPools) -> TrainAndTest:
    """Split each class by proportions drawn from Dirichlet(alpha)."""
    if not (plan.alpha > 0 and math.isfinite(plan.alpha)):
        raise UserError(
            f"dirichlet: alpha must be above 0, not {plan.alpha}; 0.1 is very uneven, "
            "100 nearly even"
        )
    # One draw of proportions per class, over the clients.
    rng = randomness.generator(plan.seed, "partition")
    concentration = np.full(plan.clients, plan.alpha)
    proportions = [rng.dirichlet(concentration) for _ in train]
    ends = np.cumsum(proportions, axis=1)

    def cuts(label: int, samples: int) -> np.ndarray:
        # Rounding may push a cumulative sum above 1.
        shares = ends[label, :-1].clip(max=1.0)
        return np.rint(shares * samples).astype(np.int64)

    return _cut_classes(train, test, cuts, seed=plan.seed)


def sharding(plan: PartitionPlan, train: ClassPools, test: ClassPools) -> TrainAndTest:
    """Give each client a fixed number of classes; a class's holders share it evenly."""
    classes = len(train)
    if not 1 <= plan.classes_per_client <= classes:
        raise UserError(
            f"sharding: a client can hold 1 to {classes} classes, not "
            f"{plan.classes_per_client}"
        )
    rng = randomness.generator(plan.seed, "partition")
    held = _held_classes(plan.clients, classes, plan.classes_per_client, rng)
    holders = held.sum(axis=0)
    ends = np.cumsum(held, axis=0)

    def cuts(label: int, samples: int) -> np.ndarray:
        # A client that does not hold the class gets an empty piece: its end does not
        # advance.
        num_holders = max(1, holders[label])
        return ends[:-1, label] * samples // num_holders

    def without_unheld(pools: ClassPools) -> ClassPools:
        # Otherwise the last client would get all samples of a class without holders.
        counted = zip(pools, holders, strict=True)
        return [pool if count else pool[:0] for pool, count in counted]

    return _cut_classes(
        without_unheld(train), without_unheld(test), cuts, seed=plan.seed
    )


def dominant(plan: PartitionPlan, train: ClassPools, test: ClassPools) -> TrainAndTest:
    """Give each client samples of all classes, and more of its dominant group (pFedGPA).

    All clients have the same size. When a class is used up, its samples are dealt
    again.
    """
    if not 0 <= plan.uniform_share <= 1:
        raise UserError(
            f"dominant: the uniform share must lie in 0 to 1, not {plan.uniform_share}"
        )
    if plan.train_per_client < 1 or plan.test_per_client < 0:
        raise UserError(
            "dominant: a client needs training samples, not "
            f"{plan.train_per_client} (and {plan.test_per_client} test samples)"
        )
    groups = dominant_groups(len(train))
    rng = randomness.generator(plan.seed, "partition")
    # Both splits use the same order of classes, so that test shares follow train shares.
    orders = [rng.permutation(len(train)) for _ in range(plan.clients)]

    def split(name: str, pools: ClassPools, samples: int) -> ClientLists:
        rng = randomness.generator(plan.seed, f"shuffle {name}")
        deck = _Deck(name, pools, rng)
        lists = []
        for client, order in enumerate(orders):
            group = groups[client % len(groups)]
            counts = _dominant_counts(order, group, samples, plan.uniform_share)
            drawn = []
            for label, count in enumerate(counts.tolist()):
                if count:
                    drawn.append(deck.draw(label, count))
            lists.append(merged(drawn))
        return lists

    return (
        split("train", train, plan.train_per_client),
        split("test", test, plan.test_per_client),
    )


def natural_clients(plan: PartitionPlan, num_owners: int) -> np.ndarray:
    """Return the owner of each client, in the owners' order.

    If there are fewer clients than owners, they are a sample: a prefix of one
    permutation, so a larger sample includes each smaller one. New clients are drawn
    after the others.
    """
    if plan.clients > num_owners:
        raise UserError(f"natural: {plan.clients} clients of {num_owners} owners")
    rng = randomness.generator(plan.seed, "natural clients")
    drawn = rng.permutation(num_owners)[: plan.clients]
    known = plan.clients - plan.new_clients
    return np.concatenate([np.sort(drawn[:known]), np.sort(drawn[known:])])


def samples_of(
    clients: np.ndarray, samples: np.ndarray, owners: np.ndarray
) -> ClientLists:
    """Return the samples of each of these owners."""
    # Stable, so that every client's samples stay sorted.
    by_owner = np.argsort(owners[samples], kind="stable")
    ordered = samples[by_owner]
    starts = np.searchsorted(owners[ordered], clients, "left")
    ends = np.searchsorted(owners[ordered], clients, "right")
    return [ordered[start:end] for start, end in zip(starts, ends, strict=True)]


SCHEMES: dict[str, Callable[[PartitionPlan, ClassPools, ClassPools], TrainAndTest]] = {
    "iid": iid,
    "dirichlet": dirichlet,
    "sharding": sharding,
    "dominant": dominant,
}


def dominant_groups(classes: int) -> list[list[int]]:
    """Return pFedGPA's groups of dominant classes.

    Client i belongs to group i modulo their number. 62 classes (EMNIST by class) are
    grouped into digits, upper case and lower case. Otherwise the classes form a ring,
    cut into five windows of about classes/5 (or one window per class, if fewer), each
    reaching one class into the next. Ten classes give {0,1,2}, {2,3,4}, {4,5,6},
    {6,7,8}, {8,9,0}. Two classes are a group each, without the overlap.
    """
    if classes == 62:
        return [list(range(10)), list(range(10, 36)), list(range(36, 62))]
    if classes <= 2:
        return [[label] for label in range(classes)]
    # The last window wraps around, to class 0.
    windows = min(5, classes)
    bounds = [window * classes // windows for window in range(windows + 1)]
    groups = []
    for start, stop in pairwise(bounds):
        groups.append([label % classes for label in range(start, stop + 1)])
    return groups


def _cut_classes(
    train: ClassPools,
    test: ClassPools,
    cuts: Callable[[int, int], np.ndarray],
    *,
    seed: int,
) -> TrainAndTest:
    """Cut each shuffled class at `cuts(label, samples)` into one piece per client.

    Both splits are cut at the same proportions.
    """

    def split(pools: ClassPools, rng: np.random.Generator) -> ClientLists:
        samples, owners = [], []
        for label, pool in enumerate(pools):
            ends = cuts(label, len(pool))
            samples.append(rng.permutation(pool))
            # The last client gets the rest.
            sizes = np.diff(ends, prepend=0, append=len(pool))
            owners.append(np.repeat(np.arange(len(sizes)), sizes))
        return by_owner(np.concatenate(samples), np.concatenate(owners), len(sizes))

    return (
        split(train, randomness.generator(seed, "shuffle")),
        split(test, randomness.generator(seed, "shuffle test")),
    )


def _held_classes(
    clients: int, classes: int, per_client: int, rng: np.random.Generator
) -> np.ndarray:
    """Return [clients, classes] booleans: which client holds which class.

    Every client takes the classes with the fewest holders, with random ties. So the
    numbers of holders of any two classes never differ by more than one.
    """
    held = np.zeros((clients, classes), dtype=bool)
    holders = np.zeros(classes, dtype=np.int64)
    for client in range(clients):
        # lexsort sorts by its last key first.
        fewest_holders_first = np.lexsort((rng.random(classes), holders))
        taken = fewest_holders_first[:per_client]
        held[client, taken] = True
        holders[taken] += 1
    return held


def _dominant_counts(
    order: np.ndarray, group: list[int], samples: int, uniform_share: float
) -> np.ndarray:
    """Return the samples of each class: a uniform share, and the rest from the group.

    Each of the two is as even as possible; its remainder goes to the first classes of
    `order`.
    """
    # 1e-9: a product such as 0.29 · 100 is slightly below the intended whole number.
    uniform = math.floor(uniform_share * samples + 1e-9)
    in_group = order[np.isin(order, group)]
    counts = np.zeros(len(order), dtype=np.int64)
    for total, labels in ((uniform, order), (samples - uniform, in_group)):
        counts[labels] += total // len(labels)
        counts[labels[: total % len(labels)]] += 1
    return counts


class _Deck:
    """Shuffled samples of each class, dealt without replacement.

    A class that is used up is reshuffled.
    """

    def __init__(self, split: str, pools: ClassPools, rng: np.random.Generator) -> None:
        self._split = split
        self._pools = pools
        self._rng = rng
        self._left = [rng.permutation(pool) for pool in pools]

    def draw(self, label: int, count: int) -> np.ndarray:
        """Return `count` samples of a class, none twice unless the class has fewer."""
        pool = self._pools[label]
        if not len(pool):
            raise UserError(
                f"dominant: class {label} has no {self._split} samples left; use "
                "another partition"
            )
        left = self._left[label]
        drawn = left[:count]
        self._left[label] = left[count:]
        while len(drawn) < count:
            again = self._rng.permutation(pool)
            # What this client has just drawn comes last, so only a client larger than
            # the class gets a sample twice.
            seen = np.isin(again, drawn)
            again = np.concatenate([again[~seen], again[seen]])
            missing = count - len(drawn)
            drawn = np.concatenate([drawn, again[:missing]])
            self._left[label] = again[missing:]
        return drawn
