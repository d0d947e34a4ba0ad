"""Times all-reduces between ranks started by mpirun or srun; a calibration runs it."""

import json
import sys
import time
from statistics import median

import torch

from hpcfed.runtime import world as worlds
from hpcfed.runtime.collectives import Collectives

FLOATS = (1_000, 100_000, 2_000_000)
REPEATS = 15


def main(device: str) -> None:
    """Print a JSON list on the root: bytes and seconds of each size."""
    world = worlds.enter(device=device)
    collectives = Collectives(world)
    found = []
    for number in FLOATS:
        tensor = torch.zeros(number, device=world.device)
        times = []
        for _ in range(REPEATS):
            collectives.barrier()
            begin = time.perf_counter()
            collectives.allreduce(tensor)
            if tensor.is_cuda:
                torch.cuda.synchronize(tensor.device)
            times.append(time.perf_counter() - begin)
        # The first all-reduces set up connections.
        found.append({"bytes": 4 * number, "seconds": median(times[3:])})
    if world.is_root:
        print(json.dumps(found))
    world.close()


if __name__ == "__main__":
    main(sys.argv[1])
