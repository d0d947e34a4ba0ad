"""What it brings to train several clients of a large network side by side.

Ten clients take the steps of one round of GENE-FL's setting: one client after the other,
then in lanes, without and with the two terms that draw rows to their cluster's. Then
comes the Fisher information of their data. Images are random: their content costs
nothing. The first call of each warms up and is not counted.

examples:
  python benchmarks/lanes.py
  python benchmarks/lanes.py --lanes 1 4 8 10 --calls 5
  python benchmarks/lanes.py --device cpu --model cnn-bn --images 20 --epochs 1
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np
import torch

from hpcfed.clients import engine as engines
from hpcfed.clients.engine import Engine
from hpcfed.clients.job import Recipe, TrainingJob
from hpcfed.clients.pull import Pull, Strengths
from hpcfed.data.shards import Shard
from hpcfed.models.layout import Layout
from hpcfed.models.networks import build
from hpcfed.runtime.device import set_arithmetic

SHAPE = (3, 32, 32)
CLIENTS = 10


def main() -> None:
    """Print a line for each number of lanes, and one for Fisher information."""
    options = _parse()
    device = torch.device(options.device)
    set_arithmetic(precision="bf16", deterministic=False)
    network = build(options.model, shape=SHAPE, classes=10, seed=0)
    layout = Layout.of(network)
    shard = _shard(options.images, device)
    rows = layout.row(network).repeat(CLIENTS, 1).to(device)
    clients = np.arange(CLIENTS)
    recipe = Recipe(options.epochs, 64, 0.01, momentum=0.9)
    keys = torch.arange(CLIENTS, device=device)
    mask = torch.rand_like(rows) < 0.9
    terms = Pull(Strengths(whole=0.5, masked=0.05), 0.99 * rows, mask)

    def engine() -> Engine:
        return Engine(
            network, layout, shape=SHAPE, mode="loop", bf16=True, device=device
        )

    for pull in (None, terms):
        job = TrainingJob(rows, shard, clients, recipe, keys=keys, pull=pull)
        for lanes in options.lanes:
            engines.LANES = lanes
            seconds = _seconds(partial(engine().train, job), options.calls)
            what = "steps" if pull is None else "steps with GENE-FL's terms"
            print(f"{what}, lanes: {lanes}  {seconds:.3f} s", flush=True)
    fisher = partial(engine().fisher, rows, shard, clients)
    seconds = _seconds(fisher, options.calls)
    print(f"Fisher information  {seconds:.3f} s")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--images", type=int, default=500, help="of each client")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 10])
    parser.add_argument("--calls", type=int, default=2, help="that are counted")
    return parser.parse_args()


def _shard(images: int, device: torch.device) -> Shard:
    """Return random images, as many for each client."""
    total = CLIENTS * images
    torch.manual_seed(0)
    inputs = torch.randn(total, *SHAPE, device=device)
    return Shard(
        inputs=inputs.contiguous(memory_format=torch.channels_last),
        targets=torch.randint(10, (total,), device=device),
        index=torch.arange(total, device=device).view(CLIENTS, images),
        sizes=(images,) * CLIENTS,
        clients=np.arange(CLIENTS),
    )


def _seconds(work: Callable[[], object], calls: int) -> float:
    """Return the median time of calls after the first one."""
    found = []
    for _ in range(1 + calls):
        begin = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return median(found[1:])


if __name__ == "__main__":
    main()
