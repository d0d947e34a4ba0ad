"""Differential privacy: clipping and noise by hand, and ε against figures of others."""

import math
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hpcfed import cli, methods
from hpcfed.clients.dp_sgd import PrivateSteps
from hpcfed.errors import UserError
from hpcfed.experiment.assemble import Setup
from hpcfed.experiment.run import run_setup
from hpcfed.federation.channel import Memory, accountant
from hpcfed.federation.channel import noise as noises
from hpcfed.federation.channel.accountant import Accountant, guarantee
from hpcfed.federation.channel.build import noise_beside_count
from hpcfed.federation.channel.channel import Upload
from hpcfed.federation.channel.clipping import ClipNorm, Clipping, QuantileStep
from hpcfed.federation.channel.noise import CentralNoise, LocalNoise
from hpcfed.federation.cohort import Cohort
from hpcfed.models.layout import Layout
from hpcfed.models.networks import build
from hpcfed.options import RunConfig, check_privacy
from hpcfed.options.channel import channel_parts
from hpcfed.options.malicious import ATTACKS
from hpcfed.options.traits import MethodTraits
from hpcfed.results.stored import read_run
from hpcfed.runtime.randomness import child_keys, client_keys, generator, normal
from tests.federations import assembled, usual
from tests.naive import batches
from tests.runs import mistake, same, started
from tests.stopped_run import StopAfter

PFL = {
    "clients": 1000,
    "cohort": 50,
    "rounds": 1500,
    "privacy": "central",
    "delta": 1e-6,
}
PFL_NOISE = 0.616145
"""What pfl-research 0.6.0 computes for its CIFAR-10 benchmark with central privacy: ε =
2, a population of 1e6, a noise cohort of 1000 (its PLDPrivacyAccountant, run on
2026-11-17). It scales it by 50 / 1000 for its cohort of 50.
"""


def test_epsilon_is_that_of_the_librarys_own_examples() -> None:
    """pld_privacy_accountant_test.py of dp-accounting 0.6.0: three releases with noise
    √3, and three with noise 0.5 and a rate of 0.2, each have ε = 1 at these δ.
    """
    certain = Accountant("pld", "poisson", 1, 1, delta=0.126936)
    assert certain.epsilon(math.sqrt(3), 3) == pytest.approx(1, abs=1e-3)
    sampled = Accountant("pld", "poisson", 1, 5, delta=0.15594)
    assert sampled.epsilon(0.5, 3) == pytest.approx(1, abs=1e-3)


def test_epsilon_is_that_of_pfl_research() -> None:
    config = RunConfig(
        **PFL,
        noise_multiplier=PFL_NOISE,
        privacy_population=10**6,
        noise_cohort=1000,
        sampling="poisson",
        clip_norm=0.4,
    )
    said = guarantee(config)
    assert said.startswith("ε = 2 after 1500 rounds at δ = 1e-06 (z = 0.6161, pld)")
    assert said.endswith("rate 0.001, as if rounds had 1,000 of 1,000,000 clients")
    accountant = Accountant("pld", "poisson", 1000, 10**6, delta=1e-6)
    assert accountant.epsilon(PFL_NOISE, 1500) == pytest.approx(2, rel=1e-3)


def test_noise_is_scaled_to_the_cohort_as_pfl_research_does() -> None:
    """Its sum over 50 clients has noise z × C × 50 / 1000, and is divided by 50."""
    s = assembled(
        clients=100,
        cohort=50,
        privacy="central",
        noise_multiplier=PFL_NOISE,
        privacy_population=10**6,
        noise_cohort=1000,
        clip_norm=0.4,
    )
    noise = s.federation.channel.after_mean
    expected = PFL_NOISE * (50 / 1000) / 50
    assert noise.deviation == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "kind, sampling",
    [
        ("rdp", "poisson"),
        ("rdp", "fixed"),
        ("rdp", "always"),
        ("pld", "poisson"),
        ("pld", "always"),
    ],
)
def test_the_noise_for_epsilon_gives_that_epsilon(kind: str, sampling: str) -> None:
    accountant = Accountant(kind, sampling, 5, 5, delta=1e-5)
    noise = accountant.noise_multiplier(3.0, rounds=4)
    assert accountant.epsilon(noise, 4) <= 3.0
    assert accountant.epsilon(noise - 1e-3, 4) > 3.0


def test_gaussian_divergences_are_those_of_the_formula() -> None:
    """Order α of n releases: n α / (2 σ²), from which ε ≤ that + log(1/δ) / (α − 1). The
    library's conversion may only be better, and not by much.
    """
    accountant = Accountant("rdp", "poisson", 1, 1, delta=1e-5)
    orders = np.arange(1.01, 60, 0.01)
    bounds = 7 * orders / (2 * 4.0**2) + math.log(1e5) / (orders - 1)
    epsilon = accountant.epsilon(4.0, 7)
    assert bounds.min() * 0.8 < epsilon < bounds.min()


def test_replaced_clients_need_twice_the_noise() -> None:
    """Another client in one's place changes the sum by 2C, one more or less by C."""
    more_or_less = Accountant("rdp", "poisson", 5, 5, delta=1e-5)
    replaced = Accountant("rdp", "fixed", 5, 5, delta=1e-5)
    alone = Accountant("rdp", "always", 1, 1, delta=1e-5)
    expected = more_or_less.epsilon(1.0, 3)
    assert replaced.epsilon(2.0, 3) == pytest.approx(expected, rel=1e-9)
    assert alone.epsilon(2.0, 3) == pytest.approx(expected, rel=1e-9)


def test_epsilon_of_a_round_is_a_bound_and_exact_at_the_end() -> None:
    accountant = Accountant("pld", "poisson", 1, 10, delta=1e-5)
    spent = accountant.epsilons(1.0, 40)
    assert (np.diff(spent) >= 0).all()
    assert spent[-1] == accountant.epsilon(1.0, 40)
    for rounds in (1, 7, 17, 33):
        best = accountant.epsilon(1.0, rounds)
        assert best <= spent[rounds - 1] <= 1.1 * best


