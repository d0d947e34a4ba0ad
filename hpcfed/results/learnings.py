"""What a run records of each of its server's learnings."""

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class LearningRecord:
    """One training of the server's model."""

    round: int
    rows: int
    """Uploads used for training."""
    seconds: dict[str, float]
    """By phase."""
    samples_per_second: dict[str, float]
    """By network, like the three fields below."""
    parameters: dict[str, int]
    flops: dict[str, float]
    utilisation: dict[str, float]
    """NaN if the device's peak is unknown."""
    peak_memory: np.ndarray
    """Bytes, for each server rank."""
    own: float = float("nan")
    """The share of clients whose generated update has their own direction."""
    own_uploads: float = float("nan")
    """The share of clients whose newest upload has; both are NaN in older records."""
    kept: float = float("nan")
    """Only in older records: the share of clients whose generated update is nearest to the
    mean of their own updates; still earlier, by latents of whole uploads.
    """
    kept_uploads: float = float("nan")
    """The share of clients whose newest upload is, in older records."""
    bank_bytes: np.ndarray = field(default_factory=lambda: np.full(1, np.nan))
    """Bytes of the uploads, for each server rank; NaN in older records."""
    promised: dict[str, dict[str, float]] = field(default_factory=dict)
    """Bytes of a rank by network and part, as ZeRO promises; NaN in older records."""
    training_memory: dict[str, float] = field(default_factory=dict)
    """The most bytes that training took on a server rank, by network, from its engine's
    start to the last step. NaN if that was not on a GPU, and in older records.
    """
    used: float = float("nan")
    """The round, from 0, that first started from its rows. NaN if clients waited for
    them, or if they are not used yet.
    """
    waited: float = float("nan")
    """Seconds that clients, which went on, had to wait for its rows in the end; NaN if
    they waited for all of the learning.
    """
    earlier: float = 0.0
    """Seconds of its steps in a run that was stopped before; no round has them."""

    @property
    def staleness(self) -> float:
        """Rounds between the uploads that it learnt from and the use of its rows."""
        return self.used - self.round - 1

    @property
    def hidden(self) -> float:
        """Seconds of learning during which clients went on; NaN as in `waited`."""
        # In this order NaN stays NaN.
        return max(sum(self.seconds.values()) - self.earlier - self.waited, 0.0)
