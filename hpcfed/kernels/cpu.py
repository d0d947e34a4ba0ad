"""CPU kernels in C, compiled when first needed by the machine's own compiler.

Machines on which programs are built have one, and it knows the processor's own
instructions. Without a compiler, or if its result cannot be loaded, layers use torch's
operations instead. Compiled code is kept in the user's cache.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from torch import Tensor

from hpcfed.runtime import cache as disk

COMPILERS = ("gcc", "cc", "clang")
OPTIONS = (
    "-O3",
    "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
    "-fPIC",
    # Loads far ahead of their use would push sums out of the registers.
    "-fno-schedule-insns",
)
PATIENCE = 60
"""Timeout of a compiler call in seconds."""


@cache
def library(source: str) -> ctypes.CDLL | None:
    """Return a source file here as a loaded library; None if that fails."""
    text = (Path(__file__).parent / source).read_bytes()
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return None
    try:
        name = _cache_name(text, compiler)
        # Several ranks of a host may compile at once: the cache replaces files whole.
        code = disk.read(name)
        if code is None:
            code = _compiled(text, compiler)
            disk.write(name, code)
        return _loaded(code)
    except (OSError, subprocess.SubprocessError):
        return None


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    """Return a tensor as an argument; None as a null pointer."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _compiled(text: bytes, compiler: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="hpcfed-") as folder:
        source, part, whole = (
            Path(folder, f"kernel.{end}") for end in ("c", "o", "so")
        )
        source.write_bytes(text)
        _call(compiler, *OPTIONS, "-c", str(source), "-o", str(part))
        # Not linked with OpenMP: it must find the library that torch uses. A second one
        # would have its own threads, and the two would wait for each other.
        _call(compiler, "-shared", str(part), "-o", str(whole))
        return whole.read_bytes()


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


def _cache_name(text: bytes, compiler: str) -> str:
    """Return the name in the cache, from all that the machine code depends on."""
    # Asking the compiler itself would take longer than loading its result.
    program = Path(compiler).resolve()
    status = program.stat()
    made_by = [str(program), status.st_size, status.st_mtime_ns]
    rest = repr([OPTIONS, made_by, _processor()])
    digest = hashlib.sha256(text + rest.encode())
    return f"cpu-kernel-{digest.hexdigest()}"


def _processor() -> list[str]:
    """Return what `native` means here: different machines may share a home folder."""
    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    # Leave out the clock speed, which changes all the time.
    return [line for line in lines if "mhz" not in line.lower()]


def _call(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=PATIENCE)
