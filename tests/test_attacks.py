"""Attacks by their algebra, and robust rules against hand-made outliers and plain
numpy.
"""

import math
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hpcfed
from hpcfed import cli
from hpcfed.attacks import idlg
from hpcfed.attacks.label_flip import Flipped, flipped
from hpcfed.data.datasets import SyntheticDataset, SyntheticSize
from hpcfed.data.loading import load
from hpcfed.experiment.assemble import Setup
from hpcfed.experiment.run import run
from hpcfed.federation.aggregation import Aggregation, least_krum, trimmed_mean
from hpcfed.federation.cohort import Cohort, Sent
from hpcfed.models.networks import build
from hpcfed.options.malicious import ATTACKS
from hpcfed.results.stored import read_run
from hpcfed.runtime import randomness
from hpcfed.runtime.randomness import (
    bits,
    child_keys,
    client_keys,
    generator,
    normal,
    uniform,
)
from hpcfed.runtime.timer import PHASES
from tests.federations import assembled
from tests.runs import mistake, started

UPLOADS = [attack for attack in ATTACKS if attack not in ("none", "label-flip")]


def attacked(
    attack: str, **values: Any
) -> tuple[Setup, Tensor, Tensor, Tensor, np.ndarray]:
    """A setup, what clients were sent, what they trained, what they upload, and which
    are malicious.
    """
    values = {"clients": 6, "attackers": 2, "epochs": 1, "batch_size": 60, **values}
    s = assembled(attack=attack, **values)
    fed, cohort = s.federation, s.federation.sample(0)
    start = fed.download(fed.initial_row(), cohort)
    trained = fed.train(start, cohort)
    before = trained.clone()
    sent = fed.upload(trained, cohort)
    assert torch.equal(trained, before), "a client keeps what it trained"
    return s, start, trained, sent, np.isin(cohort.clients, s.dealt.attackers)


@pytest.mark.parametrize("attack", UPLOADS)
def test_only_attackers_change_their_uploads(attack: str) -> None:
    s, _, trained, sent, bad = attacked(attack)
    assert bad.sum() == 2 == len(s.dealt.attackers)
    assert torch.equal(sent[~bad], trained[~bad])
    assert (sent[bad] != trained[bad]).any(1).all()


def test_ipm_is_the_negative_mean_of_benign_updates() -> None:
    _, start, trained, sent, bad = attacked("ipm", attack_strength=2.5, alpha=0.2)
    expected = start[0] - 2.5 * (trained[~bad] - start[~bad]).mean(0)
    torch.testing.assert_close(
        sent[bad], expected.expand(2, -1), rtol=1e-12, atol=1e-14
    )


def test_ipm_goes_on_when_a_benign_client_has_diverged() -> None:
    s, start, trained, _, bad = attacked("ipm")
    fed, cohort, benign = s.federation, s.federation.sample(0), np.flatnonzero(~bad)
    trained[benign[0], 5] = torch.nan
    expected = start[0] - (trained - start)[benign[1:]].mean(0)
    fed.download(start[0], cohort)
    sent = fed.upload(trained, cohort)
    torch.testing.assert_close(
        sent[bad], expected.expand(2, -1), rtol=1e-12, atol=1e-14
    )
    fed.mean(sent, cohort)
    assert cohort.log.excluded == {benign[0]}, (
        "attackers are not taken for diverged clients"
    )


@pytest.mark.parametrize("deterministic", [False, True])
def test_as_many_attackers_as_benign_clients_hold_w_by_ipm(deterministic: bool) -> None:
    """ε = 1, equal counts, uniform weights: the updates cancel."""
    s, start, trained, sent, _ = attacked(
        "ipm", attackers=0.5, deterministic=deterministic
    )
    cohort = s.federation.sample(0).equally()
    torch.testing.assert_close(
        s.federation.mean(sent, cohort), start[0], rtol=0, atol=1e-14
    )
    assert not torch.allclose(
        s.federation.mean(trained, cohort), start[0], rtol=0, atol=1e-3
    )
    torch.set_deterministic_debug_mode("default")


