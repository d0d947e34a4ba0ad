"""What NVML tells about a GPU: driver, memory, clocks, errors of its memory."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hpcfed.runtime import accelerator
from hpcfed.runtime.gpu_counters import nvml_of

T = TypeVar("T")
SLOWDOWNS = {
    0x8: "hardware slowdown",
    0x20: "too hot (software)",
    0x40: "too hot (hardware)",
    0x80: "power brake",
}
"""Bits of NVML's reasons for low clocks that name a fault, not a setting or a limit of
power, which are usual under load.
"""
DRIVER = Path("/proc/driver/nvidia/version")
"""Exists where NVIDIA's driver is loaded."""
PCI = Path("/sys/bus/pci/devices")


class GpuState(NamedTuple):
    """A GPU as its driver describes it; None: the driver does not tell."""

    driver: str | None = None
    free: int | None = None
    """Bytes."""
    memory: int | None = None
    """Bytes."""
    clock: int | None = None
    """MHz of its multiprocessors, now."""
    top_clock: int | None = None
    """MHz that they may reach."""
    temperature: int | None = None
    """Degrees Celsius."""
    slowed: tuple[str, ...] = ()
    """Faults that keep the clocks low."""
    ecc: bool | None = None
    """Whether errors of its memory are corrected."""
    uncorrected: int | None = None
    """Errors that were not, since the driver started."""
    rows_pending: bool | None = None
    """Whether bad rows of its memory wait for a reset to be replaced."""
    rows_failed: bool | None = None
    """Whether bad rows of its memory could not be replaced."""
    numa: int | None = None
    """The NUMA node that it is attached to."""


def visible_gpus() -> int:
    """Return how many GPUs this process may use."""
    return accelerator.count()


def gpu_state(device_uuid: str) -> GpuState:
    """Ask NVML about a GPU; without NVML nothing is known."""
    try:
        library, handle = nvml_of(device_uuid)
    except Exception:
        return GpuState()
    return _asked(library, handle)


def _asked(nvml: Any, handle: Any) -> GpuState:
    memory = _told(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    ecc = _told(lambda: nvml.nvmlDeviceGetEccMode(handle))
    uncorrected = _told(
        lambda: nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
    )
    # Corrected, uncorrected, waiting for a reset, failed.
    rows = _told(lambda: nvml.nvmlDeviceGetRemappedRows(handle))
    reasons = _told(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    driver = _told(nvml.nvmlSystemGetDriverVersion)
    return GpuState(
        # Older versions of the package return bytes.
        driver=driver.decode() if isinstance(driver, bytes) else driver,
        free=None if memory is None else int(memory.free),
        memory=None if memory is None else int(memory.total),
        clock=_told(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        top_clock=_told(
            lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)
        ),
        temperature=_told(
            lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
        ),
        slowed=slowdowns(reasons or 0),
        ecc=None if ecc is None else bool(ecc[0]),
        uncorrected=uncorrected,
        rows_pending=None if rows is None else bool(rows[2]),
        rows_failed=None if rows is None else bool(rows[3]),
        numa=_numa(_told(lambda: nvml.nvmlDeviceGetPciInfo(handle).busId)),
    )


def slowdowns(reasons: int) -> tuple[str, ...]:
    """Return what NVML's bits say about faults that keep clocks low."""
    return tuple(fault for bit, fault in SLOWDOWNS.items() if reasons & bit)


def _told(ask: Callable[[], T]) -> T | None:
    """Return the answer; None where the GPU, or its user's rights, do not give it."""
    try:
        return ask()
    except Exception:
        return None


def _numa(bus: str | bytes | None, folder: Path = PCI) -> int | None:
    """Return the NUMA node of a PCI device; None if unknown."""
    if bus is None:
        return None
    name = bus.decode() if isinstance(bus, bytes) else bus
    # NVML writes eight digits for the domain, Linux four.
    with suppress(OSError, ValueError):
        node = int((folder / name[-12:].lower() / "numa_node").read_text())
        return node if node >= 0 else None
    return None
