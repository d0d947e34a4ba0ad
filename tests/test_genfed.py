"""Selection, FedUmf and FedAU against naive loops of their rules; the supplement; the
target accuracy.
"""

import io
import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from rich.console import Console

from hpcfed import methods
from hpcfed.analysis.render.show import show, show_seeds
from hpcfed.clients.job import Score
from hpcfed.data.partition import Partition, supplemented
from hpcfed.errors import UserError
from hpcfed.experiment.assemble import Setup
from hpcfed.experiment.evaluate import Evaluation
from hpcfed.experiment.progress import StackedProgress
from hpcfed.experiment.run import run_setup
from hpcfed.federation.aggregation import best, right_answers_or_loss
from hpcfed.federation.log import RoundLog
from hpcfed.methods import genfed
from hpcfed.models.networks import build
from hpcfed.options import RunConfig
from hpcfed.results.as_json import run_summary
from hpcfed.results.stored import read_run, read_seeds
from hpcfed.results.target import at_target
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
from tests.runs import UNEVEN, assert_same_run, mistake, started


def kept(
    schedule: str, times: list[int], *, uploads: int = 10, **options: Any
) -> list[int]:
    return [genfed.Options(schedule=schedule, **options).rho(t, uploads) for t in times]


def test_schedules_by_hand() -> None:
    """ρ_max 5: floors, both clamps, and where the branches meet."""
    c = {"schedule_rounds": 200}
    assert kept("constant", [0, 1, 10_000]) == [5, 5, 5]
    assert kept("power", [0, 1, 2, 3, 9999], schedule_base=0.5) == [1, 3, 4, 5, 5]
    assert kept("power", [1, 11, 12], schedule_base=0.98) == [1, 1, 2], (
        "5 (1 − 0.98^11) = 0.996, and 1.08 a round later"
    )
    assert kept("linear", [0, 39, 40, 79, 80, 159, 160, 200, 9999], **c) == [
        1,
        1,
        2,
        2,
        3,
        4,
        5,
        5,
        5,
    ]
    assert kept("sine", [0, 25, 26, 100, 118, 119, 200, 201, 9999], **c) == [
        1,
        1,
        2,
        4,
        4,
        5,
        5,
        5,
        5,
    ]
    assert kept(
        "arch", [0, 12, 13, 59, 60, 100, 140, 141, 187, 188, 199, 200, 9999], **c
    ) == ([1, 1, 2, 4, 5, 5, 5, 4, 2, 1, 1, 1, 1])
    assert kept("constant", [3], uploads=2) == [2] and kept(
        "constant", [3], uploads=2, rho_max=1
    ) == [1]
    assert kept("linear", [1, 2], uploads=3, schedule_rounds=1, rho_max=99) == [3, 3]


def test_the_best_are_kept_in_client_order_and_ties_go_to_the_first() -> None:
    scores = np.array([3.0, 7, 5, 7, 5, 5])
    expected = {1: [1], 2: [1, 3], 3: [1, 2, 3], 4: [1, 2, 3, 4], 6: [0, 1, 2, 3, 4, 5]}
    assert {count: best(scores, count).tolist() for count in expected} == expected


def test_the_smaller_loss_wins_ties_and_never_beats_a_right_answer() -> None:
    """Four answers of ten; the second and the last have an answer more."""
    sums = {
        "correct": torch.tensor([4, 5, 4, 4, 5]),
        "count": torch.full((5,), 10),
        "loss": torch.tensor([30.0, torch.inf, 20, torch.nan, 900]),
    }
    judged = right_answers_or_loss(Score(sums), ties_by_loss=True)
    assert judged.argsort(descending=True).tolist() == [4, 1, 2, 0, 3]
    assert judged[2] == 4 + 0.5 / 3, "a mean loss of 2"
    assert right_answers_or_loss(Score(sums)).tolist() == [4, 5, 4, 4, 5]