def test_a_flipped_sign_mirrors_the_own_update() -> None:
    _, start, trained, sent, bad = attacked("sign-flip")
    torch.testing.assert_close(
        sent[bad] + trained[bad], 2 * start[bad], rtol=1e-12, atol=1e-14
    )
    _, start, trained, sent, bad = attacked("sign-flip", attack_strength=0.0)
    assert torch.equal(sent[bad], start[bad])


def test_an_update_is_what_the_server_sent_to_the_client_and_got_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """pFedHN sends every client a row of its own, FedPer sends the body alone."""
    for method, options in {
        "pfedhn": {"inner_steps": 2, "hn_hidden": 3},
        "fedper": {},
    }.items():
        s = assembled(method=method, attack="sign-flip", attackers=2, **options)
        fed, upload, seen = s.federation, s.federation.upload, []
        sent = fed.download
        monkeypatch.setattr(
            fed,
            "download",
            lambda *a, sent=sent, seen=seen: (seen.append(sent(*a)), seen[-1])[1],
        )
        monkeypatch.setattr(
            fed,
            "upload",
            lambda *a, upload=upload, seen=seen: (
                seen.extend([a[0], upload(*a)]),
                seen[-1],
            )[1],
        )
        s.method.round(fed, s.method.init(fed), fed.sample(0))
        start, trained, got = seen
        assert start.shape == trained.shape and (
            method == "fedper" or not torch.equal(start[0], start[1])
        )
        bad = np.isin(np.arange(4), s.dealt.attackers)
        torch.testing.assert_close(
            got[bad], 2 * start[bad] - trained[bad], rtol=1e-12, atol=1e-14
        )
        assert torch.equal(got[~bad], trained[~bad])


def test_a_mimic_uploads_a_copy_of_a_random_benign_upload() -> None:
    victims = []
    for seed in range(5):
        s, _, trained, sent, bad = attacked("mimic", seed=seed, attackers=3)
        for row in sent[bad]:
            (copied,) = [
                i for i, other in enumerate(trained) if torch.equal(row, other)
            ]
            assert not bad[copied]
            victims.append(int(np.flatnonzero(np.flatnonzero(~bad) == copied)[0]))
    assert set(victims) == {0, 1, 2}, "every benign client is drawn now and then"
    fed, drawn = s.federation, set()
    for round in range(8):
        cohort = fed.sample(round)
        fed.download(fed.initial_row(), cohort)
        drawn.add(tuple(fed.upload(trained, cohort)[bad][:, 0].tolist()))
    assert len(drawn) > 3, "anew in every round"


def test_noise_is_as_large_as_the_own_update_and_every_attackers_own() -> None:
    s, start, trained, sent, bad = attacked("noise", attack_strength=3.0)
    noise, update = sent[bad] - trained[bad], trained[bad] - start[bad]
    torch.testing.assert_close(
        noise.norm(dim=1), 3 * update.norm(dim=1), rtol=0.05, atol=0
    )
    assert abs(float(torch.corrcoef(noise)[0, 1])) < 0.05
    fed, cohort = s.federation, s.federation.sample(1)
    fed.download(fed.initial_row(), cohort)
    assert not torch.equal(fed.upload(trained, cohort)[bad], sent[bad]), (
        "new in every round"
    )


def splitmix(number: int) -> int:
    """The finaliser of splitmix64, in whole numbers."""
    mask = 2**64 - 1
    number &= mask
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & mask
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & mask
    return number ^ (number >> 31)


