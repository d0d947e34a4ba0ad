"""What clients weigh: their samples, or all alike, with every method."""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hpcfed import methods
from hpcfed.cli import parse_run
from hpcfed.errors import UserError
from hpcfed.options import check
from hpcfed.runtime.launcher import Launch
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
