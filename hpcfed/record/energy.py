"""Energy that a GPU has used, where NVML offers it."""

from hpcfed.runtime.world import World


def rank_joules(world: World) -> float:
    """Return the joules this rank's GPU has used; ranks that share a GPU report it
    once.
    """
    devices = [(location.host, location.device) for location in world.locations]
    device = devices[world.rank]
    # The counter is the GPU's, not the process's: the first rank on it reports it.
    is_first = devices.index(device) == world.rank
    return joules(device[1]) if is_first else 0.0


def joules(device_uuid: str) -> float:
    """Return the GPU's energy counter in joules since its driver started; NaN where
    there is none.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
        name = f"GPU-{device_uuid.removeprefix('GPU-')}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(name)
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3
    except Exception:
        # No driver, no counter, no permission: a figure is missing, no run stops.
        return float("nan")
