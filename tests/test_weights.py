"""What clients weigh: their samples, or all alike, with every method."""

from dataclasses import fields
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from hpcfed import methods
from hpcfed.cli import parse_run
from hpcfed.clients.placement import Clients
from hpcfed.errors import UserError
from hpcfed.federation import cohort as cohorts
from hpcfed.federation.cohort import (
    Cohort,
    Sent,
    all_finite,
    client_weights,
    count_excluded,
    divergence,
    finite_members,
    lost_clients,
    lost_model,
    member_rows,
    shares,
    update_norms,
    without_diverged,
)
from hpcfed.federation.participants import Participants
from hpcfed.options import check
from hpcfed.runtime import randomness
from hpcfed.runtime.launcher import Launch
from hpcfed.runtime.timer import Timer
from tests.federations import assembled, rounds

ALONE = {"local": "send nothing", "fedasync": "one upload at a time"}
"""Methods that weigh nothing against anything, and what they say of it."""
WEIGHING = [name for name in methods.names() if name not in ALONE]
SHORT: dict[str, dict[str, Any]] = {
    "apfl": {"local_steps": 2},
    "fedbuff": {"buffer": 4},
    "fedlg": {"clusters": 1},
    "fedlp": {"clusters": 1, "send_probability": 0.8},
    "fedlps": {"model": "cnn-bn"},
    "fedfina": {"shared_layers": "fc1"},
    "genefl": {"gene_layers": 2},
    "genfed": {"rho_max": 3, "schedule": "constant"},
    "genfedau": {"rho_max": 3, "schedule": "constant"},
    "genfedumf": {"rho_max": 3, "schedule": "constant"},
    "parfed": {"shared_layers": "fc1"},
    "per-fedavg": {"local_steps": 2},
    "pfedhn": {"inner_steps": 2, "hn_hidden": 7},
    "pfedme": {"local_rounds": 1},
    "scaffold": {"local_steps": 2},
}
UNIFORM = {"fedlp", "fedlps", "fedlg", "genefl", "fedau", "genfedau", "pfedhn"}
"""Methods whose own weights are uniform; those of all others are by samples."""


