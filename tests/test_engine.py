"""The batched engine, the loop engine and a naive torch loop agree, for every model and
for uneven clients.
"""

import copy
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock

from hpcfed.clients import engine as engines
from hpcfed.clients.capture import Repeats, Replays
from hpcfed.clients.engine import Engine
from hpcfed.clients.evaluation import StackEvaluation
from hpcfed.clients.job import Losses, Recipe, TrainingJob
from hpcfed.clients.lanes import take_turns
from hpcfed.clients.objective import Classification, Sums
from hpcfed.clients.schedule import (
    Length,
    StepShape,
    in_a_row,
    num_epochs,
    num_samples,
    num_steps,
    rounded_up,
    step_shapes,
    training_samples,
    training_shifts,
    work_of,
)
from hpcfed.clients.stacks import Stacks
from hpcfed.clients.training import StackTraining
from hpcfed.data.shards import Shard, sub_shard
from hpcfed.errors import one_line
from hpcfed.kernels import convolution
from hpcfed.kernels.batch import SHIFTS
from hpcfed.models import MODELS
from hpcfed.models.layout import Layout
from hpcfed.models.networks import build
from hpcfed.models.own import Sample
from hpcfed.models.stack import StackedNetwork
from hpcfed.runtime import accelerator, randomness
from tests.naive import (
    FLIPPED,
    SHAPES,
    TERMS,
    assert_trained_as,
    batches,
    make_shard,
    naive,
    shape_of,
)

SIZES = (
    5,
    0,
    13,
    8,
    1,
    16,
)  # an empty client, a single sample, full and short last batches with batches of 4
FEW = (5, 0, 13)  # of them
SGD = Recipe(epochs=2, batch_size=4, lr=0.05, momentum=0.9, weight_decay=1e-3, clip=1.0)


CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Float32 means float32 here: TensorFloat-32 is off."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield request.param
    torch.backends.cudnn.allow_tf32 = before


def image_shape(shard: Shard) -> tuple[int, int, int]:
    channels, height, width = shard.inputs.shape[1:]
    return channels, height, width


def on(device: str, shard: Shard) -> Shard:
    there = {
        name: getattr(shard, name).to(device) for name in ("inputs", "targets", "index")
    }
    return replace(
        shard, **there, blank=None if shard.blank is None else shard.blank.to(device)
    )


def without_dropout(network: nn.Module) -> nn.Module:
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return network


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def trained(
    mode: str,
    network: nn.Module,
    shard: Shard,
    sgd: Recipe,
    keys: Tensor,
    device: str = "cpu",
) -> tuple[Tensor, Tensor]:
    layout = Layout.of(network)
    rows = (
        layout.row(network, dtype=shard.inputs.dtype)
        .repeat(len(shard.sizes), 1)
        .to(device)
    )
    engine = Engine(network, layout, shape=image_shape(shard), mode=mode)  # type: ignore[arg-type]
    rows, losses = engine.train(
        TrainingJob(
            rows,
            on(device, shard),
            np.arange(len(shard.sizes)),
            sgd,
            keys=keys.to(device),
        )
    )
    return rows.cpu(), losses.mean.cpu()


def test_lanes_launch_in_turn_and_take_what_waits() -> None:
    launched: list[tuple[int, str]] = []

    def task(name: str, pieces: int, lane: int) -> Iterator[None]:
        for piece in range(pieces):
            launched.append((lane, f"{name}{piece}"))
            yield

    tasks = [partial(task, "a", 1), partial(task, "b", 3), partial(task, "c", 1)]
    take_turns(tasks, [nullcontext, nullcontext])
    # a and b begin; a's end frees the first lane, which takes c in its next turn.
    assert launched == [(0, "a0"), (1, "b0"), (1, "b1"), (0, "c0"), (1, "b2")]


