"""Each rank's device: memory, clocks, errors, and one product and one copy against the
others'.
"""

from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

import torch

from hpcfed.doctor.finding import Finding, error, fine, ranks_text, skipped, warning
from hpcfed.plan.speeds import Ceilings
from hpcfed.runtime.gpu_state import GpuState, gpu_state
from hpcfed.runtime.world import World, is_first_of_device
from hpcfed.words import bytes_text, flops_text

SLOW = {"gpu": 0.9, "cpu": 0.6}
"""A device that reaches less than this share of the others' median is slow. Cores vary
with what else their host does.
"""
TRIALS = {"gpu": 5, "cpu": 2}
"""How often product and copy are timed: a GPU needs some time to raise its clocks, and
on a busy core all must end soon.
"""
SIDE = 256
"""Rows and columns of the product whose numbers are checked."""
TAKEN = 0.1
"""A GPU of which others hold more than this share is not free."""
LOW_CLOCK = 0.6
"""Below this share of its highest clock, right after work, a GPU is held back."""


class DeviceProbe(NamedTuple):
    """What a rank's device is and does."""

    host: str
    device: str
    name: str
    kind: str
    """`gpu` or `cpu`."""
    right: bool
    """Whether a product of whole numbers was right."""
    flops: float
    bytes_per_second: float
    state: GpuState | None
    """None without a GPU."""
    free: int | None = None
    """Bytes of the GPU that were free before the work."""


Ranks = Mapping[int, DeviceProbe]


def is_first(world: World) -> bool:
    """Tell whether this rank measures its device: of several on a GPU, one does."""
    return world.device.type == "cpu" or is_first_of_device(world)


def look(world: World) -> DeviceProbe | None:
    """Measure this rank's device; None if another rank does."""
    if not is_first(world):
        return None
    here, device = world.location, world.device
    on_gpu = device.type != "cpu"
    kind = "gpu" if on_gpu else "cpu"
    free = gpu_state(here.device).free if on_gpu else None
    right = product_is_right(device)
    ceilings = Ceilings.of(device, trials=TRIALS[kind])
    return DeviceProbe(
        here.host,
        here.device,
        here.device_name,
        kind,
        right,
        ceilings.flops,
        ceilings.bytes_per_second,
        # After the work: an idle GPU's clocks are low.
        gpu_state(here.device) if on_gpu else None,
        free,
    )


def product_is_right(device: torch.device) -> bool:
    """Tell whether the device multiplies matrices of small whole numbers exactly, as it
    must in every precision.
    """
    numbers = torch.arange(SIDE * SIDE).reshape(SIDE, SIDE)
    left, right = numbers % 5 - 2, numbers % 7 - 3
    found = left.float().to(device) @ right.float().to(device)
    return torch.equal(found.cpu().long(), left @ right)


def judge(ranks: Ranks) -> list[Finding]:
    """Judge the devices of all ranks that have measured theirs."""
    wrong = [rank for rank, one in ranks.items() if not one.right]
    found = []
    if wrong:
        advice = "do not use this device: tell your administrators"
        found.append(error("numbers", "a product of matrices is wrong", advice, *wrong))
    found += _slow(ranks)
    states = {rank: one for rank, one in ranks.items() if one.state is not None}
    if not states:
        return [*found, skipped("GPU", "no GPU")]
    return [*found, *_memory(states), *_clocks(states), *_errors(states)]


def _slow(ranks: Ranks) -> list[Finding]:
    found = []
    speeds = {
        "product": {rank: one.flops for rank, one in ranks.items()},
        "copy": {rank: one.bytes_per_second for rank, one in ranks.items()},
    }
    for work, by_rank in speeds.items():
        slow = slow_ranks(by_rank, {rank: one.kind for rank, one in ranks.items()})
        for rank, share in slow.items():
            speed, advice = by_rank[rank], _advice(ranks, ranks[rank])
            told = f"{_speed(work, speed)}: {share:.0%} of the other ranks'"
            figures = {"per_second": speed, "share": share}
            found.append(warning(work, told, advice, rank, **figures))
        if not slow:
            low, high = min(by_rank.values()), max(by_rank.values())
            text = _speed(work, low)
            if len(by_rank) > 1:
                text = f"{text} to {_speed(work, high)}, none far below the others"
            found.append(
                fine(work, text, lowest_per_second=low, highest_per_second=high)
            )
    return found


