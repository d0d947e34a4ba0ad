"""Local optimisers and learning rates, against torch.optim."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hpcfed import methods
from hpcfed.clients.job import Losses, Recipe, TrainingJob
from hpcfed.errors import UserError
from hpcfed.kernels import adam, sgd
from hpcfed.kernels.adam import AdamRule
from hpcfed.options import Options, check, resolve
from hpcfed.options.rates import RateSchedule
from hpcfed.options.settings import Settings
from hpcfed.runtime.launcher import Launch
from tests.federations import assembled
from tests.naive import naive, torch_optimiser
from tests.uneven import HARSH, SIZES, TAUT, WITH_DATA, Case

ADAM = replace(HARSH, optimiser="adam", lr=0.01, beta1=0.8, beta2=0.95, epsilon=1e-6)
ADAMW = replace(ADAM, optimiser="adamw", weight_decay=0.1)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    return str(request.param)


@pytest.mark.parametrize("rate_each", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("recipe", [ADAM, ADAMW, replace(ADAMW, clip=0.0)])
def test_steps_of_adam(
    recipe: Recipe, masked: bool, rate_each: bool, device: str
) -> None:
    """Several steps of a slice of columns, against torch's own optimiser for every
    client.
    """
    torch.manual_seed(0)
    matrices = torch.randn(4, 4, 40, device=device)
    matrices[2:] = 0
    rows, gradient, means, squares = (matrix[:, 8:28] for matrix in matrices)
    before = matrices.clone()
    moving = torch.arange(20, device=device) % 3 > 0 if masked else None
    rates = torch.tensor([0.1, 0.2, 0.3, 0.4], device=device)
    lr = rates if rate_each else rates[0]
    rule = AdamRule(
        recipe.beta1,
        recipe.beta2,
        recipe.epsilon,
        recipe.weight_decay,
        decoupled=recipe.optimiser == "adamw",
        clip=recipe.clip,
    )
    bias = adam.bias_corrections(rule, 5, rows)
    alone = [nn.ParameterList([row.clone()]) for row in rows]
    optimisers = []
    for client, module in enumerate(alone):
        own = float(rates[client] if rate_each else rates[0])
        optimisers.append(torch_optimiser(module, replace(recipe, lr=own)))
    for step in range(5):
        gradient.copy_(torch.randn(4, 20))
        for client, module in enumerate(alone):
            slope = gradient[client].clone()
            module[0].grad = slope if moving is None else slope * moving
            if recipe.clip:
                nn.utils.clip_grad_norm_(module.parameters(), recipe.clip)
            optimisers[client].step()
        at = torch.tensor([step], device=device)
        adam.descend(rows, gradient, means, squares, moving, lr, bias, at, rule)
    expected = torch.stack([module[0].detach() for module in alone])
    still = before[0, :, 8:28]
    if moving is not None:
        expected = torch.where(moving, expected, still)
        assert torch.equal(rows[:, ~moving], still[:, ~moving])
    torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-6)
    outside = torch.ones(40, dtype=torch.bool)
    outside[8:28] = False
    assert torch.equal(matrices[:, :, outside], before[:, :, outside])


def test_sgd_with_a_rate_for_each_client(device: str) -> None:
    torch.manual_seed(0)
    rows, gradient, velocity = torch.randn(3, 4, 20, device=device)
    rates = torch.tensor([0.1, 0.2, 0.3, 0.4], device=device)
    rule = sgd.Rule(momentum=0.5, weight_decay=0.01)
    expected = []
    for client in range(4):
        one = rows[client : client + 1].clone()
        speed = velocity[client : client + 1].clone()
        slope = gradient[client : client + 1]
        sgd.descend(one, slope, speed, None, rates[client], rule)
        expected.append(one)
    sgd.descend(rows, gradient, velocity, None, rates, rule)
    torch.testing.assert_close(rows, torch.cat(expected))


@pytest.mark.parametrize("mode", ["batched", "loop"])
@pytest.mark.parametrize(
    "recipe",
    [
        ADAM,
        replace(ADAMW, clip=0.0),
        replace(ADAMW, schedule=RateSchedule("warmup-cosine", lowest=0.1, warmup=2)),
        replace(HARSH, schedule=RateSchedule("cosine")),
        replace(HARSH, schedule=RateSchedule("step", drop_every=2), clip=0.0),
        replace(HARSH, schedule=RateSchedule("step"), repeat=2),
        replace(HARSH, nesterov=True),
        replace(HARSH, nesterov=True, clip=0.0),
    ],
    ids=[
        "adam",
        "adamw",
        "adamw warmup",
        "sgd cosine",
        "sgd step",
        "sgd repeat",
        "nesterov clipped",
        "nesterov",
    ],
)
def test_local_training_equals_torch_optim(
    mode: str, recipe: Recipe, device: str
) -> None:
    """Uneven clients: each has its own bias corrections, and a schedule of its own
    length. A second training starts from moments of zero again.
    """
    case = Case(device=device)
    engine = case.engine(mode)
    correction = case.correction.to(device)
    job = case.job(recipe, correction=correction)
    for _ in range(3):  # on a GPU: plain, captured, replayed
        trained, _ = engine.train(job)
    for client, size in enumerate(SIZES):
        if not size:
            assert torch.equal(trained[client].cpu(), case.rows[client])
            continue
        row = case.correction[client]
        expected = case.alone(client, recipe, correction=row)
        torch.testing.assert_close(trained[client].cpu(), expected, **TAUT)


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", [None, RateSchedule("cosine")])
@pytest.mark.parametrize("optimiser", ["sgd", "adam", "adamw"])
def test_captured_steps_in_float32(optimiser: Any, schedule: Any) -> None:
    """Plain, captured and replayed, by the kernels: all close to float64."""
    # A large ε, so that rounding of tiny gradients is not blown up.
    recipe = replace(ADAM, optimiser=optimiser, schedule=schedule, epsilon=1e-2)
    case = Case("mlp", device="cuda")
    expected, _ = case.engine().train(case.job(recipe))
    case.rows = case.rows.float()
    case.shard = replace(case.shard, inputs=case.shard.inputs.float())
    engine = case.engine()
    for _ in range(3):
        trained, _ = engine.train(case.job(recipe))
        distance = (trained.double() - expected).norm() / expected.norm()
        assert float(distance) < 1e-4


@pytest.mark.parametrize("recipe", [ADAM, ADAMW])
def test_adam_keeps_frozen_columns(recipe: Recipe) -> None:
    case = Case("mlp")
    columns = case.layout.mask(["head"])
    trained, _ = case.engine().train(case.job(recipe, columns=columns))
    assert torch.equal(trained[:, ~columns], case.rows[:, ~columns])
    for client in WITH_DATA:
        network = case.module(client)
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(name.startswith("head"))
        alone = naive(network, case.shard, client, recipe, case.keys[client])
        expected = case.layout.row(alone, dtype=torch.float64)
        torch.testing.assert_close(trained[client], expected, **TAUT)


def test_the_rate_may_change_between_rounds() -> None:
    """The memory of a training is kept, and its rates are loaded anew."""
    case = Case("mlp")
    for schedule in (None, RateSchedule("cosine")):
        engine = case.engine()
        first = replace(ADAM, schedule=schedule)
        second = replace(first, lr=0.002)
        engine.train(case.job(first))
        trained, _ = engine.train(case.job(second))
        expected = case.alone(1, second)
        torch.testing.assert_close(trained[1], expected, **TAUT)


def test_weights_update_themselves_only_by_sgd(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also at a rate that changes from step to step."""
    case = Case("mlp")
    asked: list[int] = []

    def always(weight: Tensor, slots: int) -> bool:
        asked.append(slots)
        return True

    monkeypatch.setattr("hpcfed.kernels.linear.updates_itself", always)
    cosine = replace(HARSH, clip=0.0, schedule=RateSchedule("cosine"))
    trained, _ = case.engine().train(case.job(cosine))
    assert asked
    torch.testing.assert_close(trained[3], case.alone(3, cosine), **TAUT)
    asked.clear()
    case.engine().train(case.job(replace(ADAM, clip=0.0)))
    assert not asked


