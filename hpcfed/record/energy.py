"""Energy that a GPU has used, where NVML offers it."""


def joules(device_uuid: str) -> float:
    """The GPU's energy counter in joules since its driver started; NaN where there is
    none.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(
            f"GPU-{device_uuid.removeprefix('GPU-')}"
        )
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3
    except Exception:  # no driver, no counter, no permission: a figure that is missing, never a run that stops
        return float("nan")
