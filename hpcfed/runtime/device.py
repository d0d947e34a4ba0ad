"""The device of this process: arithmetic, memory, and moving arrays there."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from hpcfed.runtime import accelerator, machine, own_kernels
from hpcfed.runtime.own_kernels import KernelChoice


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Return the array on the device, without waiting for what the device is doing.

    On a GPU the array may be reused immediately: CUDA copies memory that is not pinned
    before this returns. On the CPU the tensor shares the array's memory.
    """
    return torch.from_numpy(array).to(device, non_blocking=True)


def peak_memory(device: torch.device) -> int:
    """Return the most bytes held so far: by torch on a GPU, else by the process."""
    if accelerator.is_gpu(device):
        return accelerator.most_allocated(device)
    return machine.peak()


@contextmanager
def keeping_arithmetic() -> Iterator[None]:
    """Restore precision, determinism, kernels and threads of this process after the
    block, for a program that goes on after a run.
    """
    kernels = own_kernels.are_allowed()
    threads = torch.get_num_threads()
    matmul = torch.get_float32_matmul_precision()
    cudnn = torch.backends.cudnn
    allow_tf32, benchmark = cudnn.allow_tf32, cudnn.benchmark
    onednn = torch.backends.mkldnn.enabled
    determinism = torch.get_deterministic_debug_mode()
    try:
        yield
    finally:
        own_kernels.allow(kernels)
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(matmul)
        cudnn.allow_tf32, cudnn.benchmark = allow_tf32, benchmark
        setattr(torch.backends.mkldnn, "enabled", onednn)  # noqa: B010
        torch.set_deterministic_debug_mode(determinism)


@contextmanager
def leaving_unchanged() -> Iterator[None]:
    """Restore arithmetic settings and environment variables after a run, for a program
    that goes on.
    """
    before = dict(os.environ)
    try:
        with keeping_arithmetic():
            yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def set_arithmetic(
    *, precision: str, deterministic: bool, kernels: KernelChoice
) -> None:
    """Set which kernels this process uses, their precision and determinism."""
    own_kernels.allow(own_kernels.are_wanted(kernels))
    tensor_cores = precision in ("bf16", "tf32")
    torch.set_float32_matmul_precision("high" if tensor_cores else "highest")
    torch.backends.cudnn.allow_tf32 = tensor_cores
    # Its trials may choose another kernel, with other rounding, in the next run.
    torch.backends.cudnn.benchmark = not deterministic
    if platform.machine() == "aarch64":
        # Measured on 2 ARM cores: oneDNN takes 1.1 to 2 times as long as torch's own
        # kernels for small batches. By setattr: to mypy the property is a plain value.
        setattr(torch.backends.mkldnn, "enabled", False)  # noqa: B010
    # torch.use_deterministic_algorithms would also configure the compiler, which is not
    # used here and takes two seconds to import.
    torch.set_deterministic_debug_mode("error" if deterministic else "default")
