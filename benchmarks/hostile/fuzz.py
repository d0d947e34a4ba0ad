"""Hand damaged and hostile files to everything that reads files. Whoever reads must
either work, or refuse the file in one line with exit code 2.

Real HDF5 files (of a run, its snapshots, its server, a study) are changed in many ways,
byte by byte and through h5py, and handed to show, report and its exports, and resume.
Other cases are about everything else that users hand in: JSON, TOML, npz, names, texts
with control characters, and entries that are not plain files (an empty terabyte, FIFOs,
devices, links). See benchmarks/hostile/cases.py.

A process of its own reads, so that a crash of libhdf5 is one more row of the table. It
may take 2 GiB of memory and 20 seconds for a file; more counts as a traceback or a
hang. Files outside the case's own folder must stay as they are.

example:
  python -m benchmarks.hostile.fuzz --files 5000
"""

import io
import random
import shutil
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.arguments import parser_of
from benchmarks.faults import canaries
from benchmarks.hostile import cases
from benchmarks.hostile.cases import CASES
from benchmarks.hostile.mutations import KINDS, mutate
from benchmarks.hostile.readers import COMMANDS, FILES, Process

OUTCOMES = (
    "read fine", "refused in one line", "tracebacks", "crashes", "hangs", "many lines", "raw escapes",
    "touched outside",
)  # fmt: skip
"""The first two are as they should be."""
SIZE = ["--clients", "4", "--model", "mlp", "--epochs", "1", "--rounds", "3"]
SERVER = [
    "--method", "pfedgpa", "--server-width", "8", "--server-latent", "4", "--server-depth", "1", "--bank-rounds", "2",
    "--diffusion-steps", "10", "--inversion-depth", "5",
    "--server-engine", "torch", "--autoencoder-samples", "40", "--denoiser-samples", "40", "--server-batch", "20",
]  # fmt: skip
STUDY = """title = "two points"
[common]
model = "mlp"
rounds = 3
epochs = 1
target_accuracy = 50
[sweep]
clients = [3, 4]
"""


def make_originals(folder: Path) -> None:
    """Make one file of each kind, by real runs in this process."""
    from hpcfed import cli
    from hpcfed.results.study import Outcome, write_outcome
    from hpcfed.studies.execute import gather
    from hpcfed.studies.plan import points, read_study, trials

    out = sys.stdout
    try:
        sys.stdout = io.StringIO()
        new = [
            "--new-clients", "2", "--guided-start", "5", "--snapshot-every", "1",
            "--target-accuracy", "50",
        ]  # fmt: skip
        cli.main(["run", *SERVER, *SIZE, *new, "--out", str(folder / "made")])
        (folder / "study.toml").write_text(STUDY)
        study = read_study(folder / "study.toml")
        every = trials(study, points(study, folder / "study.toml"), folder)
        for trial in every:
            cli.main(trial.words)
            write_outcome(
                trial.outcome,
                Outcome("complete", "", 1.0, "hpcfed " + " ".join(trial.words)),
            )
        gather(folder / "study.h5", study, STUDY, every)
        cases.make_originals(folder)
    finally:
        sys.stdout = out
    for kind, name in {
        "run": "run.h5",
        "params": "params-0.h5",
        "server": "server.h5",
    }.items():
        shutil.copy(folder / "made" / name, folder / f"{kind}.h5")


ALL = (*KINDS, *CASES)


