"""Measure what the engine promises beyond a round's speed, each against its yardstick.

  uneven   100 clients of Dirichlet(0.1) against the bound of any schedule: as many samples spread evenly,
           or the steps of the longest client alone
  large    ResNet-18 clients one after another against a well-tuned plain training loop of the same steps
  many     milliseconds per client from 100 to 1000 clients that all take part, on one device
  stacks   clients trained together against one by one, for small networks (the promise is for CPUs)
  seeds    five seeds stacked as rows of one matrix against five runs one after another

Images are synthetic, 3×32×32. Alone on one device, GPU or CPU.

examples:
  python -m benchmarks.speed.engine
  python -m benchmarks.speed.engine --parts uneven many --rounds 10
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.arguments import add_device, parser_of
from benchmarks.data import dealt
from benchmarks.measuring import (
    headline,
    milliseconds,
    rounds_of,
    settings_of,
    setup_of,
)
from benchmarks.speed.round import WORKS
from hpcfed.experiment.assemble import Setup, assemble, assemble_stacked
from hpcfed.models.networks import build
from hpcfed.options import Settings
from hpcfed.runtime import world as worlds
from hpcfed.runtime.timer import Timer
from hpcfed.runtime.world import World

SYNTHETIC: dict[str, Any] = {
    "dataset": "synthetic",
    "synthetic_shape": "3x32x32",
    "test_per_client": 1,
    "model": "cnn-cifar",
}
CIFAR = SYNTHETIC | {
    "batch_size": 50,
    "epochs": 2,
    "lr": 0.02,
    "momentum": 0.5,
    "weight_decay": 5e-4,
}


@dataclass(frozen=True)
class Uneven:
    """Rounds of uneven clients, and what bounds them: milliseconds of each round, and
    samples of each client.
    """

    even: np.ndarray
    """Rounds of as many clients with the same number of samples."""
    found: np.ndarray
    alone: np.ndarray
    """Rounds of the longest client, or of two such, whichever are shorter: the kernels
    that many clients share need two at least.
    """
    even_sizes: np.ndarray
    sizes: np.ndarray

    @property
    def all_work(self) -> float:
        """What all samples take at the pace of even clients."""
        pace = np.median(self.even) / self.even_sizes.sum()
        return float(pace * self.sizes.sum())

    @property
    def bound(self) -> float:
        """The least that any schedule takes: all samples at the pace of even clients,
        or the longest client's steps, one by one.
        """
        return max(self.all_work, float(np.median(self.alone)))

    @property
    def limit(self) -> str:
        """What the bound is set by."""
        return "all samples" if self.bound == self.all_work else "the longest client"


def measure_uneven(
    world: World,
    timed: Callable[[Setup], np.ndarray],
    values: dict[str, Any],
    *,
    root: Path | None = None,
) -> Uneven:
    """Time rounds of clients by Dirichlet(0.1), of even ones, and of the longest."""

    def found(real: str, **changes: Any) -> tuple[np.ndarray, np.ndarray]:
        mine = dealt(values | changes, "cifar10", root, partition=real)
        setup = setup_of(mine, world)
        return timed(setup), setup.federation.sizes

    # Of synthetic samples iid deals as many to each, of real ones dominant does.
    even, even_sizes = found("dominant", partition="iid")
    uneven, sizes = found("dirichlet", partition="dirichlet", alpha=0.1)
    longest = int(sizes.max())
    few = []
    for clients in (1, 2):
        alike = {"clients": clients, "train_per_client": longest}
        few.append(found("dominant", partition="iid", **alike)[0])
    return Uneven(even, uneven, min(few, key=np.median), even_sizes, sizes)


def uneven(world: World, rounds: int, device: str) -> None:
    """Compare a round of uneven clients with the least that any schedule takes."""

    def timed(setup: Setup) -> np.ndarray:
        return milliseconds(rounds_of(setup), world.device, rounds=rounds)

    values = WORKS["pfedgpa-cifar10"] | {"device": device}
    made = measure_uneven(world, timed, values)
    even, found, alone = map(np.median, (made.even, made.found, made.alone))
    longest = made.sizes.max()
    print(
        f"  even {even:.2f} ms a round, Dirichlet(0.1) {found:.2f}, {made.sizes.sum()} "
        f"samples; its longest client, with {longest} of them, {alone:.2f} alone\n"
        f"  {found / even:.3f} times the even round; {made.bound / found:.0%} of the bound "
        f"of {made.bound:.2f} ms, which is set by {made.limit} (goal: 80%)"
    )


def large(
    world: World,
    rounds: int,
    device: str,
    *,
    clients: int = 4,
    samples: int = 600,
    batch: int = 50,
) -> None:
    """Compare the engine with a tuned plain loop over clients of ResNet-18."""
    for precision in ("tf32", "bf16") if world.device.type == "cuda" else ("tf32",):
        config = CIFAR | {
            "model": "resnet18",
            "clients": clients,
            "train_per_client": samples,
            "partition": "iid",
            "epochs": 1,
            "batch_size": batch,
            "precision": precision,
            "device": device,
        }
        setup = setup_of(config, world)
        fed = setup.federation
        rows = fed.initial_row().expand(clients, -1)
        train = partial(_train, fed, rows)
        ours = milliseconds(train, world.device, rounds=rounds)
        plain = milliseconds(
            _plain_loop(setup, clients, batch, precision), world.device, rounds=rounds
        )
        steps = clients * samples // batch
        print(
            f"  {precision}: engine ({setup.engine.mode}) "
            f"{np.median(ours) / steps:.3f} ms a step, tuned loop "
            f"{np.median(plain) / steps:.3f}, ratio "
            f"{np.median(ours) / np.median(plain):.3f} (promised: at most 1.05)"
        )


def _median(setup: Setup, rounds: int) -> float:
    """Return the median milliseconds of a run's rounds."""
    times = milliseconds(rounds_of(setup), setup.world.device, rounds=rounds)
    return float(np.median(times))


