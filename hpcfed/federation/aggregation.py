"""How the server makes one row of many: their weighted mean, or a rule that some
malicious rows cannot bend far.

The robust rules see columns: every rank gets its share of the columns of all rows, so
that no rank holds all rows. Clients without data have no say in them, as in the mean.

- median, trimmed-mean (Yin et al. 2018): of every column by itself, each client counts alike. Where so few uploads are
  left that the trimmed mean would drop them all, as after others were excluded, it is the median.
- krum (Blanchard et al. 2017): the row with the least sum of squared distances to its K − f − 2 nearest.
- multi-krum: the weighted mean of the rows whose sums are the least.
"""

import numpy as np
import torch
from torch import Tensor

from hpcfed.config import RunConfig, expected_malicious
from hpcfed.federation.cohort import Cohort
from hpcfed.runtime.collectives import Collectives
from hpcfed.runtime.device import on_device


class Aggregation:
    """The rule that a run has been given."""

    def __init__(self, config: RunConfig, collectives: Collectives) -> None:
        self._config = config
        self._collectives = collectives

    def __call__(self, rows: Tensor, cohort: Cohort) -> Tensor:
        """One row of the whole cohort's, on every rank; `rows` are those of this rank's
        members.
        """
        rule = self._config.aggregation
        if rule == "mean" or not rows.shape[1]:
            return self.mean(rows, cohort)
        rows, cohort = member_rows(rows, cohort, np.flatnonzero(cohort.weights))
        malicious = expected_malicious(self._config.tolerance, len(cohort.clients))
        if rule in ("krum", "multi-krum"):
            least = least_krum(self._squared_distances(rows, cohort), malicious)
            count = (
                1
                if rule == "krum"
                else self._config.krum_keep or len(least) - malicious
            )
            return self.mean(*member_rows(rows, cohort, np.sort(least[:count])))
        columns = self._columns(rows, cohort)
        middle = (len(columns) - 1) // 2
        cut = middle if rule == "median" else min(malicious, middle)
        return self._collectives.columns_to_row(
            trimmed_mean(columns, cut), rows.shape[1]
        )

    def mean(self, rows: Tensor, cohort: Cohort) -> Tensor:
        """Σ weightᵢ rowᵢ: local weighted sum, then one flat all-reduce."""
        if not rows.shape[1]:  # as when a method shares nothing
            return rows.new_empty(0)
        if self._config.deterministic:
            return self._mean_in_client_order(rows, cohort)
        weights = on_device(cohort.weights[cohort.chosen], rows.device).to(rows.dtype)
        return self._collectives.allreduce(weights @ rows)

    def sums(
        self, rows: Tensor, cohort: Cohort, cluster: Tensor, clusters: int
    ) -> Tensor:
        """Σ weightᵢ rowᵢ over the members of every cluster, [clusters, columns]: local
        sums, then one all-reduce.

        `cluster` is that of every member of the cohort.
        """
        if self._config.deterministic:
            return self._sums_in_client_order(rows, cohort, cluster.tolist(), clusters)
        weights = on_device(cohort.weights[cohort.chosen], rows.device).to(rows.dtype)
        own = cluster[on_device(cohort.chosen, rows.device)]
        counted = (own == torch.arange(clusters, device=rows.device)[:, None]) * weights
        # Row by row: a product of matrices would be rounded to TensorFloat-32 on a GPU.
        return self._collectives.allreduce(
            torch.stack([of_cluster @ rows for of_cluster in counted])
        )

    def _sums_in_client_order(
        self, rows: Tensor, cohort: Cohort, cluster: list[int], clusters: int
    ) -> Tensor:
        columns = self._columns(rows, cohort)
        totals = columns.new_zeros(clusters, columns.shape[1])
        for place, weight, own in zip(
            _places(cohort), cohort.weights, cluster, strict=True
        ):
            totals[own].add_(columns[place], alpha=float(weight))
        return torch.stack(
            [self._collectives.columns_to_row(total, rows.shape[1]) for total in totals]
        )

    def _mean_in_client_order(self, rows: Tensor, cohort: Cohort) -> Tensor:
        """The same sum with the same roundings however clients are placed: each rank
        sums its share of columns.
        """
        columns = self._columns(rows, cohort)
        total = torch.zeros_like(columns[0])
        for place, weight in zip(_places(cohort), cohort.weights, strict=True):
            total.add_(columns[place], alpha=float(weight))
        return self._collectives.columns_to_row(total, rows.shape[1])

    def _columns(self, rows: Tensor, cohort: Cohort) -> Tensor:
        """This rank's share of the columns of all rows, in the order of ranks."""
        return self._collectives.rows_to_columns(
            rows, [len(members) for members in cohort.per_rank]
        )

    def _squared_distances(self, rows: Tensor, cohort: Cohort) -> np.ndarray:
        """Between all members: each rank's columns give a part of the matrix of inner
        products.

        In float64, because rows differ by little; on the host, because the choice among
        clients is made there.
        """
        columns = self._columns(rows, cohort).double()
        products = self._collectives.allreduce(columns @ columns.T)
        norms, places = products.diagonal(), _places(cohort)
        squares = norms[:, None] + norms - 2 * products
        return squares.cpu().numpy()[np.ix_(places, places)]


def trimmed_mean(columns: Tensor, cut: int) -> Tensor:
    """Of every column, without the `cut` largest and smallest values; NaN counts as the
    largest.
    """
    return columns.sort(0).values[cut : len(columns) - cut].mean(0)


def least_krum(squares: np.ndarray, malicious: int) -> np.ndarray:
    """All positions, those first that have the least sum of squared distances to their
    nearest; ties by position.
    """
    others = np.nan_to_num(squares, nan=np.inf)
    np.fill_diagonal(others, np.inf)
    nearest = max(1, len(squares) - malicious - 2)
    return np.argsort(np.sort(others, 1)[:, :nearest].sum(1), kind="stable")


def member_rows(
    rows: Tensor, cohort: Cohort, kept: np.ndarray
) -> tuple[Tensor, Cohort]:
    """Rows of some members of the cohort, and the cohort of them alone."""
    if len(kept) == len(cohort.clients):
        return rows, cohort
    here, fewer = cohort.only(kept)
    return rows[on_device(here, rows.device)], fewer


def _places(cohort: Cohort) -> np.ndarray:
    """Where each member is in the order of ranks."""
    return np.argsort(np.concatenate(cohort.per_rank))
