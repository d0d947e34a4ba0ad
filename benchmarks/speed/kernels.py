"""What hpcfed's own kernels are worth: rounds with them, and by torch's operators alone
(`--kernels torch`, as on GPUs of other makes).

  pfl-cifar10, pfedgpa-cifar10   rounds of benchmarks.speed.round
  resnet18                       4 clients × 250 images of 3×32×32, batch 50, one epoch
  vit, resnet, gpt, lora, gru    epochs of 100 clients × 64 samples, as in benchmarks.speed.own
  server                         p-diff learns 400 rows of cnn-fmnist's last layers: 20,000
                                 samples for the autoencoder, 80,000 for the denoiser

Both ways are measured in one process, one after the other. CUDA's graphs come with the
kernels, so torch alone launches every operator by itself. Warm-up rounds are not counted.

examples:
  python -m benchmarks.speed.kernels
  python -m benchmarks.speed.kernels --works pfl-cifar10 lora --json kernels.json
  python -m benchmarks.speed.kernels --device cpu --works gru --clients 4 --samples 16
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

import numpy as np
import torch

from benchmarks import measuring
from benchmarks.arguments import add_device, parser_of
from benchmarks.measuring import free, rounds_of, setup_of
from benchmarks.server.speed import SHAPES, bank
from benchmarks.speed.own import NETWORKS, ours, some_data
from benchmarks.speed.round import SYNTHETIC, WORKS
from hpcfed.models.layout import Layout
from hpcfed.models.lora import add_adapters
from hpcfed.models.networks import build
from hpcfed.models.own import build_own
from hpcfed.runtime import world as worlds
from hpcfed.runtime.device import set_arithmetic
from hpcfed.runtime.own_kernels import KernelChoice
from hpcfed.runtime.world import World
from hpcfed.server.bank import BankedRows
from hpcfed.server.latent_diffusion import LatentDiffusion
from hpcfed.server.options import ServerOptions
from hpcfed.server.schedule import generated
from hpcfed.server.training_plan import RankSlot

BATCH = 16
RESNET = SYNTHETIC | {
    "model": "resnet18",
    "clients": 4,
    "train_per_client": 250,
    "batch_size": 50,
    "epochs": 1,
    "lr": 0.02,
    "momentum": 0.9,
}
ROUNDS = WORKS | {"resnet18": RESNET}
ALL = [*ROUNDS, *NETWORKS, "server"]
Round = Callable[[int], object]


@dataclass(frozen=True)
class Times:
    """Milliseconds of rounds in one way."""

    work: str
    kernels: KernelChoice
    median: float
    low: float
    """A tenth of the rounds were faster."""
    high: float
    """A tenth were slower."""
    rounds: int


def federated(name: str, kernels: KernelChoice, world: World) -> Round:
    """Return a function that does the next round of a run."""
    device = world.device.type
    values = ROUNDS[name] | {"precision": "tf32", "device": device, "kernels": kernels}
    one = rounds_of(setup_of(values, world))

    def read(round: int) -> None:
        # A user reads the loss, too.
        float(one(round).loss_sum)

    return read


def of_clients(name: str, options: argparse.Namespace, world: World) -> Round:
    """Return a function that trains all clients of a user's network for an epoch."""
    where, sample = NETWORKS[name]
    torch.manual_seed(0)
    network = build_own(f"benchmarks/examples/{where}", sample, sample.outputs[-1], {})
    if name == "lora":
        add_adapters(network, rank=8, alpha=16.0)
    shard = some_data(sample, options.clients, options.samples, world.device)
    work, _ = ours(network, sample, shard, BATCH, "auto")
    return lambda round: work()


def learning(world: World) -> Round:
    """Return a function that lets a new server learn a bank."""
    chosen = ServerOptions(
        server="paper",
        server_engine="torch",
        server_batch=100,
        denoiser_batch=400,
        autoencoder_samples=20_000,
        denoiser_samples=80_000,
    )
    network = build("cnn-fmnist", shape=SHAPES["cnn-fmnist"], classes=10, seed=0)
    widths = generated(Layout.of(network), chosen).widths
    rows = bank(sum(widths), clients=20, rounds=20, device=world.device)
    banked, slot = BankedRows.of(rows, widths), RankSlot(world.device)
    return lambda round: LatentDiffusion(widths, chosen, slot, seed=round).learn(banked)


def measure(
    name: str, kernels: KernelChoice, options: argparse.Namespace, world: World
) -> Times:
    """Measure one piece of work in one way."""
    set_arithmetic(precision="tf32", deterministic=False, kernels=kernels)
    if name in ROUNDS:
        work = federated(name, kernels, world)
    elif name == "server":
        work = learning(world)
    else:
        work = of_clients(name, options, world)
    until = time.perf_counter() + options.seconds
    found = measuring.milliseconds(
        work, world.device, rounds=options.rounds, until=until
    )
    low, median, high = np.quantile(found, (0.1, 0.5, 0.9))
    del work
    free()
    return Times(name, kernels, float(median), float(low), float(high), len(found))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--works", nargs="+", choices=ALL, default=ALL)
    parser.add_argument("--clients", type=int, default=100, help="of vit … gru")
    parser.add_argument("--samples", type=int, default=64, help="of each of them")
    parser.add_argument("--rounds", type=int, default=20, help="most rounds of a way")
    parser.add_argument(
        "--seconds", type=float, default=4, help="after these no round begins"
    )
    add_device(parser)
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    options = parser.parse_args()
    world = worlds.enter(device=options.device)
    if not world.alone:
        parser.error("start it without mpirun or srun")
    world.join_alone()
    machine = world.locations[0].device_name
    day = f"{datetime.now(UTC):%Y-%m-%d}"
    print(f"{day}  {machine}, torch {torch.__version__}, TF32; milliseconds a round")
    print(f"{'work':16} {'our kernels':>22} {'torch alone':>22} {'times':>6}")
    found = []
    for name in options.works:
        pair = [measure(name, way, options, world) for way in get_args(KernelChoice)]
        found += pair
        texts = [f"{t.median:.2f} [{t.low:.2f}, {t.high:.2f}]" for t in pair]
        times = pair[1].median / pair[0].median
        print(f"{name:16} {texts[0]:>22} {texts[1]:>22} {times:6.2f}", flush=True)
    if options.json is not None:
        about = {"machine": machine, "torch": torch.__version__, "date": day}
        lines = [asdict(times) for times in found]
        options.json.write_text(json.dumps(about | {"times": lines}, indent=1))
    world.close()


if __name__ == "__main__":
    main()
