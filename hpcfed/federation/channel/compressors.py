"""Compressors: what a receiver unpacks from packed updates, and how many bytes they
take.

Nothing is actually packed. Each compressor returns the numbers that the receiver would
unpack, for all members at once, and counts the bytes that a packer would write. Numbers
travel in the precision of the rows. What everybody knows, such as the number of
columns, is not counted, nor is the list of column groups that a member sends.

- top-k (Aji and Heafield 2017; Stich et al. 2018): the columns that change the most.
- random-k (Konečný et al. 2016): columns drawn from a seed, so only the seed is sent.
- QSGD (Alistarh et al. 2017): every column rounded at random to one of a few levels.
- sign (Karimireddy et al. 2019, EF-signSGD): a bit per column, and their mean size.
- PowerSGD is in a file of its own.
"""

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hpcfed.runtime import randomness

INDEX_BYTES = 4
SEED_BYTES = 8
SCALE_BYTES = 4  # norms and mean sizes travel as float32
TILT = 1e-5
"""How much less the last column counts than the first when top-k compares them."""


class Updates(NamedTuple):
    """Updates of some clients, a row for each."""

    values: Tensor
    """[members, columns], 0 in columns that a member does not send."""
    keys: Tensor
    """A key of each member, for its random numbers."""
    sent: Tensor | None = None
    """[members, columns], True where a column is sent; None: all are."""
    warm: Tensor | None = None
    """[members, `Compressor.warm_columns`]: kept from the last update, or 0."""

    def num_sent(self) -> Tensor | int:
        """Return how many columns each member sends; one number if all send alike."""
        return self.values.shape[1] if self.sent is None else self.sent.sum(1)


class Packed(NamedTuple):
    """Updates as they arrive."""

    values: Tensor
    """[members, columns], as the receiver unpacks them."""
    size: Tensor | int
    """Bytes that each member sends; one number if all send alike."""
    warm: Tensor | None = None
    """What each member keeps for the next time."""


class Compressor(Protocol):
    """Packs the updates of all members at once, each as if it were alone."""

    def warm_columns(self, columns: int) -> int:
        """Return how many numbers a client keeps between updates."""

    def __call__(self, updates: Updates) -> Packed: ...


class _Memoryless:
    def warm_columns(self, columns: int) -> int:
        return 0


