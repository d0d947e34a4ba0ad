"""The weights of a large frozen network, in the precision in which they are computed.

They are on the device once: copies of the network, of which a start makes several, share
them. Without values, on torch's device `meta`, they describe a network that is not read.
"""

import copy
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

HALF = 2
"""Bytes of a number in bfloat16."""
META = torch.device("meta")
"""Where tensors have a shape, and no values."""


class FrozenParameter(nn.Parameter):
    """A weight that copies of its network share."""

    def __new__(cls, data: Tensor) -> "FrozenParameter":
        return super().__new__(cls, data, requires_grad=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> "FrozenParameter":
        return self


def freeze(network: nn.Module) -> None:
    """Freeze all weights of a network in place, so that copies share them."""
    # Tied weights stay one.
    made: dict[int, FrozenParameter] = {}
    for module in network.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = FrozenParameter(parameter.data)
            module._parameters[name] = made[id(parameter)]


def frozen_weights_of(network: nn.Module) -> Iterator[FrozenParameter]:
    """Yield the weights that copies share."""
    for parameter in network.parameters():
        if isinstance(parameter, FrozenParameter):
            yield parameter


def own_copies(network: nn.Module, without: Iterable[nn.Module] = ()) -> dict[int, Any]:
    """Return a memo for copy.deepcopy with which a copy has weights of its own, but for
    those of some modules.
    """
    left_out: set[int] = set()
    for module in without:
        left_out.update(map(id, module.parameters()))
    memo: dict[int, Any] = {}
    for parameter in frozen_weights_of(network):
        if id(parameter) in left_out:
            continue
        own = nn.Parameter(parameter.data.clone(), requires_grad=False)
        memo[id(parameter)] = own
    return memo


def place_of(network: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Return where and in which precision a network can be called as it is."""
    for parameter in frozen_weights_of(network):
        return parameter.device, parameter.dtype
    return torch.device("cpu"), torch.float32


def callable_copy(network: nn.Module) -> nn.Module:
    """Return a copy that can be called where its frozen weights are. Adapters beside
    them are drawn on the CPU, in float32.
    """
    made = copy.deepcopy(network)
    if next(frozen_weights_of(network), None) is not None:
        made.to(*place_of(network))
    return made


def share_frozen(network: nn.Module, other: nn.Module) -> None:
    """Let a network take equal frozen weights from another one, and free its own."""
    theirs = dict(other.named_parameters())
    for name, parameter in list(network.named_parameters()):
        same = theirs.get(name)
        if not isinstance(same, FrozenParameter):
            continue
        if isinstance(parameter, FrozenParameter) and torch.equal(parameter, same):
            parameter.data = same.data


def described_copy(network: nn.Module) -> nn.Module:
    """Return a copy in float32 without values."""
    memo: dict[int, Any] = {}
    for parameter in network.parameters():
        empty = torch.empty_like(parameter, dtype=torch.float32, device=META)
        memo[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
    made = copy.deepcopy(network, memo)
    return made.to(META)


@contextmanager
def without_values() -> Iterator[None]:
    """Let such a copy be called, even if it looks at its inputs."""
    # Takes a second to import.
    from torch._subclasses.fake_tensor import FakeTensorMode

    # torch prints what it cannot do; it is raised, too.
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        logging.disable(before)
