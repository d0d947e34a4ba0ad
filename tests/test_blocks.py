"""Large networks are tried out with a few of their blocks."""

import copy
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpcfed.models import blocks as of_blocks
from hpcfed.models import choice
from hpcfed.models.blocks import find_blocks, shortened
from hpcfed.models.choice import Way, choose
from hpcfed.models.layout import Layout
from hpcfed.models.lora import add_adapters
from hpcfed.models.own import Sample

transformers = pytest.importorskip("transformers", reason="pip install 'hpcfed[hf]'")

SAMPLE = Sample((5,), (5, 11), 11)
DEPTH = 5


def gpt2(*, dropout: float = 0.0, layers: str = "transformer.h.*") -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=11,
        n_positions=8,
        n_embd=8,
        n_layer=DEPTH,
        n_head=2,
        attn_pdrop=dropout,
        resid_pdrop=0.0,
        embd_pdrop=dropout,
        use_cache=False,
    )
    torch.manual_seed(0)
    network: nn.Module = transformers.GPT2LMHeadModel(config)
    add_adapters(network, rank=2, alpha=2.0, layers=layers)
    return network


def chosen(network: nn.Module) -> Way:
    return choose(
        network,
        Layout.of(network),
        SAMPLE,
        mode="auto",
        bf16=False,
        device=torch.device("cpu"),
    )


def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let every network count as large; return how many blocks trials have."""
    monkeypatch.setattr(of_blocks, "LARGE", 0)
    depths: list[int] = []
    begin = choice._begin

    def noted(network: nn.Module, *rest: Any) -> Any:
        depths.append(len(network.get_submodule("transformer.h")))  # type: ignore[arg-type]
        return begin(network, *rest)

    monkeypatch.setattr(choice, "_begin", noted)
    return depths


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_two_blocks_tell_what_all_do(
    dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = gpt2(dropout=dropout)
    whole = chosen(network)
    depths = watched(monkeypatch)
    short = chosen(network)
    # A second one counts the dropout calls of a block.
    assert depths == ([2, 1] if dropout else [2])
    assert (short.mode, short.reason) == (whole.mode, whole.reason) == ("batched", "")
    # Layers for dropout: one of the embeddings, three of every block. The attention of
    # every block calls it as a function.
    calls = DEPTH if dropout else 0
    assert whole.forward.random_layers == 1 + 3 * DEPTH + calls
    assert short.forward.random_layers == whole.forward.random_layers


def test_a_block_that_mixes_clients_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = gpt2()
    for block in network.get_submodule("transformer.h").children():
        plain = block.forward

        def mixed(
            self: Any, x: Tensor, *rest: Any, plain: Any = plain, **more: Any
        ) -> Any:
            return plain(x - x.mean(0), *rest, **more)

        block.forward = MethodType(mixed, block)
    depths = watched(monkeypatch)
    way = chosen(network)
    assert depths == [2]
    assert way.mode != "batched" and "would differ" in way.reason


def test_a_network_that_needs_all_its_blocks_is_tried_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = gpt2()
    body = network.get_submodule("transformer")

    def picky(self: Any, *rest: Any, **more: Any) -> Any:
        assert len(self.h) == DEPTH
        return type(body).forward(self, *rest, **more)

    body.forward = MethodType(picky, body)
    depths = watched(monkeypatch)
    assert chosen(network).mode == "batched"
    assert depths == [2, DEPTH]


def test_blocks_with_adapters_are_a_kind_of_their_own() -> None:
    network = gpt2(layers="transformer.h.3.attn.*")
    blocks = find_blocks(network)
    assert blocks is not None and blocks.kinds == (0, 0, 0, 1, 0)
    assert not blocks.alike
    short = shortened(network, blocks)
    names = [name for name, p in short.named_parameters() if p.requires_grad]
    assert names and all(name.startswith("transformer.h.2.attn.") for name in names)
    # Nothing of the network itself has changed, and tied weights stay tied.
    assert len(blocks.of(network)) == DEPTH and len(blocks.of(short)) == 3
    head = short.get_parameter("lm_head.weight")
    assert head is short.get_parameter("transformer.wte.weight")
    assert head is not network.get_parameter("lm_head.weight")


def test_only_networks_of_transformers_are_shortened() -> None:
    blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
    assert find_blocks(nn.ModuleDict({"blocks": blocks})) is None
    network = gpt2()
    twice = copy.deepcopy(network)
    twice.add_module("others", nn.ModuleList([nn.Linear(2, 2)]))
    assert find_blocks(twice) is None
