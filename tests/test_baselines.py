"""FedPer, FedRep, LG-FedAvg, FedBABU and pFedHN against naive loops of their published
rules, client by client.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcfed import methods
from hpcfed.clients.job import Recipe, TrainingJob
from hpcfed.experiment.assemble import Setup
from hpcfed.experiment.evaluate import evaluate
from hpcfed.federation.log import RoundLog
from hpcfed.methods import _partial
from hpcfed.models import MODELS
from hpcfed.models.layout import Layout
from hpcfed.models.networks import build
from hpcfed.results.stored import read_run
from tests.federations import (
    HARSH,
    Weights,
    assembled,
    close,
    initial,
    rounds,
    traffic,
    trained,
    usual,
)
from tests.naive import shape_of
from tests.runs import (
    TWELVE_CLIENTS,
    UNEVEN,
    assert_same_run,
    mistake,
    rows_of,
    run_alone,
    started,
)

PARTS = ["fedper", "fedrep", "lg-fedavg", "fedbabu"]
BODY, HEAD, WHOLE = 64 * 64 + 64, 64 * 10 + 10, 64 * 64 + 64 + 64 * 10 + 10


@pytest.mark.parametrize(
    ("method", "shared", "phases"),
    [
        ("fedper", "fc1", [("", 2)]),
        ("fedrep", "fc1", [("head", 3), ("fc1", 2)]),
        ("lg-fedavg", "head", [("", 2)]),
        ("fedbabu", "fc1", [("fc1", 2)]),
    ],
)
def test_the_published_rule(
    method: str, shared: str, phases: list[tuple[str, int]]
) -> None:
    """Shared tensors are the cohort's weighted mean, a client's others are its own,
    from its last round on.
    """
    options = {"head_epochs": 3, "body_epochs": 2} if method == "fedrep" else {}
    s = assembled(method=method, **HARSH, **options)
    server = {
        name: tensor for name, tensor in initial(s).items() if name.startswith(shared)
    }
    clients, sizes = [initial(s) for _ in range(4)], s.federation.sizes
    for round, state in rounds(s, 3):
        cohort = s.federation.sample(round).clients
        assert len(cohort) == 2
        for client in cohort:
            clients[client] |= server
            for number, (part, epochs) in enumerate(phases):
                purpose = f"training, phase {number}" if number else "training"
                clients[client] = trained(
                    s,
                    clients[client],
                    client,
                    purpose,
                    round,
                    usual(s, round, epochs),
                    part,
                )
        share = {client: sizes[client] / sizes[cohort].sum() for client in cohort}
        server = {
            name: sum(share[client] * clients[client][name] for client in cohort)
            for name in server
        }
        close(
            _partial.personal(s.federation, state, np.arange(4)),
            [own | server for own in clients],
        )


def test_fedbabu_fine_tunes_what_it_judges() -> None:
    columns = {"all": "", "head": "head", "body": "fc1"}
    for finetune, part in columns.items():
        s = assembled(method="fedbabu", finetune=finetune, finetune_epochs=3, **HARSH)
        *_, (_, state) = rounds(s, 2)
        views = s.federation.layout.views(s.method.global_row(state)[None])
        common = {name: view[0] for name, view in views.items()}
        expected = [
            trained(s, common, client, "fine-tuning", 1, usual(s, 1, 3), part)
            for client in range(4)
        ]
        close(s.method.personal(s.federation, state, np.arange(4)), expected)


def test_fedbabu_heads_are_all_the_first_until_fine_tuning() -> None:
    s = assembled(method="fedbabu", finetune_epochs=1, **HARSH)
    head = s.federation.initial_row()[BODY:]
    for _, state in rounds(s, 3):
        assert torch.equal(state.private, head.expand(4, -1))
        assert torch.equal(s.method.global_row(state)[BODY:], head)
        assert not torch.equal(
            s.method.global_row(state)[:BODY], s.federation.initial_row()[:BODY]
        )
        tuned = s.method.personal(s.federation, state, np.arange(4))
        assert all(not torch.equal(row[BODY:], head) for row in tuned)


def test_phases_freeze_the_rest_bit_for_bit_and_draw_new_orders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    s = assembled(method="fedrep", **HARSH)
    train, seen = s.engine.train, []

    def watched(job: TrainingJob) -> tuple[Tensor, Tensor]:
        after, losses = train(job)
        rows, columns = job.rows, job.columns
        assert torch.equal(after[:, ~columns], rows[:, ~columns])
        assert (after[:, columns] != rows[:, columns]).any(1).all()
        seen.append((int(columns.sum()), job.keys))
        return after, losses

    monkeypatch.setattr(s.engine, "train", watched)
    assert len(list(rounds(s, 2))) == 2
    assert [width for width, _ in seen] == [HEAD, BODY] * 2
    assert len(torch.cat([keys for _, keys in seen]).unique()) == 8


def test_an_empty_head_is_fedavg_bit_for_bit() -> None:
    personal, average = (
        assembled(method="fedper", head_layers=0, **HARSH),
        assembled(method="fedavg", **HARSH),
    )
    found, wanted = list[RoundLog](), list[RoundLog]()
    for (_, state), (_, expected) in zip(
        rounds(personal, 3, found), rounds(average, 3, wanted), strict=True
    ):
        assert torch.equal(state.shared, expected.w)
        rows = personal.method.personal(personal.federation, state, np.arange(4))
        assert torch.equal(rows, expected.w.expand(4, -1))
    assert traffic(found) == traffic(wanted) and all(traffic(found)[::2])


def test_a_head_that_is_everything_is_local_only() -> None:
    personal, local = (
        assembled(method="fedper", head_layers=2, **HARSH),
        assembled(method="local", **HARSH),
    )
    logs = list[RoundLog]()
    for (_, state), (_, expected) in zip(
        rounds(personal, 3, logs), rounds(local, 3), strict=True
    ):
        assert torch.equal(
            personal.method.personal(personal.federation, state, np.arange(4)),
            expected.rows,
        )
    assert traffic(logs) == (0, 0, 0)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("method", PARTS)
def test_either_part_may_be_empty(method: str, deterministic: bool) -> None:
    for layers in (0, 2):
        s = assembled(
            method=method,
            head_layers=layers,
            epochs=1,
            batch_size=60,
            deterministic=deterministic,
        )
        *_, (_, state) = rounds(s, 1)
        assert np.isfinite(evaluate(s, state).accuracy)
    torch.set_deterministic_debug_mode("default")


@pytest.mark.parametrize(
    ("method", "columns"),
    [
        ("fedper", BODY),
        ("fedrep", BODY),
        ("lg-fedavg", HEAD),
        ("fedbabu", BODY),
        ("pfedhn", WHOLE),
    ],
)
def test_bytes_are_those_of_the_shared_columns(method: str, columns: int) -> None:
    s = assembled(method=method, clients=10, participation=0.3)
    logs = list[RoundLog]()
    *_, (_, state) = rounds(s, 1, logs)
    assert logs[0].bytes_up == logs[0].bytes_down == 3 * columns * 8
    s.method.personal(s.federation, state, np.arange(10))
    assert logs[0].bytes_up == 3 * columns * 8, (
        "what a client does for itself sends nothing"
    )


@pytest.mark.parametrize("method", PARTS)
def test_a_new_client_has_the_servers_columns_and_the_initial_rest(method: str) -> None:
    s = assembled(method=method)
    *_, (_, state) = rounds(s, 2)
    two = s.federation.everyone(2).only(np.arange(2))[1]
    rows = s.method.welcome(s.federation, state, two)
    first = s.federation.initial_row()
    shared = slice(BODY, WHOLE) if method == "lg-fedavg" else slice(0, BODY)
    expected = first.clone()
    expected[shared] = state.shared
    assert torch.equal(rows, expected.expand(2, -1)) and not torch.equal(
        expected[shared], first[shared]
    )


def test_the_catalogue_counts_layers_as_the_networks_have_them() -> None:
    for name, info in MODELS.items():
        network = build(name, shape=shape_of(name), classes=10, seed=0)
        layout = Layout.of(network)
        assert layout.mask(layout.last(info.layers)).all(), name
        assert not layout.mask(layout.last(info.layers - 1)).all(), name
        assert layout.last(1) == (layout.head,) and layout.last(0) == ()
        assert info.named in ((), tuple(block[0] for block in layout.blocks)), name
        batch_norms = [m for m in network.modules() if isinstance(m, nn.BatchNorm2d)]
        assert info.norm == bool(batch_norms), name
    resnet = Layout.of(build("resnet18", shape=(3, 16, 16), classes=10, seed=0))
    assert resnet.last(2) == ("layer4.1.conv2", "layer4.1.bn2", "fc"), (
        "batch norm goes with its convolution"
    )


@pytest.mark.parametrize("method", PARTS)
def test_more_head_layers_than_layers_is_one_line(
    method: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["run", "--method", method, "--head-layers"]
    assert "--head-layers 5, but cnn-digits has 4 layers with weights" in mistake(
        capsys, *words, 5
    )
    assert "--head-layers 3, but mlp has 2" in mistake(
        capsys, *words, 3, "--model", "mlp"
    )
    assert "must be greater than or equal to 0" in mistake(
        capsys, *words[:-1], "--head-layers=-1"
    )
    assert list(tmp_path.iterdir()) == []


class NaiveHypernetwork(nn.Module):
    """The hypernetwork as the paper draws it: embeddings, an MLP, and a linear head for
    every tensor of the clients' network.
    """

    def __init__(
        self,
        phi: Tensor,
        *,
        clients: int,
        embedding: int,
        hidden: int,
        layers: int,
        target: Weights,
    ) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(clients, embedding)
        mlp: list[nn.Module] = [nn.Linear(embedding, hidden)]
        for _ in range(layers):
            mlp += [nn.ReLU(), nn.Linear(hidden, hidden)]
        self.mlp = nn.Sequential(*mlp)
        self.shapes = {name: tensor.shape for name, tensor in target.items()}
        self.heads = nn.ModuleList(
            nn.Linear(hidden, tensor.numel()) for tensor in target.values()
        )
        self.double()
        tensors = self.in_order()
        for tensor, values in zip(
            tensors, phi.split([tensor.numel() for tensor in tensors]), strict=True
        ):
            tensor.data = values.view_as(tensor).clone()

    def in_order(self) -> list[Tensor]:
        """As φ holds them: the heads' weights side by side, then their biases."""
        weights, biases = (
            [getattr(head, kind) for head in self.heads] for kind in ("weight", "bias")
        )
        return [self.embeddings.weight, *self.mlp.parameters(), *weights, *biases]

    def forward(self, client: int) -> Weights:
        return self.generate(self.embeddings(torch.tensor(client)))

    def generate(self, embedding: Tensor) -> Weights:
        features = self.mlp(embedding)
        outputs = (head(features) for head in self.heads)
        return {
            name: out.view(shape)
            for (name, shape), out in zip(self.shapes.items(), outputs, strict=True)
        }

    def phi(self) -> Tensor:
        return torch.cat([tensor.detach().flatten() for tensor in self.in_order()])


