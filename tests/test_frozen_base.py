"""A frozen language model in bfloat16: read once, shared by all copies, never widened."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hpcfed
from hpcfed import methods
from hpcfed.clients import network as networks
from hpcfed.clients.fisher import Fisher
from hpcfed.clients.network import (
    base_reference,
    client_layout,
    client_network,
    described_network,
    keeps_halves,
    sample_of,
    tried_network,
)
from hpcfed.data.shards import Shard
from hpcfed.errors import UserError
from hpcfed.experiment.run import run_setup
from hpcfed.models import blocks
from hpcfed.models.choice import choose
from hpcfed.models.cost import cost, kept_floats
from hpcfed.models.frozen import (
    META,
    FrozenParameter,
    freeze,
    frozen_weights_of,
    share_frozen,
)
from hpcfed.models.layout import Layout
from hpcfed.models.lora import LoraLinear, add_adapters
from hpcfed.models.own import Sample
from hpcfed.models.stack import StackedNetwork
from hpcfed.options import RunConfig, resolve
from hpcfed.plan import assumptions
from hpcfed.plan.make import PlanRequest, make_plan
from hpcfed.plan.work import described_footprint
from hpcfed.runtime import machine
from tests.federations import assembled
from tests.runs import flags, started
from tests.test_adapter_files import network_folder
from tests.test_adapter_files import options as run_options

CPU = torch.device("cpu")
# A processor without products in bfloat16 says so.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


def options(base: Path, **more: Any) -> dict[str, Any]:
    """Return options of a run with adapters over a base, on texts beside it."""
    texts = base.parent / "texts"
    texts.mkdir(exist_ok=True)
    for number in range(3):
        (texts / f"{number}.txt").write_text(f"client {number} says so. " * 6)
    return run_options(base, texts, lora=2, precision="bf16", **more)


def config_of(base: Path, **more: Any) -> RunConfig:
    return assembled(**options(base, **more)).settings.config


def adapters_of(network: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach() for n, p in network.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("kind", ["GPT2", "Llama"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_base_is_read_in_bfloat16(
    kind: str,
    stored: torch.dtype,
    tmp_path: Path,
) -> None:
    transformers = pytest.importorskip("transformers")
    base = network_folder(kind, tmp_path / "base")
    if stored == torch.bfloat16:
        load = transformers.AutoModelForCausalLM.from_pretrained
        load(base, dtype=stored).save_pretrained(base)
    config = config_of(base)
    usual, ours = client_network(config), client_network(config, onto=CPU)
    theirs = dict(usual.named_parameters())
    for name, parameter in ours.named_parameters():
        if parameter.requires_grad:
            # Adapters are drawn alike, bit for bit.
            assert parameter.dtype == torch.float32
            assert torch.equal(parameter, theirs[name])
            continue
        assert isinstance(parameter, FrozenParameter)
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, theirs[name].bfloat16())
    assert theirs.keys() == dict(ours.named_parameters()).keys()
    head, tokens = ours.get_output_embeddings(), ours.get_input_embeddings()  # type: ignore[operator]
    layer = head.base if isinstance(head, LoraLinear) else head
    assert (layer.weight is tokens.weight) == (kind == "GPT2")
    # Angles of positions keep their digits.
    for name, buffer in usual.named_buffers():
        assert torch.equal(ours.get_buffer(name), buffer)
    # A copy has the same weights, and adapters of its own.
    for own, copied in zip(
        ours.parameters(), copy.deepcopy(ours).parameters(), strict=True
    ):
        assert (own is copied) != own.requires_grad


def test_a_trial_leaves_the_base_as_it_is(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of(network_folder("Llama", tmp_path / "base"))
    usual, ours = client_network(config), client_network(config, onto=CPU)
    layout = Layout.of(ours)
    places = {p.data_ptr() for p in frozen_weights_of(ours)}
    for large in (0, blocks.LARGE):
        monkeypatch.setattr(blocks, "LARGE", large)
        way = choose(
            ours, layout, sample_of(config), mode="auto", bf16=True, device=CPU
        )
        assert way.mode == "batched" and way.forward.over_halves
    wide = StackedNetwork(usual, layout, bf16=True)
    rows = layout.row(ours).repeat(2, 1)
    rows += 0.1 * torch.randn(rows.shape, generator=torch.Generator().manual_seed(0))
    x = sample_of(config).batch(4, device=CPU, dtype=torch.float32)
    found = []
    for forward in (way.forward, wide):
        own = rows.clone().requires_grad_()
        y = forward(layout.views(own), x, training=True)
        found.append((y, torch.autograd.grad(y.float().square().sum(), own)[0]))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    assert {p.data_ptr() for p in frozen_weights_of(ours)} == places
    assert all(p.dtype == torch.bfloat16 for p in frozen_weights_of(ours))


def test_weights_that_a_folder_lacks_depend_on_the_seed(
    tmp_path: Path,
) -> None:
    base = network_folder("Llama", tmp_path / "base")
    (base / "model.safetensors").unlink()
    config = config_of(base)
    drawn = [client_network(config, seed=seed, onto=CPU) for seed in (0, 0, 1)]
    first, again, other = (
        nn.utils.parameters_to_vector(frozen_weights_of(network)) for network in drawn
    )
    assert torch.equal(first, again) and not torch.equal(first, other)
    # Runs that advance together have the weights once.
    share_frozen(drawn[1], drawn[0])
    share_frozen(drawn[2], drawn[0])
    for network, shared in ((drawn[1], True), (drawn[2], False)):
        pairs = zip(
            frozen_weights_of(network), frozen_weights_of(drawn[0]), strict=True
        )
        # All but the norms, which begin with ones.
        same = [a.data_ptr() == b.data_ptr() for a, b in pairs if a.dim() == 2]
        assert same == [shared] * len(same)


def test_a_network_without_values_tells_layout_cost_and_first_rows(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of(network_folder("GPT2", tmp_path / "base"))
    real, sample = client_network(config, seed=0), sample_of(config)
    assert described_network(config).get_parameter("lm_head.up.weight").numel()
    expected = cost(real, sample)
    kept = kept_floats(real, sample).total
    monkeypatch.setattr(blocks, "LARGE", 0)
    described = described_network(config)
    assert all(p.device == META for p in frozen_weights_of(described))
    assert client_layout(config) == Layout.of(real)
    assert cost(described, sample) == cost(real, sample) == expected
    # By networks with one and two blocks.
    assert kept_floats(real, sample).total == kept
    row = Layout.of(real).row(client_network(config, seed=7, onto=META))
    assert torch.equal(row, Layout.of(real).row(client_network(config, seed=7)))


def test_a_base_that_must_compute_in_float32_becomes_that(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The trial finds that bfloat16 does not serve; on a CPU it never does."""
    transformers = pytest.importorskip("transformers")
    base = network_folder("Llama", tmp_path / "base")
    rounded = tmp_path / "rounded"
    network = transformers.AutoModelForCausalLM.from_pretrained(base)
    network.bfloat16().float().save_pretrained(rounded)
    found = []
    for folder, halves in ((base, True), (rounded, False)):
        monkeypatch.setattr(networks, "keeps_halves", lambda *_, halves=halves: halves)
        out = tmp_path / f"run-{halves}"
        out.mkdir()
        values = options(folder, out=str(out))
        run_setup(assembled(**values), out, quiet=True)
        with np.load(out / "model.npz") as model:
            found.append(dict(model))
    assert found[0].keys() == found[1].keys()
    for name, array in found[0].items():
        np.testing.assert_array_equal(array, found[1][name])


