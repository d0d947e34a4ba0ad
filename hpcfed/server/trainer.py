"""Training of one of the server's networks by AdamW: the interface of a trainer, and a
plain loop of torch.

A step's samples and noise are drawn for the whole batch. Every rank takes its slice,
and batch norm computes its statistics over the whole batch. So any number of ranks
learns the same up to rounding. With --server-micro-batch each micro-batch is drawn and
normalised by itself, as in DeepSpeed without synchronised statistics. Its samples and
noise depend only on the seed, the step and its number. So any division of micro-batches
of this size among ranks and accumulated passes learns the same, but not the same as
whole batches.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from hpcfed.runtime import process_group
from hpcfed.runtime.accelerator import is_gpu
from hpcfed.server.batch_norm import norms_of, weigh_micro_batch
from hpcfed.server.capture import captured_if_possible
from hpcfed.server.options import ServerOptions
from hpcfed.server.training_plan import RankSlot, TrainingPlan

Loss = Callable[[Callable[..., Tensor], int, int], Tensor]
"""Returns the mean loss of (network, step, number of the micro-batch)."""
StepProgress = Callable[[int, Tensor], None]
"""Called after every step with steps done, also before `fit`, and with this rank's loss
of each, on the device; those of steps before `fit` are zero.
"""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps of every parameter, in torch's words, beside the number of steps."""
Part = tuple[str, str, Tensor]
"""A part of a trainer's state: `parameters`, `buffers` or a moment; the name in the
network; and a whole tensor.
"""
Parts = Callable[[str, str], Tensor]
"""Returns the part of this kind and name."""
CHECK_EVERY = 500
"""Steps between two checks that losses are finite; each waits for the device."""


class Trainer(Protocol):
    """One network and its optimiser. Calls are collective over the server's ranks."""

    network: nn.Module

    def fit(self, loss: Loss, steps: int, progress: StepProgress) -> np.ndarray:
        """Make `steps` more steps, and return the loss of each, over all ranks.

        Stop soon after a loss that is not finite. The losses of steps that were not
        made are zero.
        """

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Return whole parameters and buffers in float32 by name, on the device. They
        may share memory with the network and change with it.
        """

    def state(self) -> Iterator[Part]:
        """Yield everything that further steps depend on, except their number."""

    def resume(self, done: int, state: Parts) -> None:
        """Go on after this number of steps, with the state that a trainer had then, on
        any number of ranks. Call it before any step.
        """

    def close(self) -> None:
        """Release the optimiser; what `tensors` has returned stays valid."""


def adamw(
    parameters: ParamsT, options: ServerOptions, device: torch.device
) -> torch.optim.AdamW:
    """Return the optimiser of a network's parameters: the fused one on a GPU, unless it
    is offloaded to the host.
    """
    fused = is_gpu(device) and options.server_offload == "none"
    return torch.optim.AdamW(
        parameters,
        lr=options.size.lr,
        weight_decay=options.server_decay,
        fused=fused,
    )


def cosine_schedule(
    optimizer: torch.optim.Optimizer, steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Return a schedule that lowers the learning rate to zero along half a cosine."""

    def factor(step: int) -> float:
        # The scheduler asks once more after the last step.
        angle = math.pi * min(step, steps) / steps
        return 0.5 * (1 + math.cos(angle))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def begin_moments(
    optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor], done: int
) -> None:
    """Give AdamW the state that it would make in its first step, with moments of zero,
    but after this number of steps.
    """
    fused = bool(optimizer.param_groups[0]["fused"])
    for p in parameters:
        place = p.device if fused else None
        optimizer.state[p] = {
            "step": torch.tensor(float(done), device=place),
            **{moment: torch.zeros_like(p) for moment in MOMENTS},
        }


def advance(schedule: torch.optim.lr_scheduler.LambdaLR, done: int) -> None:
    """Set the learning rate to that after this number of steps."""
    # Not by `step`: torch would warn that the optimiser has made none.
    schedule.last_epoch = done
    groups = schedule.optimizer.param_groups
    for group, lr, factor in zip(
        groups, schedule.base_lrs, schedule.lr_lambdas, strict=True
    ):
        group["lr"] = lr * factor(done)


