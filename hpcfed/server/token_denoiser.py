"""A transformer that denoises windows of a row's tokens.

Its size does not depend on the number of columns, and its blocks are all alike, so that
ZeRO can share them out among ranks.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpcfed.models.cost import multiply_adds
from hpcfed.server.diffusion import Schedule
from hpcfed.server.networks import TIME_FEATURES, ServerNetwork, time_features
from hpcfed.server.sizes import Size
from hpcfed.server.token_layout import TokenLayout

HEAD = 64
"""The width of an attention head."""
MODULATIONS = 6
"""What the time sets in a block: shift, scale and gate of attention, and of the linear
layers.
"""


class TokenDenoiser(ServerNetwork):
    """Predicts ε(z, t) of windows: what an ideal denoiser of white noise would say, and
    the transformer's correction of it.

    Standardised tokens have variance 1. So the correction has it, too, and begins at
    zero. It is the velocity of Salimans and Ho (2022): √ᾱ ε − √(1 − ᾱ) z_0.
    """

    def __init__(self, layout: TokenLayout, size: Size, schedule: Schedule) -> None:
        super().__init__()
        # Not buffers: DeepSpeed would round them to bfloat16.
        self._layout = layout
        self._alpha_bars = schedule.alpha_bars.float()
        width, length = size.width, layout.length
        self._width = width
        self.time = _two_layers(TIME_FEATURES, width, width)
        self.modulate = nn.Linear(width, MODULATIONS * width)
        self.place = _two_layers(2 * TIME_FEATURES, width, width)
        # The last one is for tokens without columns.
        self.tensor = nn.Embedding(layout.num_tensors + 1, width)
        # What counts in a token depends on its place.
        self.weigh = nn.Linear(width, 2 * width)
        self.first = nn.Linear(length, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(size.depth))
        self.last = nn.Linear(width, length)
        for layer in (self.modulate, self.last):
            # The network begins as the ideal denoiser.
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        self.widest = layout.window * max(4 * width, length)
        per_token = 2 * length + (7 + _Block.ACTIVATIONS * size.depth) * width
        self.activations = layout.window * per_token

    def flops(self) -> int:
        window = self._layout.window
        total = 0
        for name, layer in self.named_modules():
            if isinstance(layer, nn.Linear):
                once = name.startswith(("time", "modulate"))
                total += multiply_adds(layer) * (1 if once else window)
        # Queries with keys, and shares with values.
        total += len(self.blocks) * 2 * window**2 * self._width
        return 2 * total

    def forward(self, z: Tensor, t: Tensor, first: Tensor) -> Tensor:
        """Return ε of the windows that begin at these tokens of their rows."""
        layout = self._layout
        dtype = self.first.weight.dtype
        time = self.time(time_features(t).to(dtype))
        modulation = self.modulate(F.silu(time)).unflatten(1, (MODULATIONS, -1))
        tokens = z.unflatten(1, (layout.window, layout.length)).to(dtype)
        place = self._embedding(first, dtype)
        reading, writing = self.weigh(F.silu(place)).chunk(2, -1)
        x = self.first(tokens) * (1 + reading) + place
        for block in self.blocks:
            x = self.checkpoint(block, x, modulation)
        # Without a norm: how far a token is from the mean counts.
        correction = self.last(x * (1 + writing)).flatten(1).float()
        alpha_bar = self._alpha_bars[t].unsqueeze(1)
        return (1 - alpha_bar).sqrt() * z + alpha_bar.sqrt() * correction

    def _embedding(self, first: Tensor, dtype: torch.dtype) -> Tensor:
        """Return what tells tokens apart: their place in the row, that in their tensor,
        and the tensor.
        """
        inside = torch.arange(self._layout.window, device=first.device)
        at = first.unsqueeze(1) + inside
        in_tensor = self._layout.places[at]
        features = torch.cat([time_features(at), time_features(in_tensor)], -1)
        place: Tensor = self.place(features.to(dtype))
        return place + self.tensor(self._layout.tensors[at])


def _two_layers(before: int, between: int, after: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(before, between), nn.SiLU(), nn.Linear(between, after)
    )


class _Block(nn.Module):
    """Attention within a window, then two linear layers. The time shifts and scales
    their inputs, and scales what they add.
    """

    ACTIVATIONS = 16
    """Numbers that a block keeps for the backward pass, per token and width: two norms
    and their modulations, q, k, v, attention and its projection, and the linear layers
    with four times the width before and after the activation.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD if width % HEAD == 0 else 1
        self.attention_norm = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.linear_norm = nn.LayerNorm(width, elementwise_affine=False)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        # Its own, in addition to what all blocks share.
        self.offsets = nn.Parameter(torch.zeros(MODULATIONS, width))
        # Gates begin a little open, so that blocks learn from the first step on.
        with torch.no_grad():
            self.offsets[2::3] = 0.1

    def forward(self, x: Tensor, modulation: Tensor) -> Tensor:
        # [6, rows, 1, width]
        each = (modulation + self.offsets).transpose(0, 1).unsqueeze(2)
        shift, scale, gate = each[:3]
        x = x + gate * self._attention(self.attention_norm(x) * (1 + scale) + shift)
        shift, scale, gate = each[3:]
        wide = F.gelu(
            self.widen(self.linear_norm(x) * (1 + scale) + shift), approximate="tanh"
        )
        y: Tensor = x + gate * self.narrow(wide)
        return y

    def _attention(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(2, (3, self.heads, -1))
        # [3, rows, heads, tokens, width of a head]
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        y: Tensor = self.project(mixed.transpose(1, 2).flatten(2))
        return y
