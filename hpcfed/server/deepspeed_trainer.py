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

from hpcfed.runtime import accelerator, process_group
from hpcfed.server.batch_norm import norms_of, share_statistics, weigh_micro_batch
from hpcfed.server.capture import captured_if_possible
from hpcfed.server.networks import ServerNetwork, num_parameters
from hpcfed.server.options import ServerOptions
from hpcfed.server.sizes import Batching
from hpcfed.server.tiles import TILE, joined
from hpcfed.server.trainer import (
    MOMENTS,
    Loss,
    Part,
    Parts,
    StepProgress,
    adamw,
    advance,
    begin_moments,
    buffers_of_ranks,
    check_is_due,
    cosine_schedule,
    overwrite,
    restore_buffers,
)
from hpcfed.server.training_plan import TrainingPlan
from hpcfed.server.zero_memory import BUCKET, bucket_size, live_size

_LruCache = type(cache(lambda: None))


class DeepSpeedTrainer:
    """A network in a DeepSpeed engine, on any number of server ranks."""

    def __init__(self, network: nn.Module, plan: TrainingPlan) -> None:
        deepspeed = import_deepspeed(plan.slot.device)
        self.network = network
        self._batching = plan.batching
        self._slot = plan.slot
        self._stage = plan.options.zero_stage
        if plan.batching.shared:
            share_statistics(network)
        config = configuration(plan.options, plan.batching, num_parameters(network))
        with _silently(), _without_local_rank():
            if self._stage == 3:
                _share_out(network, config, plan)
            else:
                network.to(plan.slot.device)
            self._engine, self._optimizer, _, self._schedule = deepspeed.initialize(
                args=SimpleNamespace(device_rank=plan.slot.device.index or 0),
                model=captured_if_possible(network, plan),
                optimizer=adamw(_groups(network, plan), plan.options, plan.slot.device),
                lr_scheduler=lambda wrapped: cosine_schedule(wrapped, plan.steps),
                config=config,
                dist_init_required=False,
            )
        # DeepSpeed casts everything to bfloat16, but batch norm's statistics would
        # hardly move in it.
        for buffer in _float_buffers(network):
            buffer.data = buffer.data.float()
        self._done = 0

    def fit(self, loss: Loss, steps: int, progress: StepProgress) -> np.ndarray:
        first = self._done
        losses = torch.zeros(first + steps, device=self._slot.device)
        accumulation = self._batching.accumulation
        self._engine.train()
        norms = norms_of(self.network)
        for step in range(first, first + steps):
            for turn in range(accumulation):
                weigh_micro_batch(norms, turn, accumulation)
                # Micro-batches are numbered across ranks, so that each is drawn once.
                micro = turn * self._slot.size + self._slot.rank
                value = loss(self._engine, step, micro)
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
        mean = losses[first:] / self._slot.size
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
        for name, buffer in self.network.named_buffers():
            yield name, buffer.detach().float()
        yield from joined(self._parameters())

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole parameters in float32, those of tiles by tile."""
        from deepspeed.utils import safe_get_full_fp32_param

        for name, p in self.network.named_parameters():
            if self._shares:
                yield name, safe_get_full_fp32_param(p).detach()
            else:
                yield name, p.detach()

    def state(self) -> Iterator[Part]:
        from deepspeed.utils import safe_get_full_optimizer_state

        # Tile by tile: this stage's trainer has the same tiles on any number of ranks.
        for name, tensor in self._parameters():
            yield "parameters", name, tensor
        for name, p in self.network.named_parameters():
            for moment in MOMENTS:
                if self._shares:
                    yield moment, name, safe_get_full_optimizer_state(p, moment)
                else:
                    yield moment, name, self._optimizer.state[p][moment]
        yield from buffers_of_ranks(self.network, self._slot)

    def resume(self, done: int, state: Parts) -> None:
        self._done = done
        advance(self._schedule, done)
        if not self._shares:
            begin_moments(self._optimizer, self.network.parameters(), done)
        else:
            begin_moments(self._optimizer.optimizer, self._masters(), done)
        if self._stage in (1, 2):
            # Otherwise ZeRO finds moments only after its first step.
            self._optimizer._lazy_init_hp_params_optimizer_state()
        for name, p in self.network.named_parameters():
            self._restore(p, name, state)
        restore_buffers(self.network, self._slot, state)

    @property
    def _shares(self) -> bool:
        """Whether ZeRO shares out the optimiser's state. Otherwise DeepSpeed keeps
        torch's optimiser, and every rank has whole parameters.
        """
        return not isinstance(self._optimizer, torch.optim.AdamW)

    def _masters(self) -> Iterator[Tensor]:
        """Yield this rank's share of the parameters, as ZeRO's optimiser has it."""
        if self._stage == 3:
            yield from self._optimizer.fp32_partitioned_groups_flat
            return
        for group in self._optimizer.optimizer.param_groups:
            yield from group["params"]

    def _restore(self, p: nn.Parameter, name: str, state: Parts) -> None:
        """Overwrite a parameter and its moments, in place: a captured graph keeps
        parameters' addresses.
        """
        import deepspeed
        from deepspeed import utils

        value = state("parameters", name).to(self._slot.device)
        if self._stage < 3:
            overwrite(p.data, value)
        else:
            with deepspeed.zero.GatheredParameters([p], modifier_rank=0):
                overwrite(p.data, value)
        for moment in MOMENTS:
            whole = state(moment, name).to(self._slot.device)
            if whole.shape != value.shape:
                raise ValueError(f"{moment} of {name} has another shape")
            if not self._shares:
                self._optimizer.state[p][moment].copy_(whole)
            elif self._stage < 3:
                utils.safe_set_full_optimizer_state(p, whole, moment)
            else:
                share = self._share_of(p, whole)
                utils.safe_set_local_optimizer_state(p, share, moment)
        # ZeRO's own copy, in float32.
        if self._shares and self._stage < 3:
            utils.safe_set_full_fp32_param(p, value)
        elif self._shares:
            utils.safe_set_local_fp32_param(p, self._share_of(p, value))

    def _share_of(self, p: Any, whole: Tensor) -> Tensor:
        """Return this rank's share of a tensor, as ZeRO 3 cuts it: DeepSpeed's setter of
        whole ones fails where ranks do not divide their length.
        """
        each = p.ds_tensor.numel()
        padded = whole.new_zeros(each * self._slot.size)
        padded[: whole.numel()] = whole.flatten()
        return padded[each * self._slot.rank :][:each]

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
    bucket, live = bucket_size(parameters), live_size(parameters)
    zero: dict[str, Any] = {
        "stage": options.zero_stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "stage3_prefetch_bucket_size": bucket // 10,
        "stage3_max_live_parameters": live,
        "stage3_max_reuse_distance": live,
        # Gradients become float32 one group after the other. By default ZeRO 3 would
        # take a billion numbers at once.
        "sub_group_size": BUCKET,
    }
    host = {"device": "cpu", "pin_memory": accelerator.kind() is not None}
    if options.server_offload != "none":
        zero["offload_optimizer"] = dict(host)
    if options.server_offload == "parameters":
        zero["offload_param"] = dict(host)
    return zero


def _share_out(network: nn.Module, config: dict[str, Any], plan: TrainingPlan) -> None:
    """Leave each rank its share of every parameter, for ZeRO 3.

    Parameters pass through the device one after the other, in the precision in which
    ZeRO keeps them. `initialize` would first move the whole network there.
    """
    import deepspeed

    if isinstance(network, ServerNetwork):
        network.cut_large_layers(TILE)
    dtype = torch.bfloat16 if config["bf16"]["enabled"] else torch.float32
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype)
    for buffer in network.buffers():
        buffer.data = buffer.data.to(plan.slot.device)
    deepspeed.zero.Init(module=network, config_dict_or_path=config)


def _groups(network: nn.Module, plan: TrainingPlan) -> list[dict[str, Any]]:
    """Return the parameters in groups. ZeRO 1 and 2 join a group's gradients and convert
    them to float32 at once, so groups are small. ZeRO 3 makes its own.
    """
    parameters = list(network.parameters())
    if plan.options.zero_stage not in (1, 2):
        return [{"params": parameters}]
    # A rank holds the gradient of a parameter as a whole, even if it updates only a
    # part of it. So its share of a group has room for several parameters.
    largest = max(parameter.numel() for parameter in parameters)
    most = plan.slot.size * max(BUCKET, 4 * largest)
    groups: list[list[nn.Parameter]] = [[]]
    held = 0
    for parameter in parameters:
        if groups[-1] and held + parameter.numel() > most:
            groups.append([])
            held = 0
        groups[-1].append(parameter)
        held += parameter.numel()
    return [{"params": group} for group in groups]


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
