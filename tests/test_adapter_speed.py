"""benchmarks/speed/adapters.py: its columns do the same work, and its table survives."""

import json
from argparse import Namespace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.speed import adapters
from benchmarks.speed.adapter_rows import BASES, ROWS, Row, tiny_base
from benchmarks.speed.adapter_runs import of_record, words_of
from benchmarks.speed.plain_adapters import Plain
from hpcfed.cli import parse_run
from hpcfed.clients.network import client_network
from hpcfed.experiment.assemble import assemble
from hpcfed.results.stored import read_run
from hpcfed.runtime import randomness
from hpcfed.runtime import world as worlds
from hpcfed.runtime.timer import Timer
from tests.naive import batches
from tests.runs import started

pytest.importorskip("transformers", reason="pip install 'hpcfed[hf]'")

OPTIONS = Namespace(stored="float32", warmup=1, rounds=1, device="cpu")
SMALL = Row("", clients=3, batch=2, length=8, steps=3)


@pytest.mark.parametrize("base", ["124 M", "1.04 B"])
def test_the_plain_loop_trains_what_hpcfed_trains(base: str, tmp_path: Path) -> None:
    chosen = tiny_base(BASES[base])
    words = words_of(SMALL, chosen, tmp_path / "base", OPTIONS)
    words[words.index("--precision") + 1] = "fp64"
    folder = started(*words, "--snapshot-every", "2")
    world = worlds.enter(device="cpu")
    settings = parse_run(words)
    setup = assemble(settings, world, Timer(world.device))
    ours = client_network(settings.config, double=True)
    frozen = settings.config.model_copy(update={"lora": None})
    bare = client_network(frozen, double=True)
    plain = Plain(bare, rank=chosen.rank, layers=chosen.layers)
    theirs = [p.detach() for p in ours.parameters() if p.requires_grad]
    assert [p.shape for p in theirs] == [p.shape for p in plain.trained]
    w = nn.utils.parameters_to_vector(theirs)

    shard = setup.federation.training.train_data
    texts = torch.cat([shard.inputs, shard.targets[:, -1:]], 1)
    losses = []
    for round in range(2):
        keys = randomness.client_keys(0, "training", round, torch.arange(3))
        recipe = setup.federation.recipe(round)
        tokens = []
        for client in range(SMALL.clients):
            own = batches(shard, client, recipe, keys[client])
            tokens.append(torch.stack([texts[batch] for batch in own]))
        rows = w.repeat(SMALL.clients, 1)
        losses.append(plain.loop(rows, torch.stack(tokens)).mean().item())
        assert len(rows.unique(dim=0)) == SMALL.clients
        w = rows.mean(0)
    with h5py.File(folder / "params-0.h5") as file:
        found = torch.from_numpy(file["global"][-1])
    torch.testing.assert_close(w, found, rtol=1e-10, atol=1e-10)
    cell = of_record("", SMALL, folder, 9.0, "(hf:x, batched) on 1 rank", OPTIONS)
    assert cell.speed is not None and cell.speed > 0
    assert cell.note.startswith("batched, bf16, 1 round,")
    recorded = read_run(folder).rounds["train_loss"]
    np.testing.assert_allclose(recorded, losses, rtol=1e-10)


def test_parts_of_one_batch_add_up(tmp_path: Path) -> None:
    chosen = tiny_base(BASES["124 M"])
    words = words_of(SMALL, chosen, tmp_path / "base", OPTIONS)
    rows = []
    for at_once in (6, 2):
        config = parse_run(words).config.model_copy(update={"lora": None})
        torch.manual_seed(1)
        network = client_network(config, double=True)
        plain = Plain(network, rank=2, layers=chosen.layers)
        tokens = torch.arange(6 * 9).remainder(64).view(6, 9)
        optimiser = plain.optimiser()
        for _ in range(2):
            plain.step(optimiser, tokens, at_once=at_once)
        rows.append(plain.row())
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-8, atol=1e-10)


def test_the_table_survives_a_cell_that_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Plain, "loop", fails)
    path = tmp_path / "cells.json"
    words = ["--quick", "--device", "cpu", "--rows", "gpt2-124m", "many-124m"]
    adapters.main([*words, "--columns", "loop", "one", "--json", str(path)])
    cells = json.loads(path.read_text())["cells"]
    assert [(cell["row"], cell["column"]) for cell in cells] == [
        ("gpt2-124m", "loop"),
        ("gpt2-124m", "one"),
        ("many-124m", "loop"),
        ("many-124m", "one"),
    ]
    for cell in cells:
        if cell["column"] == "loop":
            assert cell["speed"] is None and cell["note"] == "does not fit"
        else:
            assert cell["speed"] > 0 and cell["note"].startswith("float32")
    assert "| gpt2-124m | – |" in capsys.readouterr().out


def test_rows_count_their_tokens() -> None:
    assert ROWS["gpt2-124m"].tokens == 20 * 4 * 256
    assert ROWS["flower"].tokens == 2 * 16 * 512


def test_the_workload_of_flowertune_has_its_shape(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    workload = "benchmarks/workloads/flowertune.toml"
    config = parse_run([workload, "--model", f"hf:{tmp_path}"]).config
    data, row = config.data(), ROWS["flower"]
    assert (config.clients, config.cohort) == (row.clients, row.cohort) == (20, 2)
    assert (config.rounds, config.lora) == (row.whole, BASES[row.base].rank)
    assert config.lora_layers == BASES[row.base].layers
    assert data.samples == (row.clients * row.steps * config.batch_size, 8)
    assert data.shape == (row.length,) == (512,)
    few = json.dumps({"clients": 2, "samples": 1, "length": 4, "vocabulary": 32000})
    words = [workload, "--model", f"hf:{tmp_path}", "--dataset-options", few]
    assert parse_run(words).config.data().vocabulary == 32000
