"""Metrics from sums over test data: of every client, or of all data together."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hpcfed.clients.objective import ABSOLUTE, CLASSES, OUTPUTS, TOP5, Sums, Wanted
from hpcfed.options.metrics import PER_CLASS


def wanted_sums(metrics: Sequence[str], outputs: int) -> Wanted:
    """Return the sums that these metrics need, beyond those that are always made;
    `outputs` is the number of classes, or of predicted numbers.
    """
    wanted: dict[str, tuple[int, ...]] = {}
    for name in metrics:
        if name == "top5":
            wanted[TOP5] = ()
        elif name == "mae":
            wanted[ABSOLUTE] = ()
        elif name == "r2":
            wanted[OUTPUTS] = (3, outputs)
        elif name in ("f1", PER_CLASS):
            wanted[CLASSES] = (3, outputs)
    return wanted


def metric(name: str, sums: Sums) -> Tensor:
    """Return a metric of each client, float64; NaN if it has no test data."""
    return _FORMULAS[name](sums)


def _mean(name: str) -> Callable[[Sums], Tensor]:
    """Return the formula of a mean over samples or tokens."""

    def mean(sums: Sums) -> Tensor:
        # In float64, as the host divides: counts are exact there.
        return sums[name].double() / sums["count"].double()

    return mean


def _perplexity(sums: Sums) -> Tensor:
    return _mean("loss")(sums).exp()


def _r2(sums: Sums) -> Tensor:
    """Return R², averaged over outputs whose targets vary; NaN if none do."""
    squares, targets, squared_targets = sums[OUTPUTS].unbind(1)
    count = sums["count"].double()[:, None]
    spread = squared_targets - targets.square() / count
    # Equal targets leave a spread of rounding errors.
    known = spread > 1e-12 * squared_targets
    shares = torch.where(known, 1 - squares / spread, torch.nan)
    return shares.nanmean(1)


def _macro_f1(sums: Sums) -> Tensor:
    """Return the mean over classes of 2 · found / (taken for it + belong to it), over
    classes that occur among targets or answers.
    """
    found, taken_for, belong_to = sums[CLASSES].double().unbind(1)
    # 0 / 0 is NaN, which the mean leaves out.
    return (2 * found / (taken_for + belong_to)).nanmean(1)


def class_accuracy(sums: Sums) -> Tensor:
    """Return [clients, classes]: the share of each class that was found, or NaN."""
    found, _, belong_to = sums[CLASSES].double().unbind(1)
    return found / belong_to


_FORMULAS: dict[str, Callable[[Sums], Tensor]] = {
    "accuracy": _mean("correct"),
    "loss": _mean("loss"),
    "top5": _mean(TOP5),
    "mae": _mean(ABSOLUTE),
    "perplexity": _perplexity,
    "r2": _r2,
    "f1": _macro_f1,
}
