"""Versions of what a run is made of, and whether all ranks have the same."""

import platform
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import h5py

from hpcfed.doctor.finding import Finding, by_value, error, fine, ranks_text, skipped
from hpcfed.runtime.accelerator import is_gpu, make_of
from hpcfed.runtime.environment import (
    cuda_version,
    nccl_version,
    other_makes,
    own_source,
    versions,
)
from hpcfed.runtime.gpu_state import DRIVER, gpu_state, visible_gpus
from hpcfed.runtime.world import World

SHOWN = ("torch", "numpy", "h5py", "HDF5", "mpi4py", "deepspeed")
"""Packages to show; all are compared."""
NO_GPU = "no GPU"
NOT_WANTED = "not used: --device cpu"
UNREACHED = "there is a driver, but torch finds no GPU"


class Installed(NamedTuple):
    """What a rank runs."""

    versions: Mapping[str, str]
    """By the name of what has the version."""
    gpu: Mapping[str, str]
    """Versions of what it reaches its GPU through; empty on a CPU."""
    reason: str = ""
    """Why it uses no GPU: one of those above; empty if it does."""


Ranks = Mapping[int, Installed]


def look(world: World, wanted: str) -> Installed:
    """Return what this rank runs; `wanted` is the --device that the user asked for."""
    found = {"Python": platform.python_version(), **versions()}
    found["HDF5"] = h5py.version.hdf5_version
    # Two checkouts may have the same version.
    found["hpcfed's source"] = str(own_source()["sha256"])[:12]
    if is_gpu(world.device):
        return Installed(found, _gpu_versions(world))
    there = visible_gpus() > 0 or DRIVER.exists()
    return Installed(found, {}, why_no_gpu(wanted, there=there))


def why_no_gpu(wanted: str, *, there: bool) -> str:
    """Return why a rank is on a CPU; `there`: its node has a GPU, or a driver of one."""
    if not there:
        return NO_GPU
    return NOT_WANTED if wanted == "cpu" else UNREACHED


def _gpu_versions(world: World) -> dict[str, str]:
    make = make_of(world.device)
    if make == "NVIDIA":
        driver = gpu_state(world.location.device).driver or "unknown"
        cuda, nccl = str(cuda_version()), str(nccl_version())
        return {"CUDA": cuda, "driver": driver, "NCCL": nccl}
    found = {name: str(version) for name, version in other_makes().items()}
    return found | {"RCCL": str(nccl_version())} if make == "AMD" else found


def judge(ranks: Ranks) -> list[Finding]:
    """Compare the ranks' versions; those of GPUs among ranks that have one."""
    found = [
        *_differing({rank: own.versions for rank, own in ranks.items()}),
        *_differing({rank: own.gpu for rank, own in ranks.items() if own.gpu}),
    ]
    first = next(iter(ranks.values())).versions
    if not found:
        shown = [f"{name} {first[name]}" for name in SHOWN if name in first]
        found = [fine("versions", f"Python {first['Python']}, {', '.join(shown)}")]
    return [*found, _gpu(ranks)]


def _differing(ranks: Mapping[int, Mapping[str, str]]) -> Iterator[Finding]:
    """Yield an error for each name that has several versions."""
    for name in dict.fromkeys(name for own in ranks.values() for name in own):
        values = by_value({rank: own.get(name, "none") for rank, own in ranks.items()})
        if len(values) > 1:
            each = [f"{value} on {ranks_text(own)}" for value, own in values.items()]
            advice = (
                "start all ranks in the same environment: same modules, same Python"
            )
            yield error("versions", f"{name}: {', '.join(each)}", advice)


def _gpu(ranks: Ranks) -> Finding:
    lost = [rank for rank, own in ranks.items() if own.reason == UNREACHED]
    if lost:
        advice = (
            "ask for GPUs (--gpus-per-task 1), or install a torch for an older CUDA: "
            "its driver must be as new as torch's CUDA"
        )
        return error("CUDA", UNREACHED, advice, *lost)
    on_gpu = [own.gpu for own in ranks.values() if own.gpu]
    if not on_gpu:
        return skipped("CUDA", next(iter(ranks.values())).reason)
    own = on_gpu[0]
    told = ", ".join(f"{name} {version}" for name, version in own.items())
    return fine("CUDA" if "CUDA" in own else "GPU software", told)
