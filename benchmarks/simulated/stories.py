"""A story: one run, requeued job or study, and its lives from fault to fault until it is
complete; all of it drawn from one seed.
"""

import random
import re
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.faults.canaries import OWN
from benchmarks.simulated import faults
from benchmarks.simulated.calls import replaced
from benchmarks.simulated.disk import Disk
from benchmarks.simulated.machine import Machine
from benchmarks.simulated.plants import PLANTS
from benchmarks.simulated.processes import Cluster, Job, Process
from benchmarks.simulated.reading import State, Unreadable, differences, state_of
from benchmarks.simulated.scheduler import Scheduler
from benchmarks.simulated.studies import StudyStory
from benchmarks.simulated.told import Told, last, outcome
from benchmarks.simulated.work import ENVIRONMENT, OUT, WHOLE, Length, References, Work
from hpcfed.results import checkpoints
from hpcfed.results.folder import RECORD, check_plain
from hpcfed.runtime.signals import STOPPED

STUDIES = 16
"""One of this many seeds is the story of a study."""
MOST_ROUNDS = 12
REFUSED = ("another run is writing", "already holds a run", "meanwhile", "is complete")
"""How a run is refused where another one is at work, or has just been."""


class Teller:
    """Tells stories, one after the other, in a folder of its own."""

    def __init__(
        self,
        scratch: Path,
        *,
        length: Length = WHOLE,
        plant: str | None = None,
        keep_trace: bool = False,
    ) -> None:
        self._scratch, self._length, self._keep_trace = scratch, length, keep_trace
        self._machine = Machine()
        self._references = References(self._machine, scratch / "whole")
        self._plant = PLANTS[plant] if plant else nullcontext

    def tell(self, seed: int) -> Told:
        """Tell the story of a seed; nothing but the seed decides it."""
        begin = time.process_time()
        with self._machine.installed(), self._plant():
            kind = StudyStory if seed % STUDIES == STUDIES - 1 else Story
            story = kind(
                seed,
                self._machine,
                self._references,
                self._scratch / "disk",
                self._length,
                keep_trace=self._keep_trace,
            )
            told = story.tell()
        told.seconds = time.process_time() - begin
        return told


