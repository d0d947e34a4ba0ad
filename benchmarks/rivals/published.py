"""Benchmarks that others have published, run end to end: accuracy beside time.

Each settings file in benchmarks/published is a command of its own, as a user would type
it, and the clock is around the whole of it. `rounds` is the wall time of all rounds
without evaluation, `start` is the rest: imports, loading, kernels, first and last
files. Accuracy is the global model's on the whole test set, in the last round. The
published figures come from other hardware, which stands beside them.

Options after -- go to every run. A part of a long benchmark is `-- --rounds 300`.

examples:
  python -m benchmarks.rivals.published --data-root /data --out runs/published
  python -m benchmarks.rivals.published flute-cifar100 --out runs/published -- --rounds 300
  python -m benchmarks.rivals.published blazefl-resnet18 --out runs/bf16 -- --precision bf16
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

import hpcfed
from benchmarks.arguments import parser_of
from benchmarks.launching import ROOT

SETTINGS = ROOT / "benchmarks/published"
PUBLISHED = {
    "pfl-cifar10": "its figures were on one A100 (40 GB), 10 cores: arXiv 2404.06430",
    "blazefl-cnn": "25 s on four Quadro RTX 6000: BlazeFL, arXiv 2604.03606",
    "blazefl-resnet18": "127 s on four Quadro RTX 6000: BlazeFL, arXiv 2604.03606",
    "flute-cifar100": "1:42:01, about 33 %, on four GPUs: FLUTE's README; FedML 15:55:36",
}
"""By settings file: what was published, and on what."""


@dataclass(frozen=True)
class Outcome:
    """What one whole command took and reached."""

    rounds: int
    command: float
    """Seconds of the whole command."""
    training: float
    """Seconds of all rounds without their evaluation."""
    evaluation: float
    typical: float
    """Median seconds of a round without evaluation, the first ten left out."""
    accuracy: float
    """Accuracy of the global model in the last round."""
    gib: float

    @property
    def start(self) -> float:
        """Seconds before, between and after the rounds."""
        return self.command - self.training - self.evaluation


def run(name: str, out: Path, options: Sequence[str]) -> Outcome:
    """Run a settings file as a command of its own; an error ends this program, too."""
    settings = SETTINGS / f"{name}.toml"
    words = [sys.executable, "-m", "hpcfed", "run", str(settings)]
    words += ["--out", str(out), "--overwrite", *options]
    begin = time.perf_counter()
    ended = subprocess.run(words, stdout=subprocess.DEVNULL)
    command = time.perf_counter() - begin
    if ended.returncode:
        raise SystemExit(ended.returncode)
    return outcome(out, command)


def outcome(folder: Path, command: float) -> Outcome:
    """Read a run's folder, given the seconds of its command."""
    done = hpcfed.open(folder)
    rounds, timing = done.rounds, done.timing
    evaluation = np.asarray(timing["evaluate"])
    training = np.asarray(timing["wall"]) - evaluation
    # A graph is captured and kernels are compiled in the first rounds.
    counted = training[10:] if len(training) > 20 else training[1:]
    return Outcome(
        rounds=len(training),
        command=command,
        training=float(training.sum()),
        evaluation=float(evaluation.sum()),
        typical=float(np.median(counted)) if len(counted) else float(training[0]),
        accuracy=float(np.asarray(rounds["global_accuracy"])[-1]),
        gib=max(done.summary()["peak_memory"]) / 2**30,
    )


HEADER = """\
| benchmark | rounds | a round | all rounds | evaluation | start | whole command | accuracy | GiB | published |
|---|---:|---:|---:|---:|---:|---:|---:|---:|---|"""


def line(name: str, made: Outcome) -> str:
    """Return a row of the table, in Markdown."""
    return (
        f"| {name} | {made.rounds} | {1e3 * made.typical:.1f} ms | "
        f"{made.training:.1f} s | {made.evaluation:.2f} s | {made.start:.1f} s | "
        f"{made.command:.1f} s | {100 * made.accuracy:.1f} % | {made.gib:.1f} | "
        f"{PUBLISHED[name]} |"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PUBLISHED))
    parser.add_argument("--out", type=Path, default=Path("runs/published"))
    parser.add_argument("--data-root", type=Path, help="folder of CIFAR-10 and -100")
    words = list(sys.argv[1:] if arguments is None else arguments)
    own, passed_on = _split(words)
    options = parser.parse_args(own)
    for name in options.names:
        if name not in PUBLISHED:
            parser.error(f"no benchmark {name}; there are {', '.join(PUBLISHED)}")
    if options.data_root:
        os.environ["HPCFED_DATA"] = str(options.data_root)
    print(f"{datetime.now(UTC):%Y-%m-%d}\n{HEADER}", flush=True)
    for name in options.names or PUBLISHED:
        made = run(name, options.out / name, passed_on)
        print(line(name, made), flush=True)


def _split(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Cut the command line at --, after which options are hpcfed's."""
    if "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


if __name__ == "__main__":
    main()
