"""Replaces modules of transformers by faster ones: what is written as many small
operations becomes a single pass over memory, and a vocabulary is rounded up.

Results differ by rounding, so this is for networks that compute in bfloat16.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from hpcfed.kernels.adapted import EIGHT, padded, padding_of
from hpcfed.kernels.gated import gated
from hpcfed.models.stacked_layers import StackedLora

RMS_NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")
"""Norms that are x / √(mean x² + ε) · weight."""
GATED = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP")
"""Linear layers that are down(act(gate(x)) · up(x))."""
SILU = ("SiLU", "SiLUActivation")


def quick(network: nn.Module) -> nn.Module:
    """Return the network with such modules replaced in place."""
    _round_up_vocabulary(network)
    return _quick(network)


def _round_up_vocabulary(network: nn.Module) -> None:
    """Let a language model answer with further tokens, which are impossible.

    With an odd number of outputs, as GPT-2's 50,257, products on tensor cores take five
    times as long.
    """
    asked: Any = getattr(network, "get_output_embeddings", None)
    head = None if asked is None else asked()
    for name, module in network.named_modules():
        if module is not head:
            continue
        layer = module.base if isinstance(module, StackedLora) else module
        if not isinstance(layer, nn.Linear) or not layer.out_features % EIGHT:
            continue
        if isinstance(module, StackedLora):
            module.padding = padding_of(layer.out_features)
        else:
            parent, _, own = name.rpartition(".")
            setattr(network.get_submodule(parent), own, _Head(layer))


class _Head(nn.Module):
    """A linear layer without adapter whose outputs are rounded up."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = layer.weight  # type: ignore[assignment]
        self.bias = layer.bias
        self.padding = padding_of(layer.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, *padded(self.weight, self.bias, self.padding))


def _quick(network: nn.Module) -> nn.Module:
    for name, child in list(network.named_children()):
        setattr(network, name, _quick(child))
    kind = type(network)
    if not kind.__module__.startswith("transformers."):
        return network
    if kind.__name__ == "NewGELUActivation":
        return nn.GELU(approximate="tanh")
    if kind.__name__ in RMS_NORMS:
        return _RMSNorm(network)
    if kind.__name__ in GATED and type(network.act_fn).__name__ in SILU:
        return _GatedLayers(network)
    return network


class _GatedLayers(nn.Module):
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.named_children():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(gated(self.gate_proj(x), self.up_proj(x)))
        return y


class _RMSNorm(nn.Module):
    weight: nn.Parameter

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.register_parameter("weight", norm.weight)  # type: ignore[arg-type]
        self.eps = float(norm.variance_epsilon)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
