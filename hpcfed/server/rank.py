"""The server's side: banks uploads, trains the model on them, and generates rows.

Every server rank handles every request, because training is collective and all ranks
hold the same bank and the same model.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcfed.errors import Diverged, UserError
from hpcfed.results import checkpoints
from hpcfed.results.checkpoints import StoredFile
from hpcfed.results.folder import LEARNING
from hpcfed.results.server import LatentMap
from hpcfed.runtime.observer import observer
from hpcfed.server import likeness
from hpcfed.server.bank import UploadBank
from hpcfed.server.divergence import check_rows
from hpcfed.server.latent_diffusion import LatentDiffusion, Progress
from hpcfed.server.latent_map import latent_map, mapped_uploads
from hpcfed.server.options import ServerOptions
from hpcfed.server.progress import leaving_signs
from hpcfed.server.requests import (
    Answer,
    Average,
    Bank,
    Begin,
    ClientRequest,
    Compare,
    Compared,
    Failure,
    Guide,
    Invert,
    InvertedRows,
    KnownRows,
    Learn,
    Learned,
    Recall,
    Reconstruct,
    Request,
    Restore,
    Rows,
    Sample,
    Save,
    Store,
    Stored,
    divide,
    merge,
)
from hpcfed.server.slot import RankSlot


class ServerRank:
    """The banks and models of all seeds, on one server rank."""

    def __init__(
        self,
        widths: Sequence[int],
        options: ServerOptions,
        slot: RankSlot,
        *,
        seeds: Sequence[int],
        progress: Progress,
        allgather: Callable[[float], list[float]],
    ) -> None:
        """`widths`: columns of the generated tensors, in order. `allgather` brings
        the server ranks' numbers together.
        """
        self._widths = list(widths)
        """Columns of the generated tensors."""
        self._options = options
        self._slot = slot
        self._progress = progress
        self._allgather = allgather
        self._banks: dict[int, UploadBank] = {}
        self._models: dict[int, LatentDiffusion] = {}
        self._folders: dict[int, Path] = {}
        """The folders of the seeds' runs, as far as they were told."""
        # A file that does not fit is refused now, not after hours of local training.
        if options.server_load:
            for seed in seeds:
                self.model(seed)

    def model(self, seed: int) -> LatentDiffusion:
        """Return the seed's model; build it when it is first asked for."""
        if seed not in self._models:
            self._models[seed] = LatentDiffusion(
                self._widths, self._options, self._slot, seed=seed
            )
        return self._models[seed]

    def handle(self, requests: Sequence[Request]) -> list[Answer]:
        """Return every worker's answer to the request that they send together."""
        begin = time.perf_counter()
        request = merge(requests)
        try:
            answer = self._answer(request)
        except Diverged as error:
            # Workers end the run: they know its folder, and which rank prints the line.
            answer = Failure(reason=str(error))
        seconds = time.perf_counter() - begin
        counts = [_num_clients(each) for each in requests]
        return divide(replace(answer, seconds=seconds), counts)

    def _answer(self, request: Request) -> Answer:
        # A merged request is about the clients of all workers.
        match request:
            case Begin():
                self._folders[request.seed] = Path(request.folder)
                return Answer()
            case Bank():
                return self._add_uploads(request)
            case Learn():
                return self._learn(request)
            case Recall():
                return self._recall(request)
            case Reconstruct():
                return self._reconstruct(request)
            case Invert():
                return self._invert(request)
            case Average():
                return self._average(request)
            case Compare():
                return self._compare(request)
            case Sample():
                return self._sample(request)
            case Guide():
                return self._guide(request)
            case Save():
                return self._save(request)
            case Store():
                return self._store(request)
            case Restore():
                return self._restore(request)
        raise AssertionError(f"a server rank cannot answer {request}")

    def _add_uploads(self, request: Bank) -> Answer:
        bank = self._bank(request.seed)
        bank.add(request.round, request.clients, request.rows, request.starts)
        return Answer()

    def _learn(self, request: Learn) -> Learned:
        bank = self._banks[request.seed]
        with self._showing_progress(request.seed) as progress:
            report = self.model(request.seed).learn(bank.rows(), progress)
        report.latents = self._latents(bank, self.model(request.seed))
        # The training's peak, or what this process has seen since.
        report.note_peak(self._slot.device)
        report.peak_memory = self._allgather(float(report.peak_here))
        return Learned(report=report)

    @torch.no_grad()
    def _latents(self, bank: UploadBank, model: LatentDiffusion) -> LatentMap:
        """Map what the model has made of the bank's uploads."""
        rows = bank.rows()
        chosen = mapped_uploads(len(rows))
        latents = model.encode(rows[torch.from_numpy(chosen).to(rows.device)])
        in_double = latents.double().cpu().numpy()
        return latent_map(in_double, bank.uploaders()[chosen])

    @contextmanager
    def _showing_progress(self, seed: int) -> Iterator[Progress]:
        """Return what shows a learning's progress: lines, and on the first rank a sign
        in the run's folder.
        """
        folder = self._folders.get(seed)
        if folder is None or self._slot.rank:
            yield self._progress
            return
        with leaving_signs(folder / LEARNING) as leave:

            def tell(network: str, done: int, steps: int, losses: Tensor) -> None:
                self._progress(network, done, steps, losses)
                leave(network, done, steps, losses)

            yield tell

    def _recall(self, request: Recall) -> KnownRows:
        with observer().span("recall"):
            order, known, uploads = self._newest_uploads(request)
            check_rows("recall", uploads, self._options)
            return _in_request_order(uploads, order, known)

    def _reconstruct(self, request: Reconstruct) -> KnownRows:
        model = self.model(request.seed)
        with observer().span("reconstruct"):
            order, known, uploads = self._newest_uploads(request)
            rows = model.reconstruct(uploads)
            check_rows("reconstruct", rows, self._options)
            return _in_request_order(rows, order, known)

    def _invert(self, request: Invert) -> InvertedRows:
        model = self.model(request.seed)
        bank = self._banks[request.seed]
        with observer().span("invert"):
            order, known, uploads = self._newest_uploads(request)
            rows = model.invert(uploads, depth=request.depth)
            clients = request.clients[order][known]
            updates = likeness.updates_of(bank, clients, rows)
            recognised = likeness.recognised(bank, clients, updates, self._widths)
            check_rows("invert", rows, self._options)
            placed = _in_request_order(rows, order, known)
        return InvertedRows(rows=placed.rows, known=placed.known, recognised=recognised)

    def _average(self, request: Average) -> KnownRows:
        bank = self._banks[request.seed]
        known, means = likeness.mean_rows(bank, request.clients)
        return _in_request_order(means, np.arange(len(known)), known)

    def _compare(self, request: Compare) -> Compared:
        bank = self._banks[request.seed]
        known = np.isin(request.clients, bank.uploaders())
        clients = request.clients[known]
        rows = request.rows[torch.from_numpy(known).to(request.rows.device)]
        found = likeness.likeness(
            bank, clients, likeness.updates_of(bank, clients, rows)
        )
        everyones: dict[str, Any] = {}
        for name, values in vars(found).items():
            everyones[name] = np.full(len(known), np.nan)
            everyones[name][known] = values
        return Compared(**everyones)

    def _sample(self, request: Sample) -> Rows:
        model = self.model(request.seed)
        rows = model.sample(len(request.clients))
        if request.whole and self._options.bank_of == "updates":
            rows = rows + self._loaded_start(model)
        check_rows("sample", rows, self._options)
        return Rows(rows=_from_id_order(rows, request))

    def _guide(self, request: Guide) -> Rows:
        model = self.model(request.seed)
        order = torch.from_numpy(np.argsort(request.clients))
        by_id = order.to(request.before.device)
        rows = model.guide(
            request.before[by_id],
            request.after[by_id],
            strength=request.strength,
            start=request.start,
            steps=request.steps,
            sign=request.sign,
            noise=request.noise,
        )
        rows = _from_id_order(rows, request)
        # A client whose own training has failed is not the server's fault.
        before = request.before.isfinite().all(1)
        after = request.after.isfinite().all(1)
        check_rows("guide", rows, self._options, before & after)
        return Rows(rows=rows)

    def _save(self, request: Save) -> Answer:
        # All server ranks hold the same networks: the first one writes.
        if self._slot.rank == 0:
            start = None
            if request.start:
                start = torch.frombuffer(bytearray(request.start), dtype=torch.float32)
            self.model(request.seed).save(Path(request.path), start)
        return Answer()

    def _store(self, request: Store) -> Stored:
        # All server ranks hold the same bank and networks: the first one writes.
        if self._slot.rank:
            return Stored(files=())
        folder = Path(request.folder)
        seed = request.seed
        files: list[StoredFile] = self._bank(seed).store(folder, seed)
        # Not self.model, which would build a model that nobody has asked for yet.
        model = self._models.get(seed)
        if model is not None and model.is_trained:
            path = folder / _model_file(seed)
            model.save(path)
            files.append(checkpoints.existing(path))
        return Stored(files=tuple(files))

    def _restore(self, request: Restore) -> Answer:
        folder = Path(request.folder)
        seed = request.seed
        width = sum(self._widths)
        self._bank(seed).restore(folder, seed, width, self._slot.device)
        # A checkpoint from before the first learning has no model.
        file = _model_file(seed)
        if file in checkpoints.listed(folder):
            self.model(seed).load(folder / file)
        return Answer()

    def _bank(self, seed: int) -> UploadBank:
        if seed not in self._banks:
            self._banks[seed] = UploadBank(self._options.bank_rounds)
        return self._banks[seed]

    def _loaded_start(self, model: LatentDiffusion) -> Tensor:
        if model.start is None:
            raise UserError(
                f"--server-load {self._options.server_load} has no start for its "
                "updates; use a server.h5 of a complete run"
            )
        return model.start

    def _newest_uploads(
        self, request: ClientRequest
    ) -> tuple[np.ndarray, np.ndarray, Tensor]:
        """Return the order of the clients by id, which of the ordered ones are known,
        and the newest uploads of those.

        Rows are generated in the order of ids, so that noise does not depend on which
        rank hosts a client.
        """
        bank = self._banks[request.seed]
        order = np.argsort(request.clients)
        known, uploads = bank.newest(request.clients[order])
        return order, known, uploads


def _from_id_order(rows: Tensor, request: ClientRequest) -> Tensor:
    """Return rows that were made in the order of ids, in the order of the request.

    The k-th smallest id has the k-th row: noise does not depend on which rank hosts a
    client.
    """
    ranking = np.argsort(np.argsort(request.clients))
    return rows[torch.from_numpy(ranking).to(rows.device)]


def _in_request_order(rows: Tensor, order: np.ndarray, known: np.ndarray) -> KnownRows:
    """Put the known clients' rows back where the request has the clients."""
    count, width = len(order), rows.shape[1]
    positions = order[known]
    is_known = np.zeros(count, bool)
    is_known[positions] = True
    everyones = rows.new_zeros(count, width)
    on_device = torch.from_numpy(positions).to(rows.device)
    everyones[on_device] = rows
    return KnownRows(rows=everyones, known=is_known)


def _num_clients(request: Request) -> int:
    return len(request.clients) if isinstance(request, ClientRequest) else 0


def _model_file(seed: int) -> str:
    """Return the name of a seed's model in a checkpoint."""
    return f"server-{seed}.h5"
