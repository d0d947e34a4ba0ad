"""Norms and embeddings that know which sample belongs to which client, in a stacked
network.

The normalisation itself treats samples alike: torch's own kernel does it for all
clients at once, without weights. Each client's weight and bias are applied afterwards.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcfed.models.stacked_layer import Batch, StackedLayer


class StackedNorm(StackedLayer):
    """What norms have in common: each client's weight and bias, if any."""

    def _scaled(self, y: Tensor, *, channels: int) -> Tensor:
        """Return y · weight + bias; the weight's dimensions end `channels` before
        y's.
        """
        weight = self._parameters.get("weight")
        if weight is None:
            return y
        by_client = y.unflatten(0, (self.batch.num_clients, -1))
        # [clients, 1, …, *weight's shape, 1, …]
        shape = weight.shape[1:]
        ones = by_client.dim() - 1 - len(shape) - channels
        view = (len(weight), *[1] * ones, *shape, *[1] * channels)
        if self.bias is None:
            return (by_client * weight.view(view)).flatten(0, 1)
        scaled = torch.addcmul(self.bias.view(view), by_client, weight.view(view))
        return scaled.flatten(0, 1)


class StackedLayerNorm(StackedNorm):
    def __init__(
        self, plain: nn.LayerNorm, batch: Batch, name: str, numbers: Iterator[int]
    ) -> None:
        super().__init__(plain, batch, name, numbers)
        self.shape = tuple(plain.normalized_shape)
        self.eps = plain.eps

    def forward(self, x: Tensor) -> Tensor:
        return self._scaled(F.layer_norm(x, self.shape, eps=self.eps), channels=0)


class StackedRMSNorm(StackedNorm):
    def __init__(
        self, plain: nn.RMSNorm, batch: Batch, name: str, numbers: Iterator[int]
    ) -> None:
        super().__init__(plain, batch, name, numbers)
        self.shape = tuple(plain.normalized_shape)
        self.eps = plain.eps

    def forward(self, x: Tensor) -> Tensor:
        return self._scaled(F.rms_norm(x, self.shape, eps=self.eps), channels=0)


class StackedGroupNorm(StackedNorm):
    def __init__(
        self, plain: nn.GroupNorm, batch: Batch, name: str, numbers: Iterator[int]
    ) -> None:
        super().__init__(plain, batch, name, numbers)
        self.groups = plain.num_groups
        self.eps = plain.eps

    def forward(self, x: Tensor) -> Tensor:
        y = F.group_norm(x, self.groups, eps=self.eps)
        return self._scaled(y, channels=x.dim() - 2)


class StackedEmbedding(StackedLayer):
    def __init__(
        self, plain: nn.Embedding, batch: Batch, name: str, numbers: Iterator[int]
    ) -> None:
        super().__init__(plain, batch, name, numbers)
        if plain.max_norm is not None or plain.sparse or plain.scale_grad_by_freq:
            raise TypeError(
                "Embedding stacks only without max_norm, sparse and scale_grad_by_freq"
            )
        # This row gets no gradient.
        self.padding = plain.padding_idx

    def forward(self, x: Tensor) -> Tensor:
        clients, slots = self.batch.num_clients, self.batch.slots
        if len(x) == 1 and clients > 1:
            # The same input for all samples, such as positions: once per client.
            found = self._looked_up(x.expand(clients, *x.shape[1:]))
            each = found.unsqueeze(1).expand(clients, slots, *found.shape[1:])
            return each.flatten(0, 1)
        return self._looked_up(x)

    def _looked_up(self, x: Tensor) -> Tensor:
        clients = self.batch.num_clients
        numbers = torch.arange(clients, device=x.device)
        # The tables of all clients are stacked into one table.
        first_row = numbers * self.weight.shape[1]
        by_client = x.unflatten(0, (clients, -1))
        shape = (clients, *[1] * (by_client.dim() - 1))
        rows = (by_client + first_row.view(shape)).flatten(0, 1)
        table = self.weight.flatten(0, 1)
        if self.padding is None:
            return F.embedding(rows, table)
        found = F.embedding(rows, table)
        is_padding = (x == self.padding).unsqueeze(-1)
        return torch.where(is_padding, found.detach(), found)
