"""Samples that share a row of a language model do not see each other."""

import copy
import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcfed import cli
from hpcfed.clients.engine import Engine
from hpcfed.clients.job import Recipe, TrainingJob
from hpcfed.data import TextPlan, json_lines
from hpcfed.data.shards import Shard
from hpcfed.errors import UserError
from hpcfed.models.apart import parts
from hpcfed.models.frozen import META
from hpcfed.models.layout import Layout
from hpcfed.models.lora import add_adapters
from hpcfed.models.own import Sample, build_own
from hpcfed.runtime import randomness
from tests.naive import batches
from tests.test_language_data import END, NONE, A, B, C, D, E, pair, save_tokeniser

transformers = pytest.importorskip("transformers", reason="pip install 'hpcfed[hf]'")

LENGTH, VOCABULARY = 24, 16
SAMPLE = Sample((LENGTH,), (LENGTH, VOCABULARY), VOCABULARY, apart=True)
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 8, "num_attention_heads": 2,
         "num_hidden_layers": 2, "intermediate_size": 16}  # fmt: skip


def folder_of(kind: str, folder: Path, **more: Any) -> str:
    """Save a small network's config; return the model's name."""
    if kind == "GPT2":
        more = {"vocab_size": VOCABULARY, "n_embd": 8, "n_layer": 2, "n_head": 2,
                "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
    else:
        more = {**SMALL, **more}
    getattr(transformers, f"{kind}Config")(**more).save_pretrained(folder)
    return f"hf:{folder}"


def network_of(name: str) -> nn.Module:
    torch.manual_seed(3)
    return build_own(name, SAMPLE, VOCABULARY, {})


def test_positions_and_masks_by_hand() -> None:
    found = parts(torch.tensor([[5, 3, ~2, 4], [1, 2, 3, 0]]))
    assert found["input_ids"].tolist() == [[5, 3, 2, 4], [1, 2, 3, 0]]
    assert found["position_ids"].tolist() == [[0, 1, 0, 1], [0, 1, 2, 3]]
    first, second = found["attention_mask"].int()[:, 0].tolist()
    assert first == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert second == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]


def shard_with(begins: list[list[int]]) -> Shard:
    """Return two clients' rows; in row i texts begin at `begins[i]`, too."""
    generator = torch.Generator().manual_seed(5)
    size = (len(begins), LENGTH)
    inputs = torch.randint(VOCABULARY, size, generator=generator)
    targets = torch.randint(VOCABULARY, size, generator=generator)
    targets[:, ::5] = NONE
    for row, places in enumerate(begins):
        inputs[row, places] = ~inputs[row, places]
        # The last row is short.
        targets[row, 10 * (row + 1) :] = NONE
    half = len(begins) // 2
    index = torch.arange(len(begins)).view(2, half)
    return Shard(inputs, targets, index, (half, half), np.arange(2), task="next-token")


