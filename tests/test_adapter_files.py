"""Adapters in the files of PEFT: what a run writes, what --init reads, and that the real
`peft` computes the same with them.
"""

import json
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn

from hpcfed.clients.network import client_network
from hpcfed.errors import UserError
from hpcfed.experiment.run import run_setup
from hpcfed.models import hugging_face
from hpcfed.models.layout import Layout
from hpcfed.models.lora import add_adapters
from hpcfed.models.peft_files import CONFIG, WEIGHTS, describe
from hpcfed.results.folder import empty
from tests.federations import assembled
from tests.runs import flags, mistake, started

BASE = "base_model.model."
PLAIN = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["fc1"]}
"""What PEFT writes at least."""


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for number in range(3):
        (folder / f"{number}.txt").write_text(f"client {number} says so. " * 6)
    return folder


def network_folder(kind: str, folder: Path) -> Path:
    """Save a small network with random weights."""
    transformers = pytest.importorskip(
        "transformers", reason="pip install 'hpcfed[hf]'"
    )
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(3)
    small = {"vocab_size": 30, "bos_token_id": 0, "eos_token_id": 0}
    if kind == "GPT2":
        config = transformers.GPT2Config(
            **small, n_embd=8, n_layer=2, n_head=2, n_positions=16,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        made = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            **small, hidden_size=8, intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=2, max_position_embeddings=16,
        )  # fmt: skip
        made = transformers.LlamaForCausalLM(config)
    made.save_pretrained(folder)
    return folder


def options(base: Path, texts: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": f"hf:{base}", "dataset": f"text:{texts}", "text_length": 12,
        "clients": 3, "rounds": 1, "epochs": 1, "batch_size": 8, "lr": 0.5, **more,
    }  # fmt: skip


def ran(folder: Path, **values: Any) -> Path:
    folder.mkdir()
    run_setup(assembled(**values, out=str(folder)), folder, quiet=True)
    return folder


def test_a_run_leaves_its_adapters_with_pefts_names(
    tmp_path: Path, texts: Path
) -> None:
    base = network_folder("GPT2", tmp_path / "base")
    of_run = options(base, texts, lora=2, lora_alpha=3.0, lora_layers="*.1.attn.*")
    folder = ran(tmp_path / "run", **of_run, lora_train="*.ln_f")
    found = load_file(folder / "adapter" / WEIGHTS)
    where = f"{BASE}transformer.h.1.attn."
    assert {name: array.shape for name, array in found.items()} == {
        f"{where}c_attn.lora_A.weight": (2, 8),
        f"{where}c_attn.lora_B.weight": (24, 2),
        f"{where}c_proj.lora_A.weight": (2, 8),
        f"{where}c_proj.lora_B.weight": (8, 2),
        f"{BASE}transformer.ln_f.weight": (8,),
        f"{BASE}transformer.ln_f.bias": (8,),
    }
    with np.load(folder / "model.npz") as model:
        up = model["transformer.h.1.attn.c_attn.up.weight"]
    np.testing.assert_array_equal(found[f"{where}c_attn.lora_B.weight"], up)
    assert np.abs(up).max() > 0
    config = json.loads((folder / "adapter" / CONFIG).read_text())
    assert config["r"] == 2 and config["lora_alpha"] == 3
    assert config["fan_in_fan_out"] is True
    assert config["task_type"] == "CAUSAL_LM"
    assert config["base_model_name_or_path"] == str(base)
    # In the other block the same names have no adapter.
    assert config["target_modules"] == (
        r"transformer\.h\.1\.attn\.c_attn|transformer\.h\.1\.attn\.c_proj"
    )
    assert config["modules_to_save"] == ["transformer.ln_f"]
    # Another run starts where this one has ended.
    again = assembled(**options(base, texts, init=str(folder / "adapter")))
    config = again.settings.config
    assert (config.lora, config.lora_alpha) == (2, 3.0)
    row = again.federation.initial_row()
    views = again.federation.layout.views(row[None])
    for name, array in found.items():
        ours = name.removeprefix(BASE).replace("lora_A", "down").replace("lora_B", "up")
        np.testing.assert_array_equal(views[ours][0].numpy(), array)
    assert len(views) == len(found)