@pytest.mark.parametrize("count", [5, randomness.FEW + 1])
def test_random_numbers_are_those_of_splitmix64(count: int) -> None:
    """Whether numpy draws them, or torch: of each client by its id, wherever it is."""
    golden, mask = 0x9E3779B97F4A7C15, 2**64 - 1
    words = [7, zlib.crc32(b"a purpose"), 3]
    (start,) = np.random.SeedSequence(words).generate_state(1, np.uint64).tolist()
    ids = torch.arange(count) * 3
    keys = client_keys(7, "a purpose", 3, ids)
    for at in (0, 1, count - 1):
        expected = splitmix(int(ids[at]) * golden + start)
        assert int(keys[at]) & mask == expected
        children = child_keys(keys, 4)
        assert int(children[at]) & mask == splitmix(expected + 5 * golden)
    (key,), one = [int(keys[1]) & mask], keys[1]
    drawn = [splitmix(key + (number + 1) * golden) for number in range(count + 2)]
    found = bits(one, count, offset=2)
    assert [int(number) & mask for number in found] == drawn[2:]
    upper = [(number >> 40) / 2**24 for number in drawn]
    assert uniform(one, count, offset=2).tolist() == upper[2:]
    middle = [(number >> 8 & 0xFFFFFF) / 2**24 for number in drawn]
    pairs = (count + 1) // 2
    circle = [
        (math.sqrt(-2 * math.log1p(-u)), 2 * math.pi * v)
        for u, v in zip(upper[:pairs], middle[:pairs], strict=True)
    ]
    expected = [r * math.cos(a) for r, a in circle]
    expected += [r * math.sin(a) for r, a in circle]
    torch.testing.assert_close(
        normal(one[None], count)[0],
        torch.tensor(expected[:count], dtype=torch.float64),
        rtol=1e-12,
        atol=1e-12,
    )
    # Within 64 bits, whichever number of a step or a part it is.
    for number in (0, 2**31, 2**40):
        child = int(child_keys(keys[:1], number)) & mask
        first = int(keys[0]) & mask
        assert child == splitmix(first + (number + 1) * golden)
        assert child == int(child_keys(keys[:1], torch.tensor(number))) & mask


def test_decisions_on_the_host_are_keyed_by_seed_purpose_and_numbers() -> None:
    expected = np.random.default_rng([5, zlib.crc32(b"cohort"), 2, 9]).random(4)
    assert generator(5, "cohort", 2, 9).random(4).tolist() == expected.tolist()


def test_normal_numbers_are_normal() -> None:
    drawn = normal(client_keys(0, "test", 0, torch.arange(4)), 50_001)
    assert drawn.shape == (4, 50_001) and drawn.isfinite().all()
    flat = drawn.flatten()
    assert abs(float(flat.mean())) < 0.01 and abs(float(flat.var()) - 1) < 0.01
    assert (
        abs(float((flat**4).mean()) - 3) < 0.1
        and abs(float((flat.abs() < 1).double().mean()) - 0.6827) < 0.005
    )
    assert (
        abs(
            float(
                torch.corrcoef(
                    torch.stack([drawn[0, :25_000], drawn[0, 25_001:50_001]])
                )[0, 1]
            )
        )
        < 0.02
    )


@pytest.mark.parametrize("attack", UPLOADS)
def test_of_an_upload_only_what_was_sent_is_an_update(attack: str) -> None:
    """FedLPS leaves zeros in the channels that a client has dropped: they are no step
    back from w to zero.
    """
    s, start, trained, _, bad = attacked(attack)
    fed, cohort = s.federation, s.federation.sample(0)
    fed.download(start[0], cohort)
    parts = torch.tensor(
        [[1, 0, 1], [1, 1, 0], [0, 1, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]],
        dtype=torch.bool,
    )
    parts[torch.from_numpy(bad)] = torch.tensor([True, True, False])
    sent = Sent(parts, torch.arange(start.shape[1]) % 3)
    columns, got = sent.columns(), fed.upload(trained, cohort, sent)
    assert torch.equal(fed.upload(trained * columns, cohort, sent), got), (
        "what is kept back does not matter"
    )
    updates, forged = (trained - start) * columns, (got - start)[bad]
    if attack == "ipm":
        mean = updates[~bad].sum(0) / columns[~bad].sum(0).clamp(min=1)
        torch.testing.assert_close(forged, -mean.expand(2, -1), rtol=1e-12, atol=1e-14)
    if attack == "noise":
        noise = (forged - updates[bad]) * columns[bad]
        torch.testing.assert_close(
            noise.norm(dim=1), updates[bad].norm(dim=1), rtol=0.05, atol=0
        )
    if attack == "mimic":
        assert all(
            any(torch.equal(row, other) for other in updates[~bad]) for row in forged
        )


