"""Data sets of benchmarks: the real one where its files are, else synthetic samples of
the same shape and number.
"""

from pathlib import Path
from typing import Any

from hpcfed.data import DATASETS, files
from hpcfed.errors import UserError


def real(name: str, root: Path | None) -> dict[str, Any]:
    """Return the options of a data set; empty where its files are not."""
    try:
        files.require(name, root=root, download=False)
    except UserError:
        return {}
    return {"dataset": name} | ({"data_root": str(root)} if root else {})


def synthetic(name: str, clients: int) -> dict[str, Any]:
    """Return the options of synthetic data as large as a data set."""
    about = DATASETS[name]
    assert about.samples is not None
    train, test = about.samples
    return {
        "dataset": "synthetic",
        "synthetic_shape": "x".join(map(str, about.shape)),
        "synthetic_classes": about.classes,
        "train_per_client": train // clients,
        "test_per_client": test // clients,
    }


def dealt(
    values: dict[str, Any], name: str, root: Path | None, *, partition: str
) -> dict[str, Any]:
    """Return synthetic settings with the real data set instead, where its files are.

    `partition` then deals it; `dominant` gives every client as many samples as
    before.
    """
    found = real(name, root)
    if not found:
        return values
    own = {key: values[key] for key in values if not key.startswith("synthetic")}
    if partition != "dominant":
        own = {key: own[key] for key in own if not key.endswith("_per_client")}
    return own | found | {"partition": partition}


def told(values: dict[str, Any], name: str) -> str:
    """Return what the samples are, for a table."""
    return f"like {name}" if values["dataset"] == "synthetic" else name