class Story:
    """One seed's runs in one folder, from the first life to the last."""

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
        self._machine, self._references, self._length = machine, references, length
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        self.told = Told(seed)
        self._chance = chance = random.Random(f"story {seed}")
        self._scheduler = Scheduler(f"turns {seed}", keep_trace=keep_trace)
        self._cluster = Cluster(self._scheduler, Disk(scratch), machine.program)
        self._cluster.on_rename = self._renamed
        self._cluster.hosts = chance.randint(1, 3)
        self._out = scratch / OUT
        self._requeued = chance.random() < 0.2
        self._seeds = chance.random() < 0.08
        self._ranks = chance.choice((1, 1, 2, 2, 3))
        self._changes_ranks = chance.random() < 0.25
        self._own: dict[str, bytes] = {}
        self._writers: dict[str, set[Job]] = {}
        self._begin(Work.drawn(chance, length, seeds=self._seeds))
        self._after: list[State | None] = [None for _ in self._folders]
        """What the last life has left."""

    def _begin(self, work: Work) -> None:
        """Begin a run, which takes the place of any earlier one."""
        self._work, self._folders = work, work.folders(self._out)
        self._all_ranks = {self._ranks}
        self._apart = False
        """Whether a seed has gone on after another's end: other kernels train it then."""
        self._promised: dict[Path, int] = {}
        """Rounds in the newest checkpoint that the program has completed, by run."""
        self._published: set[Path] = set()
        """Runs whose record was on disk at the end of a life."""
        self._overwrites = self._out.exists()
        """Whether a requeued job was told to take the folder."""
        self._advice: list[str] = []
        """The command that the program has advised to go on with."""
        self._restarts = 0
        """How often Slurm has started the job again."""

    # The story.

    def tell(self) -> Told:
        """Live all lives."""
        wanted = self._chance.randint(*self._length.lives)
        with self._noting_checkpoints():
            for number in range(wanted):
                self._live(self._chance.choice(faults.KINDS), number)
                if self.told.findings:
                    break
            else:
                self._live("none", wanted)
                if not self.told.findings:
                    self._judge_end()
        self.told.digest, self.told.trace = (
            self._scheduler.digest,
            self._scheduler.trace,
        )
        return self.told

    def _find(self, what: str) -> None:
        self.told.findings.append(f"life {self.told.lives}: {what}")

    def _live(self, kind: str, number: int) -> None:
        """Begin or resume the run, and let one fault strike it."""
        machine, cluster, chance = self._machine, self._cluster, self._chance
        if self._changes_ranks and number:
            self._ranks = chance.choice((1, 2, 3))
        before = self._after
        was_complete = _complete(before)
        if was_complete:
            self._go_on_after_the_end()
            before = [one if self._is_ours(one) else None for one in before]
        if _planned(before) < self._work.rounds or not _complete(before):
            self._all_ranks.add(self._ranks)
        ended = [_is_whole(one, _planned(before)) for one in before]
        self._apart |= any(ended) and not all(ended)
        _, turns = self._references.of(self._work, self._ranks)
        machine.take(cluster)
        cluster.jobs.clear()
        cluster.watches = self._work.stall > 0
        self._writers.clear()
        name = f"life-{number}"
        job = self._start(name, before)
        done = min((one.checkpoint if one else 0 for one in before), default=0)
        left = 0.15 + 0.85 * (self._work.rounds - done) / self._work.rounds
        struck = faults.plan(
            kind, cluster, job, chance.randint(3, max(4, int(left * turns)))
        )
        rivals: list[Job] = []
        if kind == "rival":
            soon = chance.choice((1e-4, 1e-3, 0.01, 0.5)) * chance.random()
            start = partial(self._start, f"{name}-rival", before)
            self._scheduler.after(soon, lambda: rivals.append(start()))
        with chdir(self._out.parent):
            machine.run()
        faults.mend(cluster)
        self.told.lives += 1 + len(rivals)
        came = struck.came or bool(rivals) or kind == "none"
        self.told.faults[kind if came else "too late"] += 1
        if self._scheduler.hang:
            self._find(f"nobody goes on: {self._scheduler.hang}")
        for what in struck.findings:
            self._find(what)
        if kind == "cut" and came:
            cluster.disk.cut(chance)
        self._judge(job, struck, rivals, before)
        if not self._own and (self._out / RECORD).exists():
            self._leave_own()

    def _go_on_after_the_end(self) -> None:
        """Choose what follows a complete run: itself, a longer one, or another one."""
        chance, work = self._chance, self._work
        manner = chance.choice(("again", "longer", "other", "other"))
        if manner == "longer" and not self._requeued:
            self._work = replace(
                work, rounds=min(work.rounds + chance.randint(1, 3), MOST_ROUNDS)
            )
            self._advice = []
        elif manner == "other":
            seed = (work.seed + 2) % 6
            self._begin(Work.drawn(chance, self._length, seed=seed, seeds=self._seeds))

    def _is_ours(self, state: State | None) -> bool:
        """Tell whether a record is of the present run, not of one before it."""
        return state is not None and state.seed in (
            self._work.seed,
            self._work.seed + self._seeds,
        )

    def _is_done(self, states: Sequence[State | None]) -> bool:
        """Tell whether the present run is complete, with as many rounds as it is to have."""
        whole = [_is_whole(one, self._work.rounds) for one in states]
        return all(whole) and all(map(self._is_ours, states))

    def _start(self, name: str, before: Sequence[State | None]) -> Job:
        """Start the run as a user or Slurm would after what has happened so far."""
        environment = dict(ENVIRONMENT)
        words = [*self._work.words(), "--out", OUT]
        if self._requeued:
            environment |= {
                "SLURM_JOB_ID": str(self._work.seed),
                "SLURM_CLUSTER_NAME": "simulated",
            }
            words.append("--requeue")
            if self._restarts:
                environment["SLURM_RESTART_COUNT"] = str(self._restarts)
            if not self._promised:
                # It begins anew: there is nothing to go on from.
                self._published.clear()
            # A requeued job has the same words as before.
            if self._overwrites:
                words.append("--overwrite")
            self._restarts += 1
        elif self._advice:
            words = self._advice
        elif any(before):
            words = ["run", "--resume", OUT]
            if _planned(before) < self._work.rounds:
                words += ["--rounds", str(self._work.rounds)]
            if not self._promised.keys() >= set(self._folders):
                words.append("--overwrite")
        elif self._out.exists():
            words.append("--overwrite")
        return self._cluster.start(
            name, words, ranks=self._ranks, environment=environment
        )

    # What is judged after each life.

    def _judge(
        self,
        job: Job,
        struck: faults.Struck,
        rivals: Sequence[Job],
        before: Sequence[State | None],
    ) -> None:
        self._after = states = self._states()
        jobs = [job, *rivals]
        done = self._is_done(states)
        self.told.outcomes[outcome(job.code, done)] += 1
        if rivals:
            self._judge_rivals(jobs, complete=done)
        elif job.code != 0 and job.code not in struck.codes:
            self._find(f"exit code {job.code} after {struck.kind}:\n{last(job)}")
        elif job.code == 0 and not done:
            self._find(f"exit code 0, but the run is not complete:\n{last(job)}")
        stopped = [one for one in jobs if one.code == STOPPED]
        if stopped:
            self._judge_stop(before, states)
        self._advice = _advised(stopped[0]) if stopped else []
        for one in jobs:
            if "Traceback" in one.told:
                self._find(f"a traceback of {one.name}:\n{last(one, 25)}")
        reported = max(map(_reported, jobs))
        self.told.rounds += reported
        for folder, state in zip(self._folders, states, strict=True):
            self._judge_run(folder, state, reported)
        if _complete(before):
            self._judge_unchanged(before, states)
        self._judge_own()

    def _judge_stop(
        self, before: Sequence[State | None], after: Sequence[State | None]
    ) -> None:
        """Look for the checkpoint of a run that was asked to stop."""
        for one, other in zip(before, after, strict=True):
            # A run that is asked while it looks for its checkpoint leaves all as it was.
            if one is not None and other is not None and one.written == other.written:
                continue
            if (
                other is None
                or other.status != "stopped"
                or other.checkpoint != other.rounds
            ):
                self._find("it has stopped without a checkpoint of its last round")

    def _judge_run(self, folder: Path, state: State | None, reported: int) -> None:
        """Look for what was recorded, and for what it is."""
        if state is None or not self._is_ours(state):
            what = "gone" if state is None else "an earlier run's"
            if reported or folder in self._published:
                self._find(
                    f"{folder.name}/{RECORD} is {what}, with {reported} reported rounds"
                )
            return
        self._published.add(folder)
        if state.rounds < reported:
            self._find(
                f"{reported - state.rounds} of {reported} reported rounds are not on disk"
            )
        # Seeds advance together: they go back to a checkpoint that all have.
        promised = min(self._promised.get(one, 0) for one in self._folders)
        if state.checkpoint < promised:
            damage = "; ".join(state.damaged) or "no other is there"
            self._find(
                f"the checkpoint after round {promised} was complete, and the newest whole one is of round "
                f"{state.checkpoint} ({damage})"
            )
        work = replace(self._work, rounds=state.planned)
        wholes, _ = self._references.of(work, max(self._all_ranks))
        whole = wholes[self._folders.index(folder)]
        same = len(self._all_ranks) == 1 and not self._apart
        found = differences(whole, state, same_ranks=same)
        if found:
            self._find(f"not what an undisturbed run records: {', '.join(found)}")

    def _judge_rivals(self, jobs: Sequence[Job], *, complete: bool) -> None:
        """Judge two runs in one folder: one goes on, the other is refused in one line."""
        if not complete:
            codes = sorted(job.code or 0 for job in jobs)
            self._find(
                f"two runs began in one folder, and none is complete: {codes}\n{last(jobs[0])}"
            )
        for job in jobs:
            refused = job.code == 2 and any(words in job.told for words in REFUSED)
            if job.code != 0 and not refused:
                self._find(f"exit code {job.code} of {job.name}:\n{last(job)}")

    def _judge_unchanged(
        self, before: Sequence[State | None], after: Sequence[State | None]
    ) -> None:
        for one, other in zip(before, after, strict=True):
            assert one is not None
            if one.planned < self._work.rounds:
                continue
            if (
                other is None
                or other.status != "complete"
                or differences(one, other, same_ranks=True)
            ):
                self._find("a complete run has been changed")

    def _judge_own(self) -> None:
        for name, content in self._own.items():
            path = self._out / name
            if not path.exists() or path.read_bytes() != content:
                self._find(f"the user's file {name} is not as it was")

    def _judge_end(self) -> None:
        """Judge the folder after the last life, in which nothing has happened."""
        states = self._states()
        if not self._is_done(states):
            self._find("the run is not complete at the end")
        check_plain(self._out)

    def _states(self) -> list[State | None]:
        return [self._state(folder) for folder in self._folders]

    def _state(self, folder: Path) -> State | None:
        try:
            return state_of(folder)
        except Unreadable as error:
            self._find(f"a torn record: {error}")
            return None

    # What happens meanwhile.

    def _leave_own(self) -> None:
        """Put users' files into the folder, safely on disk."""
        disk = self._cluster.disk
        for name in OWN[:1] + OWN[2:4]:
            content = f"my own {name}\n".encode()
            (self._out / name).write_bytes(content)
            disk.put(str(self._out / name), content)
            self._own[name] = content

    def _renamed(self, process: Process, path: str) -> None:
        """Watch that only one job at a time writes the record of a run."""
        if not path.endswith(f"/{RECORD}") or "/checkpoints/" in path:
            return
        writers = self._writers.setdefault(path, set())
        others = [job.name for job in writers if job is not process.job and job.active]
        writers.add(process.job)
        if others:
            self._find(f"{process.job.name} writes {RECORD} while {others[0]} does")

    @contextmanager
    def _noting_checkpoints(self) -> Iterator[None]:
        """Note which checkpoints the program has completed, or given up."""
        complete = checkpoints.complete

        def completed(folder: Path, rounds: int, *rest: Any, **more: Any) -> None:
            complete(folder, rounds, *rest, **more)
            run = folder.parent.parent.absolute()
            # Undisturbed runs to compare with are made meanwhile, too.
            if run in self._folders:
                self._promised[run] = rounds

        with replaced([(checkpoints, "complete", completed)]):
            yield


def _complete(states: Sequence[State | None]) -> bool:
    return all(map(_is_whole, states))


def _is_whole(state: State | None, rounds: int = 0) -> bool:
    return state is not None and state.status == "complete" and state.planned >= rounds


def _planned(states: Sequence[State | None]) -> int:
    return max((state.planned for state in states if state), default=0)


def _advised(job: Job) -> list[str]:
    """Return the command to go on with, as a stopped job has told it."""
    found = re.findall(r"^hpcfed: stopped; go on with: hpcfed (.*)$", job.told, re.M)
    return shlex.split(found[-1]) if found else []


def _reported(job: Job) -> int:
    """Return the last round that a job has reported to the user."""
    return max(map(int, re.findall(r"^round (\d+)/", job.told, re.M)), default=0)
