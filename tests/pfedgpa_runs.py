"""Runs of pFedGPA that several files of tests look at."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcfed.experiment.assemble import Setup
from hpcfed.federation.log import RoundLog
from hpcfed.results.stored import read_run
from hpcfed.runtime.timer import PHASES
from hpcfed.server.rank import ServerRank
from hpcfed.server.transport import Colocated
from tests.runs import SERVER

COLUMNS = 4810  # of the MLP on the digits
TINY: dict[str, Any] = {
    "method": "pfedgpa",
    "clients": 6,
    "rounds": 4,
    "bank_rounds": 3,
    "precision": "fp32",
    **SERVER,
}
"""A server that learns in ten steps: where it is wrong does not matter, only what is
done with its rows.
"""
EVERYONE = np.arange(6)


def states(s: Setup, logs: list[RoundLog] | None = None) -> list[Any]:
    """The state before the first round, and after each; `logs` takes their logs."""
    found = [s.method.init(s.federation)]
    for round in range(s.federation.config.rounds):
        cohort = s.federation.sample(round)
        found.append(s.method.round(s.federation, found[-1], cohort))
        if logs is not None:
            logs.append(cohort.log)
    return found


def server_of(s: Setup) -> ServerRank:
    transport = s.federation.server._transport
    assert isinstance(transport, Colocated)
    return transport.rank


STARTS = {"random", "global model", "method", "random, guided"}


def losses(folder: Path, network: str) -> np.ndarray:
    with h5py.File(folder / "run.h5") as file:
        values: np.ndarray = file[f"server/{network}_loss"][()]
        return values


def assert_learnt_alike(folder: Path, expected: Path) -> None:
    """Both runs generate rows with the same figures, from the same losses."""
    one, other = read_run(folder), read_run(expected)
    for name, figure in other.figures.items():
        np.testing.assert_allclose(
            one.figures[name], figure, rtol=1e-3, atol=1e-4, err_msg=name
        )
    np.testing.assert_allclose(
        losses(folder, "denoiser"), losses(expected, "denoiser"), rtol=1e-3, atol=1e-4
    )
    assert one.learnings[0].own == other.learnings[0].own


def assert_seconds_fit(folder: Path) -> None:
    """What the server's phases took lies within what the round counts as the server's."""
    record = read_run(folder)
    for learning in record.learnings:
        counted = record.phases[learning.round, 0, PHASES.index("server")]
        # At least half: a busy system may let the process wait between two phases.
        assert 0.5 * counted < sum(learning.seconds.values()) <= counted + 1e-6
        assert min(learning.seconds.values()) >= 0
