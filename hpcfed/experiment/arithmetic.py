"""The arithmetic that a run asks for."""

import torch

from hpcfed.config import RunConfig
from hpcfed.runtime import device


def set_arithmetic(config: RunConfig) -> None:
    """Set precision and determinism of this process's kernels."""
    device.set_arithmetic(
        precision=config.precision, deterministic=config.deterministic
    )


def dtype_of(config: RunConfig) -> torch.dtype:
    """Return the type of rows and data; bf16 and tf32 act inside of kernels alone."""
    return torch.float64 if config.precision == "fp64" else torch.float32
