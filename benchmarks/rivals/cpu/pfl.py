"""pfl-research's rounds.

Each of several processes has its share of the users. No all-reduce is made or counted.
"""

import sys
from importlib.metadata import version

import torch

from benchmarks.rivals.cpu.work import (
    CLASSES,
    LR,
    MOMENTUM,
    SEED,
    WEIGHT_DECAY,
    Part,
    Turns,
    data_of,
    part_of,
)
from benchmarks.rivals.others import Classifier, pfl_rounds
from hpcfed.clients.job import Recipe
from hpcfed.models.networks import build


def run(part: Part, turns: Turns) -> None:
    """Train with its FederatedAveraging, on data that is cut into batches once."""
    work = part.work
    torch.set_num_threads(part.threads)
    torch.manual_seed(SEED)
    images, labels = data_of(work)
    own = slice(part.rank, None, part.processes)
    data = torch.from_numpy(images[own]), torch.from_numpy(labels[own])
    model = Classifier(build(work.model, shape=work.shape, classes=CLASSES, seed=SEED))
    sgd = Recipe(
        epochs=1,
        batch_size=work.batch,
        lr=LR,
        momentum=MOMENTUM,
        weight_decay=WEIGHT_DECAY,
    )
    turns.tell(version=f"pfl {version('pfl')}, torch {torch.__version__}")
    users = len(data[0])
    pfl_rounds(model, data, sgd, cohort=users, rounds=part.rounds, laps=turns)


if __name__ == "__main__":
    run(part_of(sys.argv[1:]), Turns())
