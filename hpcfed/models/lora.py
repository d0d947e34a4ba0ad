"""LoRA (Hu et al. 2022): the network is frozen, and small adapters next to its layers
are trained: W + (α / r) B A, with A [r, inputs] and B [outputs, r].

Then a row holds only the adapters. The frozen network is on the device once, and
processes the samples of all clients together.

The server averages rows, and so the factors: (Σ pᵢ Bᵢ) (Σ pᵢ Aᵢ). That differs from Σ
pᵢ Bᵢ Aᵢ, the mean of what clients have learnt, unless they agree on one of the factors.
"""

from fnmatch import fnmatchcase
from math import sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hpcfed.errors import UserError, did_you_mean


class LoraLinear(nn.Module):
    """A frozen linear layer with an adapter."""

    def __init__(
        self, base: nn.Module, inputs: int, outputs: int, *, rank: int
    ) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)
        _begin(self.down.weight, self.up.weight)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.scale * self.up(self.down(x))
        return y

    @property
    def weight(self) -> Tensor:
        """A single weight, laid out like the layer's own, that does what both do
        together.

        Some modules never call their layer: they read its weight, and multiply by it
        themselves.
        """
        weight: Tensor = self.base.weight  # type: ignore[assignment]
        change = self.scale * self.up.weight @ self.down.weight
        # Hugging Face's Conv1D stores its weight as [inputs, outputs].
        return weight + (change if isinstance(self.base, nn.Linear) else change.mT)

    def __getattr__(self, name: str) -> Any:
        """Look up what a module may ask of its layer: its bias, its sizes."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            base = self.__dict__.get("_modules", {}).get("base")
            if base is None:  # while it is being made or copied
                raise
            return getattr(base, name)


class FrozenWeight(NamedTuple):
    """The weight below an adapter."""

    name: str
    is_transposed: bool
    """Whether it is stored as [inputs, outputs]."""


class LoraWeight(nn.Module):
    """Adds an adapter to a weight itself, if a module does not call its layers."""

    def __init__(self, weight: Tensor, *, rank: int, scale: float) -> None:
        super().__init__()
        outputs, inputs = weight.shape
        self.down = nn.Parameter(weight.new_empty(rank, inputs))
        self.up = nn.Parameter(weight.new_empty(outputs, rank))
        _begin(self.down, self.up)
        self.scale = scale

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.scale * self.up @ self.down


def _begin(down: Tensor, up: Tensor) -> None:
    """Initialise an adapter so that it changes nothing, as in the paper."""
    with torch.no_grad():
        nn.init.kaiming_uniform_(down, a=sqrt(5))
        nn.init.zeros_(up)


def add_adapters(
    network: nn.Module, *, rank: int, alpha: float, layers: str = "*", train: str = ""
) -> int:
    """Freeze a network in place, and add adapters to its linear layers; return how
    many.

    `layers` and `train` are patterns of module names, such as `*.attention.*,head`.
    Layers that match `train` get no adapter, and are trained as a whole.
    """
    # First, because adapters and trained layers below switch their own gradients on.
    network.requires_grad_(False)
    scale = alpha / rank
    count = 0
    trained = 0
    named_twice = False
    for name, module in list(network.named_modules()):
        if name and train and _matches_inside(name, train):
            module.requires_grad_(True)
            trained += 1
            named_twice |= _sizes(module) is not None and _matches(name, layers)
            continue
        # The network itself has no name, and no parent that could hold its adapter.
        if not name or not _matches(name, layers):
            continue
        if isinstance(module, nn.MultiheadAttention):
            _adapt_attention(module, rank=rank, scale=scale)
            count += 1
            continue
        sizes = _sizes(module)
        # torch's attention never calls its output layer: it reads the weights.
        if sizes is None or _inside_attention(network, name):
            continue
        adapted = LoraLinear(module, *sizes, rank=rank)
        adapted.scale = scale
        parent, _, own = name.rpartition(".")
        setattr(network.get_submodule(parent), own, adapted)
        count += 1
    if not count and named_twice:
        raise UserError(
            f"--lora-layers {layers}: --lora-train {train} trains all of these as a "
            "whole, and none is left for an adapter; name others in one of the two"
        )
    if not count:
        known = [name for name, module in network.named_modules() if _sizes(module)]
        some = ", ".join(known[:5]) or "none at all"
        near = _near(layers, known) or f"; there are {some}"
        raise UserError(
            f"--lora-layers {layers}: no linear layer has such a name{near}"
        )
    if train and not trained:
        names = [name for name, _ in network.named_children()]
        raise UserError(
            f"--lora-train {train}: no layer has such a name; there are "
            f"{', '.join(names)}"
        )
    return count


def frozen_weights(network: nn.Module) -> dict[str, FrozenWeight]:
    """Return the weight below every adapter, by the name of the adapter's A."""
    found = {}
    for name, module in network.named_modules():
        if isinstance(module, LoraLinear):
            is_transposed = not isinstance(module.base, nn.Linear)
            weight = FrozenWeight(f"{name}.base.weight", is_transposed)
            found[f"{name}.down.weight"] = weight
        elif isinstance(module, LoraWeight):
            # torch numbers the parametrizations of a weight, and calls it `original`.
            owner = name.rpartition(".")[0]
            found[f"{name}.down"] = FrozenWeight(f"{owner}.original", False)
    return found


def _near(patterns: str, known: list[str]) -> str:
    """Return `; did you mean 'c_attn'?` if a layer's name ends in similar letters."""
    endings = [name.rpartition(".")[2] for name in known]
    for pattern in patterns.split(","):
        hint = did_you_mean(pattern.strip().rpartition(".")[2], endings)
        if hint:
            return hint
    return ""


def _matches_inside(name: str, patterns: str) -> bool:
    """Tell whether a module, or one that it is part of, has such a name."""
    parts = name.split(".")
    ends = range(1, len(parts) + 1)
    return any(_matches(".".join(parts[:end]), patterns) for end in ends)


def _matches(name: str, patterns: str) -> bool:
    return any(fnmatchcase(name, pattern.strip()) for pattern in patterns.split(","))


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """Return inputs and outputs of a linear layer; None for others."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    # Hugging Face's name for a linear layer with its weight transposed.
    if type(module).__name__ == "Conv1D" and isinstance(module.weight, Tensor):
        inputs, outputs = module.weight.shape
        return inputs, outputs
    return None


def _inside_attention(network: nn.Module, name: str) -> bool:
    parent = network.get_submodule(name.rpartition(".")[0])
    return isinstance(parent, nn.MultiheadAttention)


def _adapt_attention(module: nn.MultiheadAttention, *, rank: int, scale: float) -> None:
    """Adapt the weights of torch's attention, which it uses without calling layers."""
    for owner, name in ((module, "in_proj_weight"), (module.out_proj, "weight")):
        weight = getattr(owner, name)
        if weight is not None:
            adapter = LoraWeight(weight, rank=rank, scale=scale)
            parametrize.register_parametrization(owner, name, adapter)
