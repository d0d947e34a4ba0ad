"""How the convolution kernels cut their work: which layers they support, and the best
cut for each.

A kernel's work is cut into units, which are bands of rows of one image. A block loads a
batch of units at once into shared memory. A cut is chosen by a score, roughly the share
of time that tensor cores could be busy; its constants were fitted to measurements on an
H200.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from hpcfed.kernels.convolution_layer import (
    ConvolutionLayer,
    Kind,
    LayerGeometry,
    even,
    geometry,
    quotient,
    shapes,
)
from hpcfed.kernels.cuda import Macros

KINDS: tuple[Kind, ...] = ("forward", "weight", "input")
SHARED = 224 * 1024
"""Shared memory of a block on a Hopper GPU, in bytes; `shared_memory` asks a device."""
BUSY_WARPS = 16
"""Warps per multiprocessor for which there are enough registers."""
GRADIENT_SCALE = 1024
"""Factor by which bounded gradients, at most 1 at a network's outputs, are scaled up in
halves. Halves range from 6e-8 to 65,504.
"""
MAX_BATCH = 16
"""The most units that a block takes at once."""


@dataclass(frozen=True)
class KernelCut:
    """One way to cut a kernel's work."""

    band: int
    """Rows of the result in a unit."""
    batch: int
    """Units that a block takes at once."""
    pixel: int
    """Floats between neighbouring pixels in shared memory: no bank conflicts."""
    shared: int
    """Bytes of shared memory."""
    warps: int = 8
    tap_warps: int = 1
    """Gradient of weights: warps that divide the taps; the others divide the pixels."""
    slices: int = 1
    """Gradient of weights: blocks that divide the output channels."""
    wide: int = 0
    """Output channels of a warp-group instruction; 0 for kernels without it."""
    half: bool = False
    """Whether operands are multiplied in halves."""
    most_warps: int = 16
    """Warps per multiprocessor for which there are enough registers."""

    def units(self, layer: ConvolutionLayer) -> int:
        """Return the units of an image, for the forward pass and the weights."""
        return quotient(layer.result[0], self.band)

    @property
    def blocks(self) -> int:
        """Blocks that a multiprocessor runs at once, by memory and registers."""
        return max(1, min(self.most_warps // self.warps, SHARED // self.shared))


Scored = tuple[float, KernelCut]


def sharing_blocks(units: int, capacity: int) -> int:
    """Return how many blocks share the units of all clients' weight gradients.

    As many as run at once, without those that would only make others' shares smaller
    than the largest: every block leaves up to two partial sums.
    """
    largest = quotient(units, capacity)
    return quotient(units, largest)


@cache
def plans(
    layer: ConvolutionLayer, shared: int, warp_groups: bool, bounded: bool = False
) -> dict[Kind, KernelCut]:
    """Return the best plan of each kernel; empty if an image does not fit.

    Gradients are multiplied in halves only if they are `bounded`.
    """
    best: dict[Kind, KernelCut] = {}
    for kind in KINDS:
        cut = _best(layer, kind, shared, warp_groups, bounded)
        # Each slice loads the images, so there are as few as registers allow.
        slices = 2
        while cut is None and kind == "weight" and layer.outputs % (8 * slices) == 0:
            slice_of = replace(layer, outputs=layer.outputs // slices)
            cut = _best(slice_of, kind, shared, warp_groups, bounded)
            cut = cut and replace(cut, slices=slices)
            slices *= 2
        # If one kernel does not fit, the layer uses torch's convolution.
        if cut is None:
            return {}
        best[kind] = cut
    return best


def _best(
    layer: ConvolutionLayer, kind: Kind, shared: int, warp_groups: bool, bounded: bool
) -> KernelCut | None:
    """Return a kernel's best cut; None if none fits."""
    candidates: list[Scored] = []
    if kind == "forward" or bounded:
        candidates = _half_candidates(layer, kind, shared, warp_groups)
    # Halves win whenever they are possible: they are loaded and multiplied twice as
    # fast.
    if not candidates:
        candidates = _candidates(layer, kind, shared)
    if not candidates:
        return None
    _, cut = max(candidates, key=lambda scored: scored[0])
    return cut


def supported(
    layer: ConvolutionLayer,
    shared: int = SHARED,
    *,
    warp_groups: bool = False,
    bounded: bool = False,
) -> bool:
    """Whether the kernels support a layer, with `shared` bytes of shared memory."""
    # Channels must be multiples of eight for tensor cores. The gradient of inputs pads
    # by kernel − 1 − padding, which must not be negative.
    possible = (
        layer.outputs % 8 == 0
        and layer.kernel - 1 >= layer.padding
        and min(layer.result) > 0
    )
    return possible and bool(plans(layer, shared, warp_groups, bounded))


def kernel_name(kind: Kind, plan: KernelCut) -> str:
    """Return the name of the kernel in convolution.cu."""
    if kind == "weight":
        return "half_weight_gradient" if plan.half else "weight_gradient"
    return "half_product" if plan.half else "gather_product"


def macros(layer: ConvolutionLayer, kind: Kind, plan: KernelCut) -> Macros:
    """Return the macros that a kernel is compiled with."""
    values: dict[str, str | int] = {**shapes(layer, kind)}
    # Only the named kernel of the source is compiled.
    values[kernel_name(kind, plan).upper()] = 1
    values |= {"KH": layer.kernel, "KW": layer.kernel, "MARKS": int(layer.marked)}
    values |= {"SLOPE": f"{float(layer.slope)}f", "SCALE": f"{float(GRADIENT_SCALE)}f"}
    # The gradient of inputs first gives that of outputs to the winning pixels.
    values["SPREAD"] = int(kind == "input")
    values["BIAS"] = int(layer.bias and kind != "input")
    values |= {"BAND": plan.band, "BATCH": plan.batch, "PIXEL": plan.pixel}
    values |= {"WARPS": plan.warps, "TAP_WARPS": plan.tap_warps, "NT": plan.wide}
    values["SLICES"] = plan.slices
    # Tells the compiler how many registers a thread may use.
    values["MIN_BLOCKS"] = plan.blocks
    return tuple(values.items())


def _candidates(layer: ConvolutionLayer, kind: Kind, limit: int) -> list[Scored]:
    """Return the cuts that fit into shared memory, with their scores."""
    g = geometry(layer, kind)
    cuts = _weight_cuts if kind == "weight" else _product_cuts
    found = []
    for band in g.bands():
        bands = quotient(g.out_h, band)
        height = band * g.step
        # The share of useful rows: in the last band, and among the loaded rows.
        useful = g.out_h / (band * bands) * (height / g.rows(band)) ** 0.2
        for batch in range(1, MAX_BATCH + 1):
            for score, plan in cuts(g, band, batch, useful):
                if plan.shared <= limit:
                    # Few warps cannot hide each other's latency.
                    resident = plan.warps * (limit // plan.shared)
                    busy = min(1.0, resident / BUSY_WARPS) ** 0.7
                    found.append((score * busy, plan))
    return found


def _weight_cuts(
    g: LayerGeometry, band: int, batch: int, useful: float
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
    # Padded with zeros to the eight that an instruction takes.
    pixels = quotient(band * g.step * g.out_w * g.step, 8) * 8
    pitch = even(g.cols * pixel)
    unit = g.rows(band) * pitch + pixels * stride
    # An instruction takes sixteen taps by eight output channels.
    groups = quotient(g.taps, 16)
    steps = batch * pixels // 8
    for tap_warps in (1, 2, 4, 8):
        groups_each = quotient(groups, tap_warps)
        # A warp keeps all its sums in registers.
        if groups_each * g.fragments > 24:
            continue
        pixel_warps = 8 // tap_warps
        busy = (
            groups
            / (groups_each * tap_warps)
            * steps
            / (quotient(steps, pixel_warps) * pixel_warps)
        )
        products = groups_each * g.fragments
        loads = (4 * groups_each + 2 * g.fragments) / products
        # Waiting between batches costs as much as four steps.
        score = useful * busy / (1 + loads) * steps / (steps + 4)
        sums = _bytes_of_sums(products, g.fragments, tap_warps, pixel_warps)
        shared = 4 * pixels + max(4 * batch * unit, sums)
        plan = KernelCut(
            band=band, batch=batch, pixel=pixel, shared=shared, tap_warps=tap_warps
        )
        yield score, plan


def _product_cuts(
    g: LayerGeometry, band: int, batch: int, useful: float
) -> Iterator[Scored]:
    """Yield cuts of the forward pass or the gradient of inputs."""
    pixel = g.src_c
    if g.src_c % 8 == 0:
        pixel += ((4 if g.pool else 8) - g.src_c) % 16
    steps = quotient(g.kernel * even(g.kernel * g.src_c), 8)
    outputs = band * g.out_w
    parts = quotient(g.fragments, 4)
    # Pairs of floats must be aligned: odd channels need a second, shifted copy.
    copies = 1 + g.src_c % 2
    # The same layout of shared memory as in gather_product: weights, offsets of taps,
    # images.
    weights = steps * (g.fragments * 64 + 4)
    pitch = even(g.cols * pixel)
    images = copies * batch * g.rows(band) * pitch
    shared = 4 * (weights + images)
    # Outputs that a warp computes together: 64 pixels of the convolution.
    group = 16 if g.pool else 64
    tasks = quotient(batch * outputs, group) * parts
    for warps in (4, 8):
        busy = batch * outputs * parts / group / (quotient(tasks, warps) * warps)
        # Waiting between batches costs as much as sixteen tasks.
        score = useful * busy * tasks / (tasks + 16)
        plan = KernelCut(
            band=band, batch=batch, pixel=pixel, shared=shared, warps=warps
        )
        yield score, plan


def _half_candidates(
    layer: ConvolutionLayer, kind: Kind, limit: int, warp_groups: bool
) -> list[Scored]:
    """Return cuts for operands in halves; none if halves are not supported."""
    g = geometry(layer, kind)
    if kind == "weight":
        # Pixels with few channels are loaded four at a time.
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
                    # A single block has to wait for its loads.
                    found.append((score * (0.6 if plan.blocks == 1 else 1.0), plan))
    return found


def _half_weight_cuts(g: LayerGeometry, band: int, batch: int) -> Iterator[Scored]:
    """Yield cuts of the gradient of weights: warps divide taps, or pixels."""
    bands = quotient(g.out_h, band)
    height = band * g.step
    useful = g.out_h / (band * bands) * (height / g.rows(band)) ** 0.2
    pixels = quotient(height * g.out_w * g.step, 16) * 16
    # An odd multiple of 16 bytes between pixels, to avoid bank conflicts.
    pixel = g.src_c + 8
    images = 2 * batch * g.rows(band) * g.cols * pixel
    groups = g.taps // 16
    if g.src_c <= 4:
        # Two copies of pixels of 8 bytes, as in the source's layout.
        unit = g.rows(band) * ((g.cols + 2) // 2)
        images = 16 * (quotient(batch * unit, 8) * 8 + 4 + batch * unit)
        groups = quotient(g.kernel * quotient(g.kernel, 2), 2)
    operands = images + batch * pixels * 2 * (g.dst_c + 8)
    steps = batch * pixels // 16
    for tap_warps, pixel_warps in _divisions(groups):
        groups_each = quotient(groups, tap_warps)
        # A warp keeps all its sums in registers.
        if groups_each * g.fragments > 24:
            continue
        warps = tap_warps * pixel_warps
        busy = (
            groups
            / (groups_each * tap_warps)
            * steps
            / (quotient(steps, pixel_warps) * pixel_warps)
        )
        products = groups_each * g.fragments
        loads = (groups_each + g.fragments / 2) / products
        sums = _bytes_of_sums(products, g.fragments, tap_warps, pixel_warps)
        plan = KernelCut(
            band=band,
            batch=batch,
            pixel=pixel,
            shared=4 * pixels + max(operands, sums) + 128,
            warps=warps,
            tap_warps=tap_warps,
            half=True,
            most_warps=_warps_with(4 * products + 60),
        )
        # Waiting between batches, which concurrent blocks hide.
        waiting = 16 / plan.blocks
        # Warps that divide pixels add up their sums at the end.
        summing = 0.98**pixel_warps
        score = useful * busy * summing / (1 + loads) * steps / (steps + waiting)
        yield score, plan


def _bytes_of_sums(
    products: int, fragments: int, tap_warps: int, pixel_warps: int
) -> int:
    """Return the bytes in which warps that divide pixels add up their sums: one half of
    them leaves its own to the other.

    A lane has four sums of each product, and one of each fragment's biases.
    """
    return 4 * 32 * (4 * products + fragments) * tap_warps * (pixel_warps // 2)


def _warps_with(registers: int) -> int:
    """Return the warps of a multiprocessor whose threads can have `registers`
    registers.

    A multiprocessor has four parts, each with 512 registers per thread of a warp.
    """
    return 4 * (512 // (quotient(registers, 8) * 8))


def _divisions(groups: int) -> Iterator[tuple[int, int]]:
    """Yield pairs: the warps that divide groups of taps, and those for pixels."""
    for tap_warps in range(1, min(groups, 12) + 1):
        for pixel_warps in (1, 2, 4, 8):
            if 6 <= tap_warps * pixel_warps <= 12:
                yield tap_warps, pixel_warps


def _half_product_cuts(g: LayerGeometry, band: int, batch: int) -> Iterator[Scored]:
    """Yield cuts of the forward pass or the gradient of inputs."""
    # The largest size that divides the channels: an operand is read once for all.
    at_once = next(size for size in (64, 32, 16, 8) if g.dst_c % size == 0)
    parts = g.dst_c // at_once
    bands = quotient(g.out_h, band)
    rows = g.rows(band)
    # A tile is 64 consecutive pixels; those beyond the ends of rows are wasted.
    tiles = quotient(band * g.step * g.cols, 64)
    in_tiles = band * g.step * g.out_w * g.step / (tiles * 64)
    useful = g.out_h / (band * bands) * in_tiles * (band * g.step / rows) ** 0.7
    # Equals PLANE in the source.
    planes = g.src_c // 8
    reach = 64 + (g.kernel - 1) * g.cols + g.kernel
    plane = (batch * rows * g.cols + reach) // 8 * 8 + 8 + 8 // min(planes, 8)
    # An instruction's descriptor has 14 bits for the distance between planes.
    if plane >= 2**14:
        return
    staged = batch * tiles * 64 * (g.dst_c + 8) if g.pool else 0
    shared = 2 * g.taps * g.dst_c + 16 * planes * plane + 4 * staged + 128
    tasks = batch * tiles * parts
    busy = tasks / (quotient(tasks, 2) * 2)
    clocks = tasks * g.taps // 16 * max(16, at_once // 2)
    plan = KernelCut(
        band=band,
        batch=batch,
        pixel=0,
        shared=shared,
        wide=at_once,
        half=True,
        most_warps=24 if at_once < 64 else 16,
    )
    # 5000 clocks of waiting between batches, which concurrent blocks hide.
    yield useful * busy * clocks / (clocks + 5000 / plan.blocks), plan
