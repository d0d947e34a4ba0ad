"""What being watched costs: the same rounds with and without TensorBoard and a watcher.

Every rank makes the same runs one after the other, in pairs: a plain one, and one that
writes for TensorBoard and leaves signs of life while `hpcfed watch` looks at its folder
from another process. Runs without mpirun have one rank.

examples:
  python -m benchmarks.harness.watching
  mpirun -n 2 python -m benchmarks.harness.watching --rounds 200 --repeats 5
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.arguments import parser_of
from benchmarks.measuring import settings_of
from hpcfed.experiment.assemble import assemble
from hpcfed.experiment.failures import Reporting
from hpcfed.experiment.progress import showing_life
from hpcfed.experiment.run import run_setup
from hpcfed.options import Settings
from hpcfed.results.stored import read_run
from hpcfed.runtime import world as worlds
from hpcfed.runtime.timer import Timer
from hpcfed.runtime.world import World


def median_round(settings: Settings, world: World, *, watched: bool) -> float:
    """Return the median seconds of a run's rounds; NaN on other ranks than the root."""
    timer = Timer(world.device)
    setup = assemble(settings, world, timer)
    with tempfile.TemporaryDirectory() as own:
        folder = Path(world.role_bcast(own))
        seen = watched and world.is_root
        watcher = _watcher(folder) if seen else None
        reporting = Reporting(lambda: timer.current)
        with showing_life([folder], reporting, [timer], visible=seen):
            run_setup(setup, folder, quiet=True)
        if watcher is not None:
            watcher.wait()
        if not world.is_root:
            return float("nan")
        return float(np.median(read_run(folder).rounds["seconds"][1:]))


def _watcher(folder: Path) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "hpcfed", "watch", str(folder), "--wait"]
    return subprocess.Popen(
        [*words, "--every", "1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--model", default="mlp")
    options = parser.parse_args()
    values = {
        "rounds": options.rounds,
        "clients": options.clients,
        "model": options.model,
        "epochs": 1,
    }
    world = worlds.enter()
    pairs = []
    for repeat in range(options.repeats + 1):
        pair = []
        # In turn, so that a machine that slows down slows both.
        for watched in (False, True):
            settings = settings_of({**values, "tensorboard": watched})
            pair.append(median_round(settings, world, watched=watched))
        if repeat:  # the first pair warms up
            pairs.append(pair)
            if world.is_root:
                print(
                    f"{1e3 * pair[0]:.2f} ms, watched {1e3 * pair[1]:.2f} ms",
                    flush=True,
                )
    if world.is_root:
        plain, watched = np.median(pairs, 0)
        costs = [with_it / without - 1 for without, with_it in pairs]
        print(f"median round {1e3 * plain:.2f} ms, watched {1e3 * watched:.2f} ms")
        each = ", ".join(f"{cost:.2%}" for cost in costs)
        print(f"being watched costs {np.median(costs):.2%} (each pair: {each})")
    world.close()


if __name__ == "__main__":
    main()
