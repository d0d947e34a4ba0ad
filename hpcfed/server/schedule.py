"""When the server's model learns, how often, and from which rounds; imports no torch.

Rounds are counted from 1 here: `done` are the rounds that are over.
"""

from hpcfed.server.options import NETWORKS, ServerOptions


def learns_after(options: ServerOptions, done: int, rounds: int) -> bool:
    """Return whether the model learns after this round: the last, and with
    --server-every R also every R-th.
    """
    every = options.server_every
    return done == rounds or bool(every and done % every == 0)


def num_learnings(options: ServerOptions, rounds: int) -> int:
    """Return how often the model learns in a run."""
    if not options.server_every:
        return 1
    return -(-rounds // options.server_every)


def is_banked(options: ServerOptions, done: int, rounds: int) -> bool:
    """Return whether the next learning will still see the uploads of this round.

    The bank holds a fixed number of rounds, so a later learning sees them no more.
    """
    next_learning = rounds
    if options.server_every:
        periods = -(-done // options.server_every)
        next_learning = min(rounds, periods * options.server_every)
    return done > next_learning - options.bank_rounds


def num_steps(options: ServerOptions) -> dict[str, int]:
    """Return the steps of both networks in one learning."""
    steps = {}
    for network in NETWORKS:
        # The last batch is filled up, so samples are rounded up to whole batches.
        steps[network] = -(-options.samples(network) // options.batch(network))
    return steps
