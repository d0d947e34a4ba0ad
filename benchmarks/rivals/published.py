"""Benchmarks that others have published, run end to end: accuracy beside time.

Each settings file in benchmarks/published is a command of its own, as a user would type
it, and the clock is around the whole of it. `rounds` is the wall time of all rounds
without evaluation, `start` is the rest: imports, loading, kernels, first and last
files. Accuracy is the global model's on the whole test set, in the last round. The
published figures come from other hardware, which stands beside them.

--rounds runs the first part of each benchmark. Then `whole` is extrapolated: to what was
measured, every further round adds the mean of those after the first ten, and every
further evaluation the mean of those after the first. Where a data set's files are not,
synthetic images of the same shape and number take its place; their accuracy is left out.
Options after -- go to every run.

examples:
  python -m benchmarks.rivals.published --data-root /data --out runs/published
  python -m benchmarks.rivals.published blazefl-resnet18 --rounds 2
  python -m benchmarks.rivals.published flute-cifar100 pfllib-mnist --rounds 200
  python -m benchmarks.rivals.published blazefl-resnet18 --out runs/bf16 -- --precision bf16
"""

import json
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import hpcfed
from benchmarks import data
from benchmarks.arguments import add_data_root, parser_of
from benchmarks.launching import ROOT, environment
from hpcfed.options.declare import flags

SETTINGS = ROOT / "benchmarks/published"
PUBLISHED = {
    "pfl-cifar10": "its figures were on one A100 (40 GB), 10 cores: arXiv 2404.06430",
    "blazefl-cnn": "25 s on four Quadro RTX 6000: BlazeFL, arXiv 2604.03606",
    "blazefl-resnet18": "127 s on four Quadro RTX 6000: BlazeFL, arXiv 2604.03606",
    "flute-cifar100": "1:42:01, about 33 %, on four GPUs: FLUTE's README; FedML 15:55:36",
    "pfllib-mnist": "17 to 18 s a round on an RTX 5090: a user, TsingZ0/PFLlib#253",
}
"""By settings file: what was published, and on what."""


@dataclass(frozen=True)
class Outcome:
    """What one command took and reached."""

    rounds: int
    all_rounds: int
    """Rounds of the published benchmark, of which the first `rounds` were run."""
    command: float
    """Seconds of the whole command."""
    training: float
    """Seconds of all rounds without their evaluation."""
    evaluation: float
    typical: float
    """Median seconds of a round without evaluation, the first ten left out."""
    remaining: float
    """Seconds that the rounds left out would take, by those that were run."""
    accuracy: float
    """Accuracy of the global model in the last round."""
    gib: float
    data: str
    """The data set, or what the synthetic samples are like."""

    @property
    def start(self) -> float:
        """Seconds before, between and after the rounds."""
        return self.command - self.training - self.evaluation


def run(
    name: str,
    out: Path,
    root: Path | None,
    options: Sequence[str] = (),
    *,
    rounds: int | None = None,
    variables: Mapping[str, str] | None = None,
) -> Outcome:
    """Run a settings file as a command of its own; an error ends this program, too.

    `rounds`: at most so many; `variables` are added to the environment.
    """
    path = SETTINGS / f"{name}.toml"
    settings = tomllib.loads(path.read_text())
    source = data_of(settings, root)
    words = [sys.executable, "-m", "hpcfed", "run", str(path), *flags(source)]
    if rounds is not None:
        words += ["--rounds", str(min(rounds, settings["rounds"]))]
    words += ["--out", str(out), "--overwrite", *options]
    begin = time.perf_counter()
    ended = subprocess.run(
        words, stdout=subprocess.DEVNULL, env=environment() | dict(variables or {})
    )
    command = time.perf_counter() - begin
    if ended.returncode:
        raise SystemExit(ended.returncode)
    told = data.told(source, settings["dataset"])
    return outcome(out, command, all_rounds=settings["rounds"], told=told)


def data_of(settings: dict[str, Any], root: Path | None) -> dict[str, Any]:
    """Return the options of a settings file's data."""
    name = settings["dataset"]
    return data.real(name, root) or data.synthetic(name, settings["clients"])


def outcome(folder: Path, command: float, *, all_rounds: int, told: str) -> Outcome:
    """Read a run's folder, given the seconds of its command."""
    done = hpcfed.open(folder)
    timing = done.timing
    evaluation = np.asarray(timing["evaluate"])
    training = np.asarray(timing["wall"]) - evaluation
    # A graph is captured and kernels are compiled in the first rounds.
    counted = training[10:] if len(training) > 20 else training[1:]
    if not len(counted):
        counted = training
    return Outcome(
        rounds=len(training),
        all_rounds=all_rounds,
        command=command,
        training=float(training.sum()),
        evaluation=float(evaluation.sum()),
        typical=float(np.median(counted)),
        remaining=(all_rounds - len(training))
        * (float(counted.mean()) + evaluation_share(evaluation)),
        accuracy=float(np.asarray(done.rounds["global_accuracy"])[-1]),
        gib=max(done.summary()["peak_memory"]) / 2**30,
        data=told,
    )


def evaluation_share(evaluation: np.ndarray) -> float:
    """Return what evaluations add to a further round: the mean of those after the first,
    by how many rounds have one.
    """
    made = evaluation[evaluation > 0]
    later = made[1:] if len(made) > 1 else made
    return float(later.mean()) * len(made) / len(evaluation) if len(made) else 0.0


HEADER = """\
| benchmark | data | rounds | a round | all rounds | evaluation | start | command | whole | accuracy | GiB | published |
|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|"""


def line(name: str, made: Outcome) -> str:
    """Return a row of the table, in Markdown."""
    rounds, whole = f"{made.rounds}", f"{made.command:.1f} s"
    if made.rounds < made.all_rounds:
        rounds += f" of {made.all_rounds}"
        whole = f"{made.command + made.remaining:.0f} s, extrapolated"
    accuracy = "" if made.data.startswith("like") else f"{100 * made.accuracy:.1f} %"
    return (
        f"| {name} | {made.data} | {rounds} | {1e3 * made.typical:.1f} ms | "
        f"{made.training:.1f} s | {made.evaluation:.2f} s | {made.start:.1f} s | "
        f"{made.command:.1f} s | {whole} | {accuracy} | {made.gib:.1f} | "
        f"{PUBLISHED[name]} |"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PUBLISHED))
    parser.add_argument("--out", type=Path, default=Path("runs/published"))
    parser.add_argument("--rounds", type=int, help="at most so many of each")
    parser.add_argument("--json", type=Path, help="also write figures to this file")
    add_data_root(parser)
    words = list(sys.argv[1:] if arguments is None else arguments)
    own, passed_on = _split(words)
    options = parser.parse_args(own)
    for name in options.names:
        if name not in PUBLISHED:
            parser.error(f"no benchmark {name}; there are {', '.join(PUBLISHED)}")
    print(f"{datetime.now(UTC):%Y-%m-%d}\n{HEADER}", flush=True)
    figures = {}
    for name in options.names or PUBLISHED:
        made = run(
            name,
            options.out / name,
            options.data_root,
            passed_on,
            rounds=options.rounds,
        )
        print(line(name, made), flush=True)
        figures[name] = asdict(made) | {"start": made.start}
        if options.json:
            options.json.write_text(json.dumps(figures, indent=1))


def _split(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Cut the command line at --, after which options are hpcfed's."""
    if "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


if __name__ == "__main__":
    main()
