"""Compressors by hand, what error feedback keeps, and bytes as they would be sent."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hpcfed.models.layout import Entry
from hpcfed.runtime.randomness import client_keys
from hpcfed.transit.compressors import (
    QSGD,
    Compressor,
    RandomK,
    ScaledSign,
    TopK,
    Updates,
    num_kept,
)
from hpcfed.transit.powersgd import PowerSGD, orthonormal

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
    rows = torch.ones(200, 6)
    sent = torch.tensor([[True, False, True, False, True, True]]).expand(200, 6)
    packed = RandomK(0.5, unbiased=True)(Updates(rows.where(sent, 0), keys(200), sent))
    # Two of four columns, doubled.
    assert packed.values.sum(1).eq(4).all()
    assert packed.values.max() == 2
    assert not packed.values[:, [1, 3]].any()
    assert (packed.values.sum(0)[[0, 2, 4, 5]] > 0).all()


def test_qsgd_rounds_to_neighbouring_levels_of_the_norm() -> None:
    # The norm is 5, so levels are 0, 1.25, 2.5, 3.75 and 5.
    rows = torch.tensor([[3.0, -4.0]]).repeat(4000, 1)
    packed = QSGD(levels=4, bucket=2)(Updates(rows, keys(4000)))
    assert set(packed.values[:, 0].tolist()) == {2.5, 3.75}
    assert set(packed.values[:, 1].tolist()) == {-3.75, -5.0}
    # 3 is 2.4 levels: up with probability 0.4. Five standard deviations of the share.
    share = packed.values[:, 0].eq(3.75).double().mean()
    assert abs(float(share) - 0.4) < 5 * (0.4 * 0.6 / 4000) ** 0.5


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
