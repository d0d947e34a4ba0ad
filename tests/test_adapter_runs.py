"""Runs whose clients have adapters over one language model: equal to a plain loop, on any
number of ranks, resumed bit for bit, and with adapters that the server generates.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.paper import adapters
from hpcfed import cli
from hpcfed.clients.network import client_network
from hpcfed.experiment.assemble import Setup
from hpcfed.experiment.run import run, run_setup
from hpcfed.results.stored import read_run
from hpcfed.runtime import randomness
from tests.conftest import Finished
from tests.federations import assembled, rounds
from tests.naive import batches, torch_optimiser
from tests.pfedgpa_runs import states
from tests.runs import assert_same_run, flags, rows, same, started
from tests.stopped_run import StopAfter

HERE = Path(__file__).parent
CLIENTS = 5
LAST = "transformer.h.1.mlp.c_proj"


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A small GPT-2 with random weights, and clients with few texts and many."""
    transformers = pytest.importorskip(
        "transformers", reason="pip install 'hpcfed[hf]'"
    )
    transformers.utils.logging.disable_progress_bar()
    folder = tmp_path_factory.mktemp("material")
    torch.manual_seed(3)
    config = transformers.GPT2Config(
        vocab_size=30, bos_token_id=0, eos_token_id=0, n_embd=64, n_layer=2, n_head=2,
        n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    transformers.GPT2LMHeadModel(config).save_pretrained(folder / "base")
    (folder / "texts").mkdir()
    for client in range(CLIENTS):
        text = f"{client} says so. " * (6 + 4 * client)
        (folder / "texts" / f"{client}.txt").write_text(text)
    return {
        "model": f"hf:{folder / 'base'}", "dataset": f"text:{folder / 'texts'}",
        "text_length": 12, "lora": 2, "lora_layers": "*.1.*", "optimiser": "adamw",
        "lr": 0.01, "weight_decay": 0.02, "clip": 0.5, "epochs": 2, "batch_size": 4,
    }  # fmt: skip


def ran(folder: Path, **values: Any) -> Path:
    folder.mkdir(exist_ok=True)
    run_setup(assembled(**values, out=str(folder)), folder, quiet=True)
    return folder


def alone(s: Setup, row: Tensor, client: int, round: int) -> Tensor:
    """One client's adapters after a local training in plain torch."""
    fed, config = s.federation, s.settings.config
    network = client_network(config, double=True).train()
    tensors = {name: view[0] for name, view in fed.layout.views(row[None]).items()}
    network.load_state_dict(tensors, strict=False)
    recipe, shard = fed.recipe(round), fed.training.train_data
    ids = torch.tensor([client])
    key = randomness.client_keys(config.seed, "training", round, ids)[0]
    optimiser = torch_optimiser(network, recipe)
    trained = [p for p in network.parameters() if p.requires_grad]
    for batch in batches(shard, client, recipe, key):
        optimiser.zero_grad()
        logits = network(shard.inputs[batch]).logits
        F.cross_entropy(logits.flatten(0, 1), shard.targets[batch].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(trained, recipe.clip)
        optimiser.step()
    return fed.layout.row(network, dtype=torch.float64)


def test_rounds_are_those_of_a_plain_loop(material: dict[str, Any]) -> None:
    s = assembled(**{**material, "clients": CLIENTS})
    fed = s.federation
    assert s.engine.mode == "batched" and len(set(fed.sizes.tolist())) > 2
    before, first = fed.initial_row(), fed.initial_row()
    weights = torch.from_numpy(fed.sizes / fed.sizes.sum())
    for round, state in rounds(s, 2):
        each = [alone(s, before, client, round) for client in range(CLIENTS)]
        expected = weights @ torch.stack(each)
        moved = (expected - before).norm()
        assert (state.w - expected).norm() < 1e-10 * moved
        before = state.w
    assert (before - first).norm() > 1e-2 * first.norm()


def test_ranks_give_the_adapters_of_one(
    material: dict[str, Any], tmp_path: Path, mpirun: Callable[..., Finished]
) -> None:
    """Where adapters are common, and where a part of them is a client's own."""
    common = {**material, "precision": "fp64", "rounds": 2, "snapshot_every": 1}
    common |= {"participation": 0.7, "lora_clients": True}
    # Transformers would take every rank seconds to import.
    common |= {"model": "benchmarks/examples/gpt.py:GPT", "lora_layers": "blocks.*"}
    common["model_options"] = '{"width": 16, "depth": 1, "heads": 2}'
    methods = ("fedavg", "fedsa-lora")
    for method in methods:
        started(*flags(**common, method=method, out=tmp_path / method))
    for ranks in (2, 3):
        job: list[object] = []
        for method in methods:
            out = tmp_path / f"{ranks}" / method
            job += ["+", *flags(**common, method=method, out=out)]
        done = mpirun(ranks, "-m", "mpi4py", HERE / "several_runs.py", *job)
        assert done.returncode == 0, done.stderr
        for method in methods:
            one, several = tmp_path / method, tmp_path / f"{ranks}" / method
            assert read_run(several).facts["ranks"] == ranks
            assert_same_run(several, one, tolerance=1e-10)
            # A config and weights, of each client and of all together.
            assert adapters_of(several) == adapters_of(one)
            assert len(adapters_of(one)) == 2 * (CLIENTS + (method == "fedavg"))


def adapters_of(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("adapter_*")}


@pytest.mark.parametrize("method", ["fedavg", "dual-lora"])
def test_a_resumed_run_has_the_adapters_of_an_uninterrupted_one(
    method: str, material: dict[str, Any], tmp_path: Path
) -> None:
    resumed_as_uninterrupted({**material, "precision": "fp32"}, method, tmp_path)


def resumed_as_uninterrupted(
    options: dict[str, Any], method: str, folder: Path
) -> Path:
    common = {**options, "method": method, "rounds": 3, "snapshot_every": 1}
    words = flags(**common, participation=0.7)
    whole, cut = started(*words, "--out", folder / "whole"), folder / "cut"
    with pytest.raises(SystemExit):
        run(cli.parse_run([*words, "--out", str(cut)]), StopAfter(2))
    assert read_run(cut).status == "stopped"
    same(whole, started("--resume", cut))
    expected, found = rows(whole), rows(cut)
    assert sorted(found) == sorted(expected) == list(range(CLIENTS))
    for client, row in expected.items():
        assert found[client].tobytes() == row.tobytes()
    return whole


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["fedavg", "dual-lora"])
def test_in_bfloat16_a_resumed_run_is_the_uninterrupted_one(
    method: str, material: dict[str, Any], tmp_path: Path
) -> None:
    on_gpu = {"device": "cuda", "precision": "bf16", "deterministic": True}
    try:
        whole = resumed_as_uninterrupted({**material, **on_gpu}, method, tmp_path)
    finally:
        torch.use_deterministic_algorithms(False)
    record = read_run(whole)
    assert record.config["precision"] == "bf16" and record.config["device"] == "cuda"


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_two_ranks_over_nccl_give_the_adapters_of_one(
    precision: str,
    material: dict[str, Any],
    tmp_path: Path,
    mpirun: Callable[..., Finished],
) -> None:
    common = {**material, "precision": precision, "rounds": 2, "snapshot_every": 1}
    words = flags(**{**common, "device": "cuda"})
    one = started(*words, "--out", tmp_path / "one")
    two = tmp_path / "two"
    more = ("--backend", "nccl", "--out", two)
    done = mpirun(2, "-m", "hpcfed", "run", *words, *more, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    record = read_run(two)
    assert record.facts["ranks"] == 2 and record.environment["backend"] == "nccl"
    # Products of other shapes are rounded elsewhere, and Adam divides small gradients by
    # their size: a sign may flip, for two rounds of at most 24 steps.
    tolerance = 1e-10 if precision == "fp64" else 0.1
    expected, found = rows(one), rows(two)
    assert sorted(found) == sorted(expected) == list(range(CLIENTS))
    for client, row in expected.items():
        off = np.linalg.norm(found[client] - row)
        assert off <= tolerance * np.linalg.norm(row), f"client {client}"


SERVERS: dict[str, dict[str, Any]] = {
    "span": {"server": "tiny"},
    "p-diff": {"server": "small", "server_latent": 8, "autoencoder_samples": 100},
    "tokens": {"server": "tiny", "server_latent": 64, "token_window": 8},
}
LEARNING: dict[str, Any] = {
    "method": "pfedgpa", "precision": "fp32", "rounds": 4, "server_every": 2,
    "bank_rounds": 2, "denoiser_samples": 100, "server_batch": 20,
    "diffusion_steps": 50, "inversion_depth": 10, "server_engine": "torch",
}  # fmt: skip


def generating(
    material: dict[str, Any], server_model: str, **more: Any
) -> dict[str, Any]:
    of_server = {"server_model": server_model, **SERVERS[server_model]}
    return {**material, **LEARNING, **of_server, "clients": CLIENTS, **more}


@pytest.mark.parametrize("server_model", SERVERS)
def test_the_server_generates_every_clients_adapters(
    server_model: str, material: dict[str, Any]
) -> None:
    s = assembled(**generating(material, server_model))
    fed, starts = s.federation, []
    names = [e.name for e in fed.layout.entries]
    assert all(".down." in name or ".up." in name for name in names)
    assert fed.generated.tolist() == list(range(fed.layout.num_columns))
    train = fed.train

    def watched(rows: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        starts.append(rows.clone())
        return train(rows, *arguments, **keywords)

    fed.train = watched  # type: ignore[method-assign]
    found = states(s)
    # The server has learnt after the second round, and after the last.
    made, last = found[2].generated, found[4].generated
    assert not found[3].generated.numel()
    assert len(starts[1].unique(dim=0)) == 1, "FedAvg's row"
    assert torch.equal(starts[2], made) and len(made.unique(dim=0)) == CLIENTS
    everyone = np.arange(CLIENTS)
    assert torch.equal(s.method.personal(fed, found[4], everyone), last)
    # All that was trained is in the adapters, and the base is nowhere.
    assert made.shape == last.shape == (CLIENTS, fed.layout.num_columns)
    assert last.isfinite().all()


@pytest.mark.parametrize(
    ("server_model", "layers"), [("span", None), ("p-diff", 1), ("span", 1)]
)
def test_frozen_layers_are_not_generated(
    server_model: str, layers: int | None, material: dict[str, Any]
) -> None:
    """Even where rows hold them: they come last, after the adapters. Both factors of an
    adapter are one layer.
    """
    more = {} if layers is None else {"generated_layers": layers}
    s = assembled(**generating(material, server_model, send_frozen=True, **more))
    fed = s.federation
    adapters, wanted = [], []
    for e in fed.layout.entries:
        if e.trainable:
            adapters += range(e.start, e.stop)
        if e.trainable and (layers is None or e.name.startswith(LAST)):
            wanted += range(e.start, e.stop)
    assert fed.generated.tolist() == wanted
    assert len(adapters) < fed.layout.num_columns / 2


def test_a_run_tells_whose_generated_adapters_are(
    material: dict[str, Any], tmp_path: Path
) -> None:
    options = generating(material, "span", memorisation=True, lora_clients=True)
    out = ran(tmp_path / "run", **options)
    record = read_run(out)
    learning = record.learnings[-1]
    assert learning.own is not None and 0 <= learning.own <= 1
    assert record.facts["generated_columns"] == record.facts["columns"]
    assert np.isfinite(record.figures["distance to own upload"]).all()
    written = [path.read_bytes() for path in out.rglob("adapter_model.safetensors")]
    assert len(set(written)) == len(written) == 1 + CLIENTS


def test_the_table_of_methods_takes_only_runs_that_were_asked_for(
    material: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    words = ["adapters.py", "--text", material["dataset"].removeprefix("text:")]
    words += ["--out", str(out), "--methods", "fedavg", "fedsa-lora", "--seeds", "0"]
    words += ["1", "--base-rounds", "1", "--rounds", "2", "--points", "1"]
    words += ["--model", '{"width": 8, "depth": 1, "heads": 2}', "--device", "cpu"]
    words += ["--set", "text_length=12", "cohort=3", "batch-size=4", "lora=2"]
    monkeypatch.setattr("sys.argv", words)
    adapters.main()
    found = (out / adapters.TABLE).read_text()
    header, _, common, own = found.splitlines()
    assert header.startswith("| method | after 2 | global | sent by clients |")
    runs = [read_run(out / "fedavg" / f"seed-{seed}") for seed in (0, 1)]
    mean = np.mean([one.rounds["perplexity"][-1] for one in runs])
    assert common.startswith(f"| `fedavg` | {mean:.3f} ± ")
    assert own.startswith("| `fedsa-lora` |") and " | – | " in own
    # Again: nothing is run anew.
    monkeypatch.setattr(adapters, "run", pytest.fail)
    adapters.main()
    assert (out / adapters.TABLE).read_text() == found
    monkeypatch.setattr("sys.argv", [*words, "lora=1"])
    with pytest.raises(SystemExit, match="seed-0 was run with lora 2, not 1; name ano"):
        adapters.main()
