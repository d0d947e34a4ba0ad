"""Milliseconds of a round without evaluation and with one after every round.

  pfl-cifar10      1000 users, 10 test images each; 50 of them train
  pfedgpa-cifar10  100 clients, 100 test images each; all train

An evaluation is what `hpcfed run --evaluate-every 1` does after a round: the round's
participants as their training has left them, every client's personal row on its own
test images, and the global model on the whole test set. `share` is the time that it
adds, over that of the round. Images are synthetic, 3×32×32; alone on one device.

examples:
  python -m benchmarks.speed.evaluating
  python -m benchmarks.speed.evaluating --works pfedgpa-cifar10 --rounds 50
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.arguments import add_device, parser_of
from benchmarks.measuring import headline, seconds_of, setup_of
from benchmarks.speed.round import WORKS
from hpcfed.experiment.assemble import Setup
from hpcfed.experiment.evaluate import AfterTraining, evaluate
from hpcfed.runtime import world as worlds
from hpcfed.runtime.world import World

TEST_PER_CLIENT = {"pfl-cifar10": 10, "pfedgpa-cifar10": 100}


def measure(work: str, device: str, world: World, rounds: int) -> None:
    """Print the row of one piece of work, and the parts of its evaluation."""
    values = WORKS[work] | {
        "test_per_client": TEST_PER_CLIENT[work],
        "engine": "batched",
        "device": device,
    }
    setup = setup_of(values, world)
    state = setup.method.init(setup.federation)

    def plain(round: int) -> None:
        nonlocal state
        cohort = setup.federation.sample(round)
        state = setup.method.round(setup.federation, state, cohort)
        float(cohort.log.loss_sum)  # a user reads the loss, too

    def evaluated(round: int) -> None:
        nonlocal state
        trained = AfterTraining(setup, setup.federation)
        cohort = setup.federation.sample(round, trained)
        state = setup.method.round(setup.federation, state, cohort)
        float(cohort.log.loss_sum)
        evaluate(setup, state, trained)

    # In turns: a device's clock rate changes over seconds.
    without, with_evaluation = in_turns([plain, evaluated], world.device, rounds)
    added = with_evaluation - without
    print(
        f"{work:16} {without:9.2f} {with_evaluation:9.2f} {added:9.2f} "
        f"{100 * added / without:8.1f} %",
        flush=True,
    )
    for name, part in parts(setup, state).items():
        (alone,) = in_turns([part], world.device, rounds)
        print(f"  {name:30} {alone:9.2f} ms alone")


def parts(setup: Setup, state: Any) -> dict[str, Callable[[int], object]]:
    """Return the parts of an evaluation by name."""
    fed = setup.federation
    row = setup.method.global_row(state)
    assert row is not None, "FedAvg has a global model"
    members = fed.sample(0).here
    trained = torch.stack([row] * len(members))
    everyone = np.arange(len(fed.clients))
    alone = np.zeros(1, np.int64)
    return {
        "participants as trained": lambda _: fed.evaluate(trained, members),
        "one row on all clients' data": lambda _: fed.evaluate(
            row.expand(len(everyone), -1), everyone
        ),
        "global test": lambda _: setup.engine.evaluate(
            row.unsqueeze(0), setup.global_test, alone
        ),
    }


def in_turns(
    works: list[Callable[[int], object]], device: torch.device, rounds: int
) -> np.ndarray:
    """Return the median milliseconds of each, after three rounds that do not count."""
    warmup = 3
    seconds = np.zeros((warmup + rounds, len(works)))
    for round in range(warmup + rounds):
        for i, work in enumerate(works):
            seconds[round, i] = seconds_of(partial(work, round), device)
    medians: np.ndarray = 1e3 * np.median(seconds[warmup:], 0)
    return medians


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument(
        "--rounds", type=int, default=20, help="counted rounds (default: 20)"
    )
    add_device(parser)
    options = parser.parse_args()
    world = worlds.enter(device=options.device)
    print(headline(world))
    print(f"{'ms per round':16} {'without':>9} {'with':>9} {'added':>9} {'share':>10}")
    for work in options.works:
        measure(work, options.device, world, options.rounds)
    world.close()


if __name__ == "__main__":
    main()
