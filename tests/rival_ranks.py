"""Not a test: two rounds of every method of test_rivals on the ranks of one job, between
which clients move to other ranks.

The argument is a folder. Every rank writes its clients' rows after that, by method, to
<rank>.npz there.
"""

import sys
from pathlib import Path

import numpy as np

from hpcfed.cli import parse_run
from hpcfed.experiment.assemble import assemble
from hpcfed.experiment.rebalance import relocate
from hpcfed.runtime import world as worlds
from hpcfed.runtime.timer import Timer
from hpcfed.runtime.world import World

COMMON = "--clients 7 --participation 0.6 --alpha 0.3 --precision fp64 --device cpu --model mlp"


def rows_after(words: list[str], world: World) -> tuple[np.ndarray, np.ndarray]:
    """Ids of this rank's clients in the end, and the row of each beside the global one."""
    setup = assemble(parse_run([*COMMON.split(), *words]), world, Timer(world.device))
    fed, method = setup.federation, setup.method
    state = method.round(fed, method.init(fed), fed.sample(0))
    if world.size > 1:
        state = relocate(setup, state, np.roll(setup.clients.rank, 3))
    state = method.round(fed, state, fed.sample(1))
    personal = method.personal(fed, state, np.arange(len(fed.clients)))
    common = method.global_row(state).expand_as(personal)
    return fed.clients, np.concatenate([personal.numpy(), common.numpy()], 1)


if __name__ == "__main__":
    from tests.test_rivals import OPTIONS, words_of

    here = worlds.enter(device="cpu")
    found = {}
    for name in OPTIONS:
        found["clients"], found[name] = rows_after(words_of(name), here)
    here.close()
    np.savez(Path(sys.argv[1]) / f"{here.rank}.npz", **found)
