"""Fisher information, and the pull that it puts into the loss."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcfed.clients import engine as engines
from hpcfed.clients import fisher as fishers
from hpcfed.clients import stacks
from hpcfed.clients.engine import Engine
from hpcfed.clients.fisher import Fisher
from hpcfed.clients.job import Recipe, TrainingJob
from hpcfed.clients.pull import Pull, Strengths
from hpcfed.models.cost import cost
from hpcfed.models.kernel_layout import KernelLayout
from hpcfed.models.layout import Layout
from hpcfed.models.networks import build
from hpcfed.models.own import Sample
from tests.naive import batches, make_shard


def pulled_alone(
    network: nn.Module,
    row: Tensor,
    client: int,
    shard: Any,
    sgd: Recipe,
    key: Tensor,
    pull: Pull,
) -> Tensor:
    """One client alone in plain torch, with the terms written as in the paper."""
    layout, network = Layout.of(network), copy.deepcopy(network).double().train()
    load(network, layout, row)
    reference, mask = (
        layout.views(own[client][None].double()) for own in (pull.reference, pull.mask)
    )
    optimiser = torch.optim.SGD(
        network.parameters(),
        lr=sgd.lr,
        momentum=sgd.momentum,
        weight_decay=sgd.weight_decay,
    )

    def norm(names: list[str], masked: bool) -> Tensor:
        parts = [
            (p - reference[n][0]) * (mask[n][0] if masked else 1)
            for n, p in network.named_parameters()
            if n in names
        ]
        return (sum(part.square().sum() for part in parts) + 1e-12).sqrt()

    every = [name for name, _ in network.named_parameters()]
    blocks = [
        [n for n in every if n.rpartition(".")[0] in block] for block in layout.blocks
    ]
    for batch in batches(shard, client, sgd, key):
        optimiser.zero_grad()
        loss = F.cross_entropy(network(shard.inputs[batch]), shard.targets[batch])
        loss = loss + pull.strengths.layers * sum(
            norm(block, False) for block in blocks
        )
        loss = (
            loss
            + pull.strengths.whole * norm(every, False)
            + pull.strengths.masked * norm(every, True)
        )
        loss.backward()
        if sgd.clip:
            nn.utils.clip_grad_norm_(network.parameters(), sgd.clip)
        optimiser.step()
    return layout.row(network, dtype=torch.float64)


def load(network: nn.Module, layout: Layout, row: Tensor) -> None:
    own = {name: view[0] for name, view in layout.views(row[None]).items()}
    network.load_state_dict(network.state_dict() | own)


@pytest.mark.parametrize("mode", ["batched", "loop"])
def test_the_pull_is_the_gradient_of_its_terms(
    mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard, network = (
        make_shard((1, 8, 8), (5, 9, 12, 3), torch.float64),
        build("cnn-bn", shape=(1, 8, 8), classes=10, seed=0),
    )
    layout = Layout.of(network)
    engine = Engine(network, layout, shape=(1, 8, 8), mode=mode)
    # Stacks of two, so that references and masks must follow their clients.
    monkeypatch.setattr(stacks, "CPU_ACTIVATIONS", 2 * 4 * engine.cost.activations)
    first = layout.row(network, dtype=torch.float64)
    rows = first + 0.1 * torch.rand(4, layout.num_columns, dtype=torch.float64)
    pull = Pull(
        Strengths(0.3, 0.2, 0.5),
        first + 0.1 * torch.rand_like(rows),
        torch.rand_like(rows) < 0.4,
    )
    keys, sgd = (
        torch.arange(4) + 77,
        Recipe(2, 4, 0.05, momentum=0.9, weight_decay=0.01, clip=1.0),
    )
    trained, losses = engine.train(
        TrainingJob(rows, shard, np.arange(4), sgd, keys=keys, pull=pull)
    )
    for client in range(4):
        expected = pulled_alone(
            network, rows[client], client, shard, sgd, keys[client], pull
        )
        torch.testing.assert_close(trained[client], expected, rtol=1e-9, atol=1e-11)
    free, _ = engine.train(TrainingJob(rows, shard, np.arange(4), sgd, keys=keys))
    assert not torch.allclose(free, trained) and losses.mean.isfinite().all()


def test_fisher_information_leaves_cudnn_as_it_is() -> None:
    network, seen = build("cnn-bn", shape=(1, 8, 8), classes=10, seed=0), list[bool]()
    network.register_forward_hook(lambda *_: seen.append(torch.backends.cudnn.enabled))
    shard, layout = make_shard((1, 8, 8), (5,), torch.float64), Layout.of(network)
    engine = Engine(network, layout, shape=(1, 8, 8))
    seen.clear()
    engine.fisher(layout.row(network, dtype=torch.float64)[None], shard, np.arange(1))
    assert seen and all(seen)


def test_a_client_that_diverged_leaves_nothing_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows as they lie on a GPU, with columns without meaning between the tensors."""
    monkeypatch.setattr(
        engines,
        "KernelLayout",
        lambda layout, device: KernelLayout(layout, torch.device("cuda")),
    )
    shard, network = (
        make_shard((1, 8, 8), (9, 12), torch.float64),
        build("cnn-bn", shape=(1, 8, 8), classes=10, seed=0),
    )
    layout = Layout.of(network)
    rows = layout.row(network, dtype=torch.float64) + 0.1 * torch.rand(
        2, layout.num_columns, dtype=torch.float64
    )
    pull = Pull(
        Strengths(0.3, 0.2, 0.5), torch.zeros_like(rows), torch.rand_like(rows) < 0.4
    )
    sgd, clients, keys = (
        Recipe(2, 4, 0.05, momentum=0.9, weight_decay=0.01, clip=1.0),
        np.arange(2),
        torch.arange(2),
    )

    def after(*starts: Tensor) -> Tensor:
        engine = Engine(network, layout, shape=(1, 8, 8), mode="batched")
        *_, (trained, _) = [
            engine.train(TrainingJob(start, shard, clients, sgd, keys=keys, pull=pull))
            for start in starts
        ]
        return trained

    expected = after(rows)
    assert expected.isfinite().all() and torch.equal(
        after(torch.full_like(rows, torch.nan), rows), expected
    )


