"""A run's folder: which names in it belong to the run, and what may be done to them.

Nothing else in the folder is ever changed or removed; a checkpoint's folder is removed
as a whole. Links are not followed, and anything but a plain file is refused: a folder
may be untrusted, and a name in it may lead anywhere.
"""

import os
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from re import fullmatch

from hpcfed.errors import UserError
from hpcfed.options.first_weights import INIT
from hpcfed.options.run import seed_folder
from hpcfed.results.publish import (
    check_folder,
    check_no_result,
    check_target,
    write_plain,
)
from hpcfed.results.safe import check_answers

RUNS = Path("runs")
"""Where runs without --out go."""
# Other files import these names from here.

RECORD = "run.h5"
"""Everything that a run measured."""
SERVER, HALF_LEARNT = "server.h5", "learning.h5"
"""The trained server's model, and how far it has learnt until a learning ends."""
MODEL = "model.npz"
"""The global model after the last round: an array for each tensor, by name."""
GENERATED = "generated.jsonl"
"""What a language model says after a few prompts, an object in each line."""
STUDY = "study.h5"
"""All runs of a study, in the study's folder."""
PLAN = "plan.json"
"""The trials that a study will run, in the study's folder."""
POINTS, STACKS = "points", "stacks"
"""The folders of a study's trials and of its stacks' files, in the study's folder."""
CLAIM = ".claim"
"""The file with which a run claims its folder while it is running."""
STUDY_CLAIM = ".study"
"""The file with which a study claims its folder."""
JOB = ".job"
"""The file with the name of the Slurm job that began the run."""
CHECKPOINTS = "checkpoints"
TRACE, PROFILE = "trace.json", "profile.json"
"""Files that a profiled run writes."""
SIGN, LEARNING = "progress.json", "learning.json"
"""Signs of life, while the run is active and while its server learns."""
TRACKED = "tracked.json"
"""How far experiment trackers have been updated."""
TENSORBOARD = "tensorboard"
"""The folder that --tensorboard writes to."""
ADAPTER = "adapter"
"""The folder with the adapters of a run with --lora, in the files of PEFT."""
_PARAMS = r"params-[0-9]{1,9}(-after-[0-9]{1,18})?\.h5"
_FAILURE = r"error-[0-9]{1,9}\.txt"
_SIGNS = r"progress\.json|learning\.json|tracked\.json"
_WHOLE = r"run\.h5|server\.h5|learning\.h5|model\.npz|generated\.jsonl"
_TEMPORARY = rf"\.({_WHOLE}|{_SIGNS}|{_PARAMS}|\.job)\..+\.tmp"
_MADE = rf"{_WHOLE}|{_PARAMS}|{_FAILURE}|{_SIGNS}|{_TEMPORARY}"
"""Files that a run creates, and that --overwrite removes."""
_FILES = rf"{_MADE}|trace\.json|profile\.json|\.claim|\.job"
"""Files that a run writes to."""
_OWNERS = r"\.claim|\.job|\.\.job\..+\.tmp"
"""Files that say whose a folder is. Alone they are no run."""
_SEED = r"seed-[0-9]{1,19}"
_CHECKPOINT = r"[0-9]{8,18}"
_EVENTS = r"events\.out\.tfevents\..+"
"""Files in TensorBoard's folder."""
_ADAPTER = r"adapter_config\.json|adapter_model\.safetensors|\.adapter_.+\.tmp"
"""Files in the folder of the adapters."""
_CLIENT = r"client-[0-9]{1,19}"
"""Folders there with the adapters of clients."""
_INIT = rf"{_ADAPTER}|model\.(npz|safetensors)|\.model\..+\.tmp"
"""Files in the folder of first weights."""
_OF_RUN = rf"{_FILES}|({CHECKPOINTS}|{TENSORBOARD}|{ADAPTER}|{INIT})/.+"
"""Every path that a run writes, relative to its folder."""
_OUTCOME = rf"{POINTS}/[^/]+/repeat-[0-9]+\.(json|log)"
_OF_STUDY = rf"study\.h5|plan\.json|\.study|slurm-.+\.(log|toml)|{STACKS}/.+|{_OUTCOME}"
"""Every path that a study writes, relative to its folder; its trials are runs."""
_RESULTS = (".h5", ".npz", ".npy")
"""Suffixes of files of numbers; no export uses them."""


def seeds(folder: Path) -> list[int]:
    """Return the seeds that have their own folder in it, ascending."""
    # Names sort alphabetically, where 10 comes before 9.
    return sorted(
        int(path.name.removeprefix("seed-")) for path in _folders(folder, _SEED)
    )


def seed_folders(folder: Path) -> list[Path]:
    """Return the folders of all seeds in it, by seed."""
    return [seed_folder(folder, seed) for seed in seeds(folder)]


def runs(folder: Path) -> list[Path]:
    """Return the folders of the runs in it: its seeds' folders, or itself."""
    check_one_kind(folder)
    # A link counts, too; it is refused later, with its name.
    begun = [path for path in seed_folders(folder) if os.path.lexists(path / RECORD)]
    return begun or [folder]


