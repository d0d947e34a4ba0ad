"""The one exception that is the user's to mend, and how exceptions are told."""

import difflib
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

GRACE = 2.0
"""Seconds that the root has to tell a mistake which every rank has found, before the launcher ends the job."""


class UserError(Exception):
    """A mistake that the user can mend: shown as one line, without a traceback, with exit code 2."""


def tell(error: UserError, rank: int) -> None:
    """One line for a mistake that is mostly found by every rank: others speak only if the root had no reason to."""
    if rank:
        time.sleep(GRACE)
    where = f"rank {rank}: " if rank else ""
    remark(f"hpcfed: {where}{printable(str(error))}")


def remark(text: str) -> None:
    """Writes lines to stderr, if there is still one, without characters that a terminal would obey.

    No run ends because its terminal, pipe or log has gone, or is full.
    """
    try:
        print(_safe(text), file=sys.stderr, flush=True)
    except OSError:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 for all that is said from now on


def say(text: str) -> None:
    """Writes lines to stdout as `remark` does to stderr: for what is told on the way, not for what was asked for."""
    with unless_full("going on without it"):
        print(_safe(text), flush=True)


@contextmanager
def unless_full(otherwise: str) -> Iterator[None]:
    """Within, stdout may be full: that is a remark and no failure, because what matters is on disk.

    A reader who has gone, as in `| head`, is left to the caller.
    """
    try:
        yield
        if sys.stdout is not None:  # as it is where the process was started without one
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename is not None:
            raise
        nowhere = open(os.devnull, "w")  # noqa: SIM115 for all that is said from now on
        with suppress(OSError, ValueError):  # what stdout still holds is written at the end of the process
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        sys.stdout = nowhere
        remark(f"hpcfed: cannot write to stdout: {error.strerror}; {otherwise}")


def _safe(text: str) -> str:
    return "\n".join(printable(line) for line in text.split("\n"))


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """`unknown method 'fedagv'; did you mean 'fedavg'?`, or the list of what is known when nothing is close."""
    names = list(known)
    return UserError(f"unknown {kind} '{name}'{did_you_mean(name, names) or '; known: ' + ', '.join(names)}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'fedavg'?` when something known is close to the word, otherwise nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""


def one_line(error: BaseException) -> str:
    """What an exception says, for a person, with the notes that were added on its way."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    text = str(error).strip().partition("\n")[0]
    notes = "; ".join(getattr(error, "__notes__", []))
    return f"{type(error).__name__}: {text}" + (f" ({notes})" if notes else "")


def count(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def printable(text: str) -> str:
    """On one line, without characters that a terminal would obey: names may come from a file that was handed in."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def no_checkpoint(folder: object, rounds: int) -> str:
    """Why a run that has come so far cannot be gone on with."""
    return (
        f"--resume {folder}: there is no whole checkpoint, and {count(rounds, 'recorded round')} would be lost; "
        "add --overwrite to begin anew"
    )
