"""Replaces modules of transformers by faster ones: what is written as many small
operations becomes a single pass over memory, and a vocabulary is rounded up.

Results differ by rounding, so this is for networks that compute in bfloat16.
"""

import inspect
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpcfed.kernels.adapted import EIGHT, padded, padding_of
from hpcfed.kernels.feed_forward import feed_forward
from hpcfed.kernels.gated import gated
from hpcfed.kernels.residual import FrozenNorm, normalised
from hpcfed.kernels.rotary import rotated, turned
from hpcfed.models.blocks import is_of_transformers
from hpcfed.models.stacked_layers import StackedLora

RMS_NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")
"""Norms that are x / √(mean x² + ε) · weight."""
GATED = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP")
"""Linear layers that are down(act(gate(x)) · up(x))."""
SILU = ("SiLU", "SiLUActivation")
ROTATION = "apply_rotary_pos_emb"
"""The function that attention calls to rotate queries and keys."""


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
    if kind is nn.LayerNorm and network.weight is not None:
        return _Norm(network, eps=network.eps, rms=False)
    if not is_of_transformers(network):
        return network
    if kind.__name__ == "NewGELUActivation":
        return nn.GELU(approximate="tanh")
    if kind.__name__ in RMS_NORMS:
        return _Norm(network, eps=network.variance_epsilon, rms=True)
    if kind.__name__ in GATED and type(network.act_fn).__name__ in SILU:
        return _GatedLayers(network)
    if kind.__name__ == "GPT2MLP" and _have_adapters(network.c_fc, network.c_proj):
        # By what its activation has become.
        by_tanh = getattr(network.act, "approximate", "") == "tanh"
        return _GeluLayers(network) if by_tanh else network
    if isinstance(kind.forward, FunctionType):
        _call_quickly(network, kind.forward)
    return network


def _call_quickly(module: nn.Module, forward: FunctionType) -> None:
    """Let blocks and attention call what is faster."""
    ours: Any = None
    if ROTATION in forward.__code__.co_names:
        ours = _with_rotation(forward)
    # Blocks of older versions return tuples.
    elif inspect.signature(forward).return_annotation is Tensor:
        for kinds, norms, block in BLOCKS:
            quick_norms = [isinstance(getattr(module, n, None), _Norm) for n in norms]
            if type(module).__name__ in kinds and all(quick_norms):
                ours = block
    if ours is not None:
        # Of this module alone.
        module.forward = MethodType(ours, module)


def _with_rotation(forward: FunctionType) -> FunctionType | None:
    """Return a method that calls our own rotation, if its own one does the same."""
    names = forward.__globals__
    own = names[ROTATION]
    if not _rotates_halves(own):
        return None

    def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *more: Any) -> Any:
        # Some rotate a part of a head only, or take angles in float32.
        same_type = query.dtype == key.dtype == cos.dtype == sin.dtype
        if (
            more
            or not same_type
            or not query.shape[-1] == key.shape[-1] == cos.shape[-1]
        ):
            return own(query, key, cos, sin, *more)
        return rotated(query, key, cos, sin)

    ours = FunctionType(
        forward.__code__,
        names | {ROTATION: rotate},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    ours.__kwdefaults__ = forward.__kwdefaults__
    return ours


def _rotates_halves(rotation: Any) -> bool:
    """Try a function on a few numbers."""
    x = torch.arange(16.0).view(1, 1, 2, 8)
    cosines, sines = torch.arange(32.0).view(2, 1, 2, 8)
    expected = x * cosines + turned(x) * sines
    try:
        found = rotation(x, x, cosines, sines)
    except Exception:  # it wants something else
        return False
    return len(found) == 2 and all(torch.equal(y, expected) for y in found)


def _block(self: Any, hidden_states: Tensor, **rest: Any) -> Tensor:
    """Pass forward through a block whose norms do the residual sums."""
    residual, x = self.input_layernorm.beside(hidden_states)
    x, _ = self.self_attn(hidden_states=x, **rest)
    residual, x = self.post_attention_layernorm.beside(x, residual)
    y: Tensor = residual + self.mlp(x)
    return y


def _gpt2_block(
    self: Any,
    hidden_states: Tensor,
    past_key_values: Any = None,
    attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    *args: Any,
    **rest: Any,
) -> Tensor:
    """Do the same in GPT-2's order of arguments."""
    given = (past_key_values, attention_mask, encoder_hidden_states, *args)
    if encoder_hidden_states is not None:
        y: Tensor = type(self).forward(self, hidden_states, *given, **rest)
        return y
    rest.pop("encoder_attention_mask", None)
    residual, x = self.ln_1.beside(hidden_states)
    x, _ = self.attn(
        x, past_key_values=past_key_values, attention_mask=attention_mask, **rest
    )
    residual, x = self.ln_2.beside(x, residual)
    return residual + self.mlp(x)


BLOCKS = (
    (
        (
            "LlamaDecoderLayer",
            "MistralDecoderLayer",
            "Qwen2DecoderLayer",
            "Qwen3DecoderLayer",
        ),
        ("input_layernorm", "post_attention_layernorm"),
        _block,
    ),
    (("GPT2Block",), ("ln_1", "ln_2"), _gpt2_block),
)
"""Blocks that are x + attention(norm(x)), and then x + layers(norm(x)): their names, those
of their norms, and what does the same.
"""


def _have_adapters(*layers: Any) -> bool:
    return all(isinstance(each, StackedLora) for each in layers)


class _GeluLayers(nn.Module):
    c_fc: StackedLora
    c_proj: StackedLora
    dropout: nn.Module

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.named_children():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        by_client = self.c_fc.by_client(x)
        y = feed_forward(by_client, self.c_fc.parts(), self.c_proj.parts())
        z: Tensor = self.dropout(y.view(*x.shape[:-1], -1))
        return z


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


class _Norm(nn.Module):
    """A frozen norm that can also do the residual sum before it."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, norm: nn.Module, *, eps: Any, rms: bool) -> None:
        super().__init__()
        self.register_parameter("weight", norm.weight)  # type: ignore[arg-type]
        self.register_parameter("bias", getattr(norm, "bias", None))
        self.eps, self.rms = float(eps), rms

    def beside(
        self, x: Tensor, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return x + residual, and the norm of it."""
        norm = FrozenNorm(self.weight, self.bias, self.eps, rms=self.rms)
        return normalised(norm, x, residual)

    def forward(self, x: Tensor) -> Tensor:
        return self.beside(x)[1]
