"""What stacked layers have in common: a plain layer's tensors with a clients'
dimension, and the batch that is passing through.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from hpcfed.kernels import cuda, linear


@dataclass
class Batch:
    """What layers need to know about the batch that is passing through."""

    num_clients: int = 1
    slots: int = 1
    """Samples per client, if clients are folded into the batch."""
    valid: Tensor | None = None
    """[clients, slots], True if a slot holds a sample; None if all do."""
    keys: Tensor | None = None
    """[random layers, clients]: this step's keys; None outside of training."""
    sinks: dict[str, Tensor] = field(default_factory=dict)
    """Where gradients go, by name. A layer may take its own, and write there."""
    halves: dict[str, Tensor] = field(default_factory=dict)
    """Weights that somebody holds in bfloat16, too, by name."""
    updates: dict[str, linear.Update] = field(default_factory=dict)
    """How the weights that update themselves do so, by name."""
    bounded: bool = False
    """Whether gradients of the outputs are at most 1."""
    widest: bool = False
    """Whether this is a step of training with as many slots as any: kernels that are
    compiled for a number of slots are compiled for this one.
    """
    branch: cuda.Branch = field(default_factory=cuda.Branch)
    """Where gradients that go to sinks are computed."""
    contiguous: bool = False
    """Whether images are never channels-last, for modules that use Tensor.view."""


class StackedLayer(nn.Module):
    """Holds the plain layer's tensors under the same names.

    A forward pass sees them with a clients' dimension.
    """

    weight: Tensor
    bias: Tensor | None
    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self, plain: nn.Module, batch: Batch, name: str, numbers: Iterator[int]
    ) -> None:
        """`numbers` count the layers that draw random numbers."""
        super().__init__()
        self.batch = batch
        self.name = name
        for tensor_name, parameter in plain.named_parameters(recurse=False):
            self.register_parameter(tensor_name, parameter)
        for tensor_name, buffer in plain.named_buffers(recurse=False):
            if buffer.is_floating_point():
                self.register_buffer(tensor_name, buffer)
        # `bias=False` leaves a None among the parameters, which is not named.
        if "bias" not in self._parameters:
            self.bias = None
        # Not a submodule: its tensors no longer belong to the network. Set last,
        # because tensors can only be registered under names that do not exist yet.
        object.__setattr__(self, "replaced", plain)

    def __getattr__(self, name: str) -> Any:
        """Look up what a module may ask of its layer, such as a dropout's p."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "replaced" not in self.__dict__:  # while it is being made or copied
                raise
            return getattr(self.replaced, name)

    @property
    def in_halves(self) -> Tensor | None:
        """The weight in bfloat16, if somebody holds it."""
        return self.batch.halves.get(self.name + "weight")

    def take_sinks(self) -> tuple[Tensor | None, Tensor | None]:
        """Remove and return the sinks of weight and bias.

        A layer that is used again in the same pass finds none: its gradients add up,
        which sinks cannot do.
        """
        sinks = self.batch.sinks
        weight = sinks.pop(self.name + "weight", None)
        bias = sinks.pop(self.name + "bias", None)
        return weight, bias

    def by_client(self, x: Tensor) -> Any:
        """Pass [clients, …] forward, if clients are not folded into the batch."""
        if x.dim() == 2:
            return self(x)
        return self(x.flatten(0, 1)).unflatten(0, x.shape[:2])
