"""A small run of every method."""

from typing import Any

from tests.runs import SERVER

ROUNDS, STOPPED_AFTER = 6, 3
SMALL: dict[str, Any] = {
    "clients": 5,
    "rounds": ROUNDS,
    "epochs": 1,
    "batch_size": 64,
    "model": "mlp",
    "precision": "fp32",
    "participation": 0.6,
}
OWN: dict[str, dict[str, Any]] = {
    "pfedgpa": {**SERVER, "bank_rounds": 4, "server_every": 2},
    "pfedhn": {"inner_steps": 3, "hn_hidden": 5},
    "fedlg": {"gene_pools": "fc1"},
    "apfl": {"local_steps": 2, "apfl_adaptive": True},
    "per-fedavg": {"local_steps": 2},
    "pfedme": {"local_rounds": 2, "pfedme_steps": 2},
    **{name: {"shared_layers": "fc1"} for name in ("parfed", "fedfina")},
}
