"""CPU kernels in C, compiled when first needed by the machine's own compiler.

Without a compiler, or if its result cannot be loaded, layers use torch's operations
instead.
"""

import ctypes
import os
import tempfile
from functools import cache
from pathlib import Path

from torch import Tensor

from hpcfed.runtime import compiler, own_kernels


def library(source: str) -> ctypes.CDLL | None:
    """Return a source file here as a loaded library; None if that fails, or if --kernels
    does not let this process use it.
    """
    return _library(source) if own_kernels.are_allowed() else None


@cache
def _library(source: str) -> ctypes.CDLL | None:
    try:
        return _loaded(compiler.compiled(source))
    except compiler.FAILURES:
        return None


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    """Return a tensor as an argument; None as a null pointer."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _loaded(code: bytes) -> ctypes.CDLL:
    # RTLD_GLOBAL makes its functions visible to libraries that are loaded later.
    ctypes.CDLL(_openmp(), mode=ctypes.RTLD_GLOBAL)
    with tempfile.TemporaryDirectory(prefix="hpcfed-") as folder:
        file = Path(folder, "kernel.so")
        file.write_bytes(code)
        # It stays in memory after the file is removed.
        return ctypes.CDLL(str(file))


def _openmp() -> str:
    """Return the path of the OpenMP library that torch has loaded."""
    # File names may be any bytes.
    mapped = os.fsdecode(Path("/proc/self/maps").read_bytes())
    for line in mapped.split("\n"):
        # Memory without a file has no sixth word.
        for name in line.split(maxsplit=5)[5:]:
            if Path(name).name.startswith(("libgomp", "libiomp", "libomp")):
                return name
    raise FileNotFoundError("torch has loaded no OpenMP library")
