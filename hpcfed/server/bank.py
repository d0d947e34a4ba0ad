"""The bank of uploads from which the server's model learns.

With --bank-of updates its rows are the clients' updates: their uploads minus the row
from which the round started. With --bank-of uploads they are the uploads themselves,
and the bank also keeps the starts.

A bank may be larger than everything else on the server. So it is never copied as a
whole: sums over columns and combinations of rows pass through it block by block.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from re import escape, fullmatch

import numpy as np
import torch
from torch import Tensor

from hpcfed.results import checkpoints
from hpcfed.results.checkpoints import StoredFile
from hpcfed.server.columns import Columns

AT_ONCE = 2**25
"""The most numbers of a block: 256 MiB in float64."""


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


@dataclass(frozen=True)
class Block:
    """Some columns of all rows, all of the same tensor."""

    tensor: int
    """The number of the client's tensor."""
    at: slice
    """Which of this rank's columns they are."""
    rows: Tensor
    """[rows, columns] in float64, on the device."""


class BankedRows:
    """The rows of some rounds, the oldest first; they do not change.

    Rows have only this server rank's columns.
    """

    def __init__(
        self,
        rounds: Sequence[BankedRound],
        columns: Columns,
        device: torch.device | None = None,
    ) -> None:
        """Rows may lie on the host; `device` is where to compute with them."""
        self._rounds = list(rounds)
        self.columns = columns
        self.uploaders = np.concatenate([banked.clients for banked in rounds])
        """The client of every row."""
        self.ends = np.cumsum([len(banked.clients) for banked in rounds])
        """The number of rows up to the end of each round."""
        self.device = device or rounds[0].rows.device
        """Where blocks are computed."""

    @classmethod
    def of(cls, rows: Tensor, widths: Sequence[int]) -> "BankedRows":
        """Return whole rows as if each were of another client."""
        banked = BankedRound(np.arange(len(rows)), rows)
        return cls([banked], Columns.all_of(widths))

    def __len__(self) -> int:
        return len(self.uploaders)

    @property
    def has_starts(self) -> bool:
        """Whether rows are uploads, from which starts are subtracted to get updates."""
        return any(banked.starts is not None for banked in self._rounds)

    @property
    def nbytes(self) -> int:
        """The bytes that the rows take on this rank, with the starts of uploads."""
        kept = 0
        for banked in self._rounds:
            kept += banked.rows.nbytes
            if banked.starts is not None:
                kept += banked.starts.nbytes
        return kept

    def same_as(self, other: "BankedRows") -> bool:
        """Tell whether the other ones are the very same rows."""
        return [id(one) for one in self._rounds] == [id(one) for one in other._rounds]

    def rows(self) -> Tensor:
        """Return all rows as one tensor: a copy of the bank, for models that need it."""
        every = [banked.rows for banked in self._rounds]
        return self._loaded(torch.cat(every))

    def newest_places(self, clients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which of the clients are in the bank, and the positions of the last
        rows of those that are.
        """
        # Rows are ordered by round, so a client's last position is its newest.
        newest = {client: at for at, client in enumerate(self.uploaders.tolist())}
        places = np.array([newest.get(client, -1) for client in clients.tolist()], int)
        known = places >= 0
        return known, places[known]

    def newest(self, clients: np.ndarray) -> tuple[np.ndarray, Tensor]:
        """Return which of the clients are in the bank, and their last rows."""
        known, places = self.newest_places(clients)
        return known, self.at(places)

    def at(self, places: np.ndarray) -> Tensor:
        """Return the rows at these positions."""
        return self._selected(places, [banked.rows for banked in self._rounds])

    def starts_at(self, places: np.ndarray) -> Tensor:
        """Return what to subtract from the rows at these positions to get updates."""
        starts = []
        for banked in self._rounds:
            # Updates start from zero; an expanded zero takes no memory.
            zeros = banked.rows.new_zeros(()).expand_as(banked.rows)
            starts.append(zeros if banked.starts is None else banked.starts)
        return self._selected(places, starts)

    def copy_part(self, place: int, at: slice, into: Tensor) -> None:
        """Copy some of all columns of the row at this position to the beginning of
        `into`, as far as this rank holds them; leave the others as they are.
        """
        held = self.columns
        begin, end = max(at.start, held.start), min(at.stop, held.stop)
        if begin < end:
            row = self._row(place, [banked.rows for banked in self._rounds])
            part = row[begin - held.start : end - held.start]
            into[begin - at.start : end - at.start] = part.to(into.device)

    def _selected(self, places: np.ndarray, parts: Sequence[Tensor]) -> Tensor:
        selected = []
        for place in places.tolist():
            selected.append(self._loaded(self._row(place, parts)))
        if not selected:
            return self._loaded(parts[0][:0])
        return torch.stack(selected)

    def _row(self, place: int, parts: Sequence[Tensor]) -> Tensor:
        """Return a row of parts that follow each other, one for each round."""
        number = int(np.searchsorted(self.ends, place, side="right"))
        return parts[number][place - int(self.ends[number])]

    def _loaded(self, rows: Tensor) -> Tensor:
        """Return rows on the device, in a type that networks compute in."""
        kept = rows.dtype if rows.dtype == torch.float64 else torch.float32
        return rows.to(self.device, kept)

    # What passes through the whole bank

    def blocks(self, *, updates: bool = False) -> Iterator[Block]:
        """Yield all rows, or their updates, block by block of columns."""
        width = max(1, AT_ONCE // max(1, len(self)))
        for tensor, columns in self.columns.pieces():
            for begin in range(columns.start, columns.stop, width):
                at = slice(begin, min(begin + width, columns.stop))
                parts = []
                for banked in self._rounds:
                    part = banked.rows[:, at].to(self.device).double()
                    if updates and banked.starts is not None:
                        # Not in place: it may be a view of the bank.
                        part = part - banked.starts[:, at].to(self.device)
                    parts.append(part)
                yield Block(tensor, at, torch.cat(parts))

    def combined(self, weights: Tensor) -> Tensor:
        """Return combinations of rows; `weights` are [combinations, rows].

        With a third dimension in front, each of the client's tensors has its own.
        """
        width = self.columns.stop - self.columns.start
        made = self.at(np.array([0])).new_empty(weights.shape[-2], width)
        for block in self.blocks():
            chosen = weights if weights.dim() == 2 else weights[block.tensor]
            made[:, block.at] = (chosen @ block.rows).to(made.dtype)
        return made

    def deviations(self) -> Tensor:
        """Return the standard deviation of each tensor's numbers around the mean row."""
        widths = self.columns.widths
        sums = torch.zeros(len(widths), dtype=torch.float64, device=self.device)
        for block in self.blocks():
            sums[block.tensor] += (block.rows - block.rows.mean(0)).square().sum()
        numbers = len(self) * sums.new_tensor(widths)
        return (self.columns.summed(sums) / numbers).sqrt()

    def averaging(self) -> tuple[np.ndarray, Tensor]:
        """Return the ids of all clients, ascending, and the weights [clients, rows] of
        which `combined` makes the mean of each client's rows.
        """
        ids, positions = np.unique(self.uploaders, return_inverse=True)
        weights = np.zeros((len(ids), len(self)))
        weights[positions, np.arange(len(self))] = 1.0
        weights /= weights.sum(1, keepdims=True)
        return ids, torch.from_numpy(weights).to(self.device)


class UploadBank:
    """The rows of the last rounds."""

    def __init__(
        self,
        rounds: int,
        columns: Columns,
        *,
        dtype: torch.dtype | None = None,
        on_host: bool = False,
    ) -> None:
        """Keep the last `rounds` rounds, in a type of their own if `dtype` is given."""
        self._limit = rounds
        self._columns = columns
        self._dtype = dtype
        self._on_host = on_host
        self._device: torch.device | None = None
        self._rounds: OrderedDict[int, BankedRound] = OrderedDict()

    def add(
        self,
        round: int,
        clients: np.ndarray,
        rows: Tensor,
        starts: Tensor | None = None,
    ) -> None:
        """Add a round's whole rows, and drop the oldest round beyond the limit.
        `starts` are the rows' starts if the rows are not updates.
        """
        # One row with a NaN would spoil the mean, and so the whole model. The largest
        # number tells whether rounding to the bank's type keeps all of a row finite.
        largest = rows.abs().amax(1).to(self._dtype or rows.dtype)
        finite = np.flatnonzero(largest.isfinite().cpu().numpy())
        # Sorted, so that the model does not depend on which rank hosts a client.
        order = finite[np.argsort(clients[finite])]
        at = torch.from_numpy(order).to(rows.device)
        ordered_starts = None if starts is None else self._kept(starts[at])
        self._rounds[round] = BankedRound(
            clients[order], self._kept(rows[at]), ordered_starts
        )
        # Rounds arrive in order, so the first one is the oldest.
        while len(self._rounds) > self._limit:
            self._rounds.popitem(last=False)

    def _kept(self, rows: Tensor) -> Tensor:
        """Return this rank's columns, in the type and place in which they are kept."""
        self._device = rows.device
        kept = self._columns.of(rows).to(self._dtype or rows.dtype)
        return kept.cpu() if self._on_host else kept

    def content(self) -> BankedRows:
        """Return the rows as they are now, without copying them."""
        # A loaded model is stored in checkpoints before anything was banked.
        width = self._columns.stop - self._columns.start
        nothing = BankedRound(np.empty(0, np.int64), torch.empty(0, width))
        rounds = list(self._rounds.values()) or [nothing]
        return BankedRows(rounds, self._columns, self._device)

    def store(self, folder: Path, seed: int, *, write: bool) -> list[StoredFile]:
        """Write all rounds to a checkpoint, and return the files; none if empty. All
        ranks call it, and one of them writes.
        """
        files = []
        for round, banked in self._rounds.items():
            name = f"{_prefix(seed)}{round}"
            tensors = {f"{name}.rows": banked.rows}
            if banked.starts is not None:
                tensors[f"{name}.starts"] = banked.starts
            arrays = {f"{name}.clients": banked.clients}
            for file, tensor in tensors.items():
                # Checkpoints hold whole rows in float32, so that any number of ranks
                # can read them.
                whole = self._columns.whole(tensor.to(self._device).float())
                arrays[file] = whole.cpu().numpy()
            if write:
                for file, array in arrays.items():
                    files.append(checkpoints.write(folder, file, array))
        return files

    def restore(self, folder: Path, seed: int, device: torch.device) -> None:
        """Read the rounds that `store` has written."""
        width = self._columns.num_all
        for round in _stored_rounds(folder, seed):
            name = f"{_prefix(seed)}{round}"
            clients = checkpoints.load(folder, f"{name}.clients", np.int64, [None])
            # `load` refuses a file whose rows do not fit its clients or the network.
            shape = [len(clients), width]
            rows = checkpoints.load(folder, f"{name}.rows", np.float32, shape)
            starts = None
            if f"{name}.starts.npy" in checkpoints.listed(folder):
                stored = checkpoints.load(folder, f"{name}.starts", np.float32, shape)
                starts = self._kept(torch.from_numpy(stored).to(device))
            on_device = self._kept(torch.from_numpy(rows).to(device))
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
