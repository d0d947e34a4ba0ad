"""The diagonal of the Fisher information: what every parameter of a client's row means to its answers.

It is the mean over the client's samples of (∂ log p(y|x) / ∂θ)². A sample must have a gradient of its own, so batch
norm takes its running statistics and nothing is dropped, as when a row is judged.
"""

import copy
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from hpcfed.arrays import on_device
from hpcfed.clients.schedule import Length, evaluation_samples, longest_first, step_shapes
from hpcfed.data.shards import Shard
from hpcfed.models.cost import Cost
from hpcfed.models.layout import Layout

MEMORY_SHARE = 0.25
"""Of the device's free memory, for gradients and activations that are there at once."""
CPU_FLOATS = 2**25
"""The same on a CPU; more gain nothing there."""


class Fisher:
    def __init__(self, network: nn.Module, layout: Layout, cost: Cost) -> None:
        self._network = network
        self._layout = layout
        self._floats = 2 * layout.num_columns + 3 * cost.activations
        """Of a sample, with its gradient."""
        self._at_once = 0
        """Samples that fit into free memory; asked once, because asking takes time."""

    def __call__(self, rows: Tensor, shard: Shard, clients: np.ndarray) -> Tensor:
        """Of `rows[i]` on the data of the shard's client `clients[i]`; 0 without data, and for running statistics."""
        self._at_once = self._at_once or max(1, _floats_at_once(rows) // self._floats)
        sizes = np.asarray(shard.sizes, np.int64)[clients]
        index = shard.index[on_device(clients, rows.device)]
        found = torch.zeros_like(rows)
        order = longest_first(sizes)
        for members in np.array_split(order, max(1, -(-len(order) // self._at_once))):
            at = on_device(members, rows.device)
            found[at] = self._stack(rows[at], shard, index[at], sizes[members])
        return found

    def _stack(self, rows: Tensor, shard: Shard, index: Tensor, sizes: np.ndarray) -> Tensor:
        """Of clients in the order of their sizes: so many samples of each at once that memory suffices."""
        found, parameters = torch.zeros_like(rows), self._layout.num_parameters
        batch_size = min(int(sizes.max(initial=1)), max(1, self._at_once // max(1, len(rows))))
        shapes, owned = step_shapes(sizes, Length(1, batch_size)), on_device(sizes, rows.device)
        samples, counts = evaluation_samples(index, owned, batch_size=batch_size, steps=len(shapes))
        tensors = self._layout.views(rows)
        for step, (active, slots, _) in enumerate(shapes):
            batch = samples[step, :active, :slots]
            valid = torch.arange(slots, device=rows.device) < counts[step, :active, None]
            own = {name: tensor[:active] for name, tensor in tensors.items()}
            squares = self._squares(own, shard.images[batch], shard.labels[batch], valid)
            found[:active, :parameters] += torch.cat([square.flatten(1) for square in squares], 1)
        return found / owned.clamp(min=1)[:, None]

    def _squares(self, tensors: dict[str, Tensor], images: Tensor, labels: Tensor, valid: Tensor) -> list[Tensor]:
        """Sums over the valid samples [clients, slots] of each parameter's squared gradients."""
        trainable = [e.name for e in self._layout.entries if e.trainable]
        parameters = {name: tensors[name] for name in trainable}
        statistics = {name: tensor for name, tensor in tensors.items() if name not in parameters}
        loss = partial(_loss, self._judging())
        of_samples = vmap(grad(loss), in_dims=(None, None, 0, 0))
        gradients = vmap(of_samples)(parameters, statistics, images, labels)
        return [torch.einsum("cs,cs...->c...", valid.to(images.dtype), gradients[name].square()) for name in trainable]

    def _judging(self) -> nn.Module:
        """The network as it judges; only its structure is used."""
        if self._network.training:
            self._network = copy.deepcopy(self._network).eval()
        return self._network


def _floats_at_once(rows: Tensor) -> int:
    if rows.device.type == "cpu":
        return CPU_FLOATS
    free, _ = torch.cuda.mem_get_info(rows.device)
    return int(MEMORY_SHARE * free / rows.element_size())


def _loss(
    network: nn.Module, parameters: dict[str, Tensor], statistics: dict[str, Tensor], image: Tensor, label: Tensor
) -> Tensor:
    logits: Tensor = functional_call(network, {**parameters, **statistics}, (image.unsqueeze(0),))
    return F.cross_entropy(logits, label.unsqueeze(0))
