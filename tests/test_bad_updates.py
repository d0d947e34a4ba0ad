"""Updates that are not finite: every method leaves them out, or stops."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcfed import methods
from hpcfed.experiment.assemble import Setup
from hpcfed.experiment.run import run_setup
from hpcfed.federation.cohort import Sent
from hpcfed.results.stored import read_run
from tests.federations import assembled
from tests.small_runs import OWN, SMALL


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_update_is_left_out_and_counted(
    value: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The mean is that of the others, with their weights."""
    s = assembled(clients=4)
    fed = s.federation
    cohort = fed.sample(0)
    rows = torch.randn(4, 30, dtype=torch.float64)
    weights = torch.from_numpy(cohort.weights)
    torch.testing.assert_close(fed.mean(rows, cohort), weights @ rows)
    good = [0, 1, 3]
    expected = (weights[good] @ rows[good]) / weights[good].sum()
    rows[2, 7] = value
    torch.testing.assert_close(fed.mean(rows, cohort), expected)
    assert cohort.log.excluded == {2}
    strict = assembled(clients=4, on_bad_update="stop").federation
    with pytest.raises(ArithmeticError, match="of clients 2 in round 1"):
        strict.mean(rows, strict.sample(0))
    rows[:] = value
    with pytest.raises(ArithmeticError, match="of clients 0, 1, 2, 3"):
        fed.mean(rows, cohort)


def test_left_out_updates_are_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    s = assembled(clients=4, rounds=3)
    honest = s.federation.train

    def train(rows: torch.Tensor, cohort: Any, **how: Any) -> torch.Tensor:
        trained = honest(rows, cohort, **how)
        trained[1] = float("nan") if cohort.round == 1 else trained[1]
        return trained

    monkeypatch.setattr(s.federation, "train", train)
    run_setup(s, tmp_path, quiet=True)
    record = read_run(tmp_path)
    assert (
        record.rounds["excluded"].tolist() == [0, 1, 0]
        and record.last("accuracy") > 0.3
    )


MEETING: dict[str, dict[str, Any]] = {
    "fedbn": {"model": "cnn-bn"},
    "fedlps": {"model": "cnn-digits"},
    "fedlp": {"send_probability": 1.0},
}
"""Methods that are about layers which the mlp does not have, or whose clients may send
nothing at all.
"""


def with_bad_clients(
    method: str, monkeypatch: pytest.MonkeyPatch, first: int | None = 1, **options: Any
) -> Setup:
    """The first clients of every cohort, or all, end their training with NaN."""
    own = OWN.get(method, {}) | MEETING.get(method, {})
    s = assembled(**{**SMALL, "rounds": 3, "method": method, **own, **options})
    honest = s.federation.train

    def train(rows: torch.Tensor, cohort: Any, **how: Any) -> torch.Tensor:
        trained = honest(rows, cohort, **how).clone()
        trained[:first] = float("nan")
        return trained

    monkeypatch.setattr(s.federation, "train", train)
    return s


IN_ROUNDS = [
    name for name in methods.names() if not methods.load(name).Options.asynchronous
]
"""Methods whose uploads are those of the cohort; `test_asynchronous` has the others."""


@pytest.mark.parametrize("method", IN_ROUNDS)
def test_every_method_leaves_a_bad_update_out(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it stays in the state, and it counts once."""
    s = with_bad_clients(method, monkeypatch)
    fed, state = s.federation, s.method.init(s.federation)
    for round in range(3):
        cohort = fed.sample(round)
        state = s.method.round(fed, state, cohort)
        assert cohort.log.excluded == {cohort.clients[0]}
        for field in fields(state):
            value = getattr(state, field.name)
            assert torch.isfinite(value).all(), field.name


@pytest.mark.parametrize("method", methods.names())
def test_a_round_overwrites_only_the_fields_that_say_so(method: str) -> None:
    own = OWN.get(method, {}) | MEETING.get(method, {})
    s = assembled(**{**SMALL, "rounds": 3, "method": method, **own})
    fed, state = s.federation, s.method.init(s.federation)
    for round in range(2):
        before = {name: value.clone() for name, value in vars(state).items()}
        after = s.method.round(fed, state, fed.sample(round))
        for field in fields(state):
            if not field.metadata.get("in_place"):
                same = torch.equal(getattr(state, field.name), before[field.name])
                assert same, field.name
        state = after


@pytest.mark.parametrize("method", IN_ROUNDS)
def test_every_method_stops_at_a_bad_update_if_it_must(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = with_bad_clients(method, monkeypatch, on_bad_update="stop")
    fed = s.federation
    cohort = fed.sample(0)
    with pytest.raises(
        ArithmeticError, match=f"not finite, of clients {cohort.clients[0]} in round 1"
    ):
        s.method.round(fed, s.method.init(fed), cohort)


@pytest.mark.parametrize(
    "method", [name for name in methods.names() if name != "local"]
)
def test_no_method_goes_on_when_all_updates_are_bad(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = with_bad_clients(method, monkeypatch, first=None)
    with pytest.raises(
        ArithmeticError, match=r"not finite|no update of round 1 is finite"
    ):
        s.method.round(
            s.federation, s.method.init(s.federation), s.federation.sample(0)
        )


def test_a_bad_update_leaves_its_cluster_to_the_others() -> None:
    """Means of clusters are those of the other members; a cluster of bad updates alone
    stays as it was.
    """
    s = assembled(clients=5)
    fed = s.federation
    cohort, rows, previous = (
        fed.sample(0),
        torch.randn(5, 6, dtype=torch.float64),
        torch.randn(2, 6).double(),
    )
    weights, cluster = torch.from_numpy(cohort.weights), torch.tensor([0, 0, 1, 0, 1])
    rows[1, 3], rows[2], rows[4, 0] = float("inf"), float("nan"), float("nan")
    means, heard = fed.cluster_means(rows, cohort, cluster, previous)
    expected = (weights[[0, 3]] @ rows[[0, 3]]) / weights[[0, 3]].sum()
    torch.testing.assert_close(means, torch.stack([expected, previous[1]]))
    assert cohort.log.excluded == {1, 2, 4} and (heard > 0).flatten().tolist() == [
        True,
        False,
    ]


def test_what_is_not_sent_may_be_anything() -> None:
    s = assembled(clients=2)
    fed = s.federation
    rows = torch.tensor([[1.0, float("nan")], [3.0, 5.0]], dtype=torch.float64)
    sent = Sent(torch.tensor([[True, False], [True, True]]), torch.tensor([0, 1]))
    cohort = fed.sample(0).equally()
    means, _ = fed.cluster_means(
        rows, cohort, torch.zeros(2, dtype=torch.int64), rows.new_zeros(1, 2), sent
    )
    torch.testing.assert_close(means, torch.tensor([[2.0, 5.0]], dtype=torch.float64))
    assert not cohort.log.excluded
