"""A learning from a few rows before the first real one, which so finds everything loaded.

A process's first learning loads libraries for products, eigenvectors and optimisers,
and builds DeepSpeed's first engine: seconds, for which clients would wait.
"""

from contextlib import suppress

import numpy as np
import torch

from hpcfed.errors import Diverged
from hpcfed.runtime.timer import Observer, observed_by
from hpcfed.server.half_learnt import AllGather
from hpcfed.server.options import NETWORKS, ServerOptions
from hpcfed.server.rank import ServerRank
from hpcfed.server.row_model import silent
from hpcfed.server.training_plan import RankSlot

ROWS = 8
COLUMNS = 64
"""Columns that each server rank holds."""
STEPS = 4
SEED = 0


def rehearse(
    options: ServerOptions,
    slot: RankSlot,
    allgather: AllGather,
) -> None:
    """Learn from a few made-up rows with the smallest networks, generate a row, and
    forget it. All server ranks call it.
    """
    samples = {f"{name}_samples": STEPS * options.batch(name) for name in NETWORKS}
    few = options.model_copy(
        update={
            "server": "tiny",
            "server_width": None,
            "server_latent": None,
            "server_depth": None,
            "denoiser_depth": None,
            "server_load": "",
            **samples,
        }
    )
    widths = (COLUMNS * slot.size,)
    rank = ServerRank(widths, few, slot, seeds=(), progress=silent, allgather=allgather)
    # No two rows are alike, and no random stream is touched.
    numbers = torch.arange(ROWS * sum(widths), device=slot.device)
    rows = numbers.float().sin().reshape(ROWS, -1)
    bank, model = rank.bank(SEED), rank.model(SEED)
    bank.add(1, np.arange(ROWS), rows)
    # Neither a profile nor the run's end is about made-up rows.
    with observed_by(Observer()), suppress(Diverged):
        model.learn(bank.content())
        model.invert(rank.columns.of(rows[:1]), depth=min(2, options.inversion_depth))
