"""The examples are what users bring: they run on any number of ranks with the same
numbers, resume, are recorded with their checksums, and equal plain torch.
"""

import copy
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcfed.cli import parse_run
from hpcfed.clients.network import client_network
from hpcfed.experiment.assemble import Setup, assemble
from hpcfed.results.stored import read_run
from hpcfed.runtime import randomness
from hpcfed.runtime import world as worlds
from hpcfed.runtime.timer import Timer
from tests.naive import batches
from tests.runs import assert_same_run, flags, recorded, started

FOLDER = Path(__file__).parents[1] / "benchmarks/examples"
COMMON = flags(
    model="auto",
    rounds=4,
    epochs=1,
    batch_size=8,
    lr=0.05,
    momentum=0,
    clip=1.0,
    checkpoint_every=2,
    snapshot_every=4,
    participation=0.6,
    precision="fp64",
)


def examples(tmp_path: Path) -> dict[str, tuple[list[str], list[Path]]]:
    """Return the options of each example, and the files that it consists of."""
    texts = tmp_path / "texts"
    texts.mkdir(exist_ok=True)
    for number in range(5):
        words = f"the client {number} says what it says. " * (6 + number)
        (texts / f"{number}.txt").write_text(words)
    transformer = FOLDER / "transformer.py"
    text = ["--dataset", f"text:{texts}", "--text-length", "12"]
    images = ["--dataset", "synthetic", "--synthetic-shape", "1x8x8", "--clients", "5"]
    images += ["--train-per-client", "20", "--test-per-client", "4"]
    small = {"width": 8, "depth": 1, "heads": 2}
    return {
        "vit": (
            [*images, *_model("vit.py:ViT", small)],
            [FOLDER / "vit.py", transformer],
        ),
        "resnet": (
            [*images, *_model("resnet.py:ResNet", {"width": 4, "blocks": 1})],
            [FOLDER / "resnet.py"],
        ),
        "gpt": (
            [*text, *_model("gpt.py:GPT", small)],
            [FOLDER / "gpt.py", transformer],
        ),
        "lora": (
            [*text, *_model("gpt.py:GPT", small), "--lora", "2"],
            [FOLDER / "gpt.py", transformer],
        ),
        "gru": ([*text, *_model("gru.py:GRU", {"width": 8})], [FOLDER / "gru.py"]),
        "hospitals": (
            ["--dataset", f"{FOLDER / 'hospitals.py'}:patients"],
            [FOLDER / "hospitals.py"],
        ),
        "scaffold": (
            [
                "--dataset",
                f"{FOLDER / 'hospitals.py'}:patients",
                "--method",
                str(FOLDER / "scaffold.py"),
            ],
            [FOLDER / "scaffold.py", FOLDER / "hospitals.py"],
        ),
    }


def _model(name: str, options: dict[str, int]) -> list[str]:
    text = str(options).replace("'", '"')
    return ["--model", f"{FOLDER}/{name}", "--model-options", text]


@pytest.mark.slow
def test_examples_resume_and_run_on_two_ranks(
    tmp_path: Path, mpirun: Callable[..., Any]
) -> None:
    words: list[object] = []
    # SCAFFOLD's are the hospitals, and the GPT is below the adapters.
    names = ("vit", "resnet", "lora", "gru", "scaffold")
    for name in names:
        options, files = examples(tmp_path)[name]
        alone = started(*COMMON, *options, "--out", tmp_path / name)
        record = read_run(alone)
        sums = {str(f): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}
        # Runs of this process before may have imported others.
        assert sums.items() <= record.environment["files"].items(), name
        # As if it had been killed after two rounds.
        cut = tmp_path / f"{name}-cut"
        shutil.copytree(alone, cut)
        for checkpoint in (cut / "checkpoints").iterdir():
            if int(checkpoint.name) > 2:
                shutil.rmtree(checkpoint)
        shutil.copy(cut / "checkpoints/00000002/run.h5", cut / "run.h5")
        started("--resume", cut)
        np.testing.assert_equal(recorded(cut), recorded(alone), err_msg=name)
        words += ["+"] if words else []
        words += [*COMMON, *options, "--out", tmp_path / f"{name}-two"]
    done = mpirun(2, "-m", "tests.several_runs", *words)
    assert done.returncode == 0, done.stderr
    for name in names:
        assert_same_run(tmp_path / f"{name}-two", tmp_path / name, tolerance=1e-10)


