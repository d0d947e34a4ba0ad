"""Calls a network with other tensors in place of its own."""

from typing import Any

from torch import Tensor, nn

from hpcfed.models.own import answers

Place = tuple[dict[str, Any], str]
"""A module's parameters or buffers, and the name of one of them."""


class Substitution:
    """Does what `torch.func.functional_call` does for a network that keeps its modules.

    torch walks over all modules at every call: on a CPU that takes as long as the
    arithmetic of a small network.
    """

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        by_tensor: dict[int, list[Place]] = {}
        self._places: dict[str, list[Place]] = {}
        """Where a tensor of this name is; tied weights have several places."""
        for prefix, module in network.named_modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is None:
                        continue
                    places = by_tensor.setdefault(id(tensor), [])
                    places.append((table, name))
                    self._places[f"{prefix}.{name}" if prefix else name] = places

    def __call__(self, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        """Pass x forward through these tensors, and the network's own for the rest."""
        own = []
        try:
            for name, tensor in tensors.items():
                for table, key in self._places[name]:
                    own.append((table, key, table[key]))
                    table[key] = tensor
            return answers(self._network(x))
        finally:
            # The first of several that had the same place is the network's own.
            for table, key, tensor in reversed(own):
                table[key] = tensor