@pytest.mark.parametrize("attack", UPLOADS)
def test_attackers_among_themselves_need_benign_clients_only_to_copy_them(
    attack: str, capsys: pytest.CaptureFixture[str]
) -> None:
    s, start, trained, sent, bad = attacked(attack, attackers=6)
    assert bad.all()
    assert (sent != trained).any(1).all() == (attack in ("sign-flip", "noise"))
    if attack == "sign-flip":
        torch.testing.assert_close(sent, 2 * start - trained)
    if attack in ("ipm", "mimic"):
        assert torch.equal(sent, trained)
        later = s.federation.sample(1)
        s.federation.download(start[0], later)
        s.federation.upload(trained, later)
        said = capsys.readouterr().err
        assert (
            said.count(
                f"all clients of round 1 are attackers, and {attack} needs benign ones"
            )
            == 1
        )
        assert said.count("\n") == 1, "it is told once"


def test_an_attack_is_about_the_clients_that_were_sampled() -> None:
    """With half of the clients in a round, ipm mirrors the mean of the benign ones
    among them alone.
    """
    s = assembled(
        attack="ipm",
        attackers=0.5,
        clients=10,
        participation=0.5,
        epochs=1,
        batch_size=60,
    )
    fed, seen = s.federation, set()
    for round in range(6):
        cohort = fed.sample(round)
        start = fed.download(fed.initial_row(), cohort)
        rows = fed.train(start, cohort)
        sent, bad = fed.upload(rows, cohort), np.isin(cohort.clients, s.dealt.attackers)
        seen.add(int(bad.sum()))
        torch.testing.assert_close(sent[~bad], rows[~bad], rtol=0, atol=0)
        mirrored = start[0] - (rows - start)[~bad].mean(0)
        torch.testing.assert_close(
            sent[bad], mirrored.expand(int(bad.sum()), -1), rtol=1e-12, atol=1e-14
        )
    assert len(seen) > 1


@given(
    st.integers(2, 100).flatmap(
        lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1)))
    )
)
def test_a_label_flipped_twice_is_the_label(case: tuple[int, list[int]]) -> None:
    classes, labels = case[0], np.array(case[1], np.int64)
    once = flipped(labels, classes)
    assert (
        np.array_equal(flipped(once, classes), labels)
        and ((once >= 0) & (once < classes)).all()
    )


def test_the_second_half_of_the_training_set_is_the_first_with_flipped_labels() -> None:
    honest = SyntheticDataset(
        SyntheticSize(shape=(1, 4, 4), classes=5, train=20, test=10), seed=0
    )
    both, cpu = Flipped(honest), {"device": torch.device("cpu"), "dtype": torch.float32}
    assert np.array_equal(both.labels("train")[20:], 4 - honest.labels("train"))
    assert np.array_equal(both.labels("train")[:20], honest.labels("train"))
    assert np.array_equal(both.labels("test"), honest.labels("test"))
    index = np.array([3, 23, 19, 39])
    assert torch.equal(
        both.inputs("train", index, **cpu), honest.inputs("train", index % 20, **cpu)
    )
    assert torch.equal(
        both.inputs("test", index[:1], **cpu), honest.inputs("test", index[:1], **cpu)
    )


def test_label_flip_changes_the_training_labels_of_attackers_alone() -> None:
    options = {"clients": 5, "alpha": 0.5, "supplement": True, "supplement_below": 9999}
    plain, poisoned = (
        assembled(**options),
        assembled(attack="label-flip", attackers=2, **options),
    )
    data, flip = (
        plain.federation.training.train_data,
        poisoned.federation.training.train_data,
    )
    assert data.sizes == flip.sizes
    for client, size in enumerate(data.sizes):
        own, other = data.index[client, :size], flip.index[client, :size]
        bad = client in poisoned.dealt.attackers
        assert torch.equal(data.inputs[own], flip.inputs[other])
        assert torch.equal(
            data.targets[own], 9 - flip.targets[other] if bad else flip.targets[other]
        )
    one, two = (
        plain.federation.training.test_data,
        poisoned.federation.training.test_data,
    )
    assert torch.equal(one.targets, two.targets) and torch.equal(one.inputs, two.inputs)
    assert np.array_equal(
        plain.dealt.partition.validation, poisoned.dealt.partition.validation
    )


