"""The server's side: it banks uploads, trains the model on them, and generates rows.

Every server rank handles every request, because training is collective and all ranks
hold the same model. With --server-model p-diff each holds the whole bank, with others its
columns of it.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from hpcfed.errors import Diverged, Halted
from hpcfed.results.folder import HALF_LEARNT, LEARNING
from hpcfed.server.bank import UploadBank
from hpcfed.server.columns import Columns
from hpcfed.server.half_learnt import AllGather, Asked, HalfLearnt
from hpcfed.server.identity import Identity
from hpcfed.server.latent_diffusion import LatentDiffusion
from hpcfed.server.learning import Progress
from hpcfed.server.messages import A, Failure, Halt, Request, divide, merge
from hpcfed.server.options import ServerOptions
from hpcfed.server.progress import leaving_signs
from hpcfed.server.row_model import RowModel
from hpcfed.server.span import SpanDiffusion
from hpcfed.server.tokens import TokenDiffusion
from hpcfed.server.training_plan import RankSlot


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
        allgather: AllGather,
    ) -> None:
        """Prepare for generated tensors of these `widths`, which are their numbers of
        columns, in order. `allgather` collects a value of every server rank.
        """
        self.options = options
        if options.server_model == "p-diff":
            self.columns = Columns.all_of(widths)
        else:
            self.columns = Columns.share_of(widths, slot.rank, slot.size)
        self.slot = slot
        self.allgather = allgather
        self.folders: dict[int, Path] = {}
        """The folders of the seeds' runs, as far as `Begin` has named them."""
        self.asked: Asked = lambda: False
        """Tells whether a learning is to stop, as far as this rank knows."""
        self._progress = progress
        self._banks: dict[int, UploadBank] = {}
        self._models: dict[int, RowModel] = {}
        # Refuse a file that does not fit now, not after hours of local training.
        if options.server_load:
            for seed in seeds:
                self.model(seed)

    def handle(self, requests: Sequence[Request[A]]) -> list[A | Failure]:
        """Return each worker's answer to the request that all of them have sent."""
        begin = time.perf_counter()
        request = merge(requests)
        try:
            answer: A | Failure = request.handle(self)
        except Diverged as error:
            # Workers end the run: they know its folder, and which rank prints the line.
            answer = Failure(reason=str(error))
        except Halted:
            answer = Halt()
        seconds = time.perf_counter() - begin
        counts = [each.num_clients for each in requests]
        return divide(replace(answer, seconds=seconds), counts)

    def model(self, seed: int) -> RowModel:
        """Return the seed's model; build it on first use."""
        if seed not in self._models:
            self._models[seed] = self._new_model(seed)
        return self._models[seed]

    def _new_model(self, seed: int) -> RowModel:
        columns, options, slot = self.columns, self.options, self.slot
        if options.server_model == "span":
            return SpanDiffusion(columns, options, slot, seed=seed)
        if options.server_model == "tokens":
            return TokenDiffusion(columns, options, slot, seed=seed)
        return LatentDiffusion(columns.widths, options, slot, seed=seed)

    def has_learnt(self, seed: int) -> bool:
        """Tell whether the seed's model has learnt, without building one."""
        return seed in self._models and self._models[seed].has_learnt

    def bank(self, seed: int) -> UploadBank:
        """Return the seed's bank of uploads."""
        if seed not in self._banks:
            options = self.options
            self._banks[seed] = UploadBank(
                options.bank_rounds,
                self.columns,
                dtype=torch.bfloat16 if options.bank_precision == "bf16" else None,
                on_host=options.bank_on == "host",
            )
        return self._banks[seed]

    def half_learnt(self, seed: int, identity: Identity, *, every: float) -> HalfLearnt:
        """Return what saves a learning in the run's folder, and finds it there."""
        folder = self.folders.get(seed)
        return HalfLearnt(
            None if folder is None else folder / HALF_LEARNT,
            identity,
            rank=self.slot.rank,
            every=0.0 if folder is None else every,
            asked=self.asked,
            allgather=self.allgather,
        )

    @contextmanager
    def showing_progress(self, seed: int) -> Iterator[Progress]:
        """Yield a callback that shows a learning's progress: lines, and on the first
        rank a sign in the run's folder.
        """
        folder = self.folders.get(seed)
        if folder is None or self.slot.rank:
            yield self._progress
            return
        with leaving_signs(folder / LEARNING) as leave:

            def tell(network: str, done: int, steps: int, losses: Tensor) -> None:
                self._progress(network, done, steps, losses)
                leave(network, done, steps, losses)

            yield tell
