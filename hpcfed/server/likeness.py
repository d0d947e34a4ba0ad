"""Compare generated rows with the uploads from which the server has learnt.

All comparisons are between updates: rows minus those from which their rounds started.
Uploads of different rounds also differ by how far FedAvg moved in between, which says
nothing about clients.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hpcfed.server.bank import UploadBank
from hpcfed.server.messages import Answer
from hpcfed.server.scaling import RowScaling


def updates_of(bank: UploadBank, clients: np.ndarray, rows: Tensor) -> Tensor:
    """Return the updates of rows that were generated from the clients' newest rows in
    the bank. If the bank holds uploads, subtract their starts.
    """
    _, newest = bank.newest(clients)
    _, updates = bank.newest_updates(clients)
    # Exactly zero if the bank holds updates.
    starts = newest - updates
    return rows - starts


def recognised(
    bank: UploadBank, clients: np.ndarray, updates: Tensor, widths: Sequence[int]
) -> float:
    """Return the share of clients whose nearest centre is their own.

    A centre is the mean of a client's banked updates. Columns are divided by the
    standard deviation of the updates in their tensor, as for the model.
    """
    banked = bank.updates()
    scaling = RowScaling.of(banked, widths)
    ids, centres = _means(bank.uploaders(), scaling(banked))
    nearest = _distances(scaling(updates), centres).argmin(1)
    expected = torch.from_numpy(np.searchsorted(ids, clients))
    hits = nearest == expected.to(nearest.device)
    return float(hits.float().mean())


def mean_rows(bank: UploadBank, clients: np.ndarray) -> tuple[np.ndarray, Tensor]:
    """Return which of the clients are in the bank, and the means of their rows."""
    ids, means = _means(bank.uploaders(), bank.rows())
    known = np.isin(clients, ids)
    places = torch.from_numpy(np.searchsorted(ids, clients[known]))
    return known, means[places.to(means.device)]


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


def likeness(bank: UploadBank, clients: np.ndarray, updates: Tensor) -> Likeness:
    """Compare updates with those in the bank, which must know all these clients."""
    _, own = bank.newest_updates(clients)
    length = own.norm(dim=1)
    # Relative distances are undefined for an update of length 0.
    unit = length.where(length > 0, torch.nan)
    distances = _distances(updates, bank.updates())
    nearest, at = distances.min(1)
    uploader = bank.uploaders()[at.cpu().numpy()]
    return Likeness(
        own=_numbers((updates - own).norm(dim=1) / unit),
        nearest=_numbers(nearest / unit),
        nearest_is_own=(uploader == clients).astype(np.float64),
    )


def _means(uploaders: np.ndarray, rows: Tensor) -> tuple[np.ndarray, Tensor]:
    """Return the ids of all clients, ascending, and the mean of each client's rows."""
    ids, positions = np.unique(uploaders, return_inverse=True)
    at = torch.from_numpy(positions).to(rows.device)
    sums = rows.new_zeros(len(ids), rows.shape[1])
    sums.index_add_(0, at, rows)
    return ids, sums / at.bincount().unsqueeze(1)


def _distances(rows: Tensor, others: Tensor) -> Tensor:
    # Not by a matrix product: in TF32 two similar rows would seem far apart.
    return torch.cdist(rows, others, compute_mode="donot_use_mm_for_euclid_dist")


def _numbers(values: Tensor) -> np.ndarray:
    numbers: np.ndarray = values.double().cpu().numpy()
    return numbers
