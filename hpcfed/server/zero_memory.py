"""What training a network takes of a server rank's device by its ZeRO stage, and the
sizes of DeepSpeed's buffers, on which that depends; imports no torch.
"""

from dataclasses import dataclass
from math import ceil

from hpcfed.server.options import ServerOptions

BUCKET = 50_000_000
"""The most numbers that DeepSpeed sends, gathers or updates at once. It allocates
buffers of this size, some of them twice.
"""
BUCKET_UNIT = 1024
"""Bucket sizes are multiples of this: DeepSpeed wants multiples of a small number."""
PLAIN_BUCKET = 500_000_000
"""The numbers that DeepSpeed sends at once without ZeRO. It cannot be set."""
SHARED_FROM = {"optimizer": 1, "gradients": 2, "parameters": 3}
"""The ZeRO stage from which ranks share a part."""


@dataclass(frozen=True)
class MemoryPromise:
    """Bytes on the device of a server rank. Activations come on top."""

    parameters: float
    gradients: float
    optimizer: float
    """AdamW's two moments, with ZeRO also the float32 parameters that it updates."""
    buffers: float
    """What is gathered, sent or updated at once."""

    @property
    def total(self) -> float:
        """All bytes."""
        return self.parameters + self.gradients + self.optimizer + self.buffers


def promised_memory(
    parameters: int, options: ServerOptions, ranks: int
) -> MemoryPromise:
    """Return what training a network with this number of parameters takes."""
    stage = options.zero_stage
    in_bf16 = options.server_precision == "bf16"
    number = 2 if in_bf16 and stage else 4
    each = {"parameters": number, "gradients": number, "optimizer": 12 if stage else 8}
    held = {}
    for part, size in each.items():
        shared = stage >= SHARED_FROM[part]
        held[part] = size * parameters / (ranks if shared else 1)
    # Offload is a part of ZeRO.
    if stage and options.server_offload != "none":
        held["optimizer"] = 0.0
        # Shared gradients go to the host as soon as they are reduced.
        if stage >= SHARED_FROM["gradients"]:
            held["gradients"] = 0.0
    if stage == 3 and options.server_offload == "parameters":
        held["parameters"] = 0.0
    if stage:
        buffers = _buffers(parameters, stage, ranks, number)
    else:
        # Gradients are averaged in a copy, also on one rank. Autocast keeps a copy of
        # all weights, but only until their gradients are there.
        in_pass = 2 * parameters if in_bf16 else 0
        buffers = max(in_pass, 4 * min(parameters, PLAIN_BUCKET))
    return MemoryPromise(**held, buffers=buffers)


def _buffers(parameters: int, stage: int, ranks: int, number: int) -> int:
    """Return the bytes of ZeRO's buffers, for numbers of this many bytes."""
    bucket = bucket_size(parameters)
    # A bucket of gradients, and its copy that is sent.
    in_backward = 2 * number * bucket
    if stage == 3:
        in_backward += number * min(parameters, live_size(parameters))
    # The gradients of one group of parameters, joined and in float32.
    in_step = (number + 4) * min(BUCKET, ceil(parameters / ranks))
    return max(in_backward, in_step)


def bucket_size(parameters: int) -> int:
    """Return the size of DeepSpeed's buckets for a network."""
    units = -(-parameters // BUCKET_UNIT)
    return min(units * BUCKET_UNIT, BUCKET)


def live_size(parameters: int) -> int:
    """Return how many parameters ZeRO 3 may hold gathered."""
    return 2 * bucket_size(parameters)
