"""Metrics that --metrics asks for: their formulas, and that they are recorded, shown and
reported like accuracy; and evaluation of a sample of clients.
"""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from sklearn.metrics import (
    f1_score,
    mean_absolute_error,
    mean_squared_error,
    r2_score,
    recall_score,
    top_k_accuracy_score,
)
from torch import Tensor
from torch.nn.utils import vector_to_parameters

from hpcfed import cli
from hpcfed.clients.job import Score
from hpcfed.clients.objective import (
    OBJECTIVES,
    Sums,
    class_accuracy,
    metric,
    wanted_sums,
)
from hpcfed.experiment.assemble import Setup
from hpcfed.experiment.evaluate import AfterTraining, evaluate
from hpcfed.experiment.progress import evaluation_text
from hpcfed.federation.aggregation import (
    NOT_FINITE,
    best_finite,
    right_answers_or_loss,
)
from hpcfed.models.networks import build
from hpcfed.options.metrics import METRICS, chosen, metric_of
from hpcfed.results.stored import read_run
from tests.federations import assembled, trained_alone
from tests.runs import mistake, started


def sums_of(task: str, outputs: Tensor, targets: Tensor, metrics: list[str]) -> Sums:
    """The sums of one client that has all the data."""
    wanted = wanted_sums(metrics, outputs.shape[-1])
    figures = OBJECTIVES[task].figures(outputs, targets, wanted)
    sums = {name: values.sum(0, keepdim=True) for name, values in figures.items()}
    sums.setdefault("count", torch.tensor([len(targets)]))
    return sums


def test_metrics_of_answers_are_scikit_learns() -> None:
    torch.manual_seed(0)
    outputs, targets = torch.randn(40, 9).double(), torch.randint(8, (40,))
    outputs[:, 7] -= 9  # a class that nobody is taken for
    targets[targets == 3] = 4  # and one that does not occur
    outputs[:, 8] -= 9  # and one that neither is nor seems
    sums = sums_of("classification", outputs, targets, ["top5", "f1", "per-class"])
    answers = outputs.argmax(1)
    expected = {
        "f1": f1_score(targets, answers, average="macro"),
        "accuracy": (answers == targets).double().mean(),
        "top5": top_k_accuracy_score(targets, outputs, k=5, labels=np.arange(9)),
        "loss": torch.nn.functional.cross_entropy(outputs, targets),
    }
    for name, value in expected.items():
        assert float(metric(name, sums)) == pytest.approx(float(value), rel=1e-12), name
    found = class_accuracy(sums)[0]
    recalls = recall_score(
        targets, answers, average=None, labels=np.arange(9), zero_division=np.nan
    )
    np.testing.assert_allclose(found, recalls)
    assert np.isnan(recalls[[3, 8]]).all() and recalls[7] == 0


def test_metrics_of_numbers_are_scikit_learns() -> None:
    torch.manual_seed(0)
    targets = 1000 + torch.randn(30, 3).double()
    outputs = targets + 0.3 * torch.randn(30, 3)
    sums = sums_of("regression", outputs, targets, ["mae", "r2"])
    assert float(metric("r2", sums)) == pytest.approx(r2_score(targets, outputs))
    mae = mean_absolute_error(targets, outputs)
    assert float(metric("mae", sums)) == pytest.approx(mae)
    mse = mean_squared_error(targets, outputs)
    assert float(metric("loss", sums)) == pytest.approx(mse)
    # An output that is always the same explains nothing, and is left out.
    targets[:, 1] = 0.1
    sums = sums_of("regression", outputs, targets, ["r2"])
    others = r2_score(targets[:, ::2], outputs[:, ::2])
    assert float(metric("r2", sums)) == pytest.approx(others)
    targets[:] = 0.1
    assert metric("r2", sums_of("regression", outputs, targets, ["r2"])).isnan()


def test_perplexity_is_that_of_a_token() -> None:
    """A model that knows nothing is as perplexed as its vocabulary is large, whatever is
    padded.
    """
    targets = torch.tensor([[1, 2, -100], [0, -100, -100]])
    sums = sums_of("next-token", torch.zeros(2, 3, 11), targets, [])
    assert float(metric("perplexity", sums)) == pytest.approx(11)
    assert float(metric("accuracy", sums)) == pytest.approx(1 / 3)


