"""The server's two networks on flat vectors: an autoencoder of rows, and a denoiser of
its latents.

The shapes are p-diff's (Wang et al. 2024): 1-D convolutions with kernels of 7 and batch
norm. The encoder halves the length with every convolution and ends in a linear layer.
The denoiser keeps the length, has the most channels in the middle, and has skip
connections from its first half to its second. Convolutions before a norm have no bias,
since the norm has one.
"""

import math
from collections.abc import Callable, Iterator
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
from hpcfed.server.sizes import Size
from hpcfed.server.tiles import in_tiles

TIME_FEATURES = 256
AT_ONCE = 2**28
"""The most numbers in one activation of a chunk: a gigabyte in float32."""

Checkpoint = Callable[..., Tensor]
"""Calls a module, and may drop its activations until the backward pass."""


def _plain_call(module: nn.Module, *inputs: Tensor) -> Tensor:
    output: Tensor = module(*inputs)
    return output


class ServerNetwork(nn.Module):
    """A network that the server trains."""

    widest: int
    """Numbers of a sample's largest activation."""
    activations: int
    """Numbers of all stages' activations of a sample."""
    large_layers: tuple[str, ...] = ()
    """Linear layers that may be too large for ZeRO 3 to gather as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.checkpoint: Checkpoint = _plain_call

    def flops(self) -> int:
        """Return the FLOPs of one sample's forward pass."""
        raise NotImplementedError

    def cut_large_layers(self, most: int) -> None:
        """Cut large layers into tiles of at most `most` parameters, for training."""
        for name in self.large_layers:
            setattr(self, name, in_tiles(getattr(self, name), most))


