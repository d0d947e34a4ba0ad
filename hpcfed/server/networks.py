"""The server's two networks, over flat vectors: an autoencoder and a denoiser of its
latents.

The shapes are p-diff's (Wang et al. 2024): 1-D convolutions with kernels of 7 and batch
norm; the encoder halves the length with every convolution and ends in a linear layer;
the denoiser keeps the length, widens to the middle, and adds what it saw on the way in
to what it makes on the way out. Convolutions before a norm have no bias, since it has
one.

Activations are [samples, channels, 1, length], on a GPU channels-last: cuDNN is twice
as fast so.
"""

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpcfed.kernels import norms
from hpcfed.kernels.cuda import aligned
from hpcfed.models.cost import multiply_adds
from hpcfed.server.options import Size

KERNEL = 7
TIME_FEATURES = 256
LEAK = 0.01
"""Slope of the autoencoder's activation below zero."""

Checkpoint = Callable[..., Tensor]
"""Calls a module, and may forget its activations until the backward pass."""


def _plainly(module: nn.Module, *inputs: Tensor) -> Tensor:
    output: Tensor = module(*inputs)
    return output


def encoder_channels(size: Size) -> list[int]:
    """64, 128, 256, 256, 32 for a width of 64 and a depth of 5."""
    return [size.width * min(2**i, 4) for i in range(size.depth - 1)] + [
        max(1, size.width // 2)
    ]


def denoiser_channels(size: Size) -> list[int]:
    """64, 128, 256, 512, 256, 128, 64 for a width of 64 and a depth of 5; five
    convolutions at least.
    """
    rising = [size.width * 2**i for i in range(max(3, size.depth - 1))]
    return rising + rising[-2::-1]


class Autoencoder(nn.Module):
    """Rows of so many columns to latents and back; noise on both ways in while it
    learns.
    """

    def __init__(
        self,
        columns: int,
        size: Size,
        *,
        input_noise: float = 0.0,
        latent_noise: float = 0.0,
    ) -> None:
        super().__init__()
        self.columns = columns
        self.input_noise, self.latent_noise = input_noise, latent_noise
        self.checkpoint: Checkpoint = _plainly
        multiple = 2**size.depth
        self.padded = -(-columns // multiple) * multiple
        channels = encoder_channels(size)
        shortest = self.padded // multiple
        self.encoder = nn.ModuleList(
            _down(before, after)
            for before, after in zip([1, *channels], channels, strict=False)
        )
        self.to_latent = nn.Linear(channels[-1] * shortest, size.latent)
        self.from_latent = nn.Linear(size.latent, channels[-1] * shortest)
        backwards = [*channels[::-1], 1]
        self.decoder = nn.ModuleList(
            _up(before, after, last=i == len(channels) - 1)
            for i, (before, after) in enumerate(pairwise(backwards))
        )
        self._shape = (channels[-1], shortest)
        made = [
            after * self.padded // 2**i for i, after in enumerate(channels, start=1)
        ]
        self.widest = max(made)
        """Numbers of a row's largest activation."""
        self.activations = sum(made) + sum(made[:-1]) + self.padded
        """Numbers of all stages' activations of a row, there and back."""

    def forward(
        self, rows: Tensor, noise: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """The mean squared error of reconstruction; `noise` is standard normal, for
        rows and latents.
        """
        if noise is None:
            return F.mse_loss(self.decode(self.encode(rows)), rows)
        latents = self.encode(rows + self.input_noise * noise[0])
        return F.mse_loss(self.decode(latents + self.latent_noise * noise[1]), rows)

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters: DeepSpeed may have made them bfloat16. What goes in and
        comes out is float32.
        """
        return self.to_latent.weight.dtype

    def flops(self) -> int:
        """Of one sample's forward pass, both ways."""
        length, total = self.padded, 0
        for stage in self.encoder:
            length //= 2
            total += multiply_adds(stage[0], length)  # type: ignore[index]
        for stage in self.decoder:
            total += multiply_adds(stage[0], length)  # type: ignore[index]
            length *= 2
        total += multiply_adds(self.to_latent) + multiply_adds(self.from_latent)
        return 2 * total

    def encode(self, rows: Tensor) -> Tensor:
        x = _laid_out(
            F.pad(rows.to(self.dtype), (0, self.padded - self.columns)).unsqueeze(1)
        )
        for stage in self.encoder:
            x = self.checkpoint(stage, x)
        latents: Tensor = self.to_latent(x.flatten(1))
        return latents.float()

    def decode(self, latents: Tensor) -> Tensor:
        x = _laid_out(
            self.from_latent(latents.to(self.dtype)).unflatten(1, self._shape)
        )
        for stage in self.decoder:
            x = self.checkpoint(stage, x)
        return x[:, 0, 0, : self.columns].float()


class _Convolution(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and self.in_channels == 1:
            return self._of_patches(x)
        weight = aligned(self.weight).unsqueeze(2)
        return F.conv2d(x, weight, self.bias, (1, *self.stride), (0, KERNEL // 2))

    def _of_patches(self, x: Tensor) -> Tensor:
        """Of one channel as a matrix product: cuDNN is slow with less than eight. An
        eighth tap counts nothing.
        """
        half = KERNEL // 2
        patches = F.pad(x[:, 0, 0], (half, half + 1)).unfold(
            1, KERNEL + 1, *self.stride
        )
        y = F.linear(patches, F.pad(self.weight[:, 0], (0, 1)), self.bias)
        return y.transpose(1, 2).unsqueeze(2)


class _Transposed(nn.ConvTranspose1d):
    """Doubles the length."""

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        if x.is_cuda and self.out_channels == 1:
            return self._of_parts(x)
        weight = aligned(self.weight).unsqueeze(2)
        return F.conv_transpose2d(
            x,
            weight,
            self.bias,
            (1, *self.stride),
            (0, KERNEL // 2),
            (0, *self.output_padding),
        )

    def _of_parts(self, x: Tensor) -> Tensor:
        """The same for one channel that is made: what each position gives to its seven,
        then their sums.
        """
        parts = F.linear(
            x.squeeze(2).transpose(1, 2), F.pad(self.weight[:, 0], (0, 1)).t()
        ).float()
        length, parts = parts.shape[1], F.pad(parts, (0, 0, 1, 2))
        even = torch.stack(
            [parts[:, 2 - i : 2 - i + length, 1 + 2 * i] for i in range(3)]
        ).sum(0)
        odd = torch.stack(
            [parts[:, 3 - i : 3 - i + length, 2 * i] for i in range(4)]
        ).sum(0)
        y = torch.stack([even, odd], -1).flatten(1)[:, None, None]
        return y if self.bias is None else y + self.bias


class _BatchNorm(nn.BatchNorm1d):
    """With leaky ReLU. In float32, whatever its input: statistics in bfloat16 would
    hardly move.
    """

    counts = True
    """Whether a batch in training changes the statistics."""
    shared = False
    """Whether all ranks' samples are normalised together, as one batch."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.running_mean is not None and self.running_var is not None
        momentum = (self.momentum or 0.0) if self.counts else 0.0
        running = norms.Running(self.running_mean, self.running_var, momentum)
        if self.training and self.shared:
            return norms.shared_batch_norm(
                x, self.weight, self.bias, running, eps=self.eps, slope=LEAK
            )
        return norms.batch_norm(
            x,
            self.weight,
            self.bias,
            running,
            training=self.training,
            eps=self.eps,
            slope=LEAK,
        )


class _GroupNorm(nn.GroupNorm):
    """With a shift of every channel, and SiLU."""

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:  # type: ignore[override]
        return norms.group_norm(
            x, self.num_groups, self.weight, self.bias, shift, eps=self.eps
        )


def share_statistics(network: nn.Module) -> None:
    """Have batch norm normalise all ranks' samples together."""
    for part in network.modules():
        if isinstance(part, _BatchNorm):
            part.shared = True


def counted_once(module: nn.Module) -> Callable[..., Tensor]:
    """The module for a checkpoint, which calls it twice: batch norm counts the batch in
    the first call alone.
    """
    norms = [part for part in module.modules() if isinstance(part, _BatchNorm)]
    called = False

    def call(*inputs: Tensor) -> Tensor:
        nonlocal called
        for norm in norms:
            norm.counts = not called
        called = True
        try:
            output: Tensor = module(*inputs)
            return output
        finally:  # torch ends the second call by an exception as soon as it has seen enough
            for norm in norms:
                norm.counts = True

    return call


def _laid_out(x: Tensor) -> Tensor:
    """[samples, channels, length] as activations."""
    x = x.unsqueeze(2)
    return x.to(memory_format=torch.channels_last) if x.is_cuda else x


def _down(before: int, after: int) -> nn.Sequential:
    convolution = _Convolution(
        before, after, KERNEL, stride=2, padding=KERNEL // 2, bias=False
    )
    return nn.Sequential(convolution, _BatchNorm(after))


def _up(before: int, after: int, *, last: bool) -> nn.Sequential:
    """The last one answers as it likes: a residual has any sign and size."""
    convolution = _Transposed(
        before,
        after,
        KERNEL,
        stride=2,
        padding=KERNEL // 2,
        output_padding=1,
        bias=last,
    )
    return (
        nn.Sequential(convolution)
        if last
        else nn.Sequential(convolution, _BatchNorm(after))
    )


class Denoiser(nn.Module):
    """ε(z, t): which noise was added to a latent."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.checkpoint: Checkpoint = _plainly
        channels = denoiser_channels(size)
        self.time = nn.Sequential(
            nn.Linear(TIME_FEATURES, TIME_FEATURES),
            nn.SiLU(),
            nn.Linear(TIME_FEATURES, TIME_FEATURES),
        )
        self.stages = nn.ModuleList(
            _Stage(before, after)
            for before, after in zip([1, *channels], channels, strict=False)
        )
        self.last = _Convolution(channels[-1], 1, KERNEL, padding=KERNEL // 2)
        self.widest, self.activations = (
            max(channels) * size.latent,
            sum(channels) * size.latent,
        )

    def flops(self, latent: int) -> int:
        """Of one latent's forward pass."""
        total = 0
        for layer in self.modules():
            if isinstance(layer, nn.Conv1d):
                total += multiply_adds(layer, latent)
            elif isinstance(layer, nn.Linear):
                total += multiply_adds(layer)
        return 2 * total

    def forward(self, z: Tensor, t: Tensor) -> Tensor:
        dtype = self.last.weight.dtype
        time = self.time(time_features(t).to(dtype))
        x = _laid_out(z.to(dtype).unsqueeze(1))
        passed: list[Tensor] = []
        middle = len(self.stages) // 2
        for number, stage in enumerate(self.stages):
            x = self.checkpoint(stage, x, time)
            if number < middle:
                passed.append(x)
            elif number > middle:
                x = x + passed.pop()
        answer: Tensor = self.last(x)
        return answer[:, 0, 0].to(z.dtype)


class _Stage(nn.Module):
    """Convolution, norm, the time's own shift of every channel, and activation."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.convolution = _Convolution(
            before, after, KERNEL, padding=KERNEL // 2, bias=False
        )
        self.shift = nn.Linear(TIME_FEATURES, after)
        self.norm = _GroupNorm(_groups(after), after)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y: Tensor = self.norm(self.convolution(x), self.shift(time))
        return y


def _groups(channels: int) -> int:
    return next(groups for groups in (8, 4, 2, 1) if channels % groups == 0)


def time_features(t: Tensor) -> Tensor:
    """Sines and cosines of the time at 128 frequencies from 1 to 1/10000."""
    half = TIME_FEATURES // 2
    frequencies = torch.exp(
        torch.arange(half, device=t.device) * (-math.log(1e4) / half)
    )
    angles = t.to(torch.float32).unsqueeze(-1) * frequencies
    return torch.cat([angles.sin(), angles.cos()], -1)


def num_parameters(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())