def test_frozen_columns_keep_their_bits_under_a_pull() -> None:
    shard, network = (
        make_shard((1, 8, 8), (9, 12), torch.float64),
        build("cnn-bn", shape=(1, 8, 8), classes=10, seed=0),
    )
    layout = Layout.of(network)
    engine = Engine(network, layout, shape=(1, 8, 8))
    rows = layout.row(network, dtype=torch.float64) + torch.rand(
        2, layout.num_columns, dtype=torch.float64
    )
    columns, pull = (
        layout.mask(["conv2", "head"]),
        Pull(Strengths(whole=1.0), torch.zeros_like(rows)),
    )
    columns[layout.entries[0].start + 3] = True  # within a tensor
    sgd = Recipe(6, 4, 1e-3, momentum=0.9, weight_decay=0.01, clip=1.0)
    trained, _ = engine.train(
        TrainingJob(
            rows,
            shard,
            np.arange(2),
            sgd,
            keys=torch.arange(2),
            columns=columns,
            pull=pull,
        )
    )
    assert torch.equal(trained[:, ~columns], rows[:, ~columns])
    assert trained.isfinite().all() and (trained[:, columns] != rows[:, columns]).all()


@pytest.mark.parametrize("mode", ["batched", "loop"])
def test_gates_hold_what_a_client_has_not_at_zero(mode: Any) -> None:
    """Compare with clients that are trained alone with these columns frozen."""
    shard, network = (
        make_shard((1, 8, 8), (9, 12), torch.float64),
        build("cnn-bn", shape=(1, 8, 8), classes=10, seed=0),
    )
    layout = Layout.of(network)
    engine = Engine(network, layout, shape=(1, 8, 8), mode=mode)
    gates = torch.rand(2, layout.num_columns) < 0.7
    gates[:, layout.num_parameters :] = True  # running statistics are not gated
    rows = layout.row(network, dtype=torch.float64) * gates
    sgd = Recipe(2, 4, 0.05, momentum=0.9, weight_decay=0.01, clip=1.0)
    trained, _ = engine.train(
        TrainingJob(rows, shard, np.arange(2), sgd, keys=torch.arange(2), gates=gates)
    )
    assert not trained[~gates].any() and not torch.equal(trained, rows)
    for client in range(2):
        alone, _ = engine.train(
            TrainingJob(
                rows[[client]],
                shard,
                np.array([client]),
                sgd,
                keys=torch.tensor([client]),
                columns=gates[client],
            )
        )
        torch.testing.assert_close(trained[client], alone[0], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("floats", [1, 30_000, 2**28])
@pytest.mark.parametrize("model", ["mlp", "cnn-bn"])
def test_fisher_information_is_the_mean_of_squared_gradients_of_samples(
    model: str, floats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fishers, "CPU_FLOATS", floats)
    sizes = (5, 0, 7, 1)
    shard, network = (
        make_shard((1, 8, 8), sizes, torch.float64),
        build(model, shape=(1, 8, 8), classes=10, seed=0),
    )
    layout = Layout.of(network)
    fisher = Fisher(network, layout, Engine(network, layout, shape=(1, 8, 8)).cost)
    rows = layout.row(network, dtype=torch.float64) + 0.1 * torch.rand(
        4, layout.num_columns, dtype=torch.float64
    )
    clients = np.array([2, 1, 3, 0])
    found = fisher(rows, shard, clients)
    for row, client, own in zip(rows, clients, found, strict=True):
        plain = copy.deepcopy(network).double().eval()
        load(plain, layout, row)
        total = torch.zeros(layout.num_columns, dtype=torch.float64)
        for sample in shard.index[client, : sizes[client]]:
            plain.zero_grad()
            F.log_softmax(plain(shard.inputs[sample][None]), 1)[
                0, shard.targets[sample]
            ].backward()
            total[: layout.num_parameters] += torch.cat(
                [p.grad.flatten() for p in plain.parameters()]
            ).square()
        torch.testing.assert_close(
            own, total / max(1, sizes[client]), rtol=1e-10, atol=1e-14
        )
    assert network.training, "the network of others stays as it is"


@pytest.mark.parametrize(
    "convolution",
    [
        nn.Conv2d(1, 4, (3, 2), stride=(1, 2), padding=(1, 0), dilation=(2, 1)),
        nn.Conv2d(1, 4, 3, padding="same"),
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3, groups=2)),
    ],
    ids=["uneven", "same", "grouped"],
)
def test_fisher_information_of_any_convolution(convolution: nn.Module) -> None:
    network = nn.Sequential(convolution, nn.Flatten(), nn.LazyLinear(10))
    network(torch.zeros(1, 1, 8, 8))
    shard = make_shard((1, 8, 8), (3,), torch.float64)
    layout = Layout.of(network)
    row = layout.row(network, dtype=torch.float64)
    fisher = Fisher(network, layout, cost(network, Sample((1, 8, 8), ())))
    found = fisher(row[None], shard, np.array([0]))
    network.double()
    squares = torch.zeros_like(row)
    for sample in shard.index[0]:
        answer = network(shard.inputs[sample][None])
        loss = F.cross_entropy(answer, shard.targets[sample][None])
        gradients = torch.autograd.grad(loss, list(network.parameters()))
        squares += torch.cat([g.flatten() for g in gradients]).square()
    torch.testing.assert_close(found[0], squares / 3, rtol=1e-10, atol=1e-14)


