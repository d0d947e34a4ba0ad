"""Not to be started by hand: a rank that makes one run after the other.

    python -m benchmarks.swarm.worker SOCKET FOLDER [MODULE:FUNCTION …]

It asks the socket what to run and answers how that ended. What a run says goes to
out-RANK.txt and err-RANK.txt in the folder. The functions are called first; tests plant
faults by them.
"""

import json
import os
import socket
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.swarm.jobs import Order
from hpcfed import cli
from hpcfed.federation.channel.channel import Download
from hpcfed.federation.channel.compression import DownloadCompression
from hpcfed.runtime import randomness
from hpcfed.runtime.device import leaving_unchanged
from hpcfed.runtime.launcher import launched
from hpcfed.runtime.signals import Stop

STOP = "hpcfed.experiment.run.Stop"
NOT_OF_CLIENTS = ("central noise", "synthetic", "trial")
"""Beginnings of purposes whose keys are not those of clients."""
OF_ONE_CLIENT = ("fresh weights", "noise beside uploads", "supplement")
"""Purposes of numpy's streams whose last number is a client."""


class StopAfter(Stop):
    """Is asked to stop, as by a signal, during this round, counted from 1."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self._rounds = rounds

    def after(self, round: int) -> bool:
        return round + 1 == self._rounds


@contextmanager
def renamed(names: Sequence[int]) -> Iterator[None]:
    """Give client i the random numbers of client `names[i]`."""
    # What draws the keys of as few clients as a swarm has.
    keys, generator = randomness.client_keys_of_rounds, randomness.generator
    pack, packs_for_all = DownloadCompression._one_for_all, False
    known = np.array(names)

    def pack_for_all(self: DownloadCompression, download: Download) -> Download:
        nonlocal packs_for_all
        packs_for_all = True
        try:
            return pack(self, download)
        finally:
            packs_for_all = False

    def renamed_keys(
        seed: int, purpose: str, rounds: range, clients: np.ndarray
    ) -> np.ndarray:
        # One row for all is packed with a key of the server's own.
        if not (packs_for_all or purpose.startswith(NOT_OF_CLIENTS)):
            clients = known[clients]
        return keys(seed, purpose, rounds, clients)

    def renamed_generator(
        seed: int, purpose: str, *numbers: int
    ) -> np.random.Generator:
        if purpose in OF_ONE_CLIENT:
            numbers = (*numbers[:-1], names[numbers[-1]])
        return generator(seed, purpose, *numbers)

    with (
        patch.object(randomness, "client_keys_of_rounds", renamed_keys),
        patch.object(randomness, "generator", renamed_generator),
        patch.object(DownloadCompression, "_one_for_all", pack_for_all),
    ):
        yield


@contextmanager
def speaking_to(folder: Path, rank: int) -> Iterator[None]:
    """Send to files whatever this process writes, its libraries included."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(
            folder / f"{name}-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        )
        os.dup2(file, number)
        os.close(file)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, file in zip((1, 2), kept, strict=True):
            os.dup2(file, number)
            os.close(file)


def perform(order: Order) -> int:
    """Run a command line and return its exit code; -1 for an exception."""
    with ExitStack() as within:
        within.enter_context(leaving_unchanged())
        if order.stop_after:
            stopping = patch(STOP, lambda *_: StopAfter(order.stop_after))
            within.enter_context(stopping)
        if order.names:
            within.enter_context(renamed(order.names))
        try:
            cli.main(order.words)
        except SystemExit as ended:
            return _code(ended.code)
        except BaseException:
            traceback.print_exc()
            return -1
    return 0


def _code(code: Any) -> int:
    return code if isinstance(code, int) else int(code is not None)


def main() -> None:
    path, folder, *faults = sys.argv[1:]
    for fault in faults:
        module, _, function = fault.partition(":")
        getattr(import_module(module), function)()
    # Python tells a warning once for each line of code; every run shall tell it.
    for kind in (UserWarning, RuntimeWarning, FutureWarning):
        warnings.simplefilter("always", kind, append=True)
    launch = launched()
    rank = launch.rank
    server = socket.socket(socket.AF_UNIX)
    server.connect(path)
    lines = server.makefile("rw")
    print(rank, file=lines, flush=True)
    for line in lines:
        with speaking_to(Path(folder), rank):
            code = perform(Order(**json.loads(line)))
        if code in (1, 2) and not launch.alone:
            # As the program does, which ends the other ranks. MPI may have started for
            # an earlier run, and would wait for them.
            os._exit(code)
        print(code, file=lines, flush=True)


if __name__ == "__main__":
    main()
