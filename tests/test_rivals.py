"""Methods that papers compare with, against naive loops of their published rules, client
by client in plain torch.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcfed.cli import parse_run
from hpcfed.clients.job import Recipe
from hpcfed.errors import UserError
from hpcfed.experiment.assemble import Setup
from hpcfed.federation.log import RoundLog
from hpcfed.methods import load
from hpcfed.methods._steps import weights_by_age
from hpcfed.models.networks import build
from hpcfed.options import check
from hpcfed.runtime import randomness
from hpcfed.runtime import world as worlds
from hpcfed.runtime.launcher import Launch
from tests.federations import HARSH, assembled, flat, initial, rounds, traffic
from tests.naive import batches, naive
from tests.rival_ranks import rows_after
from tests.runs import UNEVEN, assert_same_run, flags, mistake, started

UNEVEN_CLIENTS = HARSH | {"clients": 7, "alpha": 0.3, "lr": 0.02}
SERVER_OPTIMISERS = ["fedavgm", "fedadagrad", "fedadam", "fedyogi"]
OPTIONS: dict[str, dict[str, Any]] = {
    "fedavgm": {"server_lr": 0.7},
    "fedadagrad": {"server_momentum": 0.3, "server_tau": 0.01},
    "fedadam": {"server_beta2": 0.8, "weights": "uniform"},
    "fedyogi": {"server_lr": 0.2},
    "fedprox": {"prox_mu": 0.5},
    "fednova": {},
    "scaffold": {"server_lr": 0.8, "local_steps": 3},
    "feddyn": {"dyn_alpha": 0.3, "weights": "uniform"},
    "ditto": {"ditto_lambda": 0.7},
    "pfedme": {"pfedme_steps": 3, "local_rounds": 2, "pfedme_beta": 0.6},
    "apfl": {"local_steps": 3, "apfl_alpha": 0.3, "apfl_adaptive": True},
    "per-fedavg": {"local_steps": 3, "adapt_lr": 0.03},
}
"""Every method of this file, with options that no default has."""
Expected = dict[str, Tensor]
"""What fields of a state should be; owned ones have a row per client."""


class Loop:
    """A federation as anyone would write it: one client after the other, in torch."""

    def __init__(self, s: Setup) -> None:
        self.s = s
        self.fed = s.federation
        self.o: Any = s.settings.options
        self.sizes = s.federation.sizes
        self.w = flat(initial(s))

    def cohort(self, round: int) -> dict[int, float]:
        """Clients of a round, each with its share of the cohort's samples, or 1 / |S|."""
        clients = self.fed.sample(round).clients.tolist()
        if self.s.settings.config.weights == "uniform":
            return dict.fromkeys(clients, 1 / len(clients))
        total = self.sizes[clients].sum()
        return {client: self.sizes[client] / total for client in clients}

    def share(self, client: int) -> float:
        """A client's share of all samples, or 1 / N."""
        if self.s.settings.config.weights == "uniform":
            return 1 / len(self.sizes)
        return float(self.sizes[client] / self.sizes.sum())

    def recipe(self, round: int, **change: Any) -> Recipe:
        c = self.s.settings.config
        usual = {
            "epochs": c.epochs,
            "batch_size": c.batch_size,
            "lr": c.lr * c.lr_decay**round,
            "momentum": c.momentum,
            "weight_decay": c.weight_decay,
            "clip": c.clip,
            "nesterov": c.nesterov,
        }
        return Recipe(**usual | change)

    def key(self, client: int, round: int, purpose: str) -> Tensor:
        seed, ids = self.s.settings.config.seed, torch.tensor([client])
        return randomness.client_keys(seed, purpose, round, ids)[0]

    def train(
        self,
        row: Tensor,
        client: int,
        round: int,
        recipe: Recipe | None = None,
        *,
        purpose: str = "training",
        **terms: Any,
    ) -> Tensor:
        """Return a client's row after its local training."""
        network = _network(row)
        key = self.key(client, round, purpose)
        recipe = recipe or self.recipe(round)
        data = self.fed.training.train_data
        return _row(naive(network, data, client, recipe, key, **terms))

    def gradient(self, row: Tensor, client: int, round: int, phase: int) -> Tensor:
        """Return the gradient that a step of SGD follows: clipped, with decay."""
        data, recipe = self.fed.training.train_data, self.recipe(round, steps=1)
        purpose = f"training, phase {phase}" if phase else "training"
        (batch,) = batches(data, client, recipe, self.key(client, round, purpose))
        network = _network(row)
        loss = F.cross_entropy(network(data.inputs[batch]), data.targets[batch])
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), recipe.clip or 1e9)
        gradient = torch.cat([p.grad.flatten() for p in network.parameters()])
        return gradient + recipe.weight_decay * row

    def whole_gradient(self, row: Tensor, client: int) -> Tensor:
        """Return ∇f(row) of all data of a client at once; decay is a part of f."""
        data, network = self.fed.training.train_data, _network(row)
        own = data.index[client, : self.sizes[client]]
        F.cross_entropy(network(data.inputs[own]), data.targets[own]).backward()
        gradient = torch.cat([p.grad.flatten() for p in network.parameters()])
        return gradient + self.s.settings.config.weight_decay * row

    def hessian_product(
        self, row: Tensor, v: Tensor, client: int, round: int, phase: int
    ) -> Tensor:
        """Return ∇²f(row) v by autograd, exactly; decay is a part of f."""
        data, recipe = self.fed.training.train_data, self.recipe(round, steps=1)
        key = self.key(client, round, f"training, phase {phase}")
        (batch,) = batches(data, client, recipe, key)
        network = _network(row)
        loss = F.cross_entropy(network(data.inputs[batch]), data.targets[batch])
        parameters = list(network.parameters())
        slopes = torch.autograd.grad(loss, parameters, create_graph=True)
        along = torch.cat([slope.flatten() for slope in slopes]) @ v
        products = torch.autograd.grad(along, parameters)
        product = torch.cat([part.flatten() for part in products])
        return product + recipe.weight_decay * v

    def steps(self, client: int, recipe: Recipe) -> int:
        data = self.fed.training.train_data
        key = torch.tensor(0)
        return len(list(batches(data, client, recipe, key)))


