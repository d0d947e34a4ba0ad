"""Whether the work was done right: what was learnt, and how rows were aggregated."""

from collections.abc import Sequence
from math import inf, isfinite, sqrt
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from hpcfed.errors import UserError
from hpcfed.results.snapshots import Parameters

LEVEL = 0.05
"""The most likely mistake of each one-sided test: to pass what is beyond the margin."""


class Check(BaseModel):
    """One thing that was verified."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: Literal["learning", "target", "aggregation"]
    passed: bool
    said: str
    value: float | None = None
    """The bound, or share of a bound, that decided."""
    limit: float | None = None


def check_learning(
    found: Sequence[float],
    reference: Sequence[float],
    margin: float,
    *,
    beside: str = "the reference",
) -> Check:
    """Prove that runs learn what the reference's runs with the same seeds have learnt.
    `beside` is how the line that is said names the reference.

    Two one-sided t-tests on the differences of pairs, each at 5 %: that their mean is
    above −margin, and that it is below +margin. Runs that learn less have wrong numbers,
    and runs that learn more do other work. The proof is owed: too few runs, or runs that
    scatter too much, do not pass.
    """
    from scipy import stats

    differences = np.subtract(found, reference)
    number = len(differences)
    centre = float(differences.mean())
    error = float(differences.std(ddof=1)) / sqrt(number)
    reach = float(stats.t.ppf(1 - LEVEL, number - 1)) * error
    # Both tests reject if the interval at 90 % lies within the margin.
    furthest = max(centre + reach, reach - centre)
    passed = furthest < margin
    # NaN, of a run without numbers, is not below the margin.
    value = furthest if isfinite(furthest) else None
    said = (
        f"mean difference to {beside} {centre:+.5f} ± {reach:.5f} over "
        f"{number} seeds; allowed ±{margin:g}"
    )
    return Check(name="learning", passed=passed, said=said, value=value, limit=margin)


def check_target(rounds: Sequence[int | None], target: float) -> Check:
    """Check that every run has reached its target accuracy."""
    missed = sum(one is None for one in rounds)
    said = f"{len(rounds) - missed} of {len(rounds)} runs reach {target:g} %"
    return Check(name="target", passed=not missed, said=said)


def check_aggregation(
    recorded: Parameters, samples: np.ndarray, weights: Literal["samples", "clients"]
) -> Check:
    """Compare the recorded aggregate with the mean of recorded rows in float64.

    A sum of n products has at most n + 2 roundings of each term, in any order: one of
    the weight, one of the product, and those of the additions.
    """
    if recorded.global_row is None:
        raise UserError(
            "the benchmark's method has no global model whose aggregation can be checked"
        )
    there = ~np.isnan(recorded.rows).all(1)
    weighs = samples if weights == "samples" else samples > 0
    shares = np.where(there, weighs[recorded.clients], 0).astype(np.float64)
    shares /= shares.sum()
    mean = np.zeros(recorded.rows.shape[1])
    terms = np.zeros_like(mean)
    # Row by row: float64 copies of all rows may not fit.
    for row, share in zip(recorded.rows, shares, strict=True):
        if share:
            mean += share * row.astype(np.float64)
            terms += share * np.abs(row.astype(np.float64))
    rounding = np.finfo(recorded.global_row.dtype).eps / 2
    bound = (np.count_nonzero(shares) + 2) * rounding * terms
    errors = np.abs(recorded.global_row.astype(np.float64) - mean)
    worst = _largest_share(errors, bound)
    said = (
        f"{len(mean):,} columns of {np.count_nonzero(shares)} rows, against float64: the "
        f"largest error is {worst:.2g} of what rounding allows"
    )
    passed = worst <= 1
    value = worst if worst < inf else None
    return Check(name="aggregation", passed=passed, said=said, value=value, limit=1.0)


def _largest_share(errors: np.ndarray, bound: np.ndarray) -> float:
    """Return the largest error as a share of its bound; infinite if one is not finite."""
    if not np.isfinite(errors).all():
        return inf
    # 0 of 0 is no error: nobody has trained this column.
    shares = np.divide(
        errors, bound, out=np.where(errors > 0, inf, 0.0), where=bound > 0
    )
    return float(shares.max(initial=0.0))
