"""How the server selects uploads: by their answers on its own validation set."""

import numpy as np
import torch

from hpcfed.clients.job import Score
from hpcfed.federation.cohort import Cohort
from hpcfed.runtime.collectives import Collectives
from hpcfed.runtime.device import on_device

NOT_FINITE = -1.0
"""The score of an upload that is not finite: below all others."""


def scores_of(
    score: Score, finite: np.ndarray, cohort: Cohort, collectives: Collectives
) -> np.ndarray:
    """Return the right answers of the whole cohort's uploads, on the host of every
    rank, which decides whose rows go on.

    `score` is of this rank's uploads, so that only counts travel; `finite` are the
    positions of finite ones in the cohort.
    """
    device = score.correct.device
    right = torch.zeros(len(cohort.clients), dtype=torch.float64, device=device)
    right[on_device(cohort.chosen, device)] = score.correct.double()
    everyones = collectives.allreduce(right).cpu().numpy()
    scores = np.full(len(cohort.clients), NOT_FINITE)
    scores[finite] = everyones[finite]
    return scores


def best(scores: np.ndarray, count: int) -> np.ndarray:
    """Return the ascending positions of the highest scores; of equal ones the first
    come first.
    """
    return np.sort(np.argsort(-scores, kind="stable")[:count])


def best_finite(scores: np.ndarray, count: int) -> np.ndarray:
    """Return the positions of the best uploads; fewer where fewer are finite."""
    finite = int(np.count_nonzero(scores > NOT_FINITE))
    return best(scores, min(count, finite))
