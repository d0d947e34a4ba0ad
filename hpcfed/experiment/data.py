"""The data set of a run, and who has which of its samples."""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from hpcfed.attacks.label_flip import Flipped
from hpcfed.data.brought import is_brought
from hpcfed.data.datasets import ArrayDataset, Dataset, Split, SyntheticSize
from hpcfed.data.loading import Share, load
from hpcfed.data.partition import Partition, Supplement, nobody, supplemented
from hpcfed.data.partition import partition as deal_out
from hpcfed.errors import UserError
from hpcfed.options import RunConfig
from hpcfed.runtime import randomness
from hpcfed.runtime.sharing import once_per_host
from hpcfed.runtime.world import World

VALIDATION_PER_CLASS = 100
"""Samples per class of a validation set whose size is not given."""


@dataclass(frozen=True)
class Dealt:
    """Which client has which samples, after the supplement and attacks."""

    partition: Partition
    supplement: Supplement
    attackers: np.ndarray
    """Ids of malicious clients, ascending."""
    owners: np.ndarray | None = None
    """Names of natural clients in the data set, newcomers included."""


def load_dataset(config: RunConfig, world: World) -> Dataset:
    """Load the data set on every rank; one rank per host reads it for all of them.

    If a rank may have to download it, the others wait and then read.
    """
    if is_brought(config.dataset):
        brought = _load(config, download=False)
        _check_same(config.dataset, brought, world)
        return brought
    if not config.download:
        return _load(config, download=False, share=partial(once_per_host, world))
    dataset = None
    # One rank per host downloads: hosts may or may not share a file system.
    if world.local_rank == 0:
        dataset = _load(config, download=True)
    world.role_barrier()
    return dataset or _load(config, download=False)


def load_alone(config: RunConfig) -> Dataset:
    """Load the data set in a process that is not a rank; download nothing."""
    return _load(config, download=False)


def _check_same(name: str, dataset: Dataset, world: World) -> None:
    """Refuse user data that differs between ranks, for example because a function draws
    random numbers without a seed, or because two hosts have different files.
    """
    if world.num_workers == 1:
        return
    found = world.role_allgather(fingerprint(dataset))
    if len(set(found)) > 1:
        raise UserError(
            f"data set {name} is not the same on all ranks; give its random numbers a "
            "seed, and every host the same files"
        )


def _load(
    config: RunConfig, *, download: bool, share: Share = lambda read: read()
) -> Dataset:
    # Synthetic data is large enough for all clients, including those that join later.
    everyone = config.clients + config.new_clients
    size = SyntheticSize(
        shape=config.shape,
        classes=config.synthetic_classes,
        train=everyone * config.train_per_client,
        test=everyone * config.test_per_client,
    )
    dataset = load(
        config.dataset,
        root=config.root,
        download=download,
        seed=config.seed_of_data,
        synthetic=size,
        reading=replace(config.reading, natural=config.partition == "natural"),
        share=share,
    )
    # Flipped data has every sample twice: again with the label that attackers give it.
    return Flipped(dataset) if config.attack == "label-flip" else dataset


def fingerprint(dataset: Dataset) -> str:
    """Return a checksum of data that was read; empty if options describe it."""
    honest = _honest(dataset)
    return honest.fingerprint if isinstance(honest, ArrayDataset) else ""


def _honest(dataset: Dataset) -> Dataset:
    """Return the data set without the flipped labels of attackers."""
    return dataset.honest if isinstance(dataset, Flipped) else dataset


def deal(config: RunConfig, dataset: Dataset, *, validates: bool) -> Dealt:
    """Deal the samples out to clients.

    `validates` says whether the method's server needs a validation set; the supplement
    needs one, too.
    """
    # The server's samples are taken from the training data before clients get theirs.
    # The partition uses honest labels, so that an attack does not change it.
    honest = _honest(dataset)
    validation = config.validation
    if validation is None:
        needed = validates or config.supplement
        validation = _usual_validation(honest) if needed else 0
    # Before the supplement and the attack, so that neither changes who has which
    # samples.
    partition = _partition(config, honest, validation)
    supplement = nobody(config.clients)
    if config.supplement:
        partition, supplement = supplemented(
            partition,
            clients=config.clients,
            below=config.supplement_below or config.batch_size,
            share=config.supplement_share,
            seed=config.seed_of_data,
        )
    # Attackers are a prefix of one permutation: a larger set includes each smaller one.
    drawn = randomness.generator(config.seed, "attackers").permutation(config.clients)
    attackers = np.sort(drawn[: config.num_attackers])
    if isinstance(dataset, Flipped):
        partition = replace(partition, train=dataset.poison(partition.train, attackers))
    owners = None
    if partition.owners is not None:
        assert honest.owner_names is not None
        owners = honest.owner_names[partition.owners]
    return Dealt(partition, supplement, attackers, owners)


def _usual_validation(dataset: Dataset) -> int:
    """Return the default size of a validation set: the same number of each class, small
    enough that the rarest class keeps nine of ten samples.
    """
    classes = _num_classes(dataset)
    rarest = np.bincount(_labels(dataset, "train"), minlength=classes).min()
    return classes * max(1, min(VALIDATION_PER_CLASS, int(rarest) // 10))


def _partition(config: RunConfig, dataset: Dataset, validation: int) -> Partition:
    plan = config.plan(_num_classes(dataset), validation)
    owners = None
    if config.partition == "natural":
        of_train, of_test = dataset.owners("train"), dataset.owners("test")
        # `check_partition` has already refused data without owners.
        assert of_train is not None and of_test is not None
        owners = (of_train, of_test)
    return deal_out(
        plan, _labels(dataset, "train"), _labels(dataset, "test"), owners=owners
    )


def _num_classes(dataset: Dataset) -> int:
    return dataset.classes if dataset.task == "classification" else 1


def _labels(dataset: Dataset, split: Split) -> np.ndarray:
    """Return the class of every sample; without classes, all are in class 0."""
    if dataset.task == "classification":
        return dataset.labels(split)
    return np.zeros(dataset.size(split), np.int64)