def records(folder: Path) -> list[Path]:
    """Return the records of all runs in a folder, if they exist."""
    folders = (folder, *seed_folders(folder))
    return [run / RECORD for run in folders if (run / RECORD).is_file()]


def folders_with_runs(folder: Path) -> list[Path]:
    """Return the folders in it that hold a run, seeds of a run, or a study, by name."""
    found = []
    for path in _entries(folder):
        if _is_folder(path) and ((path / STUDY).is_file() or records(path)):
            found.append(path)
    return found


def holds_run(folder: Path) -> bool:
    """Tell whether a run has begun in it, whatever happened to its record."""
    names = (RECORD, CHECKPOINTS, CLAIM)
    return any(os.path.lexists(folder / name) for name in names)


def check_one_kind(folder: Path) -> None:
    """Refuse a folder with both a run and seeds of one: which is meant is unclear."""
    if not (folder / RECORD).is_file():
        return
    for path in seed_folders(folder):
        if (path / RECORD).is_file():
            raise UserError(
                f"{folder} holds both a run ({RECORD}) and a seed of one "
                f"({path.name}); move one of them elsewhere"
            )


def check_export(option: str, path: Path) -> None:
    """Refuse to write a page, a table or a figure over a file that a run or a study
    has, or will have, or over a benchmark's result. A slip such as `--csv run.h5` must
    not destroy a run.
    """
    check_target(option, path)
    check_no_result(option, path)
    if path.suffix in _RESULTS:
        raise UserError(
            f"{option} {path}: {path.suffix} is for results; name a file of another kind"
        )
    _check_free(option, path)


def _check_free(option: str, path: Path) -> None:
    """Refuse a path that belongs to an existing run or study."""
    # A link may lead into a run's folder.
    target = path.parent.resolve() / path.name
    # All folders above, because a run also owns files in folders of its own.
    for folder in target.parents:
        name = target.relative_to(folder).as_posix()
        # Match names first: folders that cannot hold any of them are not opened.
        if fullmatch(_OF_RUN, name) and _is_runs(folder):
            owner = "run"
        elif fullmatch(_OF_STUDY, name) and _is_studys(folder):
            owner = "study"
        else:
            continue
        raise UserError(
            f"{option} {path} belongs to the {owner} in {folder}, which would be "
            "damaged; name another place"
        )


def _is_runs(folder: Path) -> bool:
    """Tell whether a folder holds a run, or seeds of a run. Other programs also use
    folders named `checkpoints`. So unlike in `holds_run`, such a folder counts only if
    it holds checkpoints of a run.
    """
    begun = any(os.path.lexists(folder / name) for name in (RECORD, CLAIM))
    return begun or bool(checkpoint_folders(folder)) or bool(seeds(folder))


def _is_studys(folder: Path) -> bool:
    """Tell whether a folder holds a study. A plan.json alone is not enough."""
    return (folder / STUDY).is_file() or _is_folder(folder / POINTS)


def checkpoint_folder(run: Path, rounds: int) -> Path:
    """Return the folder of the checkpoint after this number of rounds."""
    return run / CHECKPOINTS / f"{rounds:08d}"


def checkpoint_folders(run: Path) -> list[Path]:
    """Return the folders of a run's checkpoints, oldest first; links do not count."""
    there = run / CHECKPOINTS
    # The target of a link might be removed as an outdated checkpoint.
    if there.is_symlink():
        return []
    return _folders(there, _CHECKPOINT)


def adapter_folder(run: Path, client: int | None = None) -> Path:
    """Return the folder of the global adapters, or of a client's own."""
    return run / ADAPTER if client is None else run / ADAPTER / f"client-{client}"


def adapter_folders(run: Path) -> list[Path]:
    """Return the folders of adapters, those of clients first; links do not count."""
    there = run / ADAPTER
    return [*_folders(there, _CLIENT), there] if _is_folder(there) else []


def snapshot_file(run: Path, rank: int, after: int | None = None) -> Path:
    """Return the file for the rows of a rank's clients. A resumed run that could not
    continue in its first file has another one, named `after` a number of rounds.
    """
    name = f"params-{rank}" if after is None else f"params-{rank}-after-{after}"
    return run / f"{name}.h5"


def snapshots(run: Path) -> list[Path]:
    """Return all files with the rows of clients."""
    return [path for path in _entries(run) if fullmatch(_PARAMS, path.name)]


def snapshots_of_rank(run: Path, rank: int) -> list[Path]:
    """Return the files with the rows of a rank's clients."""
    beginnings = (snapshot_file(run, rank).name, f"params-{rank}-after-")
    return [path for path in snapshots(run) if path.name.startswith(beginnings)]


def failures(run: Path) -> list[Path]:
    """Return the files in which failed ranks have left their errors."""
    found = []
    for path in _entries(run):
        if not fullmatch(_FAILURE, path.name):
            continue
        if stat.S_ISREG(path.lstat().st_mode):
            found.append(path)
    return found


def leave_failure(run: Path, rank: int, text: str) -> None:
    """Write down why a rank failed; ignore a failure to write."""
    with suppress(OSError):
        write_plain(text, run / f"error-{rank}.txt")