def _network(row: Tensor) -> nn.Module:
    network = build("mlp", shape=(1, 8, 8), classes=10, seed=0).double()
    nn.utils.vector_to_parameters(row.clone(), network.parameters())
    return network


def _row(network: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(network.parameters()).detach()


def weight_of_steps(steps: int, recipe: Recipe, mu: float = 0.0) -> float:
    """‖a‖₁: torch's SGD on losses ⟨gₖ, θ⟩ + μ/2 ‖θ‖² from θ = 0, with a unit vector for
    every gₖ, ends at −η a.
    """
    theta = nn.Parameter(torch.zeros(steps, dtype=torch.float64))
    optimiser = torch.optim.SGD([theta], lr=recipe.lr, momentum=recipe.momentum, nesterov=recipe.nesterov)  # fmt: skip
    for k in range(steps):
        optimiser.zero_grad()
        (theta[k] + mu / 2 * theta.square().sum()).backward()
        optimiser.step()
    return float(theta.detach().abs().sum()) / recipe.lr


def server_rate(loop: Loop, round: int) -> float:
    """η_g of a round, by hand."""
    o, rounds = loop.o, loop.s.settings.config.rounds
    lowest = o.server_lr_min
    falling = (1 + np.cos(np.pi * round / rounds)) / 2
    drops = round // (o.server_lr_step_size or 1)
    rate = {
        "constant": o.server_lr * o.server_lr_decay**round,
        "warmup": o.server_lr * min(1, (round + 1) / (o.server_lr_warmup or 1)),
        "cosine": lowest + (o.server_lr - lowest) * falling,
        "step": o.server_lr * o.server_lr_step_factor**drops,
    }
    return float(rate[o.server_lr_schedule])


def by_momentum(
    loop: Loop, velocity: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the velocity and the direction of torch.optim.SGD."""
    c = loop.s.settings.config
    velocity = c.momentum * velocity + gradient
    return velocity, gradient + c.momentum * velocity if c.nesterov else velocity


def mean_update(loop: Loop, round: int) -> Tensor:
    total = torch.zeros_like(loop.w)
    for client, weight in loop.cohort(round).items():
        total += weight * (loop.train(loop.w, client, round) - loop.w)
    return total


def server_optimiser(loop: Loop, method: str, count: int) -> Iterator[Expected]:
    o = loop.o
    m, v = torch.zeros_like(loop.w), torch.full_like(loop.w, getattr(o, "server_tau", 0) ** 2)  # fmt: skip
    for round in range(count):
        delta = mean_update(loop, round)
        if method == "fedavgm":
            m = o.server_momentum * m + delta
            loop.w = loop.w + server_rate(loop, round) * m
            yield {"w": loop.w, "velocity": m}
            continue
        m = o.server_momentum * m + (1 - o.server_momentum) * delta
        if method == "fedadagrad":
            v = v + delta**2
        elif method == "fedadam":
            v = o.server_beta2 * v + (1 - o.server_beta2) * delta**2
        else:
            v = v - (1 - o.server_beta2) * delta**2 * torch.sign(v - delta**2)
        loop.w = loop.w + server_rate(loop, round) * m / (v.sqrt() + o.server_tau)
        yield {"w": loop.w, "m": m, "v": v}


def fedprox(loop: Loop, method: str, count: int) -> Iterator[Expected]:
    for round in range(count):
        total = torch.zeros_like(loop.w)
        for client, weight in loop.cohort(round).items():
            near = {"squared": loop.o.prox_mu, "reference": loop.w}
            total += weight * loop.train(loop.w, client, round, **near)
        loop.w = total
        yield {"w": loop.w}


def fednova(loop: Loop, method: str, count: int) -> Iterator[Expected]:
    for round in range(count):
        recipe = loop.recipe(round)
        tau_eff, direction = 0.0, torch.zeros_like(loop.w)
        for client, weight in loop.cohort(round).items():
            steps = loop.steps(client, recipe)
            norm = weight_of_steps(steps, recipe, loop.o.prox_mu)
            near = {"squared": loop.o.prox_mu, "reference": loop.w}
            change = loop.train(loop.w, client, round, **near) - loop.w
            direction += weight * change / norm
            tau_eff += weight * norm
        loop.w = loop.w + tau_eff * direction
        yield {"w": loop.w}


def scaffold(loop: Loop, method: str, count: int) -> Iterator[Expected]:
    c, own = torch.zeros_like(loop.w), torch.zeros(len(loop.sizes), len(loop.w)).double()  # fmt: skip
    for round in range(count):
        recipe = loop.recipe(round, epochs=0, steps=loop.o.local_steps)
        step, change = torch.zeros_like(loop.w), torch.zeros_like(c)
        norm = weight_of_steps(recipe.steps, recipe)
        for client, weight in loop.cohort(round).items():
            correction = c - own[client]
            y = loop.train(loop.w, client, round, recipe, correction=correction)
            plus = own[client] - c + (loop.w - y) / (norm * recipe.lr)
            if loop.o.variates == "gradient":
                plus = loop.whole_gradient(loop.w, client)
            step += weight * (y - loop.w)
            change += loop.share(client) * (plus - own[client])
            own[client] = plus
        loop.w = loop.w + server_rate(loop, round) * step
        c = c + change
        yield {"w": loop.w, "c": c, "own": own}


def feddyn(loop: Loop, method: str, count: int) -> Iterator[Expected]:
    alpha = loop.o.dyn_alpha
    h, own = torch.zeros_like(loop.w), torch.zeros(len(loop.sizes), len(loop.w)).double()  # fmt: skip
    for round in range(count):
        mean, change = torch.zeros_like(loop.w), torch.zeros_like(h)
        for client, weight in loop.cohort(round).items():
            terms = {"squared": alpha, "reference": loop.w, "correction": -own[client]}
            y = loop.train(loop.w, client, round, **terms)
            own[client] -= alpha * (y - loop.w)
            mean += weight * y
            change += loop.share(client) * (y - loop.w)
        h = h - alpha * change
        loop.w = mean - h / alpha
        yield {"w": loop.w, "h": h, "own": own}


def ditto(loop: Loop, method: str, count: int) -> Iterator[Expected]:
    v = loop.w.repeat(len(loop.sizes), 1)
    for round in range(count):
        total = torch.zeros_like(loop.w)
        for client, weight in loop.cohort(round).items():
            total += weight * loop.train(loop.w, client, round)
            near = {"squared": loop.o.ditto_lambda, "reference": loop.w}
            v[client] = loop.train(
                v[client], client, round, purpose="fine-tuning", **near
            )
        loop.w = total
        yield {"w": loop.w, "v": v, "personal": v}


def pfedme(loop: Loop, method: str, count: int) -> Iterator[Expected]:
    o, personal = loop.o, loop.w.repeat(len(loop.sizes), 1)
    for round in range(count):
        k = o.pfedme_steps
        recipe = loop.recipe(round, epochs=0, steps=k, repeat=k)
        total = torch.zeros_like(loop.w)
        for client, weight in loop.cohort(round).items():
            own = theta = loop.w
            for number in range(o.local_rounds):
                purpose = f"training, phase {number}" if number else "training"
                near = {"squared": o.pfedme_lambda, "reference": own}
                theta = loop.train(
                    theta, client, round, recipe, purpose=purpose, **near
                )
                own = own - o.pfedme_lr * o.pfedme_lambda * (own - theta)
            personal[client] = theta
            total += weight * own
        loop.w = (1 - o.pfedme_beta) * loop.w + o.pfedme_beta * total
        yield {"w": loop.w, "theta": personal, "personal": personal}


def apfl(loop: Loop, method: str, count: int) -> Iterator[Expected]:
    o = loop.o
    v = loop.w.repeat(len(loop.sizes), 1)
    alpha = torch.full((len(loop.sizes), 1), o.apfl_alpha, dtype=torch.float64)
    for round in range(count):
        lr, total = loop.recipe(round).lr, torch.zeros_like(loop.w)
        for client, weight in loop.cohort(round).items():
            own, a = loop.w, alpha[client].clone()
            w_velocity = v_velocity = torch.zeros_like(own)
            for step in range(o.local_steps):
                mixed = a * v[client] + (1 - a) * own
                of_w = loop.gradient(own, client, round, step)
                of_mixed = loop.gradient(mixed, client, round, step)
                # All of step t from what there was at t − 1, α's gradient by α's chain
                # rule, v's by v's: v̄ = α v + (1 − α) w.
                slope_of_a = (v[client] - own) @ of_mixed
                slope_of_v = a * of_mixed
                w_velocity, w_way = by_momentum(loop, w_velocity, of_w)
                v_velocity, v_way = by_momentum(loop, v_velocity, slope_of_v)
                own = own - lr * w_way
                v[client] = v[client] - lr * v_way
                if o.apfl_adaptive and step == 0:
                    a = (a - lr * slope_of_a).clamp(0, 1)
            alpha[client] = a
            total += weight * own
        loop.w = total
        personal = alpha * v + (1 - alpha) * loop.w
        yield {"w": loop.w, "v": v, "alpha": alpha, "personal": personal}


def per_fedavg(loop: Loop, method: str, count: int) -> Iterator[Expected]:
    o = loop.o
    for round in range(count):
        lr, total = loop.recipe(round).lr, torch.zeros_like(loop.w)
        for client, weight in loop.cohort(round).items():
            own, velocity = loop.w, torch.zeros_like(loop.w)
            for step in range(o.local_steps):
                first = loop.gradient(own, client, round, 2 * step)
                ahead = own - o.adapt_lr * first
                way = loop.gradient(ahead, client, round, 2 * step + 1)
                if o.hessian == "difference":
                    phase = 2 * o.local_steps + step
                    product = loop.hessian_product(own, way, client, round, phase)
                    way = way - o.adapt_lr * product
                velocity, way = by_momentum(loop, velocity, way)
                own = own - lr * way
            total += weight * own
        loop.w = total
        yield {"w": loop.w}


Rule = Callable[[Loop, str, int], Iterator[Expected]]
RULES: dict[str, Rule] = {
    **dict.fromkeys(SERVER_OPTIMISERS, server_optimiser),
    "fedprox": fedprox,
    "fednova": fednova,
    "scaffold": scaffold,
    "feddyn": feddyn,
    "ditto": ditto,
    "pfedme": pfedme,
    "apfl": apfl,
    "per-fedavg": per_fedavg,
}


@pytest.mark.parametrize("weights", ["samples", "uniform"])
@pytest.mark.parametrize("method", RULES)
def test_the_published_rule(method: str, weights: str) -> None:
    options = {**UNEVEN_CLIENTS, **OPTIONS[method], "weights": weights}
    s = assembled(method=method, **options)
    assert len(np.unique(s.federation.sizes)) > 3 and s.federation.sizes.all()
    loop = Loop(s)
    found = rounds(s, 3)
    for (_, state), expected in zip(found, RULES[method](loop, method, 3), strict=True):
        personal = s.method.personal(s.federation, state, np.arange(7))
        for name, value in expected.items():
            got = personal if name == "personal" else getattr(state, name)
            torch.testing.assert_close(
                got,
                value,
                rtol=1e-10,
                atol=1e-12,
                msg=lambda text, n=name: f"{n}: {text}",
            )


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("fednova", {"prox_mu": 0.7}),
    ("fednova", {"prox_mu": 0.7, "momentum": 0.0, "lr": 0.1}),
    ("fednova", {"nesterov": True}),
    ("fednova", {"nesterov": True, "prox_mu": 0.7}),
    ("scaffold", {"nesterov": True}),
    # Batches of which the last is short.
    ("scaffold", {"variates": "gradient", "batch_size": 25}),
    ("scaffold", {"server_lr_decay": 0.5}),
    ("fedavgm", {"server_lr_schedule": "warmup", "server_lr_warmup": 2, "rounds": 3}),
    ("fedadam", {"server_lr_schedule": "cosine", "server_lr_min": 0.001, "rounds": 3}),
    ("fedyogi", {"server_lr_schedule": "step", "server_lr_step_size": 1, "rounds": 3}),
    ("apfl", {"nesterov": True}),
    ("pfedme", {"nesterov": True}),
    ("per-fedavg", {"nesterov": True}),
    # Central differences are wrong by O(δ²), and by roundings of the order 1e-16 / δ. So
    # small a δ crosses no kink of ReLU, where there is no Hessian.
    ("per-fedavg", {"hessian": "difference", "hessian_delta": 1e-6, "adapt_lr": 0.3}),
]


@pytest.mark.parametrize(("method", "options"), VARIANTS)
def test_a_published_variant(method: str, options: dict[str, Any]) -> None:
    s = assembled(method=method, **{**UNEVEN_CLIENTS, **OPTIONS[method], **options})
    others = {"adapt_lr", "batch_size", "momentum", "lr"} & options.keys()
    usual_options = {name: options[name] for name in others}
    plain = assembled(method=method, **{**UNEVEN_CLIENTS, **OPTIONS[method], **usual_options})  # fmt: skip
    tolerance = 1e-6 if "hessian" in options else 1e-10
    expected = RULES[method](Loop(s), method, 2)
    for (_, state), (_, usual), wanted in zip(rounds(s, 2), rounds(plain, 2), expected, strict=True):  # fmt: skip
        for name in wanted.keys() - {"personal"}:
            got = getattr(state, name)
            torch.testing.assert_close(got, wanted[name], rtol=tolerance, atol=tolerance / 100, msg=lambda text, n=name: f"{n}: {text}")  # fmt: skip
        apart = float((state.w - usual.w).norm() / usual.w.norm())
    assert apart > 1e-5, "the tolerance would hide what the option does"


def test_fednovas_steps_weigh_as_the_paper_has_it() -> None:
    """a = [(1 − ημ)^(τ−1), …, 1] without momentum, and its sum in closed form."""
    recipe = Recipe(1, 10, lr=0.1)
    ages = weights_by_age(recipe, 5, mu=2.0)
    np.testing.assert_allclose(ages, [0.8**k for k in range(5)], rtol=1e-14)
    plain = weights_by_age(Recipe(1, 10, lr=0.1, momentum=0.9), 4, mu=0.0)
    np.testing.assert_allclose(plain, [(1 - 0.9**m) / 0.1 for m in (1, 2, 3, 4)], rtol=1e-13)  # fmt: skip


def test_fednova_counts_the_steps_of_finite_updates_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    s = assembled(method="fednova", **UNEVEN_CLIENTS)
    fed, train, loop = s.federation, s.federation.train, Loop(s)

    def spoilt(rows: Tensor, cohort: Any, **how: Any) -> Tensor:
        trained = train(rows, cohort, **how).clone()
        trained[0] = float("nan")
        return trained

    monkeypatch.setattr(fed, "train", spoilt)
    cohort = fed.sample(0)
    state = s.method.round(fed, s.method.init(fed), cohort)
    (bad,) = cohort.log.excluded
    shares = loop.cohort(0)
    lost = shares.pop(bad)
    left = {client: share / (1 - lost) for client, share in shares.items()}
    monkeypatch.setattr(loop, "cohort", lambda round: left)
    (expected,) = fednova(loop, "fednova", 1)
    torch.testing.assert_close(state.w, expected["w"], rtol=1e-9, atol=1e-12)


def test_scaffolds_variates_are_mean_gradients_along_the_steps() -> None:
    """By plain SGD the mean, by momentum each gradient as often as it comes back."""
    for momentum in (0.0, 0.6):
        s = assembled(method="scaffold", clients=3, momentum=momentum, local_steps=4)
        fed, loop = s.federation, Loop(s)
        state = s.method.round(fed, s.method.init(fed), fed.sample(0))
        for client in range(3):
            recipe = loop.recipe(0, epochs=0, steps=4)
            order = list(batches(fed.training.train_data, client, recipe, loop.key(client, 0, "training")))  # fmt: skip
            row, velocity, total, weight = loop.w, torch.zeros_like(loop.w), 0, 0.0
            for k, batch in enumerate(order):
                network = _network(row)
                data = fed.training.train_data
                F.cross_entropy(network(data.inputs[batch]), data.targets[batch]).backward()  # fmt: skip
                gradient = torch.cat([p.grad.flatten() for p in network.parameters()])
                comes_back = sum(momentum**j for j in range(4 - k))
                total, weight = total + comes_back * gradient, weight + comes_back
                velocity = momentum * velocity + gradient
                row = row - recipe.lr * velocity
            torch.testing.assert_close(state.own[client], total / weight, rtol=1e-8, atol=1e-12)  # fmt: skip


@pytest.mark.parametrize("weights", ["samples", "uniform"])
@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize(("method", "field"), [("scaffold", "c"), ("feddyn", "h")])
def test_the_servers_variate_is_the_mean_of_all_clients(
    method: str, field: str, bad: int, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By weights, over those that were never sampled too, and where some diverge."""
    options = {**UNEVEN_CLIENTS, **OPTIONS[method], "weights": weights}
    s = assembled(method=method, **options)
    fed, train = s.federation, s.federation.train

    def spoilt(rows: Tensor, cohort: Any, **how: Any) -> Tensor:
        trained = train(rows, cohort, **how).clone()
        trained[:bad] = float("nan")
        return trained

    monkeypatch.setattr(fed, "train", spoilt)
    counted = fed.sizes if weights == "samples" else np.ones(7)
    shares = torch.from_numpy(counted / counted.sum())
    for _, state in rounds(s, 3):
        expected = shares @ state.own
        torch.testing.assert_close(getattr(state, field), expected, rtol=1e-9, atol=1e-12)  # fmt: skip
        assert state.own.any() and state.own.isfinite().all()


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("fedavgm", {"server_lr": 1.0, "server_momentum": 0.0}),
        ("fedprox", {"prox_mu": 0.0}),
        ("fednova", {"partition": "sharding"}),
        ("pfedme", None),
    ],
)
def test_special_cases_are_fedavg(method: str, options: dict[str, Any] | None) -> None:
    """Without momentum, without a pull, with equally many steps; and pFedMe whose rows
    follow at once and are drawn by nearly nothing.
    """
    common = {**HARSH, "clients": 5}
    of_average: dict[str, Any] = (
        {"partition": "sharding"} if method == "fednova" else {}
    )
    if options is None:
        common |= {"batch_size": 2000, "epochs": 1, "momentum": 0.0}
        small = 1e-9
        options = {"pfedme_lambda": small, "pfedme_lr": 1 / small, "pfedme_steps": 1, "local_rounds": 1, "pfedme_beta": 1.0}  # fmt: skip
    one = assembled(method=method, **common, **options)
    other = assembled(**common, **of_average)
    tolerance = 1e-8 if method == "pfedme" else 1e-11
    for (_, state), (_, expected) in zip(rounds(one, 2), rounds(other, 2), strict=True):
        torch.testing.assert_close(state.w, expected.w, rtol=tolerance, atol=1e-11)