# Schedules


def torch_rates(scheduler: Any, total: int, **words: Any) -> list[float]:
    optimiser = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    made = scheduler(optimiser, **words)
    rates = []
    for _ in range(total):
        rates.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        made.step()
    return rates


def rates(schedule: RateSchedule, total: int) -> list[float]:
    return [schedule.factor(at, total) for at in range(total)]


def test_schedules_are_those_of_torch() -> None:
    lr_scheduler = torch.optim.lr_scheduler
    cosine = torch_rates(lr_scheduler.CosineAnnealingLR, 17, T_max=17, eta_min=0.2)
    assert rates(RateSchedule("cosine", lowest=0.2), 17) == pytest.approx(cosine)
    step = torch_rates(lr_scheduler.StepLR, 17, step_size=5, gamma=0.3)
    schedule = RateSchedule("step", drop_every=5, drop=0.3)
    assert rates(schedule, 17) == pytest.approx(step)
    warm = rates(RateSchedule("warmup-cosine", lowest=0.2, warmup=4), 17)
    assert warm[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    falling = torch_rates(lr_scheduler.CosineAnnealingLR, 13, T_max=13, eta_min=0.2)
    assert warm[4:] == pytest.approx(falling)
    assert rates(RateSchedule("constant"), 3) == [1.0, 1.0, 1.0]


def test_schedules_by_hand() -> None:
    """What is not said is a third and a tenth of the total, rounded up."""
    step = RateSchedule("step")
    assert rates(step, 7) == pytest.approx([1, 1, 1, 0.1, 0.1, 0.1, 0.01])
    assert rates(step, 6) == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])
    warmup = RateSchedule("warmup")
    assert rates(warmup, 21) == pytest.approx([1 / 3, 2 / 3, *[1.0] * 19])
    assert rates(warmup, 20) == pytest.approx([1 / 2, *[1.0] * 19])
    assert rates(RateSchedule("warmup", warmup=4), 3) == [0.25, 0.5, 0.75]
    # From the full rate to none, and no further than the last step.
    assert rates(RateSchedule("cosine"), 4) == pytest.approx(
        [1, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2]
    )
    both = rates(RateSchedule("warmup-cosine", warmup=1), 5)
    assert both == pytest.approx([1, *rates(RateSchedule("cosine"), 4)])
    assert rates(RateSchedule("warmup-cosine", warmup=3), 3) == pytest.approx(
        [1 / 3, 2 / 3, 1]
    )
    # Each client by its own total.
    at, total = torch.arange(3)[:, None], torch.tensor([3, 6])
    found = step.factors(at, total)
    torch.testing.assert_close(
        found, torch.tensor([[1, 1], [0.1, 1], [0.01, 0.1]], dtype=torch.float64)
    )


