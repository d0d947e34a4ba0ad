"""What DP-SGD within clients has spent: how often samples were trained on, and ε of it.

A neighbour has another sample in one's place, which changes the sum of a step's clipped
gradients by 2C. An epoch has a sample in one step, so n epochs are n Gaussian releases.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from hpcfed.federation.channel.accountant import Accountant
from hpcfed.federation.channel.memory import Memory
from hpcfed.options import RunConfig
from hpcfed.runtime.collectives import Collectives


@dataclass
class SampleSpending:
    """Counts releases of clients' samples; checkpoints hold them."""

    config: RunConfig
    memory: Memory
    collectives: Collectives

    def add(self, clients: np.ndarray, times: np.ndarray) -> None:
        """Count that samples of these clients of this rank, by position, were trained on
        so often.
        """
        at = torch.from_numpy(clients)
        self._releases()[at] += torch.from_numpy(times.astype(np.int64))

    def epsilon(self) -> float:
        """Return ε of the sample that was trained on most often, on the root; the same
        call on every rank.
        """
        here = int(self._releases().max()) if self.memory.num_clients else 0
        most = max(self.collectives.allgather(here))
        multiplier, delta = self.config.sample_noise, self.config.delta
        if not self.collectives.world.is_root or not multiplier or delta is None:
            return math.nan
        accountant = Accountant(self.config.accountant, "always", 1, 1, delta)
        return accountant.epsilon(multiplier, most) if most else 0.0

    def _releases(self) -> torch.Tensor:
        return self.memory.owned("releases", torch.zeros((), dtype=torch.int64))
