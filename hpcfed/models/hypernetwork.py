"""A hypernetwork: it outputs the parameters of other networks, a row per embedding."""

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
    """Its structure; all trainable numbers, embeddings included, are one flat tensor φ.

    A linear layer maps an embedding to the hidden width. Then follow `layers` times a
    ReLU and a linear layer, and a last linear layer makes the row. That last layer
    consists of one linear head per tensor of the client's network, side by side.
    """

    clients: int
    embedding: int
    hidden: int
    layers: int
    outputs: int

    @cached_property
    def _shapes(self) -> list[tuple[int, ...]]:
        """The embeddings, then weight and bias of every layer."""
        hidden = [self.hidden] * (self.layers + 1)
        widths = [self.embedding, *hidden, self.outputs]
        shapes: list[tuple[int, ...]] = []
        shapes.append((self.clients, self.embedding))
        # As torch stores a linear layer: [outputs, inputs].
        for inputs, outputs in pairwise(widths):
            shapes += [(outputs, inputs), (outputs,)]
        return shapes

    def first(self, rng: np.random.Generator) -> np.ndarray:
        """Draw φ as torch would: normal embeddings, layers within ±1/√inputs."""
        # Drawn in the order of φ; another order would change every recorded seed.
        _, *linear = self._shapes
        drawn = [rng.standard_normal(self.clients * self.embedding)]
        weights = linear[::2]
        biases = linear[1::2]
        for weight, bias in zip(weights, biases, strict=True):
            bound = weight[1] ** -0.5
            drawn.append(rng.uniform(-bound, bound, prod(weight)))
            drawn.append(rng.uniform(-bound, bound, prod(bias)))
        return np.concatenate(drawn)

    def embeddings(self, phi: Tensor, clients: Tensor) -> Tensor:
        """Return the embeddings of these clients."""
        return self._tensors(phi)[0][clients]

    def rows(self, phi: Tensor, embeddings: Tensor) -> Tensor:
        """Return rows [embeddings, outputs]."""
        return _forward(self._tensors(phi)[1:], embeddings)

    def gradient(self, phi: Tensor, clients: Tensor, change: Tensor) -> Tensor:
        """Return the vector-Jacobian product Σ (∂rowᵢ/∂φ)ᵀ changeᵢ over clients.

        It is flat like φ.
        """
        # Separate leaves, so that φ itself keeps no graph.
        tensors = [tensor.requires_grad_() for tensor in self._tensors(phi.detach())]
        rows = _forward(tensors[1:], tensors[0][clients])
        gradients = torch.autograd.grad(rows, tensors, change)
        return torch.cat([gradient.flatten() for gradient in gradients])

    def embedding_gradient(
        self, phi: Tensor, embeddings: Tensor, change: Tensor
    ) -> Tensor:
        """Return (∂rowᵢ/∂embeddingᵢ)ᵀ changeᵢ of each embedding; φ does not change."""
        leaves = embeddings.detach().requires_grad_()
        rows = self.rows(phi, leaves)
        (gradient,) = torch.autograd.grad(rows, leaves, change)
        return gradient

    def _tensors(self, phi: Tensor) -> list[Tensor]:
        """Return φ as views: the embeddings, then weight and bias of every layer."""
        pieces = phi.split([prod(shape) for shape in self._shapes])
        tensors = []
        for piece, shape in zip(pieces, self._shapes, strict=True):
            tensors.append(piece.view(shape))
        return tensors


def _forward(layers: list[Tensor], x: Tensor) -> Tensor:
    """Pass embeddings through weights and biases, which alternate in `layers`."""
    x = F.linear(x, *layers[:2])
    weights = layers[2:-2:2]
    biases = layers[3:-2:2]
    for weight, bias in zip(weights, biases, strict=True):
        x = F.linear(x.relu(), weight, bias)
    # No ReLU before the last layer: its heads are linear in the features.
    return F.linear(x, *layers[-2:])