def test_pfedmes_rows_do_not_become_the_personal_ones() -> None:
    """By default a client's row goes λ η = 15 % of the way in every local round."""
    s = assembled(method="pfedme", local_rounds=1, batch_size=400)
    o: Any = s.settings.options
    assert o.pfedme_lambda * o.pfedme_lr == pytest.approx(0.15)
    fed, uploads = s.federation, []
    cohort = fed.sample(0, lambda here, rows: uploads.append(rows.clone()))
    state = s.method.round(fed, s.method.init(fed), cohort)
    way = state.theta - fed.initial_row()
    (rows,) = uploads
    expected = fed.initial_row() + 0.15 * way
    torch.testing.assert_close(rows, expected, rtol=1e-10, atol=1e-12)
    assert (way.norm(dim=1) > 0).all()


def test_ditto_without_a_pull_is_local_only_beside_fedavg() -> None:
    common = {**HARSH, "clients": 5}
    one, average = assembled(method="ditto", ditto_lambda=0.0, **common), assembled(**common)  # fmt: skip
    v = one.federation.initial_row().repeat(5, 1)
    for (round, state), (_, expected) in zip(rounds(one, 2), rounds(average, 2), strict=True):  # fmt: skip
        torch.testing.assert_close(state.w, expected.w, rtol=1e-11, atol=1e-12)
        here = one.federation.sample(round).here
        v[here] = one.federation.finetune(v[here], here)
        torch.testing.assert_close(state.v, v, rtol=1e-11, atol=1e-12)


