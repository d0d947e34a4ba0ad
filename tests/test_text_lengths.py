"""Steps on texts leave out padding that none of their samples needs, and no client's
numbers change but by rounding.
"""

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcfed.clients.engine import Engine
from hpcfed.clients.job import Losses, Recipe, TrainingJob
from hpcfed.clients.lengths import unit
from hpcfed.data.shards import Shard
from hpcfed.models.layout import Layout
from hpcfed.models.own import Sample
from hpcfed.runtime import randomness
from tests.naive import batches, make_shard

SIZES = (5, 0, 13, 8, 1)
RECIPE = Recipe(epochs=2, batch_size=2, lr=0.05, momentum=0.9, clip=1.0)
LENGTH, VOCABULARY, WIDTH = 40, 7, 6
Mode = Literal["batched", "vmap", "loop"]
PASSED: list[int] = []
"""The lengths of the texts in all passes."""
ROUNDING = 1e-12
"""Eighteen steps round sums of some hundred products to 2⁻⁵³ each; clipping and momentum
enlarge that a few times. A position more or less would show in the first digits.
"""


class Attends(nn.Module):
    """A network that looks back, and perhaps ahead."""

    def __init__(self, *, ahead: bool = False, drops: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(drops)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.ahead = ahead

    def forward(self, x: Tensor) -> Tensor:
        PASSED.append(x.shape[-1])
        h = self.embedding(x)
        seen = F.scaled_dot_product_attention(h, h, h, is_causal=not self.ahead)
        y: Tensor = self.head(self.drop(torch.tanh(self.mix(h + seen))))
        return y


class Fixed(Attends):
    """A network that knows only texts of one length."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Linear(1, LENGTH * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        offset = self.place.weight.new_zeros(len(x), 1)
        y: Tensor = super().forward(x)
        return y + self.place(offset).unflatten(1, (LENGTH, WIDTH))[..., :1]


def texts() -> Shard:
    shard = make_shard((1, 1, 1), SIZES, torch.float64)
    generator = torch.Generator().manual_seed(4)
    size = (len(shard.inputs), LENGTH)
    inputs = torch.randint(VOCABULARY, size, generator=generator)
    targets = torch.randint(VOCABULARY, size, generator=generator)
    # Prompts without targets, and ends at different places.
    begins = torch.randint(4, (size[0], 1), generator=generator)
    ends = torch.randint(4, LENGTH // 2, (size[0], 1), generator=generator)
    ends[shard.index[2, 0]] = LENGTH
    place = torch.arange(LENGTH)
    targets[(place < begins) | (place >= ends)] = -100
    return replace(shard, inputs=inputs, targets=targets, task="next-token")


def engine_of(network: nn.Module, mode: Mode | Literal["auto"], lengths: int) -> Engine:
    sample = Sample((LENGTH,), (LENGTH, VOCABULARY), VOCABULARY)
    layout = Layout.of(network)
    engine = Engine(
        network, layout, shape=(LENGTH,), mode=mode, trial=sample, lengths=lengths
    )
    PASSED.clear()
    return engine


def keys() -> Tensor:
    return randomness.client_keys(3, "test", 5, torch.arange(len(SIZES)))


def trained(engine: Engine, network: nn.Module, shard: Shard) -> tuple[Tensor, Losses]:
    row = engine.layout.row(network, dtype=torch.float64)
    rows, clients = row.expand(len(SIZES), -1), np.arange(len(SIZES))
    return engine.train(TrainingJob(rows, shard, clients, RECIPE, keys()))


def needed(shard: Shard, samples: Tensor) -> int:
    """Return the position after the last target of all samples."""
    return 1 + max(
        at for at in range(LENGTH) if (shard.targets[samples, at] != -100).any()
    )


def rounded(length: int) -> int:
    """Return the next of 8, 16, …, 40: eight lengths would not be multiples of 8."""
    return -(-length // 8) * 8


MODES = ["batched", "vmap", "loop"]


@pytest.mark.parametrize("mode", MODES)
def test_training_is_the_same_without_padding(mode: Mode) -> None:
    torch.manual_seed(3)
    network, shard = Attends(), texts()
    whole, at_full_length = trained(engine_of(network, mode, 1), network, shard)
    assert set(PASSED) == {LENGTH}
    found, losses = trained(engine_of(network, mode, 8), network, shard)
    assert (found - whole).norm() <= ROUNDING * whole.norm()
    torch.testing.assert_close(
        losses.mean, at_full_length.mean, rtol=ROUNDING, atol=0, equal_nan=True
    )
    assert torch.equal(losses.seen, at_full_length.seen)
    of_clients = [
        list(batches(shard, client, RECIPE, keys()[client]))
        for client, size in enumerate(SIZES)
        if size
    ]
    if mode == "loop":
        # Longest first, one client after another.
        in_turn = sorted(of_clients, key=lambda steps: -len(steps))
        steps = [batch for own in in_turn for batch in own]
    else:
        most = max(map(len, of_clients))
        steps = []
        for at in range(most):
            steps.append(torch.cat([own[at] for own in of_clients if at < len(own)]))
    expected = [rounded(needed(shard, batch)) for batch in steps]
    assert expected == PASSED and min(expected) < max(expected) == LENGTH
    assert at_full_length.positions is not None and losses.positions is not None
    samples = [2 * size for size in SIZES]
    assert at_full_length.positions.tolist() == [LENGTH * size for size in samples]
    if mode == "loop":
        own = [
            sum(len(batch) * rounded(needed(shard, batch)) for batch in own)
            for own in of_clients
        ]
        assert losses.positions.tolist() == [own[0], 0, *own[1:]]
    assert (losses.positions <= at_full_length.positions).all()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["batched", "loop"])
def test_captured_steps_of_several_lengths(mode: Mode) -> None:
    """Four rounds: plain, captured, replayed, with other orders of samples."""
    torch.manual_seed(3)
    network = Attends()
    shard = texts()
    on = {name: getattr(shard, name).cuda() for name in ("inputs", "targets", "index")}
    shard, found = replace(shard, **on), []
    for lengths in (1, 8):
        sample = Sample((LENGTH,), (LENGTH, VOCABULARY), VOCABULARY)
        engine = Engine(
            network, Layout.of(network), shape=(LENGTH,), mode=mode, trial=sample,
            lengths=lengths, device=torch.device("cuda"),
        )  # fmt: skip
        rows = engine.layout.row(network, dtype=torch.float64).cuda()
        rows = rows.repeat(len(SIZES), 1)
        for round in range(4):
            drawn = torch.arange(len(SIZES), device="cuda")
            key = randomness.client_keys(3, "test", round, drawn)
            job = TrainingJob(rows, shard, np.arange(len(SIZES)), RECIPE, key)
            rows, _ = engine.train(job)
        found.append(rows)
    assert (found[1] - found[0]).norm() <= 4 * ROUNDING * found[0].norm()


@pytest.mark.parametrize("one_row", [False, True])
def test_scores_are_the_same_without_padding(
    one_row: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcfed.clients.evaluation.EVALUATION_SAMPLES", 5)
    torch.manual_seed(3)
    # In evaluation nothing is dropped, so shorter steps draw nothing else.
    network, shard = Attends(drops=0.5), texts()
    clients, scores = np.arange(len(SIZES)), []
    for lengths in (1, 8):
        engine = engine_of(network, "batched", lengths)
        rows = engine.layout.row(network, dtype=torch.float64).expand(len(SIZES), -1)
        if not one_row:
            rows = rows * torch.linspace(1, 2, len(SIZES))[:, None]
        scores.append(engine.evaluate(rows, shard, clients))
        passed = list(PASSED)
    whole, found = scores
    assert torch.equal(found.count, whole.count)
    assert torch.equal(found.correct, whole.correct)
    torch.testing.assert_close(found.loss, whole.loss, rtol=ROUNDING, atol=0)
    # The longest come first.
    assert passed == sorted(passed, reverse=True)
    if one_row:
        owned = [shard.index[at, :size] for at, size in enumerate(SIZES)]
        needs = [needed(shard, sample[None]) for sample in torch.cat(owned)]
        needs.sort(reverse=True)
        # 27 samples in six equal batches of five.
        assert passed == [rounded(needs[at]) for at in range(0, 27, 5)]
    else:
        assert passed[0] == LENGTH > passed[-1]


@pytest.mark.parametrize("mode", MODES)
def test_networks_that_must_see_whole_texts(mode: Mode) -> None:
    torch.manual_seed(3)
    shard = texts()
    for network in (Attends(ahead=True), Fixed(), Attends(drops=0.5)):
        _, losses = trained(engine_of(network, mode, 8), network, shard)
        assert set(PASSED) == {LENGTH}
        assert losses.positions is not None
        assert losses.positions.tolist() == [2 * LENGTH * size for size in SIZES]


def test_texts_that_all_need_their_length_make_no_step_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hpcfed.clients.lengths.TextLengths.of_steps", None)
    network, shard = Attends(), texts()
    whole = replace(shard, targets=shard.targets.where(shard.targets >= 0, 1))
    trained(engine_of(network, "batched", 8), network, whole)
    assert set(PASSED) == {LENGTH}


@pytest.mark.parametrize(
    ("full", "number", "expected"),
    [(512, 8, 64), (500, 8, 64), (40, 8, 8), (20, 2, 16), (7, 8, 8), (1024, 1, 1024)],
)
def test_lengths_are_multiples_of_eight(full: int, number: int, expected: int) -> None:
    assert unit(full, number) == expected
    assert -(-full // expected) <= number
