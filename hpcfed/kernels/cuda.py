"""Kernels in CUDA C++, compiled when first needed by the compiler that comes with
torch.
"""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

WIDEST_LOAD = 16
"""Bytes that a thread loads at once at most, and at whose multiples such a load must
begin.
"""

Macros = tuple[tuple[str, str | int], ...]


class Kernel:
    """A kernel of a source file beside this module, compiled with some macros for the
    current device.
    """

    def __init__(
        self, source: str, name: str, macros: Macros, *, threads: int, shared: int = 0
    ) -> None:
        from cuda.bindings import driver

        self._driver, self._threads, self._shared = driver, threads, shared
        device = self._device = torch.cuda.current_device()
        major, minor = torch.cuda.get_device_capability(device)
        own = (
            "a" if major == 9 else ""
        )  # with the instructions that only this architecture has
        module = _checked(
            driver.cuModuleLoadData(compiled(source, macros, f"sm_{major}{minor}{own}"))
        )
        self._kernel = _checked(driver.cuModuleGetFunction(module, name.encode()))
        limit = (
            driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        )
        _checked(driver.cuFuncSetAttribute(self._kernel, limit, shared))
        fit = _checked(
            driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                self._kernel, threads, shared
            )
        )
        self.capacity: int = (
            fit * torch.cuda.get_device_properties(device).multi_processor_count
        )
        """Blocks that the device runs at once."""

    def __call__(self, grid: tuple[int, int], *arguments: Tensor | int | None) -> None:
        """Launches on torch's stream. Tensors are passed as pointers, integers as 64
        bits, None as a null pointer.
        """
        make_current(self._device)
        values = tuple(
            a.data_ptr() if isinstance(a, Tensor) else a or 0 for a in arguments
        )
        types = tuple(
            ctypes.c_int64 if isinstance(a, int) else ctypes.c_void_p for a in arguments
        )
        stream = torch.cuda.current_stream().cuda_stream
        size = (*grid, 1, self._threads, 1, 1)
        _checked(
            self._driver.cuLaunchKernel(
                self._kernel, *size, self._shared, stream, (values, types), 0
            )
        )


@contextmanager
def without_trials() -> Iterator[None]:
    """cuDNN guesses which of its kernels suit, for work that is too short for trials of
    them all.
    """
    tries = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = (
        False  # not by its `flags`, which turn cuDNN itself off
    )
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = tries


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy of it where kernels that load sixteen bytes at once
    could not begin.

    ZeRO lays parameters one after the other into flat buffers, so a parameter may begin
    at any multiple of its own numbers' size.
    """
    return (
        tensor.clone() if tensor.is_cuda and tensor.data_ptr() % WIDEST_LOAD else tensor
    )


class Branch:
    """A second branch of a step that is being captured, for work whose result is needed
    only at the step's end.

    Outside of a capture the work is done in line.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._open = False
        self._held: list[Tensor | None] = []

    @contextmanager
    def work(self, *tensors: Tensor | None) -> Iterator[None]:
        """What is done inside goes to the branch; it reads the tensors, whose memory is
        not reused before `join`.
        """
        if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._open = True
        self._held += tensors
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Must come before the capture ends, whatever has become of the work."""
        if self._open and self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
            self._open = False
            self._held.clear()


_threads = threading.local()


def make_current(device: int) -> None:
    """Gives the calling thread the device's context, which the threads of torch's
    backward pass may lack at first.
    """
    if getattr(_threads, "device", None) != device:
        torch.cuda.set_device(device)
        _threads.device = device


@cache
def available(device: torch.device) -> bool:
    """Whether kernels can be compiled for and run on this device; they need tensor
    cores with TensorFloat-32.
    """
    if (
        device.type != "cuda"
        or torch.version.hip
        or torch.cuda.get_device_capability(device) < (8, 0)
    ):
        return False
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError):
        return False
    return True


@cache
def compiled(source: str, macros: Macros, architecture: str) -> bytes:
    """Machine code of a source file beside this module."""
    from cuda.bindings import nvrtc

    text = (Path(__file__).parent / source).read_bytes()
    program = _checked(nvrtc.nvrtcCreateProgram(text, source.encode(), 0, [], []))
    options = [
        f"-arch={architecture}",
        "--std=c++17",
        *(f"-D{name}={value}" for name, value in macros),
    ]
    (status,) = nvrtc.nvrtcCompileProgram(
        program, len(options), [option.encode() for option in options]
    )
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"{source} does not compile with {options}:\n{log.decode()}")
    code = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
    _checked(nvrtc.nvrtcGetCUBIN(program, code))
    return code


def _checked(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"CUDA call failed: {status!r}")
    return values[0] if values else None
