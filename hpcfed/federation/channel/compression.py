"""Compression: uploads with error feedback, downloads relative to a reference.

An upload is packed as its update, the row minus what the server sent. What packing
leaves out is the client's residual, which is added to its next update (Seide et al.
2014, Stich et al. 2018): nothing is lost, it comes later. A client that has diverged
sends values that are not finite, and keeps its residual. A client whose upload is late
or lost does not learn of that: what it packed is gone.

EF21 (Richtárik et al. 2021, Algorithm 2) replaces this: client and server both hold an
estimate gᵢ of a client's update uᵢ, 0 at first. The client sends C(uᵢ − gᵢ), both add
it to gᵢ, and the server uses gᵢ as the update. If a cohort is a sample, the estimates
of other clients stay unchanged, and the mean is over the cohort.

A download is packed as the difference to a reference h that the server and its clients
share: h ← h + C(w − h), and clients start from h. If all clients are sent the same row,
there is one reference. A client that has missed downloads is sent all of them, or h
itself if that is smaller. If each client is sent its own row, each has its own
reference. The first download is h itself.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcfed.federation.channel import Memory
from hpcfed.federation.channel.channel import Download, Upload
from hpcfed.federation.channel.compressors import (
    QSGD,
    Compressor,
    Packed,
    RandomK,
    ScaledSign,
    TopK,
    Updates,
)
from hpcfed.federation.channel.powersgd import PowerSGD
from hpcfed.federation.cohort import Sent, blocks
from hpcfed.models.layout import Layout
from hpcfed.options import RunConfig
from hpcfed.options.compression import WITH_FEEDBACK
from hpcfed.runtime import randomness
from hpcfed.runtime.device import on_device


@dataclass
class UploadCompression:
    """Packs what clients send."""

    compressor: Compressor
    memory: Memory
    seed: int
    feedback: bool
    ef21: bool = False
    phase: str = "upload"

    def bytes_of(self, row: Tensor) -> int:
        """Return the bytes that all columns of such a row take when packed."""
        return packed_bytes(self.compressor, row)

    def __call__(self, upload: Upload) -> Upload:
        """Replace the updates that are sent by those that the server unpacks."""
        rows, cohort = upload.rows, upload.cohort
        # If no member has data, or nothing is shared, nothing is sent.
        if not cohort.log.cohort_size or not rows.shape[1]:
            return upload
        kept, keys = self._kept(upload), self._keys(upload)
        here = on_device(cohort.here, rows.device)
        received = torch.empty_like(rows)
        sizes = []
        for block in blocks(rows):
            sent = None
            if upload.sent is not None:
                groups = upload.sent.groups[block]
                sent = Sent(groups, upload.sent.group_of).columns()
            start = upload.start[block]
            updates = Updates(rows[block] - start, keys[block], sent)
            packed = self._packed(updates, here[block], kept)
            # The server sees the row that the unpacked update leads to.
            torch.add(start, packed.values, out=received[block])
            sizes.append(packed.size)
        return replace(upload, rows=received, size=_joined(sizes))

    def _kept(self, upload: Upload) -> "_Kept":
        """Return what this rank's clients keep between uploads of this kind."""
        rows, stream = upload.rows, upload.stream
        width = rows.shape[1]
        residual = estimate = warm = None
        if self.feedback:
            residual = self.memory.owned(f"residual-{stream}", rows.new_empty(width))
        if self.ef21:
            estimate = self.memory.owned(f"estimate-{stream}", rows.new_empty(width))
        columns = self.compressor.warm_columns(width)
        if columns:
            warm = self.memory.owned(f"warm-{stream}", rows.new_empty(columns))
        return _Kept(residual, estimate, warm)

    def _keys(self, upload: Upload) -> Tensor:
        cohort = upload.cohort
        purpose = f"compression, stream {upload.stream}"
        if wave := cohort.in_flight.wave:
            purpose += f", wave {wave}"
        ids = on_device(cohort.clients[cohort.chosen], upload.rows.device)
        return randomness.client_keys(self.seed, purpose, cohort.round, ids)

    def _packed(self, updates: Updates, at: Tensor, kept: "_Kept") -> Packed:
        """Pack the updates of these clients, and overwrite what they keep."""
        whole, sent = updates.values, updates.sent
        left = None if kept.residual is None else kept.residual[at]
        known = None if kept.estimate is None else kept.estimate[at]
        if left is not None:
            whole = whole + left
        if known is not None:
            whole = whole - known
        if sent is not None:
            # `where`, not a product: columns that are not sent may be NaN.
            whole = whole.where(sent, 0)
        before = None if kept.warm is None else kept.warm[at]
        packed = self.compressor(updates._replace(values=whole, warm=before))
        # NaN if any column is: one pass, and no second matrix.
        # Of `whole`, before packing: a compressor such as top-k might drop the bad
        # column.
        largest = torch.linalg.vector_norm(whole, torch.inf, dim=1, keepdim=True)
        finite = largest.isfinite()
        changed = finite if sent is None else finite & sent
        if kept.residual is not None and left is not None:
            new = whole - packed.values
            kept.residual[at] = new.where(changed, left)
        if kept.estimate is not None and known is not None:
            estimate = (known + packed.values).where(changed, known)
            kept.estimate[at] = estimate
            # Columns that are not sent are not part of the update, whatever their
            # estimate.
            values = estimate if sent is None else estimate.where(sent, 0)
            packed = packed._replace(values=values)
        if kept.warm is not None and before is not None and packed.warm is not None:
            kept.warm[at] = packed.warm.where(finite, before)
        # The server must hear of a client that has diverged.
        alarm = torch.zeros_like(largest).where(finite, torch.nan)
        return packed._replace(values=packed.values + alarm)