def test_a_model_leaves_its_base_in_the_base_s_folder(
    tmp_path: Path, texts: Path
) -> None:
    base = network_folder("GPT2", tmp_path / "base")
    values = options(base, texts, lora=2, lora_layers="*.1.attn.*")
    folder = ran(tmp_path / "run", **values, lora_train="*.ln_f")
    with np.load(folder / "model.npz") as model:
        found = dict(model)
    assert {name.rpartition("transformer.")[2] for name in found} == {
        "ln_f.weight", "ln_f.bias",
        "h.1.attn.c_attn.down.weight", "h.1.attn.c_attn.up.weight",
        "h.1.attn.c_proj.down.weight", "h.1.attn.c_proj.up.weight",
    }  # fmt: skip
    with ZipFile(folder / "model.npz") as archive:
        said = json.loads(archive.comment)
    weights = hugging_face.checksum(base)
    assert said == {"folder": str(base), "drawn": "", "weights": weights}
    again = assembled(**values, lora_train="*.ln_f", init=str(folder))
    views = again.federation.layout.views(again.federation.initial_row()[None])
    for name, array in found.items():
        np.testing.assert_array_equal(views[name][0].numpy(), array)
    # Rows that hold the base are written whole: a method may change it.
    whole = ran(tmp_path / "whole", **values, send_frozen=True)
    with np.load(whole / "model.npz") as model:
        assert "transformer.wte.weight" in model.files


