"""Training through DeepSpeed: ZeRO's stages, offload and several server ranks."""

import contextlib
import gc
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hpcfed.runtime import process_group
from hpcfed.server.batch_norm import norms_of, share_statistics, weigh_micro_batch
from hpcfed.server.capture import captured_if_possible
from hpcfed.server.networks import num_parameters
from hpcfed.server.options import ServerOptions
from hpcfed.server.sizes import Batching
from hpcfed.server.trainer import (
    Loss,
    StepProgress,
    adamw,
    check_is_due,
    cosine_schedule,
)
from hpcfed.server.training_plan import TrainingPlan

BUCKET = 50_000_000
"""The most numbers that DeepSpeed sends at once. It allocates buffers of this size,
some of them twice.
"""
BUCKET_UNIT = 1024
"""Bucket sizes are multiples of this: DeepSpeed wants multiples of a small number."""
_LruCache = type(cache(lambda: None))


class DeepSpeedTrainer:
    """A network in a DeepSpeed engine, on any number of server ranks."""

    def __init__(self, network: nn.Module, plan: TrainingPlan) -> None:
        deepspeed = import_deepspeed(plan.slot.device)
        self.network = network.to(plan.slot.device)
        self._batching = plan.batching
        self._slot = plan.slot
        self._stage = plan.options.zero_stage
        if plan.batching.shared:
            share_statistics(network)
        parameters = num_parameters(network)
        with _silently(), _without_local_rank():
            self._engine, self._optimizer, _, _ = deepspeed.initialize(
                args=SimpleNamespace(device_rank=plan.slot.device.index or 0),
                model=captured_if_possible(network, plan),
                optimizer=adamw(network, plan.options, plan.slot.device),
                lr_scheduler=lambda wrapped: cosine_schedule(wrapped, plan.steps),
                config=configuration(plan.options, plan.batching, parameters),
                dist_init_required=False,
            )
        # DeepSpeed casts everything to bfloat16, but batch norm's statistics would
        # hardly move in it.
        for buffer in _float_buffers(network):
            buffer.data = buffer.data.float()
        self._done = 0

    def fit(self, loss: Loss, steps: int, progress: StepProgress) -> np.ndarray:
        losses = torch.zeros(steps, device=self._slot.device)
        accumulation = self._batching.accumulation
        self._engine.train()
        norms = norms_of(self.network)
        for step in range(steps):
            for turn in range(accumulation):
                weigh_micro_batch(norms, turn, accumulation)
                # Micro-batches are numbered across ranks, so that each is drawn once.
                micro = turn * self._slot.size + self._slot.rank
                value = loss(self._engine, self._done + step, micro)
                self._engine.backward(value)
                # It updates parameters only after the last accumulated pass.
                self._engine.step()
                losses[step] += value.detach().float() / accumulation
            progress(step + 1, losses)
            if check_is_due(step) and not self._all_finite(losses):
                break
        self._done += steps
        self._engine.eval()
        self._average_statistics()
        mean = losses / self._slot.size
        process_group.allreduce(mean)
        return mean.double().cpu().numpy()

    def _all_finite(self, losses: Tensor) -> bool:
        """Tell whether the losses of all ranks are finite; all ranks get the same
        answer.
        """
        bad = (~losses.isfinite()).sum()
        process_group.allreduce(bad)
        return not bool(bad)

    def _average_statistics(self) -> None:
        """Replace batch norm's statistics by their mean over ranks, since ranks may
        have seen different samples.
        """
        if self._slot.size == 1:
            return
        for buffer in _float_buffers(self.network):
            process_group.allreduce(buffer)
            buffer /= self._slot.size

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        from deepspeed.utils import safe_get_full_fp32_param

        for name, buffer in self.network.named_buffers():
            yield name, buffer.detach().float()
        for name, p in self.network.named_parameters():
            # Without ZeRO or bfloat16, DeepSpeed keeps torch's optimiser, and every
            # rank has whole parameters.
            if isinstance(self._optimizer, torch.optim.AdamW):
                yield name, p.detach()
            else:
                yield name, safe_get_full_fp32_param(p).detach()

    def close(self) -> None:
        # Otherwise hooks that only autograd holds would keep everything in memory.
        self._engine.destroy()
        if self._stage == 3:
            _forget(self.network)


