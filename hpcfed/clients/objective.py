"""What clients learn: how a network's outputs are compared with targets, in training and
in evaluation.

- classification: outputs [samples, classes], targets [samples].
- next-token: outputs [samples, length, vocabulary], targets [samples, length], -100
  for positions without a target.
- regression: outputs and targets [samples, outputs].
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hpcfed.data.array_checks import NO_TARGET
from hpcfed.kernels.batch import cross_entropy, of_step
from hpcfed.kernels.tokens import next_token
from hpcfed.options.metrics import PER_CLASS

Sums = dict[str, Tensor]
"""Sums over each client's samples by name, [clients, …]."""
Wanted = Mapping[str, tuple[int, ...]]
"""Further sums beside those of every evaluation, each with its shape after the clients'
dimension: see `TOP5`, `CLASSES`, `ABSOLUTE` and `OUTPUTS`.
"""
NOTHING: Wanted = MappingProxyType({})
"""No further sums."""

TOP5 = "top5"
"""[clients]: samples or tokens whose target is among the five likeliest."""
CLASSES = "classes"
"""[clients, 3, classes]: samples found, taken for the class, and belonging to it."""
ABSOLUTE = "absolute"
"""[clients]: absolute errors, averaged over outputs."""
OUTPUTS = "outputs"
"""[clients, 3, outputs]: squared errors, targets, and squared targets."""
LIKELIEST = "likeliest"
"""[clients]: the likeliest next token, where a sample has one target and a client one
sample.
"""


