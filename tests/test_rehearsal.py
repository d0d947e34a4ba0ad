"""A learning from a few rows that loads what the first real one needs."""

from collections import Counter

import pytest
import torch

from hpcfed.errors import Diverged
from hpcfed.runtime.timer import Observer, observed_by
from hpcfed.server.options import ServerOptions
from hpcfed.server.rehearsal import ROWS, STEPS, rehearse
from hpcfed.server.report import LearningReport
from hpcfed.server.row_model import RowModel
from hpcfed.server.training_plan import RankSlot

SLOT = RankSlot(torch.device("cpu"))


class Noting(Observer):
    def __init__(self) -> None:
        self.steps: Counter[str] = Counter()

    def step(self, network: str, done: int, steps: int) -> None:
        self.steps[network] += 1


def options_of(model: str) -> ServerOptions:
    """Networks that would take minutes, from a file that is not there."""
    return ServerOptions(
        server_model=model,  # type: ignore[arg-type]
        server="large",
        server_width=4096,
        server_depth=9,
        server_load="no-such-file.h5",
        server_engine="torch",
        server_batch=6,
        denoiser_batch=3,
        inversion_depth=1000,
    )


@pytest.mark.parametrize("model", ["p-diff", "span", "tokens"])
def test_it_learns_with_the_smallest_networks(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[LearningReport] = []
    depths: list[int | None] = []
    learn, invert = RowModel.learn, RowModel.invert

    def noted(self: RowModel, *arguments: object) -> LearningReport:
        reports.append(learn(self, *arguments))  # type: ignore[arg-type]
        return reports[-1]

    def inverted(self: RowModel, rows: torch.Tensor, *, depth: int) -> torch.Tensor:
        depths.append(depth)
        return invert(self, rows, depth=depth)

    monkeypatch.setattr(RowModel, "learn", noted)
    monkeypatch.setattr(RowModel, "invert", inverted)
    before = torch.random.get_rng_state()
    watching = Noting()
    with observed_by(watching):
        rehearse(options_of(model), SLOT, allgather=lambda number: [number])
    assert torch.equal(before, torch.random.get_rng_state()), "a stream was touched"
    assert not watching.steps, "a profile would show it as the run's server"
    (report,) = reports
    assert report.rows == ROWS and depths == [2]
    assert max(report.parameters.values()) < 1_000_000
    assert {len(losses) for losses in report.losses.values()} == {STEPS}


def test_a_rehearsal_that_diverges_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def diverging(self: RowModel, *arguments: object) -> None:
        raise Diverged("the denoiser")

    monkeypatch.setattr(RowModel, "learn", diverging)
    rehearse(options_of("span"), SLOT, allgather=lambda number: [number])