def test_tasks_have_their_usual_metrics() -> None:
    assert chosen(None, "classification") == ("accuracy",)
    assert chosen(None, "next-token") == ("accuracy", "perplexity")
    assert chosen(None, "regression") == ("loss", "r2")
    assert chosen(("f1",), "classification") == ("accuracy", "f1")
    assert chosen(("mae",), "regression") == ("mae",)


EVERY = "accuracy,loss,top5,f1,per-class"


def test_an_evaluation_has_all_metrics_of_clients_and_of_the_global_model() -> None:
    s = assembled(clients=30, alpha=0.02, metrics=EVERY)
    state = s.method.init(s.federation)
    found = evaluate(s, state)
    plain = assembled(clients=30, alpha=0.02)
    usual = evaluate(plain, plain.method.init(plain.federation))
    assert found.accuracy == usual.accuracy
    assert found.global_loss == usual.global_loss
    np.testing.assert_array_equal(found.client_accuracy, usual.client_accuracy)
    assert not usual.metrics and not usual.client_metrics
    # Dirichlet spreads the test set completely and all have the same model: what is
    # pooled over clients is the global model's.
    assert found.metrics["f1"] == pytest.approx(found.metrics["global_f1"])
    by_class = found.class_accuracy
    np.testing.assert_allclose(by_class["accuracy"], by_class["global_accuracy"])
    tested = s.clients.test_samples > 0
    assert not tested.all()
    for name in ("loss", "top5"):
        own = found.client_metrics[name]
        assert np.isnan(own[~tested]).all()
        assert found.metrics[name] == pytest.approx(own[tested].mean())
        whole = np.nansum(own * s.clients.test_samples) / s.global_test_size
        named = found.metrics.get(f"global_{name}", found.global_loss)
        assert named == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("method", ["fedavg", "local"])
