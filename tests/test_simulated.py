"""A cluster simulated in one process: stories of faults, replayed by their seeds.

`python -m benchmarks.simulated` tells thousands at length. Here 200 are told in brief,
each of a fault and an end (`--brief`), and a few whole ones.
"""

import gc
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import h5py
import pytest

from benchmarks.launching import environment
from benchmarks.simulated.disk import Disk
from benchmarks.simulated.faults import KINDS
from benchmarks.simulated.machine import Machine
from benchmarks.simulated.processes import Cluster, Job
from benchmarks.simulated.reading import state_of
from benchmarks.simulated.scheduler import Scheduler
from benchmarks.simulated.stories import Teller
from benchmarks.simulated.told import Told
from benchmarks.simulated.work import BRIEF, ENVIRONMENT, OUT, Work
from hpcfed.results.folder import JOB
from hpcfed.runtime.launcher import launched

SEEDS = range(200)
AT_ONCE = 20
"""Stories of a test."""
WHOLE_SEEDS = range(3)
FOUND_BY = {"no-fsync": 11, "forgotten-field": 0, "loose-claim": 43}
"""Planted faults, and a seed that finds each."""


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    return tmp_path / "disk"


class Stories(dict[int, Told]):
    """Brief stories by seed, each told when it is first asked for."""

    def __init__(self, scratch: Path) -> None:
        super().__init__()
        self._teller = Teller(scratch, length=BRIEF)

    def __missing__(self, seed: int) -> Told:
        self[seed] = self._teller.tell(seed)
        return self[seed]


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Stories:
    return Stories(tmp_path_factory.mktemp("stories"))


@pytest.mark.parametrize("first", SEEDS[::AT_ONCE])
def test_nothing_is_lost(stories: Stories, first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        told = stories[seed]
        assert not told.findings, f"--brief --seed {seed}"
        assert told.lives >= 2


def test_faults_of_all_kinds_strike(stories: Stories) -> None:
    """Stories without them would show nothing."""
    kinds = set().union(*(stories[seed].faults for seed in SEEDS[:100]))
    assert kinds >= set(KINDS)


def test_nothing_is_lost_from_life_to_life(tmp_path: Path) -> None:
    teller = Teller(tmp_path)
    for seed in WHOLE_SEEDS:
        told = teller.tell(seed)
        assert not told.findings, f"--seed {seed}"
        assert told.lives >= 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"]
)
def test_an_interrupted_campaign_tells_what_it_has_and_leaves_no_process(
    number: signal.Signals,
) -> None:
    words = ["--seeds", "0..9999", "--brief", "--trace", "--processes", "2"]
    campaign = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.simulated", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=environment(),
    )  # fmt: skip
    assert campaign.stdout is not None
    # Once this is there, a story has been told, and both processes are at work.
    campaign.stdout.readline()
    # A terminal tells all processes, a batch system the first.
    to = os.killpg if number == signal.SIGINT else os.kill
    to(campaign.pid, number)
    told, said = campaign.communicate(timeout=100)
    assert campaign.returncode == 128 + number
    # Beside lines of progress.
    lines = [line for line in said.splitlines() if " lives, " not in line]
    assert lines == ["benchmarks.simulated: interrupted"]
    counted = re.search(r"^seeds +(\d+)$", told, re.M)
    assert counted is not None and 1 <= int(counted[1]) < 10000
    # Python's own tracker of resources ends just after the process that it belongs to.
    until = time.monotonic() + 60
    while left := living(campaign.pid):
        assert time.monotonic() < until, left
        time.sleep(0.05)


