"""Steps of AdamW on one of the server's networks: through DeepSpeed, or as a plain loop
to compare with.

A step's samples and noise are drawn for the whole batch, of which every rank takes its
part, and batch norm takes its statistics over all of it. So any number of ranks learns
the same, up to rounding. With --server-micro-batch each micro-batch is drawn and
normalised by itself, as in DeepSpeed without synchronised statistics; which samples and
which noise it has depends on the seed, the step and its number alone. So any division
into micro-batches of that size, among ranks and accumulated passes, learns the same,
but not what whole batches learn.
"""

import contextlib
import gc
import io
import logging
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from hpcfed.errors import remark
from hpcfed.runtime import process_group
from hpcfed.server.networks import num_parameters, share_statistics
from hpcfed.server.options import Batching, ServerOptions

Loss = Callable[[Callable[..., Tensor], int, int], Tensor]
"""The mean loss of (network, step, number of the micro-batch)."""
Moments = dict[str, dict[str, Tensor]]
"""AdamW's two moments of every parameter, by name."""
MOMENTS = ("exp_avg", "exp_avg_sq")
WARM_UPS = 3
"""Passes before a capture."""
BUCKET = 50_000_000
"""Numbers that DeepSpeed sends at once at most. It allocates as many, some of them
twice.
"""
BUCKET_UNIT = 1024
"""Buckets are multiples of it, as DeepSpeed wants them to be of some small number."""
LOOK_EVERY = 500
"""Steps between two looks at whether losses are still finite; a look waits for the
device.
"""
_LruCache = type(cache(lambda: None))
NORM_MOMENTUM = 0.1
"""What a step's batch counts for in batch norm's running statistics."""


@dataclass(frozen=True)
class Place:
    """Where the server's networks live, and with how many others."""

    device: torch.device
    rank: int = 0
    size: int = 1


class Trainer(Protocol):
    """One network and its optimiser. Calls are collective over the server's ranks."""

    network: nn.Module

    def fit(self, loss: Loss, steps: int, told: Callable[[int], None]) -> np.ndarray:
        """Goes on for so many steps; the loss of each, over all ranks.

        Soon after a loss that is not finite it ends early; the losses of steps that
        were not made are zero.
        """

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Whole parameters and buffers in float32 by name, where they are; they may go
        on changing with the network.
        """

    def save(self) -> tuple[dict[str, Tensor], Moments]:
        """The same, copied to the host, and the optimiser's moments."""

    def load(
        self, tensors: dict[str, Tensor], moments: Moments, steps: int, loss: Loss
    ) -> None:
        """Goes on from what was saved after so many steps of this loss."""

    def gathered(self) -> contextlib.AbstractContextManager[None]:
        """Within, the network can be called on every rank for itself."""

    def close(self) -> None:
        """Nothing is learnt any more; what was taken out by `tensors` stays."""


def trainer(
    network: nn.Module,
    options: ServerOptions,
    batching: Batching,
    place: Place,
    *,
    steps: int,
) -> Trainer:
    """`steps` is the length of the learning rate's cosine."""
    kind = Plain if options.server_engine == "torch" else DeepSpeed
    return kind(network, options, batching, place, steps=steps)


def prepare(options: ServerOptions, place: Place) -> None:
    """Loads what learning will need, while there is time: torch's first optimiser
    imports for seconds.
    """
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    if options.server_engine == "deepspeed":
        _deepspeed(place)


def cosine(steps: int) -> Callable[[int], float]:
    return lambda step: 0.5 * (1 + math.cos(math.pi * min(step, steps) / steps))


def _adamw(
    network: nn.Module, options: ServerOptions, device: torch.device
) -> torch.optim.AdamW:
    fused = device.type == "cuda" and options.server_offload == "none"
    return torch.optim.AdamW(
        network.parameters(),
        lr=options.size.lr,
        weight_decay=options.server_decay,
        fused=fused,
    )


