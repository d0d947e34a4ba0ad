"""GenFed's data supplement: before the first round, clients with little data get
samples of the validation set.
"""

from dataclasses import dataclass, replace

import numpy as np

from hpcfed.data.partition import Partition
from hpcfed.errors import UserError
from hpcfed.runtime import randomness


@dataclass(frozen=True)
class Supplement:
    samples: np.ndarray
    """What every client was given, in samples."""
    leaked: int
    """Samples of the validation set that are now trained on, each counted once."""


def nobody(clients: int) -> Supplement:
    return Supplement(np.zeros(clients, np.int64), 0)


def supplemented(
    parts: Partition, *, clients: int, below: int, share: float, seed: int
) -> tuple[Partition, Supplement]:
    """The first so many clients ask if they have fewer than `below` samples; later ones
    come after the first round.

    Each that asks gets a draw of its own of at most `share` of the validation set,
    without replacement; the set itself stays as it is, so that what leaks of it is
    counted.
    """
    size = int(share * len(parts.validation) + 1e-9)
    if not size:
        raise UserError(
            f"--supplement-share {share} of {len(parts.validation)} validation samples "
            "is less than one; "
            f"use --supplement-share {1 / len(parts.validation):.2g} or a larger --validation"
        )
    asking = [i for i in range(clients) if len(parts.train[i]) < below]
    draws = {
        i: randomness.generator(seed, "supplement", i).choice(
            parts.validation, size, replace=False
        )
        for i in asking
    }
    train = [
        np.sort(np.concatenate([own, draws[i]])) if i in draws else own
        for i, own in enumerate(parts.train)
    ]
    samples = np.array([size if i in draws else 0 for i in range(clients)])
    leaked = len(np.unique(np.concatenate([np.empty(0, np.int64), *draws.values()])))
    return replace(parts, train=train), Supplement(samples, leaked)