@pytest.mark.parametrize("total", [1, 2, 3, 10, 11, 20])
@pytest.mark.parametrize("kind", ["step", "cosine", "warmup", "warmup-cosine"])
@pytest.mark.parametrize("warmup", [None, 1, 2])
def test_a_schedule_knows_whether_it_acts(
    kind: Any, warmup: int | None, total: int
) -> None:
    """And whether a longer run would have begun otherwise."""
    for more in ({}, {"drop": 1.0, "lowest": 1.0}, {"drop_every": 2}):
        schedule = RateSchedule(kind, warmup=warmup, **more)  # type: ignore[arg-type]
        factors = rates(schedule, total)
        assert schedule.acts(total) == any(factor != 1 for factor in factors)
        for longer in (total + 1, 3 * total):
            alike = factors == rates(schedule, longer)[:total]
            assert schedule.begins_alike(total, longer) == alike
        acting = [n for n in range(total, total + 99) if schedule.acts(n)]
        assert schedule.least(total) == min(acting, default=total)


def test_recipes_are_plain_unless_more_is_asked_for() -> None:
    plain = Recipe(
        1, 8, 0.1, momentum=0.0, weight_decay=0.0, clip=0.0, steps=0, repeat=1,
        augment=False, optimiser="sgd", beta1=0.9, beta2=0.999, epsilon=1e-8,
        schedule=None, gradient=False, nesterov=False,
    )  # fmt: skip
    assert Recipe(1, 8, 0.1) == plain