class _Captured(nn.Module):
    """The network in training, as two CUDA graphs from its first pass on, because its
    kernels are small.

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
        # that has not costs a look.
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

        # Said once of every captured backward pass, whose streams are torch's own
        # business.
        warnings.filterwarnings(
            "ignore", "The AccumulateGrad node's stream does not match"
        )
        buffers = [buffer.clone() for buffer in self.network.buffers()]
        bf16 = torch.is_autocast_enabled("cuda")
        capture: Any = (
            torch.cuda.make_graphed_callables
        )  # takes nested arguments, which its types do not tell
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16, cache_enabled=False):
            _warm_up(lambda: call(inputs, aliases), aliases)
            graphed: Callable[..., Tensor] = capture(
                call, (inputs, aliases), num_warmup_iters=0
            )
        for buffer, before in zip(self.network.buffers(), buffers, strict=True):
            buffer.copy_(before)  # what the trial passes have counted
        return graphed


def _warm_up(call: Callable[[], Tensor], parameters: tuple[Tensor, ...]) -> None:
    """Makes some passes beside the current stream, in which libraries choose their
    kernels.

    They are always made on the same stream. `make_graphed_callables` would take a new
    one for each capture, and every new one cost 65 MiB for good (measured on an H200;
    cuBLAS keeps a workspace for each stream).
    """
    here = torch.cuda.current_stream()
    side = _side_stream(here.device)
    side.wait_stream(here)
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            answer = call()
            torch.autograd.grad(
                answer,
                [p for p in parameters if p.requires_grad],
                torch.ones_like(answer),
            )
    here.wait_stream(side)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def uncaptured(options: ServerOptions, batching: Batching) -> str | None:
    """Why steps on a GPU are launched kernel by kernel and not as captured graphs; None
    where they are captured.
    """
    if options.zero_stage == 3:
        return "ZeRO 3 fetches and frees parameters within a pass"
    if options.server_checkpointing:
        return "--server-checkpointing computes activations anew within a pass"
    if batching.accumulation > 1:
        return "gradients accumulate over micro-batches"
    return None


def _callable(
    network: nn.Module, options: ServerOptions, batching: Batching, place: Place
) -> nn.Module:
    """What the loop calls: on a GPU the captured network where that is right; elsewhere
    the network itself.
    """
    if place.device.type != "cuda":
        return network
    reason = uncaptured(options, batching)
    if reason is None and batching.shared and _norms(network):
        reason = f"ranks share batch norm's statistics (--server-micro-batch {batching.micro} has each its own)"
    if reason is None:
        return _Captured(network)
    if place.rank == 0:
        _say_once(
            f"server: steps run uncaptured, so that small networks wait for launches: {reason}"
        )
    return network


@cache
def _say_once(line: str) -> None:
    remark(line)


class Plain:
    def __init__(
        self,
        network: nn.Module,
        options: ServerOptions,
        batching: Batching,
        place: Place,
        *,
        steps: int,
    ) -> None:
        self.network = network.to(place.device)
        self._called = _callable(network, options, batching, place)
        self._accumulation = batching.accumulation
        self._bf16 = options.server_precision == "bf16"
        self._device = place.device
        self._optimizer = _adamw(network, options, place.device)
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, cosine(steps)
        )
        self._done = 0

    def fit(self, loss: Loss, steps: int, told: Callable[[int], None]) -> np.ndarray:
        losses = torch.zeros(steps, device=self._device)
        self.network.train()
        norms = _norms(self.network)
        for step in range(steps):
            for micro in range(self._accumulation):
                _weigh(norms, micro, self._accumulation)
                with torch.autocast(
                    self._device.type, torch.bfloat16, enabled=self._bf16
                ):
                    value = (
                        loss(self._called, self._done + step, micro)
                        / self._accumulation
                    )
                value.backward()
                losses[step] += value.detach()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._scheduler.step()
            told(step + 1)
            if _look(step) and not bool(losses.isfinite().all()):
                break
        self._done += steps
        self.network.eval()
        return losses.double().cpu().numpy()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return (
            (name, tensor.detach().float())
            for name, tensor in self.network.state_dict().items()
        )

    def save(self) -> tuple[dict[str, Tensor], Moments]:
        tensors = {name: _copy(tensor) for name, tensor in self.tensors()}
        state = self._optimizer.state
        moments = {
            name: {kind: _copy(state[p][kind]) for kind in MOMENTS}
            for name, p in self.network.named_parameters()
            if p in state
        }
        return tensors, moments

    def load(
        self, tensors: dict[str, Tensor], moments: Moments, steps: int, loss: Loss
    ) -> None:
        self.network.load_state_dict(tensors)
        for name, p in self.network.named_parameters():
            if name in moments:
                self._optimizer.state[p] = _state(
                    self._optimizer, p, moments[name], steps
                )
        _advance(self._scheduler, steps)
        self._done = steps

    def gathered(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def close(self) -> None: ...


class DeepSpeed:
    def __init__(
        self,
        network: nn.Module,
        options: ServerOptions,
        batching: Batching,
        place: Place,
        *,
        steps: int,
    ) -> None:
        deepspeed = _deepspeed(place)
        self.network = network.to(place.device)
        self._batching, self._place, self._stage = batching, place, options.zero_stage
        if batching.shared:
            share_statistics(network)
        optimizer = _adamw(network, options, place.device)
        with _silently(), _one_local_rank():
            self._engine, self._optimizer, _, self._scheduler = deepspeed.initialize(
                args=SimpleNamespace(device_rank=place.device.index or 0),
                model=_callable(network, options, batching, place),
                optimizer=optimizer,
                lr_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(
                    o, cosine(steps)
                ),
                config=configuration(options, batching, num_parameters(network)),
                dist_init_required=False,
            )
        for buffer in network.buffers():
            if buffer.is_floating_point():
                buffer.data = (
                    buffer.data.float()
                )  # batch norm's statistics stay as they were
        self._done = 0

    def fit(self, loss: Loss, steps: int, told: Callable[[int], None]) -> np.ndarray:
        losses = torch.zeros(steps, device=self._place.device)
        self._engine.train()
        norms = _norms(self.network)
        for step in range(steps):
            for turn in range(self._batching.accumulation):
                _weigh(norms, turn, self._batching.accumulation)
                micro = turn * self._place.size + self._place.rank
                value = loss(self._engine, self._done + step, micro)
                self._engine.backward(value)
                self._engine.step()
                losses[step] += value.detach().float() / self._batching.accumulation
            told(step + 1)
            if _look(step) and not self._finite(losses):
                break
        self._done += steps
        self._engine.eval()
        self._agree()
        mean = losses / self._place.size
        process_group.allreduce(mean)
        return mean.double().cpu().numpy()

    def _finite(self, losses: Tensor) -> bool:
        """Return whether the losses of all ranks are finite; every rank gets the same
        answer.
        """
        bad = (~losses.isfinite()).sum()
        process_group.allreduce(bad)
        return not bool(bad)

    def _agree(self) -> None:
        """Batch norm may have seen other samples on every rank; its statistics become
        the mean over ranks.
        """
        if self._place.size > 1:
            for buffer in self.network.buffers():
                if buffer.is_floating_point():
                    process_group.allreduce(buffer)
                    buffer /= self._place.size

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        from deepspeed.utils import safe_get_full_fp32_param

        yield from (
            (name, buffer.detach().float())
            for name, buffer in self.network.named_buffers()
        )
        for name, p in self.network.named_parameters():
            yield name, (p if self._whole else safe_get_full_fp32_param(p)).detach()

    def save(self) -> tuple[dict[str, Tensor], Moments]:
        from deepspeed.utils import safe_get_full_optimizer_state

        tensors = {name: _copy(tensor) for name, tensor in self.tensors()}
        moments: Moments = {}
        for name, p in self.network.named_parameters():
            if self._whole:
                state = self._optimizer.state.get(p, {})
            else:
                kinds = (
                    MOMENTS if self._done else ()
                )  # before the first step there are none to ask for
                state = {kind: safe_get_full_optimizer_state(p, kind) for kind in kinds}
            if all(state.get(kind) is not None for kind in MOMENTS):
                moments[name] = {kind: _copy(state[kind]) for kind in MOMENTS}
        return tensors, moments

    @property
    def _whole(self) -> bool:
        """Every rank has the optimiser as torch knows it."""
        return isinstance(self._optimizer, torch.optim.AdamW)

    def load(
        self, tensors: dict[str, Tensor], moments: Moments, steps: int, loss: Loss
    ) -> None:
        if (
            moments and not self._whole
        ):  # DeepSpeed's optimisers have nothing to set before their first step
            self.fit(loss, 1, lambda step: None)
        with torch.no_grad(), self.gathered(change=True):
            for name, tensor in [
                *self.network.named_buffers(),
                *self.network.named_parameters(),
            ]:
                tensor.copy_(tensors[name])
        for name, p in self.network.named_parameters():
            own = moments.get(name, {})
            if self._whole and own:
                self._optimizer.state[p] = _state(self._optimizer, p, own, steps)
            elif not self._whole:
                self._set(p, tensors[name])
                for kind, moment in own.items():
                    self._set(p, moment, kind)
        if not self._whole:
            for state in self._optimizer.optimizer.state.values():
                state["step"].fill_(float(steps))
        _advance(self._scheduler, steps)
        self._done = steps

    def _set(self, p: nn.Parameter, value: Tensor, moment: str | None = None) -> None:
        """The float32 parameter that ZeRO keeps, or one of its moments."""
        from deepspeed import utils

        value = value.to(p.device)
        if self._stage < 3:
            if moment is None:
                utils.safe_set_full_fp32_param(p, value)
            else:
                utils.safe_set_full_optimizer_state(p, value, moment)
            return
        share = utils.safe_get_local_fp32_param(
            p
        ).numel()  # the same on all ranks, so the last one's is padded
        padded = nn.functional.pad(
            value.flatten(), (0, share * self._place.size - value.numel())
        )
        own = padded[self._place.rank * share :][:share]
        if moment is None:
            utils.safe_set_local_fp32_param(p, own)
        else:
            utils.safe_set_local_optimizer_state(p, own, moment)

    def close(self) -> None:
        self._engine.destroy()  # or hooks that only autograd knows of would keep all of it for ever
        if self._stage == 3:
            _forget(self.network)

    @contextlib.contextmanager
    def gathered(self, *, change: bool = False) -> Iterator[None]:
        """`change` keeps what the first rank makes of the parameters."""
        if self._stage < 3:
            yield
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters(
            list(self.network.parameters()), modifier_rank=0 if change else None
        ):
            yield


def configuration(
    options: ServerOptions, batching: Batching, parameters: int
) -> dict[str, Any]:
    """What DeepSpeed is told about a network of so many parameters."""
    bf16 = options.server_precision == "bf16"
    bucket = min(-(-parameters // BUCKET_UNIT) * BUCKET_UNIT, BUCKET)
    zero: dict[str, Any] = {
        "stage": options.zero_stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "stage3_prefetch_bucket_size": bucket // 10,
        "stage3_max_live_parameters": 2 * bucket,
        "stage3_max_reuse_distance": 2 * bucket,
    }
    if options.server_offload != "none":
        zero["offload_optimizer"] = {
            "device": "cpu",
            "pin_memory": torch.cuda.is_available(),
        }
    if options.server_offload == "parameters":
        zero["offload_param"] = {
            "device": "cpu",
            "pin_memory": torch.cuda.is_available(),
        }
    return {
        "train_batch_size": batching.batch,
        "train_micro_batch_size_per_gpu": batching.micro,
        "gradient_accumulation_steps": batching.accumulation,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's AdamW serves, and needs no compiler
        "bf16": {
            "enabled": bf16 and options.zero_stage > 0
        },  # ZeRO keeps a float32 copy of bfloat16 parameters
        "torch_autocast": {
            "enabled": bf16 and not options.zero_stage,
            "dtype": "bfloat16",
        },
        "gradient_clipping": 0.0,  # some of its versions clip at 1 when nothing is said
        "steps_per_print": 2**31,
        "timers": {
            "throughput": {"enabled": False}
        },  # it would wait for the device twice a step
    }


def _look(step: int) -> bool:
    """Return whether losses are looked at after this step."""
    return (step + 1) % LOOK_EVERY == 0


def _norms(network: nn.Module) -> list[nn.BatchNorm1d]:
    return [
        module for module in network.modules() if isinstance(module, nn.BatchNorm1d)
    ]


def _weigh(norms: list[nn.BatchNorm1d], turn: int, turns: int) -> None:
    """All micro-batches of a step count alike in the running statistics, and together
    as much as one batch does.

    Ranks average their statistics, so this makes accumulated passes the same as ranks.
    """
    share = NORM_MOMENTUM / turns
    for norm in norms:
        norm.momentum = share / (1 - share * (turns - 1 - turn))


def _advance(scheduler: Any, steps: int) -> None:
    """As after so many steps; its own `step` would warn that the optimiser has made
    none.
    """
    scheduler.last_epoch = steps
    for group, base, factor in zip(
        scheduler.optimizer.param_groups,
        scheduler.base_lrs,
        scheduler.lr_lambdas,
        strict=True,
    ):
        group["lr"] = base * factor(steps)


def _state(
    optimizer: torch.optim.AdamW,
    p: nn.Parameter,
    moments: dict[str, Tensor],
    steps: int,
) -> dict[str, Tensor]:
    """What AdamW keeps of a parameter; the fused one counts steps on the parameter's
    device, others on the host.
    """
    count = torch.tensor(
        float(steps), device=p.device if optimizer.defaults["fused"] else "cpu"
    )
    return {
        "step": count,
        **{kind: moments[kind].to(p.device, p.dtype) for kind in MOMENTS},
    }


def _copy(tensor: Tensor) -> Tensor:
    """On the host, and not what goes on changing."""
    return tensor.detach().to("cpu", torch.float32, copy=True)


def _forget(network: nn.Module) -> None:
    """Has DeepSpeed let go of a network that ZeRO 3 has trained, and with it of its
    engine, weights and moments.

    DeepSpeed puts every such network on a list of modules and takes none off it, and
    caches calls of methods, whose arguments are modules. Both would last as long as the
    process.
    """
    offload = sys.modules.get("deepspeed.runtime.zero.parameter_offload")
    modules = getattr(offload, "FWD_MODULE_STACK", None)
    if isinstance(modules, list):
        modules[:] = [module for module in modules if module is not network]
    for one in gc.get_objects():
        if type(one) is _LruCache and str(one.__module__).startswith(
            "deepspeed.runtime.zero"
        ):
            one.cache_clear()


def _deepspeed(place: Place) -> Any:
    """DeepSpeed, in a process group that exists, without its remarks."""
    os.environ.setdefault("DS_ACCELERATOR", place.device.type)
    os.environ["LOCAL_RANK"] = str(
        place.device.index or 0
    )  # ZeRO 3 takes it for the number of the device
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with _silently():
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        # Said of a group of one rank, which has only its own device to use.
        warnings.filterwarnings(
            "ignore", r"barrier\(\): using the device under current context"
        )
        # Serves inference alone, and would be compiled for a minute, by a compiler that
        # may not be there.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(
            dist_backend=process_group.backend(),
            dist_init_required=False,
            verbose=False,
            auto_mpi_discovery=False,
        )
    return deepspeed


@contextlib.contextmanager
def _one_local_rank() -> Iterator[None]:
    """Within, Open MPI's number of this rank on its node is out of sight.

    DeepSpeed refuses to start where it differs from LOCAL_RANK, which has to be the
    device's number: ranks may share a device, and a rank may see no other than its own.
    """
    name = "OMPI_COMM_WORLD_LOCAL_RANK"
    launchers = os.environ.pop(name, None)
    try:
        yield
    finally:
        if launchers is not None:
            os.environ[name] = launchers


@contextlib.contextmanager
def _silently() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()):
        yield