def test_a_sample_of_clients_is_judged_as_all_of_them_are(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients with test data are drawn, once for all rounds; only they travel."""
    values: dict[str, Any] = {"method": method, "clients": 30, "alpha": 0.02}
    everyone = assembled(**values)
    s = assembled(**values, evaluate_clients=5)
    state = s.method.init(s.federation)
    sent = []
    original = s.collectives.allreduce

    def noting(tensor: Tensor) -> Tensor:
        sent.append(tensor.numel())
        return original(tensor)

    monkeypatch.setattr(s.collectives, "allreduce", noting)
    found = evaluate(s, state)
    # What each client reaches and whether its loss is finite; the global model's sums.
    assert sent == [5 + 5 + 2]
    whole = evaluate(everyone, everyone.method.init(everyone.federation))
    assert len(set(s.evaluated)) == 5
    assert (s.clients.test_samples[s.evaluated] > 0).all()
    expected = whole.client_accuracy[s.evaluated]
    np.testing.assert_array_equal(found.client_accuracy, expected)
    assert found.accuracy == pytest.approx(expected.mean())
    np.testing.assert_equal(found.global_accuracy, whole.global_accuracy)
    again = assembled(**values, evaluate_clients=5, lr=0.5)
    assert s.evaluated.tolist() == again.evaluated.tolist()
    assert len(assembled(**values, evaluate_clients=30).evaluated) < 30


def right_answers(s: Setup, row: Tensor, client: int) -> float:
    """The share of right answers of one network on one client's test data."""
    shard = s.federation.training.test_data
    network = build("mlp", shape=(1, 8, 8), classes=10, seed=0).double()
    vector_to_parameters(row, network.parameters())
    samples = shard.index[client, : shard.sizes[client]]
    answers = network(shard.inputs[samples]).argmax(1)
    return float((answers == shard.targets[samples]).double().mean())


def test_participants_are_judged_as_training_leaves_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    s = assembled(clients=12, alpha=0.1, participation=0.5)
    fed, state = s.federation, s.method.init(s.federation)
    trained = AfterTraining(s, fed)
    assert np.isnan(trained.accuracy()).all(), "nobody has handed over a row yet"

    def take(here: np.ndarray, rows: Tensor) -> None:
        # The last row of each counts, as it is now; they come in two parts.
        trained(here, rows[:1].expand(len(here), -1))
        kept = rows.clone()
        trained(here[:2], kept[:2])
        trained(here[2:], kept[2:])
        kept.zero_()

    cohort = fed.sample(0, take)
    expected = np.full(12, np.nan)
    for client in cohort.clients:
        expected[client] = right_answers(
            s, trained_alone(s, state.w, client, 0), client
        )
    state = s.method.round(fed, state, cohort)
    np.testing.assert_array_equal(trained.accuracy(), expected)
    found, usual = evaluate(s, state, trained), evaluate(s, state)
    assert found.trained_accuracy == pytest.approx(np.nanmean(expected), rel=1e-15)
    assert found.accuracy == usual.accuracy and np.isnan(usual.trained_accuracy)
    # Two ranks, each with some of the clients, add up to the same.
    row = fed.initial_row()
    parts = [np.array([0, 5]), np.array([3])]
    ranks = [AfterTraining(s, fed) for _ in parts]
    for rank, here in zip(ranks, parts, strict=True):
        rank(here, row.expand(len(here), -1))
    sent: list[Tensor] = []
    monkeypatch.setattr(
        s.collectives, "allreduce", lambda sums: sent.append(sums) or sums
    )
    ranks[1].accuracy()
    monkeypatch.setattr(s.collectives, "allreduce", lambda sums: sums + sent[0])
    both = ranks[0].accuracy()
    assert np.flatnonzero(~np.isnan(both)).tolist() == [0, 3, 5]
    assert both[3] == right_answers(s, row, 3)


def test_a_cohort_without_data_has_trained_nothing() -> None:
    s = assembled()
    s.federation.members.sizes = np.zeros(4, np.int64)
    trained = AfterTraining(s, s.federation)
    trained(np.arange(4), s.federation.initial_row().repeat(4, 1))
    assert np.isnan(trained.accuracy()).all()
    assert trained.totals().tolist() == [0, 0]


SMALL = [
    "--clients",
    "6",
    "--rounds",
    "2",
    "--epochs",
    "1",
    "--model",
    "mlp",
    "--device",
    "cpu",
    "--alpha",
    "0.1",
]


def test_metrics_are_recorded_shown_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SMALL, "--metrics", EVERY, "--evaluate-clients", "3"]
    cli.main(["run", *words, "--out", str(tmp_path / "run")])
    cli.main(["run", *SMALL, "--out", str(tmp_path / "plain")])
    run, plain = read_run(tmp_path / "run"), read_run(tmp_path / "plain")
    assert run.metrics == ["loss", "top5", "f1"] and not plain.metrics
    np.testing.assert_array_equal(
        run.rounds["global_accuracy"], plain.rounds["global_accuracy"]
    )
    # All participants are judged after training, whoever is judged besides.
    np.testing.assert_array_equal(
        run.rounds["trained_accuracy"], plain.rounds["trained_accuracy"]
    )
    assert (run.rounds["trained_accuracy"] > 0).all()
    assert plain.rounds.keys() < run.rounds.keys()
    assert run.client_accuracy.shape == run.client_metrics["top5"].shape == (2, 3)
    assert run.class_accuracy["accuracy"].shape == (2, 10)
    judged = ~np.isnan(run.last_client_accuracy)
    assert np.flatnonzero(judged).tolist() == run.evaluated.tolist()
    assert run.best("loss") == run.rounds["loss"].min()
    with h5py.File(tmp_path / "plain" / "run.h5") as file:
        assert "classes" not in file and "evaluated" not in file["clients"]
        assert "top5" not in file["rounds"] and "task" not in file.attrs
    with h5py.File(tmp_path / "run" / "run.h5") as file:
        assert "top5" in file["clients"] and file["rounds/f1"].attrs["description"]
    capsys.readouterr()
    cli.main(["show", str(tmp_path / "run")])
    shown = capsys.readouterr().out
    assert f"{run.last('global_top5'):.2%}" in shown and "sample of 3 clients" in shown
    assert f"{run.last('trained_accuracy'):.2%}" in shown
    assert "macro F1: global model" in shown and "accuracy of class" in shown
    cli.main(["show", "--json", str(tmp_path / "run")])
    told = json.loads(capsys.readouterr().out)
    assert told["f1"] == run.rounds["f1"].tolist()
    assert told["trained_accuracy"] == run.rounds["trained_accuracy"].tolist()
    assert told["best_global_top5"] == run.best("global_top5")
    assert len(told["class_accuracy"]["global_accuracy"]) == 10
    page, table = tmp_path / "page.html", tmp_path / "table.csv"
    # Named apart they would be compared, and what they are judged by is a change.
    cli.main(["report", str(tmp_path), "--out", str(page), "--csv", str(table)])
    rows = list(csv.DictReader(table.read_text().splitlines()))
    values = {float(row["top5"]) for row in rows if row["top5"] != "nan"}
    assert values == set(run.rounds["top5"]) and len(rows) == 4
    assert float(rows[0]["trained_accuracy"]) in run.rounds["trained_accuracy"]
    drawn = page.read_text()
    assert "participants, after training" in drawn
    assert "top-5 accuracy, global model, all test data" in drawn
    assert "metrics [" not in drawn, "what a run is judged by sets nothing apart"


