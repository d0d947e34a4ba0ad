"""The bank of uploads from which the server's model learns.

With --bank-of updates its rows are the clients' updates: their uploads minus the row
from which the round started. With --bank-of uploads they are the uploads themselves,
and the bank also keeps the starts.
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
    """What to subtract from the rows to get updates; None if they are updates."""

    @property
    def updates(self) -> Tensor:
        return self.rows if self.starts is None else self.rows - self.starts


class UploadBank:
    """The rows of the last rounds."""

    def __init__(self, rounds: int) -> None:
        """Keep the last `rounds` rounds."""
        self._limit = rounds
        self._rounds: OrderedDict[int, BankedRound] = OrderedDict()

    def add(
        self,
        round: int,
        clients: np.ndarray,
        rows: Tensor,
        starts: Tensor | None = None,
    ) -> None:
        """Add a round's rows, and drop the oldest round beyond the limit. `starts` are
        the rows' starts if the rows are not updates.
        """
        # One row with a NaN would spoil the mean, and so the whole model.
        finite = np.flatnonzero(torch.isfinite(rows).all(1).cpu().numpy())
        # Sorted, so that the model does not depend on which rank hosts a client.
        order = finite[np.argsort(clients[finite])]
        at = torch.from_numpy(order).to(rows.device)
        ordered_starts = None if starts is None else starts[at]
        self._rounds[round] = BankedRound(clients[order], rows[at], ordered_starts)
        # Rounds arrive in order, so the first one is the oldest.
        while len(self._rounds) > self._limit:
            self._rounds.popitem(last=False)

    def rows(self) -> Tensor:
        """Return all rows, the oldest round first."""
        return torch.cat([banked.rows for banked in self._rounds.values()])

    def updates(self) -> Tensor:
        """Return the update of every row of `rows`: upload minus start of the round."""
        return torch.cat([banked.updates for banked in self._rounds.values()])

    def uploaders(self) -> np.ndarray:
        """Return the client of every row of `rows`."""
        return np.concatenate([banked.clients for banked in self._rounds.values()])

    def newest(self, clients: np.ndarray) -> tuple[np.ndarray, Tensor]:
        """Return which of the clients are in the bank, and their last rows."""
        known, places = self._newest_places(clients)
        return known, self.rows()[places]

    def newest_updates(self, clients: np.ndarray) -> tuple[np.ndarray, Tensor]:
        """Return which of the clients are in the bank, and their last updates."""
        known, places = self._newest_places(clients)
        return known, self.updates()[places]

    def _newest_places(self, clients: np.ndarray) -> tuple[np.ndarray, Tensor]:
        """Return which of the clients are in the bank, and the positions of their last
        rows in `rows`.
        """
        # Rows are ordered by round, so a client's last position is its newest.
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
            # `load` refuses a file whose rows do not fit its clients or the network.
            shape = [len(clients), width]
            rows = checkpoints.load(folder, f"{name}.rows", np.float32, shape)
            starts = None
            if f"{name}.starts.npy" in checkpoints.listed(folder):
                stored = checkpoints.load(folder, f"{name}.starts", np.float32, shape)
                starts = torch.from_numpy(stored).to(device)
            on_device = torch.from_numpy(rows).to(device)
            self._rounds[round] = BankedRound(clients, on_device, starts)


def _prefix(seed: int) -> str:
    """Return the prefix of a seed's banked rounds in a checkpoint."""
    return f"server-{seed}.bank-"


def _stored_rounds(folder: Path, seed: int) -> list[int]:
    """Return the rounds whose uploads a checkpoint holds, oldest first."""
    # At most 18 digits: the list comes from a file, and a longer number cannot be a
    # round.
    pattern = rf"{escape(_prefix(seed))}([0-9]{{1,18}})\.rows\.npy"
    rounds = []
    for name in checkpoints.listed(folder):
        found = fullmatch(pattern, name)
        if found:
            rounds.append(int(found[1]))
    return sorted(rounds)