def test_clients_in_lanes_train_as_one_after_the_other(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lanes share the network and nothing else, whatever a client's number of steps."""
    network = without_dropout(build("cnn-bn", shape=(1, 8, 8), classes=10, seed=0))
    shard = make_shard((1, 8, 8), SIZES, torch.float64)
    sgd = replace(SGD, clip=0.0)
    keys = torch.arange(len(SIZES))
    monkeypatch.setattr(Engine, "_has_lanes", lambda self, rows: False)
    alone, alone_losses = trained("loop", network, shard, sgd, keys, device)
    monkeypatch.setattr(Engine, "_has_lanes", lambda self, rows: True)
    monkeypatch.setattr(engines, "LANES", 3)
    monkeypatch.setattr(Stacks, "size", lambda *args, **sizes: 3)
    side_by_side, losses = trained("loop", network, shard, sgd, keys, device)
    # Atomic sums of cuDNN's gradients round differently from one call to the next.
    off = 0.0 if device == "cpu" else 1e-9
    torch.testing.assert_close(side_by_side, alone, rtol=off, atol=off)
    torch.testing.assert_close(losses, alone_losses, rtol=off, atol=off, equal_nan=True)


# Batch norm of a few samples of one pixel is too ill-conditioned for float32; but for its
# pooling it is resnet18.
@pytest.mark.parametrize("name", [name for name in MODELS if name != "resnet18-pool"])
def test_batched_equals_loop_equals_naive(name: str, device: str) -> None:
    """In float32 and in float64."""
    sizes, sgd, shape = SIZES, SGD, shape_of(name)
    if name.startswith("resnet18"):
        # Torch refuses batch statistics of a single value, so the naive loop needs two
        # samples.
        sizes, sgd = (6, 0, 3), Recipe(1, 4, 0.002, momentum=0.9, weight_decay=1e-3)
    network = without_dropout(build(name, shape=shape, classes=10, seed=0))
    layout, shard = Layout.of(network), make_shard(shape, sizes, torch.float32)
    keys = randomness.client_keys(3, "test", 5, torch.arange(len(sizes)))
    assert len({min(size, sgd.batch_size) for size in sizes if size}) > 1, (
        "clients must share a step with different numbers of samples, or padding is not tested"
    )
    exact = replace(shard, inputs=shard.inputs.double())
    full = np.flatnonzero(sizes)
    alone = torch.stack(
        [
            layout.row(naive(network, exact, c, sgd, keys[c]), dtype=torch.float64)
            for c in full
        ]
    )
    steps = torch.tensor(
        [len(list(batches(shard, c, sgd, keys[c]))) for c in full.tolist()]
    )
    empty = sizes.index(0)
    for given in (shard, exact):
        dtype = given.inputs.dtype
        first = layout.row(network, dtype=dtype)
        batched, batched_loss = trained("batched", network, given, sgd, keys, device)
        loop, loop_loss = trained("loop", network, given, sgd, keys, device)
        for rows, losses in ((batched, batched_loss), (loop, loop_loss)):
            assert torch.equal(rows[empty], first), (
                "a client without data must not change"
            )
            assert losses[empty].isnan()
            assert_trained_as(rows[full], alone, first, steps)
        apart = (batched_loss - loop_loss)[full].abs() / loop_loss[full]
        if dtype == torch.float64:
            assert apart.max() < 1e-10
        else:
            least = TERMS * torch.finfo(dtype).eps
            assert apart.min() < least and apart.max() < FLIPPED


@pytest.mark.parametrize("steps", [1, 3, 11, 40])
def test_steps_in_place_of_epochs(
    steps: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every client with data takes so many steps, over its samples again and again; its
    loss is the mean over them.
    """
    network = build("cnn-digits", shape=(1, 8, 8), classes=10, seed=0)
    sizes = (*SIZES, 7)  # three samples in a batch: a third is no float32 number
    layout, shard = Layout.of(network), make_shard((1, 8, 8), sizes, torch.float64)
    keys = randomness.client_keys(3, "test", 5, torch.arange(len(sizes)))
    sgd = replace(SGD, epochs=0, steps=steps)
    batched, batched_loss = trained("batched", network, shard, sgd, keys, device)
    loop, loop_loss = trained("loop", network, shard, sgd, keys, device)
    still, still_loss = trained(
        "batched", network, shard, replace(sgd, lr=0.0), keys, device
    )
    if device == "cpu":
        monkeypatch.setattr(
            StackTraining,
            "_captured_shape",
            lambda self, _: StepShape(self._capacity, self._slots, False),
        )
    rounded, _ = trained("batched", network, shard, sgd, keys, device)
    first = layout.row(network, dtype=torch.float64)
    assert torch.equal(still, first.expand(len(sizes), -1))
    for client, size in enumerate(sizes):
        if size == 0:
            assert torch.equal(batched[client], first) and batched_loss[client].isnan()
            continue
        expected = layout.row(
            naive(network, shard, client, sgd, keys[client]), dtype=torch.float64
        )
        assert (
            max(relative(rows[client], expected) for rows in (batched, loop, rounded))
            < 1e-10
        )
        seen = torch.cat(list(batches(shard, client, sgd, keys[client])))
        losses = F.cross_entropy(
            copy.deepcopy(network).double()(shard.inputs[seen]), shard.targets[seen]
        )
        torch.testing.assert_close(
            still_loss[client], losses.detach(), rtol=1e-10, atol=0
        )
    torch.testing.assert_close(
        batched_loss, loop_loss, rtol=1e-10, atol=0, equal_nan=True
    )


def residual() -> nn.Module:
    """What ResNet-18 is made of, but small."""
    shortcut = nn.Sequential(nn.Conv2d(4, 6, 1, 2, bias=False), nn.BatchNorm2d(6))
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False),
        BasicBlock(4, 4),
        BasicBlock(4, 6, 2, shortcut),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 10),
    )


def catalogued(name: str) -> nn.Module:
    """A network of the catalogue, or the small one of ResNet-18's blocks."""
    if name != "residual":
        return build(name, shape=(1, 8, 8), classes=10, seed=0)
    torch.manual_seed(0)
    return residual()


@pytest.mark.parametrize("name", ["mlp", "cnn-bn", "cnn-digits", "residual"])
def test_networks_of_the_catalogue_may_be_called_by_vmap(name: str) -> None:
    network = catalogued(name)
    shard = make_shard((1, 8, 8), (5, 3), torch.float64)
    engine = Engine(network, Layout.of(network), shape=(1, 8, 8), mode="vmap")
    assert (engine.mode, engine.reason) == ("vmap", "")
    sgd, keys = replace(SGD, epochs=1), torch.arange(2)
    batched, by_vmap = (
        trained(mode, network, shard, sgd, keys)[0] for mode in ("batched", "vmap")
    )
    torch.testing.assert_close(by_vmap, batched, rtol=1e-9, atol=1e-10)


def test_a_single_sample_passes_norms_of_images_and_of_one_pixel() -> None:
    torch.manual_seed(0)
    # No activation follows the last norm, which turns a single value into about zero:
    # its sign would be a matter of rounding.
    network = nn.Sequential(
        *(nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4)),
        *(nn.Conv2d(4, 6, 2), nn.BatchNorm2d(6)),
        *(nn.Flatten(), nn.Linear(6, 10)),
    )
    shard = make_shard((1, 2, 2), (1, 1), torch.float64)
    sgd, keys = replace(SGD, epochs=1), torch.arange(2)
    batched, alone = (
        trained(mode, network, shard, sgd, keys)[0] for mode in ("batched", "loop")
    )
    torch.testing.assert_close(alone, batched, rtol=1e-9, atol=1e-10)


class Norms(nn.Module):
    """Batch norm over features: a single sample has one value per channel."""

    def __init__(self, *, looks: bool) -> None:
        super().__init__()
        self.looks = looks
        self.a = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.b = nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.a(x.flatten(1)))
        if self.looks:
            # Changes nothing, but prevents all ways but one client after another.
            y = y + 0 * float(y.detach().sum())
        return self.b(y)


