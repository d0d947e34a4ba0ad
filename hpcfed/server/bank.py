"""The bank of uploads: what the server's model learns from."""

from collections import OrderedDict
from pathlib import Path
from re import escape, fullmatch

import numpy as np
import torch
from torch import Tensor

from hpcfed.record import checkpoints
from hpcfed.record.checkpoints import StoredFile


class UploadBank:
    """The uploads of the last rounds, each round's in the order of client ids."""

    def __init__(self, rounds: int) -> None:
        """`rounds`: how many rounds are remembered."""
        self._limit = rounds
        self._rounds: OrderedDict[int, tuple[np.ndarray, Tensor]] = OrderedDict()

    def add(self, round: int, clients: np.ndarray, rows: Tensor) -> None:
        """Add a round's uploads, and forget the oldest round beyond the limit."""
        # One upload with a NaN would spoil the mean, and so the whole model.
        finite = torch.isfinite(rows).all(1)
        rows = rows[finite]
        clients = clients[finite.cpu().numpy()]
        # Sorted, so that the model does not depend on which rank hosts a client.
        order = np.argsort(clients)
        on_device = torch.from_numpy(order).to(rows.device)
        self._rounds[round] = (
            clients[order],
            rows[on_device],
        )
        # Rounds come in order: the first one is the oldest.
        while len(self._rounds) > self._limit:
            self._rounds.popitem(last=False)

    def rows(self) -> Tensor:
        """Return all uploads, the oldest round first."""
        uploads = [rows for _, rows in self._rounds.values()]
        return torch.cat(uploads)

    def uploaders(self) -> np.ndarray:
        """Return the client of every row of `rows`."""
        clients = [clients for clients, _ in self._rounds.values()]
        return np.concatenate(clients)

    def newest(self, clients: np.ndarray) -> tuple[np.ndarray, Tensor]:
        """Return which of the clients are in the bank, and the last upload of those."""
        newest: dict[int, Tensor] = {}
        # A later round's upload takes the place of an earlier one.
        for ids, rows in self._rounds.values():
            newest.update(zip(ids.tolist(), rows, strict=True))
        known = np.zeros(len(clients), bool)
        found = []
        for position, client in enumerate(clients.tolist()):
            if client in newest:
                known[position] = True
                found.append(newest[client])
        if not found:
            # No rows, but of the right width, type and device.
            return known, self.rows()[:0]
        return known, torch.stack(found)

    def store(self, folder: Path, seed: int) -> list[StoredFile]:
        """Write all rounds to a checkpoint, and return the files; none if empty."""
        files = []
        for round, (clients, rows) in self._rounds.items():
            name = f"{_prefix(seed)}{round}"
            arrays = {
                f"{name}.clients": clients,
                f"{name}.rows": rows.cpu().numpy(),
            }
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
            on_device = torch.from_numpy(rows).to(device)
            self._rounds[round] = clients, on_device


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
