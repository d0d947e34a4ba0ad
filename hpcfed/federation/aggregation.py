"""How the server combines many rows into one: their weighted mean, or a robust rule
that a few malicious rows cannot bend far.

The robust rules work on columns. Every rank gets its share of the columns of all rows,
so no rank holds all rows. Clients without data have no vote, just as in the mean.

- median, trimmed-mean (Yin et al. 2018): each column separately; all clients count
  equally. If the trimmed mean would drop every upload that is left, for example because
  others were excluded, the median is taken.
- krum (Blanchard et al. 2017): the row with the smallest sum of squared distances to
  its K − f − 2 nearest rows.
- multi-krum: the weighted mean of the rows with the smallest sums.

- sign-majority (Bernstein et al. 2019, signSGD with majority vote): every column moves
  in the direction in which most clients moved it, one vote per client. It moves by the
  weighted mean of the clients' step sizes, and stays put on a tie. With --compress
  sign, a client's step size is the one that it sends for the bucket.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from hpcfed.clients.job import Score
from hpcfed.federation.cohort import Cohort, Sent, member_rows
from hpcfed.options import RunConfig, expected_malicious
from hpcfed.runtime.collectives import Collectives
from hpcfed.runtime.device import on_device


class Aggregation:
    """Combines rows by the run's rule, and sums the rows of clusters."""

    def __init__(self, config: RunConfig, collectives: Collectives) -> None:
        self._config = config
        self._collectives = collectives
        self._shares: tuple[bytes, Tensor] | None = None
        """The last weights of this rank's members, as bytes and on the device."""

    def __call__(self, rows: Tensor, cohort: Cohort) -> Tensor:
        """Combine the cohort's rows into one on every rank; `rows` are this rank's."""
        rule = self._config.aggregation
        if rule == "mean" or not rows.shape[1]:
            return self.mean(rows, cohort)
        # Clients without data have trained nothing: they would vote for w.
        voters = np.flatnonzero(cohort.weights)
        rows, cohort = member_rows(rows, cohort, voters)
        if rule == "sign-majority":
            return self._majority(rows, cohort)
        # Counted from the uploads that are left, not from the planned cohort.
        malicious = expected_malicious(self._config.tolerance, len(cohort.clients))
        if rule in ("krum", "multi-krum"):
            return self._krum(rows, cohort, malicious)
        columns = self._columns(rows, cohort)
        # Cutting all but the middle one or two values gives the median.
        middle = (len(columns) - 1) // 2
        cut = middle if rule == "median" else min(malicious, middle)
        middles = trimmed_mean(columns, cut)
        return self._collectives.columns_to_row(middles, rows.shape[1])

    def _krum(self, rows: Tensor, cohort: Cohort, malicious: int) -> Tensor:
        order = least_krum(self._squared_distances(rows, cohort), malicious)
        count = 1
        if self._config.aggregation == "multi-krum":
            count = self._config.krum_keep or len(order) - malicious
        # In the order of ids, like all sums.
        selected = np.sort(order[:count])
        rows, cohort = member_rows(rows, cohort, selected)
        return self.mean(rows, cohort)

    def _majority(self, rows: Tensor, cohort: Cohort) -> Tensor:
        start = cohort.in_flight.sent_row
        assert start is not None, "all members have started from one row"
        # Rows of different starts could not be voted on: their signs would mean
        # nothing.
        updates = rows - start
        # Ones, not shares: sums of signs are exact, so ties are detected as ties.
        ones = replace(cohort, weights=np.ones(len(cohort.clients)))
        votes = self.mean(updates.sign(), ones)
        # sign(0) is 0, so a tied column stays.
        return start + votes.sign() * self.mean(updates.abs(), cohort)

    def mean(self, rows: Tensor, cohort: Cohort) -> Tensor:
        """Return Σ weightᵢ rowᵢ: a weighted sum per rank, then one flat all-reduce."""
        if not rows.shape[1]:  # as when a method shares nothing
            return rows.new_empty(0)
        if self._config.deterministic:
            return self._mean_in_client_order(rows, cohort)
        weights = self._weights_here(rows, cohort)
        # A vector times a matrix, which a GPU does not round to TensorFloat-32.
        return self._collectives.allreduce(weights @ rows)

    def _weights_here(self, rows: Tensor, cohort: Cohort) -> Tensor:
        """Return the weights of this rank's members."""
        weights = cohort.weights[cohort.chosen]
        known = weights.tobytes()
        # Often those of the last round, which then need not travel again.
        if self._shares is not None and self._shares[0] == known:
            there = self._shares[1]
            if there.dtype == rows.dtype and there.device == rows.device:
                return there
        there = on_device(weights, rows.device).to(rows.dtype, copy=True)
        self._shares = known, there
        return there

    def cluster_sums(
        self, rows: Tensor, cohort: Cohort, clusters: Tensor, count: int
    ) -> Tensor:
        """Return Σ weightᵢ rowᵢ over the members of each of `count` clusters, [clusters,
        columns]: a sum per rank, then one all-reduce.

        `clusters` has the cluster of every member of the cohort.
        """
        if self._config.deterministic:
            return self._cluster_sums_in_client_order(rows, cohort, clusters, count)
        chosen = on_device(cohort.chosen, rows.device)
        here = clusters[chosen]
        numbers = torch.arange(count, device=rows.device)
        # [clusters, members]: a member's weight in its cluster, 0 in all others.
        in_cluster = here == numbers[:, None]
        weights = in_cluster * self._weights_here(rows, cohort)
        # Row by row: a product of matrices would be rounded to TensorFloat-32 on a GPU.
        sums = [of_cluster @ rows for of_cluster in weights]
        return self._collectives.allreduce(torch.stack(sums))

    def _cluster_sums_in_client_order(
        self, rows: Tensor, cohort: Cohort, clusters: Tensor, count: int
    ) -> Tensor:
        columns = self._columns(rows, cohort)
        totals = columns.new_zeros(count, columns.shape[1])
        # As in `_mean_in_client_order`: the order of ids, whatever ranks clients are
        # on.
        members = zip(
            _rank_order(cohort), cohort.weights, clusters.tolist(), strict=True
        )
        for position, weight, cluster in members:
            totals[cluster].add_(columns[position], alpha=float(weight))
        found = []
        for total in totals:
            found.append(self._collectives.columns_to_row(total, rows.shape[1]))
        return torch.stack(found)

    def _mean_in_client_order(self, rows: Tensor, cohort: Cohort) -> Tensor:
        """Return the mean with the same rounding wherever clients are placed: each rank
        sums its share of columns, one client after the other.
        """
        columns = self._columns(rows, cohort)
        total = torch.zeros_like(columns[0])
        # One addition per client, in the order of ids: floating-point sums depend on
        # their order, and a matrix product chooses its own.
        members = zip(_rank_order(cohort), cohort.weights, strict=True)
        for position, weight in members:
            total.add_(columns[position], alpha=float(weight))
        return self._collectives.columns_to_row(total, rows.shape[1])

    def _columns(self, rows: Tensor, cohort: Cohort) -> Tensor:
        """Return this rank's share of the columns of all rows, by rank."""
        counts = [len(members) for members in cohort.per_rank]
        return self._collectives.rows_to_columns(rows, counts)

    def _squared_distances(self, rows: Tensor, cohort: Cohort) -> np.ndarray:
        """Return the squared distances between all members: each rank's columns give a
        share of the matrix of inner products.

        In float64, because rows differ by little; on the host, because the choice among
        clients is made there.
        """
        columns = self._columns(rows, cohort).double()
        products = self._collectives.allreduce(columns @ columns.T)
        # ‖x − y‖² = ‖x‖² + ‖y‖² − 2 x·y
        norms = products.diagonal()
        squares = norms[:, None] + norms - 2 * products
        # From the order of ranks to that of the cohort.
        order = _rank_order(cohort)
        on_host = squares.cpu().numpy()
        return on_host[np.ix_(order, order)]