def test_batch_norm_takes_a_last_batch_of_one_sample_in_every_way() -> None:
    torch.manual_seed(0)
    network, sample = Norms(looks=False), Sample((1, 2, 2), (10,))
    layout = Layout.of(network)
    shard, keys = make_shard(sample.shape, (5, 1), torch.float64), torch.arange(2)
    start = layout.row(network, dtype=torch.float64).repeat(2, 1)
    job = TrainingJob(start, shard, np.arange(2), SGD, keys=keys)
    found = {}
    for looks in (False, True):
        network.looks = looks
        engine = Engine(network, layout, shape=sample.shape, trial=sample)
        found[engine.mode] = engine.train(job)[0]
    assert found.keys() == {"batched", "loop"}
    torch.testing.assert_close(found["loop"], found["batched"], rtol=1e-9, atol=1e-10)
    # The second client's only values have no variance.
    variance = layout.views(found["loop"])["norm.running_var"][1]
    torch.testing.assert_close(variance, torch.full_like(variance, 0.9**SGD.epochs))


def test_cudnn_tries_kernels_for_full_batches_of_a_lone_client_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = set()

    def advance(self: StackTraining, shape: StepShape) -> None:
        tried.add((shape.slots, torch.backends.cudnn.benchmark))

    monkeypatch.setattr(StackTraining, "_advance", advance)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    network = build("mlp", shape=(1, 8, 8), classes=10, seed=0)
    shard = make_shard((1, 8, 8), (7, 2), torch.float32)
    sgd, keys = Recipe(1, 4, 0.1), torch.arange(2)
    trained("loop", network, shard, sgd, keys)
    assert tried == {(4, True), (3, False), (2, False)}
    tried.clear()
    trained("batched", network, shard, sgd, keys)
    assert tried == {(4, True), (3, True)}
    assert torch.backends.cudnn.benchmark


def test_augmented_images_are_the_same_in_a_stack_and_alone(device: str) -> None:
    """And wherever a client lives: with other clients' data beside its own."""
    network = build("cnn-digits", shape=(1, 8, 8), classes=10, seed=0)
    shard = replace(
        make_shard((1, 8, 8), (9, 0, 3, 10), torch.float64),
        blank=torch.zeros(1, dtype=torch.float64),
    )
    keys = randomness.client_keys(3, "test", 5, torch.arange(4))
    sgd = replace(SGD, augment=True)
    batched, loop = (
        trained(mode, network, shard, sgd, keys, device)[0]
        for mode in ("batched", "loop")
    )
    torch.testing.assert_close(batched, loop, rtol=1e-9, atol=1e-10)
    alone = replace(
        shard, index=shard.index[2:3, :3], sizes=(3,), clients=shard.clients[2:3]
    )
    torch.testing.assert_close(
        trained("loop", network, alone, sgd, keys[2:3], device)[0], loop[2:3]
    )
    plain = trained("batched", network, shard, SGD, keys, device)[0]
    assert (
        torch.equal(plain[1], batched[1]) and (plain != batched)[[0, 2, 3]].any(1).all()
    )


def test_shifts_are_uniform() -> None:
    shifts = training_shifts(
        randomness.client_keys(0, "test", 0, torch.arange(50)), 40, steps=30
    )
    assert shifts.shape == (30, 50, 40)
    counts = np.bincount(shifts.flatten().numpy(), minlength=SHIFTS)
    assert len(counts) == SHIFTS and stats.chisquare(counts).pvalue > 1e-3
    assert not torch.equal(shifts[0], shifts[1])


def test_stacks_that_grow_and_shrink(device: str) -> None:
    """Graphs of smaller stacks are given up when memory has to grow, and captured again
    afterwards.
    """
    network = build("cnn-digits", shape=(1, 8, 8), classes=10, seed=0)
    # Captured steps are of float32, in which a rounding may flip a pooling winner.
    dtype, off = (torch.float64, 1e-10) if device == "cpu" else (torch.float32, FLIPPED)
    shard = on(device, make_shard((1, 8, 8), (9, 12, 10, 11, 8, 13), dtype))
    layout = Layout.of(network)
    engine = Engine(network, layout, shape=image_shape(shard), mode="batched")
    keys = randomness.client_keys(3, "test", 5, torch.arange(6)).to(device)
    start = layout.row(network, dtype=dtype).repeat(6, 1).to(device)
    found: dict[int, Tensor] = {}
    for count in (2, 2, 2, 6, 6, 6, 2, 2, 6):
        rows, _ = engine.train(
            TrainingJob(start[:count], shard, np.arange(count), SGD, keys=keys[:count])
        )
        before = found.setdefault(count, rows.clone())
        assert relative(rows - start[:count], before - start[:count]) < off
    assert relative(found[2] - start[:2], found[6][:2] - start[:2]) < off


def test_as_many_steps_as_epochs_have_are_these_epochs(device: str) -> None:
    network = build("cnn-digits", shape=(1, 8, 8), classes=10, seed=0)
    shard = make_shard((1, 8, 8), (9, 12, 10), torch.float64)
    keys = randomness.client_keys(3, "test", 5, torch.arange(3))
    for mode in ("batched", "loop"):
        by_epochs = trained(mode, network, shard, replace(SGD, epochs=4), keys, device)
        by_steps = trained(
            mode, network, shard, replace(SGD, epochs=0, steps=12), keys, device
        )
        # On a GPU cuDNN adds in an order of its own choice; another sample would differ
        # by far more.
        tolerance = 0.0 if device == "cpu" else 1e-12
        torch.testing.assert_close(by_epochs, by_steps, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "length",
    [
        Length(3, 4),
        Length(0, 4, 1),
        Length(0, 4, 23),
        Length(0, 50, 9),
        Length(0, 1, 64),
    ],
)
def test_every_epoch_is_a_new_order_of_all_samples(length: Length) -> None:
    """Whatever the lengths: steps that the host expects, no sample twice in an epoch,
    none of others.
    """
    sizes = np.array([1, 40, 3, 0, 9, 4, 17])
    index = torch.arange(len(sizes))[:, None] * 100 + torch.arange(40)
    keys = randomness.client_keys(0, "test", 0, torch.arange(len(sizes)))
    steps = int(num_steps(sizes, length).max())
    samples, counts = training_samples(
        index,
        torch.from_numpy(sizes),
        keys,
        length,
        epochs=num_epochs(sizes, length),
        steps=steps,
    )
    assert counts.sum(0).tolist() == num_samples(sizes, length).tolist()
    assert (counts > 0).sum(0).tolist() == num_steps(sizes, length).tolist()
    shapes = step_shapes(-np.sort(-sizes), length)
    assert [shape.clients for shape in shapes] == (counts > 0).sum(1).tolist()
    assert [shape.slots for shape in shapes] == counts.max(1).values.tolist()
    for client, size in enumerate(sizes):
        seen = [
            int(i) - 100 * client
            for step in range(steps)
            for i in samples[step, client, : counts[step, client]]
        ]
        epochs = [
            seen[first : first + size] for first in range(0, len(seen), max(size, 1))
        ]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs[:-1])
        assert all(
            len(set(epoch)) == len(epoch) and max(epoch) < size for epoch in epochs
        )
        assert size < 9 or all(a != b for a, b in itertools.pairwise(epochs))


