"""Numbers that are not finite end a run as failed, also where they come with its last
round, after which no local training would meet them.
"""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hpcfed.experiment.failures import Failed, tell_failure
from hpcfed.federation.cohort import all_finite
from hpcfed.results.stored import read_run
from tests.runs import flags, started

LOST = """
import torch
from hpcfed.methods import fedavg
from hpcfed.methods.fedavg import State, init, global_row, welcome, round

def personal(fed, state, members):
    rows = fedavg.personal(fed, state, members).clone()
    rows[fed.clients[members] == 1] = torch.nan
    return rows
"""


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize(
    "words",
    [
        "--method fedavgm --server-lr 1e38",
        "--method fedavg --privacy central --clip-norm 1 --noise-multiplier 1e38 "
        "--sampling fixed --accountant rdp",
    ],
)
def test_a_model_that_diverges_at_the_end_is_none(
    words: str, rounds: int, tmp_path: Path
) -> None:
    """However many rounds there are, it is the same failure with the same advice."""
    common = flags(clients=3, rounds=rounds, epochs=1, out=tmp_path / "run")
    with pytest.raises(Failed):
        started(*common, *words.split())
    record = read_run(tmp_path / "run")
    assert record.status == "failed"
    assert re.search(r"not finite.* in round .* try a smaller --lr", record.error)
    assert not (tmp_path / "run/model.npz").exists()


def test_the_record_of_a_run_that_diverges_can_be_read(tmp_path: Path) -> None:
    """In float64 an update is finite long after its norm has lost any meaning."""
    words = ["--method", "fedavgm", "--server-lr", 1e35, "--precision", "fp64"]
    common = flags(clients=3, rounds=2, epochs=1, model="mlp", out=tmp_path / "run")
    started(*common, *words)
    assert read_run(tmp_path / "run").rounds["update_norm"][1] > 1e30


def test_a_lost_connection_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rank that is left says it; the library's words stay in its file."""
    world: Any = SimpleNamespace(
        alone=False, rank=0, location=SimpleNamespace(host="node")
    )
    error = RuntimeError("[/pytorch/tcp/pair.cc:446] Connection reset by peer")
    tell_failure(world, "evaluate", [tmp_path], error)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "hpcfed: rank 0 on node failed in phase evaluate: the connection to another "
        "rank was lost: it has ended, or its host"
    )
    assert "pair.cc" in (tmp_path / "error-0.txt").read_text()


def test_a_folder_that_is_gone_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whereas a file of the user's own that is missing leads to a line of code."""
    world: Any = SimpleNamespace(
        alone=True, rank=0, location=SimpleNamespace(host="node")
    )
    for folder, is_ours in ((tmp_path / "gone", True), (tmp_path / "other", False)):
        with pytest.raises(FileNotFoundError) as raised:
            (folder / "run.h5").touch()
        tell_failure(world, "record", [tmp_path / "gone"], raised.value)
        said = capsys.readouterr().err
        assert "failed in phase record: FileNotFoundError" in said
        assert ("Traceback" not in said) is is_ours


def test_personal_rows_that_are_no_numbers_are_told(tmp_path: Path) -> None:
    (tmp_path / "lost.py").write_text(LOST)
    common = flags(clients=3, rounds=1, epochs=1, out=tmp_path / "run")
    with pytest.raises(Failed):
        started(*common, "--method", tmp_path / "lost.py")
    record = read_run(tmp_path / "run")
    assert record.status == "failed"
    assert "loss is not finite, of clients 1 in round 1" in record.error


def test_clients_without_test_data_have_lost_nothing(tmp_path: Path) -> None:
    """Their loss is 0 / 0, which says nothing about their rows."""
    common = flags(clients=60, rounds=1, epochs=1, alpha=0.01, out=tmp_path / "run")
    record = read_run(started(*common))
    assert record.status == "complete"
    assert np.isnan(record.last_client_accuracy).any()


def test_finite_rows_are_told_from_others_also_where_their_sum_overflows() -> None:
    big = torch.finfo(torch.float32).max
    assert all_finite(torch.tensor([1.0, -2.0]))
    assert all_finite(torch.tensor([big, big]))
    assert all_finite(torch.empty(0))
    for bad in (np.nan, np.inf, -np.inf):
        assert not all_finite(torch.tensor([1.0, bad]))
    assert not all_finite(torch.tensor([np.inf, -np.inf]))
