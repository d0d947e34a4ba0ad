"""Classification, next token and regression: training, losses and scores equal a plain
torch loop over clients.
"""

import copy
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcfed.clients.engine import Engine
from hpcfed.clients.job import Losses, Recipe, TrainingJob
from hpcfed.clients.objective import (
    ABSOLUTE,
    CLASSES,
    OBJECTIVES,
    OUTPUTS,
    TOP5,
    Wanted,
)
from hpcfed.data.shards import Shard
from hpcfed.kernels import batch as batch_kernels
from hpcfed.kernels.tokens import next_token
from hpcfed.models.layout import Layout
from hpcfed.models.own import Sample
from hpcfed.runtime import randomness
from tests.naive import batches, make_shard

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES = (5, 0, 13, 8, 1, 16)
"""An empty client, a single sample, full and short last batches with batches of 4."""
SGD = Recipe(epochs=2, batch_size=4, lr=0.05, momentum=0.9, weight_decay=1e-3, clip=1.0)
LENGTH, VOCABULARY, FEATURES, NUM_OUTPUTS = 5, 7, 3, 2
Mode = Literal["batched", "vmap", "loop"]


def network_of(task: str) -> nn.Module:
    torch.manual_seed(3)
    if task == "next-token":
        return nn.Sequential(
            nn.Embedding(VOCABULARY, 4),
            nn.Linear(4, 6),
            nn.Tanh(),
            nn.Linear(6, VOCABULARY),
        )
    outputs = NUM_OUTPUTS if task == "regression" else VOCABULARY
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, outputs))


def shard_of(task: str, dtype: torch.dtype = torch.float64) -> Shard:
    shard = make_shard((FEATURES, 1, 1), SIZES, dtype)
    samples = len(shard.inputs)
    if task == "next-token":
        inputs = torch.randint(VOCABULARY, (samples, LENGTH))
        targets = torch.randint(VOCABULARY, (samples, LENGTH))
        # Texts end at different places; one of them is empty.
        ends = torch.randint(LENGTH + 1, (samples, 1))
        targets[torch.arange(LENGTH) >= ends] = -100
    elif task == "regression":
        inputs = shard.inputs.flatten(1)
        targets = torch.randn(samples, NUM_OUTPUTS, dtype=dtype)
    else:
        inputs = shard.inputs.flatten(1)
        targets = torch.randint(VOCABULARY, (samples,))
    return replace(shard, inputs=inputs, targets=targets, task=task)


def on(device: str, shard: Shard, dtype: torch.dtype) -> Shard:
    moved = {}
    for name in ("inputs", "targets", "index"):
        tensor = getattr(shard, name)
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        moved[name] = tensor.to(device, kind)
    return replace(shard, **moved)


def plain_loss(task: str, outputs: Tensor, targets: Tensor, **how: Any) -> Tensor:
    if task == "regression":
        return F.mse_loss(outputs, targets, **how)
    if task == "next-token":
        outputs, targets = outputs.flatten(0, 1), targets.flatten()
    return F.cross_entropy(outputs, targets, **how)


def naive(
    network: nn.Module, shard: Shard, client: int, key: Tensor
) -> tuple[nn.Module, float, int]:
    """One client trained alone: its network, its summed loss, and of how many items."""
    network = copy.deepcopy(network).double()
    optimiser = torch.optim.SGD(
        network.parameters(),
        lr=SGD.lr,
        momentum=SGD.momentum,
        weight_decay=SGD.weight_decay,
    )
    total, items = 0.0, 0
    for batch in batches(shard, client, SGD, key):
        targets = shard.targets[batch]
        count = len(batch)
        if shard.task == "next-token":
            count = int((targets != -100).sum())
        loss = plain_loss(shard.task, network(shard.inputs[batch]), targets)
        optimiser.zero_grad()
        if count:
            loss.backward()
            total += loss.item() * count
        else:
            # torch's mean over no token is NaN; ours moves nothing.
            for parameter in network.parameters():
                parameter.grad = torch.zeros_like(parameter)
        items += count
        nn.utils.clip_grad_norm_(network.parameters(), SGD.clip)
        optimiser.step()
    return network, total, items