@pytest.mark.parametrize("shared", [False, True])
def test_a_part_of_a_job_is_that_of_its_clients(shared: bool) -> None:
    """One row that all start from stays one."""
    rows = torch.arange(12.0).view(4, 3)
    if shared:
        rows = rows[:1].expand(4, 3)
    shard: Any = SimpleNamespace(samples=np.array([9, 5, 30, 0, 12]))
    job = TrainingJob(
        rows,
        shard,
        np.array([4, 1, 2, 3]),
        Recipe(2, 5, 0.1),
        torch.arange(4) + 10,
        correction=torch.arange(4.0)[:, None],
        gates=torch.eye(4, dtype=torch.bool),
        rates=torch.arange(4.0),
        limits=np.array([3, 9, 2, 1]),
    )
    assert job.num_steps().tolist() == [3, 2, 2, 0]
    assert job.num_samples().tolist() == [12 + 0, 10, 10, 0]
    whole = replace(job, limits=None)
    assert whole.num_steps().tolist() == [6, 2, 12, 0]
    assert whole.num_samples().tolist() == [24, 10, 60, 0]
    part = job.subset(np.array([0, 2]))
    assert torch.equal(part.rows, rows[[0, 2]]) and part.clients.tolist() == [4, 2]
    assert (
        part.rows.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()
    ) == shared
    assert part.keys.tolist() == [10, 12] and part.limits.tolist() == [3, 2]
    assert part.correction.tolist() == [[0.0], [2.0]] and part.rates.tolist() == [0, 2]
    assert torch.equal(part.gates, job.gates[[0, 2]])
    one = replace(job, rows=rows[:1], clients=job.clients[:1]).subset(
        np.array([0]), torch.tensor([0])
    )
    assert torch.equal(one.rows, rows[:1])


def test_matrices_of_moments() -> None:
    recipe = Recipe(1, 8, 0.1)
    assert recipe.num_moments == 0
    assert replace(recipe, momentum=0.5).num_moments == 1
    for optimiser in ("adam", "adamw"):
        assert replace(recipe, optimiser=optimiser).num_moments == 2
    assert recipe.without_rate == Recipe(1, 8, 0.0)
    assert (recipe.length.epochs, recipe.length.steps, recipe.length.repeat) == (
        1,
        0,
        1,
    )


@pytest.mark.parametrize("kind", ["step", "cosine", "warmup-cosine"])
@pytest.mark.parametrize("total", [1, 2, 5, 100])
def test_no_round_or_step_is_without_a_rate(kind: Any, total: int) -> None:
    """Neither the first nor the last; what comes after it goes on with its rate."""
    for warmup in (None, 3):
        schedule = RateSchedule(kind, warmup=warmup)
        found = rates(schedule, total)
        assert all(0 < rate <= 1 for rate in found)
        assert schedule.factor(total + 5, total) == found[-1]


def rates_of(**values: Any) -> list[Recipe]:
    fed = assembled(rounds=4, lr=0.5, **values).federation
    return [fed.recipe(round) for round in range(5)]


def test_a_schedule_by_round() -> None:
    recipes = rates_of(lr_schedule="cosine", lr_min=0.1, lr_decay=0.9)
    expected = []
    for round in (0, 1, 2, 3, 3):
        height = (1 + np.cos(np.pi * round / 4)) / 2
        expected.append(0.1 + 0.4 * height)
    decays = 0.9 ** np.arange(5)
    assert [r.lr for r in recipes] == pytest.approx(list(expected * decays))
    assert all(recipe.schedule is None for recipe in recipes)
    dropped = rates_of(lr_schedule="step", lr_step_size=2, lr_step_factor=0.5)
    assert [r.lr for r in dropped] == pytest.approx([0.5, 0.5, 0.25, 0.25, 0.25])


def test_a_schedule_by_step() -> None:
    first, *_ = rates_of(
        lr_schedule="warmup-cosine", lr_schedule_by="step", lr_warmup=3, lr_min=0.1
    )
    schedule = RateSchedule("warmup-cosine", lowest=0.2, warmup=3)
    assert first.lr == 0.5 and first.schedule == schedule