def test_selection_asks_for_the_loss_where_scores_are_equal() -> None:
    """Of copies with a larger scale all answers are equal, and so is the choice by id;
    the loss tells them apart.
    """
    s = assembled(method="genfed", clients=4, validation=50, participation=1.0)
    fed, cohort = s.federation, s.federation.sample(0)
    row = s.federation.train_alone(fed.initial_row(), 0, 0)
    rows = torch.stack([row, row.clone(), row.clone(), row.clone()])
    spans = dict(zip(["fc1", "head"], fed.layout.block_spans, strict=True))
    # A head twice as large gives the same answers, each with another loss.
    start, stop = spans["head"]
    for client, scale in enumerate((4, 2, 1, 8)):
        rows[client, start:stop] *= scale
    scores = fed.server_side.validated(rows, cohort)
    assert len(set(scores)) == 1
    by_loss = fed.server_side.validated(rows, cohort, ties_by_loss=True)
    assert (np.floor(by_loss) == scores).all() and len(set(by_loss)) == 4
    _, first = fed.select(rows, cohort, 1)
    _, best_loss = fed.select(rows, cohort, 1, ties_by_loss=True)
    assert first.clients.tolist() == [0]
    assert best_loss.clients.tolist() == [int(by_loss.argmax())]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("method", "plain"),
    [("genfed", "fedavg"), ("genfedumf", "fedumf"), ("genfedau", "fedau")],
)
def test_keeping_all_uploads_is_the_method_without_selection_bit_for_bit(
    method: str, plain: str, deterministic: bool
) -> None:
    common = {
        **HARSH,
        "validation": 50,
        "clients": 6,
        "precision": "fp32",
        "deterministic": deterministic,
    }
    one = assembled(method=method, schedule="constant", rho_max=3, **common)
    other = assembled(method=plain, **common)
    found, wanted = list[RoundLog](), list[RoundLog]()
    for (_, state), (_, expected) in zip(
        rounds(one, 3, found), rounds(other, 3, wanted), strict=True
    ):
        assert torch.equal(state.w, expected.w)
    assert traffic(found) == traffic(wanted) and all(traffic(found)[::2])
    torch.set_deterministic_debug_mode("default")


def accuracy(s: Setup, weights: Weights) -> float:
    """On the validation set, in plain torch."""
    network = build("mlp", shape=(1, 8, 8), classes=10, seed=0).double()
    network.load_state_dict(weights)
    data = s.federation.server_side.validation
    assert data is not None
    own = data.index[0, : data.sizes[0]]
    return float(
        (network(data.inputs[own]).argmax(1) == data.targets[own]).double().mean()
    )


def plus(a: Weights, b: Weights, factor: float) -> Weights:
    return {name: tensor + factor * b[name] for name, tensor in a.items()}