def _advice(ranks: Ranks, slow: DeviceProbe) -> str:
    """Return what to do about a slow device."""
    pace = "the slowest rank sets the pace"
    if slow.kind == "gpu":
        place = f"the GPU {slow.device} of {slow.host}"
    elif any(one.host != slow.host for one in ranks.values()):
        place = f"the cores of {slow.host}"
    else:
        # There is no other node to go to.
        return f"see what else works on the cores, or start fewer ranks: {pace}"
    return f"leave out {place}, or see what else works there: {pace}"


def slow_ranks(
    speeds: Mapping[int, float], kinds: Mapping[int, str]
) -> dict[int, float]:
    """Return ranks whose speed is far below the median of the others of their kind, with
    their share of it.
    """
    found = {}
    for rank, speed in speeds.items():
        kind = kinds[rank]
        alike = [own for own in speeds if kinds[own] == kind and own != rank]
        if not alike:
            continue
        share = speed / median(speeds[own] for own in alike)
        if share < SLOW[kind]:
            found[rank] = share
    return found


def _speed(work: str, speed: float) -> str:
    if work == "product":
        return f"{flops_text(speed)}/s"
    return f"{bytes_text(speed)}/s"


def _memory(ranks: Ranks) -> list[Finding]:
    found, free = [], []
    for rank, one in ranks.items():
        assert one.state is not None
        if one.free is None or one.state.memory is None:
            continue
        free.append(one.free)
        taken = 1 - one.free / one.state.memory
        if taken > TAKEN:
            told = f"{bytes_text(one.free)} of {bytes_text(one.state.memory)} are free"
            advice = "see who uses this GPU: nvidia-smi"
            found.append(warning("GPU memory", told, advice, rank, bytes=one.free))
    if not free:
        return [skipped("GPU memory", "NVML does not tell")]
    return found or [fine("GPU memory", f"{bytes_text(min(free))} free, or more")]


def _clocks(ranks: Ranks) -> list[Finding]:
    found, told = [], {}
    for rank, one in ranks.items():
        state = one.state
        assert state is not None
        if state.clock is None or not state.top_clock:
            continue
        text = f"{state.clock} of {state.top_clock} MHz"
        if state.temperature is not None:
            text += f" at {state.temperature} °C"
        told[rank] = state.clock / state.top_clock, text
        if state.slowed:
            faults = ", ".join(state.slowed)
            advice = "tell your administrators: cooling or power is at fault"
            found.append(error("GPU clocks", f"{text}: {faults}", advice, rank))
        elif state.clock < LOW_CLOCK * state.top_clock:
            advice = "see what holds it back: nvidia-smi -q -d CLOCK,PERFORMANCE"
            found.append(warning("GPU clocks", text, advice, rank))
    if not told:
        return [skipped("GPU clocks", "NVML does not tell")]
    _, lowest = min(told.values())
    others = f", the lowest of {len(told)} GPUs" if len(told) > 1 else ""
    return found or [fine("GPU clocks", f"{lowest}{others}")]


def _errors(ranks: Ranks) -> list[Finding]:
    found = []
    off = [rank for rank, one in ranks.items() if one.state and one.state.ecc is False]
    for rank, one in ranks.items():
        state = one.state
        assert state is not None
        if state.uncorrected or state.rows_failed:
            number = state.uncorrected or 0
            told = f"{number:,} uncorrected errors since the driver started"
            told += ", bad rows that cannot be replaced" if state.rows_failed else ""
            advice = "do not use this GPU: tell your administrators"
            found.append(error("GPU errors", told, advice, rank))
        elif state.rows_pending:
            advice = "have the GPU reset before a long run"
            told = "bad rows of its memory wait for a reset"
            found.append(warning("GPU errors", told, advice, rank))
    if off:
        advice = "have it switched on: nvidia-smi -e 1"
        found.append(warning("GPU errors", "error correction is off", advice, *off))
    known = [rank for rank, one in ranks.items() if one.state and one.state.ecc]
    if not found and not known:
        return [skipped("GPU errors", "NVML does not tell")]
    told = f"error correction is on, none uncorrected ({ranks_text(known)})"
    return found or [fine("GPU errors", told)]
