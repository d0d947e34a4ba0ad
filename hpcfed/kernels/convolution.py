"""Convolution, activation and pooling of many clients as one kernel each way, in
TensorFloat-32.

cuDNN's grouped convolution is slow for the few channels of clients' networks, and
batched matrix products would first have to write every patch to memory.
`convolution.cu` keeps images in shared memory and gathers patches from there.
`convolution_plan` decides which layers are supported and how the work is cut; this
module connects the kernels to autograd.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpcfed.kernels.convolution_layer import ConvolutionLayer, Kind, quotient
from hpcfed.kernels.convolution_plan import (
    KINDS,
    KernelCut,
    kernel_name,
    macros,
    plans,
    sharing_blocks,
    supported,
)
from hpcfed.kernels.cuda import Branch, Kernel, Macros

_ADDING_THREADS = 256
_ADDING: tuple[str, Macros] = ("parts.cu", (("THREADS", _ADDING_THREADS),))
"""The source of the kernel that adds up parts of gradients, and its macros."""


def block(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    layer: ConvolutionLayer,
    sink: Tensor | None = None,
    branch: Branch | None = None,
    *,
    bounded: bool = False,
) -> Tensor:
    """Apply the layer to [clients · slots, channels, height, width].

    Weights are [clients, …]; all tensors are channels-last. If `sink` [clients,
    layer.columns] is given, the gradient of weights and biases is written there, in the
    branch; its rows begin at multiples of 16 bytes. Gradients are `bounded` if those of
    the network's outputs are at most 1: then they fit into halves.
    """
    branch = branch or Branch()
    result: Tensor = _Convolution.apply(x, weight, bias, layer, sink, branch, bounded)
    return result


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: ConvolutionLayer,
        sink: Tensor | None,
        branch: Branch,
        bounded: bool,
    ) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        shape = (len(x), layer.outputs, *layer.result)
        y = torch.empty(shape, device=x.device, memory_format=torch.channels_last)
        # Which of the four pixels has won, and signs. The backward pass needs nothing
        # else of the output, and the convolution's own output never exists in memory.
        marks = torch.empty_like(y, dtype=torch.int8) if layer.marked else None
        # Whatever its gradients are: an evaluation does not say.
        kernel = _kernel(layer, "forward", x.device.index, True)
        strides = (weight.stride(0), 0 if bias is None else bias.stride(0))
        sizes = (*strides, len(weight), len(x) // len(weight))
        kernel((kernel.capacity, 1), x, None, weight, bias, y, marks, *sizes)
        ctx.save_for_backward(x, weight, marks)
        ctx.layer = layer
        ctx.sink = sink
        ctx.branch = branch
        ctx.biased = bias is not None
        ctx.bounded = bounded
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, marks = ctx.saved_tensors
        layer: ConvolutionLayer = ctx.layer
        dy = dy.contiguous(memory_format=torch.channels_last)
        clients = len(weight)
        slots = len(x) // len(weight)
        dx = dw = db = None
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        if needs_weight:
            # Autograd waits for a gradient without a sink, so it cannot go to the
            # branch.
            aside = nullcontext()
            # Nothing runs beside the first layer's gradient: in the branch it would
            # only wait for the second layer's.
            if ctx.sink is not None and needs_x:
                aside = ctx.branch.work(x, dy, marks)
            with aside:
                total = _weight_gradient(
                    x, dy, marks, clients, layer, ctx.sink, ctx.bounded
                )
            weights = layer.outputs * layer.kernel**2 * layer.channels
            stored = (layer.outputs, layer.kernel, layer.kernel, layer.channels)
            # A view of the sink if there is one: `_copy_missing` of the caller then
            # finds the gradient in its place, and copies nothing.
            dw = total[:, :weights].unflatten(1, stored).permute(0, 1, 4, 2, 3)
            db = total[:, weights:] if ctx.biased else None
        if needs_x:
            dx = torch.empty_like(x, memory_format=torch.channels_last)
            kernel = _kernel(layer, "input", x.device.index, ctx.bounded)
            sizes = (weight.stride(0), 0, clients, slots)
            kernel((kernel.capacity, 1), dy, marks, weight, None, dx, None, *sizes)
        return dx, dw, db, None, None, None, None


def _weight_gradient(
    x: Tensor,
    dy: Tensor,
    marks: Tensor | None,
    clients: int,
    layer: ConvolutionLayer,
    sink: Tensor | None,
    bounded: bool,
) -> Tensor:
    """Return the gradients of weights and biases together, [clients, layer.columns]."""
    plan = _plan(layer, "weight", x.device.index, bounded)
    kernel = _kernel(layer, "weight", x.device.index, bounded)
    slots = len(x) // clients
    units = slots * plan.units(layer)
    blocks = sharing_blocks(clients * units, max(1, kernel.capacity // plan.slices))
    total = x.new_empty(clients, layer.columns) if sink is None else sink
    # What each block sums for a client that it shares with others.
    parts = x.new_empty(blocks + clients - 1, layer.columns)
    arguments = (parts, total, total.stride(0), clients, slots)
    kernel((blocks, plan.slices), x, dy, marks, *arguments)
    _add_parts(parts, total, units, blocks)
    return total


def _add_parts(parts: Tensor, total: Tensor, units: int, blocks: int) -> None:
    """Add up the parts of clients that several blocks have shared, in a fixed order:
    atomic adds would differ between runs. A client has `units`.
    """
    clients, columns = total.shape
    # Threads add eight parts each without waiting in between, or share them.
    groups = 8 if blocks > 8 * clients else 1
    wide = 4 * _ADDING_THREADS // groups
    sizes = (total.stride(0), columns, units, blocks, groups)
    kernel = _adding_kernel(total.device.index)
    kernel((quotient(columns, wide), clients), parts, total, *sizes)


def sources(
    layer: ConvolutionLayer, device: int, *, first: bool, bounded: bool
) -> Iterator[tuple[str, Macros]]:
    """Yield the sources and macros of a layer's kernels; the first layer needs no
    gradient of its inputs.
    """
    for kind in KINDS:
        if kind != "input" or not first:
            plan = _plan(layer, kind, device, bounded)
            yield "convolution.cu", macros(layer, kind, plan)
    yield _ADDING


def serves(layer: ConvolutionLayer, device: int, *, bounded: bool) -> bool:
    """Whether the kernels support a layer on this device."""
    return supported(
        layer,
        shared_memory(device),
        warp_groups=has_warp_groups(device),
        bounded=bounded,
    )


def _plan(layer: ConvolutionLayer, kind: Kind, device: int, bounded: bool) -> KernelCut:
    return plans(layer, shared_memory(device), has_warp_groups(device), bounded)[kind]


@cache
def _kernel(layer: ConvolutionLayer, kind: Kind, device: int, bounded: bool) -> Kernel:
    plan = _plan(layer, kind, device, bounded)
    return Kernel(
        "convolution.cu",
        kernel_name(kind, plan),
        macros(layer, kind, plan),
        threads=32 * plan.warps,
        shared=plan.shared,
    )


@cache
def _adding_kernel(device: int) -> Kernel:
    return Kernel(_ADDING[0], "add_parts", _ADDING[1], threads=_ADDING_THREADS)


@cache
def shared_memory(device: int) -> int:
    """Return the bytes of shared memory that a block may use."""
    properties = torch.cuda.get_device_properties(device)
    # Not every torch tells; all GPUs since Ampere allow at least 99 KiB.
    available = int(getattr(properties, "shared_memory_per_block_optin", 99 * 1024))
    return available - 1024


@cache
def has_warp_groups(device: int) -> bool:
    """Whether the device has Hopper's matrix instructions for groups of warps.

    Only this architecture has them.
    """
    return torch.cuda.get_device_capability(device) == (9, 0)
