"""Convolution, activation and pooling of many clients as one kernel each way, in
TensorFloat-32.

cuDNN's grouped convolution is slow for the few channels of clients' networks, and
batched matrix products would first have to write every patch to memory.
`convolution.cu` keeps images in shared memory and gathers patches from there; this
module says for which layers, chooses how the work is cut, and joins the kernels to
autograd.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpcfed.kernels.cuda import Branch, Kernel, Macros

Kind = Literal["forward", "weight", "input"]
SHARED = 224 * 1024
"""Bytes of shared memory that a block may use on a Hopper GPU; `shared_memory` asks the
device.
"""
BUSY_WARPS = 16
"""Warps per multiprocessor that the registers leave room for."""


@dataclass(frozen=True)
class Layer:
    """A convolution with stride 1 and a square kernel, its activation, and perhaps 2×2
    max pooling.
    """

    height: int
    width: int
    channels: int
    outputs: int
    """Output channels."""
    kernel: int
    padding: int
    bias: bool
    slope: float
    """Of the activation below zero: 0 for ReLU, 1 for none."""
    pool: bool

    @property
    def convolved(self) -> tuple[int, int]:
        grow = 2 * self.padding - self.kernel + 1
        return self.height + grow, self.width + grow

    @property
    def result(self) -> tuple[int, int]:
        height, width = self.convolved
        return (height // 2, width // 2) if self.pool else (height, width)

    @property
    def columns(self) -> int:
        """Weights and biases of a client."""
        return self.outputs * (self.kernel**2 * self.channels + self.bias)

    def supported(self, shared: int = SHARED) -> bool:
        """Whether the kernels serve, with so many bytes of shared memory."""
        possible = (
            self.outputs % 8 == 0
            and self.kernel - 1 >= self.padding
            and min(self.result) > 0
        )
        return possible and bool(_plan(self, shared, False))


@dataclass(frozen=True)
class Plan:
    """How a kernel cuts its work: a unit is a band of rows of one image, and a block
    takes a batch of units at once.
    """

    band: int
    batch: int
    pixel: int
    """Floats between neighbouring pixels in shared memory, chosen against bank
    conflicts.
    """
    shared: int
    """Bytes of shared memory."""
    warps: int = 8
    tap_warps: int = 1
    """Gradient of weights: warps that divide the taps; the others divide the pixels."""
    wide: int = 0
    """Output channels that a warp-group instruction makes at once; 0 for kernels
    without them.
    """


def block(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    layer: Layer,
    sink: Tensor | None = None,
    branch: Branch | None = None,
) -> Tensor:
    """The layer applied to [clients · slots, channels, height, width] with weights
    [clients, …], all channels-last.

    `sink` [clients, layer.columns], if given, is where the gradient of weights and
    biases is written, in the branch.
    """
    result: Tensor = _Block.apply(x, weight, bias, layer, sink, branch or Branch())
    return result


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: Layer,
        sink: Tensor | None,
        branch: Branch,
    ) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        shape = (len(x), layer.outputs, *layer.result)
        y = torch.empty(shape, device=x.device, memory_format=torch.channels_last)
        winner = torch.empty_like(y, dtype=torch.int8) if layer.pool else None
        strides = (weight.stride(0), 0 if bias is None else bias.stride(0))
        kernel = _kernel(layer, "forward", x.device.index)
        kernel(
            (kernel.capacity, 1),
            x,
            None,
            None,
            weight,
            bias,
            y,
            winner,
            *strides,
            len(weight),
            len(x) // len(weight),
        )
        ctx.save_for_backward(x, weight, y, winner)
        ctx.layer, ctx.sink, ctx.branch, ctx.biased = (
            layer,
            sink,
            branch,
            bias is not None,
        )
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, y, winner = ctx.saved_tensors
        layer: Layer = ctx.layer
        dy = dy.contiguous(memory_format=torch.channels_last)
        clients, slots = len(weight), len(x) // len(weight)
        dx = dw = db = None
        if ctx.needs_input_grad[1]:
            with (
                nullcontext() if ctx.sink is None else ctx.branch.work(x, dy, y, winner)
            ):
                total = _weight_gradient(x, dy, y, winner, clients, layer, ctx.sink)
            weights = layer.outputs * layer.kernel**2 * layer.channels
            split = (layer.outputs, layer.kernel, layer.kernel, layer.channels)
            dw = total[:, :weights].unflatten(1, split).permute(0, 1, 4, 2, 3)
            db = total[:, weights:] if ctx.biased else None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x, memory_format=torch.channels_last)
            kernel = _kernel(layer, "input", x.device.index)
            kernel(
                (kernel.capacity, 1),
                dy,
                y,
                winner,
                weight,
                None,
                dx,
                None,
                weight.stride(0),
                0,
                clients,
                slots,
            )
        return dx, dw, db, None, None, None


def _weight_gradient(
    x: Tensor,
    dy: Tensor,
    y: Tensor,
    winner: Tensor | None,
    clients: int,
    layer: Layer,
    sink: Tensor | None,
) -> Tensor:
    """Weights and biases together, [clients, layer.columns]."""
    plan = _plan(layer, shared_memory(x.device.index), has_warp_groups(x.device.index))[
        "weight"
    ]
    kernel = _kernel(layer, "weight", x.device.index)
    slots = len(x) // clients
    splits = max(1, min(slots, 2 * kernel.capacity // clients))
    parts = torch.empty(
        splits * plan.warps // plan.tap_warps, clients, layer.columns, device=x.device
    )
    kernel((splits, clients), x, dy, y, winner, parts, clients, slots)
    return parts.sum(0) if sink is None else torch.sum(parts, 0, out=sink)


@cache
def _kernel(layer: Layer, kind: Kind, device: int) -> Kernel:
    plan = _plan(layer, shared_memory(device), has_warp_groups(device))[kind]
    name = (
        "weight_gradient"
        if kind == "weight"
        else "wide_product"
        if plan.wide
        else "gather_product"
    )
    return Kernel(
        "convolution.cu",
        name,
        _macros(layer, kind, plan),
        threads=32 * plan.warps,
        shared=plan.shared,
    )


@cache
def shared_memory(device: int) -> int:
    """Bytes of shared memory that a block may use."""
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 99 * 1024)) - 1024


@cache
def has_warp_groups(device: int) -> bool:
    """Whether the device has Hopper's matrix instructions for groups of warps, which no
    other has.
    """
    return torch.cuda.get_device_capability(device) == (9, 0)


def _shapes(layer: Layer, kind: Kind) -> dict[str, int]:
    """Of what a kernel gathers from (`SRC`), and of what it makes."""
    if kind != "input":
        (out_h, out_w), pool = layer.result, int(layer.pool)
        source = {
            "SRC_H": layer.height,
            "SRC_W": layer.width,
            "SRC_C": layer.channels,
            "DST_C": layer.outputs,
        }
        return source | {
            "OUT_H": out_h,
            "OUT_W": out_w,
            "LEAD": layer.padding,
            "POOL": pool,
            "SPREAD_POOL": 0,
        }
    (height, width), lead = layer.convolved, layer.kernel - 1 - layer.padding
    source = {
        "SRC_H": height,
        "SRC_W": width,
        "SRC_C": layer.outputs,
        "DST_C": layer.channels,
    }
    result = {"OUT_H": layer.height, "OUT_W": layer.width, "LEAD": lead, "POOL": 0}
    return source | result | {"SPREAD_POOL": int(layer.pool)}


def _macros(layer: Layer, kind: Kind, plan: Plan) -> Macros:
    macros: dict[str, str | int] = {**_shapes(layer, kind)}
    macros |= {
        "WEIGHT_GRADIENT"
        if kind == "weight"
        else "WIDE_PRODUCT"
        if plan.wide
        else "GATHER_PRODUCT": 1
    }
    macros |= {
        "KH": layer.kernel,
        "KW": layer.kernel,
        "SLOPE": f"{float(layer.slope)}f",
    }
    macros |= {
        "SPREAD": int(kind == "input"),
        "BIAS": int(layer.bias and kind != "input"),
    }
    macros |= {
        "BAND": plan.band,
        "BATCH": plan.batch,
        "PIXEL": plan.pixel,
        "WARPS": plan.warps,
    }
    macros |= {
        "NT": plan.wide,
        "TAP_WARPS": plan.tap_warps,
        "MIN_BLOCKS": max(1, min(16 // plan.warps, SHARED // plan.shared)),
    }
    return tuple(macros.items())


@cache
def _plan(layer: Layer, shared: int, warp_groups: bool) -> dict[Kind, Plan]:
    """The best way to cut each kernel's work; empty when an image does not fit."""
    kinds: tuple[Kind, ...] = ("forward", "weight", "input")
    found = {
        kind: (warp_groups and _wide(layer, kind, shared))
        or _candidates(layer, kind, shared)
        for kind in kinds
    }
    best = {
        kind: max(pairs, key=lambda pair: pair[0])[1]
        for kind, pairs in found.items()
        if pairs
    }
    return best if len(best) == len(kinds) else {}


