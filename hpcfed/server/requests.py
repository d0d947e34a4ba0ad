"""Requests of workers to the server, and how its ranks handle them: one class for each.

Rows are generated in the order of client ids, so that noise does not depend on which
rank hosts a client.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcfed.errors import UserError
from hpcfed.results import checkpoints
from hpcfed.results.checkpoints import StoredFile
from hpcfed.runtime.timer import observer
from hpcfed.server import likeness
from hpcfed.server.fitting import INSTEAD
from hpcfed.server.guidance import Guidance
from hpcfed.server.identity import Identity
from hpcfed.server.likeness import Likeness
from hpcfed.server.losses import check_rows
from hpcfed.server.messages import A, Answer, ClientRequest, KnownRows, Request, Rows
from hpcfed.server.rank import ServerRank
from hpcfed.server.report import Inversion, LearningReport, latent_map

# A run tells the server where it writes, and when it has no more requests.


@dataclass(frozen=True, kw_only=True, eq=False)
class Begin(Request[Answer]):
    """Tell the server which folder the seed's run writes to. The server writes its
    progress there.
    """

    answered = False
    folder: str

    def handle(self, rank: ServerRank) -> Answer:
        rank.folders[self.seed] = Path(self.folder)
        return Answer()


@dataclass(frozen=True, kw_only=True, eq=False)
class Leave(Request[Answer]):
    """Announce that this seed has no more requests. `transport` handles it."""

    answered = False


# The server learns.


@dataclass(frozen=True, kw_only=True, eq=False)
class Bank(ClientRequest[Answer]):
    """Bank these rows of a round: updates, or uploads with their starts."""

    answered = False
    round: int
    rows: Tensor
    starts: Tensor | None = None

    def handle(self, rank: ServerRank) -> Answer:
        bank = rank.bank(self.seed)
        bank.add(self.round, self.clients, self.rows, self.starts)
        return Answer()


@dataclass(frozen=True, kw_only=True, eq=False)
class Learned(Answer):
    """The report of a training; None on workers that do not record it."""

    report: LearningReport | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Learn(Request[Learned]):
    """Train the model on the banked uploads."""

    every: float = 0.0
    """Seconds after which to save how far it is, again and again; then it stops, too, if
    it is told. 0: it learns to the end.
    """

    def handle(self, rank: ServerRank) -> Learned:
        bank, model = rank.bank(self.seed).content(), rank.model(self.seed)
        identity = Identity.of(bank, rank.options, model.streams.learnings)
        half = rank.half_learnt(self.seed, identity, every=self.every)
        try:
            with rank.showing_progress(self.seed) as progress:
                report = model.learn(bank, progress, half)
        except torch.OutOfMemoryError:
            raise UserError(_too_large(rank)) from None
        begin = time.perf_counter()
        report.latents = latent_map(bank, model.latents_at)
        encoded = report.seconds.get("encode", 0.0)
        report.seconds["encode"] = encoded + time.perf_counter() - begin
        # The training's peak, or a later one of this process.
        report.note_peak(rank.slot.device)
        report.peak_memory = rank.allgather(float(report.peak_here))
        report.bank_bytes = rank.allgather(float(bank.nbytes))
        for name, taken in report.training_memory.items():
            report.training_memory[name] = max(rank.allgather(taken))
        return Learned(report=report)


def _too_large(rank: ServerRank) -> str:
    """Say what to do if the model does not fit into memory."""
    return (
        f"the server's model of {rank.columns.num_all:,} columns does not fit into the "
        f"memory of its device; use {INSTEAD[rank.options.server_model]}"
    )


# The server answers with rows of the bank, and with rows generated from them.


@dataclass(frozen=True, kw_only=True, eq=False)
class NewestRequest(ClientRequest[A]):
    """A request about the clients' newest uploads."""

    def newest(self, rank: ServerRank) -> tuple[np.ndarray, Tensor]:
        """Return the positions in the request of clients that are in the bank, ordered
        by client id, and their newest uploads.
        """
        order = np.argsort(self.clients)
        bank = rank.bank(self.seed).content()
        known, uploads = bank.newest(self.clients[order])
        return order[known], uploads

    def placed(
        self, rank: ServerRank, places: np.ndarray, share: Tensor
    ) -> dict[str, Any]:
        """Return the fields of `KnownRows`: whole rows at these places, zeros
        elsewhere. `share` has the rank's columns of these rows.
        """
        rows = rank.columns.whole(share)
        check_rows(type(self).__name__.lower(), rows, rank.options)
        everyones = rows.new_zeros(self.num_clients, rows.shape[1])
        everyones[torch.from_numpy(places).to(rows.device)] = rows
        known = np.zeros(self.num_clients, bool)
        known[places] = True
        return {"rows": everyones, "known": known}


