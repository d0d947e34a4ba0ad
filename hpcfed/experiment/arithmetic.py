"""The arithmetic that a run asks for, and the number of threads worth using."""

import torch

from hpcfed.models.cost import Cost
from hpcfed.options import RunConfig
from hpcfed.runtime import device
from hpcfed.runtime.location import omp_threads
from hpcfed.runtime.world import World

SMALL = 500_000
"""Multiply-adds of a sample's training step below which one thread is best on a CPU.

Measured on two cores, two threads against one. Below: mlp and cnn-digits run 0.9 to 1.1
times as fast. Next to another busy process they take 10 times as long, because each of
their many short operators waits for both threads. Above: cnn-fmnist, cnn-cifar and
cnn-pfl run 1.3 to 1.9 times as fast.
"""


def threads_for_work(world: World, cost: Cost) -> int:
    """Return how many of its threads a rank should use for its clients.

    OMP_NUM_THREADS decides if it is set. The number depends on no timing, because
    threads change how sums are rounded: the same run must produce the same figures.
    """
    small = world.device.type == "cpu" and cost.training < SMALL
    return 1 if small and omp_threads() is None else world.threads


def set_arithmetic(config: RunConfig) -> None:
    """Set precision and determinism of this process's kernels."""
    device.set_arithmetic(
        precision=config.precision, deterministic=config.deterministic
    )


def dtype_of(config: RunConfig) -> torch.dtype:
    """Return the type of rows and data; bf16 and tf32 apply only inside kernels."""
    return torch.float64 if config.precision == "fp64" else torch.float32
