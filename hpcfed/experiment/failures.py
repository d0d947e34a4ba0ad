"""How a run ends if it cannot go on: a failure ends all ranks, and says why."""

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from errno import EDQUOT, EFBIG, EIO, ENOSPC, EROFS, ESTALE
from functools import partial
from pathlib import Path

from hpcfed.clients.exits import ExitCalled, without_exits
from hpcfed.clients.lockstep import Stopped
from hpcfed.errors import Diverged, UserError, one_line, remark, tell
from hpcfed.plugins import line_of_user
from hpcfed.results.folder import leave_failure
from hpcfed.runtime.stalls import ending_stalls
from hpcfed.runtime.timer import Timer
from hpcfed.runtime.world import World

LOST = (
    "Connection reset by peer",
    "Connection closed by peer",
    "remote process exited",
)
"""What gloo and NCCL say when another rank is gone."""
BEAT = 1.0
"""Seconds between two signs of life of a rank."""


class Failed(SystemExit):
    """A run has failed and said why. The process exits with 1, unless caught."""

    def __init__(self, error: Exception) -> None:
        super().__init__(1)
        self.error = error


@dataclass
class Reporting:
    """What a rank's last message needs; filled in as the run learns it."""

    phase: Callable[[], str]
    """Returns the phase in progress."""
    folders: Sequence[Path] = field(default_factory=list)
    """The runs' folders, where the reason of a failure is left."""


@contextmanager
def ending_all_ranks(world: World, reporting: Reporting) -> Iterator[None]:
    """Let an exception on one rank end all ranks, and say where it came from."""
    try:
        # sys.exit in a user's code would end one rank silently, and leave the others
        # waiting.
        with without_exits():
            yield
    except UserError as error:
        # A single process leaves the message to the command line: same exit code.
        if world.alone:
            raise
        tell(error, world.rank)
        world.abort(2)
    except Exception as error:
        tell_failure(world, reporting.phase(), reporting.folders, error)
        # Other ranks may wait in a collective forever, so MPI ends them.
        world.abort(1)
        raise Failed(error) from None


def tell_failure(
    world: World, phase: str, folders: Sequence[Path], error: Exception
) -> None:
    """Say why runs on this rank have failed, and leave the reason in their folders."""
    trace = "".join(traceback.format_exception(error))
    # A reason from another rank, a divergence, an exit or a full disk is not a bug in
    # this code: one line is enough.
    # The traceback still goes to error-RANK.txt, whatever is printed.
    told = isinstance(error, UserError | Diverged | Stopped | ExitCalled)
    lost = not world.alone and any(word in str(error) for word in LOST)
    if not (told or lost or _is_disks(error, folders)):
        remark(trace.rstrip())
    within = "" if phase == "other" else f" in phase {phase}"
    said = one_line(error) + line_of_user(error)
    if lost:
        said = "the connection to another rank was lost: it has ended, or its host"
    line = f"{_where(world)} failed{within}: {said}"
    _last_words(world, folders, line, trace)


def _is_disks(error: Exception, folders: Sequence[Path]) -> bool:
    """Tell whether a disk refused to write a file that the error names, or one in the
    runs' folders: these may be gone, or no longer ours.
    """
    if not isinstance(error, OSError) or error.filename is None:
        return False
    above = Path(str(error.filename)).parents
    ours = any(folder in above for folder in folders)
    return ours or error.errno in (ENOSPC, EDQUOT, EFBIG, EROFS, EIO, ESTALE)


@contextmanager
def ending_when_stalled(
    world: World, reporting: Reporting, timers: Sequence[Timer], seconds: float
) -> Iterator[None]:
    """End this rank when a phase lasts too long: a rank that hangs cannot report it,
    but the ranks that wait for it can. 0 seconds: never.
    """

    def advanced() -> tuple[int, str]:
        changes = sum(timer.changes for timer in timers)
        return changes, reporting.phase()

    # The watching thread calls it, since the main thread may never return.
    give_up = partial(_stalled, world, reporting)
    with ExitStack() as within:
        within.enter_context(ending_stalls(advanced, seconds, give_up))
        if world.pulse is not None and seconds:
            within.enter_context(world.pulse.beating(BEAT))
        yield


def _stalled(world: World, reporting: Reporting, phase: str, waited: float) -> None:
    """Say that nothing has happened for too long, and which ranks are silent."""
    line = (
        f"{_where(world)} has been in phase {phase} for {waited:.0f} s: "
        "it hangs, or waits for a rank that does"
    )
    # A waiting rank still beats; a stopped rank, or one whose host is gone, does not.
    silent = []
    if world.pulse is not None:
        silent = world.pulse.silent(3 * BEAT)
    if silent:
        names = [f"{rank} on {world.locations[rank].host}" for rank in silent]
        line += f"; no sign of life from rank {', '.join(names)}"
    _last_words(world, reporting.folders, line)
    if world.role_rank == 0:
        # This rank hosts the store, where others may still be looking.
        time.sleep(2 * BEAT)


def _where(world: World) -> str:
    return f"rank {world.rank} on {world.location.host}"


def _last_words(
    world: World, folders: Sequence[Path], line: str, details: str = ""
) -> None:
    remark(f"hpcfed: {line}")
    for folder in folders:
        leave_failure(folder, world.rank, f"{line}\n\n{details}")