def _candidates(layer: Layer, kind: Kind, limit: int) -> list[tuple[float, Plan]]:
    """Ways to cut the work that fit, with a score: roughly the share of time that
    tensor cores could be busy.

    The weights of the score's parts (waiting between batches, few warps) were fitted to
    measurements on an H200.
    """
    m = _shapes(layer, kind)
    step, taps, channels = 1 + m["POOL"], layer.kernel**2 * m["SRC_C"], m["SRC_C"]
    fragments = -(-m["DST_C"] // 8)
    found = []
    for band in {-(-m["OUT_H"] // bands) for bands in range(1, m["OUT_H"] + 1)}:
        bands = -(-m["OUT_H"] // band)
        rows, cols = (
            band * step + layer.kernel - 1,
            m["OUT_W"] * step + layer.kernel - 1,
        )
        useful = (
            m["OUT_H"] / (band * bands) * (band * step / rows) ** 0.2
        )  # of the rows that are loaded
        for batch in range(1, 17):
            if kind == "weight":
                pixel = channels if channels % 8 else channels + (8 - channels) % 16
                stride = fragments * 8 + (
                    0 if fragments * 8 % 32 == 24 else (40 - fragments * 8 % 32) % 32
                )
                pixels = -(-band * step * m["OUT_W"] * step // 8) * 8
                shared = 4 * (
                    pixels + batch * (rows * _even(cols * pixel) + pixels * stride)
                )
                groups = -(-taps // 16)
                for tap_warps in (1, 2, 4, 8):
                    own = -(-groups // tap_warps)
                    if own * fragments > 24:  # registers
                        continue
                    steps, others = batch * pixels // 8, 8 // tap_warps
                    busy = (
                        groups
                        / (own * tap_warps)
                        * steps
                        / (-(-steps // others) * others)
                    )
                    loads = (4 * own + 2 * fragments) / (own * fragments)
                    score = useful * busy / (1 + loads) * steps / (steps + 4)
                    found.append(
                        (score, Plan(band, batch, pixel, shared, 8, tap_warps))
                    )
                continue
            pixel = (
                channels
                if channels % 8
                else channels + ((4 if m["POOL"] else 8) - channels) % 16
            )
            steps = -(-layer.kernel * _even(layer.kernel * channels) // 8)
            outputs, parts, copies = (
                band * m["OUT_W"],
                -(-fragments // 4),
                1 + channels % 2,
            )
            shared = 4 * (
                steps * (fragments * 64 + 4)
                + copies * batch * rows * _even(cols * pixel)
            )
            group = 16 if m["POOL"] else 64
            tasks = -(-batch * outputs // group) * parts
            for warps in (4, 8):
                busy = batch * outputs * parts / group / (-(-tasks // warps) * warps)
                found.append(
                    (
                        useful * busy * tasks / (tasks + 16),
                        Plan(band, batch, pixel, shared, warps),
                    )
                )
    return [
        (
            score * min(1.0, plan.warps * (limit // plan.shared) / BUSY_WARPS) ** 0.7,
            plan,
        )
        for score, plan in found
        if plan.shared <= limit
    ]


def _wide(layer: Layer, kind: Kind, limit: int) -> list[tuple[float, Plan]]:
    """The same for products on warp-group instructions; none where these do not serve."""
    m = _shapes(layer, kind)
    if kind == "weight" or m["SRC_C"] % 8 or m["DST_C"] % 8:
        return []
    step, taps = 1 + m["POOL"], layer.kernel**2 * m["SRC_C"]
    at_once = next(size for size in (64, 32, 16, 8) if m["DST_C"] % size == 0)
    cols, parts = m["OUT_W"] * step + layer.kernel - 1, m["DST_C"] // at_once
    found = []
    for band in {-(-m["OUT_H"] // bands) for bands in range(1, m["OUT_H"] + 1)}:
        bands, rows = -(-m["OUT_H"] // band), band * step + layer.kernel - 1
        tiles = -(-band * step * cols // 64)
        useful = (
            m["OUT_H"]
            / (band * bands)
            * band
            * step
            * m["OUT_W"]
            * step
            / (tiles * 64)
            * (band * step / rows) ** 0.2
        )
        for batch in range(1, 17):
            plane = (
                batch * rows * cols + 64 + (layer.kernel - 1) * cols + layer.kernel
            ) // 8 * 8 + 9
            staged = batch * tiles * 64 * (m["DST_C"] + 8) if m["POOL"] else 0
            shared = 4 * (taps * m["DST_C"] + m["SRC_C"] * plane + staged) + 128
            if shared > limit or plane >= 2**14:
                continue
            tasks = batch * tiles * parts
            busy = tasks / (-(-tasks // 2) * 2)
            clocks = tasks * taps // 8 * max(16, at_once // 2)
            score = (
                useful
                * busy
                * clocks
                / (clocks + 5000)
                * min(1.0, (limit // shared) / 2) ** 0.6
            )
            found.append((score, Plan(band, batch, 0, shared, 8, wide=at_once)))
    return found


def _even(number: int) -> int:
    return number + number % 2