@pytest.mark.parametrize("name", ["vit", "resnet", "gpt", "lora", "gru", "scaffold"])
def test_examples_equal_plain_torch(name: str, tmp_path: Path) -> None:
    """A whole federation, client by client in a plain loop."""
    options, _ = examples(tmp_path)[name]
    words = [*COMMON, *options, "--rounds", "2", "--snapshot-every", "2"]
    folder = started(*words, "--out", tmp_path / "run")
    with h5py.File(folder / "params-0.h5") as file:
        found = torch.from_numpy(file["global"][-1])
    world = worlds.enter(device="cpu")
    setup = assemble(parse_run(words), world, Timer(world.device))
    loop = scaffold if name == "scaffold" else fedavg
    expected = loop(setup, client_network(setup.settings.config).double(), 2)
    assert torch.allclose(found, expected, rtol=1e-10, atol=1e-10)


def trained(setup: Setup, network: nn.Module, client: int, round: int, c: Any) -> int:
    """Train a client's network in place; return its steps."""
    fed = setup.federation
    shard, recipe = fed.training.train_data, fed.recipe(round)
    key = randomness.client_keys(0, "training", round, torch.tensor([client]))[0]
    parameters = [p for p in network.parameters() if p.requires_grad]
    steps = 0
    network.train()
    for batch in batches(shard, client, recipe, key):
        network.zero_grad()
        outputs = network(shard.inputs[batch])
        loss = F.cross_entropy(outputs.flatten(0, -2), shard.targets[batch].flatten())
        loss.backward()
        gradient = nn.utils.parameters_to_vector([p.grad for p in parameters]) + c
        gradient = gradient * min(1.0, 1.0 / (float(gradient.norm()) + 1e-6))
        row = nn.utils.parameters_to_vector(parameters) - recipe.lr * gradient
        nn.utils.vector_to_parameters(row.detach(), parameters)
        steps += 1
    return steps


def row_of(network: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(
        [p for p in network.parameters() if p.requires_grad]
    ).detach()


def put(network: nn.Module, row: Tensor) -> nn.Module:
    network = copy.deepcopy(network)
    nn.utils.vector_to_parameters(
        row, [p for p in network.parameters() if p.requires_grad]
    )
    return network


def fedavg(setup: Setup, network: nn.Module, rounds: int) -> Tensor:
    w = row_of(network)
    for round in range(rounds):
        cohort = setup.federation.sample(round)
        mean = torch.zeros_like(w)
        for client, weight in zip(cohort.clients, cohort.weights, strict=True):
            own = put(network, w)
            trained(setup, own, int(client), round, 0.0)
            mean += weight * row_of(own)
        w = mean
    return w


def scaffold(setup: Setup, network: nn.Module, rounds: int) -> Tensor:
    w = row_of(network)
    c = torch.zeros_like(w)
    own_c = [torch.zeros_like(w) for _ in setup.federation.sizes]
    for round in range(rounds):
        cohort = setup.federation.sample(round)
        mean, change = torch.zeros_like(w), torch.zeros_like(w)
        for client, weight in zip(cohort.clients, cohort.weights, strict=True):
            own = put(network, w)
            steps = trained(setup, own, int(client), round, c - own_c[client])
            rate = setup.federation.recipe(round).lr
            new = own_c[client] - c + (w - row_of(own)) / (steps * rate)
            mean += weight * row_of(own)
            change += (new - own_c[client]) / len(cohort.clients)
            own_c[client] = new
        w, c = mean, c + len(cohort.clients) / len(own_c) * change
    return w
