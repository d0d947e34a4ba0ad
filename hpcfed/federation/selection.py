"""How the server selects uploads: by their answers on its own validation set, or by
their loss where answers are not right or wrong.
"""

import numpy as np
import torch
from torch import Tensor

from hpcfed.clients.job import Score
from hpcfed.federation.cohort import Cohort
from hpcfed.runtime.collectives import Collectives
from hpcfed.runtime.device import on_device

NOT_FINITE = -np.inf
"""The score of an upload that is not finite: below all others."""


def scores_of(
    score: Score, finite: np.ndarray, cohort: Cohort, collectives: Collectives
) -> np.ndarray:
    """Return the scores of the whole cohort's uploads, the higher the better, on the
    host of every rank, which decides whose rows go on.

    `score` is of this rank's uploads, so that only counts travel; `finite` are the
    positions of finite ones in the cohort.
    """
    device = score.loss.device
    uploads = len(cohort.clients)
    # Every rank fills in its own uploads; the sum over ranks has all of them.
    judged = torch.zeros(uploads, dtype=torch.float64, device=device)
    here = on_device(cohort.chosen, device)
    judged[here] = _right_answers_or_loss(score)
    summed = collectives.allreduce(judged)
    everyones = summed.cpu().numpy()
    scores = np.full(uploads, NOT_FINITE)
    scores[finite] = everyones[finite]
    return scores


def _right_answers_or_loss(score: Score) -> Tensor:
    """Return right answers, or the negative loss where there are none."""
    if "correct" in score.sums:
        return score.correct.double()
    # A finite row may well have a loss that is not: it is the worst of the finite ones.
    losses = score.loss.double().nan_to_num(nan=torch.inf)
    return -losses.clamp(max=torch.finfo(torch.float64).max)


def best(scores: np.ndarray, count: int) -> np.ndarray:
    """Return the ascending positions of the highest scores; of equal ones the first
    come first.
    """
    # A stable sort: ties go to the lower client id, the same on every rank.
    order = np.argsort(-scores, kind="stable")
    # Ascending again: sums are taken in the order of ids, so that to select everybody
    # is FedAvg bit for bit.
    return np.sort(order[:count])


def best_finite(scores: np.ndarray, count: int) -> np.ndarray:
    """Return the positions of the best uploads; fewer where fewer are finite."""
    finite = int(np.count_nonzero(scores > NOT_FINITE))
    return best(scores, min(count, finite))
