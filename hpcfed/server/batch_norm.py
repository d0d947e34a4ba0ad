"""Batch norm of the autoencoder: which samples are normalised together, and which of
them count in the running statistics.
"""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from hpcfed.kernels import norms

LEAK = 0.01
"""Slope of the autoencoder's activation below zero."""
MOMENTUM = 0.1
"""The weight of a step's batch in the running statistics."""


class BatchNorm(nn.BatchNorm1d):
    """Batch norm followed by leaky ReLU, in float32 whatever its input: statistics in
    bfloat16 would hardly move.
    """

    counts = True
    """Whether a training batch changes the running statistics."""
    shared = False
    """Whether all ranks' samples are normalised together, as one batch."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.running_mean is not None and self.running_var is not None
        momentum = (self.momentum or 0.0) if self.counts else 0.0
        running = norms.Running(self.running_mean, self.running_var, momentum)
        if self.training and self.shared:
            return norms.shared_batch_norm(
                x, self.weight, self.bias, running, eps=self.eps, slope=LEAK
            )
        return norms.batch_norm(
            x,
            self.weight,
            self.bias,
            running,
            training=self.training,
            eps=self.eps,
            slope=LEAK,
        )


def norms_of(network: nn.Module) -> list[BatchNorm]:
    """Return the batch norms of a network."""
    return [layer for layer in network.modules() if isinstance(layer, BatchNorm)]


def share_statistics(network: nn.Module) -> None:
    """Have batch norm normalise all ranks' samples together."""
    for norm in norms_of(network):
        norm.shared = True


def weigh_micro_batch(norms: Sequence[BatchNorm], number: int, count: int) -> None:
    """Set the momentum for one of a step's micro-batches.

    All `count` of them have the same weight in the running statistics, and together the
    weight of one batch. Ranks average their statistics, so accumulated passes and ranks
    have the same effect.
    """
    weight = MOMENTUM / count
    # Later updates shrink the weight of earlier ones. If i micro-batches follow, this
    # one needs w / (1 − i w), so that its weight is w in the end.
    following = count - 1 - number
    for norm in norms:
        norm.momentum = weight / (1 - weight * following)


def counted_once(module: nn.Module) -> Callable[..., Tensor]:
    """Wrap a module for activation checkpointing, which calls it twice: batch norm
    counts the batch only in the first call.
    """
    norms = norms_of(module)
    called = False

    def call(*inputs: Tensor) -> Tensor:
        nonlocal called
        for norm in norms:
            norm.counts = not called
        called = True
        # torch ends the second call by an exception as soon as it has what it needs.
        try:
            output: Tensor = module(*inputs)
            return output
        finally:
            for norm in norms:
                norm.counts = True

    return call
