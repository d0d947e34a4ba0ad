"""GenFed's data supplement: before the first round, clients with little data get
samples from the validation set.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from hpcfed.data.partition import Partition
from hpcfed.data.schemes import merged
from hpcfed.errors import UserError
from hpcfed.runtime import randomness


@dataclass(frozen=True)
class Supplement:
    """What clients were given."""

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
