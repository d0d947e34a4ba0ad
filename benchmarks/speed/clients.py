"""What a round costs by clients, from 10 to 10,000, by network: time, memory, and what
the report's cost model predicts.

All clients take part, each with its synthetic images of one epoch. The cost model is
fitted to the points up to --fit-to clients of each network, and predicts the others. A
point that would take longer than --longest seconds a round by that model is left out,
and one that does not fit into memory is named. One process does all, on one device.

examples:
  python -m benchmarks.speed.clients
  python -m benchmarks.speed.clients --networks cnn-cifar --clients 10 30 100 300 1000 10000
  python -m benchmarks.speed.clients --device cpu --networks mlp --clients 2 4 8 16 --fit-to 8
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from benchmarks.arguments import add_device, parser_of
from benchmarks.measuring import free, headline, setup_of
from benchmarks.speed.round import timed_rounds
from hpcfed.analysis.costmodel import CostModel, Measured, fit
from hpcfed.runtime import world as worlds
from hpcfed.runtime.world import World

RESNET20 = "benchmarks/examples/resnet.py:ResNet"
NETWORKS = {
    "mlp": "3x32x32",
    "cnn-fmnist": "1x28x28",
    "cnn-cifar": "3x32x32",
    "cnn-pfl": "3x32x32",
    RESNET20: "3x32x32",
    "resnet18": "3x32x32",
}
"""By network: the shape of its images."""


@dataclass(frozen=True)
class Point:
    measured: Measured
    gib: float
    """Peak of the device's memory; NaN on a CPU."""


def settings(
    network: str, clients: int, *, samples: int = 100, batch_size: int = 50
) -> dict[str, Any]:
    """Return the settings of a round in which all clients train for one epoch."""
    return {
        "dataset": "synthetic",
        "synthetic_shape": NETWORKS[network],
        "model": network,
        "partition": "iid",
        "clients": clients,
        "train_per_client": samples,
        "test_per_client": 1,
        "epochs": 1,
        "batch_size": batch_size,
        "momentum": 0.0,
    }


def measure(
    network: str, clients: int, options: argparse.Namespace, world: World
) -> Point:
    """Time rounds with this number of clients."""
    values = settings(
        network, clients, samples=options.samples, batch_size=options.batch_size
    )
    values |= {"precision": options.precision, "device": options.device}
    cuda = world.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    setup = setup_of(values, world)
    seconds, _ = timed_rounds(setup, warmup=options.warmup, rounds=options.rounds)
    measured = Measured(
        clients=clients,
        ranks=1,
        columns=setup.federation.layout.num_columns,
        seconds=float(np.median(seconds)),
        steps=-(-options.samples // options.batch_size),
    )
    gib = torch.cuda.max_memory_allocated() / 2**30 if cuda else float("nan")
    return Point(measured, gib)


def measured_or_none(
    network: str, clients: int, options: argparse.Namespace, world: World
) -> Point | None:
    """Measure a point; None where it does not fit into the device's memory."""
    try:
        return measure(network, clients, options, world)
    except torch.OutOfMemoryError:
        return None
    finally:
        free()


def line(
    network: str, clients: int, point: Point | None, model: CostModel | None
) -> str:
    """Return a row of the table; the model is None for points that it is fitted to."""
    if point is None:
        return f"| {network} | {clients:,} | does not fit | | | | |"
    measured = point.measured
    predicted = error = ""
    if model is not None:
        told = model(measured)
        predicted = f"{1e3 * told:.1f}"
        error = f"{100 * (told / measured.seconds - 1):+.1f} %"
    return (
        f"| {network} | {clients:,} | {1e3 * measured.seconds:.2f} | "
        f"{1e3 * measured.seconds / clients:.4f} | {point.gib:.2f} | {predicted} | "
        f"{error} |"
    )


def sweep(network: str, options: argparse.Namespace, world: World) -> None:
    """Measure a network at every number of clients, and print a line for each."""
    name = "resnet20" if network == RESNET20 else network
    fitted_to: list[Measured] = []
    model: CostModel | None = None
    for clients in sorted(options.clients):
        beyond = clients > options.fit_to
        if beyond and model is None:
            model = fit(fitted_to)
        expected = model(replace(fitted_to[-1], clients=clients)) if model else 0.0
        if expected > options.longest:
            told = f"left out: {expected:.1f} s expected"
            print(f"| {name} | {clients:,} | {told} | | | | |", flush=True)
            continue
        point = measured_or_none(network, clients, options, world)
        print(line(name, clients, point, model), flush=True)
        if point is not None and not beyond:
            fitted_to.append(point.measured)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    counts = [10, 30, 100, 300, 1000, 3000, 10_000]
    add("--clients", nargs="+", type=int, default=counts)
    add("--fit-to", type=int, default=300, help="the model's most clients (300)")
    add("--samples", type=int, default=100, help="images of a client (100)")
    add("--batch-size", type=int, default=50)
    add("--rounds", type=int, default=5, help="counted rounds (5)")
    add("--warmup", type=int, default=2, help="rounds before (2)")
    add("--longest", type=float, default=1.0, help="seconds of a round at most (1)")
    add("--precision", choices=["bf16", "tf32", "fp32"], default="tf32")
    add_device(parser)
    options = parser.parse_args(arguments)

    world = worlds.enter(device=options.device)
    if not world.alone:
        parser.error("start it without mpirun or srun: it is about one device")
    print(headline(world))
    print(
        "| network | clients | ms per round | ms per client | GiB | predicted | error |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|", flush=True)
    for network in options.networks:
        sweep(network, options, world)
    world.close()


if __name__ == "__main__":
    main()
