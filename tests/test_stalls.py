"""Time for which a job was suspended is no stall: looked at with a made-up clock, and
with real ranks.
"""

import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hpcfed.results import checkpoints
from hpcfed.runtime import process_group, stalls, world
from hpcfed.runtime.signals import STOPPED
from hpcfed.runtime.stalls import Awake, Pulse
from tests import jobs
from tests.conftest import Command
from tests.runs import flags

STALL = 8.0


class Clock:
    """A clock, and the event for which the watcher waits: every wait takes the next of
    these numbers of seconds.
    """

    def __init__(self, *waits: float) -> None:
        self._waits = list(waits)
        self.now = 100.0

    def wait(self, seconds: float) -> bool:
        if not self._waits:
            return True
        self.now += self._waits.pop(0)
        return False


class Ended(Exception):
    pass


def given_up(monkeypatch: pytest.MonkeyPatch, *waits: float) -> list[tuple[str, float]]:
    """Tell what the watcher of a phase that never ends has given up for."""

    def leave(code: int) -> None:
        raise Ended

    monkeypatch.setattr(os, "_exit", leave)
    clock, told = Clock(*waits), []
    with suppress(Ended):
        stalls.watch(
            lambda: (1, "train"),
            STALL,
            lambda phase, waited: told.append((phase, waited)),
            cast(threading.Event, clock),
            lambda: clock.now,
        )
    return told


def test_time_asleep_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    assert given_up(monkeypatch, *[1.0] * 9) == [("train", 9.0)]
    assert given_up(monkeypatch, *[1.5] * 6) == [("train", 9.0)], (
        "a busy machine makes looks late"
    )
    assert not given_up(monkeypatch, *[1.0] * 3, 1000.0, *[1.0] * 3)
    assert not given_up(monkeypatch, 1.0, 50_000.0, 1.0, 1000.0, 1.0)
    told = given_up(monkeypatch, *[1.0] * 3, 1000.0, *[1.0] * 9)
    assert len(told) == 1 and told[0][1] < 10, (
        "a run that hangs afterwards is still ended"
    )


def test_collectives_leave_it_to_the_watcher() -> None:
    """torch's own limit counts while a job is suspended, so it must be longer than any
    suspension.
    """
    alone = SimpleNamespace(
        Get_rank=lambda: 0,
        Get_size=lambda: 1,
        allgather=lambda own: [own],
        bcast=lambda own, root: own,
    )
    # A test before may have left one, for DeepSpeed.
    process_group.leave()
    process_group.join(alone, "gloo", torch.device("cpu"))
    try:
        backend = process_group.dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
        assert backend.options._timeout > timedelta(days=20)
    finally:
        process_group.leave()


def asleep(pause: float) -> Awake:
    """Count seconds in a process that is suspended for an hour before the second look."""
    looks = count()
    return Awake(pause, lambda: time.monotonic() + 3600 * (next(looks) > 1))


def _pulse(port: int) -> Pulse:
    patience = timedelta(minutes=1)
    return Pulse("127.0.0.1", port, rank=0, size=1, patience=patience)


