"""What a run has left in its folder, as numbers, and how it differs from another."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from benchmarks.faults.lives import figures
from hpcfed.results import checkpoints, sandbox
from hpcfed.results.folder import RECORD

ROUNDING = 1e-9
"""Largest relative difference between runs on different numbers of ranks."""
OF_RANKS = ("rounds/wire", "rounds/engine", "rounds/peak", "rounds/halvings")
"""Beginnings of figures that depend on the number of ranks."""


@dataclass(frozen=True)
class State:
    """A run's record and its newest whole checkpoint."""

    status: str
    seed: int
    planned: int
    """Rounds that the run is to have."""
    rounds: int
    figures: Mapping[str, np.ndarray]
    checkpoint: int
    """Rounds in the checkpoint; 0: there is none."""
    arrays: Mapping[str, np.ndarray]
    """What the checkpoint holds, in the order of clients."""
    damaged: tuple[str, ...]
    """Checkpoints with a marker that are not whole."""
    written: int
    """When the record was written, by the file's clock."""


class Unreadable(Exception):
    """A record that exists and cannot be read."""


def state_of(run: Path) -> State | None:
    """Read what a run has left; None without a record."""
    path = run / RECORD
    if not path.exists():
        return None
    try:
        sandbox.check_heaps(path)
        with h5py.File(path, "r") as file:
            facts = dict(file.attrs)
            planned = len(file["rounds/train_loss"])
            found = figures(file)
    except Exception as error:
        raise Unreadable(f"{path.name}: {type(error).__name__}: {error}") from None
    damaged: list[str] = []
    newest = checkpoints.newest(run, say=damaged.append)
    arrays = {} if newest is None else _arrays(newest)
    return State(
        status=str(facts["status"]),
        seed=int(facts["seed"]),
        planned=planned,
        rounds=int(facts["rounds_done"]),
        figures=found,
        checkpoint=newest.rounds if newest else 0,
        arrays=arrays,
        damaged=tuple(damaged),
        written=path.stat().st_mtime_ns,
    )


def _arrays(checkpoint: checkpoints.Checkpoint) -> dict[str, np.ndarray]:
    """Return a checkpoint's arrays; those of clients in the order of their ids."""
    ranks: dict[str, dict[str, np.ndarray]] = {}
    found = {}
    for name in checkpoint.names(""):
        if name == RECORD:
            continue
        part, _, field = name.partition(".")
        array = checkpoint.read_any(name)
        if part == "common":
            found[name] = array
        else:
            ranks.setdefault(field, {})[part] = array
    order = np.argsort(np.concatenate([*ranks["clients"].values()]))
    for field, parts in ranks.items():
        found[f"worker.{field}"] = np.concatenate(
            [parts[rank] for rank in ranks["clients"]]
        )[order]
    return found


def differences(whole: State, found: State, *, same_ranks: bool) -> list[str]:
    """Name what differs in the rounds that a run has recorded so far."""
    names = []
    for name, values in whole.figures.items():
        if not same_ranks and name.startswith(OF_RANKS):
            continue
        mine, theirs = found.figures[name], values
        if name.startswith("rounds/") or (values.ndim > 1 and len(values) == len(mine)):
            mine, theirs = mine[: found.rounds], values[: found.rounds]
        if not _alike(theirs, mine, same_ranks=same_ranks):
            names.append(name)
    if found.rounds == whole.rounds == found.checkpoint == whole.checkpoint:
        for name in sorted(whole.arrays.keys() | found.arrays.keys()):
            both = name in whole.arrays and name in found.arrays
            if not both or not _alike(
                whole.arrays[name], found.arrays[name], same_ranks=same_ranks
            ):
                names.append(f"checkpoint: {name}")
    return names


def _alike(one: np.ndarray, other: np.ndarray, *, same_ranks: bool) -> bool:
    if same_ranks or one.dtype.kind not in "fc":
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    return one.shape == other.shape and np.allclose(
        one, other, rtol=ROUNDING, atol=ROUNDING, equal_nan=True
    )