def configuration(
    options: ServerOptions, batching: Batching, parameters: int
) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a network with this number of parameters."""
    bf16 = options.server_precision == "bf16"
    return {
        "train_batch_size": batching.batch,
        "train_micro_batch_size_per_gpu": batching.micro,
        "gradient_accumulation_steps": batching.accumulation,
        "zero_optimization": _zero_configuration(options, parameters),
        "zero_allow_untested_optimizer": True,
        # torch's AdamW is enough, and needs no compiler.
        "zero_force_ds_cpu_optimizer": False,
        # ZeRO keeps a float32 copy of bfloat16 parameters. Without ZeRO there would be
        # no copy, so torch casts in each operation instead.
        "bf16": {"enabled": bf16 and options.zero_stage > 0},
        "torch_autocast": {
            "enabled": bf16 and not options.zero_stage,
            "dtype": "bfloat16",
        },
        # Some versions clip at 1 by default.
        "gradient_clipping": 0.0,
        "steps_per_print": 2**31,
        # This timer would wait for the device twice per step.
        "timers": {"throughput": {"enabled": False}},
    }


def _zero_configuration(options: ServerOptions, parameters: int) -> dict[str, Any]:
    """Return ZeRO's stage, its bucket sizes, and what to offload to the host."""
    units = -(-parameters // BUCKET_UNIT)
    bucket = min(units * BUCKET_UNIT, BUCKET)
    zero: dict[str, Any] = {
        "stage": options.zero_stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "stage3_prefetch_bucket_size": bucket // 10,
        "stage3_max_live_parameters": 2 * bucket,
        "stage3_max_reuse_distance": 2 * bucket,
    }
    host = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if options.server_offload != "none":
        zero["offload_optimizer"] = dict(host)
    if options.server_offload == "parameters":
        zero["offload_param"] = dict(host)
    return zero


def import_deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed silently, for the existing process group."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    # ZeRO 3 uses it as the device number.
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with _silently():
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        # This warning is about a group of one rank, which only has its own device.
        warnings.filterwarnings(
            "ignore", r"barrier\(\): using the device under current context"
        )
        # This is only for inference. It would compile for a minute, and there may be no
        # compiler.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(
            dist_backend=process_group.backend(),
            dist_init_required=False,
            verbose=False,
            auto_mpi_discovery=False,
        )
    return deepspeed


def _float_buffers(network: nn.Module) -> list[Tensor]:
    """Return batch norm's statistics, without its integer counter of batches."""
    return [buffer for buffer in network.buffers() if buffer.is_floating_point()]


def _forget(network: nn.Module) -> None:
    """Make DeepSpeed release a network that ZeRO 3 has trained, and with it its engine,
    weights and moments.

    DeepSpeed appends every such network to a list of modules and never removes one. It
    also caches method calls whose arguments are modules. Both would hold the network
    until the process ends.
    """
    offload = sys.modules.get("deepspeed.runtime.zero.parameter_offload")
    modules = getattr(offload, "FWD_MODULE_STACK", None)
    if isinstance(modules, list):
        modules[:] = [module for module in modules if module is not network]
    for found in gc.get_objects():
        if type(found) is not _LruCache:
            continue
        if str(found.__module__).startswith("deepspeed.runtime.zero"):
            found.cache_clear()


@contextlib.contextmanager
def _without_local_rank() -> Iterator[None]:
    """Hide Open MPI's local rank on this node.

    DeepSpeed refuses to start if it differs from LOCAL_RANK. But LOCAL_RANK must be the
    device number: ranks may share a device, or a rank may see only its own device.
    """
    name = "OMPI_COMM_WORLD_LOCAL_RANK"
    hidden = os.environ.pop(name, None)
    try:
        yield
    finally:
        if hidden is not None:
            os.environ[name] = hidden


@contextlib.contextmanager
def _silently() -> Iterator[None]:
    """Discard output to stdout."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
