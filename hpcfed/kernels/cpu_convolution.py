"""Convolution, activation and pooling of many clients on a CPU, as one kernel each way.

torch's convolutions of small images leave much of a core idle, and some use only one
core. `cpu_convolution.c` reads images in place, and keeps the convolution's own output
in the cache; this module connects it to autograd.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpcfed.kernels import cpu
from hpcfed.runtime.compiler import CONVOLUTION as _SOURCE


@dataclass(frozen=True)
class CpuLayer:
    """A convolution of square kernels with stride 1, and the operations after it."""

    kernel: int
    padding: int
    slope: float = 1.0
    """Slope below zero of the activation; 1: none."""
    pool: bool = False
    """Whether max pooling of 2 × 2 pixels comes before the activation."""


Sinks = tuple[Tensor | None, Tensor | None]
"""Where the gradients of weight and bias go; None: new memory."""


def serves(x: Tensor, layer: CpuLayer) -> bool:
    """Whether the kernel supports such a layer, and there is a compiler."""
    known = x.device.type == "cpu" and x.dtype == torch.float32
    return known and layer.padding < layer.kernel and cpu.library(_SOURCE) is not None


def block(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    layer: CpuLayer,
    sinks: Sinks = (None, None),
) -> Tensor:
    """Apply the layer to [clients · slots, channels, height, width].

    Weights are [clients, outputs, channels, kernel, kernel]. The result is
    channels-last.
    """
    result: Tensor = _CpuConvolution.apply(x, weight, bias, layer, sinks)
    return result


class _CpuConvolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: CpuLayer,
        sinks: Sinks,
    ) -> Tensor:
        images = _channels_last(x)
        sizes = _sizes(images, weight, layer)
        height, width = (
            side - layer.kernel + 1 for side in (sizes.height, sizes.width)
        )
        if layer.pool:
            height, width = height // 2, width // 2
        shape = (len(images), weight.shape[1], height, width)
        # Not a view of another tensor: the network may change it in place.
        y = torch.empty(shape, memory_format=torch.channels_last)
        # Which of the four pixels has won: the backward pass needs nothing else of the
        # convolution's own output.
        winner = torch.empty_like(y, dtype=torch.int8) if layer.pool else None
        # [clients, kernel, kernel, channels, outputs]
        ordered = _widened(weight.permute(0, 3, 4, 2, 1), sizes.padded_outputs)
        biases = y.new_zeros(weight.shape[:2]) if bias is None else bias
        stride = biases.stride(0)
        _call("forward", sizes, images, ordered, biases, stride, y, winner)
        # The activation's output reveals its slope.
        ctx.save_for_backward(images, weight, None if layer.slope == 1 else y, winner)
        ctx.layer = layer
        ctx.sinks = sinks
        ctx.biased = bias is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        images, weight, y, winner = ctx.saved_tensors
        layer: CpuLayer = ctx.layer
        dy = _channels_last(dy)
        sizes = _sizes(images, weight, layer)
        clients, outputs, channels = weight.shape[:3]
        # Enough pieces of work for all threads, if there are few clients.
        slots = max(1, len(images) // clients)
        # A split sums its own part of a client's samples, in an order that depends only
        # on the number of threads, not on timing.
        sizes.splits = min(slots, -(-torch.get_num_threads() // clients))
        taps = (layer.kernel, layer.kernel, channels, sizes.padded_outputs)
        dweight = images.new_zeros(sizes.splits, clients, *taps)
        dbias = images.new_zeros(sizes.splits, clients, outputs)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(images)
        _call(
            "backward",
            sizes,
            images,
            _turned(weight, sizes),
            # Without an activation the slope is 1 everywhere, so any tensor will do.
            dy if y is None else y,
            winner,
            dy,
            dweight,
            dbias,
            dx,
        )
        weight_sink, bias_sink = ctx.sinks
        dw = _total(dweight)[..., :outputs].permute(0, 4, 3, 1, 2)
        if weight_sink is not None:
            dw = weight_sink.copy_(dw)
        db = None
        if ctx.biased:
            db = _total(dbias)
            db = db if bias_sink is None else bias_sink.copy_(db)
        return None if dx is None else dx.permute(0, 3, 1, 2), dw, db, None, None


class _Sizes(ctypes.Structure):
    """The kernel's `Layer`."""

    height: int
    width: int
    padded_outputs: int
    padded_channels: int
    splits: int
    _fields_ = [
        *((name, ctypes.c_long) for name in ("clients", "slots")),
        *((name, ctypes.c_long) for name in ("height", "width", "channels")),
        ("outputs", ctypes.c_long),
        ("padded_outputs", ctypes.c_long),
        ("padded_channels", ctypes.c_long),
        *((name, ctypes.c_long) for name in ("kernel", "padding", "pool", "splits")),
        ("slope", ctypes.c_float),
    ]


def _sizes(images: Tensor, weight: Tensor, layer: CpuLayer) -> _Sizes:
    clients, outputs, channels = weight.shape[:3]
    _, height, width, given = images.shape
    if given != channels:  # the kernel would read out of bounds
        raise ValueError(f"weights of {channels} channels, and images of {given}")
    return _Sizes(
        clients=clients,
        slots=len(images) // clients,
        height=height + 2 * layer.padding,
        width=width + 2 * layer.padding,
        channels=channels,
        outputs=outputs,
        padded_outputs=_whole_vectors(outputs),
        padded_channels=_whole_vectors(channels),
        kernel=layer.kernel,
        padding=layer.padding,
        pool=int(layer.pool),
        splits=1,
        slope=layer.slope,
    )


def _call(name: str, sizes: _Sizes, *arguments: Tensor | int | None) -> None:
    """Call a function of the kernel; tensors are passed as pointers."""
    library = cpu.library(_SOURCE)
    assert library is not None, "only where it serves"
    values: list[Any] = [ctypes.byref(sizes)]
    for argument in arguments:
        if isinstance(argument, int):
            values.append(ctypes.c_long(argument))
        else:
            values.append(cpu.pointer(argument))
    if library[name](*values):
        raise MemoryError("not enough memory for a convolution")


def _whole_vectors(values: int) -> int:
    library = cpu.library(_SOURCE)
    assert library is not None, "only where it serves"
    lanes: int = library.lanes()
    return -(-values // lanes) * lanes


def _turned(weight: Tensor, sizes: _Sizes) -> Tensor:
    """Return weights in the layout for the gradient of images: [clients, kernel,
    kernel, outputs, channels], with kernels flipped.
    """
    turned = weight.flip(3, 4).permute(0, 3, 4, 1, 2)
    below = sizes.padded_outputs - weight.shape[1]
    right = sizes.padded_channels - weight.shape[2]
    if below or right:
        turned = F.pad(turned, (0, right, 0, below))
    return turned.contiguous()


def _widened(tensor: Tensor, width: int) -> Tensor:
    """Pad the last dimension with zeros to a given width."""
    missing = width - tensor.shape[-1]
    return (F.pad(tensor, (0, missing)) if missing else tensor).contiguous()


def _total(parts: Tensor) -> Tensor:
    return parts[0] if len(parts) == 1 else parts.sum(0)


def _channels_last(x: Tensor) -> Tensor:
    """Return images as [samples, height, width, channels], contiguous."""
    return x.permute(0, 2, 3, 1).contiguous()