def with_groups(rows: Tensor, sent: Sent) -> Tensor:
    """Return the columns that each member sends, 0 elsewhere, followed by the groups
    that it sends, so that one collective sums both.
    """
    # `where`, not a product: what is not sent may be NaN.
    columns = rows.where(sent.columns(), 0)
    groups = sent.groups.to(rows.dtype)
    return torch.cat([columns, groups], 1)


def cluster_means(
    totals: Tensor, previous: Tensor, group_of: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the mean of what each cluster's clients sent, and [clusters, groups], the
    total weight of the clients that sent each group.

    `totals` are the clusters' sums of rows from `with_groups`. A group that no client has
    sent stays as in `previous`, [clusters, columns].
    """
    width = previous.shape[1]
    sums, weights = totals.split([width, totals.shape[1] - width], 1)
    # The weight of a column's senders is that of its group, which the same sum holds.
    by_column = weights[:, group_of]
    # Eq. 10 of GENE-FL's paper; 0 / 0 is never chosen.
    means = sums / by_column
    return torch.where(by_column > 0, means, previous), weights


def trimmed_mean(columns: Tensor, cut: int) -> Tensor:
    """Return every column's mean without its `cut` largest and smallest values."""
    # NaN counts as the largest.
    ascending = columns.sort(0).values
    return ascending[cut : len(columns) - cut].mean(0)


def least_krum(squares: np.ndarray, malicious: int) -> np.ndarray:
    """Return all positions, sorted by the sum of squared distances to their nearest
    rows, smallest first; ties are sorted by position.
    """
    # A row that is not finite is infinitely far from all others; so is a row from
    # itself.
    others = np.nan_to_num(squares, nan=np.inf)
    np.fill_diagonal(others, np.inf)
    # K − f − 2 of Blanchard et al., at least one.
    count = max(1, len(squares) - malicious - 2)
    ascending = np.sort(others, 1)
    sums = ascending[:, :count].sum(1)
    return np.argsort(sums, kind="stable")


def _rank_order(cohort: Cohort) -> np.ndarray:
    """Return where each member is in the order of ranks."""
    # The inverse of the permutation that lists members rank by rank.
    by_rank = np.concatenate(cohort.per_rank)
    return np.argsort(by_rank)


# How the server selects uploads: by correct answers on its own validation set, or by
# loss if the task has no right or wrong answers.


NOT_FINITE = -np.inf
"""The score of an upload that is not finite: below all others."""


def scores_of(
    judged: Tensor, finite: np.ndarray, cohort: Cohort, collectives: Collectives
) -> np.ndarray:
    """Return the scores of the whole cohort's uploads, higher is better. They are on
    the host of every rank, where the selection is made.

    `judged` has a score of each of this rank's uploads, so only these travel; `finite`
    holds the positions of the finite uploads in the cohort.
    """
    uploads = len(cohort.clients)
    # Every rank fills in its own uploads; the sum over ranks has all of them.
    everywhere = judged.new_zeros(uploads)
    everywhere[on_device(cohort.chosen, judged.device)] = judged
    summed = collectives.allreduce(everywhere)
    everyones = summed.cpu().numpy()
    scores = np.full(uploads, NOT_FINITE)
    scores[finite] = everyones[finite]
    return scores


def right_answers_or_loss(score: Score, *, ties_by_loss: bool = False) -> Tensor:
    """Return the number of correct answers, or the negative loss without classes.

    With `ties_by_loss` less than one answer is added: the more, the smaller the loss.
    """
    if "correct" in score.sums:
        right = score.correct.double()
        if not ties_by_loss:
            return right
        mean_loss = (score.loss / score.count).double().nan_to_num(nan=torch.inf)
        return right + 0.5 / (1 + mean_loss)
    # A finite row may have a loss that is not finite: it ranks last of the finite rows.
    losses = score.loss.double().nan_to_num(nan=torch.inf)
    return -losses.clamp(max=torch.finfo(torch.float64).max)


def best(scores: np.ndarray, count: int) -> np.ndarray:
    """Return the positions of the highest scores, ascending; the first wins ties."""
    # A stable sort: ties go to the lower client id, the same on every rank.
    order = np.argsort(-scores, kind="stable")
    # Ascending again: sums are taken in the order of ids, so selecting everybody equals
    # FedAvg bit for bit.
    return np.sort(order[:count])


def best_finite(scores: np.ndarray, count: int) -> np.ndarray:
    """Return the positions of the best uploads, at most `count`, all finite."""
    finite = int(np.count_nonzero(scores > NOT_FINITE))
    return best(scores, min(count, finite))