def check_plain(folder: Path) -> None:
    """Refuse a folder in which a name of the run is not a plain file or folder."""
    # Other names may be anything, and are not opened.
    for path in _entries(folder):
        if fullmatch(_FILES, path.name):
            _check_kind(path, stat.S_ISREG, "file")
        elif fullmatch(_SEED, path.name):
            _check_kind(path, stat.S_ISDIR, "folder")
            check_plain(path)
        elif path.name == CHECKPOINTS:
            _check_kind(path, stat.S_ISDIR, "folder")
            _check_plain_checkpoints(path)
        elif path.name in (TENSORBOARD, ADAPTER, INIT):
            _check_kind(path, stat.S_ISDIR, "folder")


def _check_plain_checkpoints(folder: Path) -> None:
    for checkpoint in _entries(folder):
        if not fullmatch(_CHECKPOINT, checkpoint.name):
            continue
        _check_kind(checkpoint, stat.S_ISDIR, "folder")
        for path in _entries(checkpoint):
            _check_kind(path, stat.S_ISREG, "file")


def _check_kind(path: Path, is_kind: Callable[[int], bool], kind: str) -> None:
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        raise UserError(
            f"{path} is a link, which is not followed; put the {kind} itself there, or "
            "remove it"
        )
    if not is_kind(mode):
        raise UserError(f"{path} is not a {kind}; remove it")


def check_out(out: Path, *, overwrite: bool, claimed: bool = False) -> None:
    """Refuse a folder with contents that a new run may not replace.

    A killed run leaves its claim behind. Then other files beside it are no reason to
    refuse `overwrite`. A caller that has `claimed` the folder since has already checked
    it.
    """
    # Old checkpoints are removed as whole folders, including any run inside them.
    _check_free("--out", out)
    check_folder("--out", out)
    if not out.exists():
        return
    check_plain(out)
    holds_record = any((run / RECORD).exists() for run in runs(out))
    if holds_record:
        if not overwrite:
            raise UserError(
                f"--out {out} already holds a run; add --overwrite to replace it, or "
                "name another folder"
            )
        return
    # No record: the folder belongs to somebody else, or its run was killed very early.
    found = [path for path in _entries(out) if not fullmatch(_OWNERS, path.name)]
    made = [path for path in found if _is_made_by_run(path)]
    # A run that ended well would have a record; a claim without one was left by a dead
    # run.
    was_killed = claimed or bool(made) or (out / CLAIM).exists()
    if not found or (overwrite and was_killed):
        return
    # With a foreign file in it, --overwrite would not help.
    advice = "name another folder"
    if len(made) == len(found):
        advice = "add --overwrite to begin in it"
    raise UserError(f"--out {out} is not empty and holds no run; {advice}")


def _is_made_by_run(path: Path) -> bool:
    """Tell whether a run creates such a file or folder, even one killed early."""
    if fullmatch(_SEED, path.name):
        return _is_folder(path) and all(map(_is_made_by_run, _entries(path)))
    if path.name in (CHECKPOINTS, TENSORBOARD, ADAPTER, INIT):
        return True
    return fullmatch(_FILES, path.name) is not None


def made(folder: Path) -> list[str]:
    """Return the names of what a run has created, except hidden files."""
    names = []
    for path in _entries(folder):
        if _is_made_by_run(path) and not path.name.startswith("."):
            names.append(path.name + "/" * _is_folder(path))
    return names


def strangers(folder: Path) -> list[Path]:
    """Return what no run has created."""
    return [path for path in _entries(folder) if not _is_made_by_run(path)]


def empty(folder: Path) -> None:
    """Remove what runs have written to it, and nothing else."""
    every = (*seed_folders(folder), folder)
    for run in every:
        check_answers(run / RECORD)
    for run in every:
        # Keep the claim and the job's name: the caller has claimed the folder.
        for path in _entries(run):
            if fullmatch(_MADE, path.name):
                path.unlink()
        for checkpoint in checkpoint_folders(run):
            shutil.rmtree(checkpoint)
        for name, ours in ((TENSORBOARD, _EVENTS), (INIT, _INIT)):
            for path in _entries(run / name):
                if fullmatch(ours, path.name):
                    path.unlink()
        for folder_of in adapter_folders(run):
            for path in _entries(folder_of):
                if fullmatch(_ADAPTER, path.name):
                    path.unlink()
            # These folders stay if the user's own files are in them.
            with suppress(OSError):
                folder_of.rmdir()
        for name in (CHECKPOINTS, TENSORBOARD, INIT):
            with suppress(OSError):
                (run / name).rmdir()


def remove_empty_seeds(folder: Path) -> None:
    """Remove empty folders of seeds; their claims must have been released."""
    for run in seed_folders(folder):
        with suppress(OSError):
            run.rmdir()


def _entries(folder: Path) -> list[Path]:
    """Return what is in a folder; nothing if the folder does not exist."""
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _folders(folder: Path, pattern: str) -> list[Path]:
    """Return the folders in it whose name matches, by name; links do not count."""
    entries = _entries(folder)
    return [
        path for path in entries if fullmatch(pattern, path.name) and _is_folder(path)
    ]


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
