"""What convolution kernels know about a layer: the sizes of its inputs and outputs."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["forward", "weight", "input"]
"""The forward pass, the gradient of weights, the gradient of inputs."""


@dataclass(frozen=True)
class ConvolutionLayer:
    """A convolution of stride 1, square, its activation, and 2×2 max pooling."""

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
        """Whether the backward pass needs winners or signs."""
        return self.pool or self.slope != 1

    @property
    def columns(self) -> int:
        """Number of weights and biases of a client."""
        return self.outputs * (self.kernel**2 * self.channels + self.bias)


def shapes(layer: ConvolutionLayer, kind: Kind) -> dict[str, int]:
    """Return the shapes of what a kernel gathers from (`SRC`), and of its result."""
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
    # kernel. Its padding is what the forward pass left out.
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
class LayerGeometry:
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
        """Groups of eight output channels, which a tensor core computes at once."""
        return quotient(self.dst_c, 8)

    @property
    def cols(self) -> int:
        """Columns that a unit loads."""
        return self.out_w * self.step + self.kernel - 1

    def rows(self, band: int) -> int:
        """Rows that a unit loads."""
        return band * self.step + self.kernel - 1

    def bands(self) -> set[int]:
        """Heights of bands that cut the result into bands of equal size."""
        return {quotient(self.out_h, bands) for bands in range(1, self.out_h + 1)}


def geometry(layer: ConvolutionLayer, kind: Kind) -> LayerGeometry:
    """Return the numbers of a layer that determine how its work is cut."""
    m = shapes(layer, kind)
    return LayerGeometry(
        kernel=layer.kernel,
        src_c=m["SRC_C"],
        dst_c=m["DST_C"],
        out_h=m["OUT_H"],
        out_w=m["OUT_W"],
        pool=m["POOL"],
    )


def quotient(number: int, divisor: int) -> int:
    """Return the quotient, rounded up."""
    return -(-number // divisor)


def even(number: int) -> int:
    """Return the number, rounded up to an even one."""
    return number + number % 2
