"""The diagonal of the Fisher information: how much each parameter of a client's row
matters to its answers.

It is the mean over the client's samples of (∂ log p(y|x) / ∂θ)². Every sample must have
its own gradient, so batch norm uses running statistics and nothing is dropped, as in
evaluation. Then samples do not interact, and one backward pass yields each sample's
gradient of each layer's output. Combined with the layer's input, it gives the gradients
of the layer's parameters, one layer after the other.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from hpcfed.data.shards import Shard
from hpcfed.kernels import cuda
from hpcfed.kernels import squares as kernels
from hpcfed.models.cost import Cost
from hpcfed.models.frozen import frozen_weights_of, own_copies
from hpcfed.models.layout import Layout
from hpcfed.models.own import answers
from hpcfed.runtime import accelerator

MEMORY_SHARE = 0.1
"""Share of a GPU's free memory for gradients and activations held at the same time."""
CPU_FLOATS = 2**27
"""Number of such floats on a CPU; more do not help there."""

Tensors = dict[str, Tensor]


class Fisher:
    def __init__(
        self, network: nn.Module, layout: Layout, cost: Cost, *, bf16: bool = False
    ) -> None:
        """`bf16`: the network computes in bfloat16 on a GPU; squares sum in float32."""
        self._network = network
        self._layout = layout
        self._bf16 = bf16
        self._activations = cost.activations
        """Floats that layers output for a sample."""
        self._at_once = 0
        """Samples that fit into free memory; queried once, because that takes time."""

    def __call__(self, rows: Tensor, shard: Shard, clients: np.ndarray) -> Tensor:
        """Return the diagonals of `rows[i]` on the data of client `clients[i]`.

        They are 0 without data, and for running statistics.
        """
        add = self._add if self._knows_all() else self._add_any
        if not self._at_once:
            floats = self._floats(rows)
            if add == self._add_any:
                # A sample's gradients of all parameters are in memory at once.
                floats += self._layout.num_parameters
            self._at_once = max(1, _floats_at_once(rows) // floats)
        diagonals = torch.zeros_like(rows)
        sizes = shard.samples[clients]
        # cuDNN's benchmarks would take longer than these passes.
        with cuda.without_trials():
            for i, (client, size) in enumerate(zip(clients, sizes, strict=True)):
                row = self._taken(self._tensors(rows, i))
                sums = self._tensors(diagonals, i)
                for batch in shard.index[client, :size].split(self._at_once):
                    images = shard.inputs[batch]
                    add(sums, row, images, shard.targets[batch])
                diagonals[i] /= max(1, size)
        return diagonals

    def _floats(self, rows: Tensor) -> int:
        """Return the floats that a sample needs: outputs of layers, their gradient and
        its patches, and the gradient of one layer's weight.
        """
        largest_tensor = max(prod(e.shape) for e in self._layout.entries)
        floats = 4 * self._activations + 2 * largest_tensor
        # Half the size, and most layers need neither patches nor gradients of weights.
        return floats // 4 if self._in_bf16(rows) else floats

    def _knows_all(self) -> bool:
        """Tell whether we know the squares of all kinds of trained layers."""
        for module in self._network.modules():
            if module._parameters and not _is_known(module):
                return False
        # Frozen and tied weights, and positions of a sequence, are left to torch.
        count = sum(1 for _ in self._network.named_parameters(remove_duplicate=False))
        # A tied weight has several names but one entry, a frozen one has none: both
        # differ here.
        return count == sum(e.trainable for e in self._layout.entries)

    def _add_any(
        self, sums: Tensors, row: Tensors, inputs: Tensor, labels: Tensor
    ) -> None:
        """Add up squared gradients of any network's modules, by torch.func."""
        # Its constants, such as frozen weights, must be on the rows' device.
        like = next(iter(row.values()))
        network = self._evaluating().to(like.device, like.dtype)
        parameters = {e.name: row[e.name] for e in self._layout.entries if e.trainable}

        def loss(tensors: Tensors, x: Tensor, label: Tensor) -> Tensor:
            outputs = functional_call(network, {**row, **tensors}, (x.unsqueeze(0),))
            return F.cross_entropy(answers(outputs), label.unsqueeze(0))

        try:
            found = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, inputs, labels)
        except RuntimeError:
            # Without vmap's support, compute sample by sample.
            for x, label in zip(inputs, labels, strict=True):
                for name, gradient in grad(loss)(parameters, x, label).items():
                    sums[name] += gradient.square()
            return
        for name, gradients in found.items():
            sums[name] += gradients.square().sum(0)

    def _tensors(self, rows: Tensor, i: int) -> Tensors:
        """Return the named tensors of one row, as views."""
        views = self._layout.views(rows[i : i + 1])
        return {name: view[0] for name, view in views.items()}

    def _taken(self, row: Tensors) -> Tensors:
        """Return a row's tensors in the types that the network expects."""
        return {e.name: e.taken(row[e.name]) for e in self._layout.entries}

    def _add(self, sums: Tensors, row: Tensors, images: Tensor, labels: Tensor) -> None:
        """Add up the samples' squared gradients of every parameter."""

        def on_output(
            name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
        ) -> None:
            # The hook keeps the layer's output, even if it is changed in place later.
            output.register_hook(partial(on_gradient, name, module, inputs[0].detach()))

        def on_gradient(name: str, module: nn.Module, x: Tensor, dy: Tensor) -> None:
            # `conv1.weight` is `weight` to the layer.
            tensors = {}
            for key in (*module._parameters, *module._buffers):
                if f"{name}.{key}" in row:
                    tensors[key] = row[f"{name}.{key}"]
            # The loss is a sum over samples that do not interact, so row s of `dy` is
            # the gradient of sample s alone.
            squares = SQUARES[type(module)](module, tensors, x, dy)
            for key, square in squares.items():
                sums[f"{name}.{key}"] += square

        network = self._evaluating()
        handles = []
        for name, module in network.named_modules():
            if module._parameters:
                hook = partial(on_output, name)
                handles.append(module.register_forward_hook(hook))
        halves = torch.autocast(
            images.device.type, torch.bfloat16, enabled=self._in_bf16(images)
        )
        try:
            with torch.enable_grad(), halves:
                # This creates a backward pass; parameters take no part in it.
                images = images.detach().requires_grad_()
                logits = functional_call(network, row, (images,))
                loss = F.cross_entropy(logits, labels, reduction="sum")
                torch.autograd.grad(loss, images)
        finally:
            for handle in handles:
                handle.remove()

    def _in_bf16(self, like: Tensor) -> bool:
        return (
            self._bf16
            and like.dtype == torch.float32
            and accelerator.is_gpu(like.device)
        )

    def _evaluating(self) -> nn.Module:
        """Return the network in evaluation mode; only its structure is used."""
        shares = next(frozen_weights_of(self._network), None) is not None
        if self._network.training or shares:
            # With weights of its own, whose type changes here.
            own = copy.deepcopy(self._network, own_copies(self._network))
            self._network = own.eval()
        return self._network


