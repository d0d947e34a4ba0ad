"""Ways to convolve the images of many clients on a CPU, layer by layer.

  kernel     ours: hpcfed/kernels/cpu_convolution.c
  clients    torch's convolution, one client after the other
  grouped    torch's convolution, with a group of channels per client
  im2col     patches in memory, and one batched product

All include bias, activation and pooling. The layers are those of benchmarks.rivals.cpu,
with its clients and batches. Ways take turns. GFLOP/s count the convolution's
multiplications and additions. The gradient of images is what both gradients take
longer than that of the weights; a first layer needs none.

examples:
  OMP_NUM_THREADS=2 python -m benchmarks.speed.convolutions
  python -m benchmarks.speed.convolutions --works cnn-cifar --ways kernel grouped --repeats 9
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.arguments import parser_of
from benchmarks.rivals.cpu.work import WORKS, Work
from hpcfed.kernels import cpu_convolution
from hpcfed.kernels.cpu_convolution import CpuLayer
from hpcfed.models import MODELS, ConvNet

PARTS = ("forward", "weights", "images")
"""What is timed: the result, and the two gradients."""


@dataclass(frozen=True)
class LayerWork:
    """One convolution of a network, for all clients' batches."""

    name: str
    clients: int
    slots: int
    channels: int
    side: int
    outputs: int
    layer: CpuLayer
    first: bool

    @property
    def flops(self) -> int:
        """Multiplications and additions of one pass."""
        side = self.side + 2 * self.layer.padding - self.layer.kernel + 1
        taps = self.layer.kernel**2 * self.channels
        return 2 * self.clients * self.slots * side**2 * taps * self.outputs

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return random images, weights and biases."""
        torch.manual_seed(0)
        kernel = self.layer.kernel
        images = (self.clients * self.slots, self.channels, self.side, self.side)
        x = torch.randn(images).to(memory_format=torch.channels_last)
        weight = torch.randn(self.clients, self.outputs, self.channels, kernel, kernel)
        bias = torch.randn(self.clients, self.outputs)
        return x, weight / kernel, bias


def layers_of(work: Work) -> Iterator[LayerWork]:
    """Yield the convolutions of a network in order."""
    structure = MODELS[work.model].structure
    assert isinstance(structure, ConvNet)
    channels, side, _ = work.shape
    for number, conv in enumerate(structure.convs, 1):
        slope = 0.01 if structure.leaky else 0.0
        yield LayerWork(
            f"{work.model} conv{number}",
            work.clients,
            work.batch,
            channels,
            side,
            conv.channels,
            CpuLayer(conv.kernel, conv.padding, slope, conv.pool),
            first=number == 1,
        )
        channels = conv.channels
        side += 2 * conv.padding - conv.kernel + 1
        side //= 2 if conv.pool else 1


def _finished(y: Tensor, layer: CpuLayer) -> Tensor:
    y = F.leaky_relu(y, layer.slope) if layer.slope else F.relu(y)
    return F.max_pool2d(y, 2) if layer.pool else y


def by_client(x: Tensor, weight: Tensor, bias: Tensor, layer: CpuLayer) -> Tensor:
    """Call torch's convolution for each client."""
    convolved = []
    for images, own, own_bias in zip(x.chunk(len(weight)), weight, bias, strict=True):
        convolved.append(F.conv2d(images, own, own_bias, padding=layer.padding))
    return _finished(torch.cat(convolved), layer)


def grouped(x: Tensor, weight: Tensor, bias: Tensor, layer: CpuLayer) -> Tensor:
    """Call torch's convolution once; a client's channels are a group."""
    clients = len(weight)
    # [clients · slots, channels, …] → [slots, clients · channels, …]
    by_slot = x.unflatten(0, (clients, -1)).transpose(0, 1).flatten(1, 2)
    flat = weight.flatten(0, 1), bias.flatten()
    y = F.conv2d(by_slot, *flat, padding=layer.padding, groups=clients)
    y = _finished(y, layer)
    return y.unflatten(1, (clients, -1)).transpose(0, 1).flatten(0, 1)


def im2col(x: Tensor, weight: Tensor, bias: Tensor, layer: CpuLayer) -> Tensor:
    """Write every pixel's patch to memory, and multiply them with the weights."""
    clients, outputs = weight.shape[:2]
    slots = len(x) // clients
    side = x.shape[-1] + 2 * layer.padding - layer.kernel + 1
    patches = F.unfold(x, layer.kernel, padding=layer.padding)
    # [clients · slots, taps, pixels] → [clients, slots · pixels, taps]
    patches = patches.transpose(1, 2).reshape(clients, slots * side**2, -1)
    y = torch.baddbmm(bias.unsqueeze(1), patches, weight.flatten(2).transpose(1, 2))
    return _finished(y.view(-1, side, side, outputs).permute(0, 3, 1, 2), layer)


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor, CpuLayer], Tensor]] = {
    "kernel": cpu_convolution.block,
    "clients": by_client,
    "grouped": grouped,
    "im2col": im2col,
}


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def one_turn(work: LayerWork, way: str) -> list[float]:
    """Return the seconds of each part, once."""
    function = WAYS[way]
    x, weight, bias = work.tensors()
    with torch.no_grad():
        forward = _seconds(lambda: function(x, weight, bias, work.layer))
    parameters = (weight.requires_grad_(), bias.requires_grad_())
    y = function(x, *parameters, work.layer)
    dy = torch.ones_like(y)
    weights = _seconds(lambda: torch.autograd.grad(y, parameters, dy))
    if work.first:
        return [forward, weights, 0.0]
    needed = (x.requires_grad_(), *parameters)
    y = function(*needed, work.layer)
    both = _seconds(lambda: torch.autograd.grad(y, needed, dy))
    return [forward, weights, max(0.0, both - weights)]


def measure(work: LayerWork, ways: Sequence[str], repeats: int) -> None:
    """Time a layer by all ways in turn; print a line for each, and the best."""
    seconds: dict[str, list[list[float]]] = {way: [] for way in ways}
    for _ in range(repeats + 1):
        for way in ways:
            seconds[way].append(one_turn(work, way))
    steps = {}
    for way in ways:
        # The first turn warms up.
        parts = np.median(seconds[way][1:], axis=0)
        steps[way] = parts.sum()
        cells = []
        for part in parts:
            speed = f"{work.flops / part / 1e9:6.0f}" if part else f"{'–':>6}"
            cells.append(f"{1e3 * part:8.2f} {speed}")
        line = f"{work.name:16} {way:8} {'  '.join(cells)} {1e3 * parts.sum():9.2f}"
        print(line, flush=True)
    best = min(steps, key=lambda way: steps[way])
    others = ", ".join(
        f"{way} {steps[way] / steps[best]:.2f} ×" for way in ways if way != best
    )
    print(f"{work.name:16} best: {best}; slower: {others or 'none'}", flush=True)


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--works", nargs="+", choices=WORKS, default=list(WORKS))
    add("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    add("--repeats", type=int, default=5, help="timed turns (default: 5)")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    torch_ = f"torch {torch.__version__} ({torch.backends.cpu.get_cpu_capability()})"
    print(f"{torch_}, {torch.get_num_threads()} threads on {cores} cores")
    titles = "  ".join(f"{part:>8} {'GFLOP/s':>6}" for part in PARTS)
    print(f"{'layer':16} {'way':8} {titles} {'step, ms':>9}")
    for name in options.works:
        for work in layers_of(WORKS[name]):
            measure(work, options.ways, options.repeats)


if __name__ == "__main__":
    main()
