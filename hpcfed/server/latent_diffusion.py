"""The paper's model of rows: p-diff's autoencoder, and a denoiser of its latents."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from hpcfed.kernels import cuda
from hpcfed.server import storage
from hpcfed.server.bank import BankedRows
from hpcfed.server.learning import LearningRun, rebuilt_with
from hpcfed.server.losses import reconstruction_loss
from hpcfed.server.networks import Autoencoder, Denoiser, in_chunks
from hpcfed.server.options import ServerOptions, batching
from hpcfed.server.row_model import LatentModel
from hpcfed.server.scaling import LatentScaling, RowScaling
from hpcfed.server.storage import SavedServer
from hpcfed.server.training_plan import RankSlot

GROUPS = ("autoencoder", "denoiser", "standard", "latents")
"""The groups of tensors in its file."""


class LatentDiffusion(LatentModel):
    """An autoencoder of rows and a denoiser of its latents.

    Every server rank passes the same whole rows.
    """

    denoiser: Denoiser

    def __init__(
        self,
        widths: Sequence[int],
        options: ServerOptions,
        slot: RankSlot,
        *,
        seed: int,
    ) -> None:
        """Build the model of rows; `widths` are the generated tensors' columns."""
        super().__init__(options, slot, seed=seed)
        self._widths = list(widths)
        self.row_scaling: RowScaling | None = None
        # Restore the global random stream afterwards: other code relies on it.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.streams.seed("initial weights"))
            self.autoencoder = self._new_autoencoder()
            self.denoiser = self._new_denoiser()
        if options.server_load:
            self.load(Path(options.server_load))

    def _learn_latents(self, bank: BankedRows, run: LearningRun) -> Tensor:
        # Measure the scaling anew: rows have moved since the last learning.
        rows = bank.rows()
        self.row_scaling = RowScaling.of(rows, self._widths)
        x = self.row_scaling(rows)
        loss = reconstruction_loss(
            x,
            batching(self.options, self.slot.size, "autoencoder"),
            self.streams.draws("autoencoder"),
            latent=self.options.size.latent,
        )
        run.fit(self, "autoencoder", self._new_autoencoder, loss)
        # The denoiser learns the latents of the autoencoder as it is now.
        with run.phase("encode"):
            return self._encode(x)

    def _new_autoencoder(self) -> Autoencoder:
        return Autoencoder(
            sum(self._widths),
            self.options.size,
            input_noise=self.options.input_noise,
            latent_noise=self.options.latent_noise,
        )

    def _new_denoiser(self) -> Denoiser:
        return Denoiser(self.options.size)

    def raw_latents(self, rows: Tensor) -> Tensor:
        assert self.row_scaling is not None
        return self._encode(self.row_scaling(rows))

    def from_raw(self, latents: Tensor) -> Tensor:
        assert self.row_scaling is not None
        return self.row_scaling.undo(self._decode(latents))

    @torch.no_grad()
    @cuda.without_trials()
    def _encode(self, x: Tensor) -> Tensor:
        network = self.autoencoder
        return in_chunks(network.encode, x, widest=network.widest)

    @torch.no_grad()
    @cuda.without_trials()
    def _decode(self, z: Tensor) -> Tensor:
        network = self.autoencoder
        return in_chunks(network.decode, z, widest=network.widest)

    def save(self, path: Path, start: Tensor | None = None) -> None:
        assert self.row_scaling is not None and self.latent_scaling is not None
        if self.slot.rank:
            return
        groups = {
            "autoencoder": self.autoencoder.state_dict(),
            "denoiser": self.denoiser.state_dict(),
            "standard": vars(self.row_scaling),
            "latents": vars(self.latent_scaling),
        }
        saved = SavedServer(groups, self.streams.learnings, start)
        storage.write(path, saved, self._widths, self.options)

    def load(self, path: Path) -> None:
        device = self.slot.device
        with storage.refusing(path):
            saved = storage.read(path, self._widths, self.options, device, GROUPS)
            groups = saved.groups
            rows = RowScaling(**groups["standard"])
            latents = LatentScaling(**groups["latents"])
            storage.check_scaling(rows, sum(self._widths))
            storage.check_scaling(latents, self.options.size.latent)
            autoencoder = rebuilt_with(groups["autoencoder"], self._new_autoencoder)
            denoiser = rebuilt_with(groups["denoiser"], self._new_denoiser)
        self.autoencoder = autoencoder.to(device)
        self.denoiser = denoiser.to(device)
        self.row_scaling = rows
        self.latent_scaling = latents
        self.streams.learnings = saved.learnings
        self.start = saved.start
