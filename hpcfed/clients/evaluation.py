"""Scores of rows on clients' data: a stack of rows, or one row for all clients."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hpcfed.clients.schedule import Length, evaluation_samples, step_shapes
from hpcfed.data.shards import Shard
from hpcfed.models.stack import StackedNetwork
from hpcfed.runtime.device import on_device

EVALUATION_SAMPLES = 4096
"""Samples in flight during evaluation, over all clients of a stack."""

Tensors = dict[str, Tensor]
"""A stack's rows as named tensors [clients, …]."""


def evaluate_stack(
    network: StackedNetwork,
    tensors: Tensors,
    shard: Shard,
    index: Tensor,
    sizes: np.ndarray,
) -> tuple[Tensor, Tensor]:
    """Return correct answers and summed losses of each client's row on its own data.

    Clients are ordered by size, largest first; `index` holds their samples.
    """
    clients = len(sizes)
    like = next(iter(tensors.values()))
    # The fewer clients, the larger their batches: the device is filled either way.
    batch_size = min(int(sizes.max()), -(-EVALUATION_SAMPLES // clients))
    shapes = step_shapes(sizes, Length(1, batch_size))
    samples, counts = evaluation_samples(
        index, on_device(sizes, like.device), batch_size=batch_size, steps=len(shapes)
    )
    correct = like.new_zeros(clients)
    loss = like.new_zeros(clients)
    for step, (active, slots, _) in enumerate(shapes):
        batch = samples[step, :active, :slots]
        # Slots beyond a client's samples hold some other sample: they count nothing.
        slot = torch.arange(slots, device=like.device)
        valid = slot < counts[step, :active, None]
        active_tensors = {name: tensor[:active] for name, tensor in tensors.items()}
        hits, losses = _answers(
            network,
            active_tensors,
            shard.images[batch.flatten()],
            shard.labels[batch].flatten(),
        )
        correct[:active] += (hits.view_as(batch) * valid).sum(1)
        loss[:active] += (losses.view_as(batch) * valid).sum(1)
    return correct, loss


def evaluate_one_row(
    network: StackedNetwork,
    tensors: Tensors,
    shard: Shard,
    index: Tensor,
    sizes: np.ndarray,
) -> tuple[Tensor, Tensor]:
    """Return correct answers and summed losses of one row on every client's data.

    The row is a stack of one, so samples of all clients fill a batch together.
    """
    like = next(iter(tensors.values()))
    correct = like.new_zeros(len(sizes))
    loss = like.new_zeros(len(sizes))
    owners = np.repeat(np.arange(len(sizes)), sizes)
    slots = np.concatenate([np.arange(size) for size in sizes])
    # Each sample once, with its client and its number there.
    batches = zip(
        on_device(owners, like.device).split(EVALUATION_SAMPLES),
        on_device(slots, like.device).split(EVALUATION_SAMPLES),
        strict=True,
    )
    for owner, slot in batches:
        samples = index[owner, slot]
        hits, losses = _answers(
            network, tensors, shard.images[samples], shard.labels[samples]
        )
        # A batch may span many clients, and a client many batches.
        correct.index_add_(0, owner, hits.to(like.dtype))
        loss.index_add_(0, owner, losses)
    return correct, loss


def _answers(
    network: StackedNetwork, tensors: Tensors, images: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Return per sample whether the answer is right, and the loss."""
    logits = network(tensors, images)
    losses = F.cross_entropy(logits, labels, reduction="none")
    return logits.argmax(1) == labels, losses
