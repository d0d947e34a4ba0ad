"""Start and stop NVIDIA's multi-process service (MPS), by which several processes share
a GPU.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpcfed.errors import UserError

CONTROL = "nvidia-cuda-mps-control"
PATIENCE = 60
"""Seconds that a first process under MPS may take to reach the GPU."""
TOUCH = """
import sys, torch
try:
    torch.ones(1, device="cuda").item()
except Exception as error:
    sys.exit(str(error).partition("\\n")[0])
"""
Variables = dict[str, str]
"""Environment variables that lead a process to a daemon; empty for the one that it uses
anyway.
"""


def installed() -> bool:
    return shutil.which(CONTROL) is not None


@contextmanager
def service(*, wanted: bool, demanded: bool) -> Iterator[Variables | None]:
    """Yield the variables that lead a process to MPS, or None where it does not run.

    A daemon that was running before serves every process, wanted or not, and is left
    alone. A new one is started only if wanted, and has a folder of its own, so that
    only processes with these variables go through it. If it cannot work, that is an
    error where it was demanded.
    """
    if servers({}) is not None:
        yield {}
        return
    if not wanted:
        yield None
        return
    folder = Path(tempfile.mkdtemp(prefix="mps-"))
    pipe, log = folder / "pipe", folder / "log"
    pipe.mkdir()
    log.mkdir()
    variables = {
        "CUDA_MPS_PIPE_DIRECTORY": str(pipe),
        "CUDA_MPS_LOG_DIRECTORY": str(log),
    }
    try:
        trouble = start(variables)
        if trouble and demanded:
            raise UserError(f"--mps: {trouble}; use --no-mps")
        if trouble:
            print(f"MPS does not work here and stays off: {trouble}")
        yield None if trouble else variables
    finally:
        ask("quit", variables)
        shutil.rmtree(folder, ignore_errors=True)


def start(variables: Variables) -> str:
    """Start the daemon and use the GPU through it; return what went wrong, or nothing."""
    environment = os.environ | variables
    try:
        # No pipes: the daemon would keep them open, and run() would wait for their end.
        started = subprocess.run(
            [CONTROL, "-d"],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=30,
        )
        if started.returncode:
            return f"{CONTROL} -d ended with exit code {started.returncode}"
        touched = subprocess.run(
            [sys.executable, "-c", TOUCH],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
    except subprocess.TimeoutExpired as error:
        return f"{Path(error.cmd[0]).name} took more than {error.timeout:.0f} seconds"
    except OSError as error:
        return str(error)
    if touched.returncode:
        last_line = touched.stderr.strip().rpartition("\n")[2]
        return (
            last_line or f"a process that used the GPU ended with {touched.returncode}"
        )
    return "" if servers(variables) else "no process has reached its server"


def servers(variables: Variables) -> list[str] | None:
    """Return the ids of the servers that the daemon has started; None where there is no
    daemon.
    """
    said = ask("get_server_list", variables)
    return None if said is None else said.split()


def ask(order: str, variables: Variables) -> str | None:
    """Give the daemon an order; return its answer, or None if it is not running."""
    try:
        said = subprocess.run(
            [CONTROL],
            input=order + "\n",
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    missing = said.returncode != 0 or "annot find MPS" in said.stdout + said.stderr
    return None if missing else said.stdout