def test_attackers_depend_on_the_seed_alone_and_their_share_is_of_all_clients() -> None:
    first, again, other = (
        assembled(attack="ipm", clients=20, seed=seed).dealt.attackers
        for seed in (0, 0, 1)
    )
    assert (
        len(first) == 4
        and np.array_equal(first, again)
        and not np.array_equal(first, other)
    )
    nested = assembled(attack="mimic", clients=20, attackers=7).dealt.attackers
    assert len(nested) == 7 and np.isin(first, nested).all(), (
        "more attackers are the same ones and others"
    )
    assert not len(assembled(clients=20).dealt.attackers)


def cohort_of(counts: list[int], weights: np.ndarray | None = None) -> Cohort:
    """One rank with clients 0, 1, … whose sample counts are given."""
    every = np.arange(len(counts))
    sizes = np.array(counts, float) if weights is None else weights
    return Cohort(0, every, sizes / sizes.sum(), every, every, [every])


def rule(
    name: str, rows: Tensor, counts: list[int] | None = None, **options: Any
) -> Tensor:
    s = assembled(clients=len(rows), aggregation=name, **options)
    return s.federation.mean(rows, cohort_of(counts or [1] * len(rows)))


def random_rows(count: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(count, 33)))


@pytest.mark.parametrize("count", [5, 8])
def test_median_and_trimmed_mean_are_those_of_numpy(count: int) -> None:
    rows = random_rows(count)
    np.testing.assert_allclose(
        rule("median", rows).numpy(), np.median(rows.numpy(), 0), rtol=1e-12
    )
    cut = int(0.3 * count)
    expected = np.sort(rows.numpy(), 0)[cut : count - cut].mean(0)
    np.testing.assert_allclose(
        rule("trimmed-mean", rows, tolerance=0.3).numpy(), expected, rtol=1e-12
    )
    np.testing.assert_allclose(
        rule("trimmed-mean", rows, tolerance=0.0).numpy(),
        rows.numpy().mean(0),
        rtol=1e-12,
    )


def naive_krum(rows: np.ndarray, malicious: int) -> list[int]:
    """Positions by score, from distances as they are defined."""
    scores = []
    for i, row in enumerate(rows):
        squares = sorted(
            float(((row - other) ** 2).sum()) for j, other in enumerate(rows) if j != i
        )
        scores.append(sum(squares[: len(rows) - malicious - 2]))
    return sorted(range(len(rows)), key=lambda i: (scores[i], i))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(7, 12))
def test_krum_is_its_definition(seed: int, count: int) -> None:
    rows = random_rows(count, seed).numpy()
    squares = ((rows[:, None] - rows) ** 2).sum(2)
    assert least_krum(squares, 2).tolist() == naive_krum(rows, 2)


@pytest.mark.parametrize("counts", [None, [5, 1, 2, 9, 4, 4, 3]])
def test_krum_takes_a_row_and_multi_krum_a_weighted_mean_of_rows(
    counts: list[int] | None,
) -> None:
    rows = 100 + 1e-3 * random_rows(
        7
    )  # large beside their distances, as rows of networks are
    order, sizes = naive_krum(rows.numpy(), 1), np.array(counts or [1] * 7, float)
    assert torch.equal(rule("krum", rows, counts), rows[order[0]])
    for keep in (0, 3, 7):
        kept = order[: keep or 6]
        expected = (sizes[kept] / sizes[kept].sum()) @ rows.numpy()[kept]
        got = rule("multi-krum", rows, counts, krum_keep=keep)
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-13)


OUTLIERS = [1e30, -1e30, float("nan"), float("inf")]


