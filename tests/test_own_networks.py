"""Networks of the user's: whichever way they are called, they are what one client alone
would train in plain torch.
"""

import copy
import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcfed.clients.capture import Replays
from hpcfed.clients.engine import Engine
from hpcfed.clients.initial import start_from
from hpcfed.clients.job import Recipe, TrainingJob
from hpcfed.clients.network import client_network
from hpcfed.data.shards import Shard
from hpcfed.errors import UserError
from hpcfed.experiment.materials import check_same_network, outline
from hpcfed.experiment.opening import opening_lines
from hpcfed.models.choice import choose
from hpcfed.models.forward import FunctionalDropout
from hpcfed.models.layout import Layout
from hpcfed.models.lora import LoraLinear, add_adapters
from hpcfed.models.networks import build
from hpcfed.models.own import (
    Sample,
    _are_probabilities,
    build_own,
    check_network,
    construct,
    find_builder,
)
from hpcfed.models.stacked_layer import Batch
from hpcfed.options import RunConfig
from hpcfed.runtime import randomness
from tests.federations import assembled
from tests.naive import assert_trained_as, batches, naive
from tests.own import networks
from tests.runs import flags, started

CPU = torch.device("cpu")
IMAGES = Sample((1, 8, 8), (10,))
COLOURED = Sample((3, 8, 8), (10,))
TOKENS = Sample((6,), (6, 11), vocabulary=11)
RECIPE = Recipe(2, 4, 0.1, momentum=0.9, weight_decay=0.01, clip=1.0)
SIZES = (7, 3, 10, 4)
GPU = pytest.param("cuda", marks=pytest.mark.gpu)

NETWORKS: dict[str, tuple[Callable[..., nn.Module], Sample, str]] = {
    "groupnorm": (networks.GroupNormCNN, IMAGES, "batched"),
    "tutorial": (networks.Tutorial, COLOURED, "batched"),
    "mixer": (networks.Mixer, IMAGES, "batched"),
    "frozen": (networks.Frozen, IMAGES, "batched"),
    "fixed norm": (networks.FixedNorm, IMAGES, "batched"),
    "fixed norms": (partial(networks.FixedNorm, kinds=True), IMAGES, "loop"),
    "conv1d": (networks.Conv1dBatchNorm, IMAGES, "batched"),
    "gru": (networks.GRU, TOKENS, "batched"),
    "gru2": (
        partial(networks.GRU, layers=2, bidirectional=True),
        TOKENS,
        "batched",
    ),
    "lstm": (partial(networks.GRU, kind="LSTM", layers=2), TOKENS, "batched"),
    "vit": (networks.ViT, IMAGES, "vmap"),
    "gpt": (networks.GPT, TOKENS, "vmap"),
    "time first": (networks.TimeFirstGRU, IMAGES, "vmap"),
    "encoder": (networks.TorchTransformer, IMAGES, "vmap"),
    "reading": (networks.Reading, IMAGES, "vmap"),
    "branching": (networks.Branching, IMAGES, "loop"),
    "centred": (networks.Centred, IMAGES, "loop"),
    "counting": (networks.Counting, IMAGES, "vmap"),
    "warming": (networks.Warming, IMAGES, "loop"),
    "remembering": (networks.Remembering, IMAGES, "vmap"),
    "cumulative": (networks.Cumulative, IMAGES, "loop"),
    "momentary": (networks.Momentary, IMAGES, "loop"),
    "temperature": (networks.Temperature, IMAGES, "vmap"),
    "following": (networks.Following, IMAGES, "vmap"),
    "belated": (partial(networks.Belated, told=True), IMAGES, "loop"),
    "caching": (networks.Caching, IMAGES, "batched"),
    "lazy": (networks.Lazy, IMAGES, "batched"),
}


def make(name: str) -> tuple[nn.Module, Sample]:
    builder, sample, _ = NETWORKS[name]
    torch.manual_seed(3)
    network = builder()
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    check_network(network, name, sample)
    return network, sample


def some_data(
    sample: Sample, device: str = "cpu", dtype: torch.dtype = torch.float64
) -> Shard:
    torch.manual_seed(7)
    total = sum(SIZES)
    index = torch.zeros(len(SIZES), max(SIZES), dtype=torch.int64)
    for client, size in enumerate(SIZES):
        index[client, :size] = torch.randperm(total)[:size]
    inputs = torch.randn(total, *sample.shape, dtype=dtype)
    targets = torch.randint(sample.outputs[-1], (total, *sample.outputs[:-1]))
    if sample.vocabulary:
        inputs = torch.randint(sample.vocabulary, (total, *sample.shape))
    if targets.dim() > 1:
        targets[::3, -2:] = -100  # some positions have no next token
    return Shard(
        inputs=inputs.to(device),
        targets=targets.to(device),
        index=index.to(device),
        sizes=SIZES,
        clients=np.arange(len(SIZES)),
        task="next-token" if targets.dim() > 1 else "classification",
    )


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def keys_of(device: str = "cpu") -> Tensor:
    ids = torch.arange(len(SIZES), device=device)
    return randomness.client_keys(0, "training", 0, ids)