def test_fisher_information_of_resnet18() -> None:
    """Residual sums, activations in place and batch norm by its running statistics."""
    shard, network = (
        make_shard((3, 4, 4), (2,), torch.float64),
        build("resnet18", shape=(3, 4, 4), classes=10, seed=0),
    )
    layout = Layout.of(network)
    row = layout.row(network, dtype=torch.float64)
    found = Fisher(network, layout, Engine(network, layout, shape=(3, 4, 4)).cost)(
        row[None], shard, np.arange(1)
    )[0]
    plain, total = (
        copy.deepcopy(network).double().eval(),
        torch.zeros(layout.num_parameters, dtype=torch.float64),
    )
    for sample in shard.index[0]:
        plain.zero_grad()
        F.cross_entropy(
            plain(shard.inputs[sample][None]), shard.targets[sample][None]
        ).backward()
        total += torch.cat([p.grad.flatten() for p in plain.parameters()]).square()
    torch.testing.assert_close(
        found[: layout.num_parameters], total / 2, rtol=1e-10, atol=1e-16
    )
    assert not found[layout.num_parameters :].any()


def test_blocks_follow_each_other_in_plain_rows_and_in_the_kernels_layout() -> None:
    layout = Layout.of(build("cnn-bn", shape=(1, 8, 8), classes=10, seed=0))
    assert layout.blocks == (("conv1", "bn1"), ("conv2", "bn2"), ("fc1",), ("head",))
    for number, (start, stop) in enumerate(layout.block_spans):
        assert layout.block_of[start:stop].unique().tolist() == [number]
    assert layout.block_spans[-1][1] == layout.num_parameters
    aligned = KernelLayout(layout, torch.device("cuda"))
    for (start, stop), block in zip(aligned.block_spans, layout.blocks, strict=True):
        own = [e for e in aligned.entries if e.trainable and e.layer in block]
        assert start == own[0].start and own[-1].stop <= stop < own[-1].stop + 4
