"""The numbers that a run has left, and in which of them two runs differ."""

from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np

from benchmarks.harness.fingerprints import lasting

Numbers = dict[str, np.ndarray]
OF_PLACEMENT = ("clients/rank", "moves/")
"""What depends on the ranks by its meaning."""
BY_CLIENT = ("clients/", "figures/value", "finals/accuracy")
"""Data sets in which one axis is the clients'."""


def numbers(folder: Path) -> Numbers:
    """Return all numbers of a run that are neither times nor of the machine."""
    found: Numbers = {}
    for path in sorted(folder.rglob("*.h5")):
        if "checkpoints" in path.parts:
            continue
        where = "" if path.parent == folder else f"{path.parent.name}/"
        if path.name == "run.h5":
            for key, values in lasting(path).items():
                if values.dtype != object:
                    found[f"{where}{key}"] = values
        elif path.name.startswith("params-"):
            _add_rows(path, where, found)
    for path in sorted(folder.rglob("model.npz")):
        where = "" if path.parent == folder else f"{path.parent.name}/"
        with np.load(path, allow_pickle=False) as model:
            found |= {f"{where}model/{name}": model[name] for name in model.files}
    return found


def _add_rows(path: Path, where: str, found: Numbers) -> None:
    """Add a row for each client and snapshot; ranks and resumed runs share them out."""
    with h5py.File(path) as file:
        for number in np.flatnonzero(file["taken"][()]):
            round = int(file["round"][number])
            for place, client in enumerate(file["client"][()].tolist()):
                name = f"{where}rows/{round}/{client}"
                found[name] = file["rows"][number, place]
            if "global" in file:
                found[f"{where}global/{round}"] = file["global"][number]


def difference(
    one: Numbers, other: Numbers, tolerance: float, ignored: Sequence[str] = ()
) -> tuple[str, float]:
    """Return a data set in which two runs differ the most, in parts of its largest
    number, and by how much; empty if they agree within the tolerance.
    """
    worst, name_of_worst = 0.0, ""
    for name in sorted(one.keys() | other.keys()):
        if name.startswith(tuple(ignored)):
            continue
        if name not in one or name not in other:
            return f"{name} is missing", np.inf
        found = distance(one[name], other[name])
        if found > max(tolerance, worst):
            worst, name_of_worst = found, name
    return name_of_worst, worst


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Return the largest difference in parts of the largest number, or of 1."""
    if one.shape != other.shape:
        return np.inf
    if not one.size or np.array_equal(one, other, equal_nan=one.dtype.kind == "f"):
        return 0.0
    first, second = one.astype(np.float64), other.astype(np.float64)
    finite = np.isfinite(first)
    if (finite != np.isfinite(second)).any():
        return np.inf
    size = max(1.0, float(np.abs(first[finite]).max(initial=0)))
    return float(np.abs(first[finite] - second[finite]).max(initial=0)) / size


def with_names(found: Numbers, names: Sequence[int]) -> Numbers:
    """Return the numbers of a run in which client i was called `names[i]`: what is
    recorded under a client's name comes under its old one.
    """
    made: Numbers = {}
    order = np.asarray(names)
    for name, values in found.items():
        kind, *place = name.split("/")
        if kind == "rows":
            made[f"rows/{place[0]}/{place[1]}"] = found[
                f"rows/{place[0]}/{names[int(place[1])]}"
            ]
        elif name.startswith(BY_CLIENT):
            axis = 0 if values.ndim == 1 or name == "clients/classes" else -1
            made[name] = np.take(values, order, axis=axis)
        else:
            made[name] = values
    return made


def not_finite(found: Numbers) -> str:
    """Return a data set with an infinite number, or with weights that are NaN.

    Figures are NaN where there are none, and so are rows that a snapshot lacks.
    """
    for name, values in found.items():
        if values.dtype.kind != "f":
            continue
        lacks = np.isnan(values)
        weights = any(part in name for part in ("model/", "rows/", "global/"))
        some_lack = weights and lacks.any() and ("model/" in name or not lacks.all())
        if np.isinf(values).any() or some_lack:
            return name
    return ""
