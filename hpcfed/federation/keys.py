"""The keys of this rank's clients, for the numbers that they draw themselves."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcfed.runtime import randomness
from hpcfed.runtime.device import on_device

AHEAD = 16
"""Rounds whose keys are drawn together: those of 10 clients take as long as one's."""
PURPOSES = 64
"""Purposes whose keys are kept."""


class _RoundKeys(NamedTuple):
    ids: bytes
    rounds: range
    keys: tuple[Tensor, ...]
    """The keys of the clients in each of these rounds."""


class ClientKeys:
    """Draws a key for each client by purpose and round. If a round has the clients of
    the one before, the keys of the next rounds are drawn and moved with its own.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._device = device
        self._kept: dict[str, _RoundKeys] = {}

    def __call__(self, purpose: str, round: int, ids: np.ndarray) -> Tensor:
        """Return a key for each of these clients."""
        kept, rounds = self._kept.get(purpose), range(round, round + 1)
        known = ids.tobytes()
        if kept is not None and kept.ids == known:
            if round in kept.rounds:
                return kept.keys[round - kept.rounds.start]
            if round == kept.rounds.stop:
                most = randomness.FEW // max(1, len(ids))
                rounds = range(round, round + max(1, min(AHEAD, most)))
        # On the host, where the few numbers of a cohort take no launches.
        drawn = randomness.client_keys_of_rounds(self._seed, purpose, rounds, ids)
        keys = on_device(drawn, self._device).unbind()
        if len(self._kept) >= PURPOSES:
            self._kept.clear()
        self._kept[purpose] = _RoundKeys(known, rounds, keys)
        return keys[0]
