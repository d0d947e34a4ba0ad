"""Not a test: the runs of families one after the other on the ranks of one job, and
federations whose clients move halfway.

The argument is a folder. Each run has a folder of its own in its family's. The rows of
the clients that moved go to moved-<rank>.npz there.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from hpcfed.cli import parse_run
from hpcfed.experiment.assemble import Setup, assemble
from hpcfed.experiment.rebalance import relocate
from hpcfed.experiment.run import run
from hpcfed.runtime import world as worlds
from hpcfed.runtime.launcher import launched
from hpcfed.runtime.timer import Timer


@dataclass(frozen=True)
class Family:
    common: str
    short: str
    """Further options of all runs but the one whose clients move."""
    runs: dict[str, str]
    moving: str
    rounds: int
    """Of the one whose clients move, after two."""
    rows: Callable[[Setup, Any], Tensor]
    """What clients have in the end."""

    def run_all(self, folder: Path) -> None:
        for name in self.runs:
            words = f"{self.common} {self.short} {self.runs[name]}".split()
            run(
                parse_run(
                    [
                        *words,
                        "--rounds=2",
                        "--snapshot-every=1",
                        f"--out={folder / name}",
                    ]
                )
            )

    def moved_rows(self, *, moving: bool) -> tuple[np.ndarray, np.ndarray]:
        """Ids of this rank's clients in the end, and the row of each."""
        world = worlds.enter(device="cpu")
        words = f"{self.common} {self.moving} --rounds={self.rounds}".split()
        setup = assemble(parse_run(words), world, Timer(world.device))
        fed, state = setup.federation, setup.method.init(setup.federation)
        for round in range(self.rounds):
            if moving and round == 2:
                state = relocate(setup, state, np.roll(setup.clients.rank, 4))
            state = setup.method.round(fed, state, fed.sample(round))
        world.close()
        return fed.clients, self.rows(setup, state).numpy()


LATER = "--new-clients 5 --new-updates 2 --join-rounds 2 --new-classes 0.4"
TOGETHER = "--new-clients 5 --new-rounds 4 --join-rounds 2 --new-classes 0.4"
GENFED = Family(
    common="--clients 9 --participation 0.6 --alpha 0.3 --precision fp64 --device cpu --epochs 1 "
    "--batch-size 40 --model mlp",
    short="",
    runs={
        "genfed": "--method genfed --schedule constant --rho-max 3 --attack ipm --supplement --supplement-share 0.1",
        "genfedau": "--method genfedau --schedule-rounds 4 --attack mimic --attackers 3 --au-cutoff 2",
        "genfedumf": "--method genfedumf --schedule power --schedule-base 0.3 --attack label-flip --attackers 4",
        "fedper": "--method fedper --attack mimic --attackers 0.4 --aggregation median",
        "trimmed": "--attack noise --attack-strength 5 --aggregation trimmed-mean --tolerance 0.3",
        "late": "--method fednova --devices lognormal --deadline 2 --partial --oversample 1.5 --dropout-rate 0.3",
        "krum": "--attack sign-flip --attackers 2 --aggregation krum",
        "multi-krum": "--attack ipm --attack-strength 9 --aggregation multi-krum --deterministic",
        "fedasync": "--method fedasync --attack sign-flip --attackers 2 --concurrency 4 --dropout-rate 0.2",
        "fedbuff": "--method fedbuff --buffer 4 --concurrency 9 --attack noise --attackers 3 --compress qsgd",
        "packed": "--method scaffold --compress powersgd --compress-down topk --keep 0.2 --attack noise",
        "private": "--attack ipm --privacy central --noise-multiplier 1 --accountant rdp --clip-quantile 0.5",
        "local-noise": "--method fedadam --privacy local --noise-multiplier 1 --accountant rdp",
        "flexlora": "--method flexlora --lora 3 --client-ranks 1,3 --devices lognormal --deadline 2",
        "fedex-lora": "--method fedex-lora --lora 2 --attack noise --attackers 2",
        "hetlora": "--method hetlora --lora 3 --dropout-rate 0.2 --devices uniform",
        "seeds": "--method genfedumf --attack mimic --attackers 0.3 --aggregation median --seeds 3,1 --umf-beta 0.5",
    },
    moving="--method ditto --attack mimic --attackers 3",
    rounds=5,
    rows=lambda setup, state: state.w + state.v,
)
GENEFL = Family(
    common="--clients 9 --participation 0.7 --partition sharding --classes-per-client 2 --precision fp64 --device cpu "
    "--epochs 1 --batch-size 40 --clusters 3",
    short="--model cnn-bn",
    runs={
        "genefl": f"--method genefl --gene-layers 2 {TOGETHER}",
        "fedbn": "--method fedbn --clustering angles --basis 2 --attack ipm --attackers 2",
        "packed": "--method fedlp --compress topk --keep 0.2 --compress-down qsgd",
        "fedlp": "--method fedlp --deterministic --attack noise --attackers 2",
        "fedlps": "--method fedlps --prune-ratio 0.5 --attack ipm --attackers 3",
        "late": "--method fedlp --devices uniform --deadline 1 --attack ipm --attackers 2",
        "fedlg": f"--method fedlg --gene-pools conv1,conv2/fc1,head --gene-each 1 {LATER}",
        "seeds": "--method genefl --seeds 3,1 --fisher layer --epsilon 0.01",
    },
    moving="--method genefl --model mlp --compress randomk --keep 0.3 --compress-down topk",
    rounds=4,
    rows=lambda setup, state: setup.method.personal(
        setup.federation, state, np.arange(len(setup.federation.clients))
    ),
)
FAMILIES = {"genfed": GENFED, "genefl": GENEFL}


if __name__ == "__main__":
    for name, family in FAMILIES.items():
        out = Path(sys.argv[1]) / name
        family.run_all(out)
        ids, rows = family.moved_rows(moving=True)
        np.savez(out / f"moved-{launched().rank}.npz", clients=ids, rows=rows)
