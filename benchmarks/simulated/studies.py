"""The story of a study: it is killed, with its runs or without, started again, perhaps
twice at a time, and ends with each of its trials complete.
"""

import random
import re
import shutil
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path

from benchmarks.simulated import faults
from benchmarks.simulated.disk import Disk
from benchmarks.simulated.machine import Machine
from benchmarks.simulated.processes import Cluster, Job
from benchmarks.simulated.reading import Unreadable, differences, state_of
from benchmarks.simulated.scheduler import Scheduler
from benchmarks.simulated.told import Told, last, outcome
from benchmarks.simulated.work import ENVIRONMENT, Length, References, Work
from hpcfed.results.study import read_gathered
from hpcfed.runtime.signals import SIGNALS

FILE, OUT = "study.toml", "study"
KINDS = (
    "none", "kill", "kill", "killall", "cut", "cut", "term", "interrupt", "full", "rival",
)  # fmt: skip
TURNS = 700
"""About as many turns as an undisturbed study takes."""


class StudyStory:
    """One seed's study, from its first life to its last."""

    def __init__(
        self,
        seed: int,
        machine: Machine,
        references: References,
        scratch: Path,
        length: Length,
        *,
        keep_trace: bool = False,
    ) -> None:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        self.told = Told(seed)
        self._machine, self._references, self._root = machine, references, scratch
        self._chance = chance = random.Random(f"study {seed}")
        self._scheduler = Scheduler(f"turns {seed}", keep_trace=keep_trace)
        self._cluster = Cluster(self._scheduler, Disk(scratch), machine.program)
        self._lives = length.of_studies
        self._work = Work.drawn(chance, length)
        self._ranks = chance.choice((1, 2))
        options = self._work.options() | {"deterministic": "true", "ranks": self._ranks}
        lines = ["[common]"]
        for name, value in options.items():
            quoted = (
                f'"{value}"' if isinstance(value, str) and value != "true" else value
            )
            lines.append(f"{name.replace('-', '_')} = {quoted}")
        text = "\n".join([*lines, "[sweep]", "seed = [0, 1]", ""])
        (scratch / FILE).write_text(text)
        self._cluster.disk.put(str(self._cluster.disk.root / FILE), text.encode())

    def tell(self) -> Told:
        """Live all lives."""
        for number in range(self._chance.randint(*self._lives)):
            self._live(self._chance.choice(KINDS), number)
            if self.told.findings:
                break
        else:
            self._live("none", self._lives[1])
            if not self.told.findings:
                self._judge_end()
        self.told.digest, self.told.trace = (
            self._scheduler.digest,
            self._scheduler.trace,
        )
        return self.told

    def _find(self, what: str) -> None:
        self.told.findings.append(f"life {self.told.lives} of a study: {what}")

    def _start(self, name: str) -> Job:
        words = ["study", FILE, "--out", OUT, "--launcher", "mpirun"]
        return self._cluster.start(name, words, environment=ENVIRONMENT)

    def _live(self, kind: str, number: int) -> None:
        cluster, chance = self._cluster, self._chance
        self._machine.take(cluster)
        cluster.jobs.clear()
        name = f"study-{number}"
        jobs = [self._start(name)]
        struck = faults.plan(kind, cluster, jobs[0], chance.randint(3, TURNS))
        if kind == "rival" or (kind == "kill" and chance.random() < 0.5):
            # A second study, which may find runs that the first has left behind.
            self._scheduler.after(
                chance.uniform(0.0, 8.0),
                lambda: jobs.append(self._start(f"{name}-second")),
            )
        with chdir(self._root):
            self._machine.run()
        faults.mend(cluster)
        if kind == "cut" and struck.came:
            cluster.disk.cut(chance)
        self.told.lives += len(cluster.jobs)
        self.told.faults[
            kind if struck.came or kind in ("none", "rival") else "too late"
        ] += 1
        if self._scheduler.hang:
            self._find(f"nobody goes on: {self._scheduler.hang}")
        for job in cluster.jobs:
            if "Traceback" in job.told:
                self._find(f"a traceback of {job.name}:\n{last(job, 25)}")
        self._judge_codes(jobs, struck)
        self._judge_runs()

    def _judge_codes(self, jobs: Sequence[Job], struck: faults.Struck) -> None:
        allowed = {0}
        if struck.came:
            # A study ends by the signal that it was sent.
            allowed |= {*struck.codes, *(128 + number for number in SIGNALS)}
        for job in jobs:
            self.told.outcomes[outcome(job.code, job.code == 0)] += 1
            refused = job.code == 2 and "another study is writing" in job.told
            if job.code not in allowed and not refused:
                self._find(f"exit code {job.code} after {struck.kind}:\n{last(job)}")

    def _judge_runs(self) -> None:
        """Compare what the trials have recorded with undisturbed runs."""
        for folder in sorted((self._root / OUT).glob("points/*/repeat-*/")):
            seed = int(re.findall(r"seed=(\d)", str(folder))[0])
            try:
                state = state_of(folder)
            except Unreadable as error:
                self._find(f"a torn record: {error}")
                continue
            whole = self._references.of(_of_seed(self._work, seed), self._ranks)[0][0]
            if state is not None:
                found = differences(whole, state, same_ranks=True)
                if found:
                    self._find(
                        f"not what an undisturbed run records: {', '.join(found)}"
                    )

    def _judge_end(self) -> None:
        gathered = read_gathered(self._root / OUT / "study.h5")
        found = [(trial.outcome.status, len(trial.runs)) for trial in gathered.trials]
        if found != [("complete", 1)] * 2:
            self._find(f"its trials are {found} at the end")


def _of_seed(work: Work, seed: int) -> Work:
    return Work(work.method, work.rounds, work.every, work.minutes, work.stall, seed)