def test_per_fedavg_is_judged_after_one_more_step() -> None:
    s = assembled(method="per-fedavg", **UNEVEN_CLIENTS, **OPTIONS["per-fedavg"])
    *_, (_, state) = rounds(s, 2)
    loop = Loop(s)
    before = state.w.clone()
    found = s.method.personal(s.federation, state, np.arange(7))
    recipe = loop.recipe(1, epochs=0, steps=1, lr=0.03)
    for client in range(7):
        expected = loop.train(state.w, client, 1, recipe, purpose="fine-tuning")
        torch.testing.assert_close(found[client], expected, rtol=1e-10, atol=1e-12)
    assert torch.equal(state.w, before) and torch.equal(s.method.global_row(state), before)  # fmt: skip


@pytest.mark.parametrize("method", RULES)
def test_a_cohort_in_which_nobody_has_data_counts_for_nothing(method: str) -> None:
    """Also after rounds that have left momentum and variates behind."""
    s = assembled(
        clients=20, alpha=0.01, participation=0.05, method=method, **OPTIONS[method]
    )
    fed, state = s.federation, s.method.init(s.federation)
    empty, full = [], []
    for round in range(100):
        has_data = fed.sizes[fed.sample(round).clients].any()
        (full if has_data else empty).append(round)
    state = s.method.round(fed, state, fed.sample(full[0]))
    before = {name: value.clone() for name, value in vars(state).items()}
    cohort = fed.sample(empty[0])
    state = s.method.round(fed, state, cohort)
    for name, value in vars(state).items():
        torch.testing.assert_close(value, before[name], rtol=1e-14, atol=1e-15)
    assert (cohort.log.bytes_up, cohort.log.bytes_down) == (0, 0)