def _train(fed: Any, rows: torch.Tensor, round: int) -> None:
    fed.train(rows, fed.sample(round))


def _plain_loop(
    setup: Setup, clients: int, batch: int, precision: str
) -> Callable[[int], object]:
    """Return a round as a careful user would write it: channels-last, fused optimiser,
    data on the device, no waiting.
    """
    device, shard = setup.world.device, setup.federation.training.train_data
    # What a careful user would do, so that the comparison is fair.
    images = shard.inputs.contiguous(memory_format=torch.channels_last)
    network = build("resnet18", shape=(3, 32, 32), classes=10, seed=0).to(
        device, memory_format=torch.channels_last
    )  # type: ignore[call-overload]
    start = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    cast = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")

    def one(round: int) -> None:
        for client in range(clients):
            network.load_state_dict(start)
            optimiser = torch.optim.SGD(
                network.parameters(),
                lr=0.02,
                momentum=0.5,
                weight_decay=5e-4,
                fused=True,
            )
            order = shard.index[client][
                torch.randperm(shard.sizes[client], device=device)
            ]
            for own in order.split(batch):
                optimiser.zero_grad(set_to_none=True)
                with cast:
                    loss = F.cross_entropy(network(images[own]), shard.targets[own])
                loss.backward()
                optimiser.step()

    return one


def many(world: World, rounds: int, device: str) -> None:
    """Print what a client costs when there are more of them."""
    first = None
    for clients in (100, 200, 500, 1000):
        values = CIFAR | {
            "clients": clients,
            "train_per_client": 100,
            "partition": "iid",
            "epochs": 1,
            "device": device,
        }
        setup = setup_of(values, world)
        if world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        each = _median(setup, rounds) / clients
        first = first or each
        memory = ""
        if world.device.type == "cuda":
            memory = f", {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB"
        print(
            f"  {clients:5} clients: {each:.4f} ms a client, {each / first:.3f} of "
            f"that with 100{memory}"
        )
        del setup


def stacks(world: World, rounds: int, device: str) -> None:
    """Compare clients trained together with clients trained one by one."""
    tiny = {"synthetic_shape": "1x8x8", "clients": 20}
    tiny |= {"train_per_client": 72, "batch_size": 16}
    works: dict[str, dict[str, Any]] = {
        "cnn-digits": tiny,
        "cnn-cifar": {"clients": 10, "train_per_client": 100, "batch_size": 50},
        "cnn-pfl": {"clients": 10, "train_per_client": 50, "batch_size": 10},
        "mlp": tiny,
    }
    for model, work in works.items():
        values = CIFAR | work | {"model": model, "partition": "iid"}
        values |= {"epochs": 1, "device": device}
        times = {}
        for engine in ("batched", "loop"):
            setup = setup_of(values | {"engine": engine}, world)
            times[engine] = _median(setup, rounds)
        print(
            f"  {model:10} {times['batched']:8.1f} ms a round together, "
            f"{times['loop']:8.1f} one by one, "
            f"ratio {times['batched'] / times['loop']:.2f} (promised on a CPU: at most 1)"
        )


def seeds(world: World, rounds: int, device: str) -> None:
    """Compare stacked seeds with seeds one after another."""
    for model, shape in {"cnn-fmnist": "1x28x28", "cnn-cifar": "3x32x32"}.items():
        values = CIFAR | {
            "model": model,
            "synthetic_shape": shape,
            "clients": 20,
            "train_per_client": 200,
            "participation": 0.5,
            "device": device,
            "partition": "iid",
        }
        settings = [settings_of(values | {"seed": seed}) for seed in range(5)]
        setups = [assemble(one, world, Timer(world.device)) for one in settings]
        alone = sum(_median(setup, rounds) for setup in setups)
        together = _stacked(settings, world, rounds)
        print(
            f"  {model:10} {alone:.2f} ms a round for five seeds one by one, "
            f"{together:.2f} stacked, "
            f"{alone / together:.2f} times faster"
        )


def _stacked(settings: list[Settings], world: World, rounds: int) -> float:
    """Return the milliseconds of a round of all seeds together."""
    warmup = 3
    names = [f"seed {one.config.seed}" for one in settings]
    timers = [Timer(world.device) for _ in settings]
    lockstep, setups = assemble_stacked(settings, names, world, timers)
    ends: list[float] = []

    def program(setup: Setup) -> None:
        one = rounds_of(setup)
        for round in range(warmup + rounds):
            float(one(round).loss_sum)  # waits for the device
            if setup is setups[-1]:
                ends.append(time.perf_counter())

    # Seeds take turns within a round, so the last one ends the round of all.
    lockstep.run([partial(program, setup) for setup in setups], world.device)
    return 1e3 * float(np.median(np.diff(ends)[warmup - 1 :]))


PARTS = {
    "uneven": uneven,
    "large": large,
    "many": many,
    "stacks": stacks,
    "seeds": seeds,
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--rounds", type=int, default=10, help="counted rounds (default: 10)"
    )
    add_device(parser)
    options = parser.parse_args()
    world = worlds.enter(device=options.device)
    print(headline(world))
    for name in options.parts:
        print(name)
        PARTS[name](world, options.rounds, options.device)
    world.close()


if __name__ == "__main__":
    main()