def test_nobody_is_called_silent_after_a_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks was suspended with all others, who leave their next sign a little
    later.
    """
    store = process_group.dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    own = _pulse(store.port)
    monkeypatch.setattr(stalls, "Awake", asleep)
    with own.beating(1.0):
        time.sleep(0.3)
        assert own.silent(2.0) == []
    time.sleep(1.0)
    assert own.silent(1.5) == [0], "a rank that has stopped is found"


class _Counting:
    """A store that counts the messages of those who look."""

    def __init__(self, store: process_group.dist.TCPStore) -> None:
        self._store = store
        self.messages = 0

    def __getattr__(self, name: str) -> Callable[..., object]:
        self.messages += 1
        return getattr(self._store, name)


def test_hundreds_of_ranks_may_look_at_each_other() -> None:
    """Each looks with two messages. One that has left no sign yet is no obstacle."""
    store = process_group.dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    patience = timedelta(minutes=1)
    own = Pulse("127.0.0.1", store.port, rank=0, size=512, patience=patience)
    for rank in range(511):
        store.set(f"pulse/{rank}", str(rank))
    asked: Any = _Counting(store)
    assert own._signs(asked) == [str(rank).encode() for rank in range(511)] + [b""]
    store.set("pulse/511", "511")
    asked.messages = 0
    assert own._signs(asked)[-1] == b"511"
    assert asked.messages == 2


def test_ranks_raise_a_low_limit_of_open_files() -> None:
    soft, hard = before = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = 128 + len(os.listdir("/proc/self/fd"))
    assert soft > low, "or this test says nothing"
    resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
    try:
        process_group.allow_open_files(low - 1)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (low, hard)
        process_group.allow_open_files(low + 7)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (low + 7, hard)
        # More than may be had: as many as may be had.
        process_group.allow_open_files(2**62)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def _alive(name: str) -> bool:
    return any(thread.name == name for thread in threading.enumerate())


def test_a_store_may_take_longer_to_answer_than_those_who_look_wait(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """On a busy machine the store's thread waits for a core. torch would print a
    traceback for every attempt that is given up.
    """
    monkeypatch.setattr(stalls, "ANSWER", 0.01)
    store = process_group.dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    with _slowed(store.port, 0.3) as port:
        begin = time.monotonic()
        own = _pulse(port)
        assert time.monotonic() - begin > 0.3
        with own.beating(0.01):
            store.wait(["pulse/0"], timedelta(seconds=60))
    assert capfd.readouterr().err == ""


@contextmanager
def _slowed(port: int, seconds: float) -> Iterator[int]:
    """Pass one connection on to a store, which seems to take that long to answer."""

    def copy(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(4096):
                target.sendall(data)

    def serve() -> None:
        client, _ = listening.accept()
        time.sleep(seconds)
        store = socket.create_connection(("127.0.0.1", port))
        both = [(client, store), (store, client)]
        copies = [
            threading.Thread(target=copy, args=pair, daemon=True) for pair in both
        ]
        for thread in copies:
            thread.start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, daemon=True).start()
        yield listening.getsockname()[1]


def test_signs_end_with_the_store_without_a_word(
    capfd: pytest.CaptureFixture[str],
) -> None:
    store = process_group.dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    own = _pulse(store.port)
    with own.beating(0.01):
        while not store.check(["pulse/0"]):
            time.sleep(0.01)
        own.end()
        assert not _alive("pulse")
        last = store.get("pulse/0")
        time.sleep(0.05)
        assert store.get("pulse/0") == last
    del store
    assert own.silent(0.01) == [], "a store that is gone accuses nobody"
    assert capfd.readouterr().err == ""


def test_all_ranks_end_their_signs_before_the_store_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    pulse = SimpleNamespace(end=lambda: done.append("signs end"))
    monkeypatch.setattr(
        process_group, "leave_before_exit", lambda: done.append("store closes")
    )
    here = SimpleNamespace(
        pulse=pulse, role_barrier=lambda: done.append("all are here")
    )
    world.World.close(cast(world.World, here))
    assert done == ["all are here", "signs end", "all are here", "store closes"]


def test_a_suspended_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm: Command
) -> None:
    """All ranks sleep for longer than --stall-timeout, one while it waits for the
    other, and awake one by one.
    """
    monkeypatch.setenv("SLEEP", "2")  # the last rank's training
    words = flags(
        clients=4,
        rounds=4000,
        checkpoint_every=1,
        model="mlp",
        partition="iid",
        placement="steps",
    )
    out, slow_rank = tmp_path / "run", str(Path(__file__).with_name("slow_rank.py"))
    options = ["--stall-timeout", STALL, "--out", out]
    numbers, program = tmp_path / "ranks", [slow_rank]
    with jobs.begun(
        2, "run", *words, *options, python=program, start=warm, numbers=numbers
    ) as job:
        jobs.wait_for_a_checkpoint(out, job)
        time.sleep(1)  # now the first rank waits
        ranks = [int((numbers / str(rank)).read_text()) for rank in (0, 1)]
        for rank in ranks:
            os.kill(rank, signal.SIGSTOP)
        before = checkpoints.newest(out, say=pytest.fail)
        time.sleep(STALL + 2)
        for rank in ranks:
            os.kill(rank, signal.SIGCONT)
            time.sleep(1.5)
        job.send_signal(signal.SIGUSR2)
        told = job.communicate(timeout=60)[1]
    assert job.returncode == STOPPED and "sign of life" not in told, told
    after = checkpoints.newest(out, say=pytest.fail)
    assert before is not None and after is not None and after.rounds > before.rounds
