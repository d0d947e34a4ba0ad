"""How the convolution kernels cut their work: for which layers they serve, and the best
cut of each.

A kernel's work is cut into units, bands of rows of one image. A block takes a batch of
units at once into shared memory. A cut is chosen by a score, roughly the share of time
that tensor cores could be busy; its constants were fitted to measurements on an H200.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

from hpcfed.kernels.cuda import Macros

Kind = Literal["forward", "weight", "input"]
"""The forward pass, the gradient of weights, the gradient of inputs."""
KINDS: tuple[Kind, ...] = ("forward", "weight", "input")
SHARED = 224 * 1024
"""Bytes of shared memory that a block may use on a Hopper GPU; `shared_memory` asks the
device.
"""
BUSY_WARPS = 16
"""Warps per multiprocessor that the registers leave room for."""
GRADIENT_SCALE = 1024
"""By how much bounded gradients, of at most 1 at a network's outputs, are scaled up in
halves. Halves reach from 6e-8 to 65,504.
"""
MAX_BATCH = 16
"""Units that a block takes at once at most."""


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
    """Slope of the activation below zero: 0 for ReLU, 1 for none."""
    pool: bool

    @property
    def convolved(self) -> tuple[int, int]:
        """Height and width before pooling."""
        # Stride 1: only padding and kernel change the size.
        grow = 2 * self.padding - self.kernel + 1
        return self.height + grow, self.width + grow

    @property
    def result(self) -> tuple[int, int]:
        """Height and width of the layer's output."""
        height, width = self.convolved
        return (height // 2, width // 2) if self.pool else (height, width)

    @property
    def marked(self) -> bool:
        """Whether the backward pass needs to know winners or signs."""
        return self.pool or self.slope != 1

    @property
    def columns(self) -> int:
        """Weights and biases of a client."""
        return self.outputs * (self.kernel**2 * self.channels + self.bias)

    def supported(self, shared: int = SHARED) -> bool:
        """Whether the kernels serve, with so many bytes of shared memory."""
        # Channels in eights, as tensor cores take them; the gradient of inputs pads by
        # kernel − 1 − padding, which must not be negative.
        possible = (
            self.outputs % 8 == 0
            and self.kernel - 1 >= self.padding
            and min(self.result) > 0
        )
        return possible and bool(plans(self, shared, False))


@dataclass(frozen=True)
class Plan:
    """One way to cut a kernel's work."""

    band: int
    """Rows of a unit, of the result."""
    batch: int
    """Units that a block takes at once."""
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
    half: bool = False
    """Whether operands are multiplied in halves."""
    most_warps: int = 16
    """Warps of a multiprocessor that the registers leave room for."""

    @property
    def blocks(self) -> int:
        """Blocks that a multiprocessor runs at once, as memory and registers allow."""
        return max(1, min(self.most_warps // self.warps, SHARED // self.shared))


Scored = tuple[float, Plan]


@cache
def plans(
    layer: Layer, shared: int, warp_groups: bool, bounded: bool = False
) -> dict[Kind, Plan]:
    """Return the best plan of each kernel; empty when an image does not fit.

    Gradients are multiplied in halves only if they are `bounded`.
    """
    best: dict[Kind, Plan] = {}
    for kind in KINDS:
        candidates: list[Scored] = []
        if kind == "forward" or bounded:
            candidates = _half_candidates(layer, kind, shared, warp_groups)
        if not candidates:
            candidates = _candidates(layer, kind, shared)
        # One kernel that does not fit is reason enough for torch's convolution.
        if not candidates:
            return {}
        _, best[kind] = max(candidates, key=lambda scored: scored[0])
    return best


def kernel_name(kind: Kind, plan: Plan) -> str:
    """Return the name of the kernel in convolution.cu."""
    if kind == "weight":
        return "half_weight_gradient" if plan.half else "weight_gradient"
    return "half_product" if plan.half else "gather_product"


def macros(layer: Layer, kind: Kind, plan: Plan) -> Macros:
    """Return the macros that a kernel is compiled with."""
    values: dict[str, str | int] = {**_shapes(layer, kind)}
    # Only the named kernel of the source is compiled.
    values[kernel_name(kind, plan).upper()] = 1
    values["KH"] = layer.kernel
    values["KW"] = layer.kernel
    values["SLOPE"] = f"{float(layer.slope)}f"
    # The gradient of inputs first spreads the gradient of outputs over the pixels that
    # have won.
    values["MARKS"] = int(layer.marked)
    values["SPREAD"] = int(kind == "input")
    values["BIAS"] = int(layer.bias and kind != "input")
    values["BAND"] = plan.band
    values["BATCH"] = plan.batch
    values["PIXEL"] = plan.pixel
    values["WARPS"] = plan.warps
    values["NT"] = plan.wide
    values["TAP_WARPS"] = plan.tap_warps
    values["SCALE"] = f"{float(GRADIENT_SCALE)}f"
    # Tells the compiler how many registers a thread may take.
    values["MIN_BLOCKS"] = plan.blocks
    return tuple(values.items())


def _shapes(layer: Layer, kind: Kind) -> dict[str, int]:
    """Return the shapes of what a kernel gathers from (`SRC`), and of what it makes."""
    if kind != "input":
        height, width = layer.result
        return {
            "SRC_H": layer.height,
            "SRC_W": layer.width,
            "SRC_C": layer.channels,
            "DST_C": layer.outputs,
            "OUT_H": height,
            "OUT_W": width,
            "LEAD": layer.padding,
            "POOL": int(layer.pool),
            "SPREAD_POOL": 0,
        }
    # The gradient of inputs is a convolution of the output's gradient with the flipped
    # kernel, whose padding is what the forward pass left out.
    height, width = layer.convolved
    return {
        "SRC_H": height,
        "SRC_W": width,
        "SRC_C": layer.outputs,
        "DST_C": layer.channels,
        "OUT_H": layer.height,
        "OUT_W": layer.width,
        "LEAD": layer.kernel - 1 - layer.padding,
        "POOL": 0,
        "SPREAD_POOL": int(layer.pool),
    }


@dataclass(frozen=True)
class _Geometry:
    """Numbers that all cuts of a kernel's work share."""

    kernel: int
    src_c: int
    dst_c: int
    out_h: int
    out_w: int
    pool: int

    @property
    def step(self) -> int:
        """Pixels of the convolution per pixel of the result, in each direction."""
        return 1 + self.pool

    @property
    def taps(self) -> int:
        return self.kernel**2 * self.src_c

    @property
    def fragments(self) -> int:
        """Groups of eight output channels, which a tensor core makes at once."""
        return _quotient(self.dst_c, 8)

    @property
    def cols(self) -> int:
        """Columns that a unit loads."""
        return self.out_w * self.step + self.kernel - 1

    def rows(self, band: int) -> int:
        """Rows that a unit loads."""
        return band * self.step + self.kernel - 1

    def bands(self) -> set[int]:
        """Heights of bands that cut the result into equally many rows each."""
        return {_quotient(self.out_h, bands) for bands in range(1, self.out_h + 1)}


def _geometry(layer: Layer, kind: Kind) -> _Geometry:
    m = _shapes(layer, kind)
    return _Geometry(
        kernel=layer.kernel,
        src_c=m["SRC_C"],
        dst_c=m["DST_C"],
        out_h=m["OUT_H"],
        out_w=m["OUT_W"],
        pool=m["POOL"],
    )


def _candidates(layer: Layer, kind: Kind, limit: int) -> list[Scored]:
    """Return the cuts that fit into shared memory, with their scores."""
    geometry = _geometry(layer, kind)
    cuts = _weight_cuts if kind == "weight" else _product_cuts
    found = []
    for band in geometry.bands():
        bands = _quotient(geometry.out_h, band)
        height = band * geometry.step
        # The share of useful rows: of the last band, and among those loaded.
        useful = geometry.out_h / (band * bands) * (height / geometry.rows(band)) ** 0.2
        for batch in range(1, MAX_BATCH + 1):
            for score, plan in cuts(geometry, band, batch, useful):
                if plan.shared <= limit:
                    # Few warps cannot hide each other's waiting.
                    resident = plan.warps * (limit // plan.shared)
                    busy = min(1.0, resident / BUSY_WARPS) ** 0.7
                    found.append((score * busy, plan))
    return found


def _weight_cuts(
    g: _Geometry, band: int, batch: int, useful: float
) -> Iterator[Scored]:
    """Yield cuts of the gradient of weights: warps divide taps, or pixels."""
    pixel = g.src_c
    if g.src_c % 8 == 0:
        pixel += (8 - g.src_c) % 16
    channels = g.fragments * 8
    # 8 or 24 modulo the 32 banks: lanes of a fragment then read different banks.
    stride = channels
    if channels % 32 != 24:
        stride += (40 - channels % 32) % 32
    # Filled up with zeros to the eight that an instruction takes.
    pixels = _quotient(band * g.step * g.out_w * g.step, 8) * 8
    pitch = _even(g.cols * pixel)
    unit = g.rows(band) * pitch + pixels * stride
    shared = 4 * (pixels + batch * unit)
    # An instruction takes sixteen taps by eight output channels.
    groups = _quotient(g.taps, 16)
    steps = batch * pixels // 8
    for tap_warps in (1, 2, 4, 8):
        groups_each = _quotient(groups, tap_warps)
        # A warp keeps all its sums in registers.
        if groups_each * g.fragments > 24:
            continue
        pixel_warps = 8 // tap_warps
        busy = (
            groups
            / (groups_each * tap_warps)
            * steps
            / (_quotient(steps, pixel_warps) * pixel_warps)
        )
        products = groups_each * g.fragments
        loads = (4 * groups_each + 2 * g.fragments) / products
        # Four steps' worth of waiting between batches.
        score = useful * busy / (1 + loads) * steps / (steps + 4)
        plan = Plan(
            band=band,
            batch=batch,
            pixel=pixel,
            shared=shared,
            tap_warps=tap_warps,
        )
        yield score, plan


def _product_cuts(
    g: _Geometry, band: int, batch: int, useful: float
) -> Iterator[Scored]:
    """Yield cuts of the forward pass or the gradient of inputs."""
    pixel = g.src_c
    if g.src_c % 8 == 0:
        pixel += ((4 if g.pool else 8) - g.src_c) % 16
    steps = _quotient(g.kernel * _even(g.kernel * g.src_c), 8)
    outputs = band * g.out_w
    parts = _quotient(g.fragments, 4)
    # Pairs of floats must be aligned: odd channels need a second, shifted copy.
    copies = 1 + g.src_c % 2
    # As gather_product lays out its shared memory: weights, offsets of taps, images.
    weights = steps * (g.fragments * 64 + 4)
    pitch = _even(g.cols * pixel)
    images = copies * batch * g.rows(band) * pitch
    shared = 4 * (weights + images)
    # Outputs that a warp makes together: 64 pixels of the convolution.
    group = 16 if g.pool else 64
    tasks = _quotient(batch * outputs, group) * parts
    for warps in (4, 8):
        busy = batch * outputs * parts / group / (_quotient(tasks, warps) * warps)
        # Sixteen tasks' worth of waiting between batches.
        score = useful * busy * tasks / (tasks + 16)
        plan = Plan(band=band, batch=batch, pixel=pixel, shared=shared, warps=warps)
        yield score, plan


def _half_candidates(
    layer: Layer, kind: Kind, limit: int, warp_groups: bool
) -> list[Scored]:
    """Return cuts for operands in halves; none where these do not serve."""
    g = _geometry(layer, kind)
    if kind == "weight":
        # Pixels of few channels are loaded in fours.
        few = g.src_c in (3, 4) and layer.width % 4 == 0
        if (g.src_c % 16 and not few) or g.dst_c % 16:
            return []
        cuts = _half_weight_cuts
    else:
        if not warp_groups or g.src_c % 16 or g.dst_c % 8:
            return []
        cuts = _half_product_cuts
    found = []
    for band in g.bands():
        for batch in range(1, MAX_BATCH + 1):
            for score, plan in cuts(g, band, batch):
                if plan.shared <= limit:
                    # A block alone waits for what it loads.
                    found.append((score * (0.6 if plan.blocks == 1 else 1.0), plan))
    return found


def _half_weight_cuts(g: _Geometry, band: int, batch: int) -> Iterator[Scored]:
    """Yield cuts of the gradient of weights: warps divide taps, or pixels."""
    bands = _quotient(g.out_h, band)
    height = band * g.step
    useful = g.out_h / (band * bands) * (height / g.rows(band)) ** 0.2
    pixels = _quotient(height * g.out_w * g.step, 16) * 16
    # An odd number of 16 bytes between pixels, for the banks.
    pixel = g.src_c + 8
    images = 2 * batch * g.rows(band) * g.cols * pixel
    groups = g.taps // 16
    if g.src_c <= 4:
        # Two copies of pixels of 8 bytes, as the source lays them out.
        unit = g.rows(band) * ((g.cols + 2) // 2)
        images = 16 * (_quotient(batch * unit, 8) * 8 + 4 + batch * unit)
        groups = _quotient(g.kernel * _quotient(g.kernel, 2), 2)
    shared = images + batch * pixels * 2 * (g.dst_c + 8) + 4 * pixels + 128
    steps = batch * pixels // 16
    for tap_warps, pixel_warps in _divisions(groups):
        groups_each = _quotient(groups, tap_warps)
        # A warp keeps all its sums in registers.
        if groups_each * g.fragments > 24:
            continue
        warps = tap_warps * pixel_warps
        busy = (
            groups
            / (groups_each * tap_warps)
            * steps
            / (_quotient(steps, pixel_warps) * pixel_warps)
        )
        loads = (groups_each + g.fragments / 2) / (groups_each * g.fragments)
        plan = Plan(
            band=band,
            batch=batch,
            pixel=pixel,
            shared=shared,
            warps=warps,
            tap_warps=tap_warps,
            half=True,
            most_warps=_warps_with(4 * groups_each * g.fragments + 60),
        )
        # Waiting between batches, which blocks beside hide.
        waiting = 16 / plan.blocks
        # Warps that divide pixels leave a partial sum each.
        summing = 0.98**pixel_warps
        score = useful * busy * summing / (1 + loads) * steps / (steps + waiting)
        yield score, plan


def _warps_with(registers: int) -> int:
    """Return the warps of a multiprocessor that may have so many registers a thread.

    It has four parts, with 512 registers for each thread of a warp.
    """
    return 4 * (512 // (_quotient(registers, 8) * 8))


def _divisions(groups: int) -> Iterator[tuple[int, int]]:
    """Yield numbers of warps that divide groups of taps, and of those that divide
    pixels.
    """
    for tap_warps in range(1, min(groups, 12) + 1):
        for pixel_warps in (1, 2, 4, 8):
            if 6 <= tap_warps * pixel_warps <= 12:
                yield tap_warps, pixel_warps


def _half_product_cuts(g: _Geometry, band: int, batch: int) -> Iterator[Scored]:
    """Yield cuts of the forward pass or the gradient of inputs."""
    # The most that divides the channels: an operand is read once for all of them.
    at_once = next(size for size in (64, 32, 16, 8) if g.dst_c % size == 0)
    parts = g.dst_c // at_once
    bands = _quotient(g.out_h, band)
    rows = g.rows(band)
    # A tile is 64 pixels in a row; those at the rows' ends are for nothing.
    tiles = _quotient(band * g.step * g.cols, 64)
    pixels_used = band * g.step * g.out_w * g.step
    useful = (
        g.out_h
        / (band * bands)
        * pixels_used
        / (tiles * 64)
        * (band * g.step / rows) ** 0.7
    )
    # PLANE in the source.
    planes = g.src_c // 8
    reach = 64 + (g.kernel - 1) * g.cols + g.kernel
    plane = (batch * rows * g.cols + reach) // 8 * 8 + 8 + 8 // min(planes, 8)
    # An instruction's descriptor has 14 bits for the distance of planes.
    if plane >= 2**14:
        return
    staged = batch * tiles * 64 * (g.dst_c + 8) if g.pool else 0
    shared = 2 * g.taps * g.dst_c + 16 * planes * plane + 4 * staged + 128
    tasks = batch * tiles * parts
    busy = tasks / (_quotient(tasks, 2) * 2)
    clocks = tasks * g.taps // 16 * max(16, at_once // 2)
    plan = Plan(
        band=band,
        batch=batch,
        pixel=0,
        shared=shared,
        wide=at_once,
        half=True,
        most_warps=24 if at_once < 64 else 16,
    )
    # 5000 clocks of waiting between batches; blocks beside hide them.
    yield useful * busy * clocks / (clocks + 5000 / plan.blocks), plan


def _quotient(number: int, divisor: int) -> int:
    """Return the quotient, rounded up."""
    return -(-number // divisor)


def _even(number: int) -> int:
    return number + number % 2