def plain_losses(network: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the losses of a row's texts, each of which passes alone."""
    begins = [0, *torch.nonzero(inputs < 0).flatten().tolist()]
    losses = []
    for begin, end in zip(begins, [*begins[1:], LENGTH], strict=True):
        tokens = torch.where(inputs < 0, ~inputs, inputs)[None, begin:end]
        logits = network(tokens).logits[0]
        own = targets[begin:end]
        losses.append(F.cross_entropy(logits, own, ignore_index=NONE, reduction="sum"))
    return torch.stack(losses).sum()


@pytest.mark.parametrize("mode", ["batched", "vmap", "loop"])
@pytest.mark.parametrize(("kind", "tolerance"), [("GPT2", 1e-10), ("Llama", 1e-5)])
def test_packed_rows_train_like_texts_of_their_own(
    kind: str, tolerance: float, mode: Any, tmp_path: Path
) -> None:
    """In float64; the norms of Llama round to float32."""
    name = folder_of(kind, tmp_path)
    network = network_of(name)
    if mode == "batched":
        # All clients' texts then pass a frozen network together.
        add_adapters(network, rank=2, alpha=2, layers="*", train="")
    shard = shard_with([[3, 9], [], [12], [5, 6, 20]])
    recipe = Recipe(epochs=1, batch_size=1, lr=0.3)
    layout = Layout.of(network)
    engine = Engine(network, layout, shape=(LENGTH,), mode=mode, trial=SAMPLE)
    assert engine.mode == mode
    keys = randomness.client_keys(3, "test", 5, torch.arange(2))
    start = layout.row(network, dtype=torch.float64)
    job = TrainingJob(start.expand(2, -1), shard, np.arange(2), recipe, keys)
    trained, losses = engine.train(job)
    assert losses.positions is not None
    # Rows need 10, 20, 24 and 24 positions, rounded up to multiples of 8; together, both
    # clients have the longer one's.
    first = 16 + 24 if mode == "loop" else 24 + 24
    assert losses.positions.tolist() == [first, 24 + 24]
    for client in range(2):
        alone = copy.deepcopy(network).double()
        alone._forward_pre_hooks.clear()
        descent = torch.optim.SGD(alone.parameters(), lr=recipe.lr)
        for batch in batches(shard, client, recipe, keys[client]):
            inputs, targets = shard.inputs[batch[0]], shard.targets[batch[0]]
            descent.zero_grad()
            loss = plain_losses(alone, inputs, targets) / (targets != NONE).sum()
            loss.backward()
            descent.step()
        expected = layout.row(alone, dtype=torch.float64)
        moved = (expected - start).norm()
        assert (trained[client] - expected).norm() <= tolerance * moved


def test_a_frozen_network_and_one_that_is_only_described(tmp_path: Path) -> None:
    name = folder_of("Llama", tmp_path)
    torch.manual_seed(3)
    rows = SAMPLE.batch(2, device=torch.device("cpu"), dtype=torch.float32)
    frozen = build_own(name, SAMPLE, VOCABULARY, {}, onto=torch.device("cpu"))
    tokens = parts(rows)["input_ids"][:, LENGTH // 2 :]
    found = frozen(rows).logits[0, LENGTH // 2 :]
    frozen._forward_pre_hooks.clear()
    expected = frozen(tokens).logits[0]
    # Numbers of 8 bits, some ten in a row.
    assert (found - expected).abs().max() <= 0.05 * expected.abs().max()
    described = build_own(name, SAMPLE, VOCABULARY, {}, onto=META)
    assert described(rows.to(META)).logits.shape == (2, LENGTH, VOCABULARY)


@pytest.mark.parametrize(
    ("kind", "more", "reason"),
    [
        ("Bloom", {"n_head": 2}, "it takes no position_ids"),
        ("Mamba", {}, "it takes no position_ids"),
        (
            "Mistral",
            {"sliding_window": 4, "num_key_value_heads": 2},
            "does not reach as far as a text is long",
        ),
    ],
)
def test_networks_that_cannot_keep_texts_apart(
    kind: str, more: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    name = folder_of(kind, tmp_path, **more)
    with pytest.raises(UserError, match=f"cannot keep the texts of a row.*{reason}"):
        network_of(name)


def test_a_row_says_where_its_texts_begin(tmp_path: Path) -> None:
    folder = save_tokeniser(tmp_path / "words")
    path = tmp_path / "lines.jsonl"
    lines = [pair("a", "b c", split="train"), pair("d", "e", split="train")]
    lines.append(pair("a", "b", split="test"))
    path.write_text("\n".join(map(json.dumps, lines)))
    plan = TextPlan(tokeniser=folder, length=8, pack=True, apart=True)
    source = json_lines.loaded(path, "{}", plan)
    assert source.arrays["train_inputs"].tolist() == [[A, B, C, END, ~D, E, END]]
    targets = [[B, C, END, NONE, E, END, NONE]]
    assert source.arrays["train_targets"].tolist() == targets
    assert source.arrays["test_inputs"].min() >= 0, "test samples stay alone"
    assert source.notes[-1].endswith("100% full; no sample sees another")


def test_a_run_packs_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_tokeniser(tmp_path / "words")
    path = tmp_path / "lines.jsonl"
    words = np.random.default_rng(0).choice(list("abcdefgh"), (24, 2)).tolist()
    lines = [pair(*own, client=f"c{at % 2}") for at, own in enumerate(words)]
    path.write_text("\n".join(map(json.dumps, lines)))
    command = ["run", "--dataset", str(path), "--model", f"hf:{folder}", "--text-pack"]
    more = [
        "--text-length",
        "12",
        "--epochs",
        "1",
        "--rounds",
        "2",
        "--out",
        str(tmp_path / "run"),
    ]
    cli.main([*command, *more, "--lora", "2", "--generate", "1"])
    told = "".join(capsys.readouterr())
    assert "22 samples packed into 6 of 12 tokens" in told
    assert "no sample sees another" in told
    cli.main(["show", str(tmp_path / "run")])
    shown = capsys.readouterr().out
    assert "tokens learnt" in shown and "positions of texts trained on" in shown
    with h5py.File(tmp_path / "run/run.h5") as file:
        learnt = file["rounds/learnt_tokens"][()].tolist()
        positions = file["rounds/trained_positions"][()].tolist()
    # Each of 22 samples has a response of one word and its end; six rows have 12 places.
    assert learnt == [2 * 22] * 2 and positions == [6 * 12] * 2