@dataclass(frozen=True)
class StepTargets:
    """The targets of a training step: one row of the table of samples [steps, capacity,
    slots]. The number of the row is in a tensor on the device.
    """

    targets: Tensor
    """The targets of all the shard's samples."""
    samples: Tensor
    counts: Tensor
    """[steps, capacity]: how many slots hold a sample."""
    step: Tensor

    def gathered(self, clients: int, slots: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return targets [clients, slots, …], sample counts [clients, 1], and a mask
        that is True if a slot holds a sample.
        """
        batch, count, valid = of_step(
            self.samples, self.counts, self.step, clients, slots
        )
        chosen = self.targets.index_select(0, batch.flatten())
        return chosen.unflatten(0, batch.shape), count, valid


class Objective(Protocol):
    counts_tokens: bool
    """Whether means are over tokens, whose number varies between samples."""
    bounded: bool
    """Whether the gradient of every output is at most 1."""

    def loss(
        self, outputs: Tensor, step: StepTargets, total: Tensor, tokens: Tensor
    ) -> Tensor:
        """Return a scalar whose gradient is that of the sum of the clients' mean
        losses; outputs may be overwritten.

        Add each client's summed loss to `total`, and its tokens to `tokens`.
        """

    def zeros(self, clients: int, like: Tensor, wanted: Wanted) -> Sums:
        """Return sums over no samples yet."""

    def figures(self, outputs: Tensor, targets: Tensor, wanted: Wanted) -> Sums:
        """Return what each sample adds to the sums, [samples, …]."""


class Classification:
    counts_tokens = False
    bounded = True

    def loss(
        self, outputs: Tensor, step: StepTargets, total: Tensor, tokens: Tensor
    ) -> Tensor:
        return cross_entropy(
            outputs, step.targets, step.samples, step.counts, step.step, total
        )

    def zeros(self, clients: int, like: Tensor, wanted: Wanted) -> Sums:
        sums = {"correct": like.new_zeros(clients), "loss": like.new_zeros(clients)}
        return sums | _zeros(clients, like, wanted)

    def figures(self, outputs: Tensor, targets: Tensor, wanted: Wanted) -> Sums:
        losses = F.cross_entropy(outputs, targets, reduction="none")
        answers = outputs.argmax(1)
        correct = answers == targets
        figures = {"correct": correct, "loss": losses}
        if TOP5 in wanted:
            figures[TOP5] = _in_top5(outputs, targets)
        if CLASSES in wanted:
            _, classes = wanted[CLASSES]
            taken_for = F.one_hot(answers, classes)
            found = taken_for * correct[:, None]
            belong_to = F.one_hot(targets, classes)
            figures[CLASSES] = torch.stack([found, taken_for, belong_to], 1)
        return figures


class NextToken:
    counts_tokens = True
    bounded = True

    def loss(
        self, outputs: Tensor, step: StepTargets, total: Tensor, tokens: Tensor
    ) -> Tensor:
        clients = len(total)
        targets, _, valid = step.gathered(clients, len(outputs) // clients)
        # A step may leave out the last positions, which have no target.
        targets = targets[..., : outputs.shape[1]]
        own = torch.where(valid[..., None], targets, NO_TARGET)
        return next_token(outputs, own.flatten(0, 1), total, tokens)

    def zeros(self, clients: int, like: Tensor, wanted: Wanted) -> Sums:
        always = {"correct": (), "loss": (), "count": ()}
        return _zeros(clients, like, always | dict(wanted))

    def figures(self, outputs: Tensor, targets: Tensor, wanted: Wanted) -> Sums:
        flat = outputs.flatten(0, 1)
        losses = F.cross_entropy(
            flat, targets.flatten(), ignore_index=NO_TARGET, reduction="none"
        )
        answers = outputs.argmax(-1)
        # NO_TARGET never equals an answer, so such positions are never correct.
        correct = answers == targets
        figures = {
            "correct": correct.sum(1),
            "loss": losses.view_as(targets).sum(1, dtype=torch.float64),
            "count": (targets != NO_TARGET).sum(1),
        }
        if TOP5 in wanted:
            figures[TOP5] = _in_top5(outputs, targets).sum(1)
        if LIKELIEST in wanted:
            figures[LIKELIEST] = torch.where(targets == NO_TARGET, 0, answers).sum(1)
        return figures


class Regression:
    counts_tokens = False
    bounded = False

    def loss(
        self, outputs: Tensor, step: StepTargets, total: Tensor, tokens: Tensor
    ) -> Tensor:
        clients = len(total)
        given = outputs.unflatten(0, (clients, -1))
        targets, count, valid = step.gathered(clients, given.shape[1])
        assert given.shape == targets.shape
        # Not a product with `valid`: empty slots may hold NaN.
        errors = torch.where(valid[..., None], given - targets, 0)
        losses = errors.square().mean(2)
        total += losses.detach().sum(1)
        # At least 1: rounded-up stacks hold clients without samples in this step.
        return (losses / count.clamp(min=1)).sum()

    def zeros(self, clients: int, like: Tensor, wanted: Wanted) -> Sums:
        return _zeros(clients, like, {"loss": (), **wanted})

    def figures(self, outputs: Tensor, targets: Tensor, wanted: Wanted) -> Sums:
        assert outputs.shape == targets.shape
        expected = targets.double()
        # The assertion above matters: shapes that only broadcast would compare every
        # sample's output with every other sample's target.
        errors = outputs.double() - expected
        squares = errors.square()
        figures = {"loss": squares.mean(1)}
        if ABSOLUTE in wanted:
            figures[ABSOLUTE] = errors.abs().mean(1)
        if OUTPUTS in wanted:
            moments = [squares, expected, expected.square()]
            figures[OUTPUTS] = torch.stack(moments, 1)
        return figures


OBJECTIVES: dict[str, Objective] = {
    "classification": Classification(),
    "next-token": NextToken(),
    "regression": Regression(),
}


def _zeros(clients: int, like: Tensor, shapes: Wanted) -> Sums:
    """Return zeros in float64, which counts any number of tokens exactly."""
    sums = {}
    for name, shape in shapes.items():
        sums[name] = like.new_zeros(clients, *shape, dtype=torch.float64)
    return sums


def _in_top5(outputs: Tensor, targets: Tensor) -> Tensor:
    # By topk, not by counting larger outputs: outputs of a diverged row are NaN.
    likeliest = outputs.topk(5, dim=-1).indices
    return (likeliest == targets[..., None]).any(-1)


# Metrics, of every client or of all data together.


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