def alone(network: nn.Module, shard: Shard, client: int, key: Tensor) -> nn.Module:
    """One client trained as anyone would write it."""
    network = copy.deepcopy(network).to(shard.inputs.device, torch.float64).train()
    trained = [p for p in network.parameters() if p.requires_grad]
    optimiser = torch.optim.SGD(trained, 0.1, momentum=0.9, weight_decay=0.01)
    for batch in batches(shard, client, RECIPE, key):
        optimiser.zero_grad()
        loss_of(network(shard.inputs[batch]), shard.targets[batch]).backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()
    return network


def engine_of(network: nn.Module, sample: Sample, **options: Any) -> Engine:
    return Engine(
        network, Layout.of(network), shape=sample.shape, trial=sample, **options
    )


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("name", NETWORKS)
def test_own_networks_train_as_one_client_alone(name: str, device: str) -> None:
    network, sample = make(name)
    layout, shard = Layout.of(network), some_data(sample, device)
    engine = engine_of(network, sample, device=torch.device(device))
    assert engine.mode == NETWORKS[name][2], engine.reason
    assert bool(engine.reason) == (engine.mode != "batched")
    row = layout.row(network, dtype=torch.float64).to(device)
    rows = row.expand(len(SIZES), -1)
    keys = keys_of(device)
    job = TrainingJob(rows, shard, np.arange(len(SIZES)), RECIPE, keys=keys)
    for _ in range(3):  # plainly, captured, replayed
        trained, _ = engine.train(job)
    score = engine.evaluate(trained, shard, np.arange(len(SIZES)))
    for client in range(len(SIZES)):
        plain = alone(network, shard, client, keys[client])
        expected = layout.row(plain, dtype=torch.float64)
        assert torch.allclose(trained[client], expected, rtol=1e-9, atol=1e-10)
        own = shard.index[client, : SIZES[client]]
        with torch.no_grad():
            outputs = plain.eval()(shard.inputs[own])
        loss = loss_of(outputs, shard.targets[own])
        count = int((shard.targets[own] != -100).sum())
        assert float(score.loss[client]) == pytest.approx(float(loss) * count, 1e-9)