HYPER = {
    "method": "pfedhn",
    "hn_hidden": 7,
    "hn_layers": 2,
    "inner_steps": 5,
    "inner_batch": 16,
}


def hypernetwork(s: Setup, phi: Tensor) -> NaiveHypernetwork:
    o: Any = s.settings.options
    return NaiveHypernetwork(
        phi,
        clients=4,
        embedding=o.hn_embedding or 2,
        hidden=o.hn_hidden,
        layers=o.hn_layers,
        target=initial(s),
    )


def inner(s: Setup) -> Recipe:
    o: Any = s.settings.options
    return Recipe(
        0,
        o.inner_batch,
        o.inner_lr,
        o.inner_momentum,
        o.inner_decay,
        o.inner_clip,
        steps=o.inner_steps,
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"hn_combine": "mean", "participation": 0.5},
        {
            "hn_clip": 1e-3,
            "inner_clip": 0.05,
            "hn_embedding": 3,
            "hn_decay": 0.5,
            "hn_lr": 0.1,
        },
        {
            "hn_layers": 0,
            "hn_momentum": 0.0,
            "inner_momentum": 0.0,
            "inner_decay": 0.1,
            "inner_lr": 0.05,
        },
    ],
    ids=["defaults", "mean", "clipped", "shallow"],
)
def test_pfedhn_is_autograd_through_the_hypernetwork(options: dict[str, Any]) -> None:
    s = assembled(**HYPER | options)
    o: Any = s.settings.options
    net = hypernetwork(s, s.method.init(s.federation).phi)
    parameters = net.in_order()
    optimiser = torch.optim.SGD(
        parameters, lr=o.hn_lr, momentum=o.hn_momentum, weight_decay=o.hn_decay
    )
    for round, state in rounds(s, 3):
        optimiser.zero_grad()
        cohort = s.federation.sample(round).clients
        for client in cohort:
            theta = net(client)
            after = trained(
                s,
                {n: t.detach() for n, t in theta.items()},
                client,
                "training",
                round,
                inner(s),
            )
            delta = [theta[name].detach() - after[name] for name in theta]
            torch.autograd.backward(list(theta.values()), delta)
        if o.hn_combine == "mean":
            for parameter in parameters:
                parameter.grad /= len(cohort)
        if o.hn_clip:
            nn.utils.clip_grad_norm_(parameters, o.hn_clip)
        optimiser.step()
        torch.testing.assert_close(state.phi, net.phi(), rtol=1e-9, atol=1e-12)
        rows = s.method.personal(s.federation, state, np.arange(4))
        close(
            rows,
            [
                {name: tensor.detach() for name, tensor in net(client).items()}
                for client in range(4)
            ],
        )