def naive_rounds(s: Setup, method: str, count: int) -> Iterator[Weights]:
    """The published rules, client by client, with lists of intervals and of updates."""
    fed, options = s.federation, s.settings.options
    w, clients = initial(s), range(len(fed.sizes))
    stale: dict[int, Weights] = {}
    intervals: dict[int, list[int]] = {i: [] for i in clients}
    since = dict.fromkeys(clients, 0)
    for round in range(count):
        cohort, sgd = (
            fed.sample(round).clients.tolist(),
            usual(s, round, s.settings.config.epochs),
        )
        rows = {}
        for i in cohort:
            start = plus(w, stale.pop(i), options.umf_beta) if i in stale else w
            rows[i] = trained(s, start, i, "training", round, sgd)
        if "umf" in method:
            for i in set(clients) - set(cohort):
                stale[i] = plus(trained(s, w, i, "fine-tuning", round, sgd), w, -1)
        chosen = cohort
        if method.startswith("gen"):
            chosen = sorted(cohort, key=lambda i: (-accuracy(s, rows[i]), i))[
                : options.rho(round, len(cohort))
            ]
        if "au" in method:
            step = {
                i: sum(intervals[i]) / len(intervals[i]) if intervals[i] else 1.0
                for i in chosen
            }
            factor = options.au_lr * len(cohort) / len(chosen) / len(clients)
            after = w
            for i in chosen:
                after = plus(after, plus(rows[i], w, -1), factor * step[i])
            w = after
            for i in clients:
                since[i] += 1
                if i in cohort or since[i] == options.au_cutoff:
                    intervals[i].append(since[i])
                    since[i] = 0
        else:
            total = fed.sizes[chosen].sum()
            w = {
                name: sum(fed.sizes[i] / total * rows[i][name] for i in chosen)
                for name in w
            }
        yield w


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("genfed", {"schedule": "power", "schedule_base": 0.5}),
        ("fedumf", {"umf_beta": 0.7}),
        ("genfedumf", {"schedule": "constant", "rho_max": 2}),
        ("fedau", {"au_cutoff": 3, "au_lr": 0.5}),
        ("genfedau", {"schedule": "constant", "rho_max": 2}),
    ],
)
def test_the_published_rule(method: str, options: dict[str, Any]) -> None:
    s = assembled(
        method=method,
        **HARSH | {"clients": 7, "alpha": 0.3, "validation": 50},
        **options,
    )
    for (_, state), expected in zip(
        rounds(s, 5), naive_rounds(s, method, 5), strict=True
    ):
        close(state.w[None], [expected])


@pytest.mark.parametrize("options", [{"umf_beta": 0.0}, {"participation": 1.0}])
def test_fedumf_without_kept_updates_is_fedavg_bit_for_bit(
    options: dict[str, Any],
) -> None:
    own = {name: value for name, value in options.items() if name == "umf_beta"}
    common = {
        **HARSH,
        "precision": "fp32",
        **{n: v for n, v in options.items() if n != "umf_beta"},
    }
    one, other = assembled(method="fedumf", **common, **own), assembled(**common)
    for (_, state), (_, expected) in zip(rounds(one, 3), rounds(other, 3), strict=True):
        assert torch.equal(state.w, expected.w)


def test_everyone_gets_the_row_that_fedumf_trains_from() -> None:
    for method, receivers in (("fedumf", 4), ("fedavg", 2)):
        s = assembled(method=method, participation=0.5)
        cohort = s.federation.sample(0)
        s.method.round(s.federation, s.method.init(s.federation), cohort)
        row = s.federation.initial_row()
        assert cohort.log.bytes_down == receivers * row.numel() * row.element_size()


def test_fedumf_trains_only_what_a_cohort_will_use() -> None:
    """A member that was not sampled in the round before trains for that one, too."""
    s = assembled(method="fedumf", **HARSH | {"clients": 7, "participation": 0.6})
    before, repeated, logs = set(range(7)), 0, list[RoundLog]()
    for round, _ in rounds(s, 6, logs):
        sampled = set(s.federation.sample(round).clients.tolist())
        again = sampled - before
        repeated += len(sampled & before) * (round > 0)
        samples = sum(s.federation.sizes[i] for i in [*sampled, *again])
        assert logs[-1].trained_samples == s.settings.config.epochs * samples
        before = sampled
    assert repeated, "nobody was sampled twice in a row"


