"""Replaces modules of transformers that are written as many small operations by torch's
own, which do the same in one pass over memory.

Results differ by rounding, so this is for networks that compute in bfloat16.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from hpcfed.kernels.gated import gated

RMS_NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")
"""Norms that are x / √(mean x² + ε) · weight."""
GATED = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP")
"""Linear layers that are down(act(gate(x)) · up(x))."""
SILU = ("SiLU", "SiLUActivation")


def quick(network: nn.Module) -> nn.Module:
    """Return the network with such modules replaced in place."""
    for name, child in list(network.named_children()):
        setattr(network, name, quick(child))
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
