"""Trials that start short runs of their own, each in a single process.

The undisturbed runs that they are compared to are made once and shared by all trials.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.faults import canaries
from benchmarks.faults.lives import (
    PATIENCE,
    Job,
    Tally,
    complete,
    differences,
    on_ranks,
    program,
)
from benchmarks.faults.references import (
    PACE,
    ROUNDS,
    STUDY,
    Queue,
    References,
    alive,
    damage,
    disturbed_run,
    pace,
    points,
    study,
    work,
)
from hpcfed.errors import one_line
from hpcfed.results.checkpoints import MARKER
from hpcfed.results.folder import CHECKPOINTS
from hpcfed.results.stored import read_run
from hpcfed.runtime.signals import STOPPED

ASIDE = ("hangup-alone", "study", "requeue", "seeds", "twice")


class Aside:
    """One trial in a folder of its own."""

    def __init__(
        self, kind: str, place: Path, chance: random.Random, references: References
    ) -> None:
        self.kind, self.tally = kind, Tally()
        self._place, self._chance, self._references = place, chance, references
        self._orders, self._out = place / "orders", place / "run"
        self._outside = place / "outside"
        self._jobs: list[Job] = []
        self._how = ""
        """What exactly was done; remarks begin with it."""

    def go(self) -> Tally:
        """Do the trial, and return what was found; no trial is in the tally where the
        fault came too late.
        """
        self._orders.mkdir(parents=True)
        canaries.build(self._outside)
        before = canaries.snapshot(self._outside)
        trials: dict[str, Callable[[], None]] = {
            "hangup-alone": self._hangup,
            "study": self._study,
            "requeue": self._requeue,
            "seeds": self._seeds,
            "twice": self._twice,
        }
        try:
            trials[self.kind]()
        except Exception as error:
            self._remark(f"the trial itself has failed: {one_line(error)}")
        finally:
            for job in self._jobs:
                job.end()
        self._count_touched(canaries.touched(before, canaries.snapshot(self._outside)))
        shutil.rmtree(self._place)
        return self.tally

    def _hangup(self) -> None:
        """Take the terminal away from a run without mpirun."""
        pace(self._orders, PACE)
        job = self._start(program(self._orders, work(self._out)))
        if not self._reach(job):
            return
        os.kill(job.process.pid, signal.SIGHUP)
        time.sleep(PACE)
        self._strike(job)
        pace(self._orders, 0)
        self._end(job)
        self._count_lost(job, self._out)
        if job.process.returncode:
            self._remark("the run has ended", job)
            self._resume(self._out)
        self._compare([(self._references.run(), self._out)])

    def _study(self) -> None:
        """Kill a study, and start it again until it is complete; its run may live on
        meanwhile.
        """
        file, out = self._place / "study.toml", self._out
        file.write_text(STUDY)
        whole = self._references.study()
        job = self._start(study(file, out))
        job.until(lambda: False, self._chance.uniform(0.5, 9.0))
        if not job.alive:
            return
        runs = job.ranks()
        orphan = self._chance.random() < 0.5
        self._how = "its run lives on" if orphan else "killed with its run"
        os.kill(job.process.pid, signal.SIGKILL)
        for run in runs if not orphan else ():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run, signal.SIGKILL)  # each is in a session of its own
        self._strike(job)
        job.process.wait()
        for _ in range(20):
            # While its run lives on, the study must be refused, or wait.
            living = any(map(alive, runs))
            again = self._start(study(file, out))
            if not self._end(again) or again.process.returncode == 0:
                break
            if not living:
                self._remark("the study cannot go on", again)
                break
            if again.process.returncode == 2 and again.refusal() is None:
                self._remark("not refused in one line", again)
            time.sleep(0.5)
        self._compare_studies(whole, out)

    def _requeue(self) -> None:
        """Have a job queued again twice; or have one find the folder of another job."""
        queue = Queue(self._place / "queue", job=42)
        if self._chance.random() < 0.4:
            self._find_another(queue)
            return
        pace(queue.orders, PACE)
        named = self._chance.random() < 0.5
        words = work(self._out) if named else work()
        out = self._out if named else self._place / "runs/slurm-42"
        done = 0
        for restarts in (0, 1):
            job = self._keep(queue.start(restarts, words, self._place))
            if not self._hit_job(job, queue, out, done):
                if not self.tally.trials:
                    return
                break  # the first fault counts, and what became of the run is compared
            done = max(done, job.reported())
        pace(queue.orders, 0)
        job = self._keep(queue.start(2, words, self._place))
        if self._end(job) and job.process.returncode:
            self._remark("it cannot go on", job)
        self._compare([(self._references.run(), out)])

    def _hit_job(self, job: Job, queue: Queue, out: Path, done: int) -> bool:
        """End a job early or in a later round, as a node that fails or as a limit of
        time; False: it was too late.
        """
        if self._chance.random() < 0.25:
            job.until(lambda: False, self._chance.uniform(0.2, 3.0))
        elif not self._reach(job, done):
            return False
        asked = job.reported() > 0 and self._chance.random() < 0.6
        begin = time.monotonic()
        if asked:
            os.kill(job.process.pid, signal.SIGUSR2)
        else:
            job.end()
        self._strike(job)
        self._end(job, begin)
        told = job.reported()
        if told:
            self._count_lost(job, out)
        # A signal in the last round comes too late to stop anything.
        late = job.process.returncode == 0 and complete(out)
        stopped = job.process.returncode == STOPPED and queue.requeued.exists()
        if asked and not late and not stopped:
            self._remark("it does not ask to be queued again", job)
        return True

    def _find_another(self, queue: Queue) -> None:
        """Queue a job again before it has made its folder, in which another job's run
        is.
        """
        shutil.copytree(self._references.of_another_job(), self._out)
        before = canaries.snapshot(self._out, folders=False)
        job = self._keep(
            queue.start(self._chance.choice((1, 2)), work(self._out), self._place)
        )
        self._strike(job)
        self._end(job)
        self._count_touched(
            canaries.touched(before, canaries.snapshot(self._out, folders=False))
        )
        if job.process.returncode == 0:
            self._remark("it has taken another job's run for its own", job)

    def _seeds(self) -> None:
        """Remove or damage the last checkpoint of one of two seeds; some runs are
        stopped once more.
        """
        ranks = self._chance.choice((1, 2))
        command = program if ranks == 1 else on_ranks
        pace(self._orders, PACE)
        job = self._start(command(self._orders, work(self._out, "--seeds", "0..1")))
        if not self._reach(job, done=6):  # two checkpoints are there
            return
        job.end()
        self._strike(job)
        for seed in (0, 1):
            self._count_lost(job, self._out / f"seed-{seed}")
        found = sorted(
            self._out.glob(f"seed-{self._chance.randrange(2)}/{CHECKPOINTS}/*/{MARKER}")
        )
        if found:
            newest = found[-1].parent
            self._how = f"{ranks} ranks, {newest.relative_to(self._out)} gone"
            if self._chance.random() < 0.5:
                shutil.rmtree(newest)
            else:
                file = self._chance.choice(sorted(newest.iterdir()))
                self._how = f"{ranks} ranks, {file.relative_to(self._out)} damaged"
                damage(file, self._chance)
        if self._chance.random() < 0.4:
            self._how += ", stopped once more"
            self._stop_again(command(self._orders, ["run", "--resume", str(self._out)]))
        pace(self._orders, 0)
        self._resume(self._out, command)
        whole = self._references.run("--seeds", "0..1", ranks=ranks)
        self._compare(
            [(whole / f"seed-{seed}", self._out / f"seed-{seed}") for seed in (0, 1)]
        )

    def _stop_again(self, command: list[str]) -> None:
        """Ask a run that goes on with uneven seeds to stop: all seeds must agree."""
        job = self._start(command)
        job.begin()
        job.until(lambda: False, self._chance.uniform(0, 4 * PACE))
        begin = time.monotonic()
        for process in job.ranks() or [job.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGUSR2)
        if self._end(job, begin) and job.process.returncode not in (0, STOPPED):
            self._remark("it has not stopped as it should", job)

    def _twice(self) -> None:
        """Start a second run in the folder of a run that is at work, or in the folder
        of one of its seeds.
        """
        pace(self._orders, PACE)
        job = self._start(program(self._orders, work(self._out, "--seeds", "0..1")))
        if not self._reach(job, most=ROUNDS // 2):
            return
        pace(self._orders, 1.0)
        other = self._chance.choice((self._out, self._out / "seed-0"))
        seeds = ["--seeds", "0..1"] if other == self._out else []
        how = self._chance.choice(("--resume", "--overwrite"))
        self._how = f"{how} {other.relative_to(self._place)}"
        words = (
            ["run", how, str(other)] if how == "--resume" else work(other, *seeds, how)
        )
        second = self._start([sys.executable, "-m", "hpcfed", *words])
        self._end(second)
        if not job.alive:
            if job.process.returncode:
                self._strike(job)
                self._remark("the second has ended the first", job)
            return
        self._strike(job)
        if second.refusal() is None:
            self._remark("not refused while a run is at work there", second)
        pace(self._orders, 0)
        if self._end(job) and job.process.returncode:
            self._remark("the first run is disturbed", job)
        whole = self._references.run("--seeds", "0..1")
        self._compare(
            [(whole / f"seed-{seed}", self._out / f"seed-{seed}") for seed in (0, 1)]
        )

    def _start(self, command: list[str]) -> Job:
        return self._keep(Job(command, folder=self._place))

    def _keep(self, job: Job) -> Job:
        """Remember a job, to end it with the trial, whatever happens."""
        self._jobs.append(job)
        return job

    def _reach(self, job: Job, done: int = 0, most: int = ROUNDS - 2) -> bool:
        """Wait for some round beyond those that are done; False where the run has ended
        before.
        """
        # Not the last two rounds: the fault must come before the end.
        aim = self._chance.randint(min(done + 1, most), most)
        job.until(lambda: job.reported() >= aim, PATIENCE)
        if job.alive:
            return True
        if job.process.returncode:
            self._strike(job)
            self._remark("it has ended, though nothing was done to it", job)
        return False

    def _strike(self, job: Job) -> None:
        """Count the fault, once in a trial."""
        self.tally.trials = 1
        self.tally.reported = max(self.tally.reported, job.reported())

    def _end(self, job: Job, begin: float | None = None) -> bool:
        """Wait for the end of a run."""
        ended = job.wait(PATIENCE)
        self.tally.hangs += not ended
        if begin is not None:
            self.tally.slowest = max(self.tally.slowest, time.monotonic() - begin)
        return ended

    def _resume(
        self, out: Path, command: Callable[[Path, list[str]], list[str]] = program
    ) -> None:
        job = self._start(command(self._orders, ["run", "--resume", str(out)]))
        if self._end(job) and job.process.returncode:
            self._remark("it cannot go on", job)

    def _count_lost(self, job: Job, out: Path) -> None:
        try:
            self.tally.lost += max(0, job.reported() - int(read_run(out).rounds_done))
        except Exception as error:
            self.tally.corrupt += 1
            self._remark(one_line(error), job)

    def _count_touched(self, names: Sequence[str]) -> None:
        self.tally.touched += len(names)
        if names:
            self._remark(f"touched: {', '.join(names[:4])}")

    def _compare(self, pairs: Sequence[tuple[Path, Path]]) -> None:
        """Compare runs with undisturbed ones."""
        self.tally.compared = 1
        different: list[str] = []
        try:
            for whole, out in pairs:
                different += differences(whole, out)
        except Exception as error:
            different = [one_line(error)]
        self.tally.same = int(not different)
        if different:
            self._remark(f"different from an undisturbed run: {', '.join(different)}")

    def _compare_studies(self, whole: Path, out: Path) -> None:
        """Check that every point is there once, complete and as it should be, in
        study.h5 and in the report.
        """
        self.tally.compared = 1
        found = points(out)
        if points(whole) != found:
            self._remark(f"study.h5 holds {found}")
            return
        disturbed = disturbed_run(whole, out)
        if disturbed is not None:
            self._remark(f"run {disturbed} is not the undisturbed one")
            return
        page, exported = self._place / "page.html", self._place / "page.json"
        words = ["report", str(out), "--out", str(page), "--json", str(exported)]
        report = self._start([sys.executable, "-m", "hpcfed", *words])
        if not self._end(report) or report.process.returncode:
            self._remark("no report", report)
            return
        groups = json.loads(exported.read_text())["groups"]
        clients = sorted(group["options"]["clients"] for group in groups)
        if clients != [3, 4]:
            self._remark(f"the report has points of {clients} clients")
            return
        self.tally.same = 1

    def _remark(self, text: str, job: Job | None = None) -> None:
        if job is not None:
            last_words = job.told().splitlines()[-6:]
            text += f" (exit code {job.process.poll()})"
            text += "\n    " + "\n    ".join(last_words)
        self.tally.remarks.append(f"{self._how}: {text}" if self._how else text)