def cohort_of(size: int, *, round: int = 0) -> Cohort:
    everyone = np.arange(size)
    weights = np.full(size, 1 / max(1, size))
    return Cohort(round, everyone, weights, everyone, everyone, [everyone])


def clipped(rows: list[list[float]], start: list[float], norm: float) -> Tensor:
    matrix = torch.tensor(rows)
    cohort = cohort_of(len(rows))
    upload = Upload(matrix, torch.tensor(start).expand_as(matrix), cohort)
    return Clipping(ClipNorm(norm, Memory(0)))(upload).rows


def test_long_updates_are_scaled_down_and_short_ones_stay() -> None:
    rows = [[4.0, 5.0], [1.3, 1.1], [1.0, 1.0], [1.0, 3.0]]
    found = clipped(rows, [1.0, 1.0], norm=2.0)
    # (3, 4) has norm 5, and is scaled by 2/5; (0, 2) is just short enough.
    torch.testing.assert_close(found[0], torch.tensor([2.2, 2.6]))
    assert torch.equal(found[1:], torch.tensor(rows[1:]))


@pytest.mark.parametrize("model", ["mlp", "cnn-bn"])
def test_layers_are_clipped_by_themselves(model: str) -> None:
    """Against a loop over the network's modules; a layer that is short enough stays."""
    s = private(clients=3, model=model, clip_per="layer", noise_multiplier=0.0)
    fed, cohort, norm = s.federation, s.federation.sample(0), 0.05
    layout = fed.layout
    start = fed.download(fed.initial_row(), cohort)
    updates = torch.from_numpy(np.random.default_rng(0).normal(size=start.shape))
    first = [e for e in layout.entries if e.layer == layout.entries[0].layer]
    for entry in first:
        updates[1, entry.start : entry.stop] *= 1e-9
    updates[2] *= 1e-9
    received = fed.upload(start + updates, cohort) - start
    expected = torch.zeros_like(updates)
    layers = {entry.layer for entry in layout.entries}
    assert len(layers) == {"mlp": 2, "cnn-bn": 6}[model]
    for client in range(3):
        for layer in layers:
            of_layer = [e for e in layout.entries if e.layer == layer]
            squares = sum(
                float(updates[client, e.start : e.stop].square().sum())
                for e in of_layer
            )
            factor = min(1.0, norm / math.sqrt(len(layers)) / math.sqrt(squares))
            for e in of_layer:
                expected[client, e.start : e.stop] = (
                    factor * updates[client, e.start : e.stop]
                )
    torch.testing.assert_close(received, expected, rtol=1e-6, atol=1e-14)
    norms = torch.linalg.vector_norm(received, dim=1)
    # All layers of the first client are long: their squares add up to C².
    assert float(norms[0]) == pytest.approx(norm, rel=1e-9)
    assert float(norms[1]) < norm and float(norms[2]) < 1e-5


def test_no_update_is_longer_than_the_norm_after_an_attack() -> None:
    s = assembled(
        clients=6,
        attack="ipm",
        attackers=2,
        attack_strength=50,
        privacy="central",
        noise_multiplier=1.0,
        clip_norm=0.1,
    )
    fed, cohort = s.federation, s.federation.sample(0)
    start = fed.download(fed.initial_row(), cohort)
    trained = fed.train(start, cohort)
    before = trained.clone()
    sent = fed.upload(trained, cohort)
    assert torch.equal(trained, before), "a client keeps what it trained"
    norms = torch.linalg.vector_norm(sent - start, dim=1)
    # Also the attackers' go as far as they may.
    torch.testing.assert_close(norms, torch.full_like(norms, 0.1), rtol=1e-9, atol=0)


def private(**values: Any) -> Setup:
    return assembled(
        **{
            "clients": 6,
            "epochs": 1,
            "batch_size": 60,
            "privacy": "central",
            "noise_multiplier": 0.5,
            "clip_norm": 0.05,
            "accountant": "rdp",
            **values,
        }
    )


def after_round(s: Setup, cohort: Cohort) -> tuple[Tensor, Tensor]:
    """The global row before and after a round with this cohort."""
    state = s.method.init(s.federation)
    before = s.method.global_row(state).clone()
    state = s.method.round(s.federation, state, cohort)
    return before, s.method.global_row(state)


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_client_changes_the_sum_by_two_norms_at_most(attack: str) -> None:
    """Whatever attackers do with its update; attacks for which that is not so are
    refused.
    """
    malicious: dict[str, Any] = {}
    if attack != "none":
        malicious = {"attack": attack, "attackers": 5}
    if ATTACKS[attack].scaled:
        malicious["attack_strength"] = 4.0
    s = private(noise_multiplier=0.0, **malicious)
    fed = s.federation
    cohort = fed.sample(0)
    start = fed.download(fed.initial_row(), cohort)
    updates = torch.from_numpy(np.random.default_rng(0).normal(size=start.shape))
    sums = []
    for client in (None, *range(6)):
        trained = start + updates
        if client is not None:
            trained[client] = start[client] - updates[client]
        sums.append((fed.upload(trained, cohort) - start).sum(0))
    changes = torch.stack(sums[1:]) - sums[0]
    most = float(torch.linalg.vector_norm(changes, dim=1).max())
    noisy = s.settings.config.model_copy(update={"noise_multiplier": 1.0})
    if ATTACKS[attack].reads_others:
        assert most > 2.5 * 0.05, "if it did not, it need not be refused"
        with pytest.raises(UserError, match=f"not hold with --attack {attack}"):
            check_privacy(noisy, s.settings.options)
        return
    check_privacy(noisy, s.settings.options)
    assert 0.05 < most <= 2 * 0.05 * (1 + 1e-9)


ROUND = """
from hpcfed import options
from hpcfed.methods import fedavg
EXTENDS = fedavg
PRIVATE_MEAN = True
def round(fed, state, cohort):
    rows = fed.train(fed.download(state.w, cohort), cohort)
"""


