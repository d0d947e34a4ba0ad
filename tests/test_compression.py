"""Compressors by hand, what error feedback keeps, and bytes as they would be sent."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hpcfed.experiment.run import run_setup
from hpcfed.federation.channel.compressors import (
    QSGD,
    Compressor,
    RandomK,
    ScaledSign,
    TopK,
    Updates,
    _uniform,
    num_kept,
)
from hpcfed.federation.channel.powersgd import PowerSGD, orthonormal
from hpcfed.federation.cohort import Sent
from hpcfed.federation.log import RoundLog
from hpcfed.models.layout import Entry
from hpcfed.runtime.randomness import bits, client_keys
from tests.federations import assembled, rounds, traffic
from tests.runs import mistake, same
from tests.stopped_run import StopAfter

ENTRIES = (
    Entry("fc.weight", (6, 8), 0, 48, True),
    Entry("fc.bias", (6,), 48, 54, True),
    Entry("small.weight", (1, 6), 54, 60, True),
)
"""A matrix, a vector, and a matrix that is smaller than its factors."""


def keys(members: int, round: int = 0) -> Tensor:
    return client_keys(3, "a test", round, torch.arange(members))


def updates(values: list[list[float]], sent: list[list[bool]] | None = None) -> Updates:
    rows = torch.tensor(values, dtype=torch.float32)
    mask = None if sent is None else torch.tensor(sent)
    return Updates(rows, keys(len(rows)), mask)


def drawn(members: int = 5, columns: int = 60, **options: Any) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(members, columns, generator=generator, **options)


def test_top_k_keeps_the_largest_changes() -> None:
    given = updates([[1, -5, 2, 3, 0, 0, 0, 0], [0, 0, 0, -1, 0, 0.5, 0, 0]])
    packed = TopK(0.25)(given)
    assert packed.values.tolist() == [
        [0, -5, 0, 3, 0, 0, 0, 0],
        [0, 0, 0, -1, 0, 0.5, 0, 0],
    ]
    # Two float32, and one byte of bits for eight columns in place of two indices.
    assert packed.size == 2 * 4 + 1


def test_top_k_counts_indices_bits_or_all_columns_whichever_is_least() -> None:
    row = updates([[float(i) for i in range(1000)]])
    # 10 values with 40 bytes of indices, against 125 bytes of bits.
    assert TopK(0.01)(row).size == 10 * 4 + 40
    assert TopK(0.5)(row).size == 500 * 4 + 125
    assert TopK(1.0)(row).size == 1000 * 4
    assert torch.equal(TopK(1.0)(row).values, row.values)
    # 990 values with bits of 125 bytes are more than all 1000: all are sent, and arrive.
    nearly = TopK(0.99)(row)
    assert nearly.size == 1000 * 4 and torch.equal(nearly.values, row.values)


def test_what_is_paid_for_arrives_for_each_member() -> None:
    """The first packs half of its columns. The second sends two: one number and the
    seed would be more.
    """
    rows = drawn(2, 64)
    sent = torch.ones(2, 64, dtype=torch.bool)
    sent[1, 2:] = False
    packed = RandomK(0.5, unbiased=True)(Updates(rows, keys(2), sent))
    assert isinstance(packed.size, Tensor)
    assert packed.size.tolist() == [32 * 4 + 8, 2 * 4]
    assert torch.equal(packed.values[1, :2], rows[1, :2])
    assert not packed.values[1, 2:].any()
    assert int(packed.values[0].count_nonzero()) == 32


def test_roundings_do_not_choose_among_columns_that_tie() -> None:
    """Another number of ranks rounds sums differently."""
    rows = torch.full((50, 1000), 0.3, dtype=torch.float64)
    noise = 1e-15 * drawn(50, 1000, dtype=torch.float64)
    packed = TopK(0.1)(Updates(rows + noise, keys(50)))
    assert packed.values[:, :100].ne(0).all() and packed.values[:, 100:].eq(0).all()


def test_k_is_the_share_rounded_up() -> None:
    assert num_kept(100, 0.07) == 7
    assert num_kept(101, 0.07) == 8
    assert num_kept(3, 0.001) == 1
    assert num_kept(torch.tensor([100, 101, 0]), 0.07).tolist() == [7, 8, 0]


def test_top_k_counts_only_columns_that_are_sent() -> None:
    given = updates(
        [[9, 1, 2, 3], [0, 4, 0, 5], [0, 0, 0, 0]],
        [[True] * 4, [False, True, False, True], [False] * 4],
    )
    packed = TopK(0.5)(given)
    assert packed.values.tolist() == [[9, 0, 0, 3], [0, 0, 0, 5], [0, 0, 0, 0]]
    assert isinstance(packed.size, Tensor)
    assert packed.size.tolist() == [2 * 4 + 1, 1 * 4 + 1, 0]


def test_random_k_sends_values_and_a_seed() -> None:
    rows = drawn(columns=1000)
    packed = RandomK(0.02, unbiased=False)(Updates(rows, keys(5)))
    kept = packed.values != 0
    assert kept.sum(1).tolist() == [20] * 5
    assert torch.equal(packed.values[kept], rows[kept])
    assert packed.size == 20 * 4 + 8
    assert len({tuple(row.nonzero().flatten().tolist()) for row in kept}) == 5
    again = RandomK(0.02, unbiased=False)(Updates(rows, keys(5, round=1)))
    assert not torch.equal(again.values, packed.values), "drawn anew in each round"


def test_random_k_draws_among_columns_that_are_sent() -> None:
    rows = torch.ones(200, 8)
    sent = torch.ones(200, 8, dtype=torch.bool)
    sent[:, [1, 3]] = False
    packed = RandomK(0.5, unbiased=True)(Updates(rows.where(sent, 0), keys(200), sent))
    # Three of six columns, doubled.
    assert packed.values.sum(1).eq(6).all()
    assert packed.values.max() == 2
    assert not packed.values[:, [1, 3]].any()
    assert (packed.values.sum(0)[[0, 2, 4, 5, 6, 7]] > 0).all()


def test_qsgd_rounds_to_neighbouring_levels_of_the_norm() -> None:
    # The norm is 5, so levels are 0, 1.25, 2.5, 3.75 and 5.
    rows = torch.tensor([[3.0, -4.0]]).repeat(4000, 1)
    packed = QSGD(levels=4, bucket=2)(Updates(rows, keys(4000)))
    assert set(packed.values[:, 0].tolist()) == {2.5, 3.75}
    assert set(packed.values[:, 1].tolist()) == {-3.75, -5.0}
    # 3 is 2.4 levels: up with probability 0.4. Five standard deviations of the share.
    share = packed.values[:, 0].eq(3.75).double().mean()
    assert abs(float(share) - 0.4) < 5 * (0.4 * 0.6 / 4000) ** 0.5


@pytest.mark.parametrize("count", [1, 5, 6])
def test_two_numbers_come_from_disjoint_parts_of_each_hash(count: int) -> None:
    hashes = [[int(n) % 2**64 for n in own] for own in bits(keys(3), (count + 1) // 2)]
    expected = [
        [(number >> shift) % 2**24 / 2**24 for shift in (40, 16) for number in own][
            :count
        ]
        for own in hashes
    ]
    assert _uniform(keys(3), count).tolist() == expected


def test_qsgd_is_unbiased() -> None:
    row = drawn(1, 96, dtype=torch.float64)
    packed = QSGD(levels=3, bucket=32)(Updates(row.expand(5000, -1), keys(5000)))
    error = packed.values.mean(0) - row[0]
    step = row.view(3, 32).norm(dim=1).repeat_interleave(32) / 3
    above = (row[0].abs() / step).frac()
    variance = step.square() * above * (1 - above)
    # Bernstein's inequality: by chance, one of 96 columns is beyond it once in 10,000
    # times. A float32 norm is 1e-7 off.
    log = math.log(2 * 96 * 10_000)
    bound = (2 * variance * log / 5000).sqrt() + 2 * step * log / (3 * 5000)
    assert (error.abs() <= bound + 1e-6).all()
    assert (bound < 0.2).all()


def test_qsgd_sends_a_norm_per_bucket_and_the_bits_of_levels() -> None:
    # 2 × 7 + 1 = 15 values take 4 bits; 10 columns are buckets of 4, 4 and 2.
    assert QSGD(levels=7, bucket=4)(Updates(drawn(2, 10), keys(2))).size == 3 * 4 + 5
    assert QSGD(levels=8, bucket=4).bits == 5
    sent = torch.tensor([[True, True] + [False] * 8, [False] * 10])
    rows = drawn(2, 10).where(sent, 0)
    packed = QSGD(levels=7, bucket=4)(Updates(rows, keys(2), sent))
    assert isinstance(packed.size, Tensor)
    assert packed.size.tolist() == [4 + 1, 0]
    assert not packed.values[:, 2:].any()


def test_qsgd_without_bias_off_is_never_further_than_nothing() -> None:
    """One level for a large bucket: unbiased, the error is far above the update."""
    given = Updates(drawn(20, 512), keys(20))
    wild = QSGD(levels=1, bucket=512)(given).values - given.values
    tame = QSGD(levels=1, bucket=512, unbiased=False)(given).values - given.values
    assert (wild.norm(dim=1) > 2 * given.values.norm(dim=1)).all()
    assert (tame.norm(dim=1) < given.values.norm(dim=1)).all()


def test_qsgd_without_bias_off_is_the_nearest_multiple_in_every_bucket() -> None:
    given = Updates(drawn(3, 10, dtype=torch.float64), keys(3))
    plain = QSGD(levels=3, bucket=4)(given).values
    found = QSGD(levels=3, bucket=4, unbiased=False)(given).values
    for at in range(3):
        for bucket in (slice(0, 4), slice(4, 8), slice(8, 10)):
            x, v = given.values[at, bucket], plain[at, bucket]
            nearest = v * float(x @ v) / float(v @ v)
            torch.testing.assert_close(found[at, bucket], nearest)


def test_signs_are_scaled_by_the_mean_size_of_their_bucket() -> None:
    given = updates([[1, -3, 0, 8, -2]])
    packed = ScaledSign(bucket=2)(given)
    assert packed.values.tolist() == [[2, -2, 4, 4, -2]]
    assert packed.size == 3 * 4 + 1
    masked = updates([[1, 0, 0, 8, -2]], [[True, False, False, True, True]])
    packed = ScaledSign(bucket=2)(masked)
    assert packed.values.tolist() == [[1, 0, 0, 8, -2]]
    assert isinstance(packed.size, Tensor)
    assert packed.size.tolist() == [3 * 4 + 1]


def low_rank_updates(members: int, rank: int) -> Tensor:
    rows = drawn(members, 60, dtype=torch.float64)
    tall = drawn(members, 6 * rank, dtype=torch.float64).view(members, 6, rank)
    wide = drawn(members, 8 * rank, dtype=torch.float64).view(members, rank, 8)
    rows[:, :48] = (tall @ wide).flatten(1)
    return rows


def started(compressor: Compressor, rows: Tensor) -> Updates:
    warm = rows.new_zeros(len(rows), compressor.warm_columns(rows.shape[1]))
    return Updates(rows, keys(len(rows)), warm=warm)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_power_sgd_is_exact_for_updates_of_its_rank(rank: int) -> None:
    compressor = PowerSGD(ENTRIES, rank)
    rows = low_rank_updates(4, rank)
    packed = compressor(started(compressor, rows))
    torch.testing.assert_close(packed.values, rows, rtol=1e-10, atol=1e-10)
    # P has 6 rows, Q has 8; 6 + 6 other columns travel as they are.
    assert packed.size == ((6 + 8) * rank + 12) * 8


def test_power_sgd_comes_near_to_the_best_rank_by_its_warm_start() -> None:
    compressor = PowerSGD(ENTRIES, 2)
    rows = drawn(4, 60, dtype=torch.float64)
    given, errors = started(compressor, rows), []
    for _ in range(60):
        packed = compressor(given)
        errors.append((packed.values - rows).norm(dim=1))
        given = given._replace(warm=packed.warm)
    sizes = torch.linalg.svdvals(rows[:, :48].view(4, 6, 8))
    best = sizes[:, 2:].norm(dim=1)
    assert (errors[0] > 1.01 * best).all()
    torch.testing.assert_close(errors[-1], best, rtol=1e-3, atol=0)


def test_power_sgd_sends_matrices_that_are_sent() -> None:
    compressor = PowerSGD(ENTRIES, 2)
    rows = low_rank_updates(3, 2)
    sent = torch.ones(3, 60, dtype=torch.bool)
    sent[1, :48] = False
    # Ten columns are fewer than the 28 numbers of both factors.
    sent[2, 10:48] = False
    rows = rows.where(sent, 0)
    packed = compressor(started(compressor, rows)._replace(sent=sent))
    torch.testing.assert_close(packed.values, rows, rtol=1e-10, atol=1e-10)
    assert isinstance(packed.size, Tensor)
    assert packed.size.tolist() == [(28 + 12) * 8, 12 * 8, (10 + 12) * 8]
    # Who has not packed a matrix goes on from the Q that it had.
    assert packed.warm is not None
    assert packed.warm.any(1).tolist() == [True, False, False]


def test_columns_at_right_angles_bear_those_that_depend_on_others() -> None:
    columns = drawn(3, 7 * 4, dtype=torch.float64).view(3, 7, 4)
    columns[0, :, 1] = -3 * columns[0, :, 0]
    columns[1] = 0
    products = orthonormal(columns)
    products = products.mT @ products
    expected = torch.eye(4, dtype=torch.float64).repeat(3, 1, 1)
    expected[0, 1, 1] = 0
    expected[1] = 0
    torch.testing.assert_close(products, expected, rtol=0, atol=1e-12)


COMPRESSORS: list[Compressor] = [
    TopK(0.1),
    RandomK(0.1, unbiased=False),
    QSGD(3, bucket=16),
    ScaledSign(bucket=16),
    PowerSGD(ENTRIES, 2),
]


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=lambda c: type(c).__name__)
def test_each_member_is_packed_as_if_alone(compressor: Compressor) -> None:
    """So the number of ranks, and who is in the cohort, changes nothing."""
    given = started(compressor, drawn(4, 60, dtype=torch.float64))
    together = compressor(given)
    assert given.warm is not None
    for member in range(4):
        row = slice(member, member + 1)
        alone = Updates(given.values[row], given.keys[row], warm=given.warm[row])
        packed = compressor(alone)
        assert torch.equal(packed.values, together.values[row])
        assert packed.size == together.size


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=lambda c: type(c).__name__)
def test_no_update_arrives_as_none(compressor: Compressor) -> None:
    packed = compressor(started(compressor, torch.zeros(2, 60)))
    assert torch.equal(packed.values, torch.zeros(2, 60))


KINDS = ("topk", "randomk", "qsgd", "sign", "powersgd")
PACKED: dict[str, Any] = {"clients": 5, "epochs": 1, "batch_size": 60, "keep": 0.1}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "qsgd"])
def test_error_feedback_loses_nothing(kind: str) -> None:
    """What arrived in all rounds and what is left are all updates."""
    fed = assembled(compress=kind, participation=0.6, **PACKED).federation
    width = len(fed.initial_row())
    received, sent = torch.zeros(2, 5, width, dtype=torch.float64)
    for round in range(6):
        cohort = fed.sample(round)
        start = fed.download(fed.initial_row(), cohort)
        rows = start + drawn(len(start), width, dtype=torch.float64) * (round + 1)
        before = rows.clone()
        received[cohort.here] += fed.upload(rows, cohort) - start
        sent[cohort.here] += rows - start
        assert torch.equal(rows, before), "a client keeps what it trained"
    left = fed.channel.memory.rows["residual-0"]
    assert left.norm() > 1
    torch.testing.assert_close(received + left, sent, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_ef21_is_its_algorithm(kind: str) -> None:
    """gᵢ ← gᵢ + C(uᵢ − gᵢ), client by client, in plain torch; the server's mean is that
    of g. Of an update that stays, less is left in every round.
    """
    s = assembled(compress=kind, ef21=True, participation=0.6, **PACKED)
    fed = s.federation
    [stage] = fed.channel.stages
    width = len(fed.initial_row())
    estimates = torch.zeros(5, width, dtype=torch.float64)
    columns = stage.compressor.warm_columns(width)
    warm = torch.zeros(5, columns, dtype=torch.float64)
    wanted = drawn(5, width, dtype=torch.float64)
    left = [wanted.norm(dim=1)]
    for round in range(6):
        cohort = fed.sample(round)
        start = fed.download(fed.initial_row(), cohort)
        rows = start + wanted[cohort.here]
        received = fed.upload(rows, cohort)
        for place, client in enumerate(cohort.clients.tolist()):
            key = client_keys(0, "compression, stream 0", round, torch.tensor([client]))
            difference = rows[place] - start[place] - estimates[client]
            packed = stage.compressor(
                Updates(difference[None], key, warm=warm[client : client + 1])
            )
            estimates[client] += packed.values[0]
            if packed.warm is not None:
                warm[client] = packed.warm[0]
        expected = start + estimates[cohort.here]
        torch.testing.assert_close(received, expected, rtol=1e-12, atol=1e-12)
        mean = fed.mean(received, cohort)
        by_hand = torch.from_numpy(cohort.weights) @ expected
        torch.testing.assert_close(mean, by_hand, rtol=1e-12, atol=1e-12)
        left.append((wanted - estimates).norm(dim=1))
    assert (left[-1] < left[0]).all()
    assert "residual-0" not in fed.channel.memory.rows
    kept = fed.channel.memory.rows["estimate-0"]
    torch.testing.assert_close(kept, estimates, rtol=1e-12, atol=1e-12)


def test_ef21_bears_clients_that_diverge_and_columns_that_stay() -> None:
    fed = assembled(compress="topk", ef21=True, **PACKED).federation
    width = len(fed.initial_row())
    group_of = torch.zeros(width, dtype=torch.int64)
    group_of[20:] = 1
    for round, groups in enumerate([[True, True], [True, False]]):
        cohort = fed.sample(round)
        start = fed.download(fed.initial_row(), cohort)
        rows = start + drawn(5, width, dtype=torch.float64)
        if round:
            before = fed.channel.memory.rows["estimate-0"].clone()
            rows[:, 20:] = torch.nan
            rows[2, 3] = torch.nan
        sent = Sent(torch.tensor([groups]).expand(5, 2), group_of)
        arrived = fed.upload(rows, cohort, sent) - start
    after = fed.channel.memory.rows["estimate-0"]
    assert torch.equal(after[:, 20:], before[:, 20:])
    assert torch.equal(after[2], before[2]) and arrived[2].isnan().any()
    sound = [0, 1, 3, 4]
    torch.testing.assert_close(arrived[sound, :20], after[sound, :20])
    assert not arrived[sound, 20:].any()


def test_without_feedback_nothing_is_kept() -> None:
    for kind in KINDS:
        # QSGD has none to leave out.
        off = {} if kind == "qsgd" else {"feedback": False}
        fed = assembled(compress=kind, **off, **PACKED).federation
        cohort = fed.sample(0)
        start = fed.download(fed.initial_row(), cohort)
        fed.upload(start + 1, cohort)
        assert "residual-0" not in fed.channel.memory.rows


def test_columns_that_are_not_sent_keep_their_residual() -> None:
    fed = assembled(compress="topk", **PACKED).federation
    width = len(fed.initial_row())
    group_of = torch.zeros(width, dtype=torch.int64)
    group_of[20:] = 1
    for round, groups in enumerate([[True, True], [True, False]]):
        cohort = fed.sample(round)
        start = fed.download(fed.initial_row(), cohort)
        rows = start + drawn(5, width, dtype=torch.float64)
        # What is not sent may be anything.
        rows[:, 20:] = rows[:, 20:] if groups[1] else torch.nan
        sent = Sent(torch.tensor([groups]).expand(5, 2), group_of)
        arrived = fed.upload(rows, cohort, sent) - start
        if not round:
            left = fed.channel.memory.rows["residual-0"].clone()
    assert torch.equal(fed.channel.memory.rows["residual-0"][:, 20:], left[:, 20:])
    # A tenth of 20 columns: 16 bytes of values, and 3 of bits.
    assert (arrived != 0).sum(1).tolist() == [2] * 5
    assert int(cohort.log.bytes_up_here) == 5 * (16 + 3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_that_diverged_is_left_out_and_keeps_its_residual(kind: str) -> None:
    fed = assembled(compress=kind, **PACKED).federation
    for round in range(2):
        cohort = fed.sample(round)
        start = fed.download(fed.initial_row(), cohort)
        rows = start + drawn(5, start.shape[1], dtype=torch.float64)
        before = {name: kept.clone() for name, kept in fed.channel.memory.rows.items()}
        rows[2, 7] = torch.nan if round else rows[2, 7]
        arrived = fed.upload(rows, cohort)
    row = fed.mean(arrived, cohort)
    assert row.isfinite().all()
    assert cohort.log.excluded == {2}
    for name, kept in fed.channel.memory.rows.items():
        assert torch.equal(kept[2], before[name][2])
        assert not torch.equal(kept[1], before[name][1])


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_a_round_are_those_of_its_packed_uploads(kind: str) -> None:
    """A row has 64 × 64 + 64 + 64 × 10 + 10 = 4810 columns of 8 bytes."""
    logs: list[RoundLog] = []
    setup = assembled(compress=kind, rounds=1, **PACKED)
    list(rounds(setup, 1, logs))
    low_rank = (64 + 64) * 2 + (64 + 10) * 2 + 64 + 10
    each = {
        "topk": 481 * 8 + 602,  # bits of 4810 columns take less than 481 indices
        "randomk": 481 * 8 + 8,
        "qsgd": 10 * 4 + 3007,  # 4810 × 5 bits
        "sign": 10 * 4 + 602,
        "powersgd": low_rank * 8,
    }
    assert traffic(logs) == (5 * each[kind], 0, 5 * 4810 * 8)


def test_a_packed_download_is_a_step_from_what_clients_have() -> None:
    """By hand: h ← h + C(w − h), and what the server could not send stays in w."""
    fed = assembled(compress_down="topk", **PACKED).federation
    first = fed.initial_row()
    cohort = fed.sample(0)
    assert torch.equal(fed.download(first, cohort)[0], first)
    w = first.clone()
    # Of 4810 columns 481 are sent.
    w[:600] += torch.linspace(3, 1, 600, dtype=w.dtype)
    cohort = fed.sample(1)
    h = fed.download(w, cohort)
    assert torch.equal(h[0, :481], w[:481])
    assert torch.equal(h[0, 481:], first[481:])
    # The server adds the clients' updates to its own row.
    torch.testing.assert_close(
        fed.upload(h + 1, cohort), (w + 1).expand(5, -1), rtol=1e-12, atol=1e-12
    )
    # Nothing new: the rest comes now.
    torch.testing.assert_close(fed.download(w, fed.sample(2))[0], w)


def test_who_has_missed_downloads_is_sent_all_of_them_or_a_whole_row() -> None:
    fed = assembled(compress_down="sign", **PACKED).federation
    dense, packed = 4810 * 8, 10 * 4 + 602
    row = fed.initial_row()

    def sent(round: int, *clients: int) -> int:
        cohort = fed.invite(round, np.array(clients))
        fed.download(row + round, cohort)
        return cohort.log.bytes_down

    assert sent(0, 0, 1) == 2 * dense
    assert sent(1, 0) == packed
    assert sent(2, 0, 1) == packed + 2 * packed
    assert sent(3, 1, 2) == packed + dense
    for round in range(4, 70):
        assert sent(round, 1) == packed
    # Client 0 has missed 68 downloads, which are more than a row.
    assert 68 * packed > dense
    assert sent(70, 0) == dense


def test_clients_with_rows_of_their_own_have_references_of_their_own() -> None:
    fed = assembled(compress_down="topk", **PACKED).federation
    width = len(fed.initial_row())
    rows = drawn(5, width, dtype=torch.float64)
    cohort = fed.invite(0, np.array([1, 3]))
    assert torch.equal(fed.download(rows[[1, 3]], cohort), rows[[1, 3]])
    cohort = fed.invite(1, np.array([0, 3]))
    moved = rows[[0, 3]] * 1.7 + 0.1
    moved[:, 7] += 5
    h = fed.download(moved, cohort)
    assert torch.equal(h[0], moved[0]), "its first row comes as it is"
    changed = (h[1] != rows[3]).nonzero().flatten()
    assert len(changed) == 481 and 7 in changed
    assert cohort.log.bytes_down == 4810 * 8 + 481 * 8 + 602
    # To the last bit: a rounding would have a vote in --aggregation sign-majority.
    assert torch.equal(fed.upload(h, cohort), moved)


SENT_COLUMNS = [slice(None, 9), torch.tensor([1, 5, 7])]


@pytest.mark.parametrize("columns", SENT_COLUMNS, ids=["slice", "positions"])
def test_a_method_may_send_some_columns_of_what_it_was_sent(
    columns: slice | Tensor,
) -> None:
    """The server adds their updates to its own row, not to what a packed download has
    left of it; models and what goes beside them each by themselves.
    """
    fed = assembled(clients=3, compress_down="topk", keep=0.01).federation
    first = fed.initial_row()
    fed.download(first, cohort := fed.sample(0), beside="variates")
    fed.download(first, cohort)
    w, c = first + torch.randn_like(first), first + torch.randn_like(first)
    cohort = fed.sample(1)
    variates = fed.download(c, cohort, beside="variates")[:, columns]
    rows = fed.download(w, cohort)[:, columns]
    assert not torch.equal(rows[0], w[columns]), "nothing was left behind"
    uploads = fed.upload(rows + 1, cohort, columns=columns)
    beside = fed.upload(variates - 2, cohort, columns=columns, beside="variates")
    exactly = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(uploads, (w[columns] + 1).expand(3, -1), **exactly)
    torch.testing.assert_close(beside, (c[columns] - 2).expand(3, -1), **exactly)
    assert cohort.log.update_norms is not None
    norms = torch.full((3,), uploads.shape[1] ** 0.5, dtype=torch.float64)
    torch.testing.assert_close(cohort.log.update_norms, norms, rtol=1e-6, atol=0)


@pytest.mark.parametrize("options", [{"compress_down": "topk"}, {}])
def test_an_upload_of_some_columns_says_which(options: dict[str, Any]) -> None:
    fed = assembled(clients=3, **options).federation
    rows = fed.download(fed.initial_row(), cohort := fed.sample(0))
    with pytest.raises(ValueError, match="say which columns are sent"):
        fed.upload(rows[:, :5], cohort)
    # Something else than what was sent has a name of its own.
    assert torch.equal(fed.upload(rows[:, :5], cohort, beside="heads"), rows[:, :5])


def test_scaffold_has_memories_for_rows_and_for_variates() -> None:
    setup = assembled(
        method="scaffold", compress="topk", compress_down="topk", **PACKED
    )
    list(rounds(setup, 3))
    memory = setup.federation.channel.memory
    assert {"residual-0", "residual-1"} == memory.rows.keys()
    assert {"reference-0", "reference-1"} <= memory.shared.keys()


def test_the_majority_of_signs_decides_and_the_mean_size_is_how_far() -> None:
    fed = assembled(aggregation="sign-majority", clients=4).federation
    cohort = replace(fed.sample(0), weights=np.array([0.1, 0.2, 0.3, 0.4]))
    w = fed.initial_row()
    start = fed.download(w, cohort)
    updates = torch.zeros_like(start)
    # Two of three that have moved it, whatever they weigh; a tie; nobody; all.
    updates[:, 0] = torch.tensor([1.0, 1.0, -5.0, 0.0])
    updates[:, 1] = torch.tensor([1.0, -1.0, 1.0, -1.0])
    updates[:, 3] = torch.tensor([-1.0, -2.0, -3.0, -4.0])
    row = fed.mean(fed.upload(start + updates, cohort), cohort)
    expected = w.clone()
    expected[0] += 0.1 * 1 + 0.2 * 1 + 0.3 * 5
    expected[3] -= 0.1 * 1 + 0.2 * 2 + 0.3 * 3 + 0.4 * 4
    torch.testing.assert_close(row, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", ["fedavg", "genefl", "pfedhn", "fedper"])
def test_a_packed_run_resumes_bit_for_bit(method: str, tmp_path: Path) -> None:
    own = {"pfedhn": {"inner_steps": 2, "hn_hidden": 3}}
    options: dict[str, Any] = {
        **PACKED,
        "method": method,
        "compress": "topk" if method == "fedper" else "powersgd",
        "compress_down": "randomk",
        "participation": 0.6,
        "rounds": 4,
        **own.get(method, {}),
    }
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    run_setup(assembled(**options), whole, quiet=True)
    run_setup(assembled(**options), cut, quiet=True, stop=StopAfter(2))
    run_setup(assembled(**options, resume=str(cut), out=str(cut)), cut, quiet=True)
    same(whole, cut)


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_upload_takes_its_time(kind: str) -> None:
    """A tenth of a second per byte, and nothing else: so seconds are bytes."""
    links = {"speed_spread": 0, "link_spread": 0, "downlink": 1e9, "uplink": 10}
    setup = assembled(
        compress=kind, devices="lognormal", step_seconds=1e-9, **links, **PACKED
    )
    logs: list[RoundLog] = []
    list(rounds(setup, 1, logs))
    row = setup.federation.initial_row()
    assert setup.federation.channel.upload_bytes is not None
    each = setup.federation.channel.upload_bytes(row)
    assert logs[0].bytes_up == 5 * each
    assert logs[0].virtual_seconds == pytest.approx(each / 10, rel=1e-6)


def test_nothing_is_packed_unless_asked_for() -> None:
    channel = assembled(clients=2).federation.channel
    assert channel.stages == () and channel.packing is None


REFUSED = {
    ("--method", "local", "--compress", "topk"): "neither send nor get",
    ("--method", "fedumf", "--compress-down", "sign"): "the server's own row",
    ("--method", "genfedumf", "--compress-down", "sign"): "the server's own row",
    ("--method", "fedbuff", "--compress-down", "sign"): "older rows",
    ("--method", "pfedhn", "--hn-combine", "turns", "--compress", "sign"): "turns",
    ("--method", "scaffold", "--aggregation", "sign-majority"): "votes once a round",
    ("--keep", 0.1): "--compress topk or randomk",
    ("--compress", "qsgd", "--no-feedback"): "--compress topk",
    ("--compress", "topk", "--compress-rank", 3): "--compress powersgd",
    ("--compress", "topk", "--keep", 0): "greater than 0",
    ("--compress", "zip"): "'topk'",
    ("--compress", "powersgd", "--compress-rank", 99): "a smaller --compress-rank",
    ("--method", "fedper", "--compress", "powersgd"): "powersgd needs whole rows",
    ("--ef21",): "--ef21 changes nothing without --compress topk",
    ("--compress", "topk", "--ef21", "--no-feedback"): "without leaving --ef21 out",
    ("--compress", "topk", "--ef21", "--method", "fedbuff"): "come late",
    ("--compress=topk", "--ef21", "--devices=uniform", "--deadline=3"): "loses some",
}


@pytest.mark.parametrize("words", REFUSED, ids=lambda words: " ".join(map(str, words)))
def test_what_cannot_be_is_refused_in_a_line(
    words: tuple[object, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    line = mistake(capsys, "run", "--model", "mlp", "--out", tmp_path / "run", *words)
    assert REFUSED[words] in line


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=lambda c: type(c).__name__)
def test_a_gpu_packs_as_a_cpu_does(compressor: Compressor, masked: bool) -> None:
    """And nothing is read from the device meanwhile: the host would wait for it."""
    given = started(compressor, drawn(7, 60, dtype=torch.float64))
    if masked:
        sent = drawn(7, 60) > 0
        given = given._replace(sent=sent, values=given.values.where(sent, 0))
    expected = compressor(given)
    there = Updates(*(None if part is None else part.cuda() for part in given))
    compressor(there)  # compiles kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        packed = compressor(there)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(packed.values.cpu(), expected.values)
    sizes = torch.as_tensor(packed.size).cpu()
    assert torch.equal(sizes, torch.as_tensor(expected.size))
