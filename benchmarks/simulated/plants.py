"""Faults that are planted in the program, to prove that the simulation notices them."""

import fcntl
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.simulated.calls import replaced
from hpcfed.errors import UserError
from hpcfed.experiment import checkpointing
from hpcfed.experiment.assemble import Setup
from hpcfed.results import claim, publish
from hpcfed.results.checkpoints import StoredFile


@contextmanager
def no_fsync() -> Iterator[None]:
    """Rename a file to its name without having synced its content."""

    def fsync(descriptor: int) -> None:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.fsync(descriptor)

    careless = SimpleNamespace(
        fsync=fsync,
        **{
            name: _forward(name)
            for name in ("open", "close", "replace", "getpid", "listdir")
        },
        **{
            name: getattr(os, name)
            for name in (
                "O_RDONLY",
                "O_WRONLY",
                "O_CREAT",
                "O_TRUNC",
                "O_NOFOLLOW",
                "O_NONBLOCK",
            )
        },
    )
    with replaced([(publish, "os", careless)]):
        yield


def _forward(name: str) -> Callable[..., Any]:
    """Return a function that calls whatever `os` has by then."""
    return lambda *words, **named: getattr(os, name)(*words, **named)


@contextmanager
def forgotten_field() -> Iterator[None]:
    """Leave what the channel keeps for each client out of checkpoints."""
    whole = checkpointing._write_state

    def forgetful(
        setup: Setup, there: Path, state: Any, *, is_root: bool
    ) -> list[StoredFile]:
        memory = setup.federation.channel.memory
        kept, memory.rows = memory.rows, {}
        try:
            return whole(setup, there, state, is_root=is_root)
        finally:
            memory.rows = kept

    with replaced([(checkpointing, "_write_state", forgetful)]):
        yield


@contextmanager
def loose_claim() -> Iterator[None]:
    """Look whether a folder is claimed, and only then claim it."""

    def locked(path: Path) -> int:
        if claim._is_locked(path):
            raise UserError(f"another run is writing to {path.parent}")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return descriptor

    with replaced([(claim, "_locked", locked)]):
        yield


PLANTS: Mapping[str, Callable[[], Any]] = {
    "no-fsync": no_fsync,
    "forgotten-field": forgotten_field,
    "loose-claim": loose_claim,
}
