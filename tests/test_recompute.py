"""Blocks that compute their activations again in the backward pass."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hpcfed.clients.capture import Replays
from hpcfed.clients.footprint import planned_step, too_large
from hpcfed.errors import UserError
from hpcfed.models import blocks as blocks_module
from hpcfed.models.blocks import find_blocks
from hpcfed.models.cost import Kept, kept_floats
from hpcfed.models.layout import Layout
from hpcfed.models.lora import add_adapters
from hpcfed.models.own import Sample
from hpcfed.models.stack import StackedNetwork
from hpcfed.runtime import accelerator, randomness
from tests.test_adapter_files import network_folder, options, ran

transformers = pytest.importorskip("transformers", reason="pip install 'hpcfed[hf]'")
gpu = pytest.mark.gpu
CLIENTS, SLOTS, LENGTH = 3, 2, 6
# A processor without products in bfloat16 says so.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


def network_of(kind: str, *, width: int = 8, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    small = {"vocab_size": 16, "bos_token_id": 0, "eos_token_id": 0}
    if kind == "GPT2":
        config = transformers.GPT2Config(
            **small, n_embd=width, n_layer=3, n_head=2, n_positions=8, use_cache=False,
            resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        **small, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=3,
        num_attention_heads=2, max_position_embeddings=8, use_cache=False,
        attention_dropout=dropout,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def passed(
    network: nn.Module,
    *,
    again: bool,
    drops: int,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    **how: Any,
) -> tuple[Tensor, Tensor, int]:
    """Return outputs, gradients of rows, and how often blocks were called."""
    layout = Layout.of(network)
    forward = StackedNetwork(network, layout, drops=drops, **how)
    blocks = find_blocks(network)
    assert blocks is not None
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    for block in blocks.of(forward._network):
        # Its attention: the block itself is entered once more to be wrapped.
        name = "attn" if hasattr(block, "attn") else "self_attn"
        block.get_submodule(name).register_forward_hook(count)
    if again:
        forward.recompute(blocks)
    random = torch.Generator().manual_seed(1)
    rows = layout.row(network, dtype=dtype).repeat(CLIENTS, 1)
    rows += 0.1 * torch.randn(rows.shape, generator=random, dtype=dtype)
    rows = rows.to(device).requires_grad_()
    tokens = torch.randint(16, (CLIENTS * SLOTS, LENGTH), generator=random).to(device)
    keys = randomness.client_keys(0, "test", 0, torch.arange(CLIENTS, device=device))
    numbers = torch.arange(forward.random_layers, device=device)
    of_layers = randomness.child_keys(keys, numbers[:, None])
    y = forward(layout.views(rows), tokens, training=True, keys=of_layers)
    weights = torch.randn(y.shape, generator=random, dtype=torch.float64)
    loss = (y * weights.to(device, y.dtype)).sum()
    (gradient,) = torch.autograd.grad(loss, rows)
    forward.join()
    return y.detach(), gradient, calls


@pytest.mark.parametrize("kind", ["GPT2", "Llama"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_are_the_same_bit_for_bit(kind: str, dropout: float) -> None:
    """Also those of layers in blocks that are trained as a whole."""
    network = network_of(kind, dropout=dropout)
    train = "*.ln_1" if kind == "GPT2" else "*.o_proj"
    add_adapters(network, rank=2, alpha=2.0, train=train)
    # The attention of every block drops as a function.
    drops = 3 if dropout else 0
    y, expected, calls = passed(network, again=False, drops=drops)
    again, found, twice = passed(network, again=True, drops=drops)
    assert torch.equal(again, y) and torch.equal(found, expected)
    assert expected.abs().max() > 0
    assert (calls, twice) == (3, 6)


@pytest.mark.parametrize("kind", ["GPT2", "Llama"])
def test_a_base_in_bfloat16_gives_the_same_again(kind: str) -> None:
    network = network_of(kind)
    add_adapters(network, rank=2, alpha=2.0)
    how: dict[str, Any] = {"drops": 0, "dtype": torch.float32, "bf16": True}
    y, expected, _ = passed(network, again=False, **how)
    again, found, twice = passed(network, again=True, **how)
    assert torch.equal(again, y) and torch.equal(found, expected)
    assert twice == 6


def planned(
    asked: Any, free: float, monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, Kept, bool]:
    """Plan a step on a device with this much free memory; return the plan, what a pass
    keeps, and whether blocks compute again.
    """
    monkeypatch.setattr(blocks_module, "LARGE", 0)
    monkeypatch.setattr(accelerator, "free_memory", lambda device: free)
    network = network_of("Llama")
    add_adapters(network, rank=1, alpha=1.0, layers="*.q_proj")
    layout = Layout.of(network)
    kept = kept_floats(network, Sample((LENGTH,), (LENGTH, 16), 16))
    forward = StackedNetwork(network, layout)
    found = planned_step(
        network,
        forward,
        kept,
        layout=layout,
        asked=asked,
        copies=2.0,
        batch_size=5,
        device=torch.device("cuda"),
    )
    return found, kept, forward._recomputes


def test_blocks_compute_again_if_a_client_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, kept, _ = planned("off", 1e9, monkeypatch)
    whole = found.footprint
    assert whole.parameters == whole.base / 4
    # Three blocks, each with an adapter of 8 · 1 + 1 · 8 columns.
    assert whole.row == 4 * 3 * 16
    assert whole.activations == 4 * 2 * 5 * kept.total
    # A block passes on a number for each position and feature.
    assert (kept.blocks, kept.passed) == (3, LENGTH * 8)
    again = kept.total - 2 * kept.of_block + 3 * kept.passed
    assert 0 < again < kept.total
    # 60 % of what the network leaves free is for clients; just enough, and a byte less.
    enough = whole.base + whole.client / 0.6
    for asked, free, computes in (
        ("auto", enough + 1, False),
        ("auto", enough - 1, True),
        ("off", enough - 1, False),
        ("on", 1e9, True),
    ):
        found, _, recomputes = planned(asked, free, monkeypatch)
        assert recomputes == found.footprint.recomputes == computes
        assert found.activations == (again if computes else kept.total)
        assert found.footprint.activations == 4 * 2 * 5 * found.activations
        assert ("computed again by blocks" in str(found.footprint)) == computes


def test_what_does_not_fit_is_told_with_what_would() -> None:
    assert too_large(1_000_000_000, 2, 2e9) == ""
    assert too_large(7_000_000_000, 4, 16 * 2**30) == (
        "7 billion parameters take 26.08 GiB, and the device has 16.00 GiB free; a "
        "network of 4.3 billion would fit, or these in bfloat16: --precision bf16"
    )
    assert "bfloat16" not in too_large(70_000_000_000, 4, 16 * 2**30)
    # Hosts compute in float32.
    assert too_large(7_000_000_000, 4, 16 * 2**30, gpu=False) == (
        "7 billion parameters take 26.08 GiB, and this machine has 16.00 GiB; a network "
        "of 4.3 billion would fit"
    )


def test_checkpointing_needs_blocks_that_clients_share() -> None:
    network = nn.Linear(2, 2)
    layout = Layout.of(network)
    with pytest.raises(UserError, match="--checkpoint-activations on: for blocks"):
        planned_step(
            network,
            StackedNetwork(network, layout),
            Kept(1),
            layout=layout,
            asked="on",
            copies=1.0,
            batch_size=1,
            device=torch.device("cpu"),
        )


def test_a_run_that_computes_again_ends_the_same(tmp_path: Path) -> None:
    found = []
    base = network_folder("GPT2", tmp_path / "base")
    (tmp_path / "texts").mkdir()
    for number in range(3):
        text = f"client {number} says so. " * 6
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    values = options(base, tmp_path / "texts", lora=2, lora_train="*.ln_1")
    for asked in ("on", "off"):
        folder = ran(tmp_path / asked, **values, checkpoint_activations=asked)
        with np.load(folder / "model.npz") as model:
            found.append(dict(model))
    for name, array in found[0].items():
        np.testing.assert_array_equal(array, found[1][name])


@gpu
def test_a_captured_step_computes_again() -> None:
    """Forward and backward in one graph, with our kernels, as a run has them."""
    network = network_of("Llama", width=64)
    add_adapters(network, rank=4, alpha=4.0)
    network.cuda()
    layout, found = Layout.of(network), []
    for again in (False, True):
        forward = StackedNetwork(network, layout, bf16=True)
        assert forward.over_halves
        blocks = find_blocks(network)
        assert blocks is not None
        if again:
            forward.recompute(blocks)
        rows = layout.row(network).repeat(CLIENTS, 1).cuda()
        rows += 0.1 * torch.randn(
            rows.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda"
        )
        rows.requires_grad_()
        tokens = torch.arange(CLIENTS * SLOTS * LENGTH, device="cuda") % 16
        tokens = tokens.view(-1, LENGTH)
        gradient = torch.zeros_like(rows)

        def step(
            forward: StackedNetwork = forward,
            rows: Tensor = rows,
            tokens: Tensor = tokens,
            gradient: Tensor = gradient,
        ) -> None:
            y = forward(layout.views(rows), tokens, training=True)
            (own,) = torch.autograd.grad(y.float().square().sum(), rows)
            forward.join()
            gradient.copy_(own)

        replays = Replays(torch.device("cuda"))
        for _ in range(3):
            gradient.zero_()
            replays.run("step", step)
        found.append(gradient)
    assert torch.equal(*found) and found[0].abs().max() > 0
