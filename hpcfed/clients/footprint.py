"""What clients over a frozen network take on a device: estimated before the first step."""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import nn

from hpcfed.clients.stacks import MATRICES, MEMORY_SHARE
from hpcfed.errors import UserError
from hpcfed.models.blocks import find_blocks, is_large
from hpcfed.models.cost import Kept
from hpcfed.models.forward import Forward
from hpcfed.models.frozen import HALF, place_of
from hpcfed.models.layout import Layout
from hpcfed.models.stack import StackedNetwork
from hpcfed.runtime import accelerator
from hpcfed.words import bytes_text

FLOAT = 4
Checkpointing = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class Footprint:
    """Bytes on a device."""

    base: float
    """The frozen network."""
    parameters: int
    """Its numbers."""
    row: float
    """A client's row."""
    training: float
    """What a client takes beside its row in training: gradient, moments, copies."""
    activations: float
    """Activations of a client's step."""
    batch_size: int
    free: float = 0.0
    """What the device has for clients beside the network; 0: unknown."""
    recomputes: bool = False
    """Whether blocks compute their activations again."""

    @property
    def client(self) -> float:
        """The bytes of a client in training."""
        return self.row + self.training + self.activations

    @property
    def clients_fit(self) -> float:
        """How many clients fit at a time; less than 1 if a client may not."""
        return MEMORY_SHARE * self.free / self.client

    def __str__(self) -> str:
        precision = "bfloat16" if self.base == HALF * self.parameters else "float32"
        again = ", computed again by blocks" if self.recomputes else ""
        said = (
            f"memory, estimated: {bytes_text(self.base)} for the frozen network of "
            f"{self.parameters / 1e9:.3g} billion parameters in {precision}; for each "
            f"client {bytes_text(self.row)} of adapters, {bytes_text(self.training)} of "
            f"gradients, moments and copies, {bytes_text(self.activations)} of "
            f"activations in a step of {self.batch_size}{again}"
        )
        if not self.free:
            return said
        said += f"; {bytes_text(self.free)} are free: "
        if self.clients_fit >= 1:
            return said + f"up to {int(self.clients_fit):,} at a time"
        return said + "one at a time, if it fits at all; a smaller --batch-size does"


def footprint(
    network: nn.Module, layout: Layout, size: int, activations: float, batch_size: int
) -> Footprint | None:
    """Return what clients take; None unless they share a large frozen network, whose
    weights have `size` bytes each. `activations` are the floats of a client's step.
    """
    frozen = sum(p.numel() for p in network.parameters() if not p.requires_grad)
    columns = layout.num_columns
    if not is_large(network) or frozen <= columns:
        return None
    return Footprint(
        base=size * frozen,
        parameters=frozen,
        row=FLOAT * columns,
        # Adam has two moments, which is one more than a stack has anyway.
        training=FLOAT * MATRICES * columns,
        activations=FLOAT * activations,
        batch_size=batch_size,
    )


class PlannedStep(NamedTuple):
    """How clients will train."""

    footprint: Footprint | None
    """None unless they share a large frozen network."""
    activations: int
    """Floats that a pass keeps of a sample."""


def planned_step(
    network: nn.Module,
    forward: Forward,
    kept: Kept,
    *,
    layout: Layout,
    asked: Checkpointing,
    copies: float,
    batch_size: int,
    device: torch.device,
) -> PlannedStep:
    """Let blocks compute activations again if that is asked for, or if a client's step
    would not fit otherwise.
    """
    size = HALF if forward.over_halves else FLOAT
    activations = copies * batch_size * kept.total
    found = footprint(network, layout, size, activations, batch_size)
    if found is not None and accelerator.is_gpu(device):
        # What the trial has left, and nothing uses any more.
        accelerator.return_memory()
        free = accelerator.free_memory(device)
        # A base that came in bfloat16 and computes in float32 has yet to be widened.
        there, kept_type = place_of(network)
        arrived = accelerator.is_gpu(there) and size == kept_type.itemsize
        rest = free if arrived else max(1.0, free - found.base)
        found = replace(found, free=rest)
    blocks = find_blocks(network)
    if asked == "on" and (blocks is None or not isinstance(forward, StackedNetwork)):
        raise UserError(
            "--checkpoint-activations on: for blocks of a network of transformers "
            "(--model hf:DIR) whose clients pass it together"
        )
    needed = found is not None and found.free and found.clients_fit < 1
    if asked == "off" or (asked == "auto" and not needed):
        return PlannedStep(found, kept.total)
    if blocks is None or not isinstance(forward, StackedNetwork):
        return PlannedStep(found, kept.total)
    forward.recompute(blocks)
    if found is not None:
        smaller = FLOAT * copies * batch_size * kept.recomputed
        found = replace(found, activations=smaller, recomputes=True)
    return PlannedStep(found, kept.recomputed)


def too_large(parameters: int, size: int, free: float, *, gpu: bool = True) -> str:
    """Return why weights of `size` bytes each do not fit into the free memory of a GPU,
    or of the host; empty if they do.
    """
    if parameters * size <= free:
        return ""
    halves = ""
    if gpu and size > HALF and parameters * HALF <= free:
        halves = ", or these in bfloat16: --precision bf16"
    room = bytes_text(free)
    there = f"the device has {room} free" if gpu else f"this machine has {room}"
    return (
        f"{parameters / 1e9:.3g} billion parameters take "
        f"{bytes_text(parameters * size)}, and {there}; a network of "
        f"{free / size / 1e9:.2g} billion would fit{halves}"
    )