class _Kept(NamedTuple):
    """What clients of this rank keep between uploads, an entry for each."""

    residual: Tensor | None
    """What their packed updates have left out; None without error feedback."""
    estimate: Tensor | None
    """What the server has of their updates; None without EF21."""
    warm: Tensor | None
    """What the compressor starts from; None if it keeps nothing."""


@dataclass
class DownloadCompression:
    """Packs what the server sends."""

    compressor: Compressor
    memory: Memory
    seed: int
    train_samples: np.ndarray
    """Training samples of every client: clients without any are sent nothing."""

    def __call__(self, download: Download) -> Download:
        """Replace the server's rows by what clients have after the download."""
        if not download.rows.shape[-1]:
            return download
        if download.rows.dim() == 1:
            return self._one_for_all(download)
        assert not download.everyone, "others have no row of their own"
        return self._one_for_each(download)

    def _one_for_all(self, download: Download) -> Download:
        row, stream = download.rows, download.stream
        name, warm_name = f"reference-{stream}", f"reference-warm-{stream}"
        # At first, the reference is the row itself, and nothing is left to pack.
        reference = self.memory.common(name, row)
        kept = self.compressor.warm_columns(len(row))
        warm = self.memory.common(warm_name, row.new_zeros(1, kept))
        server = torch.zeros(1, dtype=torch.int64, device=row.device)
        keys = self._keys(download, server)
        # Every rank packs the same row with the same key, so all agree on the new
        # reference.
        packed = self.compressor(Updates((row - reference)[None], keys, warm=warm))
        reference = reference + packed.values[0]
        self.memory.keep(name, reference)
        if packed.warm is not None:
            self.memory.keep(warm_name, packed.warm)
        received = replace(download, rows=reference)
        return self._counted(received, f"received-{stream}", packed, catch_up=True)

    def _one_for_each(self, download: Download) -> Download:
        rows, stream, cohort = download.rows, download.stream, download.cohort
        width, name = rows.shape[1], f"received-own-{stream}"
        references = self.memory.owned(f"references-{stream}", rows.new_empty(width))
        kept, warm = self.compressor.warm_columns(width), None
        if kept:
            warm = self.memory.owned(f"references-warm-{stream}", rows.new_empty(kept))
        ids = cohort.clients[cohort.chosen]
        known = on_device(self._last(name)[ids] > 0, rows.device)[:, None]
        keys = self._keys(download, on_device(ids, rows.device))
        here = on_device(cohort.here, rows.device)
        received = torch.empty_like(rows)
        for block in blocks(rows):
            at = here[block]
            reference = references[at]
            before = None if warm is None else warm[at]
            updates = Updates(rows[block] - reference, keys[block], warm=before)
            packed = self.compressor(updates)
            # The first time, a client is sent its row unpacked.
            came = torch.where(known[block], reference + packed.values, rows[block])
            references[at] = received[block] = came
            if warm is not None and packed.warm is not None:
                warm[at] = packed.warm
        received_rows = replace(download, rows=received)
        return self._counted(received_rows, name, packed, catch_up=False)

    def _counted(
        self, download: Download, name: str, packed: Packed, *, catch_up: bool
    ) -> Download:
        """Return the download with its bytes, and remember who has received it.

        With `catch_up` a client is sent all downloads that it has missed.
        """
        assert isinstance(packed.size, int), "all columns are sent to everybody"
        number, last = self._number(name), self._last(name)
        members = download.cohort.clients
        whole = download.rows.shape[-1] * download.rows.element_size()
        dense = np.full(len(last), whole)
        if download.sizes is not None:
            # A part of the row, unpacked; what is packed is packed for all alike.
            dense[members] = download.sizes
        missed = number - last if catch_up else 1
        sizes = np.minimum(missed * packed.size, dense)
        # 0 stands for never.
        sizes = np.where(last == 0, dense, sizes)
        has_data = self.train_samples > 0
        receives = has_data
        if not download.everyone:
            receives = np.zeros_like(has_data)
            receives[members] = has_data[members]
        sizes = np.where(receives, sizes, 0)
        # Counted on the host of every rank alike, since all ranks know who is sampled.
        last[receives] = number
        self.memory.keep(name, torch.from_numpy(last))
        return replace(download, size=int(sizes.sum()), sizes=sizes[members])

    def _number(self, name: str) -> int:
        """Count the downloads of a kind, this one included."""
        first = torch.zeros(1, dtype=torch.int64)
        number = self.memory.common(f"{name}-downloads", first) + 1
        self.memory.keep(f"{name}-downloads", number)
        return int(number)

    def _last(self, name: str) -> np.ndarray:
        """Return the number of each client's last download; 0 if it had none."""
        # On the host, where all ranks count the bytes of all clients.
        never = torch.zeros(len(self.train_samples), dtype=torch.int64)
        return self.memory.common(name, never).numpy().copy()

    def _keys(self, download: Download, ids: Tensor) -> Tensor:
        purpose = f"compression of downloads, stream {download.stream}"
        return randomness.client_keys(self.seed, purpose, download.cohort.round, ids)


