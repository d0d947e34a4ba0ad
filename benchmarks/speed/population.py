"""What a large population costs, of which a small cohort takes part in a round.

Each size is a process of its own, so that its memory is its own: synthetic samples, a
few for each client. The start is everything before the first round; a round is the
median of those that are not evaluated; the last round, which is evaluated on all
clients, has its own column. On a GPU the memory is that of the process, not of the GPU.

example:
  python -m benchmarks.speed.population --clients 10000,100000,1000000 --cohort 100
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import hpcfed
from benchmarks import launching
from benchmarks.arguments import parser_of

COLUMNS = ("clients", "cohort", "start, s", "round, ms", "evaluated round, s", "GiB")


def measure(options: dict[str, Any]) -> dict[str, float]:
    """Make one run in this process; return what it took."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        run = hpcfed.run(progress=False, out=Path(folder) / "run", **options)
        whole = time.perf_counter() - begin
        seconds = np.asarray(run.rounds["seconds"])
    # The first round warms up, and the last one is evaluated.
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "start": whole - float(seconds.sum()),
        "round": float(np.median(seconds[1:-1])),
        "evaluated": float(seconds[-1]),
        "memory": kibibytes / 2**20,
    }


def options_of(arguments: argparse.Namespace, clients: int) -> dict[str, Any]:
    """Return the options of a run with this number of clients."""
    return {
        "dataset": "synthetic",
        "synthetic_shape": "1x4x4",
        "model": "mlp",
        "partition": arguments.partition,
        "train_per_client": arguments.samples,
        "test_per_client": 1,
        "clients": clients,
        "cohort": arguments.cohort,
        "rounds": arguments.rounds,
        "evaluate_every": arguments.rounds,
        "epochs": 1,
        "batch_size": arguments.samples,
        "device": arguments.device,
        "method": arguments.method,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--clients", default="10000,100000,1000000")
    parser.add_argument("--cohort", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--samples", type=int, default=4, help="of each client")
    parser.add_argument("--partition", default="dirichlet")
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sizes = [int(word) for word in arguments.clients.split(",")]
    if arguments.alone:
        print(json.dumps(measure(options_of(arguments, sizes[0]))))
        return
    print(" | ".join(COLUMNS))
    for clients in sizes:
        words = [sys.executable, "-m", "benchmarks.speed.population"]
        words += [*sys.argv[1:], "--alone"]
        # The last flag counts.
        words += ["--clients", str(clients)]
        ended = subprocess.run(
            words, capture_output=True, text=True, env=launching.environment()
        )
        if ended.returncode:
            print(f"{clients:,} | {ended.stderr.strip().splitlines()[-1]}")
            continue
        took = json.loads(ended.stdout.splitlines()[-1])
        print(
            f"{clients:,} | {arguments.cohort} | {took['start']:.1f} | "
            f"{1e3 * took['round']:.1f} | {took['evaluated']:.2f} | "
            f"{took['memory']:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
