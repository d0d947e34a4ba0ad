"""How many positions of their texts the samples of a step need.

All texts are padded to one length. What follows a sample's last target has no loss, and a
causal network never looks ahead. So a step may leave out what none of its samples needs:
in exact arithmetic no client's numbers change, in floating point only their rounding. A
step's length is rounded up to one of a few, so that few shapes are captured.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from hpcfed.clients.schedule import StepShape
from hpcfed.data.shards import Shard
from hpcfed.models.forward import Forward
from hpcfed.runtime.device import on_device

LENGTHS = 8
"""How many lengths steps have at most, if not given."""
ALIGNMENT = 8
"""Lengths are multiples of this, as tensor cores like them."""


def unit(full: int, number: int) -> int:
    """Return the unit of lengths, such that there are at most this many up to `full`."""
    return ALIGNMENT * -(-full // (ALIGNMENT * number))


class TextLengths:
    """The lengths that the texts of a shard need, rounded up."""

    def __init__(self, shard: Shard, number: int) -> None:
        """`number`: how many lengths there are at most."""
        self.full = shard.targets.shape[1]
        """The length of all texts, with padding."""
        step = unit(self.full, number)
        self.of_samples = np.minimum(-(-shard.needs // step) * step, self.full)
        """[samples]."""
        self.on_device = on_device(self.of_samples, shard.targets.device)

    @property
    def differ(self) -> bool:
        """Whether any text needs less than its full length."""
        return bool((self.of_samples < self.full).any())

    def of_steps(self, samples: Tensor, counts: Tensor) -> list[int]:
        """Return the length of every step, of the longest of its samples [steps,
        clients, slots]; of a client's slots the first `counts` [steps, clients] hold one.

        The host waits for the device, which has drawn the samples.
        """
        lengths = self.on_device[samples]
        slot = on_device(np.arange(samples.shape[2]), samples.device)
        owned = slot < counts[..., None]
        longest: list[int] = lengths.where(owned, 0).amax((1, 2)).tolist()
        return longest

    def shortened(
        self, shapes: Sequence[StepShape], samples: Tensor, counts: Tensor
    ) -> list[StepShape]:
        """Return the steps with no more positions than their texts need."""
        steps = len(shapes)
        found = self.of_steps(samples[:steps], counts[:steps])
        pairs = zip(shapes, found, strict=True)
        return [shape._replace(length=length) for shape, length in pairs]

    def longest_first(
        self, samples: Tensor, owned: Tensor
    ) -> tuple[Tensor, Tensor, np.ndarray]:
        """Sort the last dimension of samples by their lengths, and those that are not
        owned to its end; return their order, the sorted samples, and their lengths.

        An evaluation may take samples in any order: so those of a step are alike.
        """
        lengths = self.on_device[samples].where(owned, 0)
        order = lengths.argsort(dim=-1, descending=True, stable=True)
        sorted_lengths: np.ndarray = lengths.gather(-1, order).cpu().numpy()
        return order, samples.gather(-1, order), sorted_lengths


def positions(shapes: Sequence[StepShape], counts: Tensor, full: int) -> Tensor:
    """Return the positions of each client's texts in all steps, in which it has `counts`
    [steps, clients] samples; a shape without a length has the `full` one.
    """
    lengths = np.array([shape.length or full for shape in shapes], np.int64)
    by_step = on_device(lengths, counts.device)[:, None]
    return (counts[: len(shapes)] * by_step).sum(0)


def text_lengths(
    network: Forward, shard: Shard, number: int, *, training: bool
) -> TextLengths | None:
    """Return the lengths of a shard's texts; None if every step has the full length,
    because the network must see it, or because all texts need it.
    """
    causal = network.causal_in_training if training else network.causal
    if shard.task != "next-token" or not causal or number == 1:
        return None
    found = TextLengths(shard, number)
    return found if found.differ else None
