"""Kernels in CUDA C++, compiled when first needed by the compiler that comes with
torch.

So an installation needs no CUDA toolkit, and shapes are compile-time constants.
Compiled code is kept in the user's cache.
"""

import ctypes
import hashlib
import re
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpcfed.kernels import foreseen, nvrtc
from hpcfed.runtime import accelerator, own_kernels
from hpcfed.runtime import cache as disk
from hpcfed.runtime.starting import starting

WIDEST_LOAD = 16
"""The most bytes that a thread loads at once; such a load must begin at a multiple."""

_launches_early = True
"""Whether a kernel may be launched while others still run."""

_MOST_HELD = 512 * 2**20
"""Bytes that a branch may keep from being reused."""

Macros = tuple[tuple[str, str | int], ...]
"""Names and values; hashable, so that kernels can be cached by them."""


class Kernel:
    """A kernel in a source file here, compiled with macros for this device."""

    def __init__(
        self, source: str, name: str, macros: Macros, *, threads: int, shared: int = 0
    ) -> None:
        # Imported here: without a GPU the bindings may be missing.
        from cuda.bindings import driver

        self._driver = driver
        self.name = name
        self._threads = threads
        self._shared = shared
        self._device = torch.cuda.current_device()
        code = compiled(source, macros, _architecture(self._device))
        # The first call may come from a thread of torch's backward pass.
        make_current(self._device)
        module = nvrtc.checked(driver.cuModuleLoadData(code))
        self._kernel = nvrtc.checked(driver.cuModuleGetFunction(module, name.encode()))
        # A kernel gets more than 48 KiB of shared memory only on request.
        limit = (
            driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        )
        nvrtc.checked(driver.cuFuncSetAttribute(self._kernel, limit, shared))
        per_multiprocessor = nvrtc.checked(
            driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                self._kernel, threads, shared
            )
        )
        properties = torch.cuda.get_device_properties(self._device)
        self.capacity: int = per_multiprocessor * properties.multi_processor_count
        """Blocks that the device can run at once."""
        self._early = _early(self._device)

    def __call__(self, grid: tuple[int, int], *arguments: Tensor | int | None) -> None:
        """Launch on torch's current stream.

        Tensors are passed as pointers, integers as 64 bits, None as a null pointer.
        """
        make_current(self._device)
        values: list[int] = []
        types: list[Any] = []
        for argument in arguments:
            if isinstance(argument, Tensor):
                values.append(argument.data_ptr())
                types.append(ctypes.c_void_p)
            elif argument is None:
                values.append(0)
                types.append(ctypes.c_void_p)
            else:
                values.append(argument)
                types.append(ctypes.c_int64)
        config = self._driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self._threads, 1, 1
        config.sharedMemBytes = self._shared
        config.hStream = accelerator.raw_stream(self._device)
        if _launches_early and self._early is not None:
            config.attrs, config.numAttrs = [self._early], 1
        packed = (tuple(values), tuple(types))
        nvrtc.checked(self._driver.cuLaunchKernelEx(config, self._kernel, packed, 0))


@contextmanager
def one_after_the_other() -> Iterator[None]:
    """Launch each kernel after the one before has ended, as a profiler needs it: it
    would count the time that a kernel waits as the kernel's own.
    """
    global _launches_early
    before, _launches_early = _launches_early, False
    try:
        yield
    finally:
        _launches_early = before


def _early(device: int) -> Any:
    """Return the attribute by which a kernel may be launched while others still run, as
    `await_others` allows; None if the device cannot.
    """
    from cuda.bindings import driver

    if torch.cuda.get_device_capability(device) < (9, 0):
        return None
    attribute = driver.CUlaunchAttribute()
    kinds = driver.CUlaunchAttributeID
    attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    value = driver.CUlaunchAttributeValue()
    value.programmaticStreamSerializationAllowed = 1
    attribute.value = value
    return attribute


def _architecture(device: int | torch.device) -> str:
    """Return the compiler's name of a device's architecture."""
    major, minor = torch.cuda.get_device_capability(device)
    # "a" enables the instructions that only this architecture has.
    suffix = "a" if major == 9 else ""
    return f"sm_{major}{minor}{suffix}"