@pytest.mark.parametrize(
    "privacy, lines, said",
    [
        ("central", "w = fed.mean(rows, cohort)", "of other rows than it uploaded"),
        (
            "central",
            "sent = fed.upload(rows, cohort); w = fed.mean(sent, cohort); "
            "w = w - fed.mean(sent, cohort)",
            "takes a second mean in a round",
        ),
        # Noise of the same round, which the difference of two means would cancel.
        (
            "central",
            "w = fed.mean(fed.upload(rows, cohort), cohort); "
            "w = w - fed.mean(fed.upload(rows, cohort), cohort)",
            "fed.mean may be called once in a round",
        ),
        # As a round of its own, with a log that knows of no other mean.
        (
            "central",
            "w = fed.mean(fed.upload(rows, cohort), cohort); "
            "again = fed.invite(cohort.round, cohort.clients); "
            "fed.download(state.w, again); "
            "w = w - fed.mean(fed.upload(rows, again), again)",
            "fed.mean may be called once in a round",
        ),
        (
            "central",
            "w = fed.mean(10 * fed.upload(rows, cohort), cohort)",
            "of other rows than it uploaded",
        ),
        (
            "central",
            "import numpy as np; from dataclasses import replace; "
            "some = replace(cohort, weights=np.arange(len(cohort.clients)) / 6); "
            "w = fed.mean(fed.upload(rows, some), some)",
            "gives fed.mean others",
        ),
        (
            "central",
            "some = fed.upload(rows[:, :9], cohort, columns=slice(0, 9)); "
            "w = fed.mean(some, cohort)",
            "sends some columns of a row",
        ),
        ("central", "w = fed.sum(rows.sum(0))", "sums over clients"),
        ("local", "w = fed.sum(rows.sum(0))", "sums over clients"),
        ("local", "w = fed.mean(rows, cohort)", "of other rows than it uploaded"),
        (
            "local",
            "w = fed.mean(fed.upload(rows, cohort), cohort); "
            "w = fed.mean(fed.upload(rows, cohort), cohort)",
            "fed.upload may be called once in a round",
        ),
        (
            "local",
            "fed.download(state.w, cohort, beside='variates'); "
            "w = fed.mean(fed.upload(rows, cohort, beside='variates'), cohort)",
            "uploads more than rows",
        ),
    ],
)
def test_a_round_that_breaks_its_promise_ends_in_one_line(
    privacy: str, lines: str, said: str, tmp_path: Path
) -> None:
    """ε counts one mean of clipped uploads a round, or one upload with noise."""
    file = tmp_path / "own.py"
    file.write_text(f"{ROUND}    {lines}\n    return fedavg.State(w)\n")
    s = private(privacy=privacy, method=str(file))
    with pytest.raises(UserError, match=said):
        after_round(s, s.federation.sample(0))


def noise_of(round: int, columns: int) -> Tensor:
    key = client_keys(0, "central noise", round, torch.zeros(1, dtype=torch.int64))
    return normal(key, columns)[0]


@pytest.mark.parametrize("drawn", [[0, 1, 2], [1, 4], [0, 1, 2, 3, 5]])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_private_mean_divides_by_the_expected_cohort(
    drawn: list[int], deterministic: bool
) -> None:
    """w + (Σ clipped updates + noise) / K for K = 3, however many were drawn and
    whatever data they have.
    """
    s = private(participation=0.5, deterministic=deterministic)
    fed = s.federation
    cohort = fed.invite(0, np.array(drawn))
    w, found = after_round(s, cohort)
    trained = fed.train(w.expand(len(drawn), -1), fed.invite(0, np.array(drawn)))
    updates = trained - w
    norms = torch.linalg.vector_norm(updates, dim=1, keepdim=True)
    assert (norms > 0.05).all()
    sum_of_clipped = (updates * (0.05 / norms)).sum(0)
    noise = 0.5 * 0.05 * noise_of(0, len(w))
    torch.testing.assert_close(
        found, w + (sum_of_clipped + noise) / 3, rtol=1e-9, atol=1e-12
    )
    torch.set_deterministic_debug_mode("default")


@pytest.mark.parametrize("method", ["fedavg", "fedper", "fedadam", "fedavgm", "pfedme"])
def test_a_round_without_clients_is_as_noisy_as_any_other(method: str) -> None:
    """Else everybody would see that nobody was drawn."""
    s = private(participation=0.5, method=method)
    fed, cohort = s.federation, s.federation.invite(0, np.empty(0, np.int64))
    first = s.method.init(fed)
    before = (first.shared if method == "fedper" else first.w).clone()
    state = s.method.round(fed, first, cohort)
    found = state.shared if method == "fedper" else state.w
    noise = 0.5 * 0.05 / 3 * noise_of(0, len(found))
    # FedAvgM's η and pFedMe's β multiply the mean update.
    steps = {"fedavg": 1.0, "fedper": 1.0, "fedavgm": 0.5, "pfedme": 2.0}
    if method in steps:
        moved = steps[method] * noise
        torch.testing.assert_close(found - before, moved, rtol=1e-9, atol=1e-12)
    assert (found != before).all()


def test_diverged_clients_count_as_updates_of_zero() -> None:
    s = private()
    fed, cohort = s.federation, s.federation.sample(0)
    w = fed.initial_row()
    start = fed.download(w, cohort)
    trained = start.clone()
    trained[:, 0] += 0.05
    trained[2, 7] = torch.nan
    row = fed.mean(fed.upload(trained, cohort), cohort)
    noise = 0.5 * 0.05 / 6 * noise_of(0, len(w))
    assert row[0] - w[0] == pytest.approx(5 * 0.05 / 6 + float(noise[0]), rel=1e-6)
    torch.testing.assert_close((row - w)[1:], noise[1:], rtol=1e-6, atol=1e-12)
    assert cohort.log.excluded == {2}


