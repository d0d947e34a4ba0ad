"""Starts CUDA's driver before torch needs it. Does not import torch."""

import ctypes
import os
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

DRIVER = "libcuda.so.1"


def wake_gpu(*, alone: bool) -> None:
    """Start the driver in the background, while torch is imported. A process that is
    `alone` takes the first GPU, and also makes the context that torch will use there.
    """
    if _torch_has_cuda():
        # As older versions of torch and newer drivers have it; read when CUDA starts.
        os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
        Thread(target=_wake, args=(alone,), daemon=True).start()


def _torch_has_cuda() -> bool:
    """Tell whether torch was built for CUDA: else a context would waste memory."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return False
    return (Path(found.origin).parent / "lib/libtorch_cuda.so").exists()


def _wake(alone: bool) -> None:
    # Without a driver, or with another one: torch says what is wrong.
    with suppress(OSError, AttributeError):
        driver = ctypes.CDLL(DRIVER)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) or not alone:
            return
        if driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
            # Never released: it is the one context that all users of the device share.
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
