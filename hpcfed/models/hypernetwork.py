"""A hypernetwork: a network that puts out the parameters of other networks, a row for
every embedding.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Hypernetwork:
    """Its structure; all that it learns, the clients' embeddings included, is one flat
    tensor φ.

    A linear layer brings an embedding to the hidden width, `layers` times a ReLU and a
    linear layer follow, and a last linear layer makes the row. That layer is a linear
    head for each tensor of the network, side by side.
    """

    clients: int
    embedding: int
    hidden: int
    layers: int
    outputs: int

    @cached_property
    def _shapes(self) -> list[tuple[int, ...]]:
        """The embeddings, then weight and bias of every layer."""
        widths = (self.embedding, *(self.hidden,) * (self.layers + 1), self.outputs)
        linear = [
            shape
            for inputs, outputs in pairwise(widths)
            for shape in ((outputs, inputs), (outputs,))
        ]
        return [(self.clients, self.embedding), *linear]

    def first(self, rng: np.random.Generator) -> np.ndarray:
        """A random φ, as torch would draw it: normal embeddings, and layers uniform
        within ±1/√inputs.
        """
        _, *linear = self._shapes
        parts = [rng.standard_normal(self.clients * self.embedding)]
        for weight, bias in zip(linear[::2], linear[1::2], strict=True):
            bound = weight[1] ** -0.5
            parts += [
                rng.uniform(-bound, bound, prod(shape)) for shape in (weight, bias)
            ]
        return np.concatenate(parts)

    def embeddings(self, phi: Tensor, clients: Tensor) -> Tensor:
        return self._tensors(phi)[0][clients]

    def rows(self, phi: Tensor, embeddings: Tensor) -> Tensor:
        """Rows [embeddings, outputs]."""
        return _forward(self._tensors(phi)[1:], embeddings)

    def gradient(self, phi: Tensor, clients: Tensor, change: Tensor) -> Tensor:
        """The vector-Jacobian product Σ (∂rowᵢ/∂φ)ᵀ changeᵢ over clients, as flat as φ."""
        tensors = [tensor.requires_grad_() for tensor in self._tensors(phi.detach())]
        rows = _forward(tensors[1:], tensors[0][clients])
        return torch.cat(
            [part.flatten() for part in torch.autograd.grad(rows, tensors, change)]
        )

    def embedding_gradient(
        self, phi: Tensor, embeddings: Tensor, change: Tensor
    ) -> Tensor:
        """The same for each embedding by itself, with the rest of φ as it is."""
        leaves = embeddings.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.rows(phi, leaves), leaves, change)
        return gradient

    def _tensors(self, phi: Tensor) -> list[Tensor]:
        parts = phi.split([prod(shape) for shape in self._shapes])
        return [
            part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)
        ]


def _forward(layers: list[Tensor], x: Tensor) -> Tensor:
    x = F.linear(x, *layers[:2])
    for weight, bias in zip(layers[2:-2:2], layers[3:-2:2], strict=True):
        x = F.linear(x.relu(), weight, bias)
    return F.linear(x, *layers[-2:])
