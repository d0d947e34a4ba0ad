"""Not a test: several runs one after the other on the ranks of one job, and a federation whose clients move halfway.

Arguments are a folder and names of runs. Each has a folder of its own in it. The rows of the clients that
moved go to moved-<rank>.npz.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from hpcfed.assembly import assemble
from hpcfed.cli import parse_run
from hpcfed.moving import move
from hpcfed.record.timing import Timer
from hpcfed.run import run
from hpcfed.runtime import world as worlds

COMMON = "--model mlp --clients 9 --participation 0.6 --alpha 0.3 --precision fp64 --device cpu --epochs 1"
RUNS = {
    "genfed": "--method genfed --schedule constant --rho-max 3 --attack ipm --supplement --supplement-share 0.1",
    "genfedau": "--method genfedau --schedule-rounds 4 --attack mimic --attackers 3 --au-cutoff 2",
    "genfedumf": "--method genfedumf --schedule power --schedule-base 0.3 --attack label-flip --attackers 4",
    "fedper": "--method fedper --attack mimic --attackers 0.4 --aggregation median",
    "trimmed": "--attack noise --attack-strength 5 --aggregation trimmed-mean --tolerance 0.3",
    "krum": "--attack sign-flip --attackers 2 --aggregation krum",
    "multi-krum": "--attack ipm --attack-strength 9 --aggregation multi-krum --deterministic",
    "seeds": "--method genfedumf --attack mimic --attackers 0.3 --aggregation median --seeds 3,1 --umf-beta 0.5",
}
MOVING = f"{COMMON} --method genfedumf --attack mimic --attackers 3 --rho-max 2 --rounds 5"


def run_all(folder: Path, names: Iterable[str] = RUNS) -> None:
    for name in names:
        words = RUNS[name]
        run(parse_run([*COMMON.split(), *words.split(), "--rounds=2", "--snapshot-every=1", f"--out={folder / name}"]))


def moved_rows(*, moving: bool) -> tuple[np.ndarray, np.ndarray]:
    """Ids of this rank's clients after five rounds, and where each would start its next."""
    world = worlds.enter(device="cpu")
    setup = assemble(parse_run(MOVING.split()), world, Timer(world.device))
    fed, state = setup.federation, setup.method.init(setup.federation)
    for round in range(5):
        if moving and round == 2:
            state = move(setup, state, np.roll(setup.clients.rank, 4))
        state = setup.method.round(fed, state, fed.sample(round))
    world.close()
    return fed.clients, (state.w + state.kept).numpy()


if __name__ == "__main__":
    out = Path(sys.argv[1])
    run_all(out, sys.argv[2:])
    ids, rows = moved_rows(moving=True)
    np.savez(out / f"moved-{worlds.enter(device='cpu').rank}.npz", clients=ids, rows=rows)
