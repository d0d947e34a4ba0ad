"""Traps in a run's folder: links, FIFOs and users' own files, which a run must refuse or
leave alone.
"""

import random
import shutil
import sys
from pathlib import Path
from typing import Protocol

from benchmarks.faults import canaries
from benchmarks.faults.lives import PATIENCE, WORK, Job, Tally


class Remark(Protocol):
    """Notes that something is not as it should be, after which kind of fault."""

    def __call__(
        self, text: str, job: Job | None = None, *, kind: str | None = None
    ) -> None: ...


class Traps:
    """The traps of one run, and the canaries that show whether it fell for one."""

    def __init__(
        self,
        outside: Path,
        chance: random.Random,
        tallies: dict[str, Tally],
        remark: Remark,
    ) -> None:
        self.laid: tuple[str, str] | None = None
        """The kind of fault that has laid a trap before the present life, and which."""
        self.users_files: canaries.Snapshot = {}
        """The users' own files in the folder."""
        self._outside, self._chance = outside, chance
        self._tallies, self._remark = tallies, remark
        self._canaries: canaries.Snapshot = {}
        self._build_canaries()

    def lay(self, kind: str, run: Path, *, how: str = "--resume") -> None:
        """Put links, FIFOs or users' own files into a run's folder."""
        if kind == "files":
            self.users_files = canaries.leave_own(run)
            self.laid = kind, f"{how}, users' files"
            return
        entry, form = canaries.pick(self._chance)
        canaries.plant(run, entry, form, self._outside)
        # Laid over a user's own file, the trap itself has changed that.
        self.users_files.pop(str(run / entry), None)
        self._canaries = canaries.snapshot(self._outside)
        self.laid = kind, f"{how}, {entry} as {form}"

    def lay_for_resume(self, kind: str, run: Path) -> None:
        """Lay a trap for the next life; a copy of the folder stays beside it, for when
        the resume is refused.
        """
        shutil.copytree(run, run.with_name("backup"))
        self.lay(kind, run)

    def lay_for_overwrite(self, kind: str, run: Path) -> None:
        """Lay a trap in a copy of the folder, and have another run overwrite that."""
        # In a copy, because the run itself is to be resumed and compared.
        again, before = run.with_name("again"), self.users_files
        shutil.copytree(run, again)
        self.users_files = canaries.own(again)
        self.lay(kind, again, how="--overwrite")
        words = [*WORK, "--rounds", "3", "--out", str(again), "--overwrite"]
        job = Job([sys.executable, "-m", "hpcfed", *words])
        job.until(lambda: False, PATIENCE)
        self._judge(job)
        self.look(again, kind)
        self.take_up(again)
        canaries.remove(again)
        self.users_files = before

    def was_refused(self, job: Job, run: Path) -> bool:
        """Return whether a resume was refused for the trap; the folder is then as it
        was before.
        """
        if job.reported() or job.process.poll() == 0:
            return False
        assert self.laid is not None
        self._judge(job)
        self.look(run, self.laid[0])
        canaries.remove(run)
        run.with_name("backup").rename(run)
        self.take_up(run)
        return True

    def _judge(self, job: Job) -> None:
        """Look at a run that has not gone on over a trap: it should have been refused."""
        assert self.laid is not None
        kind, trap = self.laid
        if job.alive:
            job.end()
            self._tallies[kind].hangs += 1
            self._remark(f"{trap}: it hangs", job, kind=kind)
        elif job.process.returncode and job.refusal() is None:
            self._remark(
                f"{trap}: neither refused in one line nor passed over", job, kind=kind
            )

    def look(self, run: Path, last_kind: str) -> None:
        """Count canaries and users' files that are not as they were, for the trap's
        kind of fault or, without one, for the last that there was.
        """
        there = canaries.own(run)
        # The run may bring files of these names itself; only the users' count.
        known = {path: there[path] for path in there if path in self.users_files}
        names = canaries.touched(self._canaries, canaries.snapshot(self._outside))
        names += canaries.touched(self.users_files, known)
        self.users_files = known
        if names:
            kind, trap = self.laid or (last_kind, "nothing laid")
            self._tallies[kind].touched += len(names)
            self._remark(f"{trap}: touched {', '.join(names)}", kind=kind)
            self._build_canaries()

    def take_up(self, run: Path) -> None:
        """Take links and FIFOs out of the folder again; users' files stay."""
        self.laid = None
        canaries.clear(run)
        canaries.remove(run.with_name("backup"))
        self._build_canaries()

    def _build_canaries(self) -> None:
        canaries.build(self._outside)
        self._canaries = canaries.snapshot(self._outside)
