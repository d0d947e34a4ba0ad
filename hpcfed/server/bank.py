"""The bank of uploads: what the server's model learns from.

With --bank-of updates its rows are what clients did in a round: their uploads less the
row that the round started from. With --bank-of uploads they are the uploads themselves,
and the bank keeps the starts beside them.
"""

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from re import escape, fullmatch

import numpy as np
import torch
from torch import Tensor

from hpcfed.results import checkpoints
from hpcfed.results.checkpoints import StoredFile


@dataclass(frozen=True)
class BankedRound:
    """A round's rows, in the order of client ids."""

    clients: np.ndarray
    rows: Tensor
    """What the model learns from."""
    starts: Tensor | None = None
    """What to subtract from the rows to have updates; None where they are updates."""

    @property
    def updates(self) -> Tensor:
        return self.rows if self.starts is None else self.rows - self.starts


class UploadBank:
    """The rows of the last rounds."""

    def __init__(self, rounds: int) -> None:
        """`rounds`: how many rounds are remembered."""
        self._limit = rounds
        self._rounds: OrderedDict[int, BankedRound] = OrderedDict()

    def add(
        self,
        round: int,
        clients: np.ndarray,
        rows: Tensor,
        starts: Tensor | None = None,
    ) -> None:
        """Add a round's rows, and forget the oldest round beyond the limit; `starts`
        are those of the rows where these are no updates.
        """
        # One row with a NaN would spoil the mean, and so the whole model.
        finite = np.flatnonzero(torch.isfinite(rows).all(1).cpu().numpy())
        # Sorted, so that the model does not depend on which rank hosts a client.
        order = finite[np.argsort(clients[finite])]
        at = torch.from_numpy(order).to(rows.device)
        ordered_starts = None if starts is None else starts[at]
        self._rounds[round] = BankedRound(clients[order], rows[at], ordered_starts)
        # Rounds come in order: the first one is the oldest.
        while len(self._rounds) > self._limit:
            self._rounds.popitem(last=False)

    def rows(self) -> Tensor:
        """Return all rows, the oldest round first."""
        return torch.cat([banked.rows for banked in self._rounds.values()])

    def updates(self) -> Tensor:
        """Return the update of every row of `rows`: what the client did in the round."""
        return torch.cat([banked.updates for banked in self._rounds.values()])

    def uploaders(self) -> np.ndarray:
        """Return the client of every row of `rows`."""
        return np.concatenate([banked.clients for banked in self._rounds.values()])

    def newest(self, clients: np.ndarray) -> tuple[np.ndarray, Tensor]:
        """Return which of the clients are in the bank, and the last row of those."""
        known, places = self._newest_places(clients)
        return known, self.rows()[places]

    def newest_updates(self, clients: np.ndarray) -> tuple[np.ndarray, Tensor]:
        """Return which of the clients are in the bank, and the last update of those."""
        known, places = self._newest_places(clients)
        return known, self.updates()[places]

    def _newest_places(self, clients: np.ndarray) -> tuple[np.ndarray, Tensor]:
        """Return which of the clients are in the bank, and where in `rows` the last row
        of each of those is.
        """
        # Later rounds come later, so the last place of a client is its newest.
        newest = {client: at for at, client in enumerate(self.uploaders().tolist())}
        places = np.array([newest.get(client, -1) for client in clients.tolist()], int)
        known = places >= 0
        device = next(iter(self._rounds.values())).rows.device
        return known, torch.from_numpy(places[known]).to(device)

    def store(self, folder: Path, seed: int) -> list[StoredFile]:
        """Write all rounds to a checkpoint, and return the files; none if empty."""
        files = []
        for round, banked in self._rounds.items():
            name = f"{_prefix(seed)}{round}"
            arrays = {
                f"{name}.clients": banked.clients,
                f"{name}.rows": banked.rows.cpu().numpy(),
            }
            if banked.starts is not None:
                arrays[f"{name}.starts"] = banked.starts.cpu().numpy()
            for file, array in arrays.items():
                written = checkpoints.write(folder, file, array)
                files.append(written)
        return files

    def restore(
        self, folder: Path, seed: int, width: int, device: torch.device
    ) -> None:
        """Read the rounds that `store` has written; rows have `width` columns."""
        for round in _stored_rounds(folder, seed):
            name = f"{_prefix(seed)}{round}"
            clients = checkpoints.load(folder, f"{name}.clients", np.int64, [None])
            # A file whose rows do not fit its clients or the network is refused.
            shape = [len(clients), width]
            rows = checkpoints.load(folder, f"{name}.rows", np.float32, shape)
            starts = None
            if f"{name}.starts.npy" in checkpoints.listed(folder):
                stored = checkpoints.load(folder, f"{name}.starts", np.float32, shape)
                starts = torch.from_numpy(stored).to(device)
            on_device = torch.from_numpy(rows).to(device)
            self._rounds[round] = BankedRound(clients, on_device, starts)


def _prefix(seed: int) -> str:
    """Return how the names of a seed's banked rounds begin in a checkpoint."""
    return f"server-{seed}.bank-"


def _stored_rounds(folder: Path, seed: int) -> list[int]:
    """Return the rounds whose uploads a checkpoint holds, oldest first."""
    # At most 18 digits: what a checkpoint lists comes from a file, and a longer number
    # is no round.
    pattern = rf"{escape(_prefix(seed))}([0-9]{{1,18}})\.rows\.npy"
    rounds = []
    for name in checkpoints.listed(folder):
        found = fullmatch(pattern, name)
        if found:
            rounds.append(int(found[1]))
    return sorted(rounds)