def with_outliers(outlier: float) -> tuple[Tensor, Tensor]:
    """Ten rows around 3, two of which are outliers, and the eight others."""
    rows = 3 + 0.1 * random_rows(10)
    honest = rows[[1, 2, 3, 4, 5, 7, 8, 9]]
    rows[[0, 6]] = outlier
    return rows, honest


@pytest.mark.parametrize("name", ["median", "trimmed-mean", "krum", "multi-krum"])
@pytest.mark.parametrize("outlier", OUTLIERS)
def test_outliers_cannot_bend_a_robust_rule_far(name: str, outlier: float) -> None:
    """By itself; the federation leaves out those that are not finite all the same, and
    counts them.
    """
    rows, _ = with_outliers(outlier)
    s = assembled(clients=10, aggregation=name)
    fed, rule = s.federation, Aggregation(s.settings.config, s.collectives)
    assert (rule(rows, cohort_of([1] * 10)) - 3).abs().max() < 0.4
    cohort = cohort_of([1] * 10)
    assert (fed.mean(rows, cohort) - 3).abs().max() < 0.4
    assert len(cohort.log.excluded) == (0 if np.isfinite(outlier) else 2)


@pytest.mark.parametrize("outlier", OUTLIERS)
def test_outliers_carry_the_mean_off_unless_they_are_not_finite(outlier: float) -> None:
    """These are left out and counted, which no rule of aggregation has to be told."""
    rows, honest = with_outliers(outlier)
    fed = assembled(clients=10, aggregation="mean").federation
    cohort = cohort_of([1] * 10)
    mean = fed.mean(rows, cohort)
    if np.isfinite(outlier):
        assert (mean - 3).abs().max() > 1e6 and not cohort.log.excluded
    else:
        torch.testing.assert_close(mean, honest.mean(0))
        assert len(cohort.log.excluded) == 2


@pytest.mark.parametrize("name", ["median", "trimmed-mean", "krum", "multi-krum"])
def test_clients_without_data_have_no_say(name: str) -> None:
    rows, garbage = random_rows(7), torch.full((3, 33), 7.0, dtype=torch.float64)
    whole = torch.cat([garbage, rows])
    torch.testing.assert_close(
        rule(name, whole, [0, 0, 0, 1, 2, 1, 4, 1, 1, 1]),
        rule(name, rows, [1, 2, 1, 4, 1, 1, 1]),
    )


def test_a_trimmed_mean_of_too_few_uploads_is_the_median() -> None:
    """Two of ten uploads are left, the others were excluded, and each end would drop
    one.
    """
    rows = random_rows(10)
    rows[2:] = torch.nan
    fed = assembled(
        clients=10, aggregation="trimmed-mean", tolerance=0.4999999999
    ).federation
    cohort = cohort_of([1] * 10)
    torch.testing.assert_close(fed.mean(rows, cohort), rows[:2].mean(0))
    assert len(cohort.log.excluded) == 8


def test_trimming_counts_nan_as_the_largest() -> None:
    columns = torch.tensor([[1.0], [float("nan")], [2.0], [3.0], [-9.0]])
    assert trimmed_mean(columns, 1).tolist() == [2.0]


def test_some_members_of_a_cohort_keep_their_places_on_every_rank() -> None:
    every, ids = np.arange(6), np.array([2, 3, 5, 8, 9, 11])
    per_rank = [np.array([0, 3]), np.array([1, 4, 5]), np.array([2])]
    whole = Cohort(
        7,
        ids,
        np.array([0.1, 0.2, 0.1, 0.3, 0.2, 0.1]),
        np.array([4, 0, 6]),
        per_rank[1],
        per_rank,
    )
    rows, some = whole.only(np.array([0, 1, 3, 5]))
    assert (
        rows.tolist() == [0, 2]
        and some.here.tolist() == [4, 6]
        and some.chosen.tolist() == [1, 3]
    )
    assert some.clients.tolist() == [2, 3, 8, 11] and some.round == 7
    assert [own.tolist() for own in some.per_rank] == [[0, 2], [1, 3], []]
    np.testing.assert_allclose(some.weights, [1 / 7, 2 / 7, 3 / 7, 1 / 7])
    assert whole.only(every)[1] is whole and whole.ranks().tolist() == [
        0,
        1,
        2,
        0,
        1,
        1,
    ]
    np.testing.assert_array_equal(whole.equally().weights, np.full(6, 1 / 6))