@pytest.mark.parametrize("method", RULES)
def test_running_statistics_are_averaged(method: str) -> None:
    """Nothing adapts, corrects or scales them: they are the mean of the uploads'."""
    small = {"model": "cnn-bn", "clients": 3, "alpha": 0.3, "epochs": 1}
    if method in ("apfl", "per-fedavg", "pfedme", "scaffold"):
        del small["epochs"]
    s = assembled(method=method, **small, **OPTIONS[method])
    fed = s.federation
    statistics, trained = slice(fed.layout.num_parameters, None), []
    cohort = fed.sample(0, lambda here, rows: trained.append(rows.clone()))
    state = s.method.round(fed, s.method.init(fed), cohort)
    (rows,) = trained  # once, when the local training is done
    expected = torch.from_numpy(cohort.weights) @ rows[:, statistics]
    assert not torch.allclose(expected, fed.initial_row()[statistics])
    torch.testing.assert_close(state.w[statistics], expected, rtol=1e-12, atol=1e-14)
    for name in ("c", "h", "own"):
        if hasattr(state, name):
            assert not getattr(state, name)[..., statistics].any()


@pytest.mark.parametrize("method", RULES)
def test_bytes_are_what_the_method_sends(method: str) -> None:
    s = assembled(method=method, clients=10, participation=0.3, **OPTIONS[method])
    logs = list[RoundLog]()
    list(rounds(s, 1, logs))
    variates = 2 if method == "scaffold" else 1
    expected = variates * 3 * s.federation.layout.num_columns * 8
    assert traffic(logs) == (expected, 0, expected)
    assert logs[0].update_norms is not None and len(logs[0].update_norms) == 3