def state_after(method: str, weights: str, **values: Any) -> list[Tensor]:
    """Return the tensors of the state after two rounds."""
    usual = {"epochs": 1, "clients": 5, "participation": 0.8}
    if "local_steps" in SHORT.get(method, {}) or method in ("pfedme", "pfedhn"):
        del usual["epochs"]
    options = {**usual, **SHORT.get(method, {}), **values}
    s = assembled(method=method, weights=weights, **options)
    *_, (_, state) = rounds(s, 2)
    found = [getattr(state, field.name) for field in fields(state)]
    return [tensor.double() for tensor in found if tensor.numel()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(
        torch.allclose(a, b, rtol=1e-10, atol=1e-12)
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("method", WEIGHING)
def test_both_weights_act_and_one_is_the_methods_own(method: str) -> None:
    uneven = {"alpha": 0.3, "batch_size": 100}
    by_samples = state_after(method, "samples", **uneven)
    uniform = state_after(method, "uniform", **uneven)
    own = state_after(method, "method", **uneven)
    assert not same(by_samples, uniform)
    assert same(own, uniform if method in UNIFORM else by_samples)


@pytest.mark.parametrize("method", WEIGHING)
def test_clients_of_equal_sizes_weigh_alike_either_way(method: str) -> None:
    """Sums by hand that forget the option, or use it twice, would differ."""
    even = {
        "dataset": "synthetic", "synthetic_shape": "1x8x8", "train_per_client": 30,
        "partition": "iid", "batch_size": 30,
    }  # fmt: skip
    by_samples = state_after(method, "samples", **even)
    assert same(by_samples, state_after(method, "uniform", **even))


def test_a_cohort_weighs_alike_but_for_clients_without_data() -> None:
    s = assembled(clients=20, alpha=0.01, weights="uniform")
    fed = s.federation
    holders = fed.sizes > 0
    assert 0 < holders.sum() < 20
    np.testing.assert_array_equal(fed.weights, holders)
    everyone = fed.everyone(0)
    np.testing.assert_allclose(everyone.weights, holders / holders.sum(), rtol=1e-15)
    cohort = fed.sample(0)
    assert fed.weight_of(cohort) == 1.0
    assert fed.weight_of(cohort.only(np.arange(2))[1]) == 2 / holders.sum()


@pytest.mark.parametrize("rule", ["multi-krum", "sign-majority"])
def test_rules_that_average_weigh_what_they_keep(rule: str) -> None:
    values = {"clients": 6, "alpha": 0.3, "aggregation": rule, "batch_size": 100}
    by_samples = state_after("fedavg", "samples", **values)
    assert not same(by_samples, state_after("fedavg", "uniform", **values))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("local --weights uniform", ALONE["local"]),
        ("fedasync --weights samples", ALONE["fedasync"]),
        ("pfedhn --hn-combine turns --weights samples", "one client at a time"),
        (
            "fedavg --privacy local --noise-multiplier 1 --weights samples",
            "private clients have equal weights",
        ),
        ("fedavg --weights sizes", "'method', 'samples' or 'uniform'"),
        ("fedavg --weighting uniform", "did you mean '--weights'?"),
    ],
)
def test_what_cannot_act_is_refused_in_one_line(words: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        check(parse_run(["--method", *words.split()]), Launch("none", 0, 1))
    assert said in str(refused.value) and "\n" not in str(refused.value)


# Cohorts, and who is in them


def four(**values: Any) -> Cohort:
    """Clients 1, 4, 6 and 9 on two ranks, seen from the first, which has 1 and 6 as its
    clients 0 and 2.
    """
    return Cohort(
        round=2,
        clients=np.array([1, 4, 6, 9]),
        weights=np.array([0.1, 0.2, 0.3, 0.4]),
        here=np.array([0, 2]),
        chosen=np.array([0, 2]),
        per_rank=[np.array([0, 2]), np.array([1, 3])],
        **values,
    )


def test_a_part_of_a_cohort_knows_who_is_where() -> None:
    cohort = four()
    assert cohort.ranks().tolist() == [0, 1, 0, 1]
    assert cohort.others(4).tolist() == [1, 3]
    assert cohort.equally().weights.tolist() == [0.25] * 4
    rows, whole = cohort.only(np.arange(4))
    assert rows.tolist() == [0, 1] and whole is cohort
    rows, part = cohort.only(np.array([1, 2]))
    assert rows.tolist() == [1], "of this rank's members, 6 is the second"
    assert part.clients.tolist() == [4, 6] and part.weights.tolist() == [0.4, 0.6]
    assert part.here.tolist() == [2] and part.chosen.tolist() == [1]
    assert [own.tolist() for own in part.per_rank] == [[1], [0]]
    assert part.round == 2 and part.ranks().tolist() == [1, 0]
    assert part.log is cohort.log and part.in_flight is cohort.in_flight
    own = torch.tensor([[1.0], [6.0]])
    some, fewer = member_rows(own, cohort, np.array([1, 2]))
    assert some.tolist() == [[6.0]] and fewer.clients.tolist() == [4, 6]
    all_rows, same_cohort = member_rows(own, cohort, np.arange(4))
    assert all_rows is own and same_cohort is cohort


def test_shares_and_relative_weights_by_hand() -> None:
    sizes = np.array([0, 1, 3])
    assert shares(sizes).tolist() == [0, 0.25, 0.75]
    assert shares(np.zeros(2)).tolist() == [0.5, 0.5]
    assert shares(np.zeros(0)).tolist() == []
    assert client_weights(sizes, "samples").tolist() == [0, 1, 3]
    assert client_weights(sizes, "uniform").tolist() == [0, 1, 1]


@pytest.mark.parametrize("block", [1, 6, 7, 2**24])
@pytest.mark.parametrize("parts", [False, True])
def test_norms_of_updates_however_many_are_computed_at_a_time(
    block: int, parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cohorts, "UPDATE_NUMBERS", block)
    monkeypatch.setattr(cohorts, "measures", lambda *_: False)
    draw = torch.Generator().manual_seed(0)
    start, rows = torch.randn(2, 5, 3, generator=draw, dtype=torch.float64)
    groups, group_of = torch.rand(5, 2, generator=draw) < 0.5, torch.tensor([0, 1, 1])
    sent = Sent(groups, group_of) if parts else None
    found = update_norms(start, rows, sent)
    for at in range(5):
        update = (rows - start)[at]
        if parts:
            update = torch.stack(
                [update[c] * groups[at, group_of[c]] for c in range(3)]
            )
        assert float(found[at]) == pytest.approx(float(update.square().sum().sqrt()))
    assert update_norms(start[:0], rows[:0], None).shape == (0,)
    assert update_norms(start[:, :0], rows[:, :0], None).tolist() == [0.0] * 5


def test_a_sum_that_overflows_is_of_finite_numbers() -> None:
    for numbers, finite in (
        ([3e38, 3e38], True), ([1.0, torch.nan], False), ([torch.inf, 0.0], False), ([1.0], True),
        ([3e38, 3e38, torch.nan], False),
    ):  # fmt: skip
        assert all_finite(torch.tensor(numbers)) == finite


def test_updates_that_diverged_are_named_and_counted() -> None:
    s = assembled(clients=4)
    cohort = s.federation.sample(2)
    rows = torch.zeros(4, 3)
    rows[1, 2], rows[3, 0] = torch.nan, torch.inf
    found = finite_members(rows, cohort, s.collectives, stop=False)
    assert found.tolist() == [0, 2] and cohort.log.excluded == {1, 3}
    with pytest.raises(ArithmeticError, match="not finite, of clients 1, 3 in round 3"):
        finite_members(rows, s.federation.sample(2), s.collectives, stop=True)
    fine = s.federation.sample(2)
    rows = rows.nan_to_num(posinf=0)
    assert finite_members(rows, fine, s.collectives, stop=True).tolist() == [0, 1, 2, 3]
    with pytest.raises(ArithmeticError, match="of clients 0, 1, 2, 3 in"):
        finite_members(rows + torch.nan, fine, s.collectives, stop=False)
    assert not fine.log.excluded


def test_clients_that_diverged_go_back_to_where_they_were() -> None:
    ids, before = np.array([3, 5, 8]), torch.ones(3, 2)
    rows = torch.tensor([[2.0, 2], [torch.nan, 2], [2, 2]])
    cohort = four()
    found = without_diverged(rows, before, ids, cohort, stop=False)
    assert found.tolist() == [[2, 2], [1, 1], [2, 2]] and cohort.log.excluded == {5}
    assert without_diverged(before, rows, ids, cohort, stop=True) is before
    with pytest.raises(ArithmeticError, match="of clients 5 in round 3"):
        without_diverged(rows, before, ids, four(), stop=True)
    with pytest.raises(ArithmeticError, match="of clients 5 in round 3"):
        without_diverged(rows, rows, ids, four(), stop=False)
    s = assembled(clients=4)
    count_excluded({7, 2}, cohort, s.collectives, stop=False)
    assert cohort.log.excluded == {2, 5, 7}
    count_excluded(set(), cohort, s.collectives, stop=True)
    with pytest.raises(ArithmeticError, match="of clients 2, 7 in round 3"):
        count_excluded({7, 2}, four(), s.collectives, stop=True)


def test_a_message_names_eight_clients() -> None:
    eight = "0, 1, 2, 3, 4, 5, 6, 7"
    assert f"of clients {eight} in round 1;" in str(divergence(np.arange(8), 0))
    assert f"of clients {eight}, … in round 5;" in str(divergence(np.arange(9), 4))
    assert "in round 1;" in str(lost_model(0))
    assert "models whose loss is not finite, of clients 3 in" in str(
        lost_clients(np.array([3]), 0)
    )


def second_of_two(**values: Any) -> Participants:
    """What the second of two ranks knows of six clients; it has 1, 3 and 4."""
    settings = assembled(clients=6, **values).settings
    world: Any = SimpleNamespace(role_rank=1)
    clients = Clients(
        np.array([0, 1, 0, 1, 1, 0]), np.array([4, 0, 2, 1, 3, 0]), np.ones(6, int)
    )
    return Participants(
        settings.config,
        clients,
        weighing="samples",
        collectives=cast(Any, SimpleNamespace(size=2, world=world)),
        timer=Timer(torch.device("cpu")),
    )


def test_each_rank_knows_where_all_members_are() -> None:
    members = second_of_two()
    assert members.num_holders == 4 and members.clients.tolist() == [1, 3, 4]
    cohort = members.invite(7, np.array([0, 1, 3, 4]))
    assert members.round == 7 and cohort.log is members.log
    assert cohort.log.cohort_size == 3 and cohort.clients.tolist() == [0, 3, 4]
    assert cohort.weights.tolist() == [0.5, 0.125, 0.375]
    assert [own.tolist() for own in cohort.per_rank] == [[0], [1, 2]]
    assert cohort.chosen.tolist() == [1, 2] and cohort.here.tolist() == [1, 2]
    assert members.weight_of(cohort) == 0.8 and members.num_holders_in(cohort) == 3
    cohort.weights[0] = cohort.here[0] = cohort.chosen[0] = cohort.per_rank[0][0] = 9
    again = members.instead_of(cohort, np.array([0, 3, 4]))
    assert again.weights.tolist() == [0.5, 0.125, 0.375] and again.log is cohort.log
    assert again.here.tolist() == [1, 2] and again.chosen.tolist() == [1, 2]
    assert again.per_rank[0].tolist() == [0] and again.in_flight is cohort.in_flight
    others = members.instead_of(cohort, np.array([2, 4]))
    assert others.here.tolist() == [2] and others.chosen.tolist() == [1]
    everyone = members.everyone(8)
    assert members.round == 8 and everyone.log is members.log is not cohort.log
    assert everyone.clients.tolist() == list(range(6)) and everyone.log.cohort_size == 0
    moved = Clients(np.array([1, 0, 0, 1, 0, 1]), members.sizes, np.ones(6, int))
    members.relocated(moved)
    assert members.clients.tolist() == [0, 3, 5]
    assert members.everyone(8).here.tolist() == [0, 1, 2]
    assert members.everyone(8).chosen.tolist() == [0, 3, 5]


def test_a_cohort_without_data_stays_as_drawn_and_counts_for_nothing() -> None:
    members = second_of_two()
    cohort = members.invite(0, np.array([1, 5]))
    assert cohort.clients.tolist() == [1, 5] and cohort.log.cohort_size == 0
    assert members.weight_of(cohort) == 0 and cohort.weights.tolist() == [0.5, 0.5]
    members.weights = np.zeros(6)
    assert members.weight_of(cohort) == 0.0


def test_cohorts_are_drawn_from_the_pool_and_ascend() -> None:
    members = second_of_two(cohort=3)
    members.sizes = np.ones(6, int)
    drawn = []
    for round in range(60):
        pool = np.array([0, 2, 4, 5]) if round % 2 else None
        cohort = members.sample(round, pool=pool)
        assert len(cohort.clients) == 3 and (np.diff(cohort.clients) > 0).all()
        assert pool is None or set(cohort.clients) <= set(pool.tolist())
        drawn += cohort.clients.tolist() if pool is None else []
        chosen = np.arange(6) if pool is None else pool
        numbers = randomness.generator(members.config.seed, "cohort", round)
        picked = numbers.choice(len(chosen), 3, replace=False)
        assert cohort.clients.tolist() == sorted(chosen[picked].tolist())
    assert set(drawn) == set(range(6))
    for few in ([1, 2], [1, 2, 5]):
        assert members.sample(0, pool=np.array(few)).clients.tolist() == few


def test_poisson_draws_each_with_its_share_and_never_nobody() -> None:
    members = second_of_two(cohort=2, sampling="poisson")
    members.sizes = np.ones(6, int)
    sizes = []
    for round in range(40):
        cohort = members.sample(round)
        numbers = randomness.generator(members.config.seed, "cohort", round)
        expected: list[int] = []
        while not expected:
            expected = np.flatnonzero(numbers.random(6) < 2 / 6).tolist()
        assert cohort.clients.tolist() == expected
        sizes.append(len(expected))
    assert len(set(sizes)) > 2
