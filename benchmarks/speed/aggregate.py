"""What aggregation costs over a bare all-reduce of the same bytes.

`mean` is what a method calls: the weighted sum of a rank's rows, then one all-reduce of
a single row. `sum` is its local part alone, `bare` is torch's all-reduce of one row. A
time is the slowest rank's; repetitions of the three take turns, so that a busy machine
treats them alike. Of the repetitions the quickest tenth's bound is shown: ranks that
share cores wait for the scheduler at times, which makes medians of small messages jump
tenfold. `over bare` is mean / bare, `beyond sum` is mean / (bare + sum), which leaves
hpcfed's own share once the arithmetic is taken away. Works alone, where nothing is
reduced, and under mpirun or srun, on CPUs and GPUs.

examples:
  mpirun -n 2 python -m benchmarks.speed.aggregate --device cpu
  mpirun -n 2 python -m benchmarks.speed.aggregate --backend nccl --clients 10 --columns 1000000     ranks that share a GPU
  srun --ntasks 4 --gpus-per-task 1 python -m benchmarks.speed.aggregate --clients 10 100 --columns 11000000
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.arguments import add_device, parser_of
from benchmarks.measuring import headline, seconds_of, setup_of
from hpcfed.errors import count
from hpcfed.experiment.assemble import Setup
from hpcfed.runtime import world as worlds
from hpcfed.runtime.world import World


def federation_of(clients_per_rank: int, world: World, *, deterministic: bool) -> Setup:
    """Return a federation with as many equal clients on every rank; their data and
    network play no part.
    """
    values = {
        "dataset": "synthetic",
        "synthetic_shape": "1x8x8",
        "partition": "iid",
        "train_per_client": 1,
        "test_per_client": 1,
        "model": "mlp",
        "clients": clients_per_rank * world.num_workers,
        "deterministic": deterministic,
    }
    return setup_of(values, world)


def milliseconds(
    actions: dict[str, Callable[[], object]], setup: Setup, *, repeats: int
) -> dict[str, np.ndarray]:
    """Time the actions in turn, and return each one's times on the slowest rank; empty
    on ranks other than the first.
    """
    # Repetitions take turns, so that a busy machine treats all actions alike.
    times = np.empty((len(actions), repeats))
    for repeat in range(-2, repeats):  # two more to warm up
        for number, action in enumerate(actions.values()):
            setup.collectives.barrier()
            seconds = seconds_of(action, setup.world.device)
            if repeat >= 0:
                times[number, repeat] = 1e3 * seconds
    gathered = setup.collectives.gather_vectors(times.ravel())
    slowest = np.empty((len(actions), 0))
    if gathered is not None:
        slowest = gathered.max(0).reshape(times.shape)
    return dict(zip(actions, slowest, strict=True))


def measure(setup: Setup, columns: int, *, repeats: int) -> dict[str, np.ndarray]:
    """Return the times of a bare all-reduce, of the local sum and of the mean."""
    fed, world = setup.federation, setup.world
    cohort = fed.sample(0)
    rows = torch.randn(len(cohort.here), columns, device=world.device)
    # Zeros, so that repeated sums stay what they are.
    row = torch.zeros(columns, device=world.device)

    def local_sum() -> None:
        torch.from_numpy(cohort.weights[cohort.chosen]).to(rows) @ rows

    def bare() -> None:
        if world.role_size > 1:
            dist.all_reduce(row)

    return milliseconds(
        {"bare": bare, "sum": local_sum, "mean": lambda: fed.mean(rows, cohort)},
        setup,
        repeats=repeats,
    )


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add(
        "--columns",
        type=int,
        nargs="+",
        default=[10_000, 100_000, 1_000_000, 11_000_000],
    )
    add("--clients", type=int, nargs="+", default=[1, 10, 50], help="clients per rank")
    add("--repeats", type=int, default=60)
    add(
        "--max-gib",
        type=float,
        default=2.5,
        help="leave out work whose rows need more on a rank",
    )
    add_device(parser)
    add("--backend", choices=["auto", "nccl", "gloo"], default="auto")
    add("--deterministic", action="store_true", help="sums in client order")
    options = parser.parse_args()

    world = worlds.enter(device=options.device, backend=options.backend)
    if world.is_root:
        ranks = f"{count(world.size, 'rank')} ({world.backend}), {count(world.threads, 'thread')}"
        print(headline(world, ranks))
        print(
            f"{'columns':>10} {'clients/rank':>12} {'bare ms':>9} {'sum ms':>9} {'mean ms':>9} "
            f"{'50 % … 90 %':>19} {'over bare':>9} {'beyond sum':>10}"
        )
    for clients in options.clients:
        setup = federation_of(clients, world, deterministic=options.deterministic)
        for columns in options.columns:
            # Rows are float32.
            if 4 * clients * columns > options.max_gib * 2**30:
                continue
            times = measure(setup, columns, repeats=options.repeats)
            if world.is_root:
                bare, local, mean = (
                    float(np.quantile(times[name], 0.1))
                    for name in ("bare", "sum", "mean")
                )
                middle, high = np.quantile(times["mean"], [0.5, 0.9])
                over = (
                    f"{mean / bare:9.2f} {mean / (bare + local):10.2f}"
                    if world.role_size > 1
                    else f"{'':20}"
                )
                spread = f"{middle:.3f} … {high:.3f}"
                print(
                    f"{columns:10,} {clients:12} {bare:9.3f} {local:9.3f} {mean:9.3f} "
                    f"{spread:>19} {over}",
                    flush=True,
                )
    world.close()


if __name__ == "__main__":
    main()
