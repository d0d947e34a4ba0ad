"""The data set of a run, and who has which of its samples."""

from dataclasses import dataclass, replace

import numpy as np

from hpcfed.attacks.label_flip import Flipped
from hpcfed.config import RunConfig
from hpcfed.data.datasets import ArrayDataset, Dataset
from hpcfed.data.loading import load
from hpcfed.data.partition import Partition
from hpcfed.data.partition import partition as deal_out
from hpcfed.data.supplement import Supplement, nobody, supplemented
from hpcfed.data.synthetic import SyntheticSize
from hpcfed.runtime import randomness
from hpcfed.runtime.world import World

VALIDATION_PER_CLASS = 100
"""Samples of a validation set whose size nobody has named."""


@dataclass(frozen=True)
class Dealt:
    """Who has which samples, after the supplement and after attackers have changed
    theirs.
    """

    partition: Partition
    supplement: Supplement
    attackers: np.ndarray
    """Ids of malicious clients, ascending."""


def load_dataset(config: RunConfig, world: World) -> Dataset:
    """Load the data set on every rank; one rank of each host downloads, the others wait
    for it and read.
    """
    if not config.download:
        return _load(config, download=False)
    dataset = None
    if world.local_rank == 0:
        dataset = _load(config, download=True)
    world.role_barrier()
    return dataset or _load(config, download=False)


def _load(config: RunConfig, *, download: bool) -> Dataset:
    # Synthetic data is as large as all clients need, those that join later included.
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
        seed=config.seed,
        synthetic=size,
    )
    # It offers every sample a second time, with the label that attackers give it.
    return Flipped(dataset) if config.attack == "label-flip" else dataset


def fingerprint(dataset: Dataset) -> str:
    """Return a checksum of a data set that was read; empty for one that the options
    describe.
    """
    honest = _honest(dataset)
    return honest.fingerprint if isinstance(honest, ArrayDataset) else ""


def _honest(dataset: Dataset) -> Dataset:
    """Return the data set without labels that attackers have flipped."""
    return dataset.honest if isinstance(dataset, Flipped) else dataset


def deal(config: RunConfig, dataset: Dataset, *, validates: bool) -> Dealt:
    """Deal the samples out to clients.

    `validates`: the method's server needs a validation set, as the supplement does.
    """
    # The server's samples come out of the training data, before clients get theirs.
    # Honest labels decide who has what, so that an attack changes no partition.
    honest = _honest(dataset)
    validation = config.validation
    if validation is None:
        needed = validates or config.supplement
        validation = _usual_validation(honest) if needed else 0
    partition = _partition(config, honest, validation)
    supplement = nobody(config.clients)
    if config.supplement:
        partition, supplement = supplemented(
            partition,
            clients=config.clients,
            below=config.supplement_below or config.batch_size,
            share=config.supplement_share,
            seed=config.seed,
        )
    # Attackers are a prefix of one permutation: more of them include the fewer.
    drawn = randomness.generator(config.seed, "attackers").permutation(config.clients)
    attackers = np.sort(drawn[: config.num_attackers])
    if isinstance(dataset, Flipped):
        partition = replace(partition, train=dataset.poison(partition.train, attackers))
    return Dealt(partition, supplement, attackers)


def _usual_validation(dataset: Dataset) -> int:
    """Return how many samples a validation set has by default: equally many of each
    class, few enough that the rarest class keeps nine of ten.
    """
    rarest = np.bincount(dataset.labels("train"), minlength=dataset.classes).min()
    return dataset.classes * max(1, min(VALIDATION_PER_CLASS, int(rarest) // 10))


def _partition(config: RunConfig, dataset: Dataset, validation: int) -> Partition:
    plan = config.plan(dataset.classes, validation)
    return deal_out(plan, dataset.labels("train"), dataset.labels("test"))