@pytest.mark.parametrize("inner_of", ["own", "common"])
def test_pfedhn_in_turns_is_a_loop_over_clients(inner_of: str) -> None:
    """Every client starts from the φ that the one before has left; trained by the
    authors' steps, or by the run's own epochs.
    """
    more: dict[str, Any] = HYPER
    if inner_of == "common":
        more = {name: HYPER[name] for name in ("method", "hn_hidden", "hn_layers")}
        more |= {"inner": "common", "epochs": 2, "batch_size": 50, "momentum": 0.5}
    s = assembled(**more, hn_combine="turns", participation=0.75)
    o: Any = s.settings.options
    net = hypernetwork(s, s.method.init(s.federation).phi)
    parameters = net.in_order()
    optimiser = torch.optim.SGD(
        parameters, lr=o.hn_lr, momentum=o.hn_momentum, weight_decay=o.hn_decay
    )
    logs: list[RoundLog] = []
    for round, state in rounds(s, 2, logs):
        sgd = inner(s) if inner_of == "own" else usual(s, round, 2)
        norms = []
        for client in s.federation.sample(round).clients:
            optimiser.zero_grad()
            theta = net(client)
            first = {name: tensor.detach() for name, tensor in theta.items()}
            after = trained(s, first, client, "training", round, sgd)
            delta = [first[name] - after[name] for name in theta]
            norms.append(torch.cat([part.flatten() for part in delta]).norm())
            torch.autograd.backward(list(theta.values()), delta)
            nn.utils.clip_grad_norm_(parameters, o.hn_clip)
            optimiser.step()
        torch.testing.assert_close(state.phi, net.phi(), rtol=1e-9, atol=1e-12)
        found = logs[round].update_norms
        assert found is not None
        torch.testing.assert_close(found, torch.stack(norms))
    assert logs[0].bytes_up == logs[0].bytes_down == 3 * WHOLE * 8


