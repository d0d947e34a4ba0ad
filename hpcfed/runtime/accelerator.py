"""The GPU of this process, whatever its make: NVIDIA's, AMD's or Intel's.

torch has a module for each kind of device, all of the same shape: `torch.cuda`, which
also serves AMD's GPUs, and `torch.xpu`. Only this folder and `kernels/` know them.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

KINDS = ("cuda", "xpu")
"""torch's names for GPUs. AMD's have that of NVIDIA's."""
BACKENDS = {"cuda": "nccl", "xpu": "xccl"}
"""torch's names for the collectives of GPUs. AMD's RCCL has that of NVIDIA's NCCL."""
Make = Literal["NVIDIA", "AMD", "Intel"]


def is_gpu(device: torch.device) -> bool:
    """Whether the device is a GPU."""
    return device.type in KINDS


def kind() -> str | None:
    """Return torch's name for the GPUs that this process sees; None without any."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None or found.type not in KINDS else found.type


def count() -> int:
    """Return how many GPUs this process sees."""
    here = kind()
    return 0 if here is None else int(getattr(torch, here).device_count())


def make_of(device: torch.device) -> Make | None:
    """Return who makes the GPU; None for a CPU."""
    if device.type == "xpu":
        return "Intel"
    if device.type != "cuda":
        return None
    return "AMD" if torch.version.hip else "NVIDIA"


def use(device: torch.device) -> None:
    """Make the GPU the current one of this thread."""
    _module(device).set_device(device)


def properties(device: torch.device) -> Any:
    """Return torch's description of a GPU: name, total_memory and more."""
    return _module(device).get_device_properties(device)


def unique_id(device: torch.device) -> str:
    """Return what tells a GPU from all others of its host, however it is numbered, and
    by which its counter of energy is found.
    """
    found = properties(device)
    if make_of(device) == "AMD":
        # AMD's library of counters has other identifiers than torch.
        domain, bus, slot = found.pci_domain_id, found.pci_bus_id, found.pci_device_id
        return f"{domain:04x}:{bus:02x}:{slot:02x}.0"
    return str(found.uuid)


def smallest_memory() -> int:
    """Return the bytes of the smallest GPU that this process sees; 0 without any."""
    devices = [torch.device(kind() or "cpu", at) for at in range(count())]
    return min((properties(each).total_memory for each in devices), default=0)


# Memory.


def free_memory(device: torch.device) -> int:
    """Return the bytes of a GPU that nobody uses."""
    free, _ = _module(device).mem_get_info(device)
    return int(free)


def allocated_memory(device: torch.device) -> int:
    """Return the bytes that torch's tensors take on a GPU."""
    return int(_module(device).memory_allocated(device))


def most_allocated(device: torch.device) -> int:
    """Return the most bytes that torch's tensors have taken on a GPU."""
    # What max_memory_allocated returns, but that flattens and sorts a hundred other
    # figures first.
    figures = _module(device).memory_stats_as_nested_dict(device)
    return int(figures["allocated_bytes"]["all"]["peak"]) if figures else 0


def forget_peak(device: torch.device) -> None:
    """Measure the most allocated bytes anew."""
    _module(device).reset_peak_memory_stats(device)


def return_memory() -> None:
    """Give the driver back what torch keeps for later tensors."""
    here = kind()
    if here is not None:
        getattr(torch, here).empty_cache()


@contextmanager
def noting_peaks(note: Callable[[], None]) -> Iterator[None]:
    """Call `note` before anyone within the block resets a GPU's peak memory, as
    DeepSpeed does on the first rank while it builds some optimisers.
    """
    module = getattr(torch, kind() or "cuda")
    reset = module.reset_peak_memory_stats

    def noted(device: torch.device | str | int | None = None) -> None:
        note()
        reset(device)

    module.reset_peak_memory_stats = noted
    try:
        yield
    finally:
        module.reset_peak_memory_stats = reset


# Streams and time.


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given; on a CPU nothing is left."""
    if is_gpu(device):
        _module(device).synchronize(device)


def new_stream(device: torch.device) -> Any:
    """Return a queue for a GPU's work."""
    return _module(device).Stream(device)


def current_stream(device: torch.device) -> Any:
    """Return the queue of a GPU that gets this thread's work."""
    if device.type != "cuda" or device.index is None:
        return _module(device).current_stream(device)
    # torch takes 10 µs to make the object, which a round wants ten times.
    handle = raw_stream(device.index)
    if (device.index, handle) not in _streams:
        _streams[device.index, handle] = torch.cuda.current_stream(device)
    return _streams[device.index, handle]


_streams: dict[tuple[int, int], Any] = {}
"""Queues by GPU and handle. torch makes a few, and keeps them to the end."""


def raw_stream(index: int) -> int:
    """Return the handle of the queue of NVIDIA's or AMD's GPU with this number that gets
    this thread's work.
    """
    handle: int = torch._C._cuda_getCurrentRawStream(index)
    return handle


def entering(stream: Any) -> Callable[[], AbstractContextManager[Any]]:
    """Return a function that makes contexts; work within one goes to the stream."""
    return partial(_module(stream.device).stream, stream)


def time_stamps(device: torch.device) -> Callable[[], Any]:
    """Return a function that makes events of a GPU that tell the time."""
    return partial(_module(device).Event, enable_timing=True)


# Random numbers of torch's own.


def keeping_draws(device: torch.device) -> AbstractContextManager[None]:
    """Restore torch's generators of the CPU and of this device after the block."""
    if is_gpu(device):
        return torch.random.fork_rng(devices=[device], device_type=device.type)
    return torch.random.fork_rng(devices=[])


def seed(device: torch.device, number: int) -> None:
    """Seed torch's generator of the current GPU."""
    _module(device).manual_seed(number)


def generator_of(device: torch.device) -> torch.Generator:
    """Return torch's own generator of the current GPU of this kind."""
    module = _module(device)
    generator: torch.Generator = module.default_generators[module.current_device()]
    return generator


def generator_state(device: torch.device) -> Tensor:
    """Return the state of torch's generator of a GPU."""
    state: Tensor = _module(device).get_rng_state(device)
    return state


def restore_generator(device: torch.device, state: Tensor) -> None:
    """Give torch's generator of a GPU a state that it had before."""
    _module(device).set_rng_state(state, device)


@contextmanager
def refusing_to_wait(device: torch.device) -> Iterator[None]:
    """Raise RuntimeError if the host would wait for the GPU within the block. Only
    `torch.cuda` finds out; others let everything pass.
    """
    module = _module(device)
    if not hasattr(module, "set_sync_debug_mode"):
        yield
        return
    before = module.get_sync_debug_mode()
    module.set_sync_debug_mode("error")
    try:
        yield
    finally:
        module.set_sync_debug_mode(before)


# Profilers.


def begin_range(name: str) -> None:
    """Begin a range that NVIDIA's profiler shows."""
    torch.cuda.nvtx.range_push(name)


def end_range() -> None:
    """End the last range."""
    torch.cuda.nvtx.range_pop()


def _module(device: torch.device) -> Any:
    """Return torch's module for this kind of device."""
    return getattr(torch, device.type)