def test_an_attacker_forges_rows_and_variates_each_from_what_it_was_sent() -> None:
    """Sign-flip mirrors both; the norms that are recorded are those of rows."""
    s = assembled(method="scaffold", clients=3, attack="sign-flip", attackers=1)
    fed, attacker = s.federation, int(s.dealt.attackers[0])
    cohort = fed.sample(0)
    state = s.method.round(fed, s.method.init(fed), cohort)
    shares = torch.from_numpy(fed.sizes / fed.sizes.sum())
    shares[attacker] *= -1
    # Before the first round c and all cᵢ are 0, so cᵢ⁺ is all that a client sends of it.
    torch.testing.assert_close(state.c, shares @ state.own, rtol=1e-9, atol=1e-12)
    updates = -state.own * 10 * s.settings.config.lr  # K η of plain SGD
    w = fed.initial_row() + shares @ updates
    torch.testing.assert_close(state.w, w, rtol=1e-9, atol=1e-12)
    norms = updates.norm(dim=1)
    torch.testing.assert_close(cohort.log.update_norms, norms, rtol=1e-6, atol=0)


def words_of(method: str) -> list[str]:
    return ["--method", method, *flags(**OPTIONS[method])]


@pytest.mark.parametrize("method", ["fedadam", "scaffold", "ditto", "pfedme", "apfl"])
def test_seeds_at_once_are_the_same_runs(method: str, tmp_path: Path) -> None:
    words = [*words_of(method), *UNEVEN]
    started(*words, "--seeds", "4,1", "--out", tmp_path / "together")
    for seed in (1, 4):
        alone = started(*words, "--seed", seed, "--out", tmp_path / f"alone-{seed}")
        together = tmp_path / f"together/seed-{seed}"
        assert_same_run(together, alone, tolerance=1e-12)


