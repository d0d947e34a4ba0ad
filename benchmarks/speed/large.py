"""Where the time of GENE-FL's round with ResNet-18 goes.

The setting is that of the paper: 50 clients × 500 images of 3×32×32, ten take part in a
round, batch 64, 10 epochs of SGD with momentum. Images are synthetic. Printed are

  the round, and its phases; Fisher information, training in some numbers of lanes,
  evaluation of all clients, and the first weights of a client that joins;
  the kernels of training in one lane: with more, kernels of several clients run side by
  side, and each takes longer than alone;
  those kernels by kind, beside the least that each kind must take at the device's own
  speed, which is measured first: multiply-adds of convolutions, passes of batch norm
  over activations, passes of the step over rows.

examples:
  python -m benchmarks.speed.large
  python -m benchmarks.speed.large --rounds 5 --precision tf32 --kernels 0
  python -m benchmarks.speed.large --lanes 1 4 8 10 --kernels 0
  python -m benchmarks.speed.large --device cpu --model cnn-bn --images 20 --rounds 1 --kernels 8
"""

import argparse
from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.arguments import add_device, parser_of
from benchmarks.measuring import headline, seconds_of, settings_of, synchronize
from hpcfed.clients import engine as engines
from hpcfed.clients.pull import Pull, Strengths
from hpcfed.experiment.assemble import Setup, assemble
from hpcfed.models.cost import cost
from hpcfed.models.networks import build
from hpcfed.models.own import Sample
from hpcfed.options import Settings
from hpcfed.plan.speeds import Ceilings
from hpcfed.runtime import world as worlds
from hpcfed.runtime.timer import PHASES, Timer

SHAPE = (3, 32, 32)
BATCH = 64
EPOCHS = 10
NORM_PASSES = 9.5
"""Passes of batch norm over a convolution's output: two reads and a write forward, two
reads of two tensors and a write backward. With a residual, which every second one has:
another read forward, a read and a write backward.
"""
KINDS = {
    "convolutions": ("fprop", "dgrad", "wgrad", "convolve", "cask_plugin"),
    "batch norm": ("forward_", "backward_", "batch_norm"),
    "step": ("descend", "sgd", "slopes", "multi_tensor_apply"),
}
"""Parts of the names of kernels; the first kind that has one is theirs."""