def engine_of(
    network: nn.Module, shard: Shard, mode: Mode, device: str = "cpu"
) -> Engine:
    shape = tuple(shard.inputs.shape[1:])
    vocabulary = VOCABULARY if shard.task == "next-token" else 0
    outputs = {
        "classification": (VOCABULARY,),
        "next-token": (LENGTH, VOCABULARY),
        "regression": (NUM_OUTPUTS,),
    }
    trial = Sample(shape, outputs[shard.task], vocabulary)
    return Engine(
        network,
        Layout.of(network),
        shape=shape,
        mode=mode,
        trial=trial,
        device=torch.device(device),
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("mode", ["batched", "vmap", "loop"])
@pytest.mark.parametrize("task", OBJECTIVES)
def test_training_equals_a_plain_loop(
    task: str, mode: Mode, dtype: torch.dtype, device: str
) -> None:
    """In float64 exactly; float32 is what our kernels compute in."""
    tolerance = 1e-10 if dtype == torch.float64 else 1e-4
    network, shard = network_of(task), shard_of(task)
    engine = engine_of(network, shard, mode, device)
    keys = randomness.client_keys(3, "test", 5, torch.arange(len(SIZES)))
    start = engine.layout.row(network, dtype=dtype)
    trained, found = engine.train(
        TrainingJob(
            start.to(device).expand(len(SIZES), -1),
            on(device, shard, dtype),
            np.arange(len(SIZES)),
            SGD,
            keys=keys.to(device),
        )
    )
    rows, losses = trained.cpu(), Losses(found.mean.cpu(), found.seen.cpu())
    for client, size in enumerate(SIZES):
        if not size:
            assert torch.equal(rows[client], start) and losses.mean[client].isnan()
            continue
        alone, total, items = naive(network, shard, client, keys[client])
        expected = engine.layout.row(alone, dtype=torch.float64)
        assert (rows[client] - expected).norm() < tolerance * expected.norm()
        assert int(losses.seen[client]) == items
        assert float(losses.mean[client]) == pytest.approx(total / items, rel=tolerance)


WANTED: dict[str, Wanted] = {
    "classification": {TOP5: (), CLASSES: (3, VOCABULARY)},
    "next-token": {TOP5: ()},
    "regression": {ABSOLUTE: (), OUTPUTS: (3, NUM_OUTPUTS)},
}


@pytest.mark.parametrize("task", OBJECTIVES)
def test_scores_equal_a_plain_loop(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of their own and one row for all are scored, in several short batches."""
    monkeypatch.setattr("hpcfed.clients.evaluation.EVALUATION_SAMPLES", 12)
    network, shard = network_of(task), shard_of(task)
    double = copy.deepcopy(network).double()
    engine = engine_of(network, shard, "batched")
    clients = np.arange(len(SIZES))
    rows = engine.layout.row(network, dtype=torch.float64).repeat(len(SIZES), 1)
    rows += 0.3 * torch.randn_like(rows)
    for given in (rows, rows[2].expand(len(SIZES), -1)):
        score = engine.evaluate(given, shard, clients, WANTED[task])
        for client, size in enumerate(SIZES):
            tensors = engine.layout.views(given[client : client + 1])
            own = {name: tensor[0] for name, tensor in tensors.items()}
            samples = shard.index[client, :size]
            outputs = torch.func.functional_call(double, own, (shard.inputs[samples],))
            expected = plain_sums(task, outputs, shard.targets[samples])
            assert score.sums.keys() == expected.keys()
            for name, values in expected.items():
                found = score.sums[name][client].double()
                torch.testing.assert_close(found, values.double(), msg=name)


def plain_sums(task: str, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    if task == "regression":
        errors = outputs - targets
        return {
            "loss": errors.square().mean(1).sum(),
            "count": torch.tensor(len(targets)),
            ABSOLUTE: errors.abs().mean(1).sum(),
            OUTPUTS: torch.stack(
                [errors.square().sum(0), targets.sum(0), targets.square().sum(0)]
            ),
        }
    loss = plain_loss(task, outputs, targets, reduction="sum")
    answers = outputs.argmax(-1)
    ranks = outputs.argsort(-1, descending=True)[..., :5]
    sums = {
        "loss": loss,
        "correct": (answers == targets).sum(),
        "count": (targets != -100).sum(),
        TOP5: (ranks == targets[..., None]).sum(),
    }
    if task == "classification":
        counts = torch.zeros(3, VOCABULARY)
        for answer, target in zip(answers.tolist(), targets.tolist(), strict=True):
            counts[0, answer] += answer == target
            counts[1, answer] += 1
            counts[2, target] += 1
        sums[CLASSES] = counts
    return sums


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocabulary", [7, 300, 9000])
@pytest.mark.parametrize("last", ["linear", "tanh", "leaf"])
def test_loss_of_tokens_and_its_gradient(
    device: str, dtype: torch.dtype, vocabulary: int, last: str
) -> None:
    """Two clients and one without targets, against autograd of the plain formula.

    Logits are overwritten where nobody needs them; a tanh does.
    """
    torch.manual_seed(0)
    inputs = torch.randn(6, 4, 3, device=device, dtype=dtype)
    weight = torch.randn(3, vocabulary, device=device, dtype=dtype, requires_grad=True)
    targets = torch.randint(vocabulary, (6, 4), device=device)
    targets[0, 2:] = targets[3] = targets[4:] = -100
    total = torch.ones(3, device=device, dtype=dtype)
    seen = torch.ones(3, device=device, dtype=torch.int64)

    def logits() -> Tensor:
        made = inputs @ weight
        if last == "tanh":
            return made.tanh()
        return made if last == "linear" else made.detach().requires_grad_()

    given = logits()
    before = given.detach().clone()
    loss = next_token(given, targets, total, seen)
    overwritten = last == "linear"
    assert torch.equal(given, before) == (not overwritten)
    of = given if last == "leaf" else weight
    (gradient,) = torch.autograd.grad(loss, of)
    plain = logits()
    losses = F.cross_entropy(
        plain.flatten(0, 1), targets.flatten(), reduction="none"
    ).view(3, -1)
    counts = (targets.view(3, -1) != -100).sum(1)
    mean = (losses.sum(1) / counts.clamp(min=1)).sum()
    (expected,) = torch.autograd.grad(mean, plain if last == "leaf" else weight)
    torch.testing.assert_close(gradient, expected)
    torch.testing.assert_close(total, losses.detach().sum(1) + 1)
    assert torch.equal(seen, counts + 1)


@pytest.mark.parametrize("device", DEVICES)
def test_padded_tokens_count_nothing_even_if_they_are_nan(device: str) -> None:
    logits = torch.randn(2, 3, 5, device=device)
    logits[1] = torch.nan
    logits.requires_grad_()
    targets = torch.tensor([[1, 2, -100], [-100] * 3], device=device)
    total = torch.zeros(2, device=device)
    loss = next_token(logits, targets, total, torch.zeros_like(total, dtype=torch.long))
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.isfinite().all() and total.isfinite().all()
    assert not gradient[1].any() and not total[1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("shape", [(5,), (4, 3), (8,)])
def test_samples_of_a_step(
    device: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    inputs = torch.randint(2**40, (20, *shape), device=device).to(dtype)
    samples = torch.randint(20, (3, 5, 6), device=device)
    step = torch.tensor([2], device=device)
    got = batch_kernels.gather_samples(inputs, samples, step, clients=4, slots=3)
    assert torch.equal(got, inputs[samples[2, :4, :3].flatten()])