def test_seeds_at_once_have_their_own_metrics(tmp_path: Path) -> None:
    words = [*SMALL, "--precision", "fp64", "--metrics", EVERY]
    started(*words, "--seeds", "0,3", "--out", tmp_path / "both")
    started(*words, "--seed", "3", "--out", tmp_path / "one")
    together = read_run(tmp_path / "both" / "seed-3")
    alone = read_run(tmp_path / "one")
    for name in (*alone.metrics, *(f"global_{name}" for name in alone.metrics)):
        np.testing.assert_allclose(
            together.rounds[name], alone.rounds[name], rtol=1e-10, err_msg=name
        )
    for name, values in alone.class_accuracy.items():
        np.testing.assert_array_equal(together.class_accuracy[name], values)


def test_ranks_add_up_to_the_same_metrics(
    mpirun: Callable[..., Any], tmp_path: Path
) -> None:
    words = [*SMALL, "--precision", "fp64", "--metrics", EVERY]
    words += ["--evaluate-clients", "4"]
    started(*words, "--out", tmp_path / "one")
    ended = mpirun(2, "-m", "hpcfed", "run", *words, "--out", str(tmp_path / "two"))
    assert ended.returncode == 0, ended.stderr
    one, two = read_run(tmp_path / "one"), read_run(tmp_path / "two")
    np.testing.assert_array_equal(one.evaluated, two.evaluated)
    np.testing.assert_array_equal(one.client_accuracy, two.client_accuracy)
    for name, values in one.rounds.items():
        if metric_of(name) in METRICS:
            np.testing.assert_allclose(
                two.rounds[name], values, rtol=1e-10, err_msg=name
            )
    for name, values in one.class_accuracy.items():
        np.testing.assert_array_equal(two.class_accuracy[name], values)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "--metrics perplexity",
            "--metrics perplexity does not fit digits, which is for classification",
        ),
        ("--metrics r2", "use accuracy, loss, top5, f1, per-class"),
        ("--metrics accurate", "--metrics accurate: must be of accuracy, loss, top5"),
        ("--metrics f1,f1", "must name every metric once"),
        ("--metrics=", "must be of accuracy"),
        ("--evaluate-clients 30", "--evaluate-clients 30, but there are 20 clients"),
        ("--evaluate-clients=-1", "--evaluate-clients -1: must be"),
        ("--metric f1", "did you mean '--metrics'"),
        (
            "--dataset synthetic --synthetic-classes 5 --metrics top5",
            "--metrics top5 is always 100 % with 5 classes",
        ),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    words: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in mistake(capsys, "run", *words.split())


def test_the_progress_line_has_the_tasks_main_metric() -> None:
    nan = float("nan")
    base = {"train_loss": 1.5, "accuracy": nan, "global_accuracy": nan}
    assert evaluation_text({**base, "global_loss": nan}) == ""
    usual = {**base, "accuracy": 0.25, "global_accuracy": 0.5, "global_loss": 2.0}
    assert evaluation_text(usual) == "clients 25.00%  global 50.00%"
    text = {**usual, "perplexity": 9.25, "global_perplexity": 8.0}
    assert evaluation_text(text) == "perplexity  clients 9.25  global 8"
    numbers = {**base, "global_loss": 0.125, "loss": 0.25}
    assert evaluation_text(numbers) == "test loss  clients 0.25  global 0.125"


def test_a_server_without_right_answers_selects_by_loss() -> None:
    losses = torch.tensor([3.0, torch.nan, 1.0, torch.inf, 2.0])
    scores = right_answers_or_loss(Score({"loss": losses})).numpy()
    assert best_finite(scores, 2).tolist() == [2, 4]
    scores[2] = NOT_FINITE
    assert best_finite(scores, 5).tolist() == [0, 1, 3, 4], "a finite row may be bad"


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    """Four clients' samples with three features, and two numbers to predict."""
    generator = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {}
    for split, size in {"train": 60, "test": 30}.items():
        inputs = generator.normal(size=(size, 3)).astype(np.float32)
        arrays[f"{split}_inputs"] = inputs
        noise = 0.1 * generator.normal(size=(size, 2))
        arrays[f"{split}_targets"] = (inputs[:, :2] + noise).astype(np.float32)
        arrays[f"{split}_clients"] = np.arange(size) % 4
    np.savez(tmp_path / "numbers.npz", **arrays)
    (tmp_path / "net.py").write_text(NETWORKS)
    return tmp_path


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, word in enumerate(("apple", "orange", "plum")):
        (folder / f"{number}.txt").write_text(f"an {word} a day. " * (20 + number))
    (tmp_path / "net.py").write_text(NETWORKS)
    return tmp_path


