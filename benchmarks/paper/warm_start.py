"""How many rounds a warm start saves: pFedGPA's paper has a diffusion model that one
federation has trained generate the first rows of another.

The first run trains the server. All others have another seed, and so other clients and
other random numbers: one begins as usual, others with columns that the server of the
first run generates (a sample for each client, or the average of all samples), with the
global model of the first run, which needs no server, or with both. A line for each has
the accuracy of clients after their local training in the first round, FedAvg's after
that round, FedAvg's best, and the rounds to 95 % of that. Runs that are complete in the
folder are not made again. --seeds makes all of it for several first seeds; each has a
table and a folder of its own.

With updates in the server's bank (--bank-of updates, the default) a generated row is the
old global row plus an update, so that its accuracy is built in. --set bank_of=uploads
lets the server learn whole rows, as printed in the paper.

examples:
  python -m benchmarks.paper.warm_start --data-root data --out runs/warm
  python -m benchmarks.paper.warm_start --data-root data --dataset cifar10 --rounds 300 --out runs/warm-cifar10
  python -m benchmarks.paper.warm_start --data-root data --out runs/warm-uploads --seeds 0 1 2 --set bank_of=uploads
  python -m benchmarks.paper.warm_start --dataset digits --rounds 4 --clients 4 --out runs/try --set server=small
"""

import argparse
from dataclasses import replace
from pathlib import Path

from benchmarks import launching
from benchmarks.arguments import add_set, parser_of
from benchmarks.paper.cells import flag_words, pairs_of
from hpcfed.errors import UserError
from hpcfed.results.run import RunRecord
from hpcfed.results.stored import is_complete, read_run

COMMON = {
    "method": "pfedgpa",
    "epochs": "2",
    "batch_size": "50",
    "momentum": "0.5",
    "weight_decay": "5e-4",
    "precision": "tf32",
    "evaluate_every": "1",
}
"""The paper's local training."""
DOMINANT = {"partition": "dominant", "uniform_share": "0.2", "train_per_client": "600"}
"""The paper's data, of all sets but the small ones that come with hpcfed."""
DATASETS = {
    "fashion-mnist": DOMINANT | {"lr": "0.01", "test_per_client": "600"},
    "cifar10": DOMINANT
    | {"lr": "0.02", "test_per_client": "300", "augment": "crop-flip"},
    "emnist": DOMINANT | {"lr": "0.01", "test_per_client": "600"},
    "digits": {"lr": "0.01"},
}
# What the second federation's server learns at its end does not matter here.
BRIEFLY = {"autoencoder_samples": "200", "denoiser_samples": "200", "bank_rounds": "1"}


def main() -> None:
    """Make the runs that are missing, and print a line for each."""
    options = _parse()
    try:
        given = pairs_of("--set", options.set, "server=small")
    except UserError as error:
        raise SystemExit(f"warm_start.py: {error}") from None
    common = COMMON | DATASETS[options.dataset]
    common |= {
        "dataset": options.dataset,
        "clients": str(options.clients),
        "rounds": str(options.rounds),
    }
    if options.data_root:
        common["data_root"] = options.data_root
    common |= given
    for seed in options.seeds:
        out = options.out
        if len(options.seeds) > 1:
            out = out / f"seed-{seed}"
            print(f"first seed {seed}")
        _compare(common, out, seed)


def _compare(common: dict[str, str], out: Path, seed: int) -> None:
    """Make the runs of one first seed that are missing, and print a line for each."""
    first = out / "first"
    _run(first, common | {"seed": str(seed)})
    loaded = {"server_load": str(first / "server.h5")}
    warm = loaded | {"warm_start": "true"}
    init = {"init": str(first)}
    starts = {
        "cold": loaded,
        "a sample each": warm,
        "average of samples": warm | {"warm_rows": "average"},
        "global model": loaded | init,
        "global model, a sample each": warm | init,
    }
    print(
        "| start | clients trained in round 1 | after round 1 | best | rounds to 95 % "
        "of the best |"
    )
    print("|---|---:|---:|---:|---:|")
    other = {"seed": str(seed + 1), "server_save": "false"}
    for name, own in starts.items():
        folder = out / name.replace(",", "").replace(" ", "-")
        _run(folder, common | BRIEFLY | other | own)
        print(_line(name, read_run(folder)), flush=True)


def _line(name: str, record: RunRecord) -> str:
    # The last accuracy is that of generated rows, all others are FedAvg's.
    accuracy = record.rounds["accuracy"][:-1]
    fedavg = replace(record, rounds=record.rounds | {"accuracy": accuracy})
    best, rounds = fedavg.best("accuracy"), fedavg.rounds_to(0.95)
    trained = record.rounds["trained_accuracy"][0]
    return f"| {name} | {trained:.2%} | {accuracy[0]:.2%} | {best:.2%} | {rounds} |"


def _run(folder: Path, values: dict[str, str]) -> None:
    """Make a run, unless it is there."""
    if is_complete(folder):
        return
    launching.run_hpcfed(["--out", str(folder), "--overwrite", *flag_words(values)])


def _parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of all runs")
    parser.add_argument("--dataset", choices=DATASETS, default="fashion-mnist")
    parser.add_argument("--data-root", help="folder of the data sets")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0], help="of the first runs"
    )
    add_set(parser, "server=small")
    return parser.parse_args()


if __name__ == "__main__":
    main()
