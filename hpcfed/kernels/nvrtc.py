"""NVIDIA's compiler, which comes with torch; as a program, it compiles for another
process.

The compiler takes one kernel at a time, whatever threads call it, so kernels are
compiled side by side by several processes. The program imports neither torch nor
hpcfed. It reads a list of jobs as JSON, and writes the compiler's version in a line,
then the machine code of each job after its length; length 0: it did not compile.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any, BinaryIO

LENGTH_BYTES = 8
Job = tuple[str, str, Sequence[str]]
"""The source's name, its text, and the compiler's options."""


def version() -> list[int]:
    """Return the compiler's version, without the patch level."""
    from cuda.bindings import nvrtc

    _, *numbers = nvrtc.nvrtcVersion()
    return numbers


def compile(source: str, text: str, options: Sequence[str]) -> bytes:
    """Return the machine code of a source."""
    from cuda.bindings import nvrtc

    program = checked(
        nvrtc.nvrtcCreateProgram(text.encode(), source.encode(), 0, [], [])
    )
    encoded = [option.encode() for option in options]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        # The library writes into the given bytes.
        log = b" " * checked(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"{source} does not compile with {options}:\n{log.decode()}")
    # Machine code, not PTX, which the driver would have to compile again.
    code = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))
    checked(nvrtc.nvrtcGetCUBIN(program, code))
    return code


def checked(result: tuple[Any, ...]) -> Any:
    """Return the results of a CUDA call without its status; raise if it failed."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"CUDA call failed: {status!r}")
    return values[0] if values else None


def serve(jobs: BinaryIO, results: BinaryIO) -> None:
    """Compile all jobs, and write each result as soon as it is there."""
    asked: list[Job] = json.load(jobs)
    results.write(json.dumps(version()).encode() + b"\n")
    for job in asked:
        try:
            code = compile(*job)
        except RuntimeError:
            # Whoever needs it compiles it again, and reports the error.
            code = b""
        results.write(len(code).to_bytes(LENGTH_BYTES) + code)
        results.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