def test_an_attack_has_its_phase_and_hurts_and_a_defence_helps(tmp_path: Path) -> None:
    words = [
        "--model",
        "mlp",
        "--clients",
        10,
        "--partition",
        "iid",
        "--rounds",
        6,
        "--device",
        "cpu",
        "--epochs",
        1,
    ]
    attack = ["--attack", "ipm", "--attack-strength", 6, "--attackers", 3]
    runs = {
        "honest": [],
        "attacked": attack,
        "defended": [*attack, "--aggregation", "median"],
    }
    records = {
        name: read_run(started(*words, *more, "--out", tmp_path / name))
        for name, more in runs.items()
    }
    last = {name: record.last("global_accuracy") for name, record in records.items()}
    assert (
        last["attacked"] < 0.5 * last["honest"]
        and last["defended"] > 0.9 * last["honest"]
    )
    seconds = {
        name: record.phases[:, :, PHASES.index("attack")].sum()
        for name, record in records.items()
    }
    assert seconds["honest"] == 0 < seconds["attacked"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--attack imp", "unknown attack 'imp'; did you mean 'ipm'?"),
        ("--attack ipm --attackers 21", "--attackers 21, but there are 20 clients"),
        (
            "--attack ipm --attackers 2.5",
            "--attackers 2.5 is neither a share below 1 nor a whole number",
        ),
        (
            "--attack ipm --attackers 0.01",
            "--attackers 0.01 of 20 clients round to none; use --attackers 1",
        ),
        ("--attack ipm --attackers 0", "--attackers 0: must be greater than 0"),
        ("--attackers 0.3", "--attackers changes nothing without --attack"),
        ("--attack-strength 3", "--attack-strength changes nothing without --attack"),
        (
            "--aggregation mode",
            "--aggregation mode: must be 'mean', 'median', 'trimmed-mean', 'krum', 'multi-krum' or 'sign-majority'",
        ),
        (
            "--aggregation trimmed-mean --tolerance 0.5",
            "--tolerance 0.5: must be less than 0.5",
        ),
        (
            "--tolerance 0.1",
            "--tolerance changes nothing without --aggregation trimmed-mean",
        ),
        (
            "--aggregation krum --clients 2",
            "krum needs at least 3 uploads to bear --tolerance 0.2, a round has 2",
        ),
        (
            "--aggregation multi-krum --participation 0.3 --tolerance 0.4",
            "needs at least 7 uploads",
        ),
        (
            "--aggregation multi-krum --krum-keep 21",
            "--krum-keep 21, but a round has 20 uploads",
        ),
        (
            "--aggregation krum --krum-keep 2",
            "--krum-keep changes nothing without --aggregation multi-krum",
        ),
        (
            "--attack ipm --attackers 20",
            "--attack ipm needs benign clients, and all 20 are attackers",
        ),
        (
            "--attack mimic --clients 1",
            "--attack mimic needs benign clients, and all 1 are attackers",
        ),
        (
            "--aggregation trimmed-mean --clients 2 --tolerance 0.4999999999",
            "--tolerance 0.4999999999 of 2 uploads makes trimmed-mean drop all of them",
        ),
        (
            "--attack ipm --method local",
            "--attack ipm, but clients of method local upload nothing",
        ),
        (
            "--aggregation median --method local",
            "but method local takes no mean of all uploads",
        ),
        (
            "--aggregation krum --method pfedhn",
            "but method pfedhn takes no mean of all uploads",
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


def test_attacks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["list"])
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in ATTACKS)


# iDLG on a network that a run has trained


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    words = "--model cnn-bn --clients 2 --rounds 1 --snapshot-every 1 --device cpu"
    run(cli.parse_run([*words.split(), "--out", str(folder)]))
    return folder


