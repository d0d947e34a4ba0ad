"""Layers of the server's networks, over activations [samples, channels, 1, length].

On a GPU they are channels-last: cuDNN is twice as fast with these.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpcfed.kernels import norms
from hpcfed.kernels.cuda import aligned

KERNEL = 7
"""Taps of every convolution."""


def as_activations(x: Tensor) -> Tensor:
    """Lay out [samples, channels, length] as activations."""
    x = x.unsqueeze(2)
    return x.to(memory_format=torch.channels_last) if x.is_cuda else x


class Convolution(nn.Conv1d):
    """A convolution over the length."""

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and self.in_channels == 1:
            return self.as_product(x)
        # In ZeRO's flat buffers a weight may start at an address that kernels cannot
        # load from; then `aligned` copies it.
        weight = aligned(self.weight).unsqueeze(2)
        stride = (1, *self.stride)
        padding = (0, KERNEL // 2)
        return F.conv2d(x, weight, self.bias, stride, padding)

    def as_product(self, x: Tensor) -> Tensor:
        """Convolve a single channel as a matrix product of its patches.

        cuDNN is slow with fewer than eight channels. An eighth tap of zeros aligns the
        patches.
        """
        half = KERNEL // 2
        signal = x[:, 0, 0]
        padded = F.pad(signal, (half, half + 1))
        patches = padded.unfold(1, KERNEL + 1, *self.stride)
        taps = F.pad(self.weight[:, 0], (0, 1))
        y = F.linear(patches, taps, self.bias)
        return y.transpose(1, 2).unsqueeze(2)


class Upsampling(nn.ConvTranspose1d):
    """A transposed convolution that doubles the length."""

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        if x.is_cuda and self.out_channels == 1:
            return self.as_product(x)
        weight = aligned(self.weight).unsqueeze(2)
        stride = (1, *self.stride)
        padding = (0, KERNEL // 2)
        extra = (0, *self.output_padding)
        return F.conv_transpose2d(x, weight, self.bias, stride, padding, extra)

    def as_product(self, x: Tensor) -> Tensor:
        """Make a single channel by a matrix product: first what each position
        contributes to its seven outputs, then the sums.
        """
        taps = F.pad(self.weight[:, 0], (0, 1)).t()
        positions = x.squeeze(2).transpose(1, 2)
        # Sum in float32, even if products are in bfloat16.
        given = F.linear(positions, taps).float()
        length = given.shape[1]
        given = F.pad(given, (0, 0, 1, 2))
        # Output 2 i gets the odd taps of three positions, output 2 i + 1 the even taps
        # of four.
        for_even, for_odd = [], []
        for i in range(3):
            first = 2 - i
            for_even.append(given[:, first : first + length, 2 * i + 1])
        for i in range(4):
            first = 3 - i
            for_odd.append(given[:, first : first + length, 2 * i])
        even = torch.stack(for_even).sum(0)
        odd = torch.stack(for_odd).sum(0)
        alternating = torch.stack([even, odd], -1).flatten(1)
        y = alternating[:, None, None]
        return y if self.bias is None else y + self.bias


class GroupNorm(nn.GroupNorm):
    """Group norm, then a shift of every channel, then SiLU."""

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:  # type: ignore[override]
        return norms.group_norm(
            x, self.num_groups, self.weight, self.bias, shift, eps=self.eps
        )


def num_groups(channels: int) -> int:
    """Return the most groups, up to eight, that divide the channels evenly."""
    for groups in (8, 4, 2):
        if channels % groups == 0:
            return groups
    return 1
