"""Training passes as CUDA graphs: the networks' kernels are small, and launching them
one by one would take longer than they do.
"""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from hpcfed.errors import remark
from hpcfed.server.batch_norm import norms_of
from hpcfed.server.options import ServerOptions
from hpcfed.server.sizes import Batching
from hpcfed.server.training_plan import TrainingPlan

WARM_UPS = 3
"""Passes before a capture."""


def captured_if_possible(network: nn.Module, plan: TrainingPlan) -> nn.Module:
    """Return what the training loop calls: the captured network where that is right,
    elsewhere the network itself.
    """
    if plan.slot.device.type != "cuda":
        return network
    reason = uncaptured(plan.options, plan.batching)
    if reason is None and plan.batching.shared and norms_of(network):
        # Batch norm's all-reduce would be within the pass.
        reason = (
            "ranks share batch norm's statistics "
            f"(--server-micro-batch {plan.batching.micro} has each its own)"
        )
    if reason is None:
        return CapturedNetwork(network)
    if plan.slot.rank == 0:
        _say_once(
            "server: steps run uncaptured, so that small networks wait for launches: "
            f"{reason}"
        )
    return network


def uncaptured(options: ServerOptions, batching: Batching) -> str | None:
    """Return why steps on a GPU are launched kernel by kernel; None where they are
    captured.
    """
    if options.zero_stage == 3:
        return "ZeRO 3 fetches and frees parameters within a pass"
    if options.server_checkpointing:
        return "--server-checkpointing computes activations anew within a pass"
    if batching.accumulation > 1:
        return "gradients accumulate over micro-batches"
    return None


class CapturedNetwork(nn.Module):
    """A network whose training passes are two CUDA graphs, from the first pass on.

    DeepSpeed holds this module. What is captured sees aliases of the parameters:
    tensors of their own over the same memory. ZeRO keeps the parameters' nodes of
    autograd, which belong to the legacy stream, and no capture may touch that one; and
    its hooks must run after every backward pass, not once within the capture.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self._graphed: Callable[..., Tensor] | None = None

    def forward(self, *inputs: Any) -> Tensor:
        parameters = tuple(self.network.parameters())
        if self._graphed is None:
            self._graphed = self._capture(inputs, parameters)
        # A parameter that has moved since is copied to where the graph reads it; one
        # that has not costs a comparison of addresses.
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

        # Every captured backward pass gives this warning once; its streams are torch's
        # own business.
        warnings.filterwarnings(
            "ignore", "The AccumulateGrad node's stream does not match"
        )
        buffers = [buffer.clone() for buffer in self.network.buffers()]
        bf16 = torch.is_autocast_enabled("cuda")
        # It takes nested arguments, which its types do not say.
        capture: Any = torch.cuda.make_graphed_callables
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16, cache_enabled=False):
            _warm_up(lambda: call(inputs, aliases), aliases)
            graphed: Callable[..., Tensor] = capture(
                call, (inputs, aliases), num_warmup_iters=0
            )
        # Trial passes leave no trace in batch norm's statistics.
        for buffer, before in zip(self.network.buffers(), buffers, strict=True):
            buffer.copy_(before)
        return graphed


def _warm_up(call: Callable[[], Tensor], parameters: tuple[Tensor, ...]) -> None:
    """Make some passes beside the current stream, in which libraries choose their
    kernels.

    They are always made on the same stream. `make_graphed_callables` would take a new
    one for each capture, and every new one cost 65 MiB for good (measured on an H200;
    cuBLAS keeps a workspace for each stream).
    """
    here = torch.cuda.current_stream()
    side = _side_stream(here.device)
    trainable = [p for p in parameters if p.requires_grad]
    side.wait_stream(here)
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            answer = call()
            torch.autograd.grad(answer, trainable, torch.ones_like(answer))
    here.wait_stream(side)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@cache
def _say_once(line: str) -> None:
    remark(line)
