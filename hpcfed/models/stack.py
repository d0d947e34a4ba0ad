"""A network stacked over clients: one forward pass for many clients, each with its own
weights.

Clients are folded into the batch dimension, client by client: activations are [clients
· slots, …]. Everything that treats samples alike (activations, pooling, flatten,
attention, residual sums) is then right as it stands. Only layers with weights and
dropout must know whose sample is whose; `stacked_layers` has those. So any torch module
made of such layers can be stacked, unless it looks at its tensors in other ways:
`vmapped` is for those. A stack of one client runs torch's own kernels, so a large
network pays nothing for being stackable.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from hpcfed.kernels import linear
from hpcfed.models.functional_dropout import FunctionalDropout
from hpcfed.models.layout import Layout
from hpcfed.models.own import answers
from hpcfed.models.stacked_layers import (
    Batch,
    StackedBatchNorm2d,
    StackedConv2d,
    StackedDropout,
    StackedLayer,
    StackedLinear,
)
from hpcfed.models.stacking import Constants, Names, stacked


class StackedNetwork:
    """A network whose layers with weights or random numbers are replaced by stacked
    ones.
    """

    capture_may_fail = False
    """Whether it turns out only when it is tried that a step cannot be captured."""

    def __init__(
        self,
        network: nn.Module,
        layout: Layout | None = None,
        *,
        bf16: bool = False,
        halves: bool = False,
        contiguous: bool = False,
        drops: int = 0,
    ) -> None:
        """`halves`: weights of layers may come in bfloat16, because nothing but the
        layers looks at them. `contiguous`: a module wants images as torch lays them out.
        `drops`: calls of a training pass that drop by a function.
        """
        self.captures = True
        """Whether a step on a GPU can be captured and replayed."""
        self._bf16 = bf16
        self._halves = bf16 and halves
        self._batch = Batch(contiguous=contiguous)
        names = Names.of(network, layout or Layout.of(network))
        self._network = stacked(network, names, self._batch, _in_place, fold=True)
        self._constants = Constants(self._network, names)
        self._tied = names.tied
        layers = list(self._network.modules())
        dropouts = [layer for layer in layers if isinstance(layer, StackedDropout)]
        self._drops = drops
        self._layers = len(dropouts)
        self.random_layers = len(dropouts) + drops
        """Layers and calls that draw random numbers in training."""
        self.masked = any(isinstance(layer, StackedBatchNorm2d) for layer in layers)
        """Whether it must know which slots hold samples."""

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
        batch.sinks = without(sinks or {}, self._tied)
        batch.updates = updates or {}
        batch.bounded = bounded
        self._constants.move(like)
        # Walks over all modules, so only where something changes.
        if self._network.training != training:
            self._network.train(training)
        constants = self._constants.expanded(len(like))
        if batch.contiguous:
            x = x.contiguous()
        # Our own kernels, for several clients, know no bfloat16.
        autocast = self._bf16 and x.is_cuda and batch.num_clients == 1
        caught: AbstractContextManager[object] = nullcontext()
        if self._drops and training:
            caught = FunctionalDropout(batch, first=self._layers)
        with caught, torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
            y: Tensor = answers(
                torch.func.functional_call(self._network, {**constants, **tensors}, x)
            )
        if training:
            self._constants.check()
        return y.to(like.dtype)

    def copies(self, like: Tensor) -> int:
        """Return as how many clients one row is best evaluated.

        Our convolutions serve from two clients on. For the few channels of clients'
        networks they are several times faster than torch's.
        """
        convolutions = []
        for module in self._network.modules():
            if isinstance(module, StackedConv2d):
                convolutions.append(module)
        ours = all(layer.may_use_kernel(like) for layer in convolutions)
        return 2 if convolutions and ours and not self._bf16 else 1

    def halved(self, clients: int, device: torch.device) -> set[str]:
        """Return the weights that may come in bfloat16, which they are rounded to in any
        case.
        """
        if not self._halves or clients > 1 or device.type != "cuda":
            return set()
        names = set()
        for module in self._network.modules():
            if isinstance(module, StackedConv2d | StackedLinear):
                names.add(module.name + "weight")
        return names - self._tied

    def updating(self, tensors: dict[str, Tensor], slots: int) -> list[str]:
        """Return the weights that should update themselves in a step.

        Never those of the first layer: its input needs no gradient, which is what the
        update is made together with.
        """
        several = len(next(iter(tensors.values()))) > 1
        if not several:
            return []
        layers = []
        for module in self._network.modules():
            if isinstance(module, StackedConv2d | StackedLinear):
                layers.append(module)
        # In the network's order, which is the order of `modules`.
        names = []
        for layer in layers[1:]:
            name = layer.name + "weight"
            # Frozen and tied weights are not theirs to update.
            if name in self._tied or name not in tensors:
                continue
            if isinstance(layer, StackedLinear) and linear.updates_itself(
                tensors[name], slots
            ):
                names.append(name)
        return names

    def join(self) -> None:
        """Wait for gradients that go to sinks."""
        self._batch.branch.join()


def _in_place(layer: StackedLayer, plain: nn.Module) -> nn.Module:
    return layer


def without(table: dict[str, Tensor], names: set[str]) -> dict[str, Tensor]:
    """Return a copy of a table without some names."""
    return {name: tensor for name, tensor in table.items() if name not in names}