def encoder_channels(size: Size) -> list[int]:
    """Return 64, 128, 256, 256, 32 for a width of 64 and a depth of 5."""
    channels = []
    for i in range(size.depth - 1):
        # p-diff's rule: the width doubles twice, then stays.
        channels.append(size.width * min(2**i, 4))
    last = max(1, size.width // 2)
    return [*channels, last]


def denoiser_channels(size: Size) -> list[int]:
    """Return 64, 128, 256, 512, 256, 128, 64 for a width of 64 and a depth of 5; at
    least five convolutions.
    """
    levels = max(3, (size.denoiser_depth or size.depth) - 1)
    rising = [size.width * 2**i for i in range(levels)]
    falling = rising[-2::-1]
    return rising + falling


class Autoencoder(ServerNetwork):
    """Maps rows to latents and back; in training, rows and latents get noise."""

    large_layers = ("to_latent", "from_latent")

    def __init__(
        self,
        columns: int,
        size: Size,
        *,
        input_noise: float = 0.0,
        latent_noise: float = 0.0,
    ) -> None:
        """Build the networks for rows of this number of columns."""
        super().__init__()
        self.columns = columns
        self.input_noise = input_noise
        self.latent_noise = latent_noise
        # Every stage halves the length, so rows are padded to a multiple of 2^depth.
        multiple = 2**size.depth
        shortest = -(-columns // multiple)
        self.padded = shortest * multiple
        channels = encoder_channels(size)
        self._shape = (channels[-1], shortest)
        flat = channels[-1] * shortest
        # Do not change the order of construction: initial weights are drawn in it, so
        # every seed would give another server.
        self.encoder = nn.ModuleList()
        for before, after in pairwise([1, *channels]):
            self.encoder.append(_downsampling(before, after))
        self.to_latent = nn.Linear(flat, size.latent)
        self.from_latent = nn.Linear(size.latent, flat)
        self.decoder = nn.ModuleList()
        for before, after in pairwise(reversed(channels)):
            self.decoder.append(_upsampling(before, after))
        self.decoder.append(_last_upsampling(channels[0]))
        sizes = self._activation_sizes(channels)
        self.widest = max(sizes)
        # The decoder's activations mirror the encoder's, except that it ends in a row.
        self.activations = sum(sizes) + sum(sizes[:-1]) + self.padded

    def _activation_sizes(self, channels: list[int]) -> list[int]:
        """Return the size of each encoder stage's output for one row."""
        length = self.padded
        sizes = []
        for after in channels:
            length //= 2
            sizes.append(after * length)
        return sizes

    def forward(
        self, rows: Tensor, noise: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Return the mean squared error of reconstruction; `noise` is standard normal,
        for rows and latents.
        """
        if noise is None:
            made = self.decode(self.encode(rows))
            return F.mse_loss(made, rows)
        on_rows, on_latents = noise
        latents = self.encode(rows + self.input_noise * on_rows)
        made = self.decode(latents + self.latent_noise * on_latents)
        # Compare with the rows without noise: the autoencoder learns to remove it.
        return F.mse_loss(made, rows)

    @property
    def dtype(self) -> torch.dtype:
        """The parameters' type. DeepSpeed may have changed it to bfloat16; rows and
        latents are always float32.
        """
        return next(self.parameters()).dtype

    def flops(self) -> int:
        length = self.padded
        total = 0
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
        missing = self.padded - self.columns
        padded = F.pad(rows.to(self.dtype), (0, missing))
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


def _upsampling(before: int, after: int) -> nn.Sequential:
    convolution = Upsampling(
        before,
        after,
        KERNEL,
        stride=2,
        padding=KERNEL // 2,
        output_padding=1,
        bias=False,
    )
    return nn.Sequential(convolution, BatchNorm(after))


def _last_upsampling(before: int) -> nn.Sequential:
    """Return the decoder's last stage. It has neither norm nor activation, because a
    residual has any sign and size.
    """
    convolution = Upsampling(
        before, 1, KERNEL, stride=2, padding=KERNEL // 2, output_padding=1
    )
    return nn.Sequential(convolution)


class Denoiser(ServerNetwork):
    """Predicts ε(z, t): the noise that was added to a latent."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self._latent = size.latent
        channels = denoiser_channels(size)
        self.time = nn.Sequential(
            nn.Linear(TIME_FEATURES, TIME_FEATURES),
            nn.SiLU(),
            nn.Linear(TIME_FEATURES, TIME_FEATURES),
        )
        self.stages = nn.ModuleList()
        for before, after in pairwise([1, *channels]):
            self.stages.append(_Stage(before, after))
        self.last = Convolution(channels[-1], 1, KERNEL, padding=KERNEL // 2)
        self.widest = max(channels) * size.latent
        self.activations = sum(channels) * size.latent

    def flops(self) -> int:
        total = 0
        for layer in self.modules():
            if isinstance(layer, nn.Conv1d):
                total += multiply_adds(layer, self._latent)
            elif isinstance(layer, nn.Linear):
                total += multiply_adds(layer)
        return 2 * total

    def forward(self, z: Tensor, t: Tensor) -> Tensor:
        dtype = self.last.weight.dtype
        time = self.time(time_features(t).to(dtype))
        x = as_activations(z.to(dtype).unsqueeze(1))
        # The U: stages before the middle pass their output to those after it, the last
        # one first.
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
    """Convolution, norm, a shift of every channel by the time, and activation."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.convolution = Convolution(
            before, after, KERNEL, padding=KERNEL // 2, bias=False
        )
        self.shift = nn.Linear(TIME_FEATURES, after)
        self.norm = GroupNorm(num_groups(after), after)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x = self.convolution(x)
        shift = self.shift(time)
        y: Tensor = self.norm(x, shift)
        return y


def time_features(t: Tensor) -> Tensor:
    """Return sines and cosines of the time at 128 frequencies from 1 to 1/10000."""
    half = TIME_FEATURES // 2
    slope = -math.log(1e4) / half
    exponents = torch.arange(half, device=t.device) * slope
    times = t.to(torch.float32).unsqueeze(-1)
    angles = times * torch.exp(exponents)
    return torch.cat([angles.sin(), angles.cos()], -1)


def num_parameters(network: nn.Module) -> int:
    """Return the number of parameters of a network."""
    return sum(p.numel() for p in network.parameters())


def in_chunks(call: Callable[..., Tensor], *inputs: Tensor, widest: int) -> Tensor:
    """Return the call's results for all inputs, computed in few chunks, so that
    activations fit into memory.

    `widest` is the size of one sample's largest activation.
    """
    # A single sample always passes, however wide it is.
    most = max(1, AT_ONCE // widest)
    results = []
    for chunk in chunks(len(inputs[0]), most):
        selected = [values[chunk] for values in inputs]
        result = call(*selected)
        results.append(result)
    return torch.cat(results)


def chunks(count: int, most: int) -> Iterator[slice]:
    """Yield as few slices as possible, of nearly equal size, at most `most` each."""
    number = -(-count // most)
    begin = 0
    for i in range(1, number + 1):
        end = i * count // number
        yield slice(begin, end)
        begin = end
