"""What methods can ask of local training: a squared pull, a correction of the gradient,
gradients themselves, several steps on one minibatch.
"""

import zlib
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hpcfed.clients import engine as engines
from hpcfed.clients import stacks
from hpcfed.clients.job import Losses, Recipe, TrainingJob
from hpcfed.clients.lockstep import Lockstep
from hpcfed.clients.pull import Pull, Strengths
from hpcfed.clients.schedule import Length, num_samples, num_steps, step_shapes
from hpcfed.data.shards import Shard, sub_shard
from hpcfed.federation.keys import AHEAD, ClientKeys
from hpcfed.models.kernel_layout import KernelLayout
from hpcfed.runtime import randomness
from hpcfed.runtime.timer import Timer
from tests.federations import assembled
from tests.naive import batches, make_shard, naive
from tests.uneven import HARSH, SIZES, TAUT, WITH_DATA, Case


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    return str(request.param)


@pytest.mark.parametrize("mode", ["batched", "loop"])
@pytest.mark.parametrize("recipe", [HARSH, replace(HARSH, clip=0.0, momentum=0.0)])
def test_squared_pull_and_correction_equal_plain_torch(
    mode: str, recipe: Recipe, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(device=device)
    engine = case.engine(mode)
    # Stacks of two, so that references and corrections must follow their clients.
    monkeypatch.setattr(stacks, "CPU_ACTIVATIONS", 2 * 4 * engine.cost.activations)
    pull = Pull(Strengths(squared=0.7), case.reference.to(device))
    corrected = case.correction.to(device)
    job = case.job(recipe, pull=pull, correction=corrected)
    for _ in range(3):  # on a GPU: plain, captured, replayed
        trained, _ = engine.train(job)
    free, _ = engine.train(case.job(recipe))
    for client, size in enumerate(SIZES):
        if not size:
            assert torch.equal(trained[client].cpu(), case.rows[client])
            continue
        expected = case.alone(
            client,
            recipe,
            correction=case.correction[client],
            squared=0.7,
            reference=case.reference[client],
        )
        torch.testing.assert_close(trained[client].cpu(), expected, **TAUT)
        assert not torch.allclose(free[client].cpu(), expected, rtol=1e-3)


def test_frozen_columns_keep_their_bits_under_correction_and_pull() -> None:
    """Their gradients do not count for the clipping either, not even infinite ones."""
    case = Case("mlp")
    columns = case.layout.mask(["head"])
    correction = case.correction.clone()
    correction[:, ~columns] = torch.inf
    pull = Pull(Strengths(squared=0.7), case.reference)
    job = case.job(HARSH, columns=columns, pull=pull, correction=correction)
    trained, _ = case.engine().train(job)
    assert torch.equal(trained[:, ~columns], case.rows[:, ~columns])
    for client in WITH_DATA:
        network = case.module(client)
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(name.startswith("head"))
        expected = naive(
            network,
            case.shard,
            client,
            HARSH,
            case.keys[client],
            correction=correction[client],
            squared=0.7,
            reference=case.reference[client],
        )
        row = case.layout.row(expected, dtype=torch.float64)
        torch.testing.assert_close(trained[client], row, **TAUT)


def test_a_correction_passes_the_layout_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where weights lie channels-last, with padding between the tensors."""
    case = Case()
    job = case.job(HARSH, correction=case.correction)
    expected, _ = case.engine().train(job)
    on_gpu = partial(KernelLayout, device=torch.device("cuda"))
    monkeypatch.setattr(engines, "KernelLayout", lambda layout, device: on_gpu(layout))
    trained, _ = case.engine().train(job)
    torch.testing.assert_close(trained, expected, **TAUT)
    recipe = Recipe(0, 4, 0.0, steps=1, gradient=True)
    gradients, _ = case.engine().train(case.job(recipe))
    assert gradients[:, : case.layout.num_parameters].any()
    assert not gradients[:, case.layout.num_parameters :].any()


def test_corrections_of_seeds_are_merged() -> None:
    """Each seed's clients keep their own; a seed without one is trained apart."""
    case = Case("mlp")
    whole = case.shard
    merged = Shard(
        whole.inputs,
        whole.targets,
        whole.index.repeat(3, 1),
        SIZES * 3,
        np.arange(3 * len(SIZES)),
    )
    corrections = [case.correction, case.correction.flip(0), None]
    engine = case.engine()
    calls = []
    train = engine.train

    def counting(job: TrainingJob) -> tuple[Tensor, Losses]:
        calls.append(len(job.rows))
        return train(job)

    expected = []
    for correction in corrections:
        expected.append(train(case.job(HARSH, correction=correction))[0])
    engine.train = counting  # type: ignore[method-assign]
    timers = [Timer(torch.device("cpu")) for _ in corrections]
    lockstep = Lockstep(engine, ["seed 0", "seed 1", "seed 2"], timers)
    found: dict[int, Tensor] = {}

    def program(seed: int) -> None:
        shard = sub_shard(merged, seed * len(SIZES), np.arange(len(SIZES)))
        job = replace(case.job(HARSH, correction=corrections[seed]), shard=shard)
        found[seed], _ = lockstep.programs[seed].train(job)

    programs = [partial(program, seed) for seed in range(3)]
    lockstep.run(programs, torch.device("cpu"))
    assert calls == [2 * len(SIZES), len(SIZES)]
    for seed in range(3):
        torch.testing.assert_close(found[seed], expected[seed], **TAUT)


@pytest.mark.parametrize("mode", ["batched", "loop"])
def test_gradients_are_those_of_the_first_minibatch(mode: str, device: str) -> None:
    case = Case(device=device)
    recipe = Recipe(0, 4, 0.0, steps=1, gradient=True)
    engine = case.engine(mode)
    for _ in range(3):
        gradients, losses = engine.train(case.job(recipe))
    for client, size in enumerate(SIZES):
        if not size:
            assert not gradients[client].any() and losses.mean[client].isnan()
            continue
        batch = next(batches(case.shard, client, recipe, case.keys[client]))
        network = case.module(client).train()
        inputs, targets = case.shard.inputs[batch], case.shard.targets[batch]
        loss = F.cross_entropy(network(inputs), targets)
        expected = torch.autograd.grad(loss, list(network.parameters()))
        flat = torch.cat([gradient.flatten() for gradient in expected])
        row = gradients[client].cpu()
        torch.testing.assert_close(row[: len(flat)], flat, **TAUT)
        assert len(row) > len(flat) and not row[len(flat) :].any()
        torch.testing.assert_close(losses.mean[client].cpu(), loss.detach(), **TAUT)


@pytest.mark.parametrize("steps", [0, 3, 10])
def test_a_minibatch_is_taken_several_times(steps: int) -> None:
    case = Case("mlp")
    recipe = replace(HARSH, steps=steps, repeat=3)
    trained, _ = case.engine().train(case.job(recipe))
    for client in WITH_DATA:
        expected = case.alone(client, recipe)
        torch.testing.assert_close(trained[client], expected, **TAUT)


@pytest.mark.parametrize(
    "length", [Length(2, 4, 0, 3), Length(0, 4, 1, 3), Length(0, 4, 23, 3)]
)
def test_repeated_steps_are_counted(length: Length) -> None:
    shard = make_shard((1, 2, 2), SIZES, torch.float32)
    recipe = Recipe(length.epochs, 4, 0.1, steps=length.steps, repeat=3)
    sizes = np.array(SIZES)
    steps, samples = num_steps(sizes, length), num_samples(sizes, length)
    counted = []
    for client in WITH_DATA:
        seen = list(batches(shard, client, recipe, torch.tensor(5)))
        assert (len(seen), sum(map(len, seen))) == (steps[client], samples[client])
        counted.append(seen)
    shapes = step_shapes(-np.sort(-sizes), length)
    for step, shape in enumerate(shapes):
        active = [len(seen[step]) for seen in counted if step < len(seen)]
        assert (shape.clients, shape.slots) == (len(active), max(active))


def test_a_repeated_minibatch_is_augmented_once() -> None:
    """A row that does not move then has the same loss in every step."""
    case = Case("mlp")
    blank = torch.zeros(1, dtype=torch.float64)
    case.shard = replace(case.shard, blank=blank)
    recipe = Recipe(0, 4, 0.0, steps=1, augment=True)
    _, once = case.engine().train(case.job(recipe))
    _, thrice = case.engine().train(case.job(replace(recipe, steps=3, repeat=3)))
    _, plain = case.engine().train(case.job(replace(recipe, augment=False)))
    torch.testing.assert_close(once.mean, thrice.mean, equal_nan=True, **TAUT)
    assert not torch.allclose(once.mean, plain.mean, equal_nan=True)


def test_a_method_asks_for_gradients_and_steps() -> None:
    """The minibatch is the one with which training begins in the same phase."""
    s = assembled(batch_size=16, momentum=0.9, weight_decay=0.1, clip=0.1)
    fed = s.federation
    cohort = fed.sample(2)
    rows = fed.initial_row().expand(len(cohort.here), -1)
    gradients = fed.gradients(rows, cohort, phase=4)
    step = Recipe(0, 16, 1.0, steps=1)
    assert int(cohort.log.samples_seen) == 16 * len(cohort.here)
    trained = fed.train(rows, cohort, recipe=step, phase=4)
    torch.testing.assert_close(gradients, rows - trained, rtol=1e-8, atol=1e-12)
    other = fed.gradients(rows, cohort, phase=5)
    assert not torch.allclose(gradients, other)
    sizes = fed.sizes[fed.clients[cohort.here]]
    steps = fed.num_steps(cohort)
    assert steps.tolist() == (fed.config.epochs * -(-sizes // 16)).tolist()
    assert (fed.num_steps(cohort, step) == 1).all()


def test_a_correction_of_a_method_shifts_its_steps() -> None:
    s = assembled(momentum=0.0)
    fed = s.federation
    cohort = fed.sample(0)
    rows = fed.initial_row().expand(len(cohort.here), -1)
    correction = torch.linspace(-1, 1, rows.shape[1], dtype=rows.dtype).expand_as(rows)
    step = replace(fed.recipe(0), steps=1)
    plain = fed.train(rows, cohort, recipe=step)
    corrected = fed.train(rows, cohort, recipe=step, correction=correction)
    torch.testing.assert_close(plain - corrected, fed.config.lr * correction, **TAUT)


def test_keys_are_those_of_client_round_and_phase() -> None:
    """Clients draw the same minibatch whoever else is in the cohort."""
    s = assembled(batch_size=8)
    fed = s.federation
    everyone = fed.sample(1)
    rows = fed.initial_row().expand(len(everyone.here), -1)
    whole = fed.gradients(rows, everyone, phase=1)
    some = replace(everyone, here=everyone.here[1:3])
    found = fed.gradients(rows[1:3], some, phase=1)
    torch.testing.assert_close(found, whole[1:3], **TAUT)
    purpose = "training, phase 1"
    ids = torch.from_numpy(fed.clients[everyone.here])
    keys = randomness.client_keys(fed.config.seed, purpose, 1, ids)
    assert len(set(keys.tolist())) == len(ids)


def test_keys_that_are_drawn_ahead_are_those_of_their_round() -> None:
    """For the same clients round after round, after a leap, and for other clients."""
    keys = ClientKeys(3, torch.device("cpu"))
    few, others, many = np.arange(5), np.arange(1, 6), np.arange(randomness.FEW)
    # Beyond the rounds that are drawn together, and back to the first.
    calls = [(round, few) for round in [*range(2 * AHEAD + 3), 0, 1, 40]]
    calls += [(41, others), (42, few), (43, few), (0, many), (1, many), (2, many)]
    for round, clients in calls:
        for purpose in ("training", "fine-tuning"):
            found = keys(purpose, round, clients)
            ids = torch.from_numpy(clients)
            expected = randomness.client_keys(3, purpose, round, ids)
            assert torch.equal(found, expected)


@pytest.mark.parametrize("seed", [0, 2**32 - 1, 2**32, 2**70])
def test_streams_are_keyed_by_the_words_of_their_purpose(seed: int) -> None:
    words = [seed, zlib.crc32(b"cohort"), 5]
    found = randomness.generator(seed, "cohort", 5).integers(2**62, size=4)
    assert np.array_equal(found, np.random.default_rng(words).integers(2**62, size=4))
