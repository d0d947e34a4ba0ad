"""The version of this program, and the source it runs from."""

import subprocess
from functools import cache
from pathlib import Path

__version__ = "0.1.0"
PACKAGE = Path(__file__).resolve().parent


@cache  # a checkout that changes during a run is not what we imported
def source() -> str:
    """Return the version and its origin, as in `0.1.0 (commit 1a2b3c4d5e, changed)`."""
    state = checkout(PACKAGE.parent)
    if state is not None:
        commit, changed = state
        origin = f"commit {commit[:10]}" + (", changed" if changed else "")
    elif any(PACKAGE.parent.glob("hpcfed-*.dist-info")):
        origin = "wheel"
    else:
        origin = "a copy without git"
    return f"{__version__} ({origin})"


def checkout(folder: Path) -> tuple[str, bool] | None:
    """Return the commit of a checkout of hpcfed, and whether it was changed since; None
    if git cannot tell.

    Changed means: a file of the checkout, or any Python file in the package, differs
    from the commit.
    """
    if not (folder / ".git").exists():
        return None
    status = ["status", "--porcelain"]
    # Python also imports ignored modules; the pattern leaves out caches beside them.
    python_files = ["--", ":(glob)hpcfed/**/*.py"]
    untracked = ["--untracked-files=all", "--ignored=matching", *python_files]
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        changes = _git(folder, *status, "--untracked-files=no")
        added = _git(folder, *status, *untracked)
    except (OSError, subprocess.SubprocessError):
        # No git, or another user's checkout that git does not trust.
        return None
    return commit, bool(changes or added)


def _git(folder: Path, *words: str) -> str:
    # Many ranks and runs may look at one checkout, so none takes its lock.
    command = ["git", "--no-optional-locks", "-C", str(folder), *words]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=10, check=True
    )
    return ended.stdout.strip()
