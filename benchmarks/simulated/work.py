"""The runs and studies that live on the simulated cluster, and undisturbed ones to
compare with.
"""

import random
import shutil
from collections.abc import Sequence
from contextlib import chdir
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.simulated.disk import Disk
from benchmarks.simulated.machine import Machine
from benchmarks.simulated.processes import Cluster
from benchmarks.simulated.reading import State, state_of
from benchmarks.simulated.scheduler import Scheduler

COMMON: dict[str, object] = {
    "dataset": "synthetic", "synthetic-shape": "1x2x2", "synthetic-classes": 2, "train-per-client": 8,
    "test-per-client": 4, "partition": "iid", "model": "mlp", "clients": 4, "batch-size": 8,
    "precision": "fp64", "device": "cpu", "evaluate-every": 2,
}  # fmt: skip
METHODS: tuple[dict[str, object], ...] = (
    {"method": "fedper", "participation": 0.75},
    {"method": "fedavg", "compress": "topk", "keep": 0.2, "participation": 0.5},
    {"method": "fedavgm", "compress": "qsgd", "levels": 3},
    {"method": "scaffold", "participation": 0.75},
    {"method": "feddyn", "participation": 0.75},
    {"method": "fedadam", "participation": 0.5, "compress": "topk", "keep": 0.3},
    {"method": "ditto", "participation": 0.75},
)
"""Methods with states of all kinds: rows of clients, rows of the server, and what the
channel keeps.
"""
OUT = "run"
"""The folder of all runs, within the disk: its path is a part of what they write."""
ENVIRONMENT = {"PATH": "/bin", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Length:
    """How long stories are: the fewest and the most of all that is drawn."""

    lives: tuple[int, int]
    """Lives of runs that may meet a fault; one without ends the story."""
    of_studies: tuple[int, int]
    """Lives of studies that may meet a fault; one without ends the story."""
    rounds: tuple[int, int]
    """Rounds of a run."""


WHOLE = Length((3, 5), (2, 4), (5, 8))
BRIEF = Length((1, 1), (1, 1), (3, 3))


@dataclass(frozen=True)
class Work:
    """What a story's run is to do."""

    method: int
    rounds: int
    every: int
    """Rounds between checkpoints; 0: by time alone."""
    minutes: float
    stall: int
    """--stall-timeout; 0: ranks do not watch each other."""
    seed: int = 0
    seeds: bool = False
    """Whether two seeds advance together: this one and the next."""

    @classmethod
    def drawn(
        cls,
        chance: random.Random,
        length: Length,
        *,
        seed: int = 0,
        seeds: bool = False,
    ) -> "Work":
        return cls(
            chance.randrange(len(METHODS)),
            chance.randint(*length.rounds),
            chance.choice((1, 2, 2, 3, 0)),
            chance.choice((0.005, 0.02, 1.0)),
            chance.choice((0, 8)),
            seed,
            seeds,
        )

    def folders(self, out: Path) -> list[Path]:
        """Return the folders of its runs."""
        if not self.seeds:
            return [out]
        return [out / f"seed-{seed}" for seed in (self.seed, self.seed + 1)]

    def options(self) -> dict[str, object]:
        # SCAFFOLD counts local steps, others epochs; one of each here.
        length = (
            "local-steps" if METHODS[self.method]["method"] == "scaffold" else "epochs"
        )
        return (
            COMMON
            | METHODS[self.method]
            | {
                length: 1,
                "rounds": self.rounds,
                "checkpoint-every": self.every,
                "checkpoint-minutes": self.minutes,
                "stall-timeout": self.stall,
                # It samples what real hosts do, in real time.
                "telemetry": 0,
            }
        )

    def words(self) -> list[str]:
        """Return the command line of the run, without its folder."""
        words = ["run", "--deterministic"]
        for name, value in self.options().items():
            words += [f"--{name}", str(value)]
        if self.seeds:
            return [*words, "--seeds", f"{self.seed},{self.seed + 1}"]
        return [*words, "--seed", str(self.seed)]


class References:
    """Undisturbed runs by work and ranks, each made when it is first asked for."""

    def __init__(self, machine: Machine, scratch: Path) -> None:
        self._machine, self._scratch = machine, scratch
        self._known: dict[tuple[Work, int], tuple[list[State], int]] = {}

    def of(self, work: Work, ranks: int) -> tuple[list[State], int]:
        """Return what an undisturbed run leaves, for each seed, and its turns."""
        # How often it writes checkpoints changes none of its numbers.
        plain = replace(work, every=2, minutes=1.0, stall=0)
        if (plain, ranks) not in self._known:
            steps = alone(
                self._machine, self._scratch, [*plain.words(), "--out", OUT], ranks
            )
            found = [state_of(folder) for folder in plain.folders(self._scratch / OUT)]
            assert all(state is not None for state in found)
            self._known[plain, ranks] = [state for state in found if state], steps
        return self._known[plain, ranks]


def alone(machine: Machine, folder: Path, words: Sequence[str], ranks: int) -> int:
    """Run a command on a sound cluster of its own; return how many turns it took."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    scheduler = Scheduler("undisturbed")
    cluster = Cluster(scheduler, Disk(folder), machine.program)
    machine.take(cluster)
    with chdir(folder):
        job = cluster.start("whole", words, ranks=ranks, environment=ENVIRONMENT)
        machine.run()
    if job.code:
        raise RuntimeError(f"an undisturbed run does not work:\n{job.told}")
    return scheduler.steps