def test_intervals_of_fedau_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three clients, cutoff 3: 0 is always there, 1 in rounds 1 and 2, 2 in the last
    alone.
    """
    s = assembled(method="fedau", clients=3, au_cutoff=3, participation=0.9)
    cohorts, fed, sample = (
        [[0], [0, 1], [0, 1], [0], [0, 2]],
        s.federation,
        s.federation.sample,
    )
    monkeypatch.setattr(
        fed, "sample", lambda round: sample(round).only(np.array(cohorts[round]))[1]
    )
    omegas = [state.omega.tolist() for _, state in rounds(s, 5)]
    assert omegas == [[1, 1, 1], [1, 2, 1], [1, 1.5, 3], [1, 1.5, 3], [1, 1.5, 2.5]]


def test_full_participation_leaves_the_weights_of_fedau_at_one() -> None:
    s = assembled(method="fedau", alpha=0.3)
    fed, w = s.federation, s.federation.initial_row()
    rows = fed.train(fed.download(w, fed.sample(0)), fed.sample(0))
    for round, state in rounds(s, 3):
        assert (state.omega == 1).all()
        if not round:
            torch.testing.assert_close(state.w, rows.mean(0), rtol=1e-12, atol=1e-14)


def test_a_poisoned_upload_with_the_worst_score_is_never_kept() -> None:
    for rho in (1, 2, 3):
        s = assembled(
            method="genfed",
            schedule="constant",
            rho_max=rho,
            attack="sign-flip",
            attackers=1,
            attack_strength=30.0,
        )
        fed, (bad,) = s.federation, s.dealt.attackers
        logs = list[RoundLog]()
        assert len(list(rounds(s, 4, logs))) == 4
        for log in logs:
            assert log.selected is not None
            assert bad not in log.selected and len(log.selected) == rho
        cohort = fed.sample(3)
        sent = fed.upload(
            fed.train(fed.download(fed.initial_row(), cohort), cohort), cohort
        )
        assert fed.server_side.validated(sent, cohort).argmin() == bad, (
            "the case needs an upload that is the worst"
        )
        rows, fewer = fed.select(sent, cohort, rho)
        assert torch.equal(rows, sent[torch.from_numpy(fewer.clients)])
        sizes = fed.sizes[fewer.clients]
        weights = torch.from_numpy(sizes / sizes.sum())
        torch.testing.assert_close(
            fed.mean(rows, fewer), weights @ rows, rtol=1e-12, atol=1e-14
        )


def test_fewer_are_kept_where_fewer_uploads_are_finite() -> None:
    s = assembled(
        method="genfed",
        schedule="constant",
        rho_max=3,
        attack="label-flip",
        attackers=4,
    )
    fed, cohort = s.federation, s.federation.sample(0)
    rows = fed.train(fed.download(fed.initial_row(), cohort), cohort)
    rows[[0, 2]] = torch.nan
    best, fewer = fed.select(fed.upload(rows, cohort), cohort, 3)
    assert fewer.clients.tolist() == [1, 3] and torch.equal(best, rows[[1, 3]])
    assert cohort.log.selected is not None
    assert cohort.log.selected.tolist() == [1, 3] and cohort.log.excluded == {0, 2}


@pytest.mark.parametrize("attackers", [0, 10])
def test_what_is_kept_and_whose_is_recorded(attackers: int, tmp_path: Path) -> None:
    words = [
        "--method",
        "genfed",
        "--model",
        "mlp",
        "--clients",
        "10",
        "--rounds",
        "3",
        "--schedule-rounds",
        "5",
    ]
    words += (
        ["--attack", "label-flip", "--attackers", str(attackers)] if attackers else []
    )
    record = read_run(started(*words, "--device", "cpu", "--out", tmp_path / "run"))
    assert record.rounds["kept"].tolist() == [1, 2, 3]
    assert record.rounds["kept_attackers"].tolist() == (
        [1, 2, 3] if attackers else [0, 0, 0]
    )
    said = io.StringIO()
    show(record, Console(file=said, width=200))
    assert "selected" in said.getvalue() and ("6 (100%)" in said.getvalue()) == bool(
        attackers
    )


def test_uploads_are_scored_by_one_call_on_the_whole_validation_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    s = assembled(
        method="genfed", clients=6, participation=0.7, rho_max=2, validation=70
    )
    evaluate, calls = s.engine.evaluate, []
    monkeypatch.setattr(
        s.engine,
        "evaluate",
        lambda *a: (calls.append((len(a[0]), a[1].sizes)), evaluate(*a))[1],
    )
    assert len(list(rounds(s, 2))) == 2
    assert calls == [(4, (70,))] * 2


def test_the_usual_validation_set_is_balanced_and_nobody_elses() -> None:
    s = assembled(method="genfed", clients=5)
    held, data = s.dealt.partition.validation, s.federation.server_side.validation
    assert data is not None and data.sizes == (len(held),) == (140,)
    assert np.bincount(data.targets.numpy()).tolist() == [14] * 10
    assert not np.isin(np.concatenate(s.dealt.partition.train), held).any()
    assert not len(assembled(clients=5).dealt.partition.validation), (
        "who needs none has none"
    )
    assert len(assembled(clients=5, supplement=True).dealt.partition.validation) == 140


def deal(train: list[int], validation: int) -> Partition:
    """Samples from 1000 on are the validation set."""
    ends = np.cumsum([0, *train])
    lists = [np.arange(a, b) for a, b in pairwise(ends)]
    return Partition(
        lists, [np.arange(5) for _ in train], np.arange(1000, 1000 + validation)
    )


def test_who_asks_is_given_an_own_small_draw_of_the_validation_set() -> None:
    parts = deal([0, 31, 32, 5, 700, 3], 400)
    given, told = supplemented(parts, clients=5, below=32, share=0.05, seed=3)
    assert told.samples.tolist() == [20, 20, 0, 20, 0], "client 5 joins later"
    draws = {i: given.train[i][given.train[i] >= 1000] for i in (0, 1, 3)}
    for i, draw in draws.items():
        assert (
            len(np.unique(draw)) == 20 <= 0.05 * 400
            and np.isin(draw, parts.validation).all()
        )
        assert np.array_equal(given.train[i][given.train[i] < 1000], parts.train[i])
    assert all(given.train[i] is parts.train[i] for i in (2, 4, 5))
    assert len({tuple(draw) for draw in draws.values()}) == 3, (
        "draws must be independent"
    )
    assert told.leaked == len(np.unique(np.concatenate(list(draws.values())))) < 60
    assert given.validation is parts.validation and given.test is parts.test
    again, _ = supplemented(parts, clients=5, below=32, share=0.05, seed=3)
    other, _ = supplemented(parts, clients=5, below=32, share=0.05, seed=4)
    assert np.array_equal(again.train[0], given.train[0]) and not np.array_equal(
        other.train[0], given.train[0]
    )
    assert supplemented(parts, clients=5, below=0, share=0.05, seed=3)[1].leaked == 0
    # (0 + 31 + 32 + 5 + 700) / 5 = 153.6, and client 5, who joins later, does not count.
    _, by_mean = supplemented(parts, clients=5, below="mean", share=0.05, seed=3)
    assert by_mean.below == 153.6
    assert by_mean.samples.tolist() == [20, 20, 20, 20, 0]
    with pytest.raises(
        UserError,
        match="of 400 validation samples is less than one; use --supplement-share 0",
    ):
        supplemented(parts, clients=5, below=32, share=0.002, seed=3)


def test_the_four_cells_differ_in_what_they_say_alone() -> None:
    """Neither, selection, supplement, both: with one validation set only the supplement
    changes clients' data.
    """
    common = {"clients": 12, "alpha": 0.1, "validation": 100, "batch_size": 40}
    cells = {
        (method, more): assembled(method=method, supplement=more, **common)
        for method in ("fedavg", "genfed")
        for more in (False, True)
    }
    plain = cells["fedavg", False].federation.sizes
    asked = plain < 40
    assert asked.any() and not asked.all()
    for (_, more), s in cells.items():
        assert np.array_equal(s.federation.sizes, plain + asked * more)
        assert np.array_equal(s.clients.train_samples, s.federation.sizes)
        assert np.array_equal(
            s.dealt.partition.validation,
            cells["fedavg", False].dealt.partition.validation,
        )
    data, server = (
        cells["genfed", True].federation.training.train_data,
        cells["genfed", True].federation.server_side.validation,
    )
    assert server is not None
    public = {image.numpy().tobytes() for image in server.inputs}
    for client, size in enumerate(data.sizes):
        own = data.inputs[data.index[client, :size]]
        assert sum(image.numpy().tobytes() in public for image in own) >= asked[client]


@pytest.mark.parametrize(
    "words",
    [
        [
            "genfedau",
            "--supplement",
            "--attack",
            "mimic",
            "--attackers",
            0.4,
            "--rho-max",
            2,
        ],
        [
            "fedumf",
            "--attack",
            "label-flip",
            "--attackers",
            3,
            "--aggregation",
            "median",
        ],
        [
            "genfed",
            "--attack",
            "ipm",
            "--aggregation",
            "multi-krum",
            "--tolerance",
            0.25,
            "--schedule",
            "constant",
        ],
    ],
    ids=["genfedau", "fedumf", "genfed"],
)
def test_seeds_at_once_are_the_same_runs(words: list[object], tmp_path: Path) -> None:
    words = ["--method", *words, "--model", "mlp", *UNEVEN]
    together = started(*words, "--seeds", "4,1", "--out", tmp_path / "together")
    for seed in (1, 4):
        alone = started(*words, "--seed", seed, "--out", tmp_path / f"alone-{seed}")
        assert_same_run(together / f"seed-{seed}", alone, tolerance=1e-12)
        with (
            h5py.File(together / f"seed-{seed}/run.h5") as one,
            h5py.File(alone / "run.h5") as other,
        ):
            for name in other["clients"]:
                assert np.array_equal(
                    one[f"clients/{name}"], other[f"clients/{name}"], equal_nan=True
                ), name


def test_new_clients_are_welcome_with_the_global_model(tmp_path: Path) -> None:
    words = [
        "--method",
        "genfedumf",
        "--model",
        "mlp",
        "--clients",
        5,
        "--new-clients",
        3,
        "--rounds",
        2,
    ]
    words += [
        "--attack",
        "mimic",
        "--attackers",
        2,
        "--supplement",
        "--supplement-below",
        999,
        "--new-updates",
        1,
    ]
    record = read_run(started(*words, "--device", "cpu", "--out", tmp_path / "run"))
    np.testing.assert_array_equal(
        record.newcomers["method"], record.newcomers["global model"]
    )
    with h5py.File(tmp_path / "run/run.h5") as file:
        assert (
            file["clients/attacker"][()].sum() == 2
            and len(file["clients/attacker"]) == 5
        )
        given = file["clients/supplement_samples"][()]
        assert (given == 1).all() and file["clients/supplement_samples"].attrs[
            "units"
        ] == "samples"
        assert (
            1 <= file.attrs["leaked_samples"] <= 5
            and file.attrs["validation_samples"] == 140
        )


def test_the_target_is_the_global_models_or_the_mean_clients() -> None:
    nan = float("nan")
    assert [
        Evaluation(0.9, np.empty(0), common, 0.0).reaches(80)
        for common in (0.8, 0.79, nan)
    ] == [True, False, True]
    assert not Evaluation(0.79, np.empty(0), nan, 0.0).reaches(80) and not Evaluation(
        1, np.empty(0), 1, 0
    ).reaches(None)
    assert at_target(nan, 29 / 100, 29.0) and at_target(nan, 0.57, 57.0), (
        "what is shown as 57 % has reached 57"
    )
    assert at_target(np.array([0.9, 0.9]), np.array([nan, 0.7]), 80).tolist() == [
        False,
        False,
    ]


def test_when_the_target_was_reached_is_recorded_and_may_end_the_run(
    tmp_path: Path, hpcfed: Callable
) -> None:
    words = [
        "--method",
        "fedavg",
        "--model",
        "mlp",
        "--clients",
        4,
        "--participation",
        0.5,
        "--rounds",
        12,
    ]
    words += ["--device", "cpu", "--target-accuracy", 75]
    whole = read_run(started(*words, "--out", tmp_path / "whole"))
    curve = whole.rounds["global_accuracy"]
    first = int(np.flatnonzero(curve >= 0.75)[0])
    assert 0 < first < 11, "the case needs a target in the middle"
    reached = whole.reached()
    assert reached is not None and whole.rounds_done == 12
    assert (reached.rounds, reached.bytes) == (
        first + 1,
        (first + 1) * 2 * 2 * 4 * 4810,
    )
    assert reached.seconds == pytest.approx(whole.rounds["seconds"][: first + 1].sum())
    assert (
        whole.best("global_accuracy")
        == curve.max()
        == run_summary(whole)["best_global_accuracy"]
    )

    short = read_run(started(*words, "--stop-at-target", "--out", tmp_path / "short"))
    assert (short.status, short.rounds_done) == ("complete", first + 1)
    np.testing.assert_array_equal(short.rounds["global_accuracy"], curve[: first + 1])
    shown = hpcfed("show", tmp_path / "short").stdout
    assert f"status: complete, {first + 1} of 12 rounds, stopped at the target" in shown
    line = next(line for line in shown.splitlines() if line.startswith("reached after"))
    assert line.split()[2] == str(first + 1)
    told = json.loads(hpcfed("show", tmp_path / "short", "--json").stdout)
    assert (
        told["reached_target"]["rounds"] == first + 1 and told["target_accuracy"] == 75
    )


def test_new_clients_join_after_the_round_that_reached_the_target(
    tmp_path: Path,
) -> None:
    """Not after all rounds that might have been: the learning rate has not decayed so
    far.
    """
    found = []
    for most in (1, 60):
        s = assembled(
            rounds=most,
            lr_decay=0.5,
            new_clients=2,
            new_updates=2,
            target_accuracy=2,
            stop_at_target=True,
        )
        run_setup(s, tmp_path, quiet=True)
        found.append(read_run(tmp_path))
    assert [record.rounds_done for record in found] == [1, 1]
    np.testing.assert_array_equal(
        found[0].newcomers["method"], found[1].newcomers["method"]
    )


def test_seeds_stop_each_at_its_own_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--model",
        "mlp",
        "--clients",
        4,
        "--participation",
        0.5,
        "--rounds",
        12,
        "--target-accuracy",
        75,
    ]
    words += ["--device", "cpu", "--stop-at-target"]
    together = started(*words, "--seeds", "0..2", "--out", tmp_path / "together")
    said, records = capsys.readouterr().err, read_seeds(together)
    assert len({record.rounds_done for record in records}) > 1, (
        "the case needs seeds that stop at different rounds"
    )
    for record in records:
        seed = record.facts["seed"]
        alone = read_run(
            started(*words, "--seed", seed, "--out", tmp_path / f"alone-{seed}")
        )
        assert (record.status, record.rounds_done) == ("complete", alone.rounds_done)
        np.testing.assert_array_equal(
            record.rounds["global_accuracy"], alone.rounds["global_accuracy"]
        )
    assert said.count("has reached the target in round") == 3
    text = io.StringIO()
    show_seeds(records, together, Console(file=text, width=200))
    assert "target of 75 %" in text.getvalue() and "best accuracy" in text.getvalue()
    mean = np.mean([record.rounds_done for record in records])
    assert f"{mean:.1f} ± " in text.getvalue()


def test_a_target_that_nobody_reaches_is_told(tmp_path: Path) -> None:
    words = [
        "--model",
        "mlp",
        "--clients",
        3,
        "--rounds",
        2,
        "--method",
        "local",
        "--device",
        "cpu",
    ]
    record = read_run(
        started(
            *words,
            "--target-accuracy",
            100,
            "--stop-at-target",
            "--out",
            tmp_path / "run",
        )
    )
    assert record.reached() is None and record.rounds_done == 2
    text = io.StringIO()
    show(record, Console(file=text, width=200))
    assert (
        "not reached" in text.getvalue()
        and run_summary(record)["reached_target"] is None
    )


@pytest.mark.parametrize(
    "order", ["first stop others", "first others stop", "others ahead first stop"]
)
def test_progress_of_seeds_waits_for_those_alone_that_go_on(
    order: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of two seeds stops after the first round, before or after the other has told
    of it.
    """
    progress = StackedProgress(3, runs=2, visible=True)

    def tell(round: int, loss: float) -> None:
        progress.round(round, {"train_loss": loss, "seconds": 1.0}, on_disk=True)

    steps = {
        "first": lambda: tell(0, 1.0),
        "stop": lambda: progress.stop(0),
        "others": lambda: tell(0, 3.0),
        "ahead": lambda: tell(1, 8.0),
    }
    for step in order.split():
        steps[step]()
    tell(2, 9.0)
    said = capsys.readouterr().err
    assert (
        said.count("round 1/3  loss 2.0000") == 1
        and said.count("round 3/3  loss 9.0000") == 1
    )
    assert (
        "loss 1.0000" not in said and "loss 3.0000" not in said and not progress._told
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "--method genfed --schedule triangle",
            "--schedule triangle: must be 'constant', 'power', 'linear', 'sine' or",
        ),
        (
            "--method genfed --rho-max 0",
            "--rho-max 0: must be greater than or equal to 1",
        ),
        (
            "--method genfedumf --schedule-base 1",
            "--schedule-base 1: must be less than 1",
        ),
        (
            "--method genfed --schedule-rounds 0",
            "--schedule-rounds 0: must be greater than or equal to 1",
        ),
        (
            "--rho-max 3",
            "--rho-max is an option of method genfed, genfedau, genfedumf; add --method genfed",
        ),
        ("--method genfed --validation 5", "--validation 5 cannot hold all 10 classes"),
        (
            "--method genfed --validation 5000",
            "validation: 500 samples per class, but class 0 has only 143",
        ),
        (
            "--method fedumf --umf-beta=-1",
            "--umf-beta -1: must be greater than or equal to 0",
        ),
        (
            "--method fedau --au-cutoff 0",
            "--au-cutoff 0: must be greater than or equal to 1",
        ),
        (
            "--supplement-share 0.1",
            "--supplement-share changes nothing without --supplement",
        ),
        (
            "--supplement-below 9",
            "--supplement-below changes nothing without --supplement",
        ),
        (
            "--supplement --supplement-below median",
            "--supplement-below median: must be a number of samples, or mean",
        ),
        (
            "--supplement --supplement-share 2",
            "--supplement-share 2: must be less than or equal to 1",
        ),
        (
            "--supplement --validation 50",
            "--supplement-share 0.01 of 50 validation samples is less than one; use",
        ),
        ("--target-accuracy 0.8", "--target-accuracy 0.8: must be greater than 1"),
        (
            "--target-accuracy 101",
            "--target-accuracy 101: must be less than or equal to 100",
        ),
        (
            "--stop-at-target",
            "--stop-at-target changes nothing without --target-accuracy 80",
        ),
        (
            "--method pfedgpa --target-accuracy 80 --stop-at-target",
            "learns only after the last round",
        ),
    ],
)
def test_a_mistake_is_one_line(
    words: str,
    expected: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert expected in mistake(capsys, "run", *words.split())
    assert list(tmp_path.iterdir()) == []


def test_the_methods_have_the_defaults_of_their_readings() -> None:
    assert methods.load("genfed").Options().model_dump() == {
        "schedule": "linear", "rho_max": 5, "schedule_base": 0.98, "schedule_rounds": 200,
        "ties": "id",
    }  # fmt: skip
    assert methods.load("genfedumf").Options().umf_beta == 1
    assert methods.load("genfedau").Options().au_cutoff == 50
    config = RunConfig()
    assert (config.attackers, config.attack_strength, config.supplement_share) == (
        0.2,
        1.0,
        0.01,
    )