@pytest.mark.parametrize(
    "name",
    [
        "groupnorm",
        "vit",
        "gpt",
        "gru",
        "mixer",
        "counting",
        "remembering",
        "temperature",
        "following",
    ],
)
def test_all_ways_give_the_same_rows(name: str) -> None:
    """Dropout included: its numbers are drawn by client, not by way."""
    builder, sample, mode = NETWORKS[name]
    torch.manual_seed(3)
    network = builder()
    check_network(network, name, sample)
    shard, rows = some_data(sample), []
    for way in {"vmap", "loop", mode}:
        engine = engine_of(network, sample, mode=way)
        assert engine.mode == way
        row = engine.layout.row(network, dtype=torch.float64)
        job = TrainingJob(
            row.expand(len(SIZES), -1),
            shard,
            np.arange(len(SIZES)),
            RECIPE,
            keys=keys_of(),
        )
        rows.append(engine.train(job)[0])
    for other in rows[1:]:
        assert torch.allclose(rows[0], other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_a_network_may_view_and_change_images_in_float32(device: str) -> None:
    """Our own convolutions serve there, and lay images out in their own way."""
    network, sample = make("tutorial")
    shard = some_data(sample, device, torch.float32)
    rows = []
    for mode in ("batched", "vmap", "loop"):
        engine = engine_of(network, sample, mode=mode, device=torch.device(device))
        assert engine.mode == mode
        row = engine.layout.row(network, dtype=torch.float32).to(device)
        job = TrainingJob(
            row.expand(len(SIZES), -1),
            shard,
            np.arange(len(SIZES)),
            RECIPE,
            keys=keys_of(device),
        )
        rows.append(engine.train(job)[0])
    if device == "cuda":  # in TensorFloat-32
        for other in rows[1:]:
            torch.testing.assert_close(rows[0], other, rtol=1e-2, atol=1e-2)
        return
    layout, exact = engine.layout, replace(shard, inputs=shard.inputs.double())
    modules = [alone(network, exact, client, keys_of()[client]) for client in range(4)]
    expected = torch.stack([layout.row(own, dtype=torch.float64) for own in modules])
    steps = torch.tensor([2 * -(-size // RECIPE.batch_size) for size in SIZES])
    for found in rows:
        assert_trained_as(found, expected, layout.row(network), steps)


def trained_by(engine: Engine, network: nn.Module, shard: Shard) -> Tensor:
    row = engine.layout.row(network, dtype=torch.float64)
    rows = row.expand(len(SIZES), -1)
    job = TrainingJob(rows, shard, np.arange(len(SIZES)), RECIPE, keys=keys_of())
    return engine.train(job)[0]


def test_what_functions_drop_is_each_clients_own_in_all_ways() -> None:
    """Attention's dropout, and F.dropout: no layer of them could be replaced."""
    torch.manual_seed(3)
    network = networks.Attending()
    sample, rows = Sample((8, 8), (10,)), []
    shard = some_data(sample)
    state = torch.get_rng_state()
    for mode in ("batched", "vmap", "loop"):
        engine = engine_of(network, sample, mode=mode)
        assert (engine.mode, engine.reason) == (mode, "")
        rows.append(trained_by(engine, network, shard))
    assert torch.equal(torch.get_rng_state(), state), (
        "torch's own numbers are untouched"
    )
    for other in rows[1:]:
        assert torch.allclose(rows[0], other, rtol=1e-9, atol=1e-11)
    nothing = alone(copy.deepcopy(network).eval(), shard, 0, keys_of()[0])
    assert not torch.allclose(rows[0][0], engine.layout.row(nothing).double())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_attention_that_drops_is_torchs_without_what_is_dropped(
    causal: bool, heads: int
) -> None:
    torch.manual_seed(5)
    query = torch.randn(6, 4, 5, 8, dtype=torch.float64)
    key, value = torch.randn(2, 6, heads, 5, 8, dtype=torch.float64)
    mask = None if causal else torch.rand(6, 1, 5, 5) > 0.5
    how: dict[str, Any] = {"is_causal": causal, "enable_gqa": True, "scale": 0.3}
    batch = Batch(num_clients=2, keys=torch.tensor([[1, 2], [7, 8]]))
    with FunctionalDropout(batch, first=1):
        found = F.scaled_dot_product_attention(
            query, key, value, mask, dropout_p=0.4, **how
        )
    # With the identity for values, torch's attention gives the weights themselves.
    eye = torch.eye(5, dtype=torch.float64).expand(6, heads, 5, 5)
    weights = F.scaled_dot_product_attention(query, key, eye, mask, **how)
    keys = torch.tensor([7, 8])
    drawn = randomness.uniform(keys, weights.numel() // 2).view_as(weights)
    kept = weights * (drawn >= 0.4) / 0.6
    expected = kept @ value.repeat_interleave(4 // heads, 1)
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-14)


def test_what_happens_now_and_then_is_drawn_by_client() -> None:
    """A pass in which nothing happens must not hide it."""
    engine = engine_of(networks.Skipping(), IMAGES)
    assert engine.mode == "loop" and "random numbers" in engine.reason
    # What is drawn in evaluation depends on nobody who drew before.
    sample, network = Sample((8, 8), (10,)), networks.Attending(always=True)
    engine = engine_of(network, sample)
    assert engine.mode == "loop" and "random numbers" in engine.reason
    rows = engine.layout.row(network, dtype=torch.float64).expand(4, -1)
    shard = some_data(sample)
    losses = []
    for _ in range(2):
        losses.append(engine.evaluate(rows, shard, np.arange(4)).loss)
        torch.rand(5)
    assert torch.equal(*losses)


@pytest.mark.parametrize("when", ["evaluation", "single"])
def test_a_way_is_tried_in_all_passes_of_a_run(when: str) -> None:
    engine = engine_of(networks.Dependent(when=when), IMAGES)
    assert engine.mode == "vmap" and when in engine.reason


def test_batch_norm_over_few_values_does_not_hide_that_a_way_is_right() -> None:
    """Over images of one pixel it enlarges roundings, for one client alone as well."""
    from torchvision.models import MobileNetV2

    torch.manual_seed(3)
    network = MobileNetV2(8, 0.25, dropout=0.0)
    sample = Sample((3, 8, 8), (8,))
    check_network(network, "mobilenet", sample)
    engine = engine_of(network, sample)
    assert engine.mode == "batched", engine.reason
    torch.manual_seed(7)
    inputs = torch.randn(24, *sample.shape, dtype=torch.float64)
    index = torch.arange(24).view(2, 12)
    shard = Shard(
        inputs=inputs, targets=torch.arange(24) % 8, index=index, sizes=(12, 12),
        clients=np.arange(2),
    )  # fmt: skip
    recipe, keys = Recipe(1, 12, 0.1), keys_of()[:2]
    rows = engine.layout.row(network, dtype=torch.float64).expand(2, -1)
    trained, _ = engine.train(TrainingJob(rows, shard, np.arange(2), recipe, keys=keys))
    for client in (0, 1):
        plain = copy.deepcopy(network).double().train()
        optimiser = torch.optim.SGD(plain.parameters(), 0.1)
        for batch in batches(shard, client, recipe, keys[client]):
            loss_of(plain(inputs[batch]), shard.targets[batch]).backward()
            optimiser.step()
        expected = engine.layout.row(plain, dtype=torch.float64)
        assert torch.allclose(trained[client], expected, rtol=1e-8, atol=1e-8)


def test_random_numbers_of_a_module_are_its_clients() -> None:
    """A client draws the same, whoever else is trained before it."""
    network = networks.Noisy()
    engine = engine_of(network, IMAGES)
    assert engine.mode == "loop" and "random numbers" in engine.reason
    shard = some_data(IMAGES)
    row = engine.layout.row(network, dtype=torch.float64)

    def trained(clients: list[int]) -> Tensor:
        torch.rand(5)  # somebody else draws, too
        at = np.array(clients)
        rows = row.expand(len(at), -1)
        job = TrainingJob(rows, shard, at, RECIPE, keys=keys_of()[at])
        return engine.train(job)[0]

    state = torch.get_rng_state()
    everyone = trained([0, 1, 2, 3])
    torch.set_rng_state(state)
    torch.rand(5)
    assert torch.equal(torch.get_rng_state(), _after(state)), "no trace is left behind"
    assert torch.equal(everyone[[2, 1]], trained([2, 1]))
    assert not torch.equal(everyone[0], everyone[1])


def _after(state: Tensor) -> Tensor:
    generator = torch.Generator()
    generator.set_state(state)
    torch.rand(5, generator=generator)
    return generator.get_state()


def test_frozen_parameters_are_no_part_of_a_row_unless_sent() -> None:
    network, sample = make("frozen")
    names = [e.name for e in Layout.of(network).entries]
    assert names == ["b.bias", "head.weight", "head.bias"]
    layout = Layout.of(network, send_frozen=True)
    assert layout.num_columns == sum(p.numel() for p in network.parameters())
    engine = Engine(network, layout, shape=(1, 8, 8), trial=sample)
    row = layout.row(network, dtype=torch.float64)
    job = TrainingJob(
        row.expand(len(SIZES), -1),
        some_data(sample),
        np.arange(len(SIZES)),
        RECIPE,
        keys=keys_of(),
    )
    trained, _ = engine.train(job)
    for e in layout.entries:
        same = torch.equal(
            trained[:, e.start : e.stop],
            row[e.start : e.stop].expand(len(SIZES), -1),
        )
        assert same != e.trainable
    # Tied weights are there once, constants never.
    gpt, _ = make("gpt")
    names = [e.name for e in Layout.of(gpt).entries]
    assert "tokens.weight" in names and "head.weight" not in names
    assert "mask" not in names


@pytest.mark.parametrize("name", ["vit", "gpt", "encoder", "gru", "reading"])
def test_adapters_are_what_merged_weights_are(name: str) -> None:
    network, sample = make(name)
    before = copy.deepcopy(network).double()
    add_adapters(network, rank=3, alpha=6.0)
    # Where they begin, adapters change nothing. Weights that an adapter makes lie
    # elsewhere in memory, so that products of matrices may add in another order.
    # Terms of a sum (12 to 64) × layers or steps (6) × 1.1e-16 is below 1e-13.
    x = sample.batch(3, device=CPU, dtype=torch.float64)
    at_first = copy.deepcopy(network).double()(x)
    torch.testing.assert_close(at_first, before(x), rtol=1e-12, atol=1e-12)
    shard, engine = some_data(sample), engine_of(network, sample)
    base = sum(p.numel() for p in before.parameters())
    assert engine.layout.num_columns < base / 2
    row = engine.layout.row(network, dtype=torch.float64)
    rows = row.expand(len(SIZES), -1)
    job = TrainingJob(rows, shard, np.arange(4), RECIPE, keys=keys_of())
    trained, _ = engine.train(job)
    for client in range(len(SIZES)):
        plain = alone(network, shard, client, keys_of()[client])
        expected = engine.layout.row(plain, dtype=torch.float64)
        assert torch.allclose(trained[client], expected, rtol=1e-9, atol=1e-10)
    merged = copy.deepcopy(before)
    for path, module in plain.named_modules():
        if isinstance(module, LoraLinear):
            layer = merged.get_submodule(path)
            layer.weight = nn.Parameter(module.weight.detach())
        elif hasattr(module, "parametrizations"):
            for own in module.parametrizations:
                layer = merged.get_submodule(path)
                setattr(layer, own, nn.Parameter(getattr(module, own).detach()))
    assert torch.allclose(merged(x), plain(x), rtol=1e-9, atol=1e-10)
    assert not torch.allclose(before(x), plain(x), rtol=1e-3, atol=1e-4)
    score = engine.evaluate(trained, shard, np.arange(4))
    own = shard.index[3, : SIZES[3]]
    with torch.no_grad():
        loss = loss_of(plain.eval()(shard.inputs[own]), shard.targets[own])
    count = int((shard.targets[own] != -100).sum())
    assert float(score.loss[3]) == pytest.approx(float(loss) * count, 1e-9)


def test_a_compiled_module_is_taken_as_it_was() -> None:
    """Names of its tensors are those of the module, and nothing is compiled."""
    sample = Sample((1, 8, 8), (10,))
    options: dict[str, Any] = {}
    found = construct("tests/own/networks.py:compiled", sample, 10, options)
    assert type(found).__name__ == "Attribute" and "a.weight" in found.state_dict()


def test_a_file_of_a_package_is_told_its_name(tmp_path: Path) -> None:
    for name in ("mine", "mine/nets"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "mine" / "nets" / "deep.py").write_text("from .other import Net")
    with pytest.raises(UserError) as told:
        find_builder(f"{tmp_path}/mine/nets/deep.py:Net")
    advice = f"name it as mine.nets.deep:NAME, with PYTHONPATH={tmp_path}"
    assert str(told.value).endswith(advice)


def test_adapters_choose_their_layers_by_name() -> None:
    network, _ = make("vit")
    add_adapters(network, rank=2, alpha=2.0, layers="blocks.*.qkv", train="head")
    names = {e.layer for e in Layout.of(network).entries}
    assert names == {
        "head",
        *(
            f"blocks.{i}.attention.qkv.{part}"
            for i in (0, 1)
            for part in ("down", "up")
        ),
    }
    with pytest.raises(UserError, match=r"no linear layer.*there are blocks"):
        add_adapters(make("vit")[0], rank=2, alpha=2.0, layers="nothing*", train="head")
    with pytest.raises(UserError, match="--lora-train head trains all of these"):
        add_adapters(make("vit")[0], rank=2, alpha=2.0, layers="head", train="head")


def test_a_builder_gets_what_the_data_is() -> None:
    where = "tests/own/networks.py"
    network = build_own(f"{where}:ViT", Sample((3, 12, 12), (7,)), 7, {"width": 8})
    assert network.head.out_features == 7 and network.patches.in_channels == 3  # type: ignore[union-attr]
    assert prod(network.token.shape) == 8  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize(
    ("name", "options", "line"),
    [
        ("tests/own/networks.py:Nothing", {}, "no Nothing there$"),
        ("tests/own/networks.py:Vitt", {}, "did you mean 'ViT'"),
        ("tests/own/nowhere.py:Net", {}, "no such file"),
        ("tests.own.nowhere:Net", {}, "cannot be imported"),
        ("tests/own/networks.py:ViT", {"depht": 1}, "unexpected keyword"),
        ("tests/own/networks.py:GPT", {}, "fails on floats of shape"),
        ("tests/own/networks.py:not_a_module", {}, "must return a torch.nn.Module"),
        ("tests/own/networks.py:parallel", {}, "return the module itself, without"),
        ("tests/own/networks.py:A_NUMBER", {}, "is int"),
        ("tests/own/networks.py:nothing_to_train", {}, "no parameter"),
        (
            "torch.nn:Linear",
            {"in_features": 8, "out_features": 3},
            r"\[batch, 1, 8, 3\]",
        ),
    ],
)
def test_a_network_that_cannot_be_is_one_line(
    name: str, options: dict[str, Any], line: str
) -> None:
    with pytest.raises(UserError, match=line) as caught:
        build_own(name, IMAGES, 10, options)
    assert "\n" not in str(caught.value)


ENDING = """
import torch
from torch import nn
from torch.nn import functional as F

ENDS = {
    "logits": lambda y: y,
    "softmax": lambda y: y.softmax(-1),
    "log": lambda y: y.log_softmax(-1),
    "sigmoid": torch.sigmoid,
    "relu": F.relu,
    "zero": lambda y: 0 * y,
}


class Ending(nn.Module):
    def __init__(self, end, shape, classes):
        super().__init__()
        self.end = end
        self.layer = nn.Linear(shape[0] * shape[1] * shape[2], classes)

    def forward(self, x):
        return ENDS[self.end](self.layer(x.flatten(1)))
"""


def test_outputs_that_are_probabilities_are_told(tmp_path: Path) -> None:
    """The network as it is now counts: its options say how it ends."""
    path = tmp_path / "ending.py"
    path.write_text(ENDING)
    ends = ("softmax", "logits", "log", "sigmoid", "relu", "zero", "softmax")
    for end in ends:
        s = assembled(model=f"{path}:Ending", model_options=f'{{"end": "{end}"}}')
        said = [line for line in opening_lines(s) if "outputs probabilities" in line]
        assert len(said) == (end == "softmax"), end
    assert said[0].startswith("model Ending outputs probabilities; the loss takes a so")
    numbers = np.random.default_rng(0).normal(size=(20, 1, 2, 2))
    arrays = {"train_inputs": numbers, "test_inputs": numbers}
    shares = {f"{split}_targets": numbers[:, 0, 0] for split in ("train", "test")}
    np.savez(tmp_path / "shares.npz", **arrays, **shares)
    data = {"dataset": f"file:{tmp_path / 'shares.npz'}", "clients": 2}
    s = assembled(model=f"{path}:Ending", model_options='{"end": "softmax"}', **data)
    assert not any("outputs probabilities" in line for line in opening_lines(s))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_probabilities_are_found_in_spite_of_rounding(dtype: torch.dtype) -> None:
    logits = torch.randn(2, 3, 50_000, generator=torch.Generator().manual_seed(0))
    found = logits.to(dtype).softmax(-1)
    assert _are_probabilities(found)
    assert not _are_probabilities(1.03 * found)
    found[1, 2, 7] = -found[1, 2, 7]
    assert not _are_probabilities(found)


def test_first_weights_follow_from_the_seed_whoever_draws_them() -> None:
    where = "tests/own/networks.py:Foreign"
    first, again, other = (
        build(where, shape=(1, 8, 8), classes=10, seed=seed).a.weight  # type: ignore[union-attr]
        for seed in (3, 3, 4)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)  # type: ignore[arg-type]


@pytest.mark.parametrize("draws", ["fresh", "of the file"])
def test_first_weights_that_ignore_the_seed_are_one_line(draws: str) -> None:
    """Neither a run again nor one of several seeds would have the same ones."""
    with pytest.raises(UserError, match=r"not follow from --seed: .* a\.weight is not"):
        build(
            "tests/own/networks.py:Unseeded",
            shape=(1, 8, 8),
            classes=10,
            seed=3,
            options={"draws": draws},
        )


def test_a_network_that_differs_between_ranks_is_one_line() -> None:
    """In its sizes, or in weights that the constructor has not drawn by torch."""

    class OfTwo:
        """The second of two ranks."""

        num_workers = 2

        def __init__(self, first: nn.Module) -> None:
            self.first = first

        def role_allgather(self, value: Any) -> list[Any]:
            return [outline(self.first), value]

    config = RunConfig(model="tests/own/networks.py:Net")

    def check(first: nn.Module, second: nn.Module) -> None:
        check_same_network(config, second, OfTwo(first))  # type: ignore[arg-type]

    wide, drawn = nn.Linear(8, 7), nn.Linear(8, 6)
    same = copy.deepcopy(drawn)
    with torch.no_grad():
        same.weight.mul_(1 + 1e-7)  # as another processor may round
    check(drawn, same)
    other = copy.deepcopy(drawn)
    with torch.no_grad():
        other.bias[2] += 0.01
    for second, name in ((wide, "weight"), (other, "bias"), (nn.PReLU(), "bias")):
        with pytest.raises(UserError, match=f"not the same on all ranks: {name} diff"):
            check(drawn, second)


def test_an_engine_that_cannot_be_is_one_line() -> None:
    network, sample = make("centred")
    with pytest.raises(UserError, match=r"--engine vmap: .*use --engine auto or loop"):
        engine_of(network, sample, mode="vmap")
    with pytest.raises(UserError, match="draws random numbers"):
        choose(
            networks.Noisy(),
            Layout.of(networks.Noisy()),
            IMAGES,
            mode="batched",
            bf16=False,
            device=CPU,
        )


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("number", r"remembers inner\.count from"),
        ("tensor", "remembers average from"),
        ("last", "remembers before from"),
        ("list", "remembers history from"),
        ("dict", "remembers table from"),
        ("own_draws", "remembers generator from"),
        ("shape", "remembers longer from"),
        ("complex", "buffer phase, which is torch.complex64"),
        ("teacher", "frozen parameter teacher"),
        ("norms", "depends on norm.num_batches_tracked, which"),
        ("python", "random numbers of Python's module random"),
        ("numpy", "random numbers of numpy"),
        ("of_file", "random numbers of NOISE"),
        ("around", "random numbers of chance"),
        ("hidden", "gives other outputs when it is called again"),
    ],
)
def test_what_no_client_could_keep_is_refused_by_name(kind: str, line: str) -> None:
    """One line, even where the outputs do not show it yet."""
    with pytest.raises(UserError, match=f"^model tests.*{line}") as caught:
        build_own("tests/own/networks.py:Attribute", IMAGES, 10, {"kind": kind})
    assert "\n" not in str(caught.value)
    assert "of torch's own" not in str(caught.value)


def test_a_rounding_is_no_memory() -> None:
    """Threads may add in another order from call to call."""
    build_own("tests/own/networks.py:Attribute", IMAGES, 10, {"kind": "rounding"})


@pytest.mark.parametrize("in_place", [True, False])
def test_a_buffer_that_changes_later_is_found_then(in_place: bool) -> None:
    network = networks.Belated(in_place=in_place)
    check_network(network, "belated", IMAGES)
    engine = engine_of(network, IMAGES)
    row = engine.layout.row(network, dtype=torch.float64)
    rows = row.expand(len(SIZES), -1)
    job = TrainingJob(rows, some_data(IMAGES), np.arange(4), RECIPE, keys_of())
    with pytest.raises(UserError, match="changes its buffer late in training, but"):
        engine.train(job)


def test_a_trial_leaves_a_network_as_it_was() -> None:
    """Weights, buffers, attributes, and everybody's random numbers."""
    torch.manual_seed(3)
    network = networks.Remembering()
    before, state = copy.deepcopy(network.state_dict()), torch.get_rng_state()
    check_network(network, "remembering", IMAGES)
    assert torch.equal(torch.get_rng_state(), state)
    found = dict(network.named_buffers())
    assert set(network.state_dict()) == {"a.weight", "a.bias", "mean", "odd", "steps"}
    after = network.state_dict() | found
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    caching = networks.Caching()
    check_network(caching, "caching", IMAGES)
    assert caching.mask is None and caching.ramp is None and not caching.shapes


def test_whole_numbers_of_rows_are_rounded_and_bounded() -> None:
    """A mean of counts is rounded where a network takes it; no row goes beyond what
    its floats hold.
    """
    network, sample = make("counting")
    layout, shard = Layout.of(network), some_data(sample, dtype=torch.float32)
    engine = engine_of(network, sample)
    at = next(e.start for e in layout.entries if e.name == "k")
    rows = layout.row(network).repeat(len(SIZES), 1)
    rows[:, at] = torch.tensor([2.4, 2.6, torch.nan, -torch.inf])
    job = TrainingJob(rows, shard, np.arange(4), replace(RECIPE, epochs=1), keys_of())
    steps = job.num_steps().tolist()
    trained, _ = engine.train(job)
    expected = [2 + steps[0], 3 + steps[1], steps[2], -(2**24) + steps[3]]
    assert trained[:, at].tolist() == expected
    rows[0, at] = 2**24 - 1
    with pytest.raises(UserError, match=r"buffer k has reached 16,777,216"):
        engine.train(replace(job, rows=rows))


@pytest.mark.parametrize("name", ["Counting", "Remembering", "Cumulative"])
def test_buffers_are_averaged_as_plain_fedavg_does_over_a_state_dict(name: str) -> None:
    """Floats by their weighted mean, whole numbers by theirs, rounded."""
    setup = assembled(
        model=f"tests/own/networks.py:{name}", participation=0.75, epochs=1, alpha=0.3
    )
    fed, config = setup.federation, setup.settings.config
    network = client_network(config).double()
    state = setup.method.init(fed)
    for round in range(2):
        cohort = fed.sample(round)
        sums: dict[str, Any] = {}
        for client, weight in zip(cohort.clients, cohort.weights, strict=True):
            key = randomness.client_keys(0, "training", round, torch.tensor([client]))
            alone = naive(
                network, fed.training.train_data, client, fed.recipe(round), key[0]
            )
            for key_name, tensor in alone.state_dict().items():
                sums[key_name] = sums.get(key_name, 0) + weight * tensor.double()
        for key_name, tensor in network.state_dict().items():
            if not tensor.is_floating_point():
                sums[key_name] = sums[key_name].round()
        network.load_state_dict(sums)
        state = setup.method.round(fed, state, cohort)
    row = setup.method.global_row(state)
    assert row is not None
    views = fed.layout.views(row[None])
    assert any(e.whole for e in fed.layout.entries)
    for e in fed.layout.entries:
        found = e.taken(views[e.name][0])
        expected = network.state_dict()[e.name]
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.captures
def test_a_capture_that_fails_leaves_no_trace() -> None:
    """Torch's generator draws on, and the step runs plainly from then on."""
    replays = Replays(torch.device("cuda"), may_fail=True)
    total = torch.zeros((), device="cuda")

    def asks_the_host() -> None:
        total.add_(1)
        if float(total) < 0:
            total.zero_()

    for _ in range(4):
        replays.run("step", asks_the_host)
    assert float(total) == 4
    assert torch.rand(3, device="cuda").shape == (3,)
    replays.run("step", lambda: None)
    strict = Replays(torch.device("cuda"))
    strict.run("step", asks_the_host)
    with pytest.raises(RuntimeError):
        strict.run("step", asks_the_host)


@pytest.mark.gpu
def test_garbage_of_an_earlier_run_spoils_no_capture() -> None:
    """Its graphs go whenever Python collects, but not while another is captured."""
    device, total = torch.device("cuda"), torch.zeros((), device="cuda")

    def step() -> None:
        total.add_(1)

    def busy_step() -> None:
        total.add_(1)
        _ = [[] for _ in range(20_000)]  # so many that Python would collect

    earlier, replays = Replays(device), Replays(device)
    for _ in range(3):
        earlier.run("step", step)
    replays.run("step", busy_step)
    gc.collect()
    cycle: list[Any] = [earlier]
    cycle.append(cycle)
    del earlier, cycle
    for _ in range(3):
        replays.run("step", busy_step)
    assert gc.isenabled() and float(total) == 7


def test_tied_weights_start_from_their_first_name() -> None:
    """A run's model has every tensor once."""
    network, _ = make("gpt")
    other = copy.deepcopy(network)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    tensors = dict(other.named_parameters())
    assert "head.weight" not in tensors
    start_from(network, tensors, Path("model.npz"))
    assert torch.equal(network.head.weight, other.head.weight)  # type: ignore[union-attr, arg-type]
    with pytest.raises(UserError, match=r"there is no tokens.weight"):
        del tensors["tokens.weight"]
        start_from(network, tensors, Path("model.npz"))


def test_a_constant_of_the_network_may_be_in_the_file(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 3)
            self.register_buffer("scale", torch.tensor(0.7))

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * self.linear(x)

    network = Scaled()
    tensors = {name: value + 0 for name, value in network.state_dict().items()}
    check_network(network, "scaled", Sample((5,), (3,)))
    assert "scale" not in network.state_dict()
    start_from(network, tensors, Path("mine.npz"))
    tensors["scale"] += 1
    with pytest.raises(UserError, match="scale has other values than the network"):
        start_from(network, tensors, Path("mine.npz"))


@pytest.mark.parametrize("name", ["vit", "groupnorm", "frozen", "branching"])
def test_fisher_of_any_network_is_the_mean_of_squared_gradients(name: str) -> None:
    network, sample = make(name)
    engine, shard = engine_of(network, sample), some_data(sample)
    rows = engine.layout.row(network, dtype=torch.float64).repeat(2, 1)
    found = engine.fisher(rows, shard, np.array([2, 1]))
    plain = copy.deepcopy(network).double().eval()
    trained = [p for p in plain.parameters() if p.requires_grad]
    for row, client in zip(found, (2, 1), strict=True):
        total = torch.zeros(engine.layout.num_parameters, dtype=torch.float64)
        for own in shard.index[client, : SIZES[client]]:
            loss = F.cross_entropy(
                plain(shard.inputs[own][None]), shard.targets[own][None]
            )
            gradients = torch.autograd.grad(loss, trained)
            total += torch.cat([g.flatten() for g in gradients]).square()
        assert torch.allclose(row, total / SIZES[client], rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("kind", ["GPT2", "Llama", "ViT"])
def test_networks_of_hugging_face(kind: str, tmp_path: Path) -> None:
    """From a folder, whole and with adapters, as one client alone trains them."""
    transformers = pytest.importorskip(
        "transformers", reason="pip install 'hpcfed[hf]'"
    )
    transformers.utils.logging.disable_progress_bar()
    # More tokens than the data has, as every pretrained network knows.
    small = {"vocab_size": 13, "bos_token_id": 0, "eos_token_id": 0}
    if kind == "GPT2":
        config = transformers.GPT2Config(
            **small, n_embd=8, n_layer=1, n_head=2, n_positions=8,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        made, sample = transformers.GPT2LMHeadModel(config), TOKENS
    elif kind == "Llama":
        config = transformers.LlamaConfig(
            **small, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2, max_position_embeddings=8,
        )  # fmt: skip
        made, sample = transformers.LlamaForCausalLM(config), TOKENS
    else:
        config = transformers.ViTConfig(
            hidden_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=8,
            intermediate_size=16, patch_size=4, num_channels=1, num_labels=10,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        made, sample = transformers.ViTForImageClassification(config), IMAGES
    made.save_pretrained(tmp_path / "net")
    for rank in (0, 2):
        torch.manual_seed(3)
        network = build_own(f"hf:{tmp_path / 'net'}", sample, sample.outputs[-1], {})
        if rank:
            add_adapters(network, rank=rank, alpha=4.0)
        shard, engine = some_data(sample), engine_of(network, sample)
        assert engine.mode == ("batched" if rank else "vmap")
        row = engine.layout.row(network, dtype=torch.float64)
        rows = row.expand(len(SIZES), -1)
        job = TrainingJob(rows, shard, np.arange(4), RECIPE, keys=keys_of())
        trained, _ = engine.train(job)
        plain = _Logits(network)
        for client in (0, 1):
            expected = alone(plain, shard, client, keys_of()[client]).network
            expected_row = engine.layout.row(expected, dtype=torch.float64)  # type: ignore[arg-type]
            assert torch.allclose(trained[client], expected_row, rtol=1e-8, atol=1e-9)
    # Without weights, and made for bfloat16: rows are float32 all the same.
    config.dtype = "bfloat16"
    config.save_pretrained(tmp_path / "drawn")
    drawn = build_own(f"hf:{tmp_path / 'drawn'}", sample, sample.outputs[-1], {})
    assert {each.dtype for each in drawn.parameters()} == {torch.float32}
    with pytest.raises(UserError, match=r"no config\.json"):
        build_own(f"hf:{tmp_path}", sample, 10, {})
    weights = tmp_path / "net/model.safetensors"
    weights.rename(tmp_path / "net/pytorch_model.bin")
    with pytest.raises(UserError, match="is a pickle, which is never loaded"):
        build_own(f"hf:{tmp_path / 'net'}", sample, 10, {})


def bert(folder: Path, vocabulary: int) -> str:
    """Save a BERT with its default dropout."""
    transformers = pytest.importorskip(
        "transformers", reason="pip install 'hpcfed[hf]'"
    )
    transformers.utils.logging.disable_progress_bar()
    config = transformers.BertConfig(
        vocab_size=vocabulary, hidden_size=8, num_hidden_layers=1,
        num_attention_heads=2, intermediate_size=16, max_position_embeddings=8,
    )  # fmt: skip
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    return f"hf:{folder}"


@pytest.mark.parametrize("rank", [0, 2])
def test_dropout_of_hugging_faces_attention(rank: int, tmp_path: Path) -> None:
    sample, rows = Sample((6,), (10,), vocabulary=11), []
    torch.manual_seed(3)
    network = build_own(bert(tmp_path, 13), sample, 10, {})
    if rank:
        add_adapters(network, rank=rank, alpha=4.0)
    shard = some_data(sample)
    for mode, way in (("auto", "batched"), ("vmap", "vmap"), ("loop", "loop")):
        engine = engine_of(network, sample, mode=mode)
        assert engine.mode == way, engine.reason
        rows.append(trained_by(engine, network, shard))
        engine.evaluate(rows[-1], shard, np.arange(4))
    for other in rows[1:]:
        assert torch.allclose(rows[0], other, rtol=1e-8, atol=1e-10)


def test_a_network_that_knows_too_few_tokens_is_one_line(tmp_path: Path) -> None:
    sample = Sample((6,), (10,), vocabulary=11)
    with pytest.raises(UserError, match=r"fails on tokens below 11 of shape"):
        build_own(bert(tmp_path, 10), sample, 10, {})
    gpt = networks.GPT(classes=10)
    with pytest.raises(UserError, match=r"fails on tokens below 11"):
        check_network(gpt, "gpt", TOKENS)
    head = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 10))
    with pytest.raises(UserError, match=r"needs \[batch, 6, 11\] or more tokens"):
        check_network(head, "head", TOKENS)
    check_network(nn.Sequential(nn.Embedding(12, 4), nn.Linear(4, 12)), "more", TOKENS)


class _Logits(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x).logits


def test_a_run_with_adapters_leaves_a_whole_model(tmp_path: Path) -> None:
    """So that another one starts from it: the frozen weights would else be random."""
    model = ["--model", "tests/own/networks.py:ViT", "--lora", "2"]
    few = flags(clients=2, rounds=1, epochs=1, precision="fp64")[2:]
    first = started(*few, *model, "--seed", "5", "--out", tmp_path / "first")
    again = [*few, *model, "--lr", "1e-30", "--init", first]
    second = started(*again, "--seed", "6", "--out", tmp_path / "second")
    one, two = np.load(first / "model.npz"), np.load(second / "model.npz")
    assert set(one.files) == set(two.files)
    assert "blocks.0.attention.qkv.base.weight" in one.files
    for name in one.files:
        np.testing.assert_allclose(one[name], two[name], atol=1e-12, err_msg=name)
    with pytest.raises(UserError, match=r"--lora-train hed: .*there are .*head"):
        add_adapters(make("vit")[0], rank=2, alpha=2.0, train="hed")
