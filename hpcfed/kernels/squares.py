"""Squared gradients of single samples, summed over the samples, without storing any
sample's gradient.

For activations in bfloat16 on a GPU, channels-last. torch would write a gradient as
large as the weight for every sample, and read it again.
"""

from dataclasses import astuple, dataclass, fields
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hpcfed.kernels import cuda

OUTPUTS = 64
"""Outputs per block."""
POSITIONS = 64
"""Positions that a block multiplies between two fetches, if an image has that many."""
WIDEST = 2 * POSITIONS
"""The most positions in a row of an image."""
THREADS = 256
BLOCKS = 264
"""Target number of blocks: two for each multiprocessor of an H200."""
NUMBER = 2
"""Bytes of a bfloat16."""
SHARED = 96 * 1024
"""Above this many bytes of shared memory, one stage less is prefetched."""


@dataclass(frozen=True)
class ConvolutionSizes:
    """The sizes of a convolution, as the kernel needs them."""

    height: int
    width: int
    out_height: int
    out_width: int
    kernel: int
    stride: int
    padding: int
    channels: int
    """Channels per block."""

    @property
    def band(self) -> int:
        """Rows of an image that are multiplied between two fetches."""
        if self.out_height * self.out_width <= POSITIONS:
            return self.out_height
        return max(1, POSITIONS // self.out_width)

    @property
    def steps(self) -> int:
        """Steps of 16 positions in a band."""
        return -(-self.band * self.out_width // 16)

    @property
    def group(self) -> int:
        """Samples that are multiplied between two fetches."""
        if self.band < self.out_height:
            return 1
        return max(1, POSITIONS // 16 // self.steps)

    @property
    def stage(self) -> int:
        """Bytes that are fetched at once, including the gaps that the kernel leaves."""
        rows = self.group * self.steps * 16
        depth = (self.band - 1) * self.stride + self.kernel
        breadth = (self.out_width - 1) * self.stride + self.kernel
        pixels = self.group * depth * breadth
        return NUMBER * (rows * (OUTPUTS + 8) + pixels * (self.channels + 8))

    @property
    def stages(self) -> int:
        return 3 if 3 * self.stage <= SHARED else 2

    @property
    def macros(self) -> cuda.Macros:
        """Macros for compiling the kernel."""
        names = [field.name.upper() for field in fields(self)]
        sizes = zip(names, astuple(self), strict=True)
        return (
            ("CONVOLUTION", 1),
            ("THREADS", THREADS),
            ("BAND", self.band),
            ("GROUP", self.group),
            ("STAGES", self.stages),
            *sizes,
        )


def geometry(module: Any, x: Tensor, dy: Tensor) -> ConvolutionSizes | None:
    """Return the sizes of a Conv2d that the kernel supports, from its input and the
    gradient of its output; None for others.
    """
    bf16 = x.dtype == dy.dtype == torch.bfloat16
    if not bf16 or not cuda.available(x.device) or module.groups > 1:
        return None
    for sizes in (module.kernel_size, module.stride, module.padding):
        # Padding may be a word, such as "same"; the kernel has one size for both
        # dimensions.
        if isinstance(sizes, str) or len(set(sizes)) > 1:
            return None
    kernel = module.kernel_size[0]
    if kernel not in (1, 3) or set(module.dilation) != {1} or not len(x):
        return None
    channels, height, width = x.shape[1:]
    outputs, out_height, out_width = dy.shape[1:]
    # A block has all taps of its channels, as many as fit into registers.
    together = 64 if kernel == 1 and channels % 64 == 0 else 16
    if channels % together or outputs % OUTPUTS or out_width > WIDEST:
        return None
    return ConvolutionSizes(
        height,
        width,
        out_height,
        out_width,
        kernel,
        module.stride[0],
        module.padding[0],
        together,
    )


def convolution_squares(x: Tensor, dy: Tensor, sizes: ConvolutionSizes) -> Tensor:
    """Return Σ over samples of (∂ / ∂weight)², in the shape of the weight."""
    x = x.contiguous(memory_format=torch.channels_last)
    dy = dy.contiguous(memory_format=torch.channels_last)
    samples, channels = x.shape[:2]
    outputs = dy.shape[1]
    across = channels // sizes.channels
    down = outputs // OUTPUTS
    # With few weights and many samples, several blocks share a weight and split
    # samples.
    parts = max(1, min(samples, BLOCKS // (across * down)))
    taps = sizes.kernel**2
    squares = torch.empty(parts, outputs, taps, channels, device=x.device)
    kernel = _convolution_kernel(sizes, x.device.index)
    kernel((down, across * parts), x, dy, squares, samples, channels, outputs)
    by_tap = squares.sum(0).unflatten(1, (sizes.kernel, sizes.kernel))
    # From [outputs, height, width, channels] to torch's order of a weight.
    return by_tap.permute(0, 3, 1, 2)


def sample_sums(x: Tensor, dy: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """Return [samples, 2, channels]: sums of dy, and of dy · (x − mean) · rstd."""
    if not _serves_sums(x, dy):
        normal = (x - mean[:, None, None]) * rstd[:, None, None]
        sums = [dy.sum((2, 3), dtype=mean.dtype), (dy * normal).sum((2, 3))]
        return torch.stack(sums, 1)
    x = x.contiguous(memory_format=torch.channels_last)
    dy = dy.contiguous(memory_format=torch.channels_last)
    samples, channels = x.shape[:2]
    sums_out = torch.empty(samples, 2, channels, device=x.device)
    width = next(width for width in (64, 32, 16, 8) if channels % width == 0)
    kernel = _sums_kernel(width, x.device.index)
    positions = x[0, 0].numel()
    grid = (channels // width, samples)
    kernel(grid, x, dy, mean, rstd, sums_out, positions, channels)
    return sums_out


def _serves_sums(x: Tensor, dy: Tensor) -> bool:
    bf16 = x.dtype == dy.dtype == torch.bfloat16
    # The size of the grid's second dimension is limited.
    fits = x.shape[1] % 8 == 0 and 0 < len(x) < 65536
    return bf16 and fits and cuda.available(x.device)


@cache
def _convolution_kernel(sizes: ConvolutionSizes, device: int) -> cuda.Kernel:
    return cuda.Kernel(
        "squares.cu",
        "convolution_squares",
        sizes.macros,
        threads=THREADS,
        shared=sizes.stages * sizes.stage,
    )


@cache
def _sums_kernel(width: int, device: int) -> cuda.Kernel:
    return cuda.Kernel("squares.cu", "sample_sums", sums_macros(width), threads=THREADS)


def sums_macros(width: int) -> cuda.Macros:
    """Return the macros for compiling the kernel of sums."""
    return (("SAMPLE_SUMS", 1), ("THREADS", THREADS), ("WIDTH", width))