@contextmanager
def without_trials(*, unless: bool = False) -> Iterator[None]:
    """Let cuDNN choose kernels by heuristics, if benchmarking takes too long."""
    if unless:
        yield
        return
    before = torch.backends.cudnn.benchmark
    # Not by its `flags`, which would turn cuDNN itself off.
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor, or an aligned copy if a kernel's widest load could not begin
    there.

    ZeRO packs parameters into flat buffers, so a parameter may begin at any multiple of
    its element size.
    """
    if tensor.is_cuda and tensor.data_ptr() % WIDEST_LOAD:
        return tensor.clone()
    return tensor


class Branch:
    """A second branch of a captured step, for work whose result is needed only at the
    end of the step.

    The branch runs in parallel to the rest of the backward pass. Outside of a capture
    the work is done in line.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._open = False
        self._held: deque[tuple[torch.cuda.Event, tuple[Tensor | None, ...]]] = deque()
        """Pieces of work that may not be done, and what they read."""

    @contextmanager
    def work(self, *tensors: Tensor | None) -> Iterator[None]:
        """Send what is launched within the block to the branch.

        The memory of the tensors that it reads is not reused before the work is done.
        """
        if not (own_kernels.are_allowed() and _is_capturing()):
            yield
            return
        # The stream is created when first needed: a process without a GPU makes
        # branches, too.
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._open = True
        # Everything captured so far comes before the branch.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
            done = self._stream.record_event()
        # The allocator does not know about this stream: references keep the memory.
        self._held.append((done, tensors))
        while sum(map(_bytes_of, self._held)) > _MOST_HELD:
            done, _ = self._held.popleft()
            torch.cuda.current_stream().wait_event(done)

    def join(self) -> None:
        """Wait for the branch; required before the capture ends, or fails."""
        if self._open and self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
            self._open = False
            self._held.clear()


def _is_capturing() -> bool:
    # Whether there is a GPU takes a hundred times as long to ask.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _bytes_of(held: tuple[torch.cuda.Event, tuple[Tensor | None, ...]]) -> int:
    return sum(tensor.nbytes for tensor in held[1] if tensor is not None)


_threads = threading.local()


def make_current(device: int) -> None:
    """Give the calling thread the device's context.

    The threads of torch's backward pass may lack it at first.
    """
    # Remembered per thread: asking CUDA at every launch takes microseconds.
    if getattr(_threads, "device", None) != device:
        torch.cuda.set_device(device)
        _threads.device = device


def available(device: torch.device) -> bool:
    """Whether kernels are to be used on this device: they run there, and --kernels lets
    this process use them.
    """
    return own_kernels.are_allowed() and _runs_on(device)


@cache
def _runs_on(device: torch.device) -> bool:
    """Whether kernels can be compiled for and run on this device."""
    if device.type != "cuda" or torch.version.hip:
        return False
    # TensorFloat-32 needs tensor cores of Ampere or newer.
    if torch.cuda.get_device_capability(device) < (8, 0):
        return False
    # The bindings can be imported without the library, but not called.
    try:
        nvrtc.version()
    except (ImportError, RuntimeError):
        return False
    return True


@cache
def compiled(source: str, macros: Macros, architecture: str) -> bytes:
    """Return the machine code of a source file next to this module."""
    name, job = _job(source, macros, architecture)
    code = disk.read(name)
    if code is None:
        with starting.counted("compiled"):
            code = foreseen.take(name) or nvrtc.compile(*job)
        disk.write(name, code)
    return code


def foresee(
    kernels: Iterable[tuple[str, Macros]], device: torch.device, *, processes: int
) -> None:
    """Compile kernels of these sources in the background, unless the cache has them."""
    if not available(device):
        return
    architecture = _architecture(device)
    jobs = dict(_job(source, macros, architecture) for source, macros in kernels)
    foreseen.begin(jobs, processes=processes)


def _job(source: str, macros: Macros, architecture: str) -> tuple[str, nvrtc.Job]:
    """Return a kernel's name in the cache, and how it is compiled."""
    text = _text(source)
    options = [f"-arch={architecture}", "--std=c++17"]
    for name, value in macros:
        options.append(f"-D{name}={value}")
    return _cache_name(text, options), (source, text, options)


@cache
def _text(source: str) -> str:
    """Return a source file in which each `#include` of a header next to it is replaced
    by the header's text.

    So the cache's key covers the headers, too, and the compiler needs no files.
    """
    folder = Path(__file__).parent
    return re.sub(
        r'^#include "([\w.]+)"$',
        lambda found: (folder / found[1]).read_text(),
        (folder / source).read_text(),
        flags=re.MULTILINE,
    )


def _cache_name(text: str, options: list[str]) -> str:
    """Return a kernel's name in the cache, from all that its code depends on."""
    # The compiler's version lacks the patch level, which follows from torch's version.
    rest = repr([torch.__version__, nvrtc.version(), options])
    digest = hashlib.sha256((text + rest).encode())
    return f"kernel-{digest.hexdigest()}"
