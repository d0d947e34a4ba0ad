"""Points of studies made in memory, with figures that tests choose."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpcfed.analysis.groups import Process
from hpcfed.options import RunConfig
from hpcfed.results.run import RunRecord
from hpcfed.results.series import ROUND_SERIES
from hpcfed.runtime.timer import PHASES

ROUNDS = 10


def run_of(
    *,
    accuracy: float = 0.5,
    seconds: float | Sequence[float] = 1.0,
    train: float = 0.75,
    seed: int = 0,
    ranks: int = 1,
    sent: float = 100.0,
    energy: float = float("nan"),
    folder: Path = Path("run"),
    series: Mapping[str, Sequence[float]] | None = None,
    facts: Mapping[str, Any] | None = None,
    **options: Any,
) -> RunRecord:
    """Return a run whose last accuracy is as given. Of its seconds, a share is spent
    training and the rest aggregating; bytes are those of a round, up and as many down.
    `series` are further series of rounds, or others instead; `facts` further facts.
    """
    config = RunConfig().model_dump(mode="json") | {"seed": seed} | options
    each = np.broadcast_to(np.asarray(seconds, float), np.shape(seconds) or (ROUNDS,))
    rounds = {name: np.full(len(each), np.nan) for name in ROUND_SERIES}
    rounds["seconds"] = np.array(each)
    rounds["cohort"] = np.full(len(each), float(config["clients"]))
    rounds["engine_samples"] = 2.0 * 32 * rounds["cohort"]
    rounds["longest_steps"] = np.full(len(each), 2.0)
    rounds["bytes_up"] = rounds["bytes_down"] = np.full(len(each), sent)
    # It climbs to its last value.
    rounds["accuracy"] = accuracy * np.linspace(0.1, 1, len(each))
    for name, values in (series or {}).items():
        rounds[name] = np.array(values, float)
    phases = np.zeros((len(each), ranks, len(PHASES)))
    phases[:, :, PHASES.index("train")] = train * each[:, None]
    phases[:, :, PHASES.index("aggregate")] = (1 - train) * each[:, None]
    clients = config["clients"]
    known = {
        "method": config["method"],
        "dataset": config["dataset"],
        "clients": clients,
        "ranks": ranks,
        "columns": 4810,
        "seed": seed,
        "model": "mlp",
    }
    return RunRecord(
        folder=folder,
        status="complete",
        error="",
        facts=known | dict(facts or {}),
        config=config,
        environment={"command": ["hpcfed", "run"]},
        rounds=rounds,
        phases=phases,
        wall=np.repeat(each[:, None], ranks, 1),
        stacks=np.full(len(each), (facts or {}).get("stacked_seeds", 1)),
        peak_memory=np.full(ranks, 2.0**20),
        client_accuracy=np.full((len(each), clients), accuracy),
        train_samples=np.full(clients, 32),
        energy=energy,
        moves=(),
        finals={},
        newcomers={},
        learnings=(),
        evaluated=np.arange(clients),
        client_metrics={},
        class_accuracy={},
    )


def process_of(**figures: Any) -> Process:
    """Return a process of one run; see `run_of`."""
    run = run_of(**figures)
    return Process((run,), 0, f"seed {run.facts['seed']}")
