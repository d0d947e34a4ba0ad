"""Scores of rows on clients' data: a stack of rows, or one row for all clients."""

import numpy as np
import torch
from torch import Tensor

from hpcfed.clients.objective import OBJECTIVES, Sums, Wanted
from hpcfed.clients.schedule import Length, evaluation_samples, step_shapes
from hpcfed.data.shards import Shard
from hpcfed.models.choice import Forward
from hpcfed.runtime.device import on_device

EVALUATION_SAMPLES = 4096
"""Samples in flight during evaluation, over all clients of a stack."""
EVALUATION_FLOATS = 2**28
"""Activations of samples in flight, where a sample may be a long text."""

Tensors = dict[str, Tensor]
"""A stack's rows as named tensors [clients, …]."""


def samples_in_flight(shard: Shard, activations: int) -> int:
    """Return how many samples are evaluated at once; each makes so many activations."""
    # Classification keeps to a number: its batches are part of recorded results.
    if shard.task == "classification":
        return EVALUATION_SAMPLES
    fitting = EVALUATION_FLOATS // max(1, activations)
    return max(1, min(EVALUATION_SAMPLES, fitting))


def evaluate_stack(
    network: Forward,
    tensors: Tensors,
    shard: Shard,
    index: Tensor,
    sizes: np.ndarray,
    wanted: Wanted,
    *,
    in_flight: int,
) -> Sums:
    """Return sums over each client's own data, judged by its own row.

    Clients are ordered by size, largest first; `index` holds their samples.
    """
    objective = OBJECTIVES[shard.task]
    clients = len(sizes)
    like = next(iter(tensors.values()))
    # The fewer clients, the larger their batches: the device is filled either way.
    batch_size = min(int(sizes.max()), -(-in_flight // clients))
    shapes = step_shapes(sizes, Length(1, batch_size))
    samples, counts = evaluation_samples(
        index, on_device(sizes, like.device), batch_size=batch_size, steps=len(shapes)
    )
    sums = objective.zeros(clients, like, wanted)
    for step, (active, slots, _) in enumerate(shapes):
        batch = samples[step, :active, :slots]
        # Slots beyond a client's samples hold some other sample: they count nothing.
        slot = torch.arange(slots, device=like.device)
        valid = slot < counts[step, :active, None]
        active_tensors = {name: tensor[:active] for name, tensor in tensors.items()}
        flat = batch.flatten()
        outputs = network(active_tensors, shard.inputs[flat])
        figures = objective.figures(outputs, shard.targets[flat], wanted)
        for name, figure in figures.items():
            by_client = figure.unflatten(0, batch.shape)
            # One mask for all that a sample adds: [clients, slots, 1, …].
            mask = valid.view(*batch.shape, *(1 for _ in figure.shape[1:]))
            sums[name][:active] += torch.where(mask, by_client, 0).sum(1)
    return sums


def evaluate_one_row(
    network: Forward,
    tensors: Tensors,
    shard: Shard,
    index: Tensor,
    sizes: np.ndarray,
    wanted: Wanted,
    *,
    in_flight: int,
) -> Sums:
    """Return sums over each client's own data, judged by one row.

    The row is a stack of one, so samples of all clients fill a batch together.
    """
    objective = OBJECTIVES[shard.task]
    like = next(iter(tensors.values()))
    sums = objective.zeros(len(sizes), like, wanted)
    owners = np.repeat(np.arange(len(sizes)), sizes)
    slots = np.concatenate([np.arange(size) for size in sizes])
    # Each sample once, with its client and its number there.
    batches = zip(
        on_device(owners, like.device).split(in_flight),
        on_device(slots, like.device).split(in_flight),
        strict=True,
    )
    for owner, slot in batches:
        samples = index[owner, slot]
        outputs = network(tensors, shard.inputs[samples])
        figures = objective.figures(outputs, shard.targets[samples], wanted)
        # A batch may span many clients, and a client many batches.
        for name, figure in figures.items():
            sums[name].index_add_(0, owner, figure.to(sums[name].dtype))
    return sums
