"""The common interface of the ways to call a network for many clients."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hpcfed.kernels import linear
from hpcfed.models.functional_dropout import FunctionalDropout
from hpcfed.models.stacked_layer import Batch
from hpcfed.models.stacking import Names, SharedTensors


class Forward:
    """A network that is called with the tensors of many clients.

    A subclass must not allow what it does not know about its module. By default,
    weights come in the rows' type, and only the engine changes them.
    """

    capture_may_fail = True
    """Whether only a trial shows that a step cannot be captured."""
    masked = False
    """Whether it must know which slots hold samples."""
    takes_halves = False
    """Whether its kernels may take bounded gradients in halves."""

    def __init__(
        self, network: nn.Module, names: Names, batch: Batch, *, layers: int, drops: int
    ) -> None:
        """`layers`: number of the network's dropout layers. `drops`: functional dropout
        calls in a training pass.
        """
        self.captures = True
        """Whether a step on a GPU can be captured and replayed."""
        self.random_layers = layers + drops
        """Layers and calls that draw random numbers in training."""
        self._network = network
        self._shared = SharedTensors(network, names)
        self._tied = names.tied
        self._batch = batch
        self._layers = layers
        self._drops = drops

    def __call__(
        self,
        tensors: dict[str, Tensor],
        x: Tensor,
        *,
        training: bool = False,
        valid: Tensor | None = None,
        keys: Tensor | None = None,
        sinks: dict[str, Tensor] | None = None,
        updates: dict[str, linear.Update] | None = None,
        bounded: bool = False,
    ) -> Tensor:
        """Pass [clients · slots, …] forward through tensors [clients, …].

        Gradients of a tensor may be written to its sink, in the shape of the tensor,
        instead of new memory; they are complete after `join`. Weights named in
        `updates` update themselves in the backward pass and have no gradient. Gradients
        of the outputs are `bounded` if they are at most 1: then kernels may take them
        in halves.
        """
        # Weights may come in bfloat16, other tensors never do.
        like = next(t for t in tensors.values() if t.dtype != torch.bfloat16)
        batch = self._batch
        batch.num_clients = len(like)
        batch.slots = len(x) // len(like)
        batch.valid = valid
        batch.keys = keys
        # A copy, because layers remove their sinks. Tied weights get several gradients,
        # which autograd adds up.
        batch.sinks = _without(sinks or {}, self._tied)
        batch.updates = updates or {}
        batch.bounded = bounded and self.takes_halves
        self._shared.move(like)
        # This walks over all modules, so call it only on a change.
        if self._network.training != training:
            self._network.train(training)
        y = self._outputs(tensors, x, like)
        if training:
            self._shared.check()
        return y.to(like.dtype)

    def _outputs(self, tensors: dict[str, Tensor], x: Tensor, like: Tensor) -> Tensor:
        """Return the module's outputs; `like` is a tensor of the rows' own kind."""
        raise NotImplementedError

    def _catching_drops(
        self, out: Callable[..., Any] | None = None
    ) -> AbstractContextManager[object]:
        """Let functional dropout calls draw from the clients' keys."""
        if self._drops and self._network.training:
            return FunctionalDropout(self._batch, first=self._layers, out=out)
        return nullcontext()

    def copies(self, like: Tensor) -> int:
        """Return how many copies of a row to use as clients when evaluating it."""
        return 1

    def halved(self, clients: int, device: torch.device) -> set[str]:
        """Return the weights that may come in bfloat16; none if a module may use them
        anywhere.
        """
        return set()

    def updating(self, tensors: dict[str, Tensor], slots: int) -> list[str]:
        """Return the weights that should update themselves in a step; none if a module
        may use them anywhere.
        """
        return []

    def join(self) -> None:
        """Finish what a pass leaves for after the backward pass: gradients that go to
        sinks, and buffers that the module has changed.
        """
        self._batch.branch.join()


def _without(table: dict[str, Tensor], names: set[str]) -> dict[str, Tensor]:
    """Return a copy of a table without some names."""
    return {name: tensor for name, tensor in table.items() if name not in names}
