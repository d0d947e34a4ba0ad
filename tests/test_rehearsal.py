"""A learning from a few rows that loads what the first real one needs."""

import pytest
import torch

from hpcfed.server.options import ServerOptions
from hpcfed.server.rehearsal import ROWS, STEPS, rehearse
from hpcfed.server.training_plan import RankSlot


@pytest.mark.parametrize("model", ["p-diff", "span", "tokens"])
def test_it_learns_with_the_smallest_networks(model: str) -> None:
    # Networks that would take minutes, from a file that is not there.
    options = ServerOptions(
        server_model=model,  # type: ignore[arg-type]
        server="large",
        server_width=4096,
        server_depth=9,
        server_load="no-such-file.h5",
        server_engine="torch",
    )
    before = torch.random.get_rng_state()
    slot = RankSlot(torch.device("cpu"))
    report = rehearse(options, slot, allgather=lambda number: [number])
    assert torch.equal(before, torch.random.get_rng_state()), "a stream was touched"
    assert report.rows == ROWS
    assert max(report.parameters.values()) < 1_000_000
    assert {len(losses) for losses in report.losses.values()} == {STEPS}
