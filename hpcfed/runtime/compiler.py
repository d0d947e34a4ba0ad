"""The machine's own C compiler, for kernels that run on CPUs.

Machines on which programs are built have one, and it knows the processor's own
instructions. Compiled code is kept in the user's cache. Does not import torch, so that
compiling may begin before torch is loaded.
"""

import hashlib
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Lock, Thread

from hpcfed.runtime import cache as disk
from hpcfed.version import PACKAGE

COMPILERS = ("gcc", "cc", "clang")
CONVOLUTION = "cpu_convolution.c"
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
FAILURES = (OSError, subprocess.SubprocessError)
_compiling = Lock()


def begin(source: str) -> None:
    """Compile a kernel in the background, unless the cache has it."""

    def compile_quietly() -> None:
        # Whoever needs the kernel finds out again.
        with suppress(*FAILURES):
            compiled(source)

    Thread(target=compile_quietly).start()


def compiled(source: str) -> bytes:
    """Return the machine code of a kernel's source; wait if it is being compiled."""
    with _compiling:
        return _compiled(source)


@cache
def _compiled(source: str) -> bytes:
    text = (PACKAGE / "kernels" / source).read_bytes()
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise FileNotFoundError("there is no C compiler")
    name = _cache_name(text, compiler)
    # Several ranks of a host may compile at once: the cache replaces files whole.
    code = disk.read(name)
    if code is None:
        code = _compile(text, compiler)
        disk.write(name, code)
    return code


def _compile(text: bytes, compiler: str) -> bytes:
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
