"""hpcfed's rounds."""

import sys

from benchmarks.rivals.cpu.work import LR, MOMENTUM, WEIGHT_DECAY, Part, Turns, part_of
from hpcfed.runtime.imports import keep_memory


def run(part: Part, turns: Turns) -> None:
    """Do rounds as `hpcfed run` does them, without evaluation."""
    # Before torch is loaded.
    keep_memory()
    import torch

    from benchmarks.measuring import rounds_of, setup_of
    from hpcfed.runtime import world as worlds

    work = part.work
    values = {
        "dataset": "synthetic",
        "synthetic_shape": "x".join(map(str, work.shape)),
        "model": work.model,
        "clients": work.clients,
        "train_per_client": work.images,
        "test_per_client": 1,
        "partition": "iid",
        "batch_size": work.batch,
        "epochs": 1,
        "lr": LR,
        "momentum": MOMENTUM,
        "weight_decay": WEIGHT_DECAY,
        "device": "cpu",
    }
    world = worlds.enter(device="cpu")
    torch.set_num_threads(part.threads)
    setup = setup_of(values, world)
    one_round = rounds_of(setup)
    turns.tell(version=f"torch {torch.__version__}")
    for number in range(part.rounds):
        turns.begin()
        one_round(number)
        turns.end()
    world.close()


if __name__ == "__main__":
    run(part_of(sys.argv[1:]), Turns())
