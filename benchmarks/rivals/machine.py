"""What this machine has: GPU, driver and pfl-research."""

import argparse
from dataclasses import dataclass

import torch

from benchmarks.rivals import mps
from benchmarks.rivals.others import pfl
from hpcfed.errors import UserError, one_line


@dataclass(frozen=True)
class Machine:
    """What this machine has; empty where it does not."""

    gpu: str
    driver: str
    pfl: str
    """Version of the package."""
    why: str
    """Why the package cannot be imported."""


def probe() -> Machine:
    """Return what this machine has. CUDA starts here, so this belongs in a process of
    its own.
    """
    gpu = version = why = ""
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")  # a GPU that cannot be used is told at once
        gpu = torch.cuda.get_device_name()
    try:
        version = pfl("version").__version__
    except Exception as error:  # also where it does not get on with another package
        why = one_line(error)
    return Machine(gpu, driver() if gpu else "", version, why)


def driver() -> str:
    """Return the version of NVIDIA's driver; empty where it cannot be asked."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # the module or its library may be missing or too old
        return ""


def device_of(wanted: str, machine: Machine) -> str:
    """Return cpu or cuda."""
    if wanted == "cuda" and not machine.gpu:
        raise UserError("--device cuda, but torch sees no GPU; use --device cpu")
    return "cuda" if machine.gpu and wanted != "cpu" else "cpu"


def wants_mps(options: argparse.Namespace) -> bool:
    """Return whether to run MPS: if asked for, or where it is there and of use."""
    cuda = options.device == "cuda"
    there = cuda and mps.installed()
    if options.mps and not there:
        reason = f"there is no {mps.CONTROL}" if cuda else "there is no GPU to share"
        raise UserError(f"--mps, but {reason}; use --no-mps")
    several = "pfl-research" in options.rivals and max(options.processes) > 1
    return options.mps is not False and there and several
