"""Data in a run's file beyond its record, read only for a page about this run."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpcfed.results.folder import RECORD
from hpcfed.results.format import CLOCK_COLUMNS
from hpcfed.results.safe import Reader, readable, reading
from hpcfed.results.server import LatentMap

MOST_SAMPLES = 2**53
"""The most samples of a client and a class: above this a float cannot hold every whole
number.
"""


@dataclass(frozen=True)
class RunDetails:
    """Details of a run. A part that the file does not have is empty or None."""

    class_counts: np.ndarray
    """Training samples: [client, class]."""
    losses: dict[str, np.ndarray]
    """The loss of each step of the server's networks: [training, step]."""
    latents: LatentMap | None
    """The map of the last training of the server's model."""

    @classmethod
    def nothing(cls) -> "RunDetails":
        """Return empty details, for a run without any."""
        return cls(np.empty((0, 0)), {}, None)


def read_details(folder: Path) -> RunDetails:
    """Read the details of a run whose record was readable; raise a UserError if they
    are not.
    """
    path = folder / RECORD
    with readable(path, "a run"), reading(path) as file:
        return RunDetails(_class_counts(file), _losses(file), _latents(file))


def _class_counts(file: Reader) -> np.ndarray:
    if "clients/classes" not in file:
        return np.empty((0, 0))
    clients = len(file.numbers("clients/train_samples", (None,)))
    counts = file.numbers("clients/classes", (clients, None)).astype(np.float64)
    # NaN fails this comparison, too.
    if not ((counts >= 0) & (counts <= MOST_SAMPLES)).all():
        raise ValueError("clients/classes holds numbers that cannot be")
    return counts


def _losses(file: Reader) -> dict[str, np.ndarray]:
    """Read the losses of all trainings so far."""
    if "server" not in file:
        return {}
    group = file.within("server")
    came = np.isfinite(group.numbers("round", (None,)).astype(np.float64))
    losses = {}
    for network in group.texts("network_names"):
        name = f"{network}_loss"
        if name in group:
            of_all = group.numbers(name, (len(came), None))
            losses[network] = of_all[came].astype(np.float64)
    return losses


def _latents(file: Reader) -> LatentMap | None:
    if "server/latents" not in file:
        return None
    places = file.numbers("server/latents", (None, 2)).astype(np.float64)
    clients = file.numbers("server/latent_clients", (len(places),)).astype(np.float64)
    shares = file.numbers("server/latent_shares", (2,)).astype(np.float64)
    # Unused places are NaN; a damaged file may hold anything.
    known = np.isfinite(places).all(1) & (clients >= 0) & (clients <= MOST_SAMPLES)
    if not known.any() or not ((shares >= 0) & (shares <= 1 + 1e-6)).all():
        return None
    return LatentMap(clients[known].astype(np.int64), places[known], shares)


def read_clock(folder: Path, rounds: int) -> dict[str, np.ndarray]:
    """Read the clock table of a run's first rounds, one row per member: the round,
    counted from 1, and the table's columns. Runs without a clock have no rows.
    """
    path = folder / RECORD
    with readable(path, "a run"), reading(path) as file:
        columns = {}
        for name in CLOCK_COLUMNS:
            if f"clock/{name}" in file:
                values = file.numbers(f"clock/{name}", (None, None), rounds)
                columns[name] = values.astype(np.float64)
        if columns.keys() != CLOCK_COLUMNS.keys():
            return {name: np.empty(0) for name in ("round", *CLOCK_COLUMNS)}
        return _clock_rows(columns)


def _clock_rows(columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the members of all rounds as consecutive rows; raise a ValueError for
    impossible numbers.
    """
    client = columns["client"]
    for name, values in columns.items():
        alike = values.shape == client.shape
        if not alike or (values < 0).any() or np.isinf(values).any():
            raise ValueError(f"clock/{name} holds numbers that cannot be")
    round, member = np.nonzero(~np.isnan(client))
    found = {"round": round + 1}
    for name, values in columns.items():
        found[name] = values[round, member]
    found["client"] = found["client"].astype(np.int64)
    return found