def test_dropout_is_the_clients_own(device: str) -> None:
    """A client draws the same masks in a stack, alone, and beside other clients; and
    other masks in another round.
    """
    network = build("cnn-pfl", shape=(3, 12, 12), classes=10, seed=0)
    shard = make_shard((3, 12, 12), SIZES, torch.float64)
    keys = randomness.client_keys(3, "test", 5, torch.arange(len(SIZES)))
    batched, _ = trained("batched", network, shard, SGD, keys)
    loop, _ = trained("loop", network, shard, SGD, keys, device)
    torch.testing.assert_close(batched, loop, rtol=1e-9, atol=1e-12)
    plain, _ = trained(
        "batched", without_dropout(copy.deepcopy(network)), shard, SGD, keys
    )
    assert relative(plain[0], batched[0]) > 1e-3, "dropout did nothing"
    layout = Layout.of(network)
    some = np.array([4, 2])
    rows = layout.row(network, dtype=torch.float64).repeat(2, 1)
    rows, _ = Engine(network, layout, shape=image_shape(shard), mode="batched").train(
        TrainingJob(rows, shard, some, SGD, keys=keys[some])
    )
    torch.testing.assert_close(rows, batched[some], rtol=1e-9, atol=1e-12)
    later, _ = trained(
        "batched",
        network,
        shard,
        SGD,
        randomness.client_keys(3, "test", 6, torch.arange(6)),
    )
    assert relative(later[0], batched[0]) > 1e-3


def test_dropout_scales_what_it_keeps() -> None:
    """Kept values grow by 1 / (1 − p), so that the mean stays; outside of training
    nothing happens.
    """
    network = StackedNetwork(nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.25)))
    tensors = {"0.weight": torch.ones(3, 1, 1), "0.bias": torch.zeros(3, 1)}
    keys = randomness.client_keys(0, "dropout", 0, torch.arange(3))
    ones = torch.ones(3 * 20_000, 1)
    dropped = network(tensors, ones, training=True, keys=keys[None])
    torch.testing.assert_close(dropped.unique(), torch.tensor([0.0, 1 / 0.75]))
    assert abs(float(dropped.mean()) - 1) < 0.02
    assert torch.equal(network(tensors, ones, keys=keys[None]), ones)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dropout_of_everything_leaves_zeros(dtype: torch.dtype) -> None:
    network = StackedNetwork(nn.Sequential(nn.Linear(1, 1), nn.Dropout(1)))
    tensors = {"0.weight": torch.ones(3, 1, 1), "0.bias": torch.zeros(3, 1)}
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    keys = randomness.client_keys(0, "dropout", 0, torch.arange(3))
    ones = torch.ones(3, 1, dtype=dtype)
    dropped = network(tensors, ones, training=True, keys=keys[None])
    assert torch.equal(dropped, torch.zeros_like(ones))


def test_dropout_keeps_the_right_share() -> None:
    keys = randomness.client_keys(0, "dropout", 0, torch.arange(50))
    kept = (randomness.uniform(keys, 10_000) >= 0.25).double().mean(1)
    assert abs(float(kept.mean()) - 0.75) < 0.002
    assert float(kept.std()) < 0.01, "clients' shares spread more than chance allows"
    assert (
        float(torch.corrcoef(randomness.uniform(keys, 10_000))[0, 1:].abs().max())
        < 0.05
    ), "clients' streams are related"


@pytest.mark.parametrize("mode", ["batched", "loop"])
@pytest.mark.parametrize("name", ["cnn-digits", "cnn-bn"])
def test_frozen_columns_keep_their_bits(name: str, mode: str) -> None:
    """Weights, biases and, with batch norm, the running statistics too."""
    network = build(name, shape=(1, 8, 8), classes=10, seed=0)
    layout, shard = Layout.of(network), make_shard((1, 8, 8), SIZES, torch.float32)
    head = layout.mask([layout.head])
    first = layout.row(network).repeat(len(SIZES), 1)
    keys = randomness.client_keys(0, "test", 0, torch.arange(len(SIZES)))
    engine = Engine(network, layout, shape=image_shape(shard), mode=mode)  # type: ignore[arg-type]
    rows, _ = engine.train(
        TrainingJob(first, shard, np.arange(len(SIZES)), SGD, keys=keys, columns=head)
    )
    assert torch.equal(rows[:, ~head], first[:, ~head])
    assert not torch.equal(rows[:, head], first[:, head])


def test_frozen_training_equals_naive_training_of_the_rest() -> None:
    network = build("cnn-digits", shape=(1, 8, 8), classes=10, seed=0)
    layout, shard = Layout.of(network), make_shard((1, 8, 8), (6, 9), torch.float64)
    keys = randomness.client_keys(0, "test", 0, torch.arange(2))
    rows = layout.row(network, dtype=torch.float64).repeat(2, 1)
    engine = Engine(network, layout, shape=image_shape(shard), mode="batched")
    rows, _ = engine.train(
        TrainingJob(
            rows,
            shard,
            np.arange(2),
            SGD,
            keys=keys,
            columns=layout.mask([layout.head]),
        )
    )
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name.startswith(layout.head))
    for client in range(2):
        expected = layout.row(
            naive(network, shard, client, SGD, keys[client]), dtype=torch.float64
        )
        assert relative(rows[client], expected) < 1e-10