def _is_known(module: nn.Module) -> bool:
    if isinstance(module, nn.Conv2d):
        padded_by_number = isinstance(module.padding, tuple)
        plain = module.groups == 1 and module.padding_mode == "zeros"
        return padded_by_number and plain
    return type(module) in SQUARES


def _of_convolution(module: Any, tensors: Tensors, x: Tensor, dy: Tensor) -> Tensors:
    """Multiply, per sample, the gradient at each position with the patch around it."""
    weight = tensors["weight"]
    sizes = kernels.geometry(module, x, dy)
    if sizes is not None:
        squares = {"weight": kernels.convolution_squares(x, dy, sizes)}
    else:
        patches = _patches(module, x.to(weight.dtype), dy.shape[2:])
        # [samples, outputs, positions] · [samples, positions, taps]
        gradients = torch.bmm(dy.to(weight.dtype).flatten(2), patches.transpose(1, 2))
        # A norm reads the gradients once. They are by far the largest tensor here, and
        # each pass over them takes as long as the product that made them.
        norms = torch.linalg.vector_norm(gradients, dim=0)
        squares = {"weight": norms.square_().view_as(weight)}
    if "bias" in tensors:
        squares["bias"] = dy.sum((2, 3), dtype=weight.dtype).square().sum(0)
    return squares


def _patches(module: Any, x: Tensor, size: Sequence[int]) -> Tensor:
    """Return what the convolution multiplies at each position, [samples, taps,
    positions]; `size` is the height and width of its output.
    """
    # Not F.unfold, which launches a kernel for every sample and takes most of the time.
    vertical, horizontal = module.padding
    padded = F.pad(x, (horizontal, horizontal, vertical, vertical))
    samples, channels, rows, columns = padded.stride()
    # A view with the taps before the positions; the copy is one launch.
    shape = (*x.shape[:2], *module.kernel_size, *size)
    taps = (rows * module.dilation[0], columns * module.dilation[1])
    positions = (rows * module.stride[0], columns * module.stride[1])
    windows = padded.as_strided(shape, (samples, channels, *taps, *positions))
    return windows.flatten(4).flatten(1, 3)


def _of_linear(module: Any, tensors: Tensors, x: Tensor, dy: Tensor) -> Tensors:
    """Multiply squares: a gradient is an outer product, and so is its square."""
    dtype = tensors["weight"].dtype
    dy_squares = dy.to(dtype).square()
    squares = {"weight": dy_squares.t() @ x.to(dtype).square()}
    if "bias" in tensors:
        squares["bias"] = dy_squares.sum(0)
    return squares


def _of_batch_norm(module: Any, tensors: Tensors, x: Tensor, dy: Tensor) -> Tensors:
    """Multiply the gradient with the normalised input, by running statistics."""
    mean = tensors["running_mean"]
    rstd = (tensors["running_var"] + module.eps).rsqrt()
    sums = kernels.sample_sums(x, dy, mean, rstd)
    bias, weight = sums.square().sum(0)
    return {"weight": weight, "bias": bias}


SQUARES: dict[type[nn.Module], Callable[[Any, Tensors, Tensor, Tensor], Tensors]] = {
    nn.Conv2d: _of_convolution,
    nn.Linear: _of_linear,
    nn.BatchNorm2d: _of_batch_norm,
}
"""By kind of layer: the squared gradients of its parameters, summed over samples, from
its tensors, its input, and the gradient of its output.
"""


def _floats_at_once(rows: Tensor) -> int:
    if rows.device.type == "cpu":
        return CPU_FLOATS
    free = accelerator.free_memory(rows.device)
    return int(MEMORY_SHARE * free / rows.element_size())