@pytest.mark.parametrize("method", ["fedper", "fedrep"])
def test_clients_are_judged_before_and_after_one_more_training(method: str) -> None:
    s = assembled(method=method, judge_finetuned=True, epochs=1)
    fed, everyone = s.federation, np.arange(4)
    *_, (_, state) = rounds(s, 2)
    finals = dict(s.method.finals(fed, state, everyone))
    before, after = s.method.FINALS
    assert list(finals) == [before, after]
    assert torch.equal(finals[before], s.method.personal(fed, state, everyone))
    body, head = _partial.body_and_head(fed)
    phases = [(None, 0)] if method == "fedper" else [(head, 0), (body, 1)]
    rows = finals[before]
    for columns, phase in phases:
        rows = fed.finetune(rows, everyone, epochs=1, columns=columns, phase=phase)
    assert torch.equal(finals[after], rows) and not torch.equal(rows, finals[before])
    plain = assembled(method=method)
    assert not dict(plain.method.finals(plain.federation, state, everyone))


def test_one_plain_step_of_rate_eta_gives_eta_times_the_gradient_of_the_loss() -> None:
    """Autograd through everything at once: embedding, hypernetwork, network, loss over
    all the client's data.
    """
    eta = 0.03
    plain = dict.fromkeys(
        (
            "hn_momentum",
            "hn_decay",
            "hn_clip",
            "inner_momentum",
            "inner_decay",
            "inner_clip",
        ),
        0.0,
    )
    s = assembled(
        **HYPER
        | plain
        | {"inner_steps": 1, "inner_batch": 10_000, "inner_lr": eta, "hn_lr": 1.0}
    )
    before = s.method.init(s.federation).phi
    net, target, shard = (
        hypernetwork(s, before),
        build("mlp", shape=(1, 8, 8), classes=10, seed=0),
        s.federation.training.train_data,
    )
    loss = torch.zeros((), dtype=torch.float64)
    for client, size in enumerate(shard.sizes):
        own = shard.index[client, :size]
        logits = torch.func.functional_call(target, net(client), (shard.inputs[own],))
        loss = loss + F.cross_entropy(logits, shard.targets[own])
    loss.backward()
    expected = torch.cat([tensor.grad.flatten() for tensor in net.in_order()])
    *_, (_, state) = rounds(s, 1)
    assert float(expected.norm()) > 0.1
    torch.testing.assert_close(
        before - state.phi, eta * expected, rtol=1e-9, atol=1e-12
    )