@pytest.mark.parametrize("mode", ["batched", "loop"])
@pytest.mark.parametrize("name", ["cnn-digits", "residual"])
def test_evaluation_counts_right_answers(
    name: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "hpcfed.clients.evaluation.EVALUATION_SAMPLES", 12
    )  # several batches per client, the last short
    sizes = SIZES
    network = catalogued(name)
    layout, shard = Layout.of(network), make_shard((1, 8, 8), sizes, torch.float64)
    rows = layout.row(network, dtype=torch.float64).repeat(len(sizes), 1)
    rows += 0.1 * torch.randn_like(rows) * (rows != 0)
    engine = Engine(network, layout, shape=image_shape(shard), mode=mode)  # type: ignore[arg-type]
    plain = copy.deepcopy(network).double().eval()
    for given in (rows, rows[2].expand(len(sizes), -1)):
        score = engine.evaluate(given, shard, np.arange(len(sizes)))
        for client, size in enumerate(sizes):
            own = shard.index[client, :size]
            tensors = {
                key: view[0]
                for key, view in layout.views(given[client : client + 1]).items()
            }
            logits = torch.func.functional_call(plain, tensors, (shard.inputs[own],))
            assert float(score.correct[client]) == float(
                (logits.argmax(1) == shard.targets[own]).sum()
            )
            expected = (
                F.cross_entropy(logits, shard.targets[own], reduction="sum")
                if size
                else torch.zeros(())
            )
            torch.testing.assert_close(
                score.loss[client].double(), expected.double(), rtol=1e-9, atol=1e-9
            )
            assert score.count[client] == size