def test_noise_has_the_deviation_that_was_asked_for() -> None:
    s = private(clip_norm=2.0, noise_multiplier=3.0, participation=0.5)
    before, found = after_round(s, s.federation.invite(0, np.empty(0, np.int64)))
    noise = found - before
    assert float(noise.std()) == pytest.approx(3.0 * 2.0 / 3, rel=0.05)
    assert abs(float(noise.mean())) < 5 * 2.0 / math.sqrt(len(noise))


def test_poisson_draws_every_client_by_itself() -> None:
    s = assembled(clients=40, participation=0.1, sampling="poisson", batch_size=400)
    fed = s.federation
    drawn = [fed.sample(round).clients for round in range(400)]
    sizes = np.array([len(clients) for clients in drawn])
    # Binomial: mean 4, variance 3.6; a fixed cohort has variance 0. Empty draws, 1.5 %
    # of all, are drawn again.
    assert sizes.min() >= 1
    assert sizes.mean() == pytest.approx(4.06, abs=0.4)
    assert sizes.var() == pytest.approx(3.4, abs=0.9)
    counts = np.bincount(np.concatenate(drawn), minlength=40)
    assert counts.min() > 15 and counts.max() < 70, "all clients alike"


def test_only_private_rounds_may_be_empty() -> None:
    s = private(clients=5, cohort=1)
    sizes = [s.federation.sample(round).log.cohort_size for round in range(40)]
    assert 0 in sizes and max(sizes) > 1


def test_private_clients_weigh_alike() -> None:
    s = private(alpha=0.1)
    assert len(set(s.federation.sizes.tolist())) > 1
    weights = s.federation.sample(0).weights
    np.testing.assert_array_equal(weights, np.full(len(weights), 1 / len(weights)))


def test_noise_beside_a_noisy_count() -> None:
    """1 / 0.6² − 1 / (2 × 0.5)² = 1 / 0.75²: z = 0.6 of which the count has 1."""
    assert noise_beside_count(0.6, 0.5) == pytest.approx(0.75, rel=1e-12)


def test_the_norm_follows_its_quantile() -> None:
    """All updates longer than C, or none: C × exp(−η (b̃ − γ)), b̃ = 0 or 1 and noise."""
    for norm, share in ((1e-6, 0.0), (100.0, 1.0)):
        s = private(clip_norm=norm, clip_quantile=0.3, clip_rate=0.5)
        cohort = s.federation.sample(0)
        after_round(s, cohort)
        noise = generator(0, "clip count noise", 0).standard_normal()
        # σ_b is z = 0.5 here, more than 6 / 20: by the cohort 0.5 / 6.
        expected = norm * math.exp(-0.5 * (share + noise * 0.5 / 6 - 0.3))
        kept = s.federation.channel.memory.shared["clip_norm"]
        assert float(kept) == pytest.approx(expected, rel=1e-9)
        assert float(cohort.log.clip_norm) == norm, "the norm that this round had"


def test_clients_without_data_never_count_for_the_norm() -> None:
    """Else one more client, with data, would take all of them out of the count."""
    norms = []
    for drawn in ([], [1, 2, 3, 4, 5]):
        s = private(clip_quantile=0.5)
        s.federation.sizes[1:] = 0
        cohort = s.federation.invite(0, np.array(drawn, np.int64))
        assert not len(cohort.clients)
        after_round(s, cohort)
        norms.append(float(s.federation.channel.memory.shared["clip_norm"]))
    assert norms[0] == norms[1]


@pytest.mark.parametrize(
    "privacy, quantile", [("central", None), ("central", 0.5), ("local", None)]
)
def test_no_noise_is_clipping_alone(privacy: str, quantile: float | None) -> None:
    """w + Σ clipped updates / K, to the last bit without any noise, and no ε."""
    values = {} if quantile is None else {"clip_quantile": quantile}
    s = private(privacy=privacy, noise_multiplier=0.0, **values)
    fed, cohort = s.federation, s.federation.sample(0)
    w, found = after_round(s, cohort)
    trained = fed.train(w.expand(6, -1), fed.sample(0))
    norms = torch.linalg.vector_norm(trained - w, dim=1, keepdim=True)
    clipped = (trained - w) * (0.05 / norms).clamp(max=1)
    torch.testing.assert_close(found, w + clipped.mean(0), rtol=1e-12, atol=1e-14)
    assert math.isnan(cohort.log.epsilon) and float(cohort.log.clip_norm) == 0.05
    assert guarantee(s.settings.config).startswith("no ε holds")
    assert not any(
        "noise" in link for link in channel_parts(s.settings.config, s.settings.options)
    )
    if quantile is not None:
        kept = float(fed.channel.memory.shared["clip_norm"])
        assert kept == pytest.approx(0.05 * math.exp(-0.2 * (0 - 0.5)), rel=1e-12)


def test_clipping_alone_runs_and_says_that_no_epsilon_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--clients=4", "--rounds=2", "--model=mlp", "--epochs=1"]
    words = [*small, "--privacy=central", "--noise-multiplier=0"]
    record = read_run(started(*words, "--attack=ipm", f"--out={tmp_path / 'run'}"))
    assert np.isnan(record.rounds["epsilon"]).all()
    assert record.facts["privacy"].startswith("no ε holds")
    assert record.facts["noise_multiplier"] == 0 and "delta" not in record.facts
    capsys.readouterr()
    cli.main(["privacy", "--noise-multiplier", "0"])
    assert capsys.readouterr().out.startswith("no ε holds")
    said = mistake(capsys, "run", *words, "--delta=1e-6")
    assert "--delta changes nothing without noise" in said


def test_local_noise_is_each_clients_own() -> None:
    s = private(privacy="local", clip_norm=0.2, noise_multiplier=2.0)
    fed, cohort = s.federation, s.federation.sample(0)
    start = fed.download(fed.initial_row(), cohort)
    noise = fed.upload(start.clone(), cohort) - start
    assert float(noise.std()) == pytest.approx(0.4, rel=0.02)
    correlations = np.corrcoef(noise.numpy()) - np.eye(len(noise))
    assert np.abs(correlations).max() < 0.1
    # Noise is a client's, not a row's: alone it draws the same.
    fed = private(privacy="local", clip_norm=0.2, noise_multiplier=2.0).federation
    fed.download(fed.initial_row(), alone := fed.invite(0, np.array([3])))
    torch.testing.assert_close(
        fed.upload(start[3:4].clone(), alone)[0], start[3] + noise[3]
    )


