"""Running a study's trials one after the other, here or inside a Slurm job, or handing
them to Slurm as arrays.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import groupby, takewhile
from pathlib import Path
from types import FrameType

from hpcfed.config import check_unchanged
from hpcfed.errors import UserError, count, printable, remark, say
from hpcfed.experiment.stored import is_complete
from hpcfed.record.claim import claimed
from hpcfed.record.folder import (
    JOB,
    check_plain,
    empty,
    remove_empty_seeds,
    runs,
    seed_folder,
    seed_folders,
    strangers,
)
from hpcfed.record.publish import check_target
from hpcfed.record.run import RunRecord
from hpcfed.study.gather import (
    Outcome,
    finished,
    outcome_of,
    write_outcome,
    write_study,
    writing,
)
from hpcfed.study.plan import Point, Study, Trial

Start = Callable[[int], list[str]]
"""The words that start so many ranks."""
ALLOW_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
"""Variables without which Open MPI's mpirun refuses to run as root, as one is in a
container.
"""
GATHER_PAUSE = 20
"""How many times longer than gathering the pause before the next gathering is, at
least.
"""


def launcher(name: str, environment: Mapping[str, str] = os.environ) -> Start:
    """The words that start so many ranks. In a Slurm job srun does it, elsewhere
    mpirun; one rank needs neither.
    """
    if name == "auto":
        name = "srun" if "SLURM_JOB_ID" in environment else "mpirun"
    if name == "srun":
        words = [
            "srun",
            f"--mpi={environment.get('MPI', 'pmix')}",
            "--kill-on-bad-exit=1",
        ]
        words.append(
            f"--cpus-per-task={environment.get('SLURM_CPUS_PER_TASK', '1')}"
        )  # a step does not inherit it
        return lambda ranks: [*words, f"--ntasks={ranks}"]
    return lambda ranks: (
        [] if ranks == 1 else [_mpirun(), *_binding(ranks), "-n", str(ranks)]
    )


def _mpirun() -> str:
    """The one beside Python, which fits the library that Python loads, or else the
    first on the path.
    """
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else "mpirun"


def _environment(words: Sequence[str]) -> dict[str, str]:
    """Return the environment of a command; mpirun is told to run as root where we do."""
    variables = dict(os.environ)
    missing = [name for name in ALLOW_ROOT if name not in variables]
    if os.geteuid() == 0 and missing and words[0] == _mpirun():
        _remark_root()
        variables |= dict.fromkeys(missing, "1")
    return variables


@cache
def _remark_root() -> None:
    """Says it once, not for every trial."""
    remark(
        f"hpcfed: we are root, which mpirun refuses; {' and '.join(ALLOW_ROOT)} are set for it"
    )


def _binding(ranks: int) -> list[str]:
    """More ranks than cores share them as the system likes; otherwise each keeps an
    equal number to itself.
    """
    cores = _cores()
    if ranks > cores:
        return ["--oversubscribe", "--bind-to", "none"]
    return ["--map-by", f"slot:PE={cores // ranks}", "--bind-to", "core"]


def _cores() -> int:
    """Cores that we may use; two hardware threads of a core count once, as they do for
    mpirun.
    """
    there = set()
    for thread in os.sched_getaffinity(0):
        topology = Path(f"/sys/devices/system/cpu/cpu{thread}/topology")
        try:
            there.add(
                tuple(
                    (topology / name).read_text()
                    for name in ("physical_package_id", "core_id")
                )
            )
        except OSError:
            there.add((str(thread),))
    return len(there)


def command(trial: Trial, start: Start) -> list[str]:
    return [*start(trial.point.processes), sys.executable, "-m", "hpcfed", *trial.words]


def check_finished(trials: Sequence[Trial]) -> dict[Path, list[RunRecord]]:
    """Folders of trials that need not run again; refuses runs that other options have
    made.
    """
    done = {}
    for trial in trials:
        records = finished(trial)
        if records is None:
            _check_seeds(trial)
        else:
            for seed, record in zip(trial.seeds, records, strict=True):
                settings = trial.point.settings
                wanted = settings.of_seed(seed) if settings.config.seeds else settings
                had = record.config | {"ranks": record.facts["ranks"]}
                check_unchanged(
                    trial.folder, had, wanted.flat() | {"ranks": trial.point.ranks}
                )
            done[trial.folder] = records
    return done


def _check_seeds(trial: Trial) -> None:
    """Refuses to replace complete runs of other seeds, which a trial that is run again
    would do.
    """
    several = trial.point.settings.config.seeds is not None
    wanted = (
        [seed_folder(trial.folder, seed) for seed in trial.seeds]
        if several
        else [trial.folder]
    )
    for folder in runs(trial.folder):
        others = folder not in wanted or not all(path.exists() for path in wanted)
        if others and is_complete(folder):
            raise UserError(f"{folder} was run with other seeds; name another --out")


def settle(trials: Sequence[Trial], start: Start) -> None:
    """Writes the outcome of trials that are finished without one: their run outlived a
    study that was killed.
    """
    for trial in trials:
        if outcome_of(trial).status == "complete":
            continue
        try:
            done = check_finished([trial])
        except (
            UserError
        ):  # a run that other options have made is no trial of this study
            continue
        if done:
            write_outcome(
                trial, Outcome("complete", command=shlex.join(command(trial, start)))
            )


def go(
    study: Study,
    text: str,
    every: Sequence[Trial],
    chosen: Sequence[Trial],
    out: Path,
    start: Start,
) -> int:
    """Runs the chosen trials that are not finished and gathers all; the number of those
    that failed.
    """
    done, failed, gathering = (
        check_finished(chosen),
        0,
        Gathering(out / "study.h5", study, text, every),
    )
    settle(every, start)
    for number, trial in enumerate(chosen):
        told = f"[{number + 1}/{len(chosen)}] {trial}"
        if trial.folder in done:
            say(f"{told}: there already")
            continue
        say(f"{told}: {count(trial.point.processes, 'rank')} …")
        outcome = attempt(trial, command(trial, start), study.limit)
        failed += outcome.status != "complete"
        say(f"{told}: {outcome.error or f'{outcome.seconds:.1f} s'}")
        gathering.after_trial()
    gathering.gather()
    return failed


class Gathering:
    """Keeps study.h5 up to date without spending a noticeable part of the time on it."""

    def __init__(
        self, path: Path, study: Study, text: str, every: Sequence[Trial]
    ) -> None:
        self._path, self._study, self._text, self._every = path, study, text, every
        self._next = 0.0

    def after_trial(self) -> None:
        if time.monotonic() >= self._next:
            self.gather()

    def gather(self) -> None:
        begin = time.monotonic()
        write_study(self._path, self._study, self._text, self._every)
        now = time.monotonic()
        self._next = now + GATHER_PAUSE * (now - begin)


def attempt(trial: Trial, words: Sequence[str], limit: float) -> Outcome:
    """Runs a trial to its end and writes down how it went."""
    check_target("the log", trial.log)
    with writing(trial.log):
        _make_room(trial)
        log = open(trial.log, "w")  # noqa: SIM115 closed below
    begin = time.monotonic()
    with log, _ending_with_us():
        try:
            # In a session of its own, because mpirun and srun end their ranks when the
            # terminal goes.
            process = subprocess.Popen(
                words,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=_environment(words),
                start_new_session=True,
            )
            code = _wait(process, limit)
        except OSError as error:
            raise UserError(f"cannot start {words[0]}: {error.strerror}") from None
    seconds = time.monotonic() - begin
    said = shlex.join(words)
    if code == 0 and finished(trial) is not None:
        outcome = Outcome("complete", "", seconds, said)
    else:
        reason = (
            f"took longer than the limit of {limit:g} s"
            if code is None
            else _reason(trial.log, code)
        )
        outcome = Outcome("failed", reason, seconds, said)
    write_outcome(trial, outcome)
    return outcome


def _make_room(trial: Trial) -> None:
    """Removes what a run that did not end well has left, unless the same study is also
    run elsewhere.
    """
    if trial.folder.exists():
        check_plain(trial.folder)
        if others := strangers(trial.folder):
            raise UserError(f"{others[0]} was made by no run; move it elsewhere")
        with ExitStack() as claims:
            for folder in (trial.folder, *seed_folders(trial.folder)):
                claims.enter_context(claimed(folder))
            empty(trial.folder)
        remove_empty_seeds(trial.folder)
        (trial.folder / JOB).unlink(missing_ok=True)
    trial.folder.parent.mkdir(parents=True, exist_ok=True)
    trial.outcome.unlink(
        missing_ok=True
    )  # it would speak for the new attempt if we are killed


@contextmanager
def _ending_with_us() -> Iterator[None]:
    """Within, SIGTERM ends what we wait for, as Ctrl-C does, and then us."""

    def heard(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, heard)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait(process: subprocess.Popen[bytes], limit: float) -> int | None:
    """The exit code; None when the process had to be ended. The launcher ends its ranks
    when it is asked to.
    """
    try:
        return process.wait(None if limit == float("inf") else limit)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            _kill(process)
        return None
    except BaseException:  # the user has had enough
        process.terminate()
        try:
            process.wait()
        except BaseException:  # more than enough
            _kill(process)
        raise


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends a launcher and its ranks at once: they are a session of their own."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _reason(log: Path, code: int) -> str:
    """What the run itself has said; else the first line of a notice between rules, as
    mpirun's; else the last line.
    """
    lines = [
        line.strip()
        for line in log.read_text(errors="replace").splitlines()
        if line.strip()
    ]
    own = [line for line in lines if line.startswith("hpcfed: ")]
    if not own and lines and not lines[-1].strip("-"):
        own = list(takewhile(lambda line: line.strip("-"), reversed(lines[:-1])))
    last = (own or lines or ["it said nothing"])[-1]
    return f"exit code {code}: {printable(last.removeprefix('hpcfed: '))}"


def submit(
    file: Path,
    out: Path,
    points: Sequence[Point],
    script: Path,
    extra: Sequence[str],
    *,
    dry: bool,
) -> None:
    """An array for every number of ranks, since all jobs of an array are alike, and a
    last job that gathers.
    """
    jobs: list[str] = []
    by_size = sorted(points, key=lambda point: point.processes)
    for processes, members in groupby(by_size, key=lambda point: point.processes):
        numbers = ",".join(str(point.number) for point in members)
        words = [
            f"--ntasks={processes}",
            f"--array={numbers}",
            f"--output={out}/slurm-%A-%a.log",
            *extra,
        ]
        jobs += _sbatch(words, script, file, out, dry=dry)
    after = [
        f"--dependency=afterany:{':'.join(jobs) or 'ARRAYS'}",
        "--ntasks=1",
        f"--output={out}/slurm-%j.log",
        *extra,
    ]
    _sbatch(after, script, file, out, dry=dry)


def _sbatch(
    words: Sequence[str], script: Path, file: Path, out: Path, *, dry: bool
) -> list[str]:
    """The job's number, as a list of one; nothing when it is only shown."""
    line = ["sbatch", "--parsable", *words, str(script), str(file), "--out", str(out)]
    print(printable(shlex.join(line)), flush=True)
    if dry:
        return []
    try:
        answer = subprocess.run(
            line,
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHON": sys.executable},
        )
    except OSError as error:
        raise UserError(
            f"cannot start sbatch: {error.strerror}; --submit is for machines with Slurm"
        ) from None
    if answer.returncode:
        raise UserError(
            f"sbatch refused: {answer.stderr.strip().splitlines()[-1] if answer.stderr else 'no reason'}"
        )
    return [answer.stdout.strip().partition(";")[0]]