def stolen_gradients(
    monkeypatch: pytest.MonkeyPatch, words: str
) -> list[dict[str, torch.Tensor]]:
    """What the server is sent of one image, by every method of an attack."""
    seen = []

    def look(
        self: idlg.ImageThief,
        network: torch.nn.Module,
        weights: dict[str, torch.Tensor],
        target: dict[str, torch.Tensor],
        label: int,
        like: torch.Tensor,
    ) -> torch.Tensor:
        seen.append(target | {f"known {name}": w for name, w in weights.items()})
        return like.clone()

    monkeypatch.setattr(idlg.ImageThief, "_reconstruct", look)
    cli.main(f"attack idlg --images 1 --device cpu {words}".split())
    return seen


def test_idlg_attacks_what_the_run_has_trained(
    trained_run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = f"--run {trained_run} --methods fedavg,parfed"
    whole, part = stolen_gradients(monkeypatch, words)
    assert f"{trained_run}: the global model" in capsys.readouterr().out

    # The same gradient by plain torch: the stored model, on the image as it was trained.
    network = build("cnn-bn", shape=(1, 8, 8), classes=10, seed=3).double().eval()
    stored = hpcfed.open(trained_run).model
    state = {name: torch.from_numpy(array) for name, array in stored.items()}
    network.load_state_dict(state, strict=False)
    digits = load(
        "digits",
        root=None,
        download=False,
        seed=0,
        synthetic=SyntheticSize((1, 1, 1), 2, 1, 1),
    )
    labels = digits.labels("test")
    victim = generator(0, "victims").choice(len(labels), 1, replace=False)
    image = digits.inputs(
        "test", victim, device=torch.device("cpu"), dtype=torch.float64
    )
    answer = network(image)
    loss = torch.nn.functional.cross_entropy(answer, torch.tensor(labels[victim]))
    loss.backward()
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(whole[name], parameter.grad)
    # What ParFed keeps for itself, the server does not know: weights and statistics.
    sent = {name.rpartition(".")[0] for name in part if not name.startswith("known ")}
    assert sent and "head" not in sent
    for name, tensor in network.state_dict().items():
        if tensor.dtype == torch.float64:
            known = torch.equal(part[f"known {name}"], tensor)
            assert known == (name.rpartition(".")[0] in sent), name


def test_idlg_attacks_the_row_of_a_client(
    trained_run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = f"--run {trained_run} --client 1 --methods fedavg"
    (seen,) = stolen_gradients(monkeypatch, words)
    assert "client 1 in round 1" in capsys.readouterr().out
    snapshot = hpcfed.open(trained_run).parameters()
    head = seen["known head.weight"].flatten().float().numpy()
    np.testing.assert_array_equal(head, snapshot["head.weight"][1])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--run nowhere", "no such folder: nowhere"),
        ("--run {run} --client 9", "--client 9: in round 1, the last with a snapshot"),
        ("--run {run} --model smooth", "--model is taken from the run with --run"),
        ("--client 1", "--client changes nothing without --run FOLDER"),
    ],
)
def test_a_mistake_with_a_trained_network_is_one_line(
    trained_run: Path, capsys: pytest.CaptureFixture[str], words: str, expected: str
) -> None:
    words = words.format(run=trained_run)
    assert expected in mistake(capsys, "attack", "idlg", *words.split())


def test_a_run_without_snapshots_has_no_rows_of_clients(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("run.h5", "model.npz"):
        shutil.copy(trained_run / name, tmp_path)
    words = ("attack", "idlg", "--run", tmp_path, "--client", "1")
    found = mistake(capsys, *map(str, words))
    assert "has no snapshot" in found and "model.npz" not in found


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_mean_of_one_row_is_the_row(deterministic: bool) -> None:
    s = assembled(clients=1, deterministic=deterministic)
    rule = Aggregation(s.settings.config, s.collectives)
    row = torch.arange(5.0, dtype=torch.float64)[None]
    assert rule.mean(row, s.federation.sample(0)).tolist() == row[0].tolist()