def test_local_privacy_is_spent_by_taking_part() -> None:
    s = private(privacy="local", participation=0.5, rounds=9)
    fed = s.federation
    for round, drawn in enumerate(([0, 1], [2, 3], [0, 3])):
        cohort = fed.invite(round, np.array(drawn))
        fed.download(fed.initial_row(), cohort)
        fed.upload(fed.initial_row().expand(2, -1), cohort)
        # Nobody has taken part twice before the third round.
        times = 1 if round < 2 else 2
        expected = Accountant("rdp", "always", 1, 1, 6**-1.1).epsilon(0.5, times)
        assert cohort.log.epsilon == pytest.approx(expected, rel=1e-9)


def test_a_resumed_private_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    """Bit for bit, with a norm that follows its quantile."""
    options = {"clip_quantile": 0.5, "rounds": 4, "model": "mlp", "precision": "fp32"}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir(), cut.mkdir()
    run_setup(private(**options), whole, quiet=True)
    run_setup(private(**options), cut, quiet=True, stop=StopAfter(2))
    run_setup(private(**options, resume=str(cut), out=str(cut)), cut, quiet=True)
    same(whole, cut)
    record = read_run(whole)
    norms, epsilons = record.rounds["clip_norm"], record.rounds["epsilon"]
    assert norms[0] == pytest.approx(0.05) and len(set(norms)) == 4
    assert (np.diff(epsilons) > 0).all()
    accountant = Accountant("rdp", "poisson", 6, 6, 6**-1.1)
    assert epsilons[-1] == pytest.approx(accountant.epsilon(0.5, 4), rel=1e-6)


NOISY = ("--privacy", "central", "--noise-multiplier", "1")


@pytest.mark.parametrize("method", methods.names())
def test_methods_take_privacy_where_one_mean_is_all_they_read(method: str) -> None:
    """What each does with uploads was read in its file."""
    averaging = {
        "apfl", "ditto", "dual-lora", "fedadagrad", "fedadam", "fedavg", "fedavg-ft", "fedavgm",
        "fedbabu", "fedper", "fedprox", "fedrep", "fedsa-lora", "fedumf", "fedyogi", "ffa-lora", "lg-fedavg",
        "per-fedavg", "pfedme",
    }  # fmt: skip
    assert (method in averaging) == methods.load(method).PRIVATE_MEAN
    page = (
        Path(__file__).parents[1] / "hpcfed/federation/channel/README.md"
    ).read_text()
    said = page.split("one mean of uploads a round:")[1].split("Other methods")[0]
    assert (method in averaging) == (f"`{method}`" in said)