def test_pfedhn_has_the_authors_numbers() -> None:
    s = assembled(method="pfedhn", clients=11)
    state, o = s.method.init(s.federation), methods.load("pfedhn").Options()
    embedding, hidden = int(1 + 11 / 4), 100
    linear = [(embedding, hidden), *[(hidden, hidden)] * 3, (hidden, WHOLE)]
    assert len(state.phi) == 11 * embedding + sum(
        inputs * outputs + outputs for inputs, outputs in linear
    )
    assert o.model_dump() == {
        "hn_hidden": 100, "hn_layers": 3, "hn_embedding": None, "hn_lr": 1e-2, "hn_momentum": 0.9, "hn_decay": 1e-3,
        "hn_clip": 50, "hn_combine": "sum", "inner": "own", "inner_steps": 50, "inner_batch": 64, "inner_lr": 5e-3,
        "inner_momentum": 0.9, "inner_decay": 5e-5, "inner_clip": 50, "welcome_rounds": 20,
    }  # fmt: skip
    again, other = (
        assembled(method="pfedhn", clients=11, seed=seed) for seed in (0, 1)
    )
    assert torch.equal(again.method.init(again.federation).phi, state.phi)
    assert not torch.equal(other.method.init(other.federation).phi, state.phi)
    first = state.phi[-WHOLE * 101 :]
    assert (
        0.0999 < float(first.abs().max()) <= 0.1
        and abs(float(state.phi[:22].std()) - 1) < 0.5
    )


def test_pfedhn_does_not_end_with_a_hypernetwork_that_has_diverged() -> None:
    """Also not in the last round, after which no client would complain of it."""
    s = assembled(**HYPER, clients=4, rounds=1, hn_lr=1e30, precision="fp32")
    state = s.method.round(
        s.federation, s.method.init(s.federation), s.federation.sample(0)
    )
    with pytest.raises(
        ArithmeticError,
        match=r"hypernetwork has diverged.*in round 1; try --hn-lr below 1e\+30$",
    ):
        evaluate(s, state)


def test_pfedhn_generates_no_running_statistics() -> None:
    """They are the cohort's mean, in which clients weigh as in φ's gradient, the same
    for every client; the rest of the row is generated.
    """
    small = {
        "hn_hidden": 1,
        "hn_layers": 0,
        "inner_steps": 1,
        "inner_batch": 2,
        "clients": 3,
        "precision": "fp32",
    }
    s = assembled(**HYPER | small | {"model": "resnet18", "engine": "loop"})
    fed, statistics = s.federation, slice(s.federation.layout.num_parameters, None)
    state, trained_rows = s.method.init(fed), []
    assert torch.equal(
        s.method.personal(fed, state, np.arange(1))[0, statistics],
        fed.initial_row()[statistics],
    )

    def listening(here: np.ndarray, rows: Tensor) -> None:
        trained_rows.append(rows[:, statistics].clone())

    state = s.method.round(fed, state, fed.sample(0, listening))
    expected = trained_rows[0].mean(0)
    torch.testing.assert_close(state.statistics, expected)
    assert not torch.equal(expected, fed.initial_row()[statistics])
    assert torch.equal(
        s.method.personal(fed, state, np.arange(3))[:, statistics],
        state.statistics.expand(3, -1),
    )


