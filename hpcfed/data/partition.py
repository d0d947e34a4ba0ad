"""Who holds which samples: depends only on the labels, the plan and its seed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from hpcfed.data import PARTITIONS, PartitionPlan
from hpcfed.data.schemes import (
    SCHEMES,
    ClassPools,
    ClientLists,
    TrainAndTest,
    merged,
    natural_clients,
    samples_of,
)
from hpcfed.errors import UserError, unknown
from hpcfed.runtime import randomness


@dataclass(frozen=True)
class Partition:
    """Sorted sample numbers of every client and of the server."""

    train: list[np.ndarray]
    """Per client, into the training set."""
    test: list[np.ndarray]
    """Per client, into the test set. Labels are distributed as in its training data, or
    the client has all samples of its classes, and clients share them.
    """
    validation: np.ndarray
    """Held by the server: balanced, of the training set, disjoint from clients."""
    owners: np.ndarray | None = None
    """Under natural: the owner number of each client."""


def class_counts(
    lists: Sequence[np.ndarray], labels: np.ndarray, classes: int
) -> np.ndarray:
    """Count every client's samples of every class: [client, class]."""
    sizes = [len(samples) for samples in lists]
    client = np.repeat(np.arange(len(lists)), sizes)
    of_samples = labels[np.concatenate([np.empty(0, np.int64), *lists])]
    # One count over all pairs of client and class: a loop over a million clients is
    # slow.
    counts = np.bincount(client * classes + of_samples, minlength=len(lists) * classes)
    return counts.reshape(len(lists), classes)


def partition(
    plan: PartitionPlan,
    train_labels: np.ndarray,
    test_labels: np.ndarray,
    *,
    owners: tuple[np.ndarray, np.ndarray] | None = None,
) -> Partition:
    """Split the samples with these labels among the plan's clients.

    `owners` are those of the training and of the test samples, if known.
    """
    if plan.scheme not in PARTITIONS:
        raise unknown("partition", plan.scheme, PARTITIONS)
    if plan.clients < 1:
        raise UserError(f"a federation needs at least 1 client, not {plan.clients}")
    train = _by_class(train_labels, plan.classes)
    test = _by_class(test_labels, plan.classes)
    # Before clients get theirs, so that no client trains on the server's samples.
    train, validation = _carve_validation(train, plan.validation, seed=plan.seed)
    if plan.scheme == "natural":
        assert owners is not None
        num_owners = int(owners[0].max()) + 1
        clients = natural_clients(plan, num_owners)
        train_lists = samples_of(clients, merged(train), owners[0])
        test_lists = samples_of(clients, np.arange(len(owners[1])), owners[1])
        return Partition(train_lists, test_lists, validation, clients)
    train_lists, test_lists = _dealt(plan, train, test)
    if plan.test_classes == "held":
        test_lists = _of_held_classes(train_lists, np.asarray(train_labels), test)
    return Partition(train_lists, test_lists, validation)


def _dealt(plan: PartitionPlan, train: ClassPools, test: ClassPools) -> TrainAndTest:
    """Deal out all samples by the plan's scheme, to known and new clients."""
    scheme = SCHEMES[plan.scheme]
    if not plan.new_classes:
        return scheme(plan, train, test)
    # Known and new clients are two federations over disjoint classes. Ids of known
    # clients come first.
    drawn = randomness.generator(plan.seed, "new classes").permutation(plan.classes)
    known_classes = np.sort(drawn[plan.new_classes :])
    new_classes = np.sort(drawn[: plan.new_classes])
    num_known = plan.clients - plan.new_clients
    known_train, known_test = scheme(
        replace(plan, clients=num_known),
        [train[label] for label in known_classes],
        [test[label] for label in known_classes],
    )
    new_train, new_test = scheme(
        replace(plan, clients=plan.new_clients),
        [train[label] for label in new_classes],
        [test[label] for label in new_classes],
    )
    return known_train + new_train, known_test + new_test


def _of_held_classes(
    train: ClientLists, labels: np.ndarray, test: ClassPools
) -> ClientLists:
    """Return for every client all test samples of the classes that it trains on."""
    lists = []
    for samples in train:
        held = np.unique(labels[samples])
        lists.append(merged([test[label] for label in held]))
    return lists


def _by_class(labels: np.ndarray, classes: int) -> ClassPools:
    labels = np.asarray(labels)
    return [np.flatnonzero(labels == label) for label in range(classes)]


def _carve_validation(
    pools: ClassPools, samples: int, *, seed: int
) -> tuple[ClassPools, np.ndarray]:
    """Return the pools without the validation set, and this set, balanced by class."""
    per_class = samples // len(pools)
    if samples < 0 or (samples and not per_class):
        raise UserError(
            f"validation: {samples} samples cannot hold all {len(pools)} classes; give "
            "0 or more of each"
        )
    for label, pool in enumerate(pools):
        if len(pool) < per_class:
            raise UserError(
                f"validation: {per_class} samples per class, but class {label} has "
                f"only {len(pool)}; ask for fewer"
            )
    # A separate stream: a validation set does not change the scheme's draws.
    rng = randomness.generator(seed, "validation")
    remaining, validation = [], []
    for pool in pools:
        shuffled = rng.permutation(pool)
        validation.append(shuffled[:per_class])
        remaining.append(np.sort(shuffled[per_class:]))
    return remaining, merged(validation)


@dataclass(frozen=True)
class Supplement:
    """What GenFed's supplement gave clients with little data before round 1."""

    samples: np.ndarray
    """Number of samples that every client was given."""
    leaked: int
    """Samples of the validation set that are now trained on, each counted once."""
    below: float = 0.0
    """Clients with fewer samples than this were given some."""


def nobody(clients: int) -> Supplement:
    """Return the supplement of a run without one."""
    return Supplement(np.zeros(clients, np.int64), 0)


def supplemented(
    partition: Partition,
    *,
    clients: int,
    below: int | Literal["mean"],
    share: float,
    seed: int,
) -> tuple[Partition, Supplement]:
    """Give more samples to each of the first `clients` clients that has fewer than
    `below`; `mean` means the clients' average.

    Later clients join after the first round and get none. Each client draws at most
    `share` of the validation set, without replacement. The validation set itself does
    not change, so what leaks from it is counted.
    """
    # 1e-9: a product such as 0.29 · 100 is slightly below the intended whole number.
    size = int(share * len(partition.validation) + 1e-9)
    if not size:
        raise UserError(
            f"--supplement-share {share} of {len(partition.validation)} validation samples "
            "is less than one; use --supplement-share "
            f"{1 / len(partition.validation):.2g} or a larger --validation"
        )
    train = list(partition.train)
    least = _mean_size(train[:clients]) if below == "mean" else float(below)
    samples = np.zeros(clients, np.int64)
    draws = []
    for client in range(clients):
        if len(train[client]) >= least:
            continue
        # Keyed by client, so that it does not depend on the other clients.
        rng = randomness.generator(seed, "supplement", client)
        draw = rng.choice(partition.validation, size, replace=False)
        train[client] = merged([train[client], draw])
        samples[client] = size
        draws.append(draw)
    # Two clients may draw the same sample, which counts as one leak.
    leaked = len(np.unique(merged(draws)))
    return replace(partition, train=train), Supplement(samples, leaked, least)


def _mean_size(train: Sequence[np.ndarray]) -> float:
    """Return how many samples clients have on average."""
    return sum(map(len, train)) / len(train)
