"""A run's folder: which names in it are the run's own, and what may be done to them.

Nothing else in the folder is ever changed or removed; a checkpoint's folder goes as a
whole. No link is followed, and what is no plain file is refused: a folder may have been
handed in, and a name in it may lead anywhere.
"""

import os
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from re import fullmatch

from hpcfed.errors import UserError

RECORD = "run.h5"
CLAIM = ".claim"
"""The file by which a run claims its folder while it goes on."""
JOB = ".job"
"""The file that names the Slurm job which began the run."""
CHECKPOINTS = "checkpoints"
_PARAMS = r"params-[0-9]{1,9}(-after-[0-9]{1,18})?\.h5"
_MADE = (
    rf"run\.h5|server\.h5|{_PARAMS}|error-[0-9]{{1,9}}\.txt|\.(run|server)\.h5\..+\.tmp"
)
"""Files that a run makes, and that --overwrite removes."""
_FILES = rf"{_MADE}|trace\.json|profile\.json|\.claim|\.job"
"""Files that are written to."""
_SEED = r"seed-([0-9]{1,19})"
_CHECKPOINT = r"[0-9]{8,18}"


def seeds(folder: Path) -> list[int]:
    """Seeds that have a folder of their own in it."""
    found = (
        fullmatch(_SEED, path.name)
        for path in _entries(folder)
        if path.is_dir() and not path.is_symlink()
    )
    return sorted(int(match[1]) for match in found if match)


def seed_folder(folder: Path, seed: int) -> Path:
    return folder / f"seed-{seed}"


def seed_folders(folder: Path) -> list[Path]:
    return [seed_folder(folder, seed) for seed in seeds(folder)]


def runs(folder: Path) -> list[Path]:
    """Folders of the runs in it: its seeds', or itself."""
    check_one_kind(folder)
    return [
        path for path in seed_folders(folder) if os.path.lexists(path / RECORD)
    ] or [folder]


def holds_run(folder: Path) -> bool:
    """Whether a run has begun in it, whatever has become of its record."""
    return any(os.path.lexists(folder / name) for name in (RECORD, CHECKPOINTS, CLAIM))


def check_one_kind(folder: Path) -> None:
    """Refuses a folder that holds a run and also seeds of one: nobody can tell which of
    them is meant.
    """
    own = [path.name for path in seed_folders(folder) if (path / RECORD).is_file()]
    if own and (folder / RECORD).is_file():
        raise UserError(
            f"{folder} holds both a run (run.h5) and a seed of one ({own[0]}); move "
            "one of them elsewhere"
        )


def checkpoint_folders(folder: Path) -> list[Path]:
    """Checkpoints of one run, the oldest first; what is a link is none."""
    there = folder / CHECKPOINTS
    found = [] if there.is_symlink() else _entries(there)
    return sorted(
        path for path in found if fullmatch(_CHECKPOINT, path.name) and _is_folder(path)
    )


def failures(folder: Path) -> list[Path]:
    """What ranks have left that failed."""
    names = (
        path
        for path in _entries(folder)
        if fullmatch(r"error-[0-9]{1,9}\.txt", path.name)
    )
    return [path for path in names if stat.S_ISREG(path.lstat().st_mode)]


def snapshots(folder: Path) -> list[Path]:
    """Files with the rows of clients."""
    return [path for path in _entries(folder) if fullmatch(_PARAMS, path.name)]


def leave_failure(folder: Path, rank: int, text: str) -> None:
    """The reason why a rank failed; where it cannot be written, nobody minds."""
    with suppress(OSError):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(os.open(folder / f"error-{rank}.txt", flags, 0o666), "w") as file:
            file.write(text)


def check_plain(folder: Path) -> None:
    """Refuses a folder in which one of the run's own names is a link, or neither a file
    nor a folder.
    """
    for path in _entries(folder):
        if fullmatch(_FILES, path.name):
            _check_kind(path, stat.S_ISREG, "file")
        elif fullmatch(rf"{CHECKPOINTS}|{_SEED}", path.name):
            _check_kind(path, stat.S_ISDIR, "folder")
            if path.name != CHECKPOINTS:
                check_plain(path)
                continue
            for checkpoint in _entries(path):
                if fullmatch(_CHECKPOINT, checkpoint.name):
                    _check_kind(checkpoint, stat.S_ISDIR, "folder")
                    for part in _entries(checkpoint):
                        _check_kind(part, stat.S_ISREG, "file")


def _check_kind(path: Path, is_kind: Callable[[int], bool], kind: str) -> None:
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        raise UserError(
            f"{path} is a link, which is not followed; put the {kind} itself there, or remove it"
        )
    if not is_kind(mode):
        raise UserError(f"{path} is no {kind}; remove it")


def check_out(out: Path, *, overwrite: bool, claimed: bool = False) -> None:
    """Refuses a folder with what a new run may not replace.

    A run that was killed has left its claim. So other files beside it are no reason to
    refuse `overwrite`; whoever has `claimed` the folder meanwhile has looked before.
    """
    if not out.exists():
        return
    if not out.is_dir():
        raise UserError(f"--out {out} is a file; name a folder")
    check_plain(out)
    if any((run / RECORD).exists() for run in runs(out)):
        if not overwrite:
            raise UserError(
                f"--out {out} already holds a run; add --overwrite to replace it, or "
                "name another folder"
            )
        return
    others = [path for path in _entries(out) if path.name not in (CLAIM, JOB)]
    own = [path for path in others if _is_own(path)]
    killed = claimed or len(own) > 0 or (out / CLAIM).exists()
    if others and not (overwrite and killed):
        more = "" if len(own) < len(others) else "; add --overwrite to begin in it"
        raise UserError(
            f"--out {out} is not empty and holds no run{more or '; name another folder'}"
        )


def _is_own(path: Path) -> bool:
    """Whether a run makes such a file or folder: one that was killed early has left
    some, and no record.
    """
    if fullmatch(_SEED, path.name):
        return _is_folder(path) and all(_is_own(own) for own in _entries(path))
    return path.name == CHECKPOINTS or fullmatch(_FILES, path.name) is not None


def strangers(folder: Path) -> list[Path]:
    """What no run has made."""
    return [path for path in _entries(folder) if not _is_own(path)]


def empty(folder: Path) -> None:
    """Removes what runs have written to it, and nothing else."""
    for run in (*seed_folders(folder), folder):
        for path in _entries(run):
            if fullmatch(_MADE, path.name):
                path.unlink()
        for checkpoint in checkpoint_folders(run):
            shutil.rmtree(checkpoint)
        with suppress(OSError):  # somebody's own files are in it
            (run / CHECKPOINTS).rmdir()


def remove_empty_seeds(folder: Path) -> None:
    """Removes folders of seeds that nothing is left in; their claims must have been
    given back.
    """
    for run in seed_folders(folder):
        with suppress(OSError):
            run.rmdir()


def _entries(folder: Path) -> list[Path]:
    """What is in a folder; nothing where there is none."""
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