class Campaign:
    """Changed files of all kinds in turn, and what became of each."""

    def __init__(
        self,
        originals: Path,
        folder: Path,
        kinds: Sequence[str],
        seed: int,
        keep: Path | None,
    ) -> None:
        self._originals, self._folder = originals, folder
        self._kinds, self._seed, self._keep = kinds, seed, keep
        # torch makes forks slow, so files that need no torch have a reader without it.
        self._light = Process(originals, FILES[:2])
        self._heavy = Process(originals, FILES[2:])
        self._commands = Process(originals, (COMMANDS,))
        self.table: dict[str, Counter[str]] = defaultdict(Counter)

    def one(self, number: int) -> None:
        """Change a file and have it read."""
        kind = self._kinds[number % len(self._kinds)]
        # Keyed by the number, so that one file can be made again without the others.
        chance = random.Random(f"{self._seed} {number}")
        if kind in CASES:
            what = "case"
            outcome, why = self._case(kind, chance)
        else:
            what = FILES[number // len(self._kinds) % len(FILES)]
            outcome, why = self._file(kind, what, chance)
        self.table[kind][outcome] += 1
        if outcome not in OUTCOMES[:2]:
            print(
                f"{what}, {kind}, number {number}: {outcome}\n{why}",
                file=sys.stderr,
                flush=True,
            )
            if self._keep is not None:
                self._keep_file(f"{number}-{what}")

    def _file(self, kind: str, what: str, chance: random.Random) -> tuple[str, str]:
        path = self._path(what)
        mutate(self._originals / f"{what}.h5", path, kind, chance)
        return (self._light if what in FILES[:2] else self._heavy)(what, str(path))

    def _path(self, what: str) -> Path:
        return self._folder / ("study.h5" if what == "study" else "run.h5")

    def _case(self, kind: str, chance: random.Random) -> tuple[str, str]:
        """Make a case, have its commands started, and look whether they touched
        anything outside.
        """
        case = self._folder / "case"
        asked = cases.prepare(self._originals, case, kind, chance)
        before = canaries.snapshot(case / "outside")
        outcome, why = self._commands(COMMANDS, asked)
        if outcome in ("hangs", "crashes"):
            why = "; ".join(f"hpcfed {' '.join(words)!r}" for words in asked)
        if names := canaries.touched(before, canaries.snapshot(case / "outside")):
            return "touched outside", f"{', '.join(names)}; {why}"
        return outcome, why

    def _keep_file(self, name: str) -> None:
        """Keep what was not read as it should; of a case only how to make it again,
        since it may be endless.
        """
        assert self._keep is not None
        self._keep.mkdir(parents=True, exist_ok=True)
        what = name.partition("-")[2]
        if what in FILES:
            shutil.copy(self._path(what), self._keep / f"{name}.h5")

    def end(self) -> None:
        """End the readers."""
        for process in (self._light, self._heavy, self._commands):
            process.end()


def campaign(
    originals: Path,
    files: int,
    seed: int,
    keep: Path | None = None,
    kinds: Sequence[str] = ALL,
    jobs: int = 1,
) -> dict[str, Counter[str]]:
    """Return how many files of every kind of change had which outcome; files that were
    not read as they should go to `keep`.
    """
    table: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    over = threading.Event()

    def share(first: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            own = Campaign(originals, Path(folder), kinds, seed, keep)
            try:
                for number in range(first, files, jobs):
                    if over.is_set():
                        break
                    own.one(number)
            finally:
                own.end()
                for kind, outcomes in own.table.items():
                    table[kind].update(outcomes)

    with ThreadPoolExecutor(jobs) as pool:
        shares = [pool.submit(share, first) for first in range(jobs)]
        try:
            for one in shares:
                one.result()
        except KeyboardInterrupt:
            over.set()
            print("interrupted; so far:", file=sys.stderr)
    return table


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--files",
        type=int,
        default=5000,
        metavar="N",
        help="changed files (default: 5000)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--kinds", metavar="A,B", help="only these, of " + ", ".join(ALL)
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=2,
        metavar="N",
        help="readers at a time (default: 2)",
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help="where to put files that were not read as they should",
    )
    options = parser.parse_args()
    kinds = options.kinds.split(",") if options.kinds else ALL
    if strange := set(kinds) - set(ALL):
        parser.error(f"unknown kind {sorted(strange)[0]}; there are {', '.join(ALL)}")
    with tempfile.TemporaryDirectory() as folder:
        make_originals(Path(folder))
        table = campaign(
            Path(folder), options.files, options.seed, options.keep, kinds, options.jobs
        )
    print(
        f"{'change':20}{'files':>7}" + "".join(f"  {outcome}" for outcome in OUTCOMES)
    )
    for kind, outcomes in (*table.items(), ("all", sum(table.values(), Counter()))):
        counts = "".join(
            f"  {outcomes[outcome]:{len(outcome)}}" for outcome in OUTCOMES
        )
        print(f"{kind:20}{outcomes.total():7}{counts}")
    if any(
        outcomes[outcome] for outcomes in table.values() for outcome in OUTCOMES[2:]
    ):
        sys.exit(1)


if __name__ == "__main__":
    main()
