"""A linear layer and its activation, for clients with few samples in a step: a kernel
forward, and one backward.

torch takes ten kernels for that: products, sums, copies of biases, activations. Each of
them has little to do and waits for the one before, so a step takes as long as they are
many.
"""

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from hpcfed.kernels import cuda

MOST_SAMPLES = 16
"""Samples of a client: a thread keeps two columns of each in registers, twice."""
MOST_OUTPUTS = 1024
"""Their gradients lie in shared memory."""
_SOURCE = "few_samples.cu"
_THREADS = 256
_PAIRS = 64
"""Pairs of columns in a block of the backward pass: 13 blocks for a client with 1,568
columns, which ten clients take to fill an H200.
"""
_OUTPUTS = 16
"""Outputs in a block of the forward pass."""
_MOST_DEPTH = 7
"""Groups of columns that a warp loads at once, as registers allow."""
_ROWS_AT_ONCE = 8


def serves(x: Tensor, weight: Tensor) -> bool:
    """Tell whether the kernels support samples [clients, slots, inputs] with weights
    [clients, outputs, inputs].
    """
    return (
        fits(x.shape[1], weight.shape[1], weight.shape[2])
        and is_loadable(weight)
        and x.dtype == weight.dtype
        # A user who forbids TensorFloat-32 gets torch's product.
        and torch.get_float32_matmul_precision() != "highest"
    )


def fits(slots: int, outputs: int, inputs: int) -> bool:
    """Tell whether a layer of this size is for the kernels."""
    return slots <= MOST_SAMPLES and outputs <= MOST_OUTPUTS and inputs % 4 == 0


def is_loadable(weight: Tensor) -> bool:
    """Tell whether a kernel can load four floats at once from these weights."""
    _, outputs, inputs = weight.shape
    aligned = (
        inputs % 4 == 0
        and weight.stride(0) % 4 == 0
        and weight.storage_offset() % 4 == 0
        and (weight.stride(1) == inputs or outputs == 1)
        and weight.stride(2) == 1
    )
    is_float32 = weight.dtype == torch.float32
    return bool(aligned) and is_float32 and cuda.available(weight.device)


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, slope: float) -> Tensor:
    """Return the activation of x wᵀ + b, contiguous as `x` must be; `slope` is the
    activation's below zero, 1 for none.
    """
    clients, slots, inputs = x.shape
    outputs = weight.shape[1]
    y = x.new_empty(clients, slots, outputs)
    biased = bias is not None
    name, macros = forward_source(slots, outputs, inputs, slope, biased=biased)
    kernel = _kernel(name, macros, 0, x.device.index)
    strides = (weight.stride(0), 0 if bias is None else bias.stride(0))
    kernel((-(-outputs // _OUTPUTS), clients), x, weight, bias, y, *strides)
    return y


def backward(
    dy: Tensor,
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    slope: float,
    gradients: tuple[Tensor, Tensor | None],
    *,
    needs_x: bool,
) -> Tensor | None:
    """Write the gradients of weight and bias, and return that of x if it is needed.

    `gradients` are like weight and bias: rows of them may be apart.
    """
    clients, slots, inputs = x.shape
    outputs = weight.shape[1]
    dw, db = gradients
    dx = torch.empty_like(x) if needs_x else None
    name, macros = backward_source(
        slots, outputs, inputs, slope, biased=db is not None, needs_x=needs_x
    )
    kernel = _kernel(name, macros, _shared(slots, outputs), x.device.index)
    tensors = (dy.contiguous(), y, x, weight, dw, db, dx)
    strides = (weight.stride(0), dw.stride(0), 0 if db is None else db.stride(0))
    kernel((-(-inputs // (2 * _PAIRS)), clients), *tensors, *strides)
    return dx


def sources(
    slots: int, outputs: int, inputs: int, slope: float, *, biased: bool, first: bool
) -> Iterator[tuple[str, cuda.Macros]]:
    """Yield the sources and macros of a layer's kernels in training; the first layer
    needs no gradient of its inputs.
    """
    shape = (slots, outputs, inputs, slope)
    yield _SOURCE, forward_source(*shape, biased=biased)[1]
    yield _SOURCE, backward_source(*shape, biased=biased, needs_x=not first)[1]


def forward_source(
    slots: int, outputs: int, inputs: int, slope: float, *, biased: bool
) -> tuple[str, cuda.Macros]:
    """Return the forward kernel's name and macros."""
    # Groups of sixteen columns, in rounds of as many as are loaded at once.
    groups = -(-inputs // (16 * (_THREADS // 32)))
    rounds = -(-groups // _MOST_DEPTH)
    more = (("FEW_FORWARD", 1), ("DEPTH", -(-groups // rounds)))
    return "few_forward", _macros(slots, outputs, inputs, slope, biased) + more


def backward_source(
    slots: int, outputs: int, inputs: int, slope: float, *, biased: bool, needs_x: bool
) -> tuple[str, cuda.Macros]:
    """Return the backward kernel's name and macros."""
    more = (("PAIRS", _PAIRS), ("NEEDS_X", int(needs_x)), ("DEPTH", _ROWS_AT_ONCE))
    return "few_backward", _macros(slots, outputs, inputs, slope, biased) + more


def _macros(
    slots: int, outputs: int, inputs: int, slope: float, biased: bool
) -> cuda.Macros:
    return (
        ("THREADS", _THREADS),
        ("SLOTS", slots),
        ("OUTPUTS", outputs),
        ("INPUTS", inputs),
        ("SLOPE", f"{float(slope)!r}f"),
        ("BIAS", int(biased)),
    )


def _shared(slots: int, outputs: int) -> int:
    """Return the bytes that a block of the backward pass needs: the gradients of all
    outputs, and what each share of them adds to the columns.
    """
    padded = -(-slots // 4) * 4
    return 4 * (outputs * padded + 2 * slots * _THREADS)


@cache
def _kernel(name: str, macros: cuda.Macros, shared: int, device: int) -> cuda.Kernel:
    return cuda.Kernel(_SOURCE, name, macros, threads=_THREADS, shared=shared)
