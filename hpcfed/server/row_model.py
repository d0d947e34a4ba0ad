"""A diffusion model of rows: what all of them have in common.

Each maps rows to latents and back in its own way, and denoises latents with a network
that DeepSpeed trains.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hpcfed.kernels import cuda
from hpcfed.server import diffusion
from hpcfed.server.bank import BankedRows
from hpcfed.server.diffusion import Schedule
from hpcfed.server.guidance import Guidance
from hpcfed.server.half_learnt import HalfLearnt
from hpcfed.server.learning import LearningRun, Progress
from hpcfed.server.losses import denoising_loss
from hpcfed.server.networks import ServerNetwork, in_chunks
from hpcfed.server.options import ServerOptions, batching
from hpcfed.server.report import LearningReport
from hpcfed.server.scaling import LatentScaling
from hpcfed.server.streams import Streams
from hpcfed.server.trainer import Loss
from hpcfed.server.training_plan import RankSlot


def silent(network: str, done: int, steps: int, losses: Tensor) -> None:
    """Show no progress."""


class RowModel(ABC):
    """Learns from a bank of rows, and generates rows.

    Calls are collective over the server's ranks. Every rank passes the same rows, or
    its columns of them.
    """

    denoiser: ServerNetwork

    def __init__(self, options: ServerOptions, slot: RankSlot, *, seed: int) -> None:
        self.options = options
        self.slot = slot
        self.streams = Streams(seed, slot.device)
        self.schedule = Schedule.linear(options.diffusion_steps, slot.device)
        self.start: Tensor | None = None
        """What to add a loaded model's updates to, if its file has it."""

    @property
    @abstractmethod
    def is_trained(self) -> bool:
        """Whether the model can generate: it has learnt or was loaded."""

    @property
    def has_learnt(self) -> bool:
        """Whether a checkpoint has something to keep of it."""
        return self.is_trained or self.streams.learnings > 0

    # Learning

    @cuda.without_trials()  # cuDNN's trials found no kernels that were quicker
    def learn(
        self,
        bank: BankedRows,
        progress: Progress = silent,
        half: HalfLearnt | None = None,
    ) -> LearningReport:
        """Learn the distribution of the banked rows, or go on with what is half
        learnt.
        """
        half = half or HalfLearnt()
        run = LearningRun(self.options, self.slot, progress, half, rows=len(bank))
        loss = self._denoising(bank, run)
        run.fit(self, "denoiser", self._new_denoiser, loss)
        self.streams.learnings += 1
        return run.finish()

    @abstractmethod
    def _denoising(self, bank: BankedRows, run: LearningRun) -> Loss:
        """Learn what the denoiser needs, and return its loss on the banked rows."""

    @abstractmethod
    def _new_denoiser(self) -> ServerNetwork:
        """Build a denoiser."""

    # Generating

    @abstractmethod
    def encode(self, rows: Tensor) -> Tensor:
        """Return the standardised latents of rows."""

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Return the rows of standardised latents."""

    @abstractmethod
    def latents_at(self, bank: BankedRows, places: np.ndarray) -> Tensor:
        """Return latents of some banked rows, to map how they lie to each other."""

    @abstractmethod
    def reconstruct(self, rows: Tensor) -> Tensor:
        """Return the rows after a pass to latents and back."""

    @torch.no_grad()
    def invert(
        self, rows: Tensor, *, depth: int | None = None, draw: int = 0
    ) -> Tensor:
        """Return new rows that keep each row's identity. Every `draw` has noise of its
        own.
        """
        steps = self.options.inversion_depth if depth is None else depth
        stream = f"inversion {draw}" if draw else "inversion"

        def inverted(part: str, rows: Tensor) -> Tensor:
            z = self.encode(rows)
            new = diffusion.invert(
                self.schedule,
                self._epsilon,
                z,
                depth=steps,
                noise=self.streams.noise(stream + part, z),
                use=self.options.inversion_noise,
            )
            return self.decode(new)

        return self._in_parts(inverted, rows, steps=steps)

    @abstractmethod
    def sample(self, count: int) -> Tensor:
        """Generate rows from noise alone."""

    @torch.no_grad()
    def _sampled(self, like: Tensor, part: str = "") -> Tensor:
        """Generate as many rows as there are latents in `like`."""
        noise = self.streams.noise(f"sampling{part}", like)
        z = diffusion.sample(self.schedule, self._epsilon, noise)
        return self.decode(z)

    @torch.no_grad()
    def guide(self, before: Tensor, after: Tensor, how: Guidance) -> Tensor:
        """Return rows after local training, guided by what the model has learnt from
        all clients.
        """

        def guided(part: str, before: Tensor, after: Tensor) -> Tensor:
            old = self.encode(before)
            new = self.encode(after)
            z = diffusion.guide(
                self.schedule,
                self._epsilon,
                new,
                new - old,
                how,
                self.streams.noise(how.stream + part, new),
            )
            rows = self.decode(z)
            if not how.moved:
                return rows
            # Keeps what latents cannot say of a newcomer's row.
            return after + rows - self.decode(new)

        return self._in_parts(guided, before, after)

    def _in_parts(
        self, change: Callable[..., Tensor], *rows: Tensor, steps: int = 0
    ) -> Tensor:
        """Return changed rows. A model of long rows changes them part by part, and says
        which part it is: each has noise of its own. `steps` are those whose noise is
        kept.
        """
        return change("", *rows)

    @cuda.without_trials()
    def _epsilon(self, z: Tensor, t: Tensor) -> Tensor:
        # Coordinates are float64, so that a pass to them and back is exact.
        predicted = in_chunks(self.denoiser, z.float(), t, widest=self.denoiser.widest)
        return predicted.to(z.dtype)

    # Files

    @abstractmethod
    def save(self, path: Path, start: Tensor | None = None) -> None:
        """Write the trained model to a file; `start` is what to add its updates to."""

    @abstractmethod
    def load(self, path: Path) -> None:
        """Load a saved model; raise UserError if the file does not fit."""

    def store(self, path: Path, bank: BankedRows) -> None:
        """Write the model to a checkpoint that also holds this bank."""
        self.save(path)

    def restore(self, path: Path, bank: BankedRows) -> None:
        """Load a model from such a checkpoint."""
        self.load(path)


class LatentModel(RowModel):
    """A model that maps the whole bank to latents first, and standardises these."""

    def __init__(self, options: ServerOptions, slot: RankSlot, *, seed: int) -> None:
        super().__init__(options, slot, seed=seed)
        self.latent_scaling: LatentScaling | None = None

    @property
    def is_trained(self) -> bool:
        return self.latent_scaling is not None

    def _denoising(self, bank: BankedRows, run: LearningRun) -> Loss:
        raw = self._learn_latents(bank, run)
        self.latent_scaling = LatentScaling.of(raw)
        z = self.latent_scaling(raw).float()
        self.denoiser = self._denoiser_for(z)
        return denoising_loss(
            z,
            batching(self.options, self.slot.size, "denoiser"),
            self.streams.draws("denoiser"),
            schedule=self.schedule,
        )

    @abstractmethod
    def _learn_latents(self, bank: BankedRows, run: LearningRun) -> Tensor:
        """Learn to map rows to latents, and return those of all banked rows."""

    def _denoiser_for(self, z: Tensor) -> ServerNetwork:
        """Return the network to train on these latents: that of the last learning."""
        return self.denoiser

    @abstractmethod
    def raw_latents(self, rows: Tensor) -> Tensor:
        """Return the latents of rows as they are before standardising."""

    @abstractmethod
    def from_raw(self, latents: Tensor) -> Tensor:
        """Return the rows of such latents."""

    def encode(self, rows: Tensor) -> Tensor:
        assert self.latent_scaling is not None
        return self.latent_scaling(self.raw_latents(rows))

    def decode(self, latents: Tensor) -> Tensor:
        assert self.latent_scaling is not None
        return self.from_raw(self.latent_scaling.undo(latents))

    def latents_at(self, bank: BankedRows, places: np.ndarray) -> Tensor:
        return self.encode(bank.at(places))

    def reconstruct(self, rows: Tensor) -> Tensor:
        return self.from_raw(self.raw_latents(rows))

    def sample(self, count: int) -> Tensor:
        assert self.latent_scaling is not None
        return self._sampled(self.latent_scaling.mean.expand(count, -1))
