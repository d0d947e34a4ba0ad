"""The server's two networks, over flat vectors: an autoencoder of rows, and a denoiser
of its latents.

The shapes are p-diff's (Wang et al. 2024): 1-D convolutions with kernels of 7 and batch
norm. The encoder halves the length with every convolution and ends in a linear layer.
The denoiser keeps the length, widens to the middle, and adds what it saw on the way in
to what it makes on the way out. Convolutions before a norm have no bias, since the norm
has one.
"""

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpcfed.models.cost import multiply_adds
from hpcfed.server.batch_norm import BatchNorm
from hpcfed.server.layers import (
    KERNEL,
    Convolution,
    GroupNorm,
    Upsampling,
    as_activations,
    num_groups,
)
from hpcfed.server.options import Size

TIME_FEATURES = 256

Checkpoint = Callable[..., Tensor]
"""Calls a module, and may forget its activations until the backward pass."""


def _plain_call(module: nn.Module, *inputs: Tensor) -> Tensor:
    output: Tensor = module(*inputs)
    return output


def encoder_channels(size: Size) -> list[int]:
    """Return 64, 128, 256, 256, 32 for a width of 64 and a depth of 5."""
    channels = [size.width * min(2**i, 4) for i in range(size.depth - 1)]
    channels.append(max(1, size.width // 2))
    return channels


def denoiser_channels(size: Size) -> list[int]:
    """Return 64, 128, 256, 512, 256, 128, 64 for a width of 64 and a depth of 5; five
    convolutions at least.
    """
    rising = [size.width * 2**i for i in range(max(3, size.depth - 1))]
    return rising + rising[-2::-1]


class Autoencoder(nn.Module):
    """Takes rows to latents and back; in training both get noise on the way in."""

    def __init__(
        self,
        columns: int,
        size: Size,
        *,
        input_noise: float = 0.0,
        latent_noise: float = 0.0,
    ) -> None:
        """`columns` are those of a row."""
        super().__init__()
        self.columns = columns
        self.input_noise, self.latent_noise = input_noise, latent_noise
        self.checkpoint: Checkpoint = _plain_call
        # Every stage halves the length, so rows are padded to a multiple of 2^depth.
        multiple = 2**size.depth
        shortest = -(-columns // multiple)
        self.padded = shortest * multiple
        channels = encoder_channels(size)
        self._shape = (channels[-1], shortest)
        flat = channels[-1] * shortest
        # The order of construction is that of the initial weights' random numbers.
        self.encoder = nn.ModuleList(
            _downsampling(before, after) for before, after in pairwise([1, *channels])
        )
        self.to_latent = nn.Linear(flat, size.latent)
        self.from_latent = nn.Linear(size.latent, flat)
        backwards = [*channels[::-1], 1]
        self.decoder = nn.ModuleList(
            _upsampling(before, after, last=i == len(channels) - 1)
            for i, (before, after) in enumerate(pairwise(backwards))
        )
        lengths = [self.padded // 2**i for i in range(1, size.depth + 1)]
        made = [after * length for after, length in zip(channels, lengths, strict=True)]
        self.widest = max(made)
        """Numbers of a row's largest activation."""
        self.activations = sum(made) + sum(made[:-1]) + self.padded
        """Numbers of all stages' activations of a row, there and back."""

    def forward(
        self, rows: Tensor, noise: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Return the mean squared error of reconstruction; `noise` is standard normal,
        for rows and latents.
        """
        if noise is None:
            return F.mse_loss(self.decode(self.encode(rows)), rows)
        latents = self.encode(rows + self.input_noise * noise[0])
        return F.mse_loss(self.decode(latents + self.latent_noise * noise[1]), rows)

    @property
    def dtype(self) -> torch.dtype:
        """The parameters' type, which DeepSpeed may have made bfloat16; rows and
        latents are always float32.
        """
        return self.to_latent.weight.dtype

    def flops(self) -> int:
        """Return the FLOPs of one sample's forward pass, both ways."""
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
        """Return the latents of rows."""
        padded = F.pad(rows.to(self.dtype), (0, self.padded - self.columns))
        x = as_activations(padded.unsqueeze(1))
        for stage in self.encoder:
            x = self.checkpoint(stage, x)
        latents: Tensor = self.to_latent(x.flatten(1))
        return latents.float()

    def decode(self, latents: Tensor) -> Tensor:
        """Return the rows of latents."""
        flat = self.from_latent(latents.to(self.dtype))
        x = as_activations(flat.unflatten(1, self._shape))
        for stage in self.decoder:
            x = self.checkpoint(stage, x)
        return x[:, 0, 0, : self.columns].float()


def _downsampling(before: int, after: int) -> nn.Sequential:
    convolution = Convolution(
        before, after, KERNEL, stride=2, padding=KERNEL // 2, bias=False
    )
    return nn.Sequential(convolution, BatchNorm(after))


def _upsampling(before: int, after: int, *, last: bool) -> nn.Sequential:
    """Return a stage of the decoder; the last one has neither norm nor activation,
    because a residual has any sign and size.
    """
    convolution = Upsampling(
        before,
        after,
        KERNEL,
        stride=2,
        padding=KERNEL // 2,
        output_padding=1,
        bias=last,
    )
    if last:
        return nn.Sequential(convolution)
    return nn.Sequential(convolution, BatchNorm(after))


class Denoiser(nn.Module):
    """Predicts ε(z, t): the noise that was added to a latent."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.checkpoint: Checkpoint = _plain_call
        channels = denoiser_channels(size)
        self.time = nn.Sequential(
            nn.Linear(TIME_FEATURES, TIME_FEATURES),
            nn.SiLU(),
            nn.Linear(TIME_FEATURES, TIME_FEATURES),
        )
        self.stages = nn.ModuleList(
            _Stage(before, after) for before, after in pairwise([1, *channels])
        )
        self.last = Convolution(channels[-1], 1, KERNEL, padding=KERNEL // 2)
        self.widest = max(channels) * size.latent
        """Numbers of a latent's largest activation."""
        self.activations = sum(channels) * size.latent
        """Numbers of all stages' activations of a latent."""

    def flops(self, latent: int) -> int:
        """Return the FLOPs of one latent's forward pass."""
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
        x = as_activations(z.to(dtype).unsqueeze(1))
        skipped: list[Tensor] = []
        middle = len(self.stages) // 2
        for number, stage in enumerate(self.stages):
            x = self.checkpoint(stage, x, time)
            if number < middle:
                skipped.append(x)
            elif number > middle:
                x = x + skipped.pop()
        answer: Tensor = self.last(x)
        return answer[:, 0, 0].to(z.dtype)


class _Stage(nn.Module):
    """Convolution, norm, the time's shift of every channel, and activation."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.convolution = Convolution(
            before, after, KERNEL, padding=KERNEL // 2, bias=False
        )
        self.shift = nn.Linear(TIME_FEATURES, after)
        self.norm = GroupNorm(num_groups(after), after)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y: Tensor = self.norm(self.convolution(x), self.shift(time))
        return y


def time_features(t: Tensor) -> Tensor:
    """Return sines and cosines of the time at 128 frequencies from 1 to 1/10000."""
    half = TIME_FEATURES // 2
    exponents = torch.arange(half, device=t.device) * (-math.log(1e4) / half)
    angles = t.to(torch.float32).unsqueeze(-1) * torch.exp(exponents)
    return torch.cat([angles.sin(), angles.cos()], -1)


def num_parameters(network: nn.Module) -> int:
    """Return how many parameters a network has."""
    return sum(p.numel() for p in network.parameters())
