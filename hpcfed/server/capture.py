"""Training passes as CUDA graphs: the networks' kernels are so small that launching
them one by one would take longer than running them.
"""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from hpcfed.errors import remark
from hpcfed.runtime import accelerator, graphs
from hpcfed.server.batch_norm import norms_of
from hpcfed.server.options import ServerOptions
from hpcfed.server.sizes import Batching
from hpcfed.server.training_plan import TrainingPlan
from hpcfed.server.zero_memory import BUCKET

WARM_UPS = 3
"""Passes before a capture."""
LONG_KERNELS = 100_000_000
"""Number of parameters from which steps do not wait for launches."""


def captured_if_possible(network: nn.Module, plan: TrainingPlan) -> nn.Module:
    """Return what the training loop calls: the captured network if capture is possible,
    else the network itself.
    """
    if not accelerator.is_gpu(plan.slot.device):
        return network
    reason = uncaptured(plan.options, plan.batching)
    if reason is None and not graphs.has_cuda_graphs(plan.slot.device):
        reason = "CUDA's graphs are for NVIDIA's GPUs, without --kernels torch"
    if reason is None and plan.batching.shared and norms_of(network):
        # Batch norm's all-reduce would be inside the captured pass.
        reason = (
            "ranks share batch norm's statistics "
            f"(--server-micro-batch {plan.batching.micro} has each its own)"
        )
    if reason is None and plan.options.zero_stage == 2 and _frees_gradients(network):
        # A captured pass keeps all of them.
        reason = "ZeRO 2 frees gradients within a pass"
    if reason is None:
        return CapturedNetwork(network)
    if plan.slot.rank == 0:
        _say_once(
            "server: steps run uncaptured, so that small networks wait for launches: "
            f"{reason}"
        )
    return network


def uncaptured(options: ServerOptions, batching: Batching) -> str | None:
    """Return why steps on a GPU cannot be captured; None if they can."""
    if options.zero_stage == 3:
        return "ZeRO 3 fetches and frees parameters within a pass"
    if options.server_checkpointing:
        return "--server-checkpointing computes activations anew within a pass"
    if batching.accumulation > 1:
        return "gradients accumulate over micro-batches"
    return None


def _frees_gradients(network: nn.Module) -> bool:
    """Tell whether it is worth it that ZeRO 2 frees gradients bucket by bucket: the
    network is large, but no layer of it is larger than a bucket.
    """
    sizes = [p.numel() for p in network.parameters()]
    return sum(sizes) >= LONG_KERNELS and max(sizes) <= BUCKET


class CapturedNetwork(nn.Module):
    """A network whose forward and backward passes are CUDA graphs from the first on.

    DeepSpeed holds this module. The captured code uses aliases of the parameters:
    separate tensors on the same memory. There are two reasons. ZeRO keeps the
    parameters' autograd nodes, which belong to the legacy stream, and a capture must
    not touch that stream. And ZeRO's hooks must run after every backward pass, not once
    during the capture.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self._graphed: Callable[..., Tensor] | None = None

    def forward(self, *inputs: Any) -> Tensor:
        parameters = tuple(self.network.parameters())
        if self._graphed is None:
            self._graphed = self._capture(inputs, parameters)
        # A parameter that has moved in memory is copied to where the graph reads it.
        # Otherwise this only compares addresses.
        return self._graphed(inputs, parameters)

    def _capture(
        self, inputs: tuple[Any, ...], parameters: tuple[nn.Parameter, ...]
    ) -> Callable[..., Tensor]:
        names = [name for name, _ in self.network.named_parameters()]
        aliases = tuple(p.detach().requires_grad_(p.requires_grad) for p in parameters)

        def call(inputs: tuple[Any, ...], parameters: tuple[Tensor, ...]) -> Tensor:
            named = dict(zip(names, parameters, strict=True))
            answer: Tensor = torch.func.functional_call(self.network, named, inputs)
            return answer

        # Every captured backward pass gives this warning once. It is harmless: torch
        # manages these streams itself.
        warnings.filterwarnings(
            "ignore", "The AccumulateGrad node's stream does not match"
        )
        buffers = [buffer.clone() for buffer in self.network.buffers()]
        bf16 = torch.is_autocast_enabled("cuda")
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16, cache_enabled=False):
            _warm_up(lambda: call(inputs, aliases), aliases)
            graphed = graphs.graphed(call, (inputs, aliases))
        # Undo what the trial passes did to batch norm's statistics.
        for buffer, before in zip(self.network.buffers(), buffers, strict=True):
            buffer.copy_(before)
        return graphed


def _warm_up(call: Callable[[], Tensor], parameters: tuple[Tensor, ...]) -> None:
    """Run some passes on a side stream, so that libraries choose their kernels.

    Always use the same side stream. `make_graphed_callables` would take a new one for
    each capture, and each costs 65 MiB that are never freed (measured on an H200;
    cuBLAS keeps a workspace for each stream).
    """
    device = parameters[0].device
    here, side = accelerator.current_stream(device), _side_stream(device)
    trainable = [p for p in parameters if p.requires_grad]
    side.wait_stream(here)
    with accelerator.entering(side)():
        for _ in range(WARM_UPS):
            answer = call()
            torch.autograd.grad(answer, trainable, torch.ones_like(answer))
    here.wait_stream(side)


@cache
def _side_stream(device: torch.device) -> Any:
    return accelerator.new_stream(device)


@cache
def _say_once(line: str) -> None:
    remark(line)