def test_options_of_adam_reach_the_clients() -> None:
    s = assembled(optimiser="adamw", beta1=0.5, beta2=0.6, adam_epsilon=1e-3, epochs=1)
    fed = s.federation
    recipe = fed.recipe(0)
    expected = Recipe(
        1, 64, 0.001, optimiser="adamw", beta1=0.5, beta2=0.6, epsilon=1e-3
    )
    assert recipe == expected
    cohort = fed.sample(0)
    rows = fed.initial_row().expand(len(cohort.here), -1)
    jobs: list[TrainingJob] = []
    train = s.engine.train

    def noting(job: TrainingJob) -> tuple[Tensor, Losses]:
        jobs.append(job)
        return train(job)

    s.engine.train = noting  # type: ignore[method-assign]
    fed.train(rows, cohort)
    assert jobs[0].recipe == expected


# The command line


def settings(**values: Any) -> Settings:
    options = methods.load(values.get("method", "fedavg")).Options
    return resolve(values, {name: name for name in values}, options)


class DividesBySteps(Options):
    needs_sgd = True


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optimiser": "adam"}, "use --optimiser sgd"),
        (
            {"lr_schedule": "cosine", "lr_schedule_by": "step"},
            "use --lr-schedule-by round",
        ),
        ({"lr_schedule": "cosine"}, None),
    ],
)
def test_a_method_may_need_sgd(values: dict[str, Any], message: str | None) -> None:
    made = resolve(values, {name: name for name in values}, DividesBySteps)
    if message is None:
        check(made, Launch("none", 0, 1))
        return
    with pytest.raises(UserError, match=message):
        check(made, Launch("none", 0, 1))


def test_adam_has_a_rate_of_its_own() -> None:
    made = settings(optimiser="adam")
    assert made.config.lr == 0.001
    assert [str(choice) for choice in made.choices] == [
        "--lr is 0.001: usual for adam; --lr sets another"
    ]
    assert settings(optimiser="adam", lr=0.05).config.lr == 0.05
    assert settings().config.lr == 0.05


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optimiser": "adam", "momentum": 0.5}, "without --optimiser sgd"),
        ({"beta1": 0.5}, "--beta1 changes nothing without --optimiser adam"),
        ({"lr_min": 0.01}, "--lr-min changes nothing without --lr-schedule cosine"),
        ({"lr_warmup": 2}, "without --lr-schedule warmup-cosine"),
        ({"lr_step_size": 2}, "without --lr-schedule step"),
        ({"lr_schedule_by": "step"}, "without --lr-schedule cosine"),
        ({"lr_schedule": "cosine", "rounds": 1}, "--rounds 2 or more"),
        (
            {"lr_schedule": "cosine", "rounds": 1, "new_clients": 3},
            "--rounds 2 or more",
        ),
        (
            {"lr_schedule": "warmup-cosine", "rounds": 2},
            "--lr-schedule changes nothing without --rounds 3 or more",
        ),
        ({"lr_schedule": "cosine", "lr_min": 0.2}, "--lr-min 0.2 is above --lr 0.05"),
        (
            {"lr_schedule": "warmup-cosine", "lr_warmup": 20},
            "--lr-warmup 20, but there are only 20 rounds",
        ),
        (
            {"method": "pfedhn", "optimiser": "adam"},
            "method pfedhn trains by --inner-momentum",
        ),
        ({"method": "pfedhn", "lr_schedule": "cosine"}, "trains by --inner-lr"),
        ({"optimizer": "adam"}, "did you mean 'optimiser'?"),
        ({"warmup": 5}, "did you mean 'lr_warmup'?"),
    ],
)
def test_what_cannot_act_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=r"\S") as refusal:
        check(settings(**values), Launch("none", 0, 1))
    assert message in str(refusal.value)


def test_without_warm_up_the_rate_never_rises() -> None:
    plain, none = RateSchedule("cosine"), RateSchedule("warmup-cosine", warmup=0)
    places, total = torch.arange(7), torch.tensor(7)
    assert torch.equal(none.factors(places, total), plain.factors(places, total))
    asked = assembled(lr_schedule="warmup-cosine", lr_warmup=0, rounds=7).federation
    assert asked.recipe(0).lr == asked.config.lr
