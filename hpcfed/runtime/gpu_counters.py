"""What the libraries of NVIDIA, AMD and Intel tell about a GPU while it works."""

import ctypes
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

UNKNOWN = float("nan")


class GpuCounters(Protocol):
    """One GPU. A question that it does not answer raises some exception, or its answer
    is not a number: ask through `told`.
    """

    def joules(self) -> float:
        """Return the energy used since the driver started."""

    def busy(self) -> float:
        """Return the share of a short time in which it worked."""

    def memory(self) -> float:
        """Return the bytes that all processes use."""

    def temperature(self) -> float:
        """Return degrees Celsius."""


def gpu_counters(device: str) -> GpuCounters | None:
    """Find the counters of a GPU, given by `accelerator.unique_id`; None without a
    library or a driver that knows it.
    """
    for kind in (NvidiaCounters, AmdCounters, IntelCounters):
        # Whatever is missing: a figure is then unknown, but no run stops.
        with suppress(Exception):
            return kind(device)
    return None


def told(ask: Callable[[], float]) -> float:
    """Return the answer; NaN if the GPU, or its user's rights, do not give it."""
    try:
        return float(ask())
    except Exception:
        return UNKNOWN


def nvml_of(device: str) -> tuple[Any, Any]:
    """Return NVIDIA's library and its handle of a GPU; any exception without."""
    import pynvml

    pynvml.nvmlInit()
    name = f"GPU-{device.removeprefix('GPU-')}"
    return pynvml, pynvml.nvmlDeviceGetHandleByUUID(name)


class NvidiaCounters:
    """NVML's."""

    def __init__(self, device: str) -> None:
        self._nvml, self._handle = nvml_of(device)

    def joules(self) -> float:
        millijoules = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        return float(millijoules) / 1e3

    def busy(self) -> float:
        percent = self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu
        return float(percent) / 100

    def memory(self) -> float:
        return float(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    def temperature(self) -> float:
        sensor = self._nvml.NVML_TEMPERATURE_GPU
        return float(self._nvml.nvmlDeviceGetTemperature(self._handle, sensor))


class AmdCounters:
    """AMD SMI's."""

    def __init__(self, device: str) -> None:
        import amdsmi

        amdsmi.amdsmi_init()
        addresses = {}
        for handle in amdsmi.amdsmi_get_processor_handles():
            addresses[amdsmi.amdsmi_get_gpu_device_bdf(handle).lower()] = handle
        self._smi, self._handle = amdsmi, addresses[device]

    def joules(self) -> float:
        counter = self._smi.amdsmi_get_energy_count(self._handle)
        # Older versions call the counter "power". A unit is some microjoules.
        units = counter.get("energy_accumulator", counter.get("power"))
        return float(units) * float(counter["counter_resolution"]) / 1e6

    def busy(self) -> float:
        activity = self._smi.amdsmi_get_gpu_activity(self._handle)
        return float(activity["gfx_activity"]) / 100

    def memory(self) -> float:
        kind = self._smi.AmdSmiMemoryType.VRAM
        return float(self._smi.amdsmi_get_gpu_memory_usage(self._handle, kind))

    def temperature(self) -> float:
        # Large accelerators have no sensor at their edge.
        sensor = self._smi.AmdSmiTemperatureType.JUNCTION
        now = self._smi.AmdSmiTemperatureMetric.CURRENT
        return float(self._smi.amdsmi_get_temp_metric(self._handle, sensor, now))


class IntelCounters:
    """Level Zero's, most of them through torch."""

    def __init__(self, device: str) -> None:
        import pyzes
        import torch

        count = range(torch.xpu.device_count())
        ids = [str(torch.xpu.get_device_properties(at).uuid) for at in count]
        self._zes, self._xpu, self._number = pyzes, torch.xpu, ids.index(device)

    def joules(self) -> float:
        # Which of a card's counters belongs to which of torch's devices, torch knows.
        handle = self._xpu._get_zes_power_handle(self._number)
        counter = self._zes.zes_power_energy_counter_t()
        if self._zes.zesPowerGetEnergyCounter(handle, ctypes.byref(counter)):
            raise OSError("the driver refuses to tell")
        return float(counter.energy) / 1e6

    def busy(self) -> float:
        # It sleeps for 150 ms between two readings.
        return float(self._xpu.utilization(self._number)) / 100

    def memory(self) -> float:
        free, total = self._xpu.mem_get_info(self._number)
        return float(total - free)

    def temperature(self) -> float:
        return float(self._xpu.temperature(self._number))
