"""Which learning a file is of: that of this run, or another."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcfed.server.bank import BankedRows
from hpcfed.server.options import ServerOptions
from hpcfed.server.schedule import num_steps

PROJECTIONS = 8
ALIKE = 0.25
"""How far the bank's rows may be from those that the learning began with, as a share of
their length. The round that is repeated differs by rounding on a GPU and on other ranks:
usually by a thousandth of an update, and by up to a tenth where a ReLU flips. Rows of
other data or of another seed are farther than their own length.
"""
_BITS = 2**32 - 1


@dataclass(frozen=True)
class Identity:
    """Which learning it is."""

    facts: Mapping[str, Any]
    """What must be the same."""
    bank: BankedRows
    """What must be the same up to rounding."""

    @classmethod
    def of(cls, bank: BankedRows, options: ServerOptions, learnings: int) -> "Identity":
        """Describe a learning from this bank, of a model that has learnt this often."""
        clients = np.concatenate([bank.uploaders, bank.ends]).astype("<i8")
        facts = {
            # Their number, too, because a file may say anything.
            "steps": num_steps(options),
            # Where the trained model goes does not matter.
            "options": options.model_dump(mode="json", exclude={"server_save"}),
            "earlier learnings": learnings,
            "columns": list(bank.columns.widths),
            "clients": hashlib.sha256(clients.tobytes()).hexdigest(),
        }
        return cls(facts, bank)

    def sketch(self) -> Tensor:
        """Return a few numbers of each row: its length, and its products with random
        signs. All ranks call it together.
        """
        bank = self.bank
        found = torch.zeros(
            len(bank), 1 + PROJECTIONS, dtype=torch.float64, device=bank.device
        )
        for block in bank.blocks():
            # The number among the columns of all ranks.
            first = bank.columns.start + block.at.start
            at = torch.arange(first, first + block.rows.shape[1], device=bank.device)
            found[:, 0] += block.rows.square().sum(1)
            for number in range(1, 1 + PROJECTIONS):
                found[:, number] += block.rows @ _signs(at, number)
        found = bank.columns.summed(found)
        found[:, 0] = found[:, 0].sqrt()
        return found.cpu()


def _signs(at: Tensor, number: int) -> Tensor:
    """Return signs that depend only on these positions, whichever rank has them."""
    mixed = at + number * 0x9E3779B9 & _BITS
    for _ in range(2):
        mixed = (mixed ^ mixed >> 16) * 0x45D9F3B & _BITS
    return (mixed >> 16 & 1).double() * 2 - 1


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Return about how far rows with these sketches are apart, by their lengths."""
    lengths = np.maximum(one[:, 0], np.finfo(float).tiny)
    apart = np.sqrt(np.square(one[:, 1:] - other[:, 1:]).mean(1))
    return float((apart / lengths).mean())