def main() -> None:
    options = _parse()
    world = worlds.enter(device=options.device)
    timer = Timer(world.device)
    setup = assemble(_settings(options), world, timer)
    mode = f"mode {setup.engine.mode}"
    print(headline(world, options.precision, mode), flush=True)
    _print_round(setup, options.rounds)
    _print_parts(setup, options.rounds)
    _print_lanes(setup, options.lanes, options.rounds)
    if world.device.type == "cuda":
        print(f"  peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
    if options.kernels:
        _print_kernels(setup, options.kernels)
    world.close()


def _parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add_device(parser)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--precision", choices=["bf16", "tf32", "fp32"], default="bf16")
    parser.add_argument("--images", type=int, default=500, help="of each client")
    parser.add_argument("--rounds", type=int, default=3, help="that are counted")
    parser.add_argument(
        "--lanes",
        type=int,
        nargs="+",
        default=[1, engines.LANES],
        help="clients that train side by side on a GPU (default: 1, and as in runs)",
    )
    parser.add_argument(
        "--kernels", type=int, default=30, help="kernels to name (default: 30; 0: none)"
    )
    return parser.parse_args()


def _settings(options: argparse.Namespace) -> Settings:
    values = {
        "method": "genefl",
        "dataset": "synthetic",
        "synthetic_shape": "3x32x32",
        "partition": "iid",
        "model": options.model,
        "clients": 50,
        "train_per_client": options.images,
        "test_per_client": 100,
        "participation": 0.2,
        "batch_size": BATCH,
        "epochs": EPOCHS,
        "lr": 0.01,
        "momentum": 0.9,
        "precision": options.precision,
        "device": options.device,
    }
    return settings_of(values)


def _seconds(work: Callable[[], object], calls: int, setup: Setup) -> float:
    """Return the median time of calls after the first one."""
    found = [seconds_of(work, setup.world.device) for _ in range(1 + calls)]
    return median(found[1:])


def _print_round(setup: Setup, rounds: int) -> None:
    """Print the time of whole rounds, and of their phases."""
    fed, timer = setup.federation, setup.timer
    state = setup.method.init(fed)
    walls = []
    phases = []
    # The second round still captures steps of lanes that the first has not.
    for round in range(2 + rounds):
        timer.start()
        state = setup.method.round(fed, state, fed.sample(round))
        seconds, wall = timer.lap()
        phases.append(seconds)
        walls.append(wall)
    print(f"  first round  {walls[0]:.3f} s, second {walls[1]:.3f}")
    least, most = min(walls[2:]), max(walls[2:])
    print(f"  round        {median(walls[2:]):.3f} s ({least:.3f} to {most:.3f})")
    middle = np.median(np.array(phases[2:]), axis=0)
    for name, seconds in zip(PHASES, middle, strict=True):
        if seconds > 5e-4:
            print(f"    phase {name:10} {seconds:.3f} s")


def _print_parts(setup: Setup, calls: int) -> None:
    """Print the time of each part of a round by itself."""
    fed = setup.federation
    cohort = fed.sample(0)
    rows = fed.initial_row().repeat(len(cohort.here), 1)
    everyone = np.arange(len(fed.clients))
    all_rows = fed.initial_row().repeat(len(everyone), 1)
    parts: dict[str, Callable[[], object]] = {
        "Fisher information": partial(fed.fisher, rows, cohort),
        "evaluation of 50": partial(fed.evaluate, all_rows, everyone),
        "a client's fresh row": partial(fed.fresh_row, 1),
    }
    for name, work in parts.items():
        print(f"  {name:22} {_seconds(work, calls, setup):.3f} s", flush=True)


def _print_lanes(setup: Setup, numbers: list[int], calls: int) -> None:
    """Print the time of training by lanes, without and with GENE-FL's two terms."""
    before = engines.LANES
    for lanes in numbers:
        engines.LANES = lanes
        for terms in (False, True):
            work = partial(_train, setup, terms=terms)
            work()
            what = "with GENE-FL's terms" if terms else "without terms"
            seconds = _seconds(work, calls, setup)
            print(
                f"  training, lanes: {lanes:2}, {what:20} {seconds:.3f} s", flush=True
            )
    engines.LANES = before


def _train(setup: Setup, *, terms: bool) -> None:
    """Train a cohort, with or without terms that draw rows to their cluster's."""
    fed = setup.federation
    cohort = fed.sample(0)
    rows = fed.initial_row().repeat(len(cohort.here), 1)
    pull = None
    if terms:
        mask = torch.ones_like(rows, dtype=torch.bool)
        pull = Pull(Strengths(whole=0.5, masked=0.05), 0.99 * rows, mask)
    fed.train(rows, cohort, pull=pull)


def _print_kernels(setup: Setup, names: int) -> None:
    """Print the kernels of training, one client after the other, and of Fisher
    information.
    """
    fed = setup.federation
    cohort = fed.sample(0)
    rows = fed.initial_row().repeat(len(cohort.here), 1)
    before = engines.LANES
    engines.LANES = 1
    alone = partial(_train, setup, terms=True)
    # Steps are captured at their second call.
    alone()
    alone()
    steps = int(fed.num_steps(cohort).sum())
    times = _print_profile("training", alone, names, setup, steps=steps)
    if setup.world.device.type == "cuda":
        _print_kinds(setup, times, steps)
    engines.LANES = before
    fisher = partial(fed.fisher, rows, cohort)
    _print_profile("Fisher information", fisher, names, setup, steps=0)


def _print_profile(
    title: str, work: Callable[[], object], names: int, setup: Setup, *, steps: int
) -> list[tuple[float, int, str]]:
    """Print the kernels of some work that take longest; return microseconds, calls and
    name of all.
    """
    cuda = setup.world.device.type == "cuda"
    activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    with profile(activities=[activity]) as seen:
        work()
        synchronize(setup.world.device)
    times = []
    for event in seen.key_averages():
        spent = event.self_device_time_total if cuda else event.self_cpu_time_total
        times.append((spent, event.count, event.key))
    total = sum(spent for spent, _, _ in times)
    print(f"  {title}: {total / 1e6:.3f} s of kernels", end="")
    print(f", {total / steps:.0f} µs a step" if steps else "")
    for spent, count, name in sorted(times, reverse=True)[:names]:
        each = f"{count / steps:5.1f} a step" if steps else f"{count:5} ×"
        share = 100 * spent / total
        print(f"  {spent / 1e3:8.2f} ms {share:5.1f} %  {each}  {name[:110]}")
    return times


def _print_kinds(setup: Setup, times: list[tuple[float, int, str]], steps: int) -> None:
    """Print microseconds of a step by kind of kernel, beside the least they may be."""
    by_kind = dict.fromkeys([*KINDS, "rest"], 0.0)
    for spent, _, name in times:
        kind = next((k for k, parts in KINDS.items() if _has(name, parts)), "rest")
        by_kind[kind] += spent / steps
    least = _least(setup)
    for kind, spent in by_kind.items():
        floor = f"at least {least[kind]:6.1f}" if kind in least else ""
        print(f"  {kind:14} {spent:8.1f} µs a step  {floor}")


def _has(name: str, parts: tuple[str, ...]) -> bool:
    return any(part in name for part in parts)


def _least(setup: Setup) -> dict[str, float]:
    """Return the microseconds that a step takes at least, by kind of kernel."""
    config = setup.settings.config
    bf16 = config.precision == "bf16"
    dtype = torch.bfloat16 if bf16 else torch.float32
    ceilings = Ceilings.of(setup.world.device, dtype)
    network = build(config.network(), shape=SHAPE, classes=10, seed=0)
    multiply_adds, outputs = _counts(network)
    columns = setup.federation.layout.num_parameters
    number = 2 if bf16 else 4
    # Rows, velocity and references in float32, read or read and written; a byte of the
    # mask; gradients written and read; weights written for the next step.
    of_column = 8 + 8 + 4 + 1 + 2 * number + (number if bf16 else 0)
    per_microsecond = ceilings.bytes_per_second / 1e6
    return {
        "convolutions": 1e6 * 2 * BATCH * multiply_adds / ceilings.flops,
        "batch norm": NORM_PASSES * BATCH * outputs * number / per_microsecond,
        "step": columns * of_column / per_microsecond,
    }


def _counts(network: nn.Module) -> tuple[int, int]:
    """Return a sample's multiply-adds of training, and what convolutions put out."""
    outputs = 0

    def count(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal outputs
        outputs += output.numel()

    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(count)
    network.eval()(torch.zeros(1, *SHAPE))
    return cost(network, Sample(SHAPE, ())).training, outputs


if __name__ == "__main__":
    main()