@dataclass(frozen=True, kw_only=True, eq=False)
class Recall(NewestRequest[KnownRows]):
    """Return the clients' newest rows unchanged."""

    def handle(self, rank: ServerRank) -> KnownRows:
        with observer().span("recall"):
            places, uploads = self.newest(rank)
            return KnownRows(**self.placed(rank, places, uploads))


@dataclass(frozen=True, kw_only=True, eq=False)
class Reconstruct(NewestRequest[KnownRows]):
    """Pass the newest uploads through the autoencoder only."""

    def handle(self, rank: ServerRank) -> KnownRows:
        with observer().span("reconstruct"):
            places, uploads = self.newest(rank)
            rows = rank.model(self.seed).reconstruct(uploads)
            return KnownRows(**self.placed(rank, places, rows))


@dataclass(frozen=True, kw_only=True, eq=False)
class Invert(NewestRequest[Inversion]):
    """Generate rows from the newest uploads by inversion."""

    depth: int | None = None
    """Diffusion steps t0; None: --inversion-depth."""

    def handle(self, rank: ServerRank) -> Inversion:
        bank = rank.bank(self.seed).content()
        with observer().span("invert"):
            places, uploads = self.newest(rank)
            rows = rank.model(self.seed).invert(uploads, depth=self.depth)
            clients = self.clients[places]
            sets = [
                likeness.updates_of(bank, clients, some) for some in (rows, uploads)
            ]
            found = likeness.in_own_direction(bank, clients, sets)
            generated, uploaded = (float(own.float().mean()) for own in found)
            return Inversion(
                recognised=generated,
                recognised_uploads=uploaded,
                **self.placed(rank, places, rows),
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class LearnedRows(Learned, Inversion):
    """The report of a training, and the rows that followed from it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LearnAndInvert(NewestRequest[LearnedRows]):
    """Train the model, and generate rows from the newest uploads of this moment: one
    request, because uploads that arrive in the meantime must not come between.
    """

    every: float = 0.0
    """Seconds between two savings, as in `Learn`."""

    def handle(self, rank: ServerRank) -> LearnedRows:
        report = Learn(seed=self.seed, every=self.every).handle(rank).report
        assert report is not None
        begin = time.perf_counter()
        made = Invert(seed=self.seed, clients=self.clients).handle(rank)
        seconds = time.perf_counter() - begin
        report = report.with_inversion(replace(made, seconds=seconds))
        # Nobody waits for these rows on their way, so it is not measured.
        del report.seconds["return"]
        return LearnedRows(report=report, **vars(made))


@dataclass(frozen=True, kw_only=True, eq=False)
class Compare(ClientRequest[Likeness]):
    """Compare generated rows with those in the bank; NaN for clients not in it."""

    rows: Tensor

    def handle(self, rank: ServerRank) -> Likeness:
        bank = rank.bank(self.seed).content()
        known = np.isin(self.clients, bank.uploaders)
        clients = self.clients[known]
        whole = self.rows[torch.from_numpy(known).to(self.rows.device)]
        rows = rank.columns.of(whole)
        found = likeness.likeness(
            bank, clients, likeness.updates_of(bank, clients, rows)
        )
        everyones: dict[str, Any] = {}
        for name in ("own", "nearest", "nearest_is_own", "recognised"):
            everyones[name] = np.full(len(known), np.nan)
            everyones[name][known] = getattr(found, name)
        return replace(found, **everyones)


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleRows(ClientRequest[Rows]):
    """Generate a row from noise for each client."""

    whole: bool = False
    """Whether to add a loaded model's updates to the start in its file."""

    def handle(self, rank: ServerRank) -> Rows:
        model = rank.model(self.seed)
        rows = rank.columns.whole(model.sample(self.num_clients))
        if self.whole and rank.options.bank_of == "updates":
            if model.start is None:
                raise UserError(
                    f"--server-load {rank.options.server_load} has no start for its "
                    "updates; use a server.h5 of a complete run"
                )
            rows = rows + model.start
        check_rows("sample", rows, rank.options)
        return Rows(rows=_from_id_order(rows, self.clients))


@dataclass(frozen=True, kw_only=True, eq=False)
class Guide(ClientRequest[Rows]):
    """Guide new clients' rows, given before and after a local update."""

    before: Tensor
    after: Tensor
    how: Guidance

    def handle(self, rank: ServerRank) -> Rows:
        by_id = torch.from_numpy(np.argsort(self.clients)).to(self.before.device)
        guided = rank.model(self.seed).guide(
            rank.columns.of(self.before[by_id]),
            rank.columns.of(self.after[by_id]),
            self.how,
        )
        rows = _from_id_order(rank.columns.whole(guided), self.clients)
        # If a client's own training has diverged, its row need not be finite.
        before = self.before.isfinite().all(1)
        after = self.after.isfinite().all(1)
        check_rows("guide", rows, rank.options, before & after)
        return Rows(rows=rows)


# Files. All server ranks hold the same networks, and together the bank; the first one
# writes.


@dataclass(frozen=True, kw_only=True, eq=False)
class Save(Request[Answer]):
    """Write the trained model to a file."""

    path: str
    start: bytes = b""
    """The float32 columns to which updates may be added, if any. Bytes, because `merge`
    would take an array to have an entry per client.
    """

    def handle(self, rank: ServerRank) -> Answer:
        start = None
        if self.start:
            start = torch.frombuffer(bytearray(self.start), dtype=torch.float32)
        rank.model(self.seed).save(Path(self.path), start)
        return Answer()


@dataclass(frozen=True, kw_only=True, eq=False)
class Stored(Answer):
    """The files that the first server rank has written; none on the others."""

    files: tuple[StoredFile, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Store(Request[Stored]):
    """Write bank and model to a checkpoint's folder."""

    folder: str

    def handle(self, rank: ServerRank) -> Stored:
        folder = Path(self.folder)
        bank = rank.bank(self.seed)
        writes = rank.slot.rank == 0
        files = bank.store(folder, self.seed, write=writes)
        # A checkpoint before the first learning has no model.
        if rank.has_learnt(self.seed):
            path = folder / _model_file(self.seed)
            rank.model(self.seed).store(path, bank.content())
            if writes:
                files.append(checkpoints.existing(path))
        return Stored(files=tuple(files))


@dataclass(frozen=True, kw_only=True, eq=False)
class Restore(Request[Answer]):
    """Read bank and model from a checkpoint's folder."""

    folder: str

    def handle(self, rank: ServerRank) -> Answer:
        folder = Path(self.folder)
        bank = rank.bank(self.seed)
        bank.restore(folder, self.seed, rank.slot.device)
        file = _model_file(self.seed)
        if file in checkpoints.listed(folder):
            rank.model(self.seed).restore(folder / file, bank.content())
        return Answer()


def _from_id_order(rows: Tensor, clients: np.ndarray) -> Tensor:
    """Reorder rows from the order of ids to the order of `clients`.

    The k-th row belongs to the k-th smallest id.
    """
    ranking = np.argsort(np.argsort(clients))
    return rows[torch.from_numpy(ranking).to(rows.device)]


def _model_file(seed: int) -> str:
    """Return the name of a seed's model in a checkpoint."""
    return f"server-{seed}.h5"