def test_pfedhn_trains_a_new_clients_embedding_and_nothing_else() -> None:
    s = assembled(**HYPER | {"welcome_rounds": 3, "hn_clip": 0.01})
    fed, (*_, (round, state)) = s.federation, rounds(s, 2)
    before, net = copy.deepcopy(state), hypernetwork(s, state.phi)
    drawn = torch.from_numpy(fed.generator("new embeddings").standard_normal((4, 2)))
    expected = []
    for client in (1, 3):
        embedding = drawn[client].clone().requires_grad_()
        optimiser = torch.optim.SGD(
            [embedding], lr=1e-2, momentum=0.9, weight_decay=1e-3
        )
        for number in range(3):
            theta = net.generate(embedding)
            purpose = f"fine-tuning, phase {number}" if number else "fine-tuning"
            after = trained(
                s,
                {n: t.detach() for n, t in theta.items()},
                client,
                purpose,
                round,
                inner(s),
            )
            optimiser.zero_grad()
            delta = [theta[name].detach() - after[name] for name in theta]
            torch.autograd.backward(list(theta.values()), delta, inputs=[embedding])
            nn.utils.clip_grad_norm_([embedding], 0.01)
            optimiser.step()
        expected.append(
            {name: tensor.detach() for name, tensor in net.generate(embedding).items()}
        )
    cohort = fed.everyone(round).only(np.array([1, 3]))[1]
    close(s.method.welcome(fed, state, cohort), expected)
    assert all(
        torch.equal(a, b)
        for a, b in zip(vars(state).values(), vars(before).values(), strict=True)
    )


@pytest.mark.parametrize(
    "words", [["fedrep"], ["pfedhn", "--inner-steps", 6, "--hn-hidden", 8]]
)
def test_seeds_at_once_are_the_same_runs(words: list[object], tmp_path: Path) -> None:
    words = ["--method", *words, "--model", "mlp", *UNEVEN]
    together = started(*words, "--seeds", "4,1", "--out", tmp_path / "together")
    for seed in (1, 4):
        alone = started(*words, "--seed", seed, "--out", tmp_path / f"alone-{seed}")
        assert_same_run(together / f"seed-{seed}", alone, tolerance=1e-12)


ON_TWO_RANKS: dict[str, list[object]] = {
    "fedrep": [],
    "pfedhn": [
        *("--inner-steps", 4, "--hn-hidden", 8, "--placement", "steps"),
        *("--participation", 0.15, "--hn-combine", "turns"),
    ],
}
"""One whose clients, and what they own, move between ranks, and one in which there are
rounds without clients on a rank.
"""


def options_on_two_ranks(method: str) -> list[object]:
    # Both methods have --epochs of their own.
    words = [*TWELVE_CLIENTS[:-2], "--method", method, *ON_TWO_RANKS[method]]
    return [*words, "--precision", "fp64"]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, mpirun: Callable) -> Path:
    """The folder of the runs of one job, whose last rank is slow."""
    folder = tmp_path_factory.mktemp("two")
    words: list[object] = []
    for method in ON_TWO_RANKS:
        words += ["+", "run", *options_on_two_ranks(method), "--out", folder / method]
    program = Path(__file__).with_name("slow_rank.py")
    result = mpirun(2, program, *words[1:], SLOW="4", ROWS="1")
    assert result.returncode == 0, result.stderr
    return folder


@pytest.mark.parametrize("method", ON_TWO_RANKS)
def test_two_ranks_are_as_one(
    method: str, two_ranks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run_alone(options_on_two_ranks(method), tmp_path / "one", monkeypatch)
    rows = rows_of(two_ranks / f"{method}-rows")
    np.testing.assert_allclose(rows, expected, rtol=1e-10, atol=1e-12)
    two, one = read_run(two_ranks / method), read_run(tmp_path / "one")
    assert bool(two.moves) == (method == "fedrep")
    for name in ("bytes_up", "bytes_down", "cohort"):
        np.testing.assert_array_equal(two.rounds[name], one.rounds[name])
    np.testing.assert_allclose(
        two.rounds["train_loss"], one.rounds["train_loss"], rtol=1e-10
    )
    np.testing.assert_array_equal(two.client_accuracy, one.client_accuracy)
