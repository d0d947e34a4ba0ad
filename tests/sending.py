"""Not a test: a worker sends 64 MiB and a small message to a server rank that does not
look until the worker has gone on, and both tell how it went. Then the same ranks make
the run of the arguments. Messages are cut as those of more than a GiB are.
"""

import sys

import torch

from hpcfed.cli import parse_run
from hpcfed.experiment.run import run
from hpcfed.runtime import mpi
from hpcfed.runtime import world as worlds
from hpcfed.runtime.link import Link

mpi.PIECE = 10**7 + 1  # bytes; no row, and not even a number, ends there
world = worlds.enter(device="cpu", server_ranks=1)
link = Link(world)
if world.role == "worker":
    rows = torch.arange(2**24, dtype=torch.float32).view(64, -1)
    link.send(1, "large", rows)
    rows.zero_()  # what was sent must not change with it
    link.send(1, "empty", rows[:0])
    link.send(1, "none")
    world.barrier_all_roles()
    link.flush()
    print("all gone", flush=True)
else:
    world.barrier_all_roles()
    received = [link.receive(0) for _ in range(3)]
    assert [header for header, _ in received] == ["large", "empty", "none"]
    large, empty, none = (rows for _, rows in received)
    assert large is not None and empty is not None and none is None
    assert torch.equal(
        torch.from_numpy(large).flatten(), torch.arange(2**24, dtype=torch.float32)
    )
    assert empty.shape == (0, large.shape[1])
    print("received as sent", flush=True)
world.close()
run(parse_run(sys.argv[1:]))
