"""What recording costs: the same rounds with and without it, in turn.

Compares whole runs of the digits, evaluation in every round, with everything that a run
writes down (results every round, and with --snapshots also the clients' rows) against
the bare loop of rounds and evaluations.

example:
  python -m benchmarks.harness.recording --rounds 60 --repeats 5
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arguments import parser_of
from benchmarks.measuring import settings_of
from hpcfed.experiment.assemble import assemble
from hpcfed.experiment.evaluate import evaluate
from hpcfed.experiment.run import run_setup
from hpcfed.options import Settings
from hpcfed.runtime import world as worlds
from hpcfed.runtime.timer import Timer
from hpcfed.runtime.world import World


def seconds(settings: Settings, world: World, *, recorded: bool) -> float:
    """Return the wall time of all rounds, from the first to the last result."""
    setup = assemble(settings, world, Timer(world.device))
    fed, method = setup.federation, setup.method
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        if recorded:
            run_setup(setup, Path(folder), quiet=True)
        else:
            state = method.init(fed)
            for round in range(settings.config.rounds):
                state = method.round(fed, state, fed.sample(round))
                evaluate(setup, state)
        return time.perf_counter() - begin


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--model", default="cnn-digits")
    parser.add_argument(
        "--snapshots",
        type=int,
        default=0,
        help="also write clients' rows every N rounds",
    )
    options = parser.parse_args()
    values: dict[str, Any] = {
        "rounds": options.rounds,
        "clients": options.clients,
        "model": options.model,
        "snapshot_every": options.snapshots,
    }
    settings = settings_of(values)
    world = worlds.enter()
    seconds(settings, world, recorded=True)  # warm-up
    # In pairs, so that a machine that slows down slows both.
    pairs = np.array(
        [
            [seconds(settings, world, recorded=r) for r in (False, True)]
            for _ in range(options.repeats)
        ]
    )
    bare, recorded = np.median(pairs, 0)
    costs = pairs[:, 1] / pairs[:, 0] - 1
    print(
        f"bare loop {1e3 * bare / options.rounds:.2f} ms per round, recorded "
        f"{1e3 * recorded / options.rounds:.2f} ms"
    )
    print(
        f"recording costs {np.median(costs):.2%} (each pair: "
        f"{', '.join(f'{cost:.2%}' for cost in costs)})"
    )


if __name__ == "__main__":
    main()
