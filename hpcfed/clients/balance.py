"""Decides when measured times call for another placement of clients, and which one."""

from dataclasses import dataclass

import numpy as np

from hpcfed.clients.placement import place, rank_loads

WINDOW = 5
"""Rounds to measure before a placement is judged, after a round to warm up."""
THRESHOLD = 1.1
"""Ranks are balanced if the slowest takes at most this many times the mean."""
MAX_RELOCATIONS = 3
"""The most relocations in a run."""


@dataclass(frozen=True)
class Proposal:
    """A better placement."""

    rank: np.ndarray
    """The new rank of every client."""
    before: float
    """Measured imbalance: the slowest rank's train seconds divided by the mean."""
    after: float
    """Predicted imbalance."""
    gain: float
    """Seconds that a round is predicted to save."""


class Balance:
    """Follows the ranks' training, round by round, and proposes a placement that pays.

    A rank's pace is its seconds per load, the median over a window of rounds. A
    proposal must be better in every single round of the window, so that noise does not
    relocate clients. It must also save more in the remaining rounds than relocating
    costs.
    """

    def __init__(
        self,
        loads: np.ndarray,
        rank: np.ndarray,
        ranks: int,
        *,
        longest: float,
        relocation_seconds: float,
        relocations: int = 0,
    ) -> None:
        """`loads` and `rank` have an entry per client; `longest` is as in `rank_loads`.

        `relocation_seconds` is an estimate of what a relocation costs; `relocations` is
        the number before the run was resumed.
        """
        self._loads = loads
        self._rank = rank
        self._ranks = ranks
        self._longest = longest
        self._relocation_seconds = relocation_seconds
        self._warmup_seconds: float | None = None
        self._relocations = relocations
        # Rounds of the window; -1 before the warm-up round.
        self._rounds = -1
        self._work: list[np.ndarray] = []
        self._seconds: list[np.ndarray] = []
        self._cohorts: list[int] = []

    def note(self, clients: np.ndarray, seconds: np.ndarray | None) -> bool:
        """Take in a finished round's cohort and every rank's train seconds.

        The seconds are None if they are unknown. Return True at the window's end.
        """
        # Counted even if nothing is measured, so that all ranks agree on windows.
        self._rounds += 1
        if self._relocations >= MAX_RELOCATIONS:
            return False
        if seconds is not None and self._rounds == 0:
            self._warmup_seconds = float(seconds.max())
        elif seconds is not None:
            self._work.append(self._rank_loads(clients, self._rank))
            self._seconds.append(seconds)
            self._cohorts.append(len(clients))
        return self._rounds == WINDOW

    def propose(self, rounds_left: int) -> Proposal | None:
        """Judge the window and begin the next one; the seconds must be known."""
        work = np.array(self._work)
        seconds = np.array(self._seconds)
        share = float(np.mean(self._cohorts)) / len(self._loads)
        # A round waits for its slowest rank, so that rank's seconds are the round's.
        slowest = float(np.median(seconds.max(1)))
        # Also if nothing is proposed below: every window is judged once.
        self.next_window()
        paces = _paces(work, seconds)
        pace = np.median(paces, 0)
        everyone = np.arange(len(self._loads))
        loads_now = self._rank_loads(everyone, self._rank)
        before = imbalance(loads_now * pace)
        # Also if `before` is NaN: nothing was measured.
        if not before > THRESHOLD:
            return None
        rank = place(self._loads, self._ranks, speeds=1 / pace, longest=self._longest)
        loads_then = self._rank_loads(everyone, rank)
        # A round trains only a share of the clients, so it gains only that share.
        slowest_now = (loads_now * paces).max(1)
        slowest_then = (loads_then * paces).max(1)
        gains = share * (slowest_now - slowest_then)
        gain = float(np.median(gains))
        # The round after a relocation warms up again.
        warmup = max(0.0, (self._warmup_seconds or 0.0) - slowest)
        cost = self._relocation_seconds + warmup
        if gains.min() <= 0 or gain * rounds_left <= cost:
            return None
        return Proposal(rank, before, imbalance(loads_then * pace), gain)

    def next_window(self) -> None:
        """Forget the rounds so far."""
        self._rounds = 0
        self._work = []
        self._seconds = []
        self._cohorts = []

    def relocated(self, rank: np.ndarray, seconds: float) -> None:
        """Note that clients were relocated in `seconds`: the next round warms up."""
        self._rank = rank
        self._relocation_seconds = seconds
        self._relocations += 1
        self._rounds = -1

    def _rank_loads(self, clients: np.ndarray, rank: np.ndarray) -> np.ndarray:
        return rank_loads(
            self._loads[clients], rank[clients], self._ranks, longest=self._longest
        )


def _paces(work: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return seconds per load [rounds, ranks].

    An idle rank is assumed to be as fast as in its other rounds, or as the other ranks.
    """
    # A rank without clients in a round has no pace there.
    with np.errstate(divide="ignore", invalid="ignore"):
        paces = np.where(work > 0, seconds / work, np.nan)
    known = ~np.isnan(paces)
    # Not nanmedian, whose imports would take tens of milliseconds.
    overall = np.median(paces[known]) if known.any() else np.nan
    usual = np.full(paces.shape[1], overall)
    for rank in np.flatnonzero(known.any(0)):
        pace = paces[:, rank]
        usual[rank] = np.median(pace[known[:, rank]])
    return np.maximum(np.where(known, paces, usual), 1e-12)


def imbalance(seconds: np.ndarray) -> float:
    """Return the slowest rank's seconds divided by the mean: 1 if all take equally
    long.

    NaN if none takes any time.
    """
    mean = seconds.mean()
    return float(seconds.max() / mean) if mean > 0 else float("nan")
