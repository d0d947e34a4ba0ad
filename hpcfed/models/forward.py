"""What a network's ways of serving many clients have in common: how it is called."""

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

    What a subclass does not know about its module it must not allow: by default weights
    come as they are, and are changed by the engine alone.
    """

    capture_may_fail = True
    """Whether it turns out only when it is tried that a step cannot be captured."""
    masked = False
    """Whether it must know which slots hold samples."""
    takes_halves = False
    """Whether its kernels may take gradients in halves where those are bounded."""

    def __init__(
        self, network: nn.Module, names: Names, batch: Batch, *, layers: int, drops: int
    ) -> None:
        """`layers`: the network's dropout layers. `drops`: calls of a training pass that
        drop by a function.
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
        instead of new memory; they are there after `join`. Weights named in `updates`
        update themselves in the backward pass and have no gradient. Gradients of the
        outputs are `bounded` if they are at most 1: kernels may then take them in
        halves.
        """
        # Weights may come in bfloat16, others never do.
        like = next(t for t in tensors.values() if t.dtype != torch.bfloat16)
        batch = self._batch
        batch.num_clients = len(like)
        batch.slots = len(x) // len(like)
        batch.valid = valid
        batch.keys = keys
        # A copy: layers take their sinks out. Tied weights have several gradients, which
        # autograd adds up.
        batch.sinks = _without(sinks or {}, self._tied)
        batch.updates = updates or {}
        batch.bounded = bounded and self.takes_halves
        self._shared.move(like)
        # Walks over all modules, so only where something changes.
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
        """Let calls that drop by a function draw from the clients' keys."""
        if self._drops and self._network.training:
            return FunctionalDropout(self._batch, first=self._layers, out=out)
        return nullcontext()

    def copies(self, like: Tensor) -> int:
        """Return as how many clients one row is best evaluated."""
        return 1

    def halved(self, clients: int, device: torch.device) -> set[str]:
        """Return the weights that may come in bfloat16; none where a module may use them
        anywhere.
        """
        return set()

    def updating(self, tensors: dict[str, Tensor], slots: int) -> list[str]:
        """Return the weights that should update themselves in a step; none where a
        module may use them anywhere.
        """
        return []

    def join(self) -> None:
        """Wait for what a pass leaves to be done after the backward pass: gradients that
        go to sinks, and buffers that the module has changed.
        """
        self._batch.branch.join()


def _without(table: dict[str, Tensor], names: set[str]) -> dict[str, Tensor]:
    """Return a copy of a table without some names."""
    return {name: tensor for name, tensor in table.items() if name not in names}
