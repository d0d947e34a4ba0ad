"""Not a test: GENE-FL's family on the ranks of one job, one run after the other, and clients that move halfway.

Arguments are a folder and names of runs. Each has a folder of its own in it. The rows of the clients that moved go to
moved-<rank>.npz.
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

SPREAD = "--partition sharding --classes-per-client 2 --precision fp64 --device cpu --epochs 1"
COMMON = f"{SPREAD} --model cnn-bn --clients 9 --participation 0.7 --clusters 3 --rounds 2 --snapshot-every 1"
LATER = "--new-clients 5 --new-updates 2 --join-rounds 2 --new-classes 0.4"
RUNS = {
    "genefl": f"--method genefl --gene-layers 2 {LATER}",
    "fedbn": "--method fedbn --clustering angles --basis 2 --attack ipm --attackers 2",
    "fedlp": "--method fedlp --deterministic",
    "fedlps": "--method fedlps --prune-ratio 0.5",
    "fedlg": f"--method fedlg --gene-pools conv1,conv2/fc1,head --gene-each 1 {LATER}",
    "seeds": "--method genefl --seeds 3,1 --fisher layer --epsilon 0.01",
}
MOVING = f"{SPREAD} --model mlp --clients 9 --participation 0.7 --clusters 3 --rounds 4 --method genefl"


def run_all(folder: Path, names: Iterable[str] = RUNS) -> None:
    for name in names:
        run(parse_run([*COMMON.split(), *RUNS[name].split(), f"--out={folder / name}"]))


def moved_rows(*, moving: bool) -> tuple[np.ndarray, np.ndarray]:
    """Ids of this rank's clients after four rounds, and the row of each."""
    world = worlds.enter(device="cpu")
    setup = assemble(parse_run(MOVING.split()), world, Timer(world.device))
    fed, state = setup.federation, setup.method.init(setup.federation)
    for round in range(4):
        if moving and round == 2:
            state = move(setup, state, np.roll(setup.clients.rank, 4))
        state = setup.method.round(fed, state, fed.sample(round))
    world.close()
    return fed.clients, setup.method.personal(fed, state, np.arange(len(fed.clients))).numpy()


if __name__ == "__main__":
    out = Path(sys.argv[1])
    run_all(out, sys.argv[2:])
    ids, rows = moved_rows(moving=True)
    np.savez(out / f"moved-{worlds.enter(device='cpu').rank}.npz", clients=ids, rows=rows)
