"""Whether this process computes by kernels of its own, or by torch's operators alone.

The kernels are written for NVIDIA's GPUs and for CPUs. Other GPUs compute as every
device does without them. Does not import torch.
"""

import os
from typing import Literal

from hpcfed.errors import UserError

KernelChoice = Literal["auto", "torch"]
"""What the user may ask for."""
VARIABLE = "HPCFED_KERNELS"
_allowed = os.environ.get(VARIABLE) != "torch"


def are_wanted(choice: KernelChoice) -> bool:
    """Return whether a run with this --kernels uses kernels of its own; the variable
    decides for `auto`.
    """
    variable = os.environ.get(VARIABLE) or "auto"
    if variable not in ("auto", "torch"):
        raise UserError(f"{VARIABLE}={variable} is unknown; use auto or torch")
    return "torch" not in (choice, variable)


def allow(allowed: bool) -> None:
    """Let this process use its own kernels, or not."""
    global _allowed
    _allowed = allowed


def are_allowed() -> bool:
    """Return whether this process may use its own kernels, where they run."""
    return _allowed
