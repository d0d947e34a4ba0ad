"""Files that no run may touch, and what leads a run to them.

A tree of canaries lies outside a run's folder. A snapshot of it before and after a
trial tells whether a file was read only. Entries of the run's folder are replaced by
links to canaries, or by FIFOs; users' own files are put beside them.
"""

import hashlib
import os
import random
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

Snapshot = dict[str, tuple[object, ...]]
"""Kind, size, time of change and content, by path."""
ENTRIES = (
    "run.h5", "server.h5", ".claim", "params-0.h5", "error-0.txt", "report.html", "checkpoints", "seed-3",
    "checkpoints/NEWEST", "checkpoints/NEWEST/complete.json", "checkpoints/NEWEST/run.h5",
    "checkpoints/NEWEST/common.shared.npy", "checkpoints/99999999",
)  # fmt: skip
"""What is replaced in a run's folder; NEWEST stands for its last checkpoint."""
FORMS = ("file", "folder", "nowhere", "moved", "fifo")
"""A link to a canary, to a folder of canaries, to a place where nothing is, to the
entry itself outside; or a FIFO.
"""
OWN = (
    "notes.md", "figures/first.svg", "params-mine.h5", "error-bars.txt", "report.html", "run.h5.bak",
    "seed-notes.txt", ".hidden", "seed-plots/params-0.h5", "old/error-0.txt", "old/run.h5",
)  # fmt: skip
"""Users' files, all but the first two named much like a run's."""


def build(folder: Path) -> None:
    """Make a tree of canaries, anew if there is one."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in (
        "file",
        "table.csv",
        "tree/run.h5",
        "tree/error-0.txt",
        "tree/params-0.h5",
        "tree/deep/notes.md",
    ):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"this file must not change: {name}\n" * 10)
    checkpoint = folder / "tree/checkpoints/00000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / "complete.json").write_text("{}")
    (folder / "empty").mkdir()


def snapshot(folder: Path, *, folders: bool = True) -> Snapshot:
    """Describe everything in a folder without following links; `folders`: also when
    folders have changed.
    """
    found: Snapshot = {}
    # os.walk and lstat follow no links: what they lead to has a place of its own.
    for root, names, files in os.walk(folder):
        for name in (*names, *files):
            path = Path(root, name)
            about = path.lstat()
            if stat.S_ISDIR(about.st_mode):
                # A folder changes its time when an entry comes or goes.
                found[str(path)] = ("folder", about.st_mtime_ns if folders else 0)
            elif stat.S_ISREG(about.st_mode):
                digest = hashlib.sha256(path.read_bytes()).hexdigest()
                found[str(path)] = ("file", about.st_size, about.st_mtime_ns, digest)
            else:
                found[str(path)] = ("other", about.st_mode, about.st_mtime_ns)
    return found


def touched(before: Snapshot, after: Snapshot) -> list[str]:
    """Name what was changed, made or removed between two snapshots."""
    paths = before.keys() | after.keys()
    return sorted(path for path in paths if before.get(path) != after.get(path))


def plant(run: Path, entry: str, form: str, outside: Path) -> None:
    """Put a link or a FIFO where an entry of a run's folder is, or could be."""
    path = run / entry
    if "NEWEST" in entry:
        checkpoints = sorted((run / "checkpoints").glob("[0-9]*"))
        newest = checkpoints[-1].name if checkpoints else "00000003"
        path = run / entry.replace("NEWEST", newest)
    path.parent.mkdir(parents=True, exist_ok=True)
    targets = {"folder": outside / "tree", "nowhere": outside / "empty/nothing"}
    target = targets.get(form, outside / "file")
    if form == "moved" and path.exists():
        target = outside / "moved" / path.name
        target.parent.mkdir()
        shutil.move(path, target)
    remove(path)
    if form == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(target)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def clear(run: Path) -> None:
    """Remove all links and FIFOs of a run's folder."""
    for root, names, files in os.walk(run):
        for name in (*names, *files):
            path = Path(root, name)
            mode = path.lstat().st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                path.unlink()


def leave_own(run: Path, names: Sequence[str] = OWN) -> Snapshot:
    """Put users' own files into a run's folder and describe them."""
    for name in names:
        path = run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"my own {name}\n")
    return own(run)


def own(run: Path) -> Snapshot:
    """Describe the users' files that are in a run's folder."""
    names = {str(run / name) for name in OWN}
    there = snapshot(run, folders=False)
    return {path: facts for path, facts in there.items() if path in names}


def pick(chance: random.Random) -> tuple[str, str]:
    """Pick an entry of the folder, and what to put in its place."""
    return chance.choice(ENTRIES), chance.choice(FORMS)