def test_only_a_gpu_and_adapters_alone_keep_halves(
    tmp_path: Path,
) -> None:
    base = network_folder("GPT2", tmp_path / "base")
    config = config_of(base)
    gpu = torch.device("cuda")
    assert keeps_halves(config, gpu) and not keeps_halves(config, CPU)
    for change in (
        {"precision": "tf32"},
        {"lora": None},
        {"lora_train": "*.ln_f"},
        {"send_frozen": True},
        {"model": "mlp"},
    ):
        assert not keeps_halves(config.model_copy(update=change), gpu)


@pytest.mark.gpu
@pytest.mark.parametrize("has_weights", [True, False])
def test_a_run_on_a_gpu_has_its_base_there_in_bfloat16(
    has_weights: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout, which draws from the device's generator while state is looked for."""
    monkeypatch.setattr(blocks, "LARGE", 0)
    base = network_folder("GPT2", tmp_path / "base")
    about = json.loads((base / "config.json").read_text())
    for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
        about[name] = 0.2
    (base / "config.json").write_text(json.dumps(about))
    if not has_weights:
        (base / "model.safetensors").unlink()
    seen: list[nn.Module] = []
    build = networks.build

    def noted(*arguments: Any, **keywords: Any) -> nn.Module:
        network = build(*arguments, **keywords)
        seen.append(network)
        return network

    monkeypatch.setattr(networks, "build", noted)
    # Steps that compute again have the same dropout.
    models = []
    for asked in ("off", "on"):
        values = options(base, device="cuda", checkpoint_activations=asked)
        folder = started(*flags(**values, out=tmp_path / asked))
        models.append(hpcfed.open(folder).model)
    for network in seen:
        for parameter in frozen_weights_of(network):
            assert parameter.dtype == torch.bfloat16
    assert {p.device.type for n in seen for p in frozen_weights_of(n)} == {
        "meta",
        "cuda",
    }
    for name, array in models[0].items():
        assert np.isfinite(array).all()
        np.testing.assert_allclose(array, models[1][name], rtol=0, atol=1e-2)


def test_fisher_information_leaves_the_base_as_it_is(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=30,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=4,
        pad_token_id=0,
    )
    # As from a folder: not in training.
    network = transformers.LlamaForSequenceClassification(config).bfloat16().eval()
    freeze(network)
    add_adapters(network, rank=2, alpha=2)
    layout = Layout.of(network)
    sample = Sample((8,), (4,), 30)
    tokens = torch.arange(16).view(2, 8)
    shard = Shard(
        inputs=tokens,
        targets=torch.tensor([0, 1]),
        index=torch.arange(2).view(1, 2),
        sizes=(2,),
        clients=np.array([0]),
    )
    rows = layout.row(network)[None]
    fisher = Fisher(network, layout, cost(network, sample))
    found = fisher(rows, shard, np.array([0]))
    assert torch.isfinite(found).all() and found.any()
    assert {p.dtype for p in frozen_weights_of(network)} == {torch.bfloat16}


def test_the_head_that_a_folder_lacks_is_no_part_of_its_base(tmp_path: Path) -> None:
    base = network_folder("Llama", tmp_path / "base")
    tokens = np.arange(24).reshape(6, 4)
    labels = np.arange(6) % 2
    arrays = {"train_inputs": tokens, "train_labels": labels}
    arrays |= {"test_inputs": tokens, "test_labels": labels}
    np.savez(tmp_path / "data.npz", **arrays)
    data = {"dataset": f"file:{tmp_path / 'data.npz'}", "model": f"hf:{base}"}
    data["model_options"] = '{"pad_token_id": 0}'
    classifier = assembled(**data, clients=2, lora=2).settings.config
    assert base_reference(classifier) is None
    assert base_reference(config_of(base)) is not None


def test_a_base_larger_than_the_host_is_never_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(network_folder("Llama", tmp_path / "base"), device="cpu")
    monkeypatch.setattr(machine, "usable", lambda: 7_000)
    with pytest.raises(UserError, match=r"KiB, and this machine has 6\.84 KiB; a netw"):
        tried_network(config)
    monkeypatch.setattr(machine, "usable", lambda: 8_000)
    assert tried_network(config)


def test_a_plan_says_what_a_frozen_network_takes_and_what_would_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "LARGE", 0)
    monkeypatch.chdir(tmp_path)
    values = options(network_folder("Llama", tmp_path / "base"), device="cuda")
    settings = resolve(
        values, {name: name for name in values}, methods.load("fedavg").Options
    )
    found = described_footprint(settings.config, "cuda")
    assert found is not None
    # 30 tokens in and out, two blocks of 4 · 8 · 8 and 3 · 8 · 16 with two norms, a norm.
    assert found.parameters == 2 * 30 * 8 + 2 * (4 * 64 + 3 * 128 + 2 * 8) + 8
    assert found.base == 2 * found.parameters
    assert str(found) in make_plan(PlanRequest(), settings).notes
    monkeypatch.setattr(assumptions, "ROOM", 1e3)
    notes = "\n".join(make_plan(PlanRequest(), settings).notes)
    assert "does not fit: 1.8e-06 billion parameters take 3.52 KiB" in notes
    assert "a network of 5e-07 billion would fit" in notes
