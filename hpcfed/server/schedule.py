"""When the server's model learns, how often, and from which rounds; imports no torch.

Rounds are counted from 1 here: `done` are the rounds that are over.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hpcfed.models.layout import Layout
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


# Which columns of a row the server generates.


WHOLE_UP_TO = 20_000
"""Columns up to which the whole network is generated unless --generated-layers says."""


@dataclass(frozen=True)
class Generated:
    """The generated columns, in the order of the client's tensors."""

    at: Tensor
    """Positions of the columns, ascending."""
    widths: list[int]
    """Columns of each generated tensor, in order."""


def generated(layout: Layout, options: ServerOptions) -> Generated:
    """Return the trainable columns of the last layers; running statistics of batch
    norm are left to aggregation.
    """
    last = options.generated_layers
    # The paper's choice for CIFAR-10 and EMNIST: the server's networks grow with the
    # number of generated columns.
    if not last and layout.num_parameters > WHOLE_UP_TO:
        last = min(2, len(layout.blocks))
    layers = layout.last(last) if last else layout.layers
    positions = []
    widths = []
    for entry in layout.entries:
        # Running means and variances are no outcome of gradient descent.
        if entry.trainable and entry.layer in layers:
            columns = torch.arange(entry.start, entry.stop)
            positions.append(columns)
            widths.append(len(columns))
    return Generated(torch.cat(positions), widths)
