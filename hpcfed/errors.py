"""The exception for mistakes that users can fix, and how messages are printed."""

import difflib
import os
import re
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress

GRACE = 5.0
"""Seconds for the root to print a mistake before the launcher ends the job: a busy node
needs more than two.
"""
LONGEST_VALUE = 200
"""Characters of a value that a message still shows."""


class UserError(Exception):
    """A mistake that the user can fix: printed in one line, with exit code 2."""


class Diverged(ArithmeticError):
    """Numbers are not finite. The message says which options to change."""


class Halted(Exception):
    """The server was told to stop while it learnt, and has saved how far it is."""


def tell(error: UserError, rank: int) -> None:
    """Print a mistake in one line.

    Usually every rank finds the same mistake. So other ranks wait for the root's line,
    which ends the job. They print their own only if the root found nothing.
    """
    if rank:
        time.sleep(GRACE)
    where = f"rank {rank}: " if rank else ""
    remark(f"hpcfed: {where}{shortened(printable(str(error)))}")


def remark(text: str) -> None:
    """Write lines to stderr, without characters that a terminal would interpret.

    A run must not end because its terminal, pipe or log is gone or full.
    """
    try:
        # In one piece: a line of another rank, or of mpirun, must not come before its end.
        print(f"{_safe(text)}\n", end="", file=sys.stderr, flush=True)
    except OSError:
        # From now on, discard everything.
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def say(text: str) -> None:
    """Write progress lines to stdout; neither a full disk nor a reader that leaves, as
    `| head` does, ends what goes on.
    """
    with unless_full("going on without it"), while_read():
        print(_safe(text), flush=True)


@contextmanager
def unless_full(otherwise: str) -> Iterator[None]:
    """Turn a failure to write to stdout into a remark: what matters is on disk.

    A closed pipe, as in `| head`, is left to the caller.
    """
    try:
        yield
        if sys.stdout is not None:  # a process may be started without one
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename is not None:  # it was another file
            raise
        drop_stdout()
        remark(f"hpcfed: cannot write to stdout: {error.strerror}; {otherwise}")


@contextmanager
def while_read() -> Iterator[None]:
    """End printing where the reader has left, as in `| head`; the caller goes on."""
    try:
        yield
    except BrokenPipeError:
        drop_stdout()


def drop_stdout() -> None:
    """Discard everything that is printed from now on."""
    nowhere = open(os.devnull, "w")  # noqa: SIM115
    # Python flushes the old stdout's buffer at exit: that must not fail again.
    with suppress(OSError, ValueError):
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    sys.stdout = nowhere


def _safe(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """Return `unknown method 'fedagv'; did you mean 'fedavg'?`, or all known names."""
    names = list(known)
    hint = did_you_mean(name, names) or f"; known: {', '.join(names)}"
    return UserError(f"unknown {kind} '{name}'{hint}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'fedavg'?` if a known name is spelt similarly, else
    nothing.

    A misleading guess is worse than none: the letters must be the same in another
    order, or four of five must agree.
    """
    # Case is the commonest slip: Vit for ViT.
    names = {plain_name(name).lower(): name for name in known}
    plain = plain_name(word).lower()
    shuffled = [name for name in names if sorted(name) == sorted(plain)]
    near = difflib.get_close_matches(plain, list(names), n=1, cutoff=0.8)
    guesses = [plain] if plain in names else shuffled or near
    return f"; did you mean '{names[guesses[0]]}'?" if guesses else ""


def plain_name(word: str) -> str:
    """Return an option's name without the dashes of its flag."""
    return word.lstrip("-").replace("-", "_")


def one_line(error: BaseException) -> str:
    """Return an exception's message and its notes in one line."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    text = str(error).strip().partition("\n")[0]
    notes = "; ".join(getattr(error, "__notes__", []))
    return f"{type(error).__name__}: {text}" + (f" ({notes})" if notes else "")


def count(number: int, noun: str) -> str:
    """Return `1 rank` or `2 ranks`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def shown(value: object) -> str:
    """Return a value as Python writes it, in one line; arrays are told by their shape."""
    if isinstance(value, Mapping):
        items = [f"{name!r}: {shown(item)}" for name, item in value.items()]
        return f"{{{', '.join(items)}}}"
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and shape:
        return f"{type(value).__name__} of shape {list(shape)}"
    text = repr(value)
    if isinstance(value, str) or ("\n" not in text and len(text) <= LONGEST_VALUE):
        return text
    return f"an object of class {type(value).__name__}"


def shortened(text: str) -> str:
    """Cut numbers that have more digits than anybody reads."""
    return re.sub(r"[0-9]{50,}", lambda found: f"{found[0][:10]}…", text)


def printable(text: str) -> str:
    """Replace characters that a terminal would interpret: names may be untrusted."""
    if text.isprintable():
        return text
    unknown = "\N{REPLACEMENT CHARACTER}"
    return "".join(letter if letter.isprintable() else unknown for letter in text)


def command_line(*words: object) -> str:
    """Return a command of hpcfed to type: a path may have spaces in it."""
    return shlex.join(["hpcfed", *map(str, words)])


def no_checkpoint(folder: object, rounds: int) -> str:
    """Say why a run with this number of recorded rounds cannot be resumed."""
    lost = count(rounds, "recorded round")
    return (
        f"--resume {folder}: there is no whole checkpoint, and {lost} would be lost; "
        "add --overwrite to begin anew"
    )