@pytest.mark.parametrize(
    "words, said",
    [
        (["--privacy", "central"], "needs either --noise-multiplier"),
        ([*NOISY, "--target-epsilon", 2], "needs either --noise-multiplier"),
        (
            ["--privacy", "central", "--noise-multiplier", 0.01],
            "use rdp, or at least 0.1",
        ),
        ([*NOISY, "--method", "genfed"], "method genfed does more with uploads"),
        ([*NOISY, "--method", "scaffold"], "method scaffold does more with uploads"),
        ([*NOISY, "--method", "fednova"], "method fednova does more with uploads"),
        ([*NOISY, "--method", "fedau"], "PRIVATE_MEAN = True in its file"),
        ([*NOISY, "--aggregation", "median"], "not hold with --aggregation median"),
        ([*NOISY, "--sampling", "fixed"], "--accountant pld has no answer"),
        (
            [*NOISY, "--noise-cohort", 5],
            "--noise-cohort 5 is smaller than the run's own cohort of 20",
        ),
        ([*NOISY, "--noise-cohort", 50], "cannot be sampled from --clients 20"),
        (
            [*NOISY, "--new-clients", 2, "--new-rounds", 2],
            "does not cover --new-rounds",
        ),
        (
            [*NOISY, "--cohort", 9, "--devices", "uniform", "--oversample", 1.5],
            "would not hold with --oversample",
        ),
        (
            ["--privacy=local", "--noise-multiplier=1", "--compress=topk"],
            "--compress topk would pack updates by the size of their noise",
        ),
        ([*NOISY, "--clients", 1], "δ is 1 with one client"),
        ([*NOISY, "--delta", 0], "--delta 0: must be greater than 0"),
        (["--privacy", "central", "--target-epsilon", 0], "must be greater than 0"),
        ([*NOISY, "--clip-quantile", 0], "must be greater than 0"),
        ([*NOISY, "--noise-cohort", 0], "must be greater than or equal to 1"),
        (
            [*NOISY, "--clip-per", "layer", "--clip-quantile", 0.5],
            "--clip-quantile follows the norms of whole updates",
        ),
        (
            [*NOISY, "--clip-per", "layer", "--method", "fedper"],
            "--clip-per layer needs whole rows",
        ),
        (["--sample-noise", 1], "--sample-noise needs --delta"),
        ([*NOISY, "--sample-noise", 1, "--delta", 1e-5], "accounts for one of them"),
        (
            ["--sample-noise=1", "--delta=1e-5", "--optimiser=adam"],
            "--sample-noise cannot be combined with --optimiser adam",
        ),
        (["--sample-clip", 1], "--sample-clip changes nothing without --sample-noise"),
        (["--clip-per", "layer"], "changes nothing without --privacy central"),
        ([*NOISY, "--attack", "mimic"], "central would not hold with --attack mimic"),
        (
            ["--privacy=local", "--noise-multiplier=1", "--attack=ipm"],
            "local would not hold with --attack ipm",
        ),
        (["--clip-norm", 2], "--clip-norm changes nothing without --privacy central"),
        (
            ["--privacy", "local", "--noise-multiplier", 1, "--clip-quantile", 0.5],
            "--clip-quantile changes nothing without --privacy central",
        ),
        (
            [*NOISY, "--clip-rate", 0.5],
            "changes nothing without --privacy central --cl",
        ),
    ],
)
def test_privacy_that_would_not_hold_is_refused(
    words: list[Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in mistake(capsys, "run", *words)


def test_a_round_of_ones_own_has_to_say_that_it_is_private(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where it takes the options of a method that is."""
    for options in ("", "class Options(fedprox.Options):\n    pass\n"):
        file = tmp_path / f"own{len(options)}.py"
        file.write_text(
            "from hpcfed.methods import fedavg, fedprox\nEXTENDS = fedavg\n" + options +
            "def round(fed, state, cohort):\n    return state\n"
        )  # fmt: skip
        assert "PRIVATE_MEAN = True" in mistake(capsys, "run", *NOISY, "--method", file)


def test_the_chain_and_the_guarantee_say_what_privacy_is_for() -> None:
    config = RunConfig(
        privacy="local", noise_multiplier=8.0, clip_norm=0.5, rounds=3, accountant="rdp"
    )
    assert channel_parts(config, MethodTraits())[:2] == [
        "clip: norm 0.5",
        "noise: by each client, z = 8.0",
    ]
    assert "other data of the client; every round in which" in guarantee(config)
    config = RunConfig(privacy="central", target_epsilon=3.0, clip_quantile=0.5)
    assert channel_parts(config, MethodTraits()) == [
        "clip: quantile 0.5 of norms, 1 at first",
        "aggregate: mean",
        "noise: on the mean, for ε = 3",
    ]


def test_a_run_finds_its_noise_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--clients=4", "--rounds=2", "--model=mlp", "--epochs=1"]
    privacy = ["--privacy=central", "--target-epsilon=5", "--accountant=rdp"]
    folder = started(*small, *privacy, f"--out={tmp_path / 'run'}")
    record = read_run(folder)
    assert record.config["sampling"] == "poisson"
    assert record.rounds["epsilon"][-1] == pytest.approx(5, abs=1e-3)
    assert "neighbours: one client more or less" in record.facts["privacy"]
    # Four of four clients, twice: two Gaussian releases.
    accountant = Accountant("rdp", "poisson", 4, 4, delta=4**-1.1)
    spent = accountant.epsilon(record.facts["noise_multiplier"], 2)
    assert spent == pytest.approx(5, abs=1e-3)
    # More rounds would have needed more noise from the first one on.
    capsys.readouterr()
    said = mistake(capsys, "run", "--resume", folder, "--rounds", 3)
    assert "for ε = 5 after 2 rounds, so the run cannot be made longer" in said


def test_the_command_tells_noise_and_epsilon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my.toml"
    file.write_text('clients = 10\naccountant = "rdp"\nnoise_multiplier = 3.0\n')
    cli.main(["privacy", str(file), "--rounds", "7", "--delta", "1e-5"])
    # As in the test of the formula above, with other noise.
    expected = Accountant("rdp", "poisson", 10, 10, 1e-5).epsilon(3.0, 7)
    said = capsys.readouterr().out
    assert said.startswith(
        f"ε = {expected:.3g} after 7 rounds at δ = 1e-05 (z = 3, rdp)"
    )
    assert "needs either" in mistake(capsys, "privacy", "--rounds", 7)


def test_privacy_that_comes_without_noise_is_refused() -> None:
    """One of ten clients in each of four rounds is drawn with probability 0.344."""
    accountant = Accountant("rdp", "poisson", 1, 10, delta=0.35)
    with pytest.raises(UserError, match="hardly any noise keeps within"):
        accountant.noise_multiplier(1.0, rounds=4)
    assert accountant.noise_multiplier(0.01, rounds=5) > 0
    # By rdp 0.09 would do, and the distributions of so little noise take minutes.
    accountant = Accountant("pld", "poisson", 1, 20, delta=0.037)
    with pytest.raises(UserError, match="hardly any noise keeps within"):
        accountant.noise_multiplier(100.0, rounds=2)


def test_pld_finds_far_less_noise_than_rdp() -> None:
    """Less than half, at small ε: the search goes on below."""
    noise = {}
    for kind in ("rdp", "pld"):
        accountant = Accountant(kind, "always", 1, 1, delta=1e-9)
        noise[kind] = accountant.noise_multiplier(0.01, rounds=1)
    assert noise["pld"] < noise["rdp"] / 2
    # Balle and Wang 2018, Theorem 8, at sensitivity 2: Φ(s/2 − ε/s) − e^ε Φ(−s/2 − ε/s).
    s = 2 / noise["pld"]
    phi = NormalDist().cdf
    delta = phi(s / 2 - 0.01 / s) - math.exp(0.01) * phi(-s / 2 - 0.01 / s)
    assert delta == pytest.approx(1e-9, rel=0.05)


@pytest.mark.parametrize("compress", ["topk", "randomk", "qsgd", "sign", "powersgd"])
def test_unpacked_updates_are_no_longer_than_the_norm(compress: str) -> None:
    """Error feedback and rounding make them longer; a trusted server clips again."""
    s = private(compress=compress, keep=0.1, feedback=compress == "topk")
    fed, w = s.federation, s.federation.initial_row()
    for round in range(3):
        cohort = fed.sample(round)
        start = fed.download(w, cohort)
        received = fed.upload(fed.train(start, cohort), cohort)
        norms = torch.linalg.vector_norm(received - start, dim=1)
        assert (norms <= 0.05 * (1 + 1e-9)).all()
    assert (norms > 0).all()


def test_local_noise_hides_updates_before_they_are_packed() -> None:
    s = private(privacy="local", compress="randomk", keep=0.1, feedback=False)
    names = [type(stage).__name__ for stage in s.federation.channel.stages]
    assert names == ["Clipping", "LocalNoise", "UploadCompression"]
    assert [
        link.partition(":")[0]
        for link in channel_parts(s.settings.config, s.settings.options)
    ] == [
        "clip",
        "noise",
        "compress",
        "aggregate",
    ]


def test_lost_clients_count_as_updates_of_zero() -> None:
    """Those that the virtual clock loses, too: the divisor stays the expected cohort."""
    s = private(devices="uniform", dropout_rate=0.5, noise_multiplier=1e-9)
    fed = s.federation
    for round in range(4):
        cohort = fed.sample(round)
        start = fed.download(fed.initial_row(), cohort)
        trained = start.clone()
        trained[:, 0] += 0.05
        row = fed.mean(fed.upload(trained, cohort), cohort)
        arrived = len(cohort.log.arrived)
        moved = float(row[0] - start[0, 0])
        assert moved == pytest.approx(arrived * 0.05 / 6, rel=1e-6)
    assert arrived < 6


@pytest.mark.gpu
def test_privacy_never_waits_for_the_gpu_and_draws_the_same_noise() -> None:
    def made(device: str) -> Tensor:
        memory, rows = Memory(4), torch.ones(4, 5000, device=device)
        cohort = cohort_of(4)
        cohort.in_flight.sent_row = torch.zeros(5000, device=device)
        clipping = Clipping(ClipNorm(0.5, memory))
        alone = SimpleNamespace(allreduce=lambda tensor: tensor)
        step = QuantileStep(0.5, 0.2, 0.05, 4, 0, alone)
        noise = CentralNoise(0.25, 4, 0, 1, clipping, None, step)
        local = LocalNoise(2.0, 0, 1, clipping.norm, memory, 4, None)
        upload = local(clipping(Upload(rows, torch.zeros_like(rows), cohort)))
        return noise(upload.rows.mean(0), cohort)

    on_gpu = made("cuda")  # compiles kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = made("cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(on_gpu, again)
    torch.testing.assert_close(on_gpu.cpu(), made("cpu"), rtol=1e-5, atol=1e-6)


def within_clients(**values: Any) -> Setup:
    small = {"clients": 40, "epochs": 2, "batch_size": 16, "delta": 1e-5}
    return assembled(**{**small, "sample_clip": 0.3, "sample_noise": 1.5, **values})


def dp_sgd_alone(s: Setup, client: int, round: int) -> Tensor:
    """One client's row after DP-SGD, sample by sample, as the paper's Algorithm 1."""
    config, data = s.settings.config, s.federation.training.train_data
    network = build("mlp", shape=(1, 8, 8), classes=10, seed=config.seed).double()
    key = client_keys(config.seed, "training", round, torch.tensor([client]))
    noise_keys = child_keys(key, 3)
    recipe = usual(s, round, config.epochs)
    velocity = 0.0
    for step, batch in enumerate(batches(data, client, recipe, key[0])):
        total = torch.zeros(s.federation.layout.num_columns, dtype=torch.float64)
        for sample in batch.tolist():
            one = slice(sample, sample + 1)
            network.zero_grad()
            outputs = network(data.inputs[one])
            torch.nn.functional.cross_entropy(outputs, data.targets[one]).backward()
            gradient = torch.cat([p.grad.flatten() for p in network.parameters()])
            total += gradient * min(1.0, 0.3 / float(gradient.norm()))
        noise = normal(child_keys(noise_keys, step), len(total))[0]
        weights = torch.nn.utils.parameters_to_vector(network.parameters())
        gradient = (total + 1.5 * 0.3 * noise) / len(batch)
        gradient = gradient + recipe.weight_decay * weights
        velocity = recipe.momentum * velocity + gradient
        torch.nn.utils.vector_to_parameters(
            weights - recipe.lr * velocity, network.parameters()
        )
    return torch.nn.utils.parameters_to_vector(network.parameters()).detach()


def test_dp_sgd_is_its_algorithm_sample_by_sample() -> None:
    s = within_clients(weight_decay=0.01)
    fed = s.federation
    cohort = fed.invite(0, np.array([3, 17]))
    rows = fed.train(fed.download(fed.initial_row(), cohort), cohort)
    expected = torch.stack([dp_sgd_alone(s, client, 0) for client in (3, 17)])
    torch.testing.assert_close(rows, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("nesterov", [False, True])
def test_dp_sgd_without_noise_and_limit_is_plain_sgd(nesterov: bool) -> None:
    rows = []
    for private in ({"sample_noise": 0.0, "sample_clip": 1e9}, {}):
        s = assembled(clients=40, nesterov=nesterov, weight_decay=0.01, **private)
        fed = s.federation
        cohort = fed.invite(0, np.array([3, 17]))
        rows.append(fed.train(fed.download(fed.initial_row(), cohort), cohort))
    torch.testing.assert_close(*rows, rtol=0, atol=1e-12)


def test_a_sample_changes_a_step_by_two_norms_at_most() -> None:
    """Whatever it is: also one whose gradient is not finite."""
    rows = []
    for value in (0.0, 1e6, math.inf):
        s = within_clients(
            sample_noise=0.0, epochs=1, batch_size=10_000, momentum=0.0, lr=1.0
        )
        data = s.federation.training.train_data
        data.inputs[data.index[0, 0]] = value
        cohort = s.federation.invite(0, np.array([0]))
        start = s.federation.download(s.federation.initial_row(), cohort)
        rows.append(s.federation.train(start, cohort)[0])
    changes = (torch.stack(rows) - rows[0]).norm(dim=1) * data.sizes[0]
    assert (changes[1:] > 0.1).all() and (changes <= 2 * 0.3 * (1 + 1e-9)).all()


def test_epsilon_of_samples_counts_the_epochs_that_were_trained(
    tmp_path: Path,
) -> None:
    """Two epochs in each of three rounds are six Gaussian releases; a run that was cut
    counts on where it was.
    """
    few = {
        "clients": 3,
        "rounds": 3,
        "dataset": "synthetic",
        "train_per_client": 20,
        "test_per_client": 5,
        "synthetic_shape": "1x8x8",
    }
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir(), cut.mkdir()
    run_setup(within_clients(**few), whole, quiet=True)
    run_setup(within_clients(**few), cut, quiet=True, stop=StopAfter(2))
    run_setup(within_clients(**few, resume=str(cut), out=str(cut)), cut, quiet=True)
    same(whole, cut)
    accountant = Accountant("pld", "always", 1, 1, 1e-5)
    expected = [accountant.epsilon(1.5, releases) for releases in (2, 4, 6)]
    record = read_run(whole)
    assert record.rounds["epsilon"].tolist() == pytest.approx(expected, rel=1e-9)
    assert "another sample in its place" in record.facts["privacy"]


@pytest.mark.parametrize(
    "values, said",
    [
        ({"model": "cnn-bn"}, "batch norm .* mixes the samples of a minibatch"),
        (
            {"method": "fedprox"},
            "plain local SGD, but clients of this method pull rows",
        ),
        ({"method": "scaffold"}, "clients of this method correct gradients"),
        ({"method": "clustered-fedavg"}, "looks at clients' data"),
        ({"lora": 2, "send_frozen": True}, r"frozen parameters \(fc1.base.weight\)"),
        ({"lora": 2, "method": "fedex-lora"}, "leave out --send-frozen, and methods"),
    ],
)
def test_dp_sgd_that_would_not_hold_ends_in_one_line(
    values: dict[str, Any], said: str
) -> None:
    if values.get("method") == "scaffold":
        values = {**values, "momentum": 0.0}
    with pytest.raises(UserError, match=said):
        s = within_clients(**values)
        state = s.method.init(s.federation)
        s.method.round(s.federation, state, s.federation.sample(0))


def test_dp_sgd_refuses_buffers_before_frozen_parameters() -> None:
    network = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    network[0].requires_grad_(False)
    network.register_buffer("seen", torch.zeros(3))
    engine: Any = SimpleNamespace(layout=Layout.of(network, send_frozen=True))
    with pytest.raises(UserError, match="this network has buffers that training"):
        PrivateSteps(engine, network, clip=1.0, multiplier=1.0, count=lambda *_: None)


def test_a_release_counts_once_and_in_order() -> None:
    count = noises.OnceARound(3, "no more")
    for round, allowed in ((0, True), (0, False), (2, True), (1, False), (3, False)):
        if allowed:
            count(round)
            continue
        with pytest.raises(UserError, match="no more"):
            count(round)
    with pytest.raises(UserError, match="no more"):
        noises.OnceARound(3, "no more")(-1)


@pytest.mark.parametrize("numbers", [1, 1300, 2**22])
def test_local_noise_is_the_same_however_much_is_drawn_at_a_time(
    numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noises, "NOISE_NUMBERS", numbers)
    s = private(privacy="local", clip_norm=2.0, noise_multiplier=0.5)
    fed, cohort = s.federation, s.federation.sample(0)
    start = fed.download(fed.initial_row(), cohort).clone()
    shapes: list[int] = []

    def noting(own: Tensor, columns: int) -> Tensor:
        shapes.append(len(own) * columns)
        return normal(own, columns)

    monkeypatch.setattr(noises.randomness, "normal", noting)
    received = fed.upload(start.clone(), cohort)
    # As few at a time as may be, and all of them.
    assert max(shapes) <= max(numbers, start.shape[1])
    assert sum(shapes) == start.numel()
    ids = torch.from_numpy(cohort.clients)
    drawn = normal(
        client_keys(s.settings.config.seed, "local noise", 0, ids), start.shape[1]
    )
    torch.testing.assert_close(received, start + drawn, rtol=1e-12, atol=1e-12)


def test_a_method_that_sends_nothing_gets_no_local_noise() -> None:
    """And its clients' rows have no columns."""
    s = private(privacy="local", clip_norm=2.0, noise_multiplier=0.5)
    cohort = s.federation.sample(0)
    norm = ClipNorm(2.0, Memory(6))
    noise = LocalNoise(0.5, 0, 3, norm, Memory(6), len(cohort.clients), None)
    nothing = torch.empty(len(cohort.clients), 0)
    assert noise(Upload(nothing, nothing, cohort)).rows.shape == nothing.shape


def test_updates_of_norm_c_are_within_it() -> None:
    s = private(clip_norm=2.0, noise_multiplier=0.5)
    cohort = s.federation.sample(0)
    members = len(cohort.clients)
    clipping = Clipping(ClipNorm(2.0, Memory(members)))
    start = torch.zeros(members, 2, dtype=torch.float64)
    rows = start.clone()
    rows[:, 0] = torch.linspace(0, 4, members)
    rows[0, 0], rows[1, 0] = 2.0, 2.0 + 1e-9
    clipping(Upload(rows, start, cohort))
    within = rows[:, 0] <= 2
    assert clipping.within(cohort).tolist() == within.tolist()
    assert within.tolist()[:2] == [True, False]


def test_a_private_mean_is_of_updates_from_one_row() -> None:
    s = private(clip_norm=2.0, noise_multiplier=0.5)
    fed, cohort = s.federation, s.federation.sample(0).equally()
    row = fed.initial_row()
    with pytest.raises(UserError, match="needs a method that sends one row to all"):
        noises._start(cohort, row)
    cohort.in_flight.sent_row = row
    assert noises._start(cohort, row) is row
    with pytest.raises(UserError, match="needs a method that sends one row to all"):
        noises._start(cohort, row[:-1])


@pytest.mark.parametrize("delta", [1e-9, 1e-5, 0.56])
def test_epsilon_of_hardly_any_noise_is_a_close_bound(delta: float) -> None:
    """Tiny noise made the closed form overflow, which a run printed as a warning."""
    exact = accountant._epsilon_of_gaussian(accountant.HARDLY_ANY, delta)
    bound = accountant._epsilon_of_gaussian(0.999 * accountant.HARDLY_ANY, delta)
    scaled = 0.999**2 * bound
    assert exact <= scaled * (1 + 1e-9) and scaled <= exact * (1 + 2e-5)
    assert accountant._epsilon_of_gaussian(1e-37, delta) == pytest.approx(
        0.5e74, rel=1e-12
    )
