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
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
        # Also those that git ignores, as Python imports them. `status` would name whole
        # folders of compiled files, too.
        added = _git(folder, "ls-files", "--others", "--", ":(glob)hpcfed/**/*.py")
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