def overwrite(there: Tensor, value: Tensor) -> None:
    """Copy a value of the same shape; `copy_` would stretch another."""
    if there.shape != value.shape:
        raise ValueError(f"{tuple(value.shape)} for {tuple(there.shape)} numbers")
    there.copy_(value)


def buffers_of_ranks(network: nn.Module, slot: RankSlot) -> Iterator[Part]:
    """Yield all ranks' buffers, stacked: with --server-micro-batch each rank has seen
    samples of its own.
    """
    for name, buffer in network.named_buffers():
        everyones = buffer.new_zeros(slot.size, *buffer.shape)
        everyones[slot.rank] = buffer
        if slot.size > 1:
            process_group.allreduce(everyones)
        yield "buffers", name, everyones


def restore_buffers(network: nn.Module, slot: RankSlot, state: Parts) -> None:
    """Overwrite the buffers; on another number of ranks each gets their mean, to which
    they are averaged in the end.
    """
    for name, buffer in network.named_buffers():
        everyones = state("buffers", name)
        if len(everyones) == slot.size:
            overwrite(buffer, everyones[slot.rank])
        else:
            overwrite(buffer, everyones.double().mean(0))


def check_is_due(step: int) -> bool:
    """Tell whether to check losses after this step."""
    return (step + 1) % CHECK_EVERY == 0


class PlainTrainer:
    """A plain loop of torch on one rank, to compare DeepSpeed with."""

    def __init__(self, network: nn.Module, plan: TrainingPlan) -> None:
        device = plan.slot.device
        self.network = network.to(device)
        # Capture after the move to the device: a graph keeps parameters' addresses.
        self._called = captured_if_possible(network, plan)
        self._accumulation = plan.batching.accumulation
        self._bf16 = plan.options.server_precision == "bf16"
        self._device = device
        self._slot = plan.slot
        self._optimizer = adamw(network.parameters(), plan.options, device)
        self._scheduler = cosine_schedule(self._optimizer, plan.steps)
        self._done = 0

    def fit(self, loss: Loss, steps: int, progress: StepProgress) -> np.ndarray:
        first = self._done
        losses = torch.zeros(first + steps, device=self._device)
        self.network.train()
        norms = norms_of(self.network)
        for step in range(first, first + steps):
            for micro in range(self._accumulation):
                weigh_micro_batch(norms, micro, self._accumulation)
                value = self._forward(loss, step, micro)
                value.backward()
                # Keep it on the device: reading it would make the host wait every step.
                losses[step] += value.detach()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._scheduler.step()
            progress(step + 1, losses)
            if check_is_due(step):
                finite = losses.isfinite().all()
                if not bool(finite):
                    break
        self._done += steps
        self.network.eval()
        return losses[first:].double().cpu().numpy()

    def _forward(self, loss: Loss, step: int, micro: int) -> Tensor:
        """Return a micro-batch's share of the step's loss."""
        device = self._device.type
        with torch.autocast(device, torch.bfloat16, enabled=self._bf16):
            mean = loss(self._called, step, micro)
            # Gradients add up over micro-batches, so divide to get their mean.
            return mean / self._accumulation

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.network.state_dict().items():
            yield name, tensor.detach().float()

    def state(self) -> Iterator[Part]:
        for name, p in self.network.named_parameters():
            yield "parameters", name, p.detach()
            for moment in MOMENTS:
                yield moment, name, self._optimizer.state[p][moment]
        yield from buffers_of_ranks(self.network, self._slot)

    def resume(self, done: int, state: Parts) -> None:
        self._done = done
        advance(self._scheduler, done)
        begin_moments(self._optimizer, self.network.parameters(), done)
        # In place: a captured graph keeps parameters' addresses.
        for name, p in self.network.named_parameters():
            overwrite(p.data, state("parameters", name))
            for moment in MOMENTS:
                overwrite(self._optimizer.state[p][moment], state(moment, name))
        restore_buffers(self.network, self._slot, state)

    def close(self) -> None: ...