def living(group: int) -> list[str]:
    """Return the commands of a group's processes that have not ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, own = (
                (folder / "stat").read_text().rpartition(") ")[2].split()[:3]
            )
            if int(own) == group and state != "Z":
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except OSError:
            pass  # it has ended meanwhile
    return found


def test_a_seed_replays_its_story(tmp_path: Path, stories: Stories) -> None:
    """By another teller, in another folder, without the stories before it; and nothing
    of it stays in memory.
    """
    open_before = _open_files()
    again = Teller(tmp_path, length=BRIEF, keep_trace=True).tell(2)
    assert _open_files() == open_before
    first = stories[2]
    assert (again.digest, again.lives) == (first.digest, first.lives)
    assert again.trace[-len(first.trace) :] == first.trace
    assert len({told.digest for told in stories.values()}) == len(stories)


@pytest.mark.parametrize("plant", FOUND_BY)
def test_planted_faults_are_found(tmp_path: Path, plant: str) -> None:
    teller = Teller(tmp_path, length=BRIEF, plant=plant)
    told, again = (teller.tell(FOUND_BY[plant]) for _ in range(2))
    assert told.findings
    assert (again.findings, again.digest) == (told.findings, told.digest)


def _on_two_ranks(
    program: Callable[[object], None],
    machine: Machine,
    scheduler: Scheduler,
    scratch: Path,
) -> Job:
    """Run a program to its end."""
    cluster = Cluster(scheduler, Disk(scratch), program)
    machine.take(cluster)
    with machine.installed():
        job = cluster.start("job", [], ranks=2, environment=ENVIRONMENT)
        machine.run()
    return job


def test_ranks_that_wait_for_each_other_are_told(scratch: Path) -> None:
    def program(words: object) -> None:
        world = machine._all_ranks(launched())
        assert world is not None
        if world.Get_rank() == 0:
            world.recv(source=1, tag=1)
        world.Barrier()

    machine, scheduler, _ = _cluster(scratch)
    _on_two_ranks(program, machine, scheduler, scratch)
    assert scheduler.hang == (
        "job/0 waits for a message of rank 1; "
        "job/1 waits for Barrier number 0 with job/0"
    )


def test_a_signal_ends_a_rank_that_has_not_begun(scratch: Path) -> None:
    """A Python that has not come to its first line ends so, too."""
    begun: list[int] = []

    def program(words: object) -> None:
        begun.append(1)

    machine, scheduler, _ = _cluster(scratch)
    cluster = Cluster(scheduler, Disk(scratch), program)
    machine.take(cluster)
    with machine.installed():
        job = cluster.start("job", [], ranks=2, environment=ENVIRONMENT)
        for process in job.processes:
            process.receive(signal.SIGINT)
        machine.run()
    assert job.code == 128 + signal.SIGINT and not begun and not job.told


def test_different_collectives_are_told(scratch: Path) -> None:
    def program(words: object) -> None:
        world = machine._all_ranks(launched())
        assert world is not None
        world.allgather(1) if world.Get_rank() else world.Barrier()

    machine, scheduler, _ = _cluster(scratch)
    job = _on_two_ranks(program, machine, scheduler, scratch)
    assert job.code == 1 and "Barrier, allgather" in job.told


def test_a_store_waits_for_names(scratch: Path) -> None:
    """It waits as torch's does, and as long as its timeout."""
    told: list[object] = []

    def program(words: object) -> None:
        world = machine._all_ranks(launched())
        assert world is not None and machine.distributed is not None
        if world.Get_rank() == 0:
            store = machine.distributed.TCPStore("host", 0, is_master=True)
            store.set("a", "1")
            world.bcast(store.port)
            scheduler.spend(1.0)
            store.set("b", "2")
        else:
            store = machine.distributed.TCPStore(
                "host", world.bcast(None), timeout=timedelta(seconds=10)
            )
            told.append(store.multi_get(["a", "b"]))
            begin = scheduler.now
            with pytest.raises(RuntimeError):
                store.multi_get(["a", "c"])
            told.append(round(scheduler.now - begin))
        world.Barrier()

    machine, scheduler, _ = _cluster(scratch)
    job = _on_two_ranks(program, machine, scheduler, scratch)
    assert job.code == 0, job.told
    assert told == [[b"1", b"2"], 10]


@pytest.mark.parametrize("manner", ["none", "any", "all"])
def test_a_power_cut_after_the_end_loses_nothing(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, manner: str
) -> None:
    """Neither the run's folder, nor its record, its checkpoint and its job's name."""
    work = Work(0, 3, 1, 1.0, 0)
    environment = ENVIRONMENT | {"SLURM_JOB_ID": "7"}
    job, cluster = _run(
        scratch, monkeypatch, [*work.words(), "--out", OUT, "--requeue"], environment
    )
    assert job.code == 0, job.told
    cluster.disk.cut(random.Random(1), manner)
    state = state_of(scratch / OUT)
    assert state is not None and not state.damaged
    assert (state.status, state.rounds, state.checkpoint) == ("complete", 3, 3)
    assert (scratch / OUT / JOB).read_text() == "7 on cluster\n"


def test_a_power_cut_tears_what_was_not_synced(tmp_path: Path) -> None:
    """Otherwise a campaign that loses nothing would mean nothing."""
    found = set()
    for seed in range(40):
        root = tmp_path / str(seed)
        root.mkdir()
        disk = Disk(root)
        (root / "whole").write_bytes(b"1" * 10)
        disk.created(str(root / "whole"))
        disk.synced(str(root / "whole"))
        disk.synced(str(root))
        (root / "torn").write_bytes(b"2" * 9999)
        disk.created(str(root / "torn"))
        disk.cut(random.Random(seed))
        assert (root / "whole").read_bytes() == b"1" * 10
        torn = root / "torn"
        content = torn.read_bytes() if torn.exists() else None
        found.add(
            "gone" if content is None else "new" if content == b"2" * 9999 else "torn"
        )
    assert found == {"gone", "new", "torn"}


def _open_files() -> int:
    """Return how many HDF5 files this process has open, those in memory included."""
    gc.collect()
    return int(h5py.h5f.get_obj_count(h5py.h5f.OBJ_ALL, h5py.h5f.OBJ_FILE))


def _cluster(scratch: Path) -> tuple[Machine, Scheduler, Disk]:
    scratch.mkdir()
    return Machine(), Scheduler("test"), Disk(scratch)


def _run(
    scratch: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    environment: dict[str, str],
) -> tuple[Job, Cluster]:
    machine, scheduler, disk = _cluster(scratch)
    monkeypatch.chdir(scratch)
    cluster = Cluster(scheduler, disk, machine.program)
    machine.take(cluster)
    with machine.installed():
        job = cluster.start("job", words, environment=environment)
        machine.run()
    return job, cluster
