"""Not a test: ranks of which all but one have no column pass rows to coordinates and
back, and each prints the rows.
"""

import numpy as np
import torch

from hpcfed.runtime import world as worlds
from hpcfed.server.bank import BankedRound, BankedRows
from hpcfed.server.columns import Columns
from hpcfed.server.span import Coordinates

if __name__ == "__main__":
    here = worlds.enter(device="cpu")
    columns = Columns.share_of([1], here.rank, here.size)
    rows = columns.of(torch.tensor([[1.0], [3.0], [-5.0]]))
    bank = BankedRows([BankedRound(np.arange(3), rows)], columns)
    found = Coordinates.of(bank, share=1.0, most=None)
    made = bank.combined(found.combinations(found.places))
    print(columns.whole(made).flatten().tolist(), flush=True)
    here.close()
