"""Convolutions of many clients, each with its own weights, in a network stacked over
clients: by our kernels if they support the case, otherwise by torch's.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcfed.kernels import convolution, cpu_convolution, cuda, linear
from hpcfed.kernels.convolution_layer import ConvolutionLayer
from hpcfed.kernels.cpu_convolution import CpuLayer
from hpcfed.models.stacked_layer import Batch, StackedLayer
from hpcfed.runtime.accelerator import is_gpu


class StackedConvolution(StackedLayer):
    """What convolutions of images and of sequences have in common."""

    def __init__(
        self,
        plain: nn.Conv1d | nn.Conv2d,
        batch: Batch,
        name: str,
        numbers: Iterator[int],
    ) -> None:
        super().__init__(plain, batch, name, numbers)
        if plain.padding_mode != "zeros":
            raise TypeError(
                f"{type(plain).__name__} with padding_mode '{plain.padding_mode}' does "
                "not stack; use 'zeros'"
            )
        self.groups = plain.groups
        self.geometry: dict[str, Any] = {
            "stride": plain.stride,
            "padding": plain.padding,
            "dilation": plain.dilation,
        }


class StackedConv2d(StackedConvolution):
    slope = 1.0
    """Slope below zero of the activation that this layer applies; 1: none."""
    pool = False
    """Whether this layer ends with max pooling of 2 × 2 pixels."""

    def __init__(
        self, plain: nn.Conv2d, batch: Batch, name: str, numbers: Iterator[int]
    ) -> None:
        super().__init__(plain, batch, name, numbers)
        self.square = (
            plain.groups == 1
            and not isinstance(plain.padding, str)
            and len(set(plain.kernel_size)) == 1
            and len(set(plain.padding)) == 1
            and set(plain.stride) == {1}
            and set(plain.dilation) == {1}
        )
        """Whether our kernels support this geometry."""

    def forward(self, x: Tensor) -> Tensor:
        y = self._by_kernel(x)
        if y is None:
            y = self._by_torch(x)
        return y.contiguous() if self.batch.contiguous else y

    def _by_kernel(self, x: Tensor) -> Tensor | None:
        """Return channels-last images; None if no kernel of ours serves."""
        layer = self._kernel_layer(x)
        if layer is not None:
            sink = self._sink(layer)
            branch = self.batch.branch
            return convolution.block(
                x,
                self.weight,
                self.bias,
                layer,
                sink,
                branch,
                bounded=self.batch.bounded,
            )
        on_cpu = self._cpu_layer(x)
        if on_cpu is not None:
            sinks = self.take_sinks()
            return cpu_convolution.block(x, self.weight, self.bias, on_cpu, sinks)
        return None

    def _by_torch(self, x: Tensor) -> Tensor:
        y = linear.activated(self._convolved(x), self.slope)
        return F.max_pool2d(y, 2) if self.pool else y

    def may_use_kernel(self, like: Tensor) -> bool:
        """Tell whether our kernels support such numbers and image sizes."""
        # A user who forbids TensorFloat-32 gets torch's convolutions.
        return (
            self.square
            and self.replaced.out_channels % 8 == 0
            and like.dtype == torch.float32
            and cuda.available(like.device)
            and torch.backends.cudnn.allow_tf32
        )

    def _kernel_layer(self, x: Tensor) -> ConvolutionLayer | None:
        """Return what our kernels need to know; None if they do not support the case.

        They support several clients on a GPU, in TensorFloat-32, channels-last.
        """
        if self.batch.num_clients == 1 or not self.may_use_kernel(x):
            return None
        # Dimension 2 are the input channels: the kernels read them side by side.
        if self.weight.stride(2) != 1:
            return None
        # Without gradients it does not matter whether they are bounded.
        bounded = self.batch.bounded or not torch.is_grad_enabled()
        return self.kernel_layer_of(x.shape[1:], x.device.index, bounded=bounded)

    def kernel_layer_of(
        self, shape: Sequence[int], device: int, *, bounded: bool
    ) -> ConvolutionLayer | None:
        """Return what our kernels need to know for images [channels, height, width];
        None if they do not fit.
        """
        channels, height, width = shape
        layer = ConvolutionLayer(
            height=height,
            width=width,
            channels=channels,
            outputs=self.replaced.out_channels,
            kernel=self.replaced.kernel_size[0],
            padding=self.geometry["padding"][0],
            bias=self.bias is not None,
            slope=self.slope,
            pool=self.pool,
        )
        return layer if convolution.serves(layer, device, bounded=bounded) else None

    def _sink(self, layer: ConvolutionLayer) -> Tensor | None:
        """Return the sinks of weight and bias as one, if they are adjacent.

        The kernel writes both gradients as one matrix.
        """
        weight, bias = self.take_sinks()
        if weight is None or (self.bias is not None and bias is None):
            return None
        # The layout puts a bias right after its weight, unless there is padding.
        end = weight.storage_offset() + weight[0].numel()
        if bias is not None and bias.storage_offset() != end:
            return None
        shape = (len(weight), layer.columns)
        # In memory order, which is channels-last like the weights: not the view's own
        # order.
        return weight.as_strided(shape, (weight.stride(0), 1))

    def _cpu_layer(self, x: Tensor) -> CpuLayer | None:
        """Return what our CPU kernel needs to know, if it supports these clients."""
        if self.batch.num_clients == 1 or not self.square:
            return None
        layer = CpuLayer(
            kernel=self.weight.shape[-1],
            padding=self.geometry["padding"][0],
            slope=self.slope,
            pool=self.pool,
        )
        return layer if cpu_convolution.serves(x, layer) else None

    def _convolved(self, x: Tensor) -> Tensor:
        if self.batch.num_clients == 1 or not is_gpu(x.device):
            return self._convolved_one_by_one(x)
        # [clients · slots, channels, …] → [slots, clients · channels, …]: one group of
        # channels per client
        n = self.batch.num_clients
        by_client = x.unflatten(0, (n, -1))
        grouped = by_client.transpose(0, 1).flatten(1, 2)
        y = F.conv2d(
            grouped,
            self.weight.flatten(0, 1),
            None if self.bias is None else self.bias.flatten(),
            groups=n * self.groups,
            **self.geometry,
        )
        # And back.
        by_slot = y.unflatten(1, (n, -1))
        return by_slot.transpose(0, 1).flatten(0, 1)

    def _convolved_one_by_one(self, x: Tensor) -> Tensor:
        n = self.batch.num_clients
        if n == 1:
            # Squeezed, not indexed: the gradient of an index is a copy.
            weight = self.weight.squeeze(0)
            bias = None if self.bias is None else self.bias.squeeze(0)
            return F.conv2d(x, weight, bias, groups=self.groups, **self.geometry)
        # On a CPU one client's batch already fills the convolution, and regrouping
        # would only add copies.
        biases = [None] * n if self.bias is None else self.bias
        convolved = []
        clients = zip(x.chunk(n), self.weight, biases, strict=True)
        for client_x, weight, bias in clients:
            y = F.conv2d(client_x, weight, bias, groups=self.groups, **self.geometry)
            convolved.append(y)
        return torch.cat(convolved)


class StackedConv1d(StackedConvolution):
    def forward(self, x: Tensor) -> Tensor:
        n = self.batch.num_clients
        # As in StackedConv2d: a group of channels per client.
        grouped = x.unflatten(0, (n, -1)).transpose(0, 1).flatten(1, 2)
        y = F.conv1d(
            grouped,
            self.weight.flatten(0, 1),
            None if self.bias is None else self.bias.flatten(),
            groups=n * self.groups,
            **self.geometry,
        )
        return y.unflatten(1, (n, -1)).transpose(0, 1).flatten(0, 1)