def test_two_ranks_are_as_one(tmp_path: Path, mpirun: Callable) -> None:
    """All methods in one job, whose clients move between two rounds with what they own."""
    job = mpirun(2, "-m", "mpi4py", "-m", "tests.rival_ranks", tmp_path)
    assert job.returncode == 0, job.stderr[-3000:]
    world, files = worlds.enter(device="cpu"), []
    for rank in range(2):
        files.append(np.load(tmp_path / f"{rank}.npz"))
    ids = np.concatenate([file["clients"] for file in files])
    assert sorted(ids) == list(range(7))
    for method in RULES:
        found = np.concatenate([file[method] for file in files])
        _, expected = rows_after(words_of(method), world)
        np.testing.assert_allclose(found, expected[ids], rtol=1e-10, atol=1e-12, err_msg=method)  # fmt: skip


@pytest.mark.gpu
def test_a_gpu_computes_the_same(tmp_path: Path, mpirun: Callable) -> None:
    """All methods on a network with batch norm, in one job on each device."""
    for device in ("cpu", "cuda"):
        words: list[object] = []
        for method in RULES:
            options = [*words_of(method), *UNEVEN, "--model", "cnn-bn"]
            out = tmp_path / device / method
            words += ["+", *options, "--device", device, "--out", out]
        job = mpirun(1, Path(__file__).with_name("several_runs.py"), *words)
        assert job.returncode == 0, job.stderr[-3000:]
    for method in RULES:
        found, expected = tmp_path / "cuda" / method, tmp_path / "cpu" / method
        assert_same_run(found, expected, tolerance=1e-9)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("scaffold --optimiser adam", "assumes that local steps are those of SGD"),
        ("fednova --optimiser adamw", "assumes that local steps are those of SGD"),
        ("apfl --optimiser adam", "assumes that local steps are those of SGD"),
        ("scaffold --epochs 3", "--epochs changes nothing without --local-steps 0"),
        ("per-fedavg --epochs 3", "method per-fedavg trains by --local-steps"),
        ("pfedme --epochs 3", "method pfedme trains by --local-rounds"),
        ("fedadam --server-lr 0", "must be greater than 0"),
        ("fedadam --server-lr-min 1", "--server-lr-min changes nothing without"),
        (
            "scaffold --server-lr-schedule cosine --server-lr-min 2",
            "--server-lr-min 2 is above --server-lr 1",
        ),
        (
            "fedbuff --server-lr-schedule warmup --server-lr-warmup 30",
            "--server-lr-warmup 30, but there are only 20 rounds",
        ),
        (
            "fedbuff --server-lr-schedule warmup --rounds 10",
            "--server-lr-schedule changes nothing without --rounds 11 or more",
        ),
        ("scaffold --nesterov", "--nesterov changes nothing without"),
        ("fedyogi --server-beta2 1", "must be less than 1"),
        ("apfl --apfl-alpha 1.5", "must be less than or equal to 1"),
        ("fedprox --mu 1", "did you mean '--prox-mu'?"),
        ("ditto --lambda 1", "did you mean '--ditto-lambda'?"),
    ],
)
def test_mistakes_are_one_line(
    words: str,
    said: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in mistake(capsys, "run", "--method", *words.split())
    assert list(tmp_path.iterdir()) == []


def test_servers_have_the_papers_numbers() -> None:
    usual = {
        "server_lr": 1.0, "server_lr_decay": 1.0, "server_lr_schedule": "constant", "server_lr_step_size": None,
        "server_lr_step_factor": 0.1, "server_lr_min": 0.0, "server_lr_warmup": None,
    }  # fmt: skip
    assert load("scaffold").Options().model_dump().items() >= usual.items()
    adaptive = usual | {"server_lr": 0.03, "server_momentum": 0.9, "server_tau": 1e-3}
    found = load("fedadam").Options().model_dump()
    assert found.items() >= adaptive.items()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--server-lr-decay 0.5", None),
        ("--server-lr-decay 1.01", "less than or equal to 1"),
        ("--server-lr-decay 0", "greater than 0"),
        ("--server-lr-decay 0.5 --rounds 1", "without --rounds 2 or more"),
        ("--server-lr-decay 0.5 --rounds 2", None),
        ("--server-lr-schedule cosine --rounds 1", "without --rounds 2 or more"),
        ("--server-lr-schedule cosine --rounds 2", None),
        ("--server-lr-schedule constant --rounds 1", None),
        ("--server-lr-schedule cosine --server-lr-min 0.03", None),
        ("--server-lr-schedule cosine --server-lr-min 0.031", "is above --server-lr"),
        (
            "--server-lr-schedule cosine --server-lr-min -1",
            "greater than or equal to 0",
        ),
        ("--server-lr-schedule step --server-lr-step-size 4 --rounds 5", None),
        (
            "--server-lr-schedule step --server-lr-step-size 5 --rounds 5",
            "--rounds 6 or more",
        ),
        ("--server-lr-schedule step --server-lr-step-factor 1", None),
        ("--server-lr-schedule step --server-lr-step-factor 1.1", "or equal to 1"),
        ("--server-lr-schedule step --server-lr-step-factor 0", "greater than 0"),
        (
            "--server-lr-schedule cosine --server-lr-step-factor 0.5",
            "--server-lr-schedule step",
        ),
        ("--server-lr-schedule warmup --server-lr-warmup 4 --rounds 5", None),
        (
            "--server-lr-schedule warmup --server-lr-warmup 5 --rounds 5",
            "only 5 rounds",
        ),
        (
            "--server-lr-schedule cosine --server-lr-warmup 3",
            "--server-lr-schedule warmup",
        ),
        ("--server-momentum 0", None),
        ("--server-momentum 1", "less than 1"),
        ("--server-momentum -0.1", "greater than or equal to 0"),
        ("--server-tau 0", "greater than 0"),
        ("--server-tau 0.5", None),
        ("--server-lr 0", "greater than 0"),
        ("--server-lr 0.5", None),
    ],
)
def test_bounds_of_servers_rates(words: str, said: str | None) -> None:
    asked = ["--method", "fedadam", *words.split()]
    refused = nullcontext() if said is None else pytest.raises(UserError, match=said)
    with refused:
        check(parse_run(asked), Launch("none", 0, 1))


@pytest.mark.parametrize("method", ["scaffold", "feddyn", "pfedme"])
def test_momentum_is_off_unless_the_user_asks_for_it(method: str) -> None:
    config = assembled(method=method).settings.config
    assert config.momentum == 0 and config.optimiser == "sgd"
    asked = assembled(method=method, momentum=0.5).settings.config
    assert asked.momentum == 0.5