def packed_bytes(compressor: Compressor, row: Tensor) -> int:
    """Return the bytes that a compressor needs for all columns of such a row."""
    no_rows = row.new_empty(0, len(row))
    warm = row.new_empty(0, compressor.warm_columns(len(row)))
    keys = torch.empty(0, dtype=torch.int64, device=row.device)
    size = compressor(Updates(no_rows, keys, warm=warm)).size
    assert isinstance(size, int), "it depends on the number of columns alone"
    return size


def upload_compression(
    config: RunConfig, layout: Layout, memory: Memory
) -> UploadCompression | None:
    """Return how a run's uploads are packed; None if they are not."""
    if config.compress == "none":
        return None
    feedback = config.feedback and config.compress in WITH_FEEDBACK and not config.ef21
    # Error feedback and EF21 need errors that shrink. Without them, errors should be 0
    # on average.
    unbiased = not feedback and not config.ef21
    packs = compressor(config.compress, config, layout, unbiased=unbiased)
    return UploadCompression(packs, memory, config.seed, feedback, config.ef21)


def download_compression(
    config: RunConfig, layout: Layout, memory: Memory, train_samples: np.ndarray
) -> DownloadCompression | None:
    """Return how a run's downloads are packed; None if they are not."""
    if config.compress_down == "none":
        return None
    # A reference needs errors that shrink, not errors that are 0 on average.
    packs = compressor(config.compress_down, config, layout, unbiased=False)
    return DownloadCompression(packs, memory, config.seed, train_samples)


def compressor(
    kind: str, config: RunConfig, layout: Layout, *, unbiased: bool
) -> Compressor:
    """Return the compressor with this name, set up by the run's options; `unbiased`
    only matters to compressors that can be unbiased.
    """
    match kind:
        case "topk":
            return TopK(config.keep)
        case "randomk":
            return RandomK(config.keep, unbiased)
        case "qsgd":
            return QSGD(config.levels, config.bucket, unbiased)
        case "sign":
            return ScaledSign(config.bucket)
    assert kind == "powersgd", kind
    return PowerSGD(layout.entries, config.compress_rank)


def _joined(sizes: list[Tensor | int]) -> Tensor | int:
    """Return the bytes of every member, or the one number that holds for all."""
    first = sizes[0]
    if isinstance(first, int):
        return first
    return torch.cat([size for size in sizes if isinstance(size, Tensor)])