def test_a_base_that_was_changed_is_noticed(
    tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = network_folder("GPT2", tmp_path / "base")
    values = options(base, texts, lora=2)
    words = flags(**values, out=tmp_path / "run", checkpoint_every=1)
    folder = started(*words)
    capsys.readouterr()
    file = base / "model.safetensors"
    weights = bytearray(file.read_bytes())
    weights[-1] ^= 1
    file.write_bytes(weights)
    with pytest.raises(UserError, match="begun with another base under its adapters"):
        started("--resume", folder, "--rounds", 9)
    with pytest.raises(UserError, match="begun with another base under its adapters"):
        started("--resume", folder, "--generate", 2)
    capsys.readouterr()
    line = mistake(capsys, "run", *flags(**values), "--init", folder)
    assert f"belong to other weights than {base} has now" in line


def test_adapters_stay_with_the_random_weights_that_they_were_trained_with(
    tmp_path: Path, texts: Path
) -> None:
    base = network_folder("GPT2", tmp_path / "base")
    (base / "model.safetensors").unlink()
    values = options(base, texts, lora=2, seed=4)
    folder = ran(tmp_path / "run", **values)
    assembled(**values, init=str(folder))
    values["seed"] = 5
    with pytest.raises(
        UserError, match=r"belong to random weights of .*; give --seed 4"
    ):
        assembled(**values, init=str(folder))


def handmade(folder: Path, **changes: Any) -> Path:
    """Write a folder as PEFT would, for layer fc1 of the mlp: 64 inputs, 64 outputs."""
    folder.mkdir(exist_ok=True)
    values = np.random.default_rng(0)
    rank = 2
    tensors = {
        f"{BASE}fc1.lora_A.weight": values.normal(size=(rank, 64)),
        f"{BASE}fc1.lora_B.weight": values.normal(size=(64, rank)),
    }
    save_file(tensors, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps({**PLAIN, **changes}))
    return folder


def test_a_run_starts_from_a_file_that_somebody_else_has_made(tmp_path: Path) -> None:
    folder = handmade(tmp_path / "theirs")
    s = assembled(init=str(folder))
    config = s.settings.config
    assert (config.lora, config.lora_alpha) == (2, 6.0)
    network = client_network(config, double=True)
    plain = client_network(assembled().settings.config, double=True)
    found = load_file(folder / WEIGHTS)
    a = torch.from_numpy(found[f"{BASE}fc1.lora_A.weight"])
    b = torch.from_numpy(found[f"{BASE}fc1.lora_B.weight"])
    with torch.no_grad():
        plain.fc1.weight += 6 / 2 * b @ a  # type: ignore[union-attr, arg-type, operator]
    x = torch.randn(5, 1, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(network(x), plain(x), rtol=1e-12, atol=1e-12)


def test_methods_about_adapters_take_the_rank_that_is_given(tmp_path: Path) -> None:
    """They have a rank of their own only where nothing else says one."""
    folder = handmade(tmp_path / "theirs")
    for method in ("ffa-lora", "hetlora"):
        assert assembled(init=str(folder), method=method).settings.config.lora == 2
    options = assembled(init=str(folder), method="hetlora").settings.options
    assert options.dealt == [1, 2]  # type: ignore[attr-defined]


def test_names_that_a_pattern_restricts_come_from_the_file(tmp_path: Path) -> None:
    folder = handmade(tmp_path / "theirs", target_modules="fc[0-9]")
    assert assembled(init=str(folder)).settings.config.lora_layers == "fc1"


@pytest.mark.parametrize(
    ("changes", "words", "said"),
    [
        ({}, ["--lora", 4], "/theirs have 2; leave --lora out, or give theirs"),
        ({}, ["--lora-alpha", 2], "/theirs have 6; leave --lora-alpha out"),
        ({"target_modules": ["fc"]}, [], "no linear layer has such a name; did you"),
        ({"target_modules": ["head"]}, [], "there is no head.down.weight"),
        ({}, ["--lora-layers", "head"], "there is no head.down.weight"),
        ({}, ["--lora-train", "fc1", "--lora-layers", "*"], "there is no fc1.weight"),
        ({}, ["--lora", 0], "holds adapters; leave --lora out, or give their rank"),
        ({"r": 3}, [], "r is 3 in adapter_config.json, but fc1 has rank 2"),
        ({"r": 10**12}, [], "but fc1 has rank 2"),
        ({"lora_alpha": 10**400}, [], "lora_alpha in adapter_config.json must be above"),
        ({"modules_to_save": 5}, [], "modules_to_save in adapter_config.json must be a"),
        ({"modules_to_save": "head"}, [], "must be a list of names"),
        ({"init_lora_weights": "pissa"}, [], "also changes the network below"),
        ({"r": "two"}, [], "r in adapter_config.json must be a whole number above 0"),
        ({"lora_alpha": 0}, [], "lora_alpha in adapter_config.json must be above 0"),
        ({"peft_type": "IA3"}, [], "peft_type is IA3; only LORA can be read"),
        ({"use_dora": True}, [], "use_dora is set; only plain LoRA can be read"),
        ({"bias": "all"}, [], "its adapters have biases (all)"),
    ],
)  # fmt: skip
def test_a_folder_that_does_not_fit_is_one_line(
    changes: dict[str, Any],
    words: list[object],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    handmade(Path("theirs"), **changes)
    line = mistake(capsys, "run", "--model", "mlp", "--init", "theirs", *words)
    assert said in line


def test_broken_files_are_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["run", "--model", "mlp", "--init", "theirs"]
    weights, config = Path("theirs", WEIGHTS), Path("theirs", CONFIG)
    handmade(Path("theirs"))
    whole = weights.read_bytes()
    for broken in (whole[: len(whole) // 2], b"", b"\xff" * 40):
        weights.write_bytes(broken)
        assert "safetensors cannot be read: " in mistake(capsys, *words)
    save_file({"fc1.lora_A.weight": np.zeros(2)}, weights)
    assert "fc1.lora_A.weight in adapter_model.safetensors does not begin with" in (
        mistake(capsys, *words)
    )
    weights.write_bytes(whole)
    more = {f"{BASE}head.lora_A.weight": np.zeros((2, 64))}
    save_file(load_file(weights) | more, weights)
    assert "has no head.down.weight; give the same --model and --lora-layers" in (
        mistake(capsys, *words)
    )
    weights.unlink()
    assert "there is no adapter_model.safetensors" in mistake(capsys, *words)
    weights.write_bytes(whole)
    for text, said in (("{", "cannot be read"), ("[1]", "must hold a JSON object")):
        config.write_text(text)
        assert f"adapter_config.json {said}" in mistake(capsys, *words)


def test_clients_adapters_are_written_on_request(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "method": "ditto", "lora": 2, "rounds": 1, "epochs": 1, "clients": 3,
        "lora_clients": True, "snapshot_every": 1,
    }  # fmt: skip
    folder = ran(tmp_path / "run", **values)
    found = [
        load_file(folder / "adapter" / f"client-{client}" / WEIGHTS)
        for client in range(3)
    ]
    common = load_file(folder / "adapter" / WEIGHTS)
    name = f"{BASE}fc1.lora_B.weight"
    ups = [one[name] for one in (*found, common)]
    for i in range(4):
        for j in range(i):
            assert not np.array_equal(ups[i], ups[j])
    s = assembled(**values, init=str(folder / "adapter/client-1"))
    views = s.federation.layout.views(s.federation.initial_row()[None])
    np.testing.assert_array_equal(views["fc1.up.weight"][0].numpy(), ups[1])
    # --overwrite leaves nothing of them.
    empty(folder)
    assert not (folder / "adapter").exists()


def test_seeds_share_one_frozen_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They advance on one engine. From random weights each would need its own."""
    few = flags(clients=2, rounds=1, lora=2, seeds="0,1", out=tmp_path / "run")
    said = mistake(capsys, "run", *few)
    assert "seed 1 has another frozen fc1.base.weight than seed 0" in said


def test_adapters_that_peft_does_not_know_are_not_written() -> None:
    """Torch's attention never calls its layers, so weights themselves are adapted."""
    network = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    add_adapters(network, rank=2, alpha=2.0)
    assert describe(network, Layout.of(network), base=None, causal=False) is None


def logits(network: nn.Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return network.double().eval()(tokens).logits


@pytest.mark.parametrize("kind", ["GPT2", "Llama"])
def test_peft_gives_the_same_logits_both_ways(
    kind: str, tmp_path: Path, texts: Path
) -> None:
    """Layers of both kinds, Conv1D and Linear, and a layer that is trained as a whole."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    transformers = pytest.importorskip("transformers")
    base = network_folder(kind, tmp_path / "base")
    load = transformers.AutoModelForCausalLM.from_pretrained
    tokens = torch.randint(20, (4, 12), generator=torch.Generator().manual_seed(1))
    before = logits(load(base), tokens)
    norm = "*.ln_f" if kind == "GPT2" else "model.norm"
    # In float32, which is what PEFT loads.
    of_run = options(base, texts, lora=2, lora_alpha=3.0, precision="fp32")
    folder = ran(tmp_path / "run", **of_run, lora_train=norm)
    # From here to there.
    theirs = peft.PeftModel.from_pretrained(load(base), folder / "adapter")
    again = assembled(**options(base, texts, init=str(folder / "adapter")))
    ours = client_network(again.settings.config, double=True)
    after = logits(ours, tokens)
    torch.testing.assert_close(logits(theirs, tokens), after, rtol=1e-12, atol=1e-12)
    assert (after - before).abs().max() > 1e-3
    # From there to here: their draw, and a B that is not zero.
    linear = ["c_attn", "c_fc"] if kind == "GPT2" else ["q_proj", "lm_head"]
    wanted = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=linear, init_lora_weights=False
    )
    theirs = peft.get_peft_model(load(base), wanted)
    theirs.save_pretrained(tmp_path / "theirs")
    s = assembled(**options(base, texts, init=str(tmp_path / "theirs")))
    ours = client_network(s.settings.config, double=True)
    after = logits(theirs, tokens)
    torch.testing.assert_close(logits(ours, tokens), after, rtol=1e-12, atol=1e-12)
    assert (after - before).abs().max() > 1e-3