@dataclass(frozen=True)
class TopK(_Memoryless):
    """Keeps the columns that change the most.

    Their positions travel as 4-byte indices, or as one bit per column if that is
    smaller. An update that is smaller unpacked travels unpacked.
    """

    keep: float
    """The share of columns to keep; at least one column is kept."""

    def __call__(self, updates: Updates) -> Packed:
        magnitudes = _tie_free(updates.values.abs())
        if updates.sent is not None:
            # Smaller than any magnitude: a column that is not sent is never in the top
            # k.
            magnitudes.masked_fill_(~updates.sent, -1)
        values = _first_k(updates, magnitudes, self.keep)
        number = updates.values.element_size()
        columns = updates.num_sent()
        kept = num_kept(columns, self.keep)
        positions = _least(kept * INDEX_BYTES, (columns + 7) // 8)
        return _smaller(updates, values, kept * number + positions, columns * number)


@dataclass(frozen=True)
class RandomK(_Memoryless):
    """Keeps columns that are drawn anew for every upload.

    Sender and receiver draw them from a seed of 8 bytes, which travels with the values.
    """

    keep: float
    """The share of columns to keep; at least one column is kept."""
    unbiased: bool
    """Whether kept columns are multiplied by columns / k, so that their expectation is
    the update. With error feedback they must not be: the residual would grow.
    """

    def __call__(self, updates: Updates) -> Packed:
        width = updates.values.shape[1]
        # 63 bits, so that no two columns tie. The largest are kept.
        drawn = randomness.bits(updates.keys, width) & 0x7FFFFFFFFFFFFFFF
        if updates.sent is not None:
            drawn.masked_fill_(~updates.sent, -1)
        values = _first_k(updates, drawn, self.keep)
        columns = updates.num_sent()
        kept = num_kept(columns, self.keep)
        if self.unbiased:
            values = values * _per_member(columns, values) / _per_member(kept, values)
        number = values.element_size()
        # A member that sends no column sends no seed.
        seed = SEED_BYTES * _least(kept, 1)
        return _smaller(updates, values, kept * number + seed, columns * number)


@dataclass(frozen=True)
class QSGD(_Memoryless):
    """Rounds |x| / norm at random to one of `levels` + 1 values, preserving its
    expectation (Eq. 4 of the paper), and sends sign and level of every column.

    A norm travels for every bucket of columns.
    """

    levels: int
    bucket: int
    unbiased: bool = True
    """Whether the expectation is the update. Otherwise the norms are chosen so that
    what arrives is as near to the update as possible. Then it is never farther from it
    than 0 is, which error feedback and references need.
    """

    @property
    def bits(self) -> int:
        """Bits of a column: 2 × levels + 1 values."""
        return (2 * self.levels).bit_length()

    def __call__(self, updates: Updates) -> Packed:
        width = updates.values.shape[1]
        buckets = _bucketed(updates.values, self.bucket)
        norms = torch.linalg.vector_norm(buckets, dim=2, keepdim=True).float()
        drawn = _bucketed(_uniform(updates.keys, width), self.bucket).to(buckets.dtype)
        share = _ratio(buckets.abs(), norms.to(buckets.dtype))
        # The norm is rounded to float32, so a share may exceed one by a rounding.
        # Adding a uniform number before rounding down rounds up with the fraction's
        # probability.
        level = (share * self.levels + drawn).floor_().clamp_(max=self.levels)
        unit = norms.to(buckets.dtype) / self.levels
        values = level.mul_(unit).copysign(buckets)
        if not self.unbiased:
            squares = values.square().sum(2, keepdim=True)
            products = (values * buckets).sum(2, keepdim=True)
            # ⟨v, x⟩ / ⟨v, v⟩ is the factor that brings v nearest to x.
            values = values * _ratio(products, squares)
        values = values.flatten(1)[:, :width]
        size = _num_buckets(updates, self.bucket) * SCALE_BYTES
        bits = updates.num_sent() * self.bits
        return Packed(values, size + (bits + 7) // 8)


@dataclass(frozen=True)
class ScaledSign(_Memoryless):
    """Sends every column's sign, and the mean magnitude of each bucket."""

    bucket: int

    def __call__(self, updates: Updates) -> Packed:
        width = updates.values.shape[1]
        buckets = _bucketed(updates.values, self.bucket)
        sums = buckets.abs().sum(2, keepdim=True)
        means = _ratio(sums, self._counts(updates)).float().to(buckets.dtype)
        # A 0 gets a sign as well: one bit cannot encode a third value.
        values = means.copysign(buckets).flatten(1)[:, :width]
        # A column that is not finite has no sign, but its bucket's mean reveals it.
        if updates.sent is not None:
            values = values.where(updates.sent, 0)
        size = _num_buckets(updates, self.bucket) * SCALE_BYTES
        return Packed(values, size + (updates.num_sent() + 7) // 8)

    def _counts(self, updates: Updates) -> Tensor:
        """Return how many columns of each bucket a member sends, [.., buckets, 1]."""
        sent = updates.sent
        if sent is None:
            sent = updates.values.new_ones(1, updates.values.shape[1])
        whole = _bucketed(sent.to(updates.values.dtype), self.bucket)
        return whole.sum(2, keepdim=True)


def num_kept(columns: Tensor | int, keep: float) -> Tensor | int:
    """Return k, the columns to keep, rounded up: one or more, if there are any."""
    # 0.07 of 100 is 7, although 0.07 * 100 is 7.000000000000001.
    slack = 1e-9
    if isinstance(columns, Tensor):
        share = columns.double() * keep - slack
        return share.ceil().long()
    return ceil(columns * keep - slack)


def _tie_free(magnitudes: Tensor) -> Tensor:
    """Make each column count slightly less than the one before it, in place.

    Columns often tie, such as those of two pixels that are always equal. Rounding
    depends on the number of ranks, and must not decide between them. In float32
    rounding is larger than this tilt, so there it still may.
    """
    return magnitudes.mul_(
        torch.linspace(
            1.0,
            1.0 - TILT,
            magnitudes.shape[1],
            dtype=magnitudes.dtype,
            device=magnitudes.device,
        )
    )


def _uniform(keys: Tensor, count: int) -> Tensor:
    """Return `count` numbers in [0, 1) for every key, two from each hash."""
    bits = randomness.bits(keys, (count + 1) // 2)
    # 24 bits each, from disjoint parts of the hash.
    both = torch.cat([bits >> 40, bits >> 16], 1)[:, :count]
    return (both & 0xFFFFFF).float() * 2.0**-24


def _first_k(updates: Updates, order: Tensor, keep: float) -> Tensor:
    """Return the updates in the k columns whose `order` is the highest, 0 elsewhere.

    Members that send fewer columns keep fewer, but none needs more than k of all
    columns. So nothing has to be read from the device.
    """
    values = updates.values
    most = num_kept(values.shape[1], keep)
    assert isinstance(most, int)
    # Sort only if some members keep just the first few.
    at = order.topk(most, dim=1, sorted=updates.sent is not None).indices
    kept = values.gather(1, at)
    if updates.sent is not None:
        number = num_kept(updates.sent.sum(1, keepdim=True), keep)
        place = torch.arange(most, device=values.device)
        kept = kept.where(place < number, 0)
    return torch.zeros_like(values).scatter_(1, at, kept)


def _bucketed(rows: Tensor, bucket: int) -> Tensor:
    """Return [members, buckets, columns of a bucket]; the last is filled up with 0.

    A bucket size of 0 means one bucket with all columns.
    """
    width = rows.shape[1]
    size = min(bucket or width, width)
    # How many columns the last bucket lacks.
    missing = -width % size
    count = (width + missing) // size
    return F.pad(rows, (0, missing)).unflatten(1, (count, size))


def _num_buckets(updates: Updates, bucket: int) -> Tensor | int:
    """Return how many buckets each member sends: those with a column that it sends."""
    if updates.sent is None:
        return _bucketed(updates.values, bucket).shape[1]
    return _bucketed(updates.sent, bucket).any(2).sum(1)


def _ratio(of: Tensor, to: Tensor) -> Tensor:
    """Return their ratio, 0 if both are 0."""
    # 0 / 0 would be NaN, which would mark the client as diverged.
    return of / to.where(to != 0, 1)


def _least(a: Tensor | int, b: Tensor | int) -> Tensor | int:
    """Return the smaller number, for each member if they differ."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.minimum(b)
    if isinstance(a, Tensor):
        return a.clamp(max=b)
    if isinstance(b, Tensor):
        return b.clamp(max=a)
    return min(a, b)


def _smaller(
    updates: Updates, values: Tensor, packed: Tensor | int, whole: Tensor | int
) -> Packed:
    """Return updates packed, or whole where that is no larger: what is paid arrives."""
    unpacked = packed >= whole
    if updates.sent is not None:
        complete = updates.values.masked_fill(~updates.sent, 0.0)
    else:
        complete = updates.values
    if isinstance(unpacked, Tensor):
        values = torch.where(unpacked[:, None], complete, values)
    elif unpacked:
        values = complete
    return Packed(values, _least(packed, whole))


def _per_member(number: Tensor | int, rows: Tensor) -> Tensor | int:
    """Return the number as a factor of rows; none of them is 0."""
    if isinstance(number, Tensor):
        return number.clamp(min=1)[:, None].to(rows.dtype)
    return number
