"""How much of the server's learning hides behind clients' rounds: a run whose server and
clients take about as long, without and with --server-overlap.

First clients run alone, by FedAvg. Then the server gets as many samples as it learns
from while clients make the rounds between two learnings. The program prints seconds of
clients and server alone, seconds of both runs, and these by the longer of the two
alone. Before the first learning clients may also wait until the server's ranks have
loaded their libraries: let clients take seconds between two learnings. Further options
of `hpcfed run` follow a double dash.

examples:
  python -m benchmarks.server.overlap                               24 rounds, one worker, one server rank
  python -m benchmarks.server.overlap --every 32 --rounds 160 -- --clients 100 --epochs 12 --server paper
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import launching
from benchmarks.arguments import add_device, parser_of
from hpcfed.results.run import RunRecord
from hpcfed.results.stored import read_run

TRIAL_SAMPLES = 2000
"""Samples of the learnings that measure the server's speed."""


class Runs:
    """Runs of the same problem in folders of their own."""

    def __init__(self, folder: Path, words: Sequence[str]) -> None:
        self._folder = folder
        self._words = words

    def make(self, name: str, *words: object, ranks: int = 1) -> RunRecord:
        """Make a run with further words on a number of ranks; return its record."""
        out = self._folder / name
        options = [*self._words, *map(str, words), "--out", str(out)]
        launching.run_hpcfed(options, ranks)
        return read_run(out)


def seconds(run: RunRecord) -> float:
    """Return what all rounds took, with all waiting."""
    return float(run.rounds["seconds"].sum())


def server_seconds(run: RunRecord) -> float:
    """Return what all learnings took."""
    return sum(sum(learning.seconds.values()) for learning in run.learnings)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--every", type=int, default=4, help="--server-every")
    parser.add_argument(
        "--overlap", type=int, help="--server-overlap (default: --every)"
    )
    parser.add_argument("--server-ranks", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    add_device(parser)
    parser.add_argument("more", nargs="*", help="options of `hpcfed run`, after --")
    options = parser.parse_args()
    overlap = options.every if options.overlap is None else options.overlap
    workers, ranks = options.workers, options.workers + options.server_ranks
    words = ["--rounds", str(options.rounds), "--device", options.device]
    pfedgpa = ["--method", "pfedgpa", "--server-every", options.every]
    pfedgpa += ["--server-ranks", options.server_ranks, "--server-model", "span"]
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder), words)
        of_clients, of_server = _apart(options.more)
        clients = seconds(runs.make("clients", *of_clients, ranks=workers))
        pfedgpa += [*of_clients, *of_server]
        few = ["--denoiser-samples", TRIAL_SAMPLES]
        trial = runs.make("trial", *pfedgpa, *few, ranks=ranks)
        between = clients * options.every / options.rounds
        samples = _samples_in(between, trial)
        pfedgpa += ["--denoiser-samples", samples]
        off = runs.make("off", *pfedgpa, ranks=ranks)
        on = runs.make("on", *pfedgpa, "--server-overlap", overlap, ranks=ranks)
    server = server_seconds(on)
    longer = max(clients, server)
    first, *others = (learning.waited for learning in on.learnings)
    print(f"{samples:,} samples in each learning, --server-overlap {overlap}")
    for name, taken in (
        ("clients alone", clients),
        (f"server, {len(on.learnings)} learnings", server),
        (f"run without overlap, {len(off.learnings)} learnings", seconds(off)),
        ("run with overlap", seconds(on)),
        ("… waiting for the first learning", first),
        ("… waiting for the others", sum(others)),
    ):
        print(f"{name:40}{taken:8.2f} s{taken / longer:7.2f} × the longer")
    parts = on.learnings[0].seconds.items()
    print("first learning, s:", *(f"{name} {taken:.2f}" for name, taken in parts))
    if samples == 1:
        print("clients end before the server has learnt anything: give them more work")


def _samples_in(seconds: float, trial: RunRecord) -> int:
    """Return the samples with which a learning takes this long, from the pace of a run
    with few: only the denoiser's time grows with them.
    """
    # The first learning also loads libraries.
    last = trial.learnings[-1].seconds
    others = sum(last.values()) - last["denoiser"]
    pace = last["denoiser"] / TRIAL_SAMPLES
    return max(1, round((seconds - others) / pace))


def _apart(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Part options of pFedGPA, which FedAvg does not know, from all others."""
    from hpcfed.methods import load

    own = {
        f"--{name.replace('_', '-')}" for name in load("pfedgpa").Options.model_fields
    }
    parts: tuple[list[str], list[str]] = [], []
    mine = False
    for word in words:
        if word.startswith("--"):
            mine = word.partition("=")[0].replace("--no-", "--", 1) in own
        parts[mine].append(word)
    return parts


if __name__ == "__main__":
    main()
