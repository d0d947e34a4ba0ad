"""Time for which a job was suspended is no stall: looked at with a made-up clock, and
with real ranks.
"""

import os
import signal
import threading
import time
from contextlib import suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from hpcfed.results import checkpoints
from hpcfed.runtime import process_group, stalls
from hpcfed.runtime.signals import STOPPED
from hpcfed.runtime.stalls import Awake, Pulse
from tests import jobs
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


def test_nobody_is_called_silent_after_a_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks was suspended with all others, who leave their next sign a little
    later.
    """
    store = process_group.dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    own = Pulse("127.0.0.1", store.port, rank=0, size=1)
    monkeypatch.setattr(stalls, "Awake", asleep)
    with own.beating(1.0):
        time.sleep(0.3)
        assert own.silent(2.0) == []
    time.sleep(1.0)
    assert own.silent(1.5) == [0], "a rank that has stopped is found"


def test_a_suspended_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    with jobs.begun(2, "run", *words, *options, python=[slow_rank]) as job:
        jobs.wait_for_a_checkpoint(out, job)
        time.sleep(1)  # now the first rank waits
        ranks = jobs.pids(job)
        for rank in (0, 1):
            os.kill(ranks[rank], signal.SIGSTOP)
        before = checkpoints.newest(out, say=pytest.fail)
        time.sleep(STALL + 2)
        for rank in (0, 1):
            os.kill(ranks[rank], signal.SIGCONT)
            time.sleep(1.5)
        job.send_signal(signal.SIGUSR2)
        told = job.communicate(timeout=60)[1]
    assert job.returncode == STOPPED and "sign of life" not in told, told
    after = checkpoints.newest(out, say=pytest.fail)
    assert before is not None and after is not None and after.rounds > before.rounds
