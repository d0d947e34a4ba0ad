"""Compare generated rows with the uploads from which the server has learnt, and make
the rivals that a generated row must beat.

All comparisons are between updates: rows minus those from which their rounds started.
Uploads of different rounds also differ by how far FedAvg moved in between, which says
nothing about clients. Rows have this server rank's columns only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hpcfed.server.bank import BankedRows
from hpcfed.server.messages import Answer
from hpcfed.server.scaling import SMALLEST


def updates_of(bank: BankedRows, clients: np.ndarray, rows: Tensor) -> Tensor:
    """Return the updates of rows that were generated from the clients' newest rows in
    the bank. If the bank holds uploads, subtract their starts.
    """
    if not bank.has_starts:
        return rows
    _, places = bank.newest_places(clients)
    return rows - bank.starts_at(places)


def recognised(bank: BankedRows, clients: np.ndarray, updates: Tensor) -> float:
    """Return the share of clients whose update has their own direction."""
    [own] = in_own_direction(bank, clients, [updates])
    return float(own.float().mean())


def in_own_direction(
    bank: BankedRows, clients: np.ndarray, sets: Sequence[Tensor]
) -> list[Tensor]:
    """Tell for each client, of several sets of updates, whether of all clients'
    directions its own has the smallest angle to its update. All sets share the passes
    through the bank.

    A client's direction is the mean of its banked updates, each divided by its length.
    Where an update points says whose it is; its length says how much was left to learn
    in that round. By distance, an update less than half as long as its client's mean
    would be nearer to a client that does nothing, even if it points exactly to the mean.
    """
    ids, weights = bank.averaging()
    scales, lengths = _root_mean_squares(bank)
    # Weights are zero for an update without length, which points nowhere.
    weights = (weights / lengths).where(lengths > 0, 0.0)
    squares = weights.new_zeros(len(ids))
    products = weights.new_zeros(len(sets), len(clients), len(ids))
    for block in bank.blocks(updates=True):
        there = weights @ block.rows / scales[block.tensor]
        squares += there.square().sum(1)
        for total, updates in zip(products, sets, strict=True):
            here = updates[:, block.at].double() / scales[block.tensor]
            total += here @ there.T
    norms = bank.columns.summed(squares).sqrt()
    cosines = bank.columns.summed(products) / norms.where(norms > 0, 1.0)
    expected = torch.from_numpy(np.searchsorted(ids, clients)).to(cosines.device)
    largest, at = cosines.max(2)
    return list((at == expected) & (largest > 0))


def _root_mean_squares(bank: BankedRows) -> tuple[Tensor, Tensor]:
    """Return the root mean square of the updates in each tensor, and the length of each
    update after division by it: weights and biases differ by orders of magnitude.
    """
    widths = bank.columns.widths
    shape = len(bank), len(widths)
    squares = torch.zeros(shape, dtype=torch.float64, device=bank.device)
    for block in bank.blocks(updates=True):
        squares[:, block.tensor] += block.rows.square().sum(1)
    squares = bank.columns.summed(squares)
    means = squares.mean(0) / squares.new_tensor(widths)
    scales = means.sqrt().clamp_min(SMALLEST)
    return scales, (squares / scales.square()).sum(1).sqrt()


def squared_distances(bank: BankedRows, updates: Tensor) -> Tensor:
    """Return the squared distances of updates to the banked ones."""
    shape = len(updates), len(bank)
    total = torch.zeros(shape, dtype=torch.float64, device=updates.device)
    for block in bank.blocks(updates=True):
        # In float64, where the difference of large squares keeps small distances.
        here = updates[:, block.at].double()
        squares = here.square().sum(1, keepdim=True) + block.rows.square().sum(1)
        total += squares - 2 * here @ block.rows.T
    return bank.columns.summed(total).clamp_min(0)


def _averaging(
    bank: BankedRows, clients: np.ndarray
) -> tuple[np.ndarray, Tensor, Tensor]:
    """Return which of the clients are in the bank, the weights that average the rows of
    each client there, and the places of the known ones among these.
    """
    ids, weights = bank.averaging()
    known = np.isin(clients, ids)
    places = torch.from_numpy(np.searchsorted(ids, clients[known]))
    return known, weights, places.to(weights.device)


def mean_rows(bank: BankedRows, clients: np.ndarray) -> tuple[np.ndarray, Tensor]:
    """Return which of the clients are in the bank, and the means of their rows."""
    known, weights, places = _averaging(bank, clients)
    return known, bank.combined(weights[places])


def shrunk_rows(bank: BankedRows, clients: np.ndarray) -> tuple[np.ndarray, Tensor]:
    """Return which of the clients are in the bank, and the best linear estimates of
    their true rows, if clients differ and rounds scatter as Gaussians.

    The estimate moves the mean of a client's rows towards the mean of all clients, the
    further, the less clients differ and the fewer rows the client has. It is what an
    ideal denoiser would do, without any learning.
    """
    known, means, places = _averaging(bank, clients)
    between, within = variances(bank, means)
    counts = (means > 0).sum(1)
    # [tensors, clients]: how much of the difference to the mean is the client's own.
    doubt = within.unsqueeze(1) / counts
    kept = between.unsqueeze(1) / (between.unsqueeze(1) + doubt).clamp_min(SMALLEST**2)
    # Without any scatter, the client's mean is certain.
    kept = kept.where(doubt > 0, 1.0)[:, places].unsqueeze(2)
    # The mean over clients, not over rows: who took part often has no more weight.
    everyones = means.mean(0)
    return known, bank.combined(kept * means[places] + (1 - kept) * everyones)


def halfway_rows(bank: BankedRows, clients: np.ndarray) -> tuple[np.ndarray, Tensor]:
    """Return which of the clients are in the bank, and rows halfway between the mean of
    each client's rows and that of all clients.

    Half was best of a quarter, a half and three quarters on the digits, where the
    variances say to move less; perhaps because a client has the same samples in every
    round.
    """
    known, means, places = _averaging(bank, clients)
    return known, bank.combined((means[places] + means.mean(0)) / 2)


def variances(bank: BankedRows, means: Tensor) -> tuple[Tensor, Tensor]:
    """Return the variances of each tensor's numbers between clients and, for the same
    client, between rounds: the estimators of a one-way analysis of variance.

    `means` are the weights that average each client's rows.
    """
    clients, rows = means.shape
    squares = means.new_zeros(2, len(bank.columns.widths))
    counts = (means > 0).sum(1, keepdim=True).double()
    owner = torch.from_numpy(np.unique(bank.uploaders, return_inverse=True)[1])
    owner = owner.to(means.device)
    for block in bank.blocks():
        centres = means @ block.rows
        everyones = block.rows.mean(0)
        within = block.rows - centres[owner]
        squares[0, block.tensor] += (counts * (centres - everyones).square()).sum()
        squares[1, block.tensor] += within.square().sum()
    squares = bank.columns.summed(squares) / squares.new_tensor(bank.columns.widths)
    # If every client has one row, scatter cannot be told from difference: count it as
    # difference, so that nothing is shrunk.
    scatter = squares[1] / max(1, rows - clients)
    if clients == 1:
        return torch.zeros_like(scatter), scatter
    each = (rows - float(counts.square().sum()) / rows) / (clients - 1)
    between = (squares[0] / (clients - 1) - scatter) / each
    return between.clamp_min(0), scatter


@dataclass(frozen=True, kw_only=True, eq=False)
class Likeness(Answer):
    """How close rows are to those in the bank, one entry per row.

    Distances are between updates, over all generated columns, relative to the norm of
    the client's own newest update.
    """

    own: np.ndarray
    """To the client's own newest upload."""
    nearest: np.ndarray
    """To the nearest upload of any client and round."""
    nearest_is_own: np.ndarray
    """1 if that one is an upload of the same client in any round, else 0."""
    recognised: np.ndarray
    """1 if the row's update has its client's own direction, else 0."""


def likeness(bank: BankedRows, clients: np.ndarray, updates: Tensor) -> Likeness:
    """Compare updates with those in the bank, which must know all these clients."""
    _, places = bank.newest_places(clients)
    own_update = bank.at(places) - bank.starts_at(places)
    length = bank.columns.summed(own_update.double().square().sum(1)).sqrt()
    # Relative distances are undefined for an update of length 0.
    unit = length.where(length > 0, torch.nan)
    distances = squared_distances(bank, updates).sqrt()
    nearest, at = distances.min(1)
    own = distances[torch.arange(len(clients)), torch.from_numpy(places)]
    uploader = bank.uploaders[at.cpu().numpy()]
    return Likeness(
        own=_numbers(own / unit),
        nearest=_numbers(nearest / unit),
        nearest_is_own=(uploader == clients).astype(np.float64),
        recognised=_numbers(in_own_direction(bank, clients, [updates])[0]),
    )


def _numbers(values: Tensor) -> np.ndarray:
    return values.double().cpu().numpy()