@pytest.mark.parametrize(
    ("device", "tf32"),
    [
        ("cpu", False),
        pytest.param("cuda", False, marks=pytest.mark.gpu),
        pytest.param("cuda", True, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("expanded", [False, True])
def test_evaluation_again_forgets_the_rows_and_clients_of_before(
    expanded: bool, device: str, tf32: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory and captured steps are kept between calls: each call finds what a new engine
    finds, with other rows, other clients, more of them, and all of it a third time. One
    row is judged as a stack of its copies, as our kernels want it.
    """
    monkeypatch.setattr(StackedNetwork, "copies", lambda self, like: 3)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    # Our kernels and cuDNN's round TensorFloat-32 differently, float32 hardly.
    mode: Literal["batched", "loop"] = "batched" if tf32 else "loop"
    network = build("cnn-digits", shape=(1, 8, 8), classes=10, seed=0)
    layout = Layout.of(network)
    # Which of two equal answers is given hangs on a rounding.
    dtype = torch.float64 if device == "cpu" else torch.float32
    shard = on(device, make_shard((1, 8, 8), SIZES, dtype))
    rows = layout.row(network, dtype=dtype).repeat(len(SIZES), 1)
    torch.manual_seed(0)
    rows = (rows + 0.1 * torch.randn_like(rows)).to(device)
    kept = Engine(network, layout, shape=(1, 8, 8), mode="batched")
    calls = [[0, 2], [3, 0, 5], [5], [1], [0, 1, 2, 3, 4, 5], [4, 3]]
    for members in 3 * calls:
        clients = np.array(members)
        judged = rows[torch.tensor(members, device=device)]
        if expanded:
            judged = judged[:1].expand(len(members), -1)
        new = Engine(network, layout, shape=(1, 8, 8), mode=mode)
        expected = new.evaluate(judged, shard, clients)
        found = kept.evaluate(judged, shard, clients)
        assert found.count.tolist() == [SIZES[client] for client in members]
        assert torch.equal(found.correct, expected.correct)
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-5)
        rows = rows.flip(0)


def test_evaluations_of_many_shards_are_not_all_kept() -> None:
    network = build("mlp", shape=SHAPES["mlp"], classes=10, seed=3)
    layout = Layout.of(network)
    engine = Engine(network, layout, shape=SHAPES["mlp"], mode="batched")
    rows = layout.row(network, dtype=torch.float32).repeat(3, 1)
    alive = []
    for _ in range(engines.EVALUATIONS + 2):
        shard = make_shard(SHAPES["mlp"], FEW, torch.float32)
        alive.append(weakref.ref(shard.inputs))
        engine.evaluate(rows, shard, np.arange(3))
        del shard
    assert [of() is None for of in alive] == 2 * [True] + engines.EVALUATIONS * [False]
    engine.forget()
    assert all(of() is None for of in alive)


def test_an_exception_names_the_clients() -> None:
    network = build("cnn-digits", shape=(1, 8, 8), classes=10, seed=0)
    layout, shard = Layout.of(network), make_shard((1, 8, 8), (3, 3), torch.float32)
    broken = Shard(
        shard.inputs, shard.targets + 1000, shard.index, shard.sizes, shard.clients
    )
    rows = layout.row(network).repeat(2, 1)
    keys = randomness.client_keys(0, "test", 0, torch.arange(2))
    with pytest.raises(IndexError) as caught:
        Engine(network, layout, shape=image_shape(shard), mode="loop").train(
            TrainingJob(rows, broken, np.arange(2), SGD, keys=keys)
        )
    assert "client 100" in caught.value.__notes__[0]


def test_a_layer_that_cannot_be_stacked_is_refused_by_name() -> None:
    network = nn.Sequential(nn.PReLU())
    with pytest.raises(TypeError, match="PReLU"):
        Engine(network, Layout.of(network), shape=(1, 1, 8))


def test_auto_chooses_by_size() -> None:
    def choice(name: str) -> str:
        network = build(name, shape=(3, 32, 32), classes=10, seed=0)
        return Engine(network, Layout.of(network), shape=(3, 32, 32)).mode

    assert choice("cnn-cifar") == choice("cnn-pfl") == "batched"
    assert choice("resnet18") == "loop"


@pytest.mark.parametrize("size", [1, 2, 4])
def test_clients_in_several_stacks_are_as_in_one(
    size: int, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    network = build("cnn-digits", shape=(1, 8, 8), classes=10, seed=0)
    shard = make_shard((1, 8, 8), SIZES, torch.float64)
    keys = randomness.client_keys(3, "test", 5, torch.arange(len(SIZES)))
    whole, whole_loss = trained("batched", network, shard, SGD, keys, device)
    monkeypatch.setattr(Stacks, "size", lambda self, batch_size, rows, **_: size)
    cut, cut_loss = trained("batched", network, shard, SGD, keys, device)
    torch.testing.assert_close(cut, whole, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(cut_loss, whole_loss, equal_nan=True)


def test_a_stack_fits_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the free memory holds half as many clients, and there is always room for
    one.
    """
    network = build("cnn-cifar", shape=(3, 32, 32), classes=10, seed=0)
    rows = torch.zeros(1, 10, device="meta")
    sizes = []
    for free in (2**34, 2**33, 2**10):
        engine = Engine(network, Layout.of(network), shape=(3, 32, 32))
        monkeypatch.setattr(accelerator, "free_memory", lambda device, free=free: free)
        sizes.append(engine.stacks.size(50, rows))
    assert sizes[0] // 2 == sizes[1] > 100
    assert sizes[2] == 1


def test_steps_rounded_up_to_larger_shapes_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU few shapes are captured: more clients and more slots than are active go
    through a step.
    """
    network = build("cnn-digits", shape=(1, 8, 8), classes=10, seed=0)
    shard = make_shard((1, 8, 8), SIZES, torch.float64)
    keys = randomness.client_keys(3, "test", 5, torch.arange(len(SIZES)))
    exact, exact_loss = trained("batched", network, shard, SGD, keys)
    monkeypatch.setattr(
        StackTraining,
        "_captured_shape",
        lambda self, _: StepShape(self._capacity, self._slots, False),
    )
    rounded, rounded_loss = trained("batched", network, shard, SGD, keys)
    torch.testing.assert_close(rounded, exact, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(rounded_loss, exact_loss, equal_nan=True)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_weights_that_update_themselves_end_the_same(
    momentum: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = build("cnn-digits", shape=(1, 8, 8), classes=10, seed=0)
    shard = make_shard((1, 8, 8), SIZES, torch.float64)
    keys = randomness.client_keys(3, "test", 5, torch.arange(len(SIZES)))
    sgd = Recipe(epochs=2, batch_size=4, lr=0.05, momentum=momentum, weight_decay=1e-3)
    expected, _ = trained("batched", network, shard, sgd, keys)
    asked = []
    monkeypatch.setattr(
        "hpcfed.kernels.linear.updates_itself",
        lambda weight, slots: asked.append(slots) or True,
    )
    got, _ = trained("batched", network, shard, sgd, keys)
    assert asked
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    asked.clear()
    clipped, _ = trained("batched", network, shard, replace(sgd, clip=0.1), keys)
    assert not asked, "a gradient's norm is known only when all of it is"
    assert relative(clipped[0], got[0]) > 1e-4


def test_steps_of_equal_shape_are_taken_together() -> None:
    """Seven steps of three clients and two of one, three at once."""
    shapes = step_shapes(np.array([9, 7, 7]), Length(1, 1))
    found = [(shape.clients, steps) for shape, steps in in_a_row(shapes, 3)]
    assert found == [(3, 3), (3, 3), (3, 1), (1, 1), (1, 1)]


def test_work_of_clients_in_any_order() -> None:
    """Two epochs in batches of 2; then the last client may take three steps only."""
    sizes, length = np.array([3, 0, 5]), Length(2, 2)
    work = work_of(sizes, length)
    assert (work.steps.tolist(), work.samples) == ([4, 0, 6], 16)
    assert (work.order.tolist(), work.in_order) == ([2, 0], False)
    late = work_of(sizes, length, np.array([9, 9, 3]))
    assert (late.steps.tolist(), late.samples) == ([4, 0, 3], 11)
    assert late.order.tolist() == [0, 2]
    # As asked for the first time, and not what was kept for other limits.
    assert work_of(sizes, length).order.tolist() == [2, 0]
    assert work_of(np.array([5, 3]), length).in_order


def test_a_subset_of_one_expanded_row_stays_one_row() -> None:
    shard = make_shard((1, 2, 2), FEW, torch.float32)
    rows, keys = torch.arange(4.0).expand(3, -1), torch.arange(3)
    job = TrainingJob(rows, shard, np.arange(3), SGD, keys)
    part = job.subset(np.array([2, 0]))
    assert torch.equal(part.rows, rows[[2, 0]])
    assert part.rows.stride(0) == 0


def test_sizes_to_which_shapes_are_rounded() -> None:
    sizes = [rounded_up(n, 8) for n in range(1, 1000)]
    assert all(n <= size <= n * 1.125 for n, size in enumerate(sizes, 1))
    assert len(set(sizes)) < 70


def test_what_comes_three_times_in_a_row_is_worth_a_graph() -> None:
    repeats = Repeats(times=3, most=1)
    found = [repeats(key) for key in "aabaaabaccc"]
    assert found == [False] * 5 + [True, False, True] + [False] * 3


def rounds_of_clients(
    name: str, sizes: tuple[int, ...], device: str
) -> tuple[list[Tensor], Engine]:
    """Train five cohorts of the same clients, each from the rows of the last one."""
    network = build(name, shape=(1, 8, 8), classes=10, seed=0)
    layout = Layout.of(network)
    shard = on(device, make_shard((1, 8, 8), sizes, torch.float32))
    engine = Engine(network, layout, shape=(1, 8, 8))
    rows = layout.row(network).to(device).expand(len(sizes), -1)
    found = []
    for round in range(5):
        keys = randomness.client_keys(3, "test", round, torch.arange(len(sizes)))
        job = TrainingJob(rows, shard, np.arange(len(sizes)), SGD, keys.to(device))
        rows, losses = engine.train(job)
        found += [rows, losses.mean, losses.seen]
    return found, engine


def same_bits(one: list[Tensor], other: list[Tensor]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a.nan_to_num(-1), b.nan_to_num(-1)) for a, b in pairs)


@pytest.mark.parametrize("limited", [False, True])
def test_plans_that_are_kept_are_those_of_the_cohort(
    device: str, limited: bool
) -> None:
    """An engine that has trained other cohorts gives what a new one gives: for the same
    clients, others of the same sizes, fewer, and other limits.
    """
    network = build("mlp", shape=(1, 8, 8), classes=10, seed=0)
    layout = Layout.of(network)
    shard = on(device, make_shard((1, 8, 8), (9, 9, 4, 4, 7), torch.float32))
    shared = Engine(network, layout, shape=(1, 8, 8))
    cohorts = [[0, 2], [0, 2], [1, 3], [2, 0], [4], [0, 1, 4], [0, 2], [0, 2]]
    for round, clients in enumerate(cohorts):
        keys = randomness.client_keys(3, "test", round, torch.tensor(clients))
        rows = layout.row(network).to(device).expand(len(clients), -1)
        job = TrainingJob(rows, shard, np.array(clients), SGD, keys.to(device))
        if limited:
            job = replace(job, limits=np.full(len(clients), 1 + round // 2))
        alone = Engine(network, layout, shape=(1, 8, 8))
        (found, losses), (expected, mean) = shared.train(job), alone.train(job)
        assert torch.equal(losses.seen, mean.seen)
        # On a GPU a stack of another size may take other kernels; other samples would be
        # further off.
        near = {"rtol": 0.0, "atol": 0.0 if device == "cpu" else 1e-3}
        torch.testing.assert_close(found, expected, **near)
        torch.testing.assert_close(losses.mean, mean.mean, **near)


@pytest.mark.parametrize("refused", [False, True])
def test_all_steps_of_a_cohort_at_once_change_nothing(
    refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU: a replay calls again what was captured, whatever has changed since;
    the graph of all steps may be refused.
    """
    expected, _ = rounds_of_clients("cnn-digits", SIZES, "cpu")
    at_once = []

    def recorded(function: Callable[[], None]) -> SimpleNamespace:
        if "all_steps" in repr(function):
            at_once.append(function)
            if refused:
                raise RuntimeError("planted")
        return SimpleNamespace(replay=function)

    def begin(self: Replays, *_: object, **__: object) -> None:
        self._on, self._may_fail, self._graphs = True, False, {}
        self._recorder = SimpleNamespace(record=recorded, forget=lambda: None)

    monkeypatch.setattr(Replays, "__init__", begin)
    found, engine = rounds_of_clients("cnn-digits", SIZES, "cpu")
    assert same_bits(found, expected)
    (training,) = engine._trainings.values()
    (whole,) = training._repeats._worthy
    assert len(at_once) == 1
    assert (training._replays._graphs[whole] is None) == refused


@pytest.mark.gpu
@pytest.mark.captures
@pytest.mark.parametrize("sizes", [SIZES, (40, 40, 40)])
@pytest.mark.parametrize("name", ["mlp", "cnn-digits", "cnn-bn"])
def test_a_graph_of_all_steps_has_the_bits_of_single_ones(
    name: str, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, engine = rounds_of_clients(name, sizes, "cuda")
    (training,) = engine._trainings.values()
    (whole,) = training._repeats._worthy
    assert training._replays._graphs[whole] is not None
    monkeypatch.setattr("hpcfed.clients.training.MOST_AT_ONCE", 0)
    expected, engine = rounds_of_clients(name, sizes, "cuda")
    (training,) = engine._trainings.values()
    assert not training._repeats._worthy
    assert same_bits(found, expected)


@pytest.mark.gpu
@pytest.mark.captures
def test_steps_are_captured_on_a_gpu() -> None:
    network = build("cnn-digits", shape=(1, 8, 8), classes=10, seed=0)
    layout, shard = (
        Layout.of(network),
        on("cuda", make_shard((1, 8, 8), (40, 40), torch.float32)),
    )
    engine = Engine(network, layout, shape=(1, 8, 8))
    rows = layout.row(network).cuda().expand(2, -1)
    keys = randomness.client_keys(3, "test", 5, torch.arange(2)).cuda()
    engine.train(TrainingJob(rows, shard, np.arange(2), SGD, keys=keys))
    (training,) = engine._trainings.values()
    assert any(graph is not None for graph in training._replays._graphs.values())


@pytest.mark.gpu
@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("name", ["cnn-cifar", "cnn-pfl", "cnn-fmnist"])
def test_tensor_cores_stay_close_to_float64(
    name: str, halves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step of uneven clients: gradients by our own kernels, in halves or in
    TensorFloat-32, against plain float64.
    """
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    monkeypatch.setattr(Classification, "bounded", halves)
    shape = (1, 28, 28) if name == "cnn-fmnist" else (3, 32, 32)
    network = without_dropout(build(name, shape=shape, classes=10, seed=0))
    sizes, sgd = (50, 13, 1, 0, 32), Recipe(epochs=1, batch_size=50, lr=1.0)
    layout, shard = Layout.of(network), make_shard(shape, sizes, torch.float32)
    keys = randomness.client_keys(3, "test", 5, torch.arange(len(sizes)))
    rows, _ = trained("batched", network, shard, sgd, keys, "cuda")
    first = layout.row(network, dtype=torch.float64)
    exact = replace(shard, inputs=shard.inputs.double())
    for client, size in enumerate(sizes):
        if size:
            expected = layout.row(
                naive(network, exact, client, sgd, keys[client]), dtype=torch.float64
            )
            # Winners of the pooling flip: cuDNN's own TensorFloat-32 is up to 0.058
            # away here, ours up to 0.040.
            assert relative(rows[client].double() - first, expected - first) < 0.06


def refuse(monkeypatch: pytest.MonkeyPatch, above: int) -> None:
    """Stacks of more clients find no memory."""
    train, judge = StackTraining.run, StackEvaluation.run

    def training(self: StackTraining, job: TrainingJob, trained: Tensor) -> Losses:
        if len(job.rows) > above:
            raise torch.OutOfMemoryError("planted")
        return train(self, job, trained)

    def judging(self: StackEvaluation, rows: Tensor, clients: np.ndarray) -> Sums:
        if len(rows) > above:
            raise torch.OutOfMemoryError("planted")
        return judge(self, rows, clients)

    monkeypatch.setattr(StackTraining, "run", training)
    monkeypatch.setattr(StackEvaluation, "run", judging)


def test_less_memory_than_thought_means_fewer_clients_at_a_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine that halves its stacks gives the bits of one that takes so few from the
    start; each step down is said once, and lasts.
    """
    network = build("mlp", shape=SHAPES["mlp"], classes=10, seed=3)
    shard, layout, keys = (
        make_shard(SHAPES["mlp"], SIZES, torch.float32),
        Layout.of(network),
        torch.arange(6),
    )
    clients, rows = np.arange(6), layout.row(network, dtype=torch.float32).repeat(6, 1)
    few, many = (
        Engine(network, layout, shape=SHAPES["mlp"], mode="batched") for _ in range(2)
    )
    few.stacks.most = 2
    expected = few.train(TrainingJob(rows, shard, clients, SGD, keys=keys))[0]
    refuse(monkeypatch, 3)
    for _ in range(2):
        found, losses = many.train(TrainingJob(rows, shard, clients, SGD, keys=keys))
        assert torch.equal(found, expected)
        assert losses.mean.isnan().tolist() == [False, True, False, False, False, False]
    assert many.halvings == 1
    score, scored = (
        many.evaluate(found, shard, clients),
        few.evaluate(expected, shard, clients),
    )
    assert torch.equal(score.correct, scored.correct) and torch.equal(
        score.loss, scored.loss
    )
    assert (
        capsys.readouterr().err
        == "hpcfed: out of memory training 5 clients at a time; going on with 2\n"
    )


def test_captured_steps_are_given_back_before_another_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = build("mlp", shape=SHAPES["mlp"], classes=10, seed=3)
    shard, layout = make_shard(SHAPES["mlp"], SIZES, torch.float32), Layout.of(network)
    engine = Engine(network, layout, shape=SHAPES["mlp"], mode="batched")
    train, failed = StackTraining.run, list[weakref.ref[StackTraining]]()

    def running(self: StackTraining, job: TrainingJob, trained: Tensor) -> Tensor:
        assert all(other() is None for other in failed), (
            "the memory of the larger stack is still there"
        )
        if len(job.rows) > 3:
            failed.append(weakref.ref(self))
            raise torch.OutOfMemoryError("planted")
        return train(self, job, trained)

    monkeypatch.setattr(StackTraining, "run", running)
    rows = layout.row(network, dtype=torch.float32).repeat(6, 1)
    engine.train(TrainingJob(rows, shard, np.arange(6), SGD, keys=torch.arange(6)))


@pytest.mark.gpu
@pytest.mark.own_kernels
def test_no_memory_within_a_capture_means_fewer_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    network = build("cnn-cifar", shape=(3, 32, 32), classes=10, seed=3)
    shard, layout = (
        on("cuda", make_shard((3, 32, 32), (16,) * 6, torch.float32)),
        Layout.of(network),
    )
    rows, keys = layout.row(network).repeat(6, 1).cuda(), torch.arange(6).cuda()
    plain, engine = (
        Engine(network, layout, shape=(3, 32, 32), mode="batched") for _ in range(2)
    )
    halves = []
    # By threes, as after the failure: other stacks choose other kernels.
    for some in (slice(0, 3), slice(3, 6)):
        half = TrainingJob(rows[some], shard, np.arange(6)[some], SGD, keys=keys[some])
        halves.append(plain.train(half)[0])
    expected = torch.cat(halves)
    work, failed = convolution._weight_gradient, list[int]()

    def failing(*words: Any, **more: Any) -> Any:
        """Where the branch is at work."""
        if torch.cuda.is_current_stream_capturing() and not failed:
            failed.append(1)
            raise torch.OutOfMemoryError("planted")
        return work(*words, **more)

    monkeypatch.setattr(convolution, "_weight_gradient", failing)
    # Steps are captured when they come again: within a short training none does.
    for _ in range(2):
        job = TrainingJob(rows, shard, np.arange(6), SGD, keys=keys)
        found, _ = engine.train(job)
    assert failed and engine.halvings == 1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_part_of_a_wider_shard_trains_as_by_itself() -> None:
    """The others of the whole have more samples than a batch, these have fewer."""
    network = build("mlp", shape=SHAPES["mlp"], classes=10, seed=3)
    whole, layout = (
        make_shard(SHAPES["mlp"], (3, 2, 30), torch.float64),
        Layout.of(network),
    )
    own = sub_shard(whole, 0, whole.clients[:2])
    rows = layout.row(network, dtype=torch.float64).repeat(3, 1)
    engine = Engine(network, layout, shape=SHAPES["mlp"], mode="batched")
    sgd, keys = replace(SGD, batch_size=8), torch.arange(3)
    together, _ = engine.train(TrainingJob(rows, whole, np.arange(3), sgd, keys=keys))
    alone, _ = engine.train(
        TrainingJob(rows[:2], own, np.arange(2), sgd, keys=keys[:2])
    )
    torch.testing.assert_close(alone, together[:2], rtol=1e-12, atol=1e-14)


def test_a_stack_is_no_larger_than_a_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    network = build("mlp", shape=SHAPES["mlp"], classes=10, seed=3)
    engine = Engine(network, Layout.of(network), shape=SHAPES["mlp"], mode="batched")
    monkeypatch.setattr(engine.stacks, "size", lambda *words, **more: 10**6)
    stacks = [
        len(stack) for stack in engine.stacks.cut(np.arange(70_000), 16, torch.empty(1))
    ]
    assert stacks == [35_000, 35_000]


def test_forgetting_gives_up_the_shard() -> None:
    network = build("mlp", shape=SHAPES["mlp"], classes=10, seed=3)
    shard, layout = make_shard(SHAPES["mlp"], (3, 2), torch.float32), Layout.of(network)
    engine, images = (
        Engine(network, layout, shape=SHAPES["mlp"], mode="batched"),
        weakref.ref(shard.inputs),
    )
    engine.train(
        TrainingJob(
            layout.row(network).repeat(2, 1),
            shard,
            np.arange(2),
            SGD,
            keys=torch.arange(2),
        )
    )
    del shard
    assert images() is not None
    engine.forget()
    assert images() is None


def test_one_client_that_does_not_fit_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = build("mlp", shape=SHAPES["mlp"], classes=10, seed=3)
    refuse(monkeypatch, 0)
    with pytest.raises(torch.OutOfMemoryError) as error:
        trained(
            "batched",
            network,
            make_shard(SHAPES["mlp"], SIZES, torch.float32),
            SGD,
            torch.arange(6),
        )
    assert "while training client 102" in one_line(
        error.value
    ) and "not even one client" in one_line(error.value)
