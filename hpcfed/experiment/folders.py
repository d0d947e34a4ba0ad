"""The folders that a run writes to: made, claimed, and cleared of an older run."""

import re
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from hpcfed import plugins
from hpcfed.clients import initial
from hpcfed.errors import UserError, remark
from hpcfed.options import RunConfig, Settings
from hpcfed.results.claim import claimed, sign
from hpcfed.results.folder import (
    RUNS,
    check_out,
    check_plain,
    empty,
    remove_empty_seeds,
    seed_folder,
    seed_folders,
)
from hpcfed.results.publish import make_durably
from hpcfed.results.stored import is_complete, is_silent, keeps_last
from hpcfed.runtime.world import World

MOST_ATTEMPTS = 1_000_000


def run_folders(folder: Path, config: RunConfig) -> list[Path]:
    """Return the folders for results: one for each seed, or the run's own."""
    if not config.seeds:
        return [folder]
    return [seed_folder(folder, seed) for seed in config.seeds]


def make_folders(
    points: Sequence[Settings], world: World, claims: ExitStack
) -> tuple[list[Path], bool]:
    """Make and claim the folders of all points; tell which are complete."""
    made = [make_folder(point.config, world, claims) for point in points]
    folders, done = [folder for folder, _ in made], [complete for _, complete in made]
    if any(done) and not all(done):
        raise UserError(
            f"{folders[done.index(True)]} has been completed meanwhile; start the study "
            "once more"
        )
    return folders, all(done)


def make_folder(
    config: RunConfig, world: World, claims: ExitStack
) -> tuple[Path, bool]:
    """Make and claim the run's folder on the root, and tell the others its name.

    Call it after every rank has checked the command line. Also return whether a resumed
    run is already complete: another process may have finished it.
    """
    folder, complete = config.out or RUNS, False
    if world.is_root:
        try:
            folder = config.out or _new_folder(config)
            complete = _take(folder, config, claims)
        except OSError as error:
            raise UserError(
                f"cannot write to --out {folder}: {error.strerror}"
            ) from None
    name, complete = world.role_bcast((str(folder), complete))
    return Path(name), complete


def _take(folder: Path, config: RunConfig, claims: ExitStack) -> bool:
    """Claim a folder and prepare it; tell whether its run is already complete."""
    make_durably(folder)
    # Before the claim, which writes to the folder.
    check_plain(folder)
    # The claims outlive this function: the caller releases them when the run is over.
    claims.enter_context(claimed(folder))
    seeds = [seed_folder(folder, seed) for seed in config.seeds or ()]
    if config.resume is not None:
        for path in seeds:
            claims.enter_context(claimed(path))
        return _look_again(folder, seeds, config)
    _clear(folder, seeds, claims, overwrite=config.overwrite)
    sign(folder)
    if config.init is not None and initial.is_kept(config.init):
        initial.keep(config.init, folder)
    return False


def _look_again(folder: Path, seeds: Sequence[Path], config: RunConfig) -> bool:
    """Tell whether the claimed runs are complete by now, with all that is generated."""
    check_plain(folder)
    done = [is_complete(run, config.rounds) for run in seeds or [folder]]
    if all(done):
        if is_silent(folder, config.generate) and keeps_last(folder):
            return False
        remark(f"hpcfed: {folder} is complete; there is nothing to go on with")
        return True
    if any(done):
        # Seeds advance together, and the command line has chosen the unfinished ones.
        raise UserError(
            f"{seeds[done.index(True)]} has been completed meanwhile; give --resume "
            "once more"
        )
    return False


def _clear(
    folder: Path, seeds: Sequence[Path], claims: ExitStack, *, overwrite: bool
) -> None:
    """Remove the old run from the folder, and make the folders of the seeds."""
    # Seeds that the new run does not have are claimed only while they are removed.
    with ExitStack() as others:
        for path in seed_folders(folder):
            (claims if path in seeds else others).enter_context(claimed(path))
        # Check again: another run may have finished in the meantime.
        check_out(folder, overwrite=overwrite, claimed=True)
        empty(folder)
    remove_empty_seeds(folder)
    for path in seeds:
        if not path.exists():
            make_durably(path)
            claims.enter_context(claimed(path))


def _word(name: str) -> str:
    """Return the name of a method or data set without characters that shells and other
    programs interpret, such as the colon of host:path.
    """
    last = plugins.label(name).rpartition(":")[2]
    return re.sub(r"[^\w.+-]+", "-", Path(last).stem) or "run"


def _new_folder(config: RunConfig) -> Path:
    """Make a folder named by the time.

    It gets a number if several runs begin in the same second, for example in a job
    array.
    """
    clock = time.strftime("%Y%m%d-%H%M%S")
    name = f"{_word(config.method)}-{_word(config.dataset)}-{clock}"
    # mkdir is the test: the process that makes the folder owns it.
    for number in range(1, MOST_ATTEMPTS):
        folder = RUNS / (name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            break
    return folder