NETWORKS = """
from torch import nn

def linear(shape, classes):
    return nn.Linear(shape[0], classes)

def bigram(classes):
    return nn.Embedding(classes, classes)
"""


def words_of(folder: Path, task: str) -> list[str]:
    words = ["--rounds", "2", "--device", "cpu", "--precision", "fp64", "--lr", "0.3"]
    if task == "regression":
        words += ["--dataset", f"file:{folder / 'numbers.npz'}"]
        return [*words, "--model", f"{folder / 'net.py'}:linear"]
    words += ["--dataset", f"text:{folder / 'texts'}", "--text-length", "8"]
    return [*words, "--model", f"{folder / 'net.py'}:bigram"]


def test_regression_is_judged_by_its_errors(
    numbers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*words_of(numbers, "regression"), "--metrics", "loss,mae,r2"]
    words += ["--snapshot-every", "1", "--out", str(numbers / "run")]
    cli.main(["run", *words])
    said = capsys.readouterr().err
    assert "test loss  clients" in said and "%" not in said.partition("round 1")[2]
    run = read_run(numbers / "run")
    with h5py.File(numbers / "run" / "params-0.h5") as file:
        row = file["global"][-1]
    data = np.load(numbers / "numbers.npz")
    inputs, targets = data["test_inputs"], data["test_targets"]
    # Features are standardised by the training set.
    train = data["train_inputs"].astype(np.float64)
    standard = (inputs - train.mean(0)) / train.std(0)
    outputs = standard @ row[:6].reshape(2, 3).T + row[6:]
    assert run.last("global_r2") == pytest.approx(r2_score(targets, outputs), rel=1e-5)
    error = mean_squared_error(targets, outputs)
    assert run.last("global_loss") == pytest.approx(error, rel=1e-5)
    own = []
    for client in range(4):
        here = data["test_clients"] == client
        own.append(mean_absolute_error(targets[here], outputs[here]))
    assert run.last("mae") == pytest.approx(np.mean(own), rel=1e-5)
    np.testing.assert_allclose(run.client_metrics["mae"][-1], own, rtol=1e-5)
    assert np.isnan(run.rounds["accuracy"]).all() and run.task == "regression"
    cli.main(["show", str(numbers / "run")])
    shown = capsys.readouterr().out
    assert "mean squared error: global model" in shown and "nan" not in shown
    cli.main(["report", str(numbers / "run"), "--out", str(numbers / "page.html")])
    page = (numbers / "page.html").read_text()
    assert "Mean squared error after 2 rounds: on their own test data" in page
    assert "R²: global model, all test data" in page


def test_texts_are_judged_by_their_perplexity(
    texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*words_of(texts, "next-token"), "--out", str(texts / "run")]
    cli.main(["run", *words])
    assert "perplexity  clients" in capsys.readouterr().err
    run = read_run(texts / "run")
    loss, perplexity = run.rounds["global_loss"], run.rounds["global_perplexity"]
    np.testing.assert_allclose(np.exp(loss), perplexity)
    assert perplexity[1] < perplexity[0] and 0 < run.last("accuracy") < 1
    assert run.metrics == ["perplexity"]
    assert run.client_metrics["perplexity"].shape == (2, 3)
    cli.main(["show", str(texts / "run")])
    assert "perplexity: clients, own test data" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--target-accuracy 80", "--target-accuracy: file:"),
        ("--metrics accuracy", "use loss, mae, r2"),
        ("--new-clients 2", "--new-clients are judged by their accuracy"),
        ("--method genefl", "use --lambda2 0"),
        (
            "--method clustered-fedavg --clustering angles",
            "--clustering angles are between classes",
        ),
    ],
)
def test_what_regression_lacks_is_one_line(
    words: str, told: str, numbers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = words_of(numbers, "regression")
    assert told in mistake(capsys, "run", *own, *words.split())


def test_tokens_have_no_basis(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = [*words_of(texts, "next-token"), "--method", "clustered-fedavg"]
    told = mistake(capsys, "run", *own)
    assert "and tokens have none; --clusters 1" in told
