"""Seconds per round and client samples per second of two fixed pieces of work, to
compare simulators by.

  pfl-cifar10      1000 users × 50 images, cohort 50, batch 10, 1 epoch: the CIFAR-10 benchmark of pfl-research
  pfedgpa-cifar10  100 clients × 600 images, all take part, batch 50, 2 epochs: pFedGPA's CIFAR-10 setting

A round is sampling, download, local training, aggregation and the training loss;
evaluation is apart. Images are synthetic, 3×32×32. Warm-up rounds are not counted.
Works alone and under mpirun or srun.

On a GPU two floors stand beside, from its own speed, measured first: `arithmetic` is
the multiply-adds of training at the rate of a large matrix product; `memory` is the
bytes of a plain implementation at the speed of a large copy: every layer's output
written and read once, and in every step all clients' weights read twice, gradients
written and read, and rows (with momentum) read and written once. Kernels that join
layers may stay under `memory`.

examples:
  python -m benchmarks.speed.round
  python -m benchmarks.speed.round --works pfl-cifar10 --engines batched --rounds 50 --json round.json
  python -m benchmarks.speed.round --works pfedgpa-cifar10 --engines batched --profile
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from benchmarks import measuring
from benchmarks.arguments import add_device, parser_of
from benchmarks.measuring import headline, setup_of, synchronize
from hpcfed.clients.engine import Engine
from hpcfed.experiment.assemble import Setup
from hpcfed.plan.speeds import Ceilings
from hpcfed.runtime import world as worlds
from hpcfed.runtime.world import World

SYNTHETIC = {
    "dataset": "synthetic",
    "synthetic_shape": "3x32x32",
    "partition": "iid",
    "test_per_client": 1,
}
WORKS: dict[str, dict[str, Any]] = {
    "pfl-cifar10": {
        **SYNTHETIC,
        "model": "cnn-pfl",
        "clients": 1000,
        "train_per_client": 50,
        "participation": 0.05,
        "batch_size": 10,
        "epochs": 1,
        "lr": 0.1,
        "momentum": 0.0,
    },
    "pfedgpa-cifar10": {
        **SYNTHETIC,
        "model": "cnn-cifar",
        "clients": 100,
        "train_per_client": 600,
        "participation": 1.0,
        "batch_size": 50,
        "epochs": 2,
        "lr": 0.02,
        "momentum": 0.5,
        "weight_decay": 5e-4,
    },
}


def timed_rounds(setup: Setup, *, warmup: int, rounds: int) -> tuple[np.ndarray, float]:
    """Return the seconds of each counted round, on the slowest rank, and the samples
    trained on per round.
    """
    one, device = measuring.rounds_of(setup), setup.world.device
    seconds = []
    samples = 0
    for round in range(warmup + rounds):
        # Ranks begin together; the slowest one counts.
        setup.collectives.barrier()
        synchronize(device)
        begin = time.perf_counter()
        log = one(round)
        float(log.loss_sum)  # a user reads the loss, too
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
        if round >= warmup:
            samples += int(log.samples_seen)
    gathered = setup.collectives.gather_vectors(np.array([samples, *seconds[warmup:]]))
    if gathered is None:
        return np.empty(0), 0.0
    return gathered[:, 1:].max(0), gathered[:, 0].sum() / rounds


def floors(setup: Setup, samples: float, ceilings: Ceilings) -> tuple[float, float]:
    """Return the milliseconds that the arithmetic and the memory traffic of a round
    take at least.
    """
    config, cost = setup.settings.config, cast(Engine, setup.engine).cost
    client_steps = samples / config.batch_size
    # Weights are read twice, gradients written and read, rows read and written; with
    # momentum its rows, too.
    passes = 8 if config.momentum else 6
    parameters = setup.federation.layout.num_parameters
    # Every layer's output is written and read once, every step passes over all weights.
    floats = 2 * samples * cost.activations + passes * client_steps * parameters
    arithmetic = 2e3 * samples * cost.training / ceilings.flops
    memory = 4e3 * floats / ceilings.bytes_per_second
    return arithmetic, memory


def profile(setup: Setup, *, rows: int = 16) -> None:
    """Print where the time of one more round goes: by kernel on a GPU, by operator on a
    CPU.
    """
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    fed, cuda = setup.federation, setup.world.device.type == "cuda"
    state = setup.method.init(fed)
    with profiled(
        activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]
    ) as seen:
        setup.method.round(fed, state, fed.sample(0))
        synchronize(setup.world.device)
    times = [
        (e.self_device_time_total if cuda else e.self_cpu_time_total, e.count, e.key)
        for e in seen.key_averages()
    ]
    total = sum(time for time, _, _ in times)
    print(
        f"  {total / 1e3:.2f} ms of {'kernels, some side by side' if cuda else 'operators'}:"
    )
    for time_, count, name in sorted(times, reverse=True)[:rows]:
        print(
            f"  {time_ / 1e3:9.3f} ms {100 * time_ / total:5.1f} % {count:6} × {name[:90]}"
        )


def measure(
    name: str,
    engine: str,
    options: argparse.Namespace,
    world: World,
    ceilings: Ceilings | None,
) -> dict[str, Any] | None:
    """Return the figures of one piece of work; None on ranks other than the first."""
    values = WORKS[name] | {
        "engine": engine,
        "precision": options.precision,
        "device": options.device,
    }
    setup = setup_of(values, world)
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds, samples = timed_rounds(setup, warmup=options.warmup, rounds=options.rounds)
    if options.profile and world.is_root:
        profile(setup)
    if not len(seconds):
        return None
    arithmetic = memory_floor = memory = float("nan")
    if ceilings is not None:
        arithmetic, memory_floor = floors(setup, samples, ceilings)
    if world.device.type == "cuda":
        memory = torch.cuda.max_memory_allocated() / 2**30
    return {
        "work": name,
        "engine": engine,
        "precision": options.precision,
        "ms_per_round": 1e3 * float(np.median(seconds)),
        "ms_low": 1e3 * float(np.quantile(seconds, 0.1)),
        "ms_high": 1e3 * float(np.quantile(seconds, 0.9)),
        "arithmetic_floor_ms": arithmetic,
        "memory_floor_ms": memory_floor,
        "samples_per_second": samples / float(np.median(seconds)),
        "peak_gib": memory,
        "samples_ms": [1e3 * s for s in seconds],
    }


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--works", nargs="+", choices=WORKS, default=list(WORKS))
    add(
        "--engines", nargs="+", choices=["batched", "loop"], default=["batched", "loop"]
    )
    add("--rounds", type=int, default=10, help="counted rounds (default: 10)")
    add("--warmup", type=int, default=2, help="rounds before (default: 2)")
    add_device(parser)
    add("--precision", choices=["bf16", "tf32", "fp32"], default="tf32")
    add(
        "--profile",
        action="store_true",
        help="also print the kernels of a round by their share (alone)",
    )
    add(
        "--json",
        type=Path,
        help="also write everything, every round's time included, to this file",
    )
    options = parser.parse_args()

    world = worlds.enter(device=options.device)
    if options.profile and not world.alone:
        parser.error("--profile is for one process: start it without mpirun or srun")
    device_name = world.locations[0].device_name
    ceilings = Ceilings.of(world.device) if world.device.type == "cuda" else None
    if world.is_root:
        print(headline(world, f"{world.size} ranks", f"{world.threads} threads"))
        if ceilings:
            print(
                f"measured: copy {ceilings.bytes_per_second / 1e12:.2f} TB/s, TF32 "
                f"{ceilings.flops / 1e12:.0f} TFLOP/s"
            )
        print(
            f"{'work':16} {'engine':8} {'ms per round':>12} {'10 % … 90 %':>19} "
            f"{'arithmetic':>10} {'memory':>7} "
            f"{'samples/s':>11} {'GiB':>7}"
        )
    results = []
    for name in options.works:
        for engine in options.engines:
            result = measure(name, engine, options, world, ceilings)
            if result is None:
                continue
            results.append(result)
            spread = f"{result['ms_low']:.2f} … {result['ms_high']:.2f}"
            print(
                f"{name:16} {engine:8} {result['ms_per_round']:12.2f} {spread:>19} "
                f"{result['arithmetic_floor_ms']:10.2f} {result['memory_floor_ms']:7.2f} "
                f"{result['samples_per_second']:11,.0f} {result['peak_gib']:7.2f}",
                flush=True,
            )
    if options.json and world.is_root:
        options.json.write_text(
            json.dumps(
                {"device": device_name, "ranks": world.size, "results": results},
                indent=1,
            )
        )
    world.close()


if __name__ == "__main__":
    main()
