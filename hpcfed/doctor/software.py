"""Versions of what a run is made of, and whether all ranks have the same."""

import platform
from collections.abc import Mapping

import h5py

from hpcfed.doctor.finding import Finding, by_value, error, fine, ranks_text, skipped
from hpcfed.runtime.environment import (
    cuda_version,
    nccl_version,
    own_source,
    versions,
)
from hpcfed.runtime.gpu_state import DRIVER, gpu_state, visible_gpus
from hpcfed.runtime.world import World

Versions = Mapping[str, str]
"""By the name of what has the version."""
SHOWN = ("torch", "numpy", "h5py", "HDF5", "mpi4py", "deepspeed")
"""Packages to show; all are compared."""
REACH = "torch finds CUDA"
"""Whether it does, in the words below."""
NO_DRIVER = "no driver"
UNREACHED = "no, although there is a driver"


def look(world: World) -> Versions:
    """Return what this rank runs."""
    found = {"Python": platform.python_version(), **versions()}
    found["HDF5"] = h5py.version.hdf5_version
    # Two checkouts may have the same version.
    found["hpcfed's source"] = str(own_source()["sha256"])[:12]
    if world.device.type == "cuda":
        found["CUDA"] = str(cuda_version())
        found["NCCL"] = str(nccl_version())
        found["driver"] = gpu_state(world.location.device).driver or "unknown"
        found[REACH] = "yes"
    elif visible_gpus():
        found[REACH] = "yes, but --device cpu"
    else:
        found[REACH] = UNREACHED if DRIVER.exists() else NO_DRIVER
    return found


def judge(ranks: Mapping[int, Versions]) -> list[Finding]:
    """Compare the ranks' versions."""
    found = []
    names = dict.fromkeys(name for own in ranks.values() for name in own)
    for name in names:
        values = by_value({rank: own.get(name, "none") for rank, own in ranks.items()})
        if len(values) > 1:
            each = [f"{value} on {ranks_text(own)}" for value, own in values.items()]
            advice = (
                "start all ranks in the same environment: same modules, same Python"
            )
            found.append(error("versions", f"{name}: {', '.join(each)}", advice))
    first = next(iter(ranks.values()))
    if not found:
        shown = [f"{name} {first[name]}" for name in SHOWN if name in first]
        found = [fine("versions", f"Python {first['Python']}, {', '.join(shown)}")]
    return [*found, _cuda(ranks)]


def _cuda(ranks: Mapping[int, Versions]) -> Finding:
    lost = [rank for rank, own in ranks.items() if own.get(REACH) == UNREACHED]
    if lost:
        advice = (
            "ask for GPUs (--gpus-per-task 1), or install a torch for an older CUDA: "
            "its driver must be as new as torch's CUDA"
        )
        told = "there is a driver, but torch finds no GPU"
        return error("CUDA", told, advice, *lost)
    on_gpu = [own for own in ranks.values() if "CUDA" in own]
    if not on_gpu:
        reach = next(iter(ranks.values())).get(REACH, NO_DRIVER)
        reason = "no GPU" if reach == NO_DRIVER else "not used: --device cpu"
        return skipped("CUDA", reason)
    own = on_gpu[0]
    told = f"CUDA {own['CUDA']}, driver {own['driver']}, NCCL {own['NCCL']}"
    return fine("CUDA", told)
