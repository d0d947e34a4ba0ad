"""benchmarks/rivals: rivals train what hpcfed trains; mistakes and lost processes are
told.
"""

import os

import pytest
import torch
from torch import Tensor, nn

from benchmarks.rivals import others, peers, work
from hpcfed import methods
from hpcfed.clients.job import Recipe
from hpcfed.experiment.assemble import Setup, assemble
from hpcfed.models.networks import build
from hpcfed.options import resolve
from hpcfed.runtime import world as worlds
from hpcfed.runtime.timer import Timer

SGD = Recipe(epochs=2, batch_size=4, lr=0.05, momentum=0.5, weight_decay=5e-4)
EVERYONE = torch.arange(4)


def network() -> nn.Module:
    return build("cnn-cifar", shape=work.SHAPE, classes=10, seed=0).double()


def some_data(*, images: int) -> tuple[Tensor, Tensor]:
    """Return random images and labels of four clients."""
    random = torch.Generator().manual_seed(1)
    shape = (len(EVERYONE), images)
    pixels = torch.randn(*shape, *work.SHAPE, generator=random, dtype=torch.float64)
    return pixels, torch.randint(10, shape, generator=random)


@pytest.mark.parametrize("chunk", [0, 2])
def test_vmap_trains_what_the_plain_loop_trains(chunk: int) -> None:
    data, cohort, model = some_data(images=6), torch.tensor([3, 0, 2]), network()
    first = work.weights_of(model)
    stacked = others.vmap_round(model, first, data, cohort, SGD, chunk=chunk)
    looped = others.loop_round(model, first, data, cohort, SGD)
    torch.testing.assert_close(stacked, looped, rtol=1e-9, atol=1e-12)
    assert not torch.equal(stacked["head.weight"], first["head.weight"])


def test_pfl_research_trains_what_the_plain_loop_trains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("pfl")
    monkeypatch.setenv(
        "PFL_PYTORCH_DEVICE", "cpu"
    )  # it is set anyway, but this takes it back
    data, model = some_data(images=8), network()
    weights = work.weights_of(model)
    for _ in range(2):
        weights = others.loop_round(model, weights, data, EVERYONE, SGD)
    theirs, laps = others.Classifier(network()), work.Laps(torch.device("cpu"))
    others.pfl_rounds(theirs, data, SGD, cohort=4, rounds=2, laps=laps)
    # pfl-research keeps the clients' updates in float32.
    torch.testing.assert_close(
        work.weights_of(theirs.network), weights, rtol=0, atol=1e-7
    )
    assert len(laps.seconds) == 2 and theirs.samples == 2 * 4 * 8 * SGD.epochs


def hpcfed_setup() -> Setup:
    """Assemble four clients whose batch is all they have, so that the order does not
    matter.
    """
    values = work.WORKS["pfedgpa-cifar10"] | {"clients": 4, "train_per_client": 6}
    values |= {
        "batch_size": 6,
        "engine": "batched",
        "precision": "fp64",
        "device": "cpu",
    }
    settings = resolve(
        values, {key: key for key in values}, methods.load("fedavg").Options
    )
    world = worlds.enter(device="cpu")
    return assemble(settings, world, Timer(world.device))


def test_rivals_end_a_round_with_the_row_of_hpcfed() -> None:
    setup = hpcfed_setup()
    fed, method = setup.federation, setup.method
    row = method.global_row(method.round(fed, method.init(fed), fed.sample(0)))
    shard = fed.training.train_data
    data = shard.inputs[shard.index], shard.targets[shard.index]
    sgd = Recipe(epochs=2, batch_size=6, lr=0.02, momentum=0.5, weight_decay=5e-4)
    model = network()
    first = work.weights_of(model)
    for train in (others.vmap_round, others.loop_round):
        work.load_weights(model, train(model, first, data, EVERYONE, sgd))
        theirs = fed.layout.row(model, dtype=torch.float64)
        torch.testing.assert_close(theirs, row, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--rounds 0", "--rounds 0: use 1 or more"),
        ("--scale 2", "--scale 2: use more than 0"),
        ("--chunk -1", "--chunk"),
        ("--processes 3", "--processes 3 does not divide pfl-cifar10's cohort of 50"),
        ("--rivals flower", "invalid choice: 'flower'"),
        ("--json /nowhere/peers.json", "its folder does not exist"),
        ("--wroks pfl-cifar10", "--wroks"),
    ],
)
def test_a_mistake_is_one_line(
    words: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert peers.main(words.split()) == 2
    told = capsys.readouterr().err
    assert text in told and told.count("\n") == 1


def test_a_process_that_is_killed_is_told_and_not_waited_for() -> None:
    with pytest.raises(peers.Failed, match="without an answer"):
        peers.in_children(os._exit, [(1,)])
