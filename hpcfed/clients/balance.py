"""When measured times call for another placement, and which."""

from dataclasses import dataclass

import numpy as np

from hpcfed.clients.placement import place, rank_loads
from hpcfed.record.series import imbalance

WINDOW = 5
"""Rounds that are measured before a placement is judged; the round before them, which
warms up, is left out.
"""
THRESHOLD = 1.1
"""Ranks are balanced while the slowest trains no longer than this many times the mean.
"""
MOVES = 3
"""Clients move at most so many times in a run."""


@dataclass(frozen=True)
class Proposal:
    """A better placement."""

    rank: np.ndarray
    """The new rank of every client."""
    before: float
    """Imbalance as measured: the slowest rank's train seconds by the mean."""
    after: float
    """Imbalance as predicted."""
    gain: float
    """Seconds that a round is predicted to save."""


class Balance:
    """Follows the ranks' training, round by round, and proposes a placement that pays.

    A rank's pace is its seconds per load, the median over a window of rounds. A
    proposal must be better in every single round of the window, so that noise moves
    nobody, and must save more in the rounds that remain than moving costs.
    """

    def __init__(
        self,
        loads: np.ndarray,
        rank: np.ndarray,
        ranks: int,
        *,
        longest: float,
        moving_seconds: float,
        moves: int = 0,
    ) -> None:
        """`loads` and `rank` of every client; `longest` as for `rank_loads`; what
        moving costs, as far as one knows.

        `moves` have been made already, before the run went on.
        """
        self._loads = loads
        self._rank = rank
        self._ranks = ranks
        self._longest = longest
        self._moving_seconds = moving_seconds
        self._warmup_seconds: float | None = None
        self._moves = moves
        self._rounds = (
            -1
        )  # of the window; -1 while the first, which warms up, is still to come
        self._work: list[np.ndarray] = []
        self._seconds: list[np.ndarray] = []
        self._cohorts: list[int] = []

    def note(self, clients: np.ndarray, seconds: np.ndarray | None) -> bool:
        """A finished round's cohort and every rank's train seconds, None where unknown;
        True at the window's end.
        """
        self._rounds += 1
        if self._moves >= MOVES:
            return False
        if seconds is not None and self._rounds == 0:
            self._warmup_seconds = float(seconds.max())
        elif seconds is not None:
            self._work.append(self._load_of(clients, self._rank))
            self._seconds.append(seconds)
            self._cohorts.append(len(clients))
        return self._rounds == WINDOW

    def propose(self, rounds_left: int) -> Proposal | None:
        """Judges the window, where the seconds were known, and begins the next one."""
        work, seconds = np.array(self._work), np.array(self._seconds)
        share = float(np.mean(self._cohorts)) / len(self._loads)
        slowest = float(np.median(seconds.max(1)))
        self.next_window()
        paces = _paces(work, seconds)
        pace = np.median(paces, 0)
        everyone = np.arange(len(self._loads))
        now = self._load_of(everyone, self._rank)
        before = imbalance(now * pace)
        if not before > THRESHOLD:
            return None
        rank = place(self._loads, self._ranks, speeds=1 / pace, longest=self._longest)
        then = self._load_of(everyone, rank)
        gains = share * ((now * paces).max(1) - (then * paces).max(1))
        gain = float(np.median(gains))
        cost = self._moving_seconds + max(0.0, (self._warmup_seconds or 0.0) - slowest)
        if gains.min() <= 0 or gain * rounds_left <= cost:
            return None
        return Proposal(rank, before, imbalance(then * pace), gain)

    def next_window(self) -> None:
        """Forgets the rounds so far."""
        self._rounds = 0
        self._work, self._seconds, self._cohorts = [], [], []

    def moved(self, rank: np.ndarray, seconds: float) -> None:
        """The clients have moved, which took so long; the next round warms up again."""
        self._rank = rank
        self._moving_seconds = seconds
        self._moves += 1
        self._rounds = -1

    def _load_of(self, clients: np.ndarray, rank: np.ndarray) -> np.ndarray:
        return rank_loads(
            self._loads[clients], rank[clients], self._ranks, longest=self._longest
        )


def _paces(work: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Seconds per load [rounds, ranks]; an idle rank is taken to be as quick as it was,
    or others were.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        paces = np.where(work > 0, seconds / work, np.nan)
    known = ~np.isnan(paces)
    overall = (
        np.median(paces[known]) if known.any() else np.nan
    )  # nanmedian would import for tens of milliseconds
    usual = np.array(
        [
            np.median(p[k]) if k.any() else overall
            for p, k in zip(paces.T, known.T, strict=True)
        ]
    )
    return np.maximum(np.where(known, paces, usual), 1e-12)
