"""The latent diffusion model of rows: it learns from a bank of uploads and generates
rows.
"""

import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from hpcfed.kernels import cuda
from hpcfed.runtime import randomness
from hpcfed.runtime.timer import observer
from hpcfed.server import diffusion, storage
from hpcfed.server.diffusion import Schedule, Sign
from hpcfed.server.engines import make_trainer, recomputing
from hpcfed.server.losses import (
    Draws,
    check_losses,
    denoising_loss,
    reconstruction_loss,
)
from hpcfed.server.networks import (
    Autoencoder,
    Denoiser,
    in_chunks,
    num_parameters,
)
from hpcfed.server.options import NETWORKS, ServerOptions, batching
from hpcfed.server.report import LearningReport, peak_flops
from hpcfed.server.scaling import LatentScaling, RowScaling
from hpcfed.server.schedule import num_steps
from hpcfed.server.sizes import Batching
from hpcfed.server.storage import SavedServer
from hpcfed.server.trainer import Loss, StepProgress, Trainer
from hpcfed.server.training_plan import RankSlot, TrainingPlan

LARGE = 10_000_000
"""Number of parameters from which garbage collection is worth its fifth of a second."""

Progress = Callable[[str, int, int, Tensor], None]
"""Called after every step with the network, steps done, all steps, and the losses so
far, which are on the device.
"""


class LatentDiffusion:
    """An autoencoder of rows and a denoiser of its latents.

    Calls are collective over the server's ranks, and every rank passes the same rows.
    """

    def __init__(
        self,
        widths: Sequence[int],
        options: ServerOptions,
        slot: RankSlot,
        *,
        seed: int,
    ) -> None:
        """Build the model of rows; `widths` are the generated tensors' columns."""
        self.options = options
        self.slot = slot
        self._widths = list(widths)
        self._seed = seed
        self._learnings = 0
        self._steps = num_steps(options)
        self.schedule = Schedule.linear(options.diffusion_steps, slot.device)
        self.row_scaling: RowScaling | None = None
        self.latent_scaling: LatentScaling | None = None
        self.start: Tensor | None = None
        """What to add a loaded model's updates to, if its file has it."""
        # Restore the global random stream afterwards: other code relies on it.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._derived_seed("initial weights"))
            self.autoencoder = self._new_autoencoder()
            self.denoiser = Denoiser(options.size)
        if options.server_load:
            self.load(Path(options.server_load))

    @property
    def is_trained(self) -> bool:
        """Whether the model can generate: it has learnt or was loaded."""
        return self.latent_scaling is not None

    # Learning

    @cuda.without_trials()  # cuDNN's trials found no kernels that were quicker
    def learn(
        self,
        rows: Tensor,
        progress: Progress = lambda network, done, steps, losses: None,
    ) -> LearningReport:
        """Learn the distribution of the rows, starting from the current networks."""
        started = self._clock()
        report = LearningReport(
            rows=len(rows),
            ranks=self.slot.size,
            peak_flops=peak_flops(self.slot.device, self.options),
        )
        # Measure the scaling anew: rows have moved since the last learning.
        self.row_scaling = RowScaling.of(rows, self._widths)
        x = self.row_scaling(rows)
        flops = self.autoencoder.flops()
        self._fit("autoencoder", self._reconstruction(x), flops, report, progress)
        # The denoiser learns the latents of the autoencoder as it is now.
        begin = self._clock()
        with observer().span("encode"):
            z = self._encode(x)
            self.latent_scaling = LatentScaling.of(z)
        report.seconds["encode"] = self._clock() - begin
        z = self.latent_scaling(z)
        flops = self.denoiser.flops(self.options.size.latent)
        self._fit("denoiser", self._denoising(z), flops, report, progress)
        self._learnings += 1
        # The remaining time went into building networks and engines.
        counted = sum(report.seconds.values())
        elapsed = self._clock() - started
        report.seconds["prepare"] = elapsed - counted
        return report

    def _reconstruction(self, x: Tensor) -> Loss:
        division = self._batching("autoencoder")
        draws = self._draws("autoencoder")
        latent = self.options.size.latent
        return reconstruction_loss(x, division, draws, latent=latent)

    def _denoising(self, z: Tensor) -> Loss:
        division = self._batching("denoiser")
        draws = self._draws("denoiser")
        return denoising_loss(z, division, draws, schedule=self.schedule)

    def _batching(self, name: str) -> Batching:
        return batching(self.options, self.slot.size, name)

    def _fit(
        self,
        name: str,
        loss: Loss,
        flops: int,
        report: LearningReport,
        progress: Progress,
    ) -> None:
        """Train one network, and record its cost. `flops` is that of one sample's
        forward pass.
        """
        trainer = self._trainer(name, report)
        steps = self._steps[name]
        begin = self._clock()
        tell = _observed(progress, name, steps)
        with observer().span(name):
            losses = trainer.fit(loss, steps, tell)
        check_losses(name, losses, self.options)
        report.losses[name] = losses
        report.seconds[name] = self._clock() - begin
        report.note_peak(self.slot.device)
        samples = steps * self._batching(name).batch
        report.samples[name] = samples
        # A backward pass takes twice the FLOPs of a forward pass.
        report.flops[name] = 3.0 * flops * samples
        tensors = self._trained_tensors(trainer)
        rebuilt = self._rebuild(name, tensors)
        trainer.close()
        # Garbage collection only works without a reference to the trainer here.
        del trainer
        large = report.parameters[name] >= LARGE
        on_gpu = self.slot.device.type == "cuda"
        if large or on_gpu or self.options.zero_stage:
            # DeepSpeed's objects form reference cycles, which hold moments and captured
            # passes.
            gc.collect()
        rebuilt.to(self.slot.device)

    def _trainer(self, name: str, report: LearningReport) -> Trainer:
        network: Autoencoder | Denoiser = getattr(self, name)
        if self.options.server_checkpointing:
            network.checkpoint = recomputing(self.options)
        report.parameters[name] = num_parameters(network)
        # Before DeepSpeed starts, because it resets the device's peak memory.
        report.note_peak(self.slot.device)
        plan = TrainingPlan(
            options=self.options,
            batching=self._batching(name),
            slot=self.slot,
            steps=self._steps[name],
        )
        return make_trainer(network, plan)

    def _trained_tensors(self, trainer: Trainer) -> dict[str, Tensor]:
        """Return the trained network's tensors.

        ZeRO gathers whole tensors in addition to what it holds. Keep them on the host
        until ZeRO has freed its own.
        """
        tensors = {}
        for name, tensor in trainer.tensors():
            tensors[name] = tensor.cpu() if self.options.zero_stage else tensor
        return tensors

    def _rebuild(self, name: str, tensors: dict[str, Tensor]) -> nn.Module:
        """Replace a network by a plain one with these tensors, and return it.

        The old network, which DeepSpeed has wrapped, is dropped.
        """
        network: nn.Module
        # On the meta device: initial weights would cost time and memory, and advance
        # the global random stream.
        with torch.device("meta"):
            if name == "autoencoder":
                self.autoencoder = network = self._new_autoencoder()
            else:
                self.denoiser = network = Denoiser(self.options.size)
        network.load_state_dict(tensors, assign=True)
        return network.eval()

    def _new_autoencoder(self) -> Autoencoder:
        return Autoencoder(
            sum(self._widths),
            self.options.size,
            input_noise=self.options.input_noise,
            latent_noise=self.options.latent_noise,
        )

    # Generating

    def reconstruct(self, rows: Tensor) -> Tensor:
        """Return the rows after a pass through the autoencoder and back."""
        assert self.row_scaling is not None
        latents = self._encode(self.row_scaling(rows))
        x = self._decode(latents)
        return self.row_scaling.undo(x)

    def encode(self, rows: Tensor) -> Tensor:
        """Return the standardised latents of rows."""
        assert self.row_scaling is not None and self.latent_scaling is not None
        x = self.row_scaling(rows)
        latents = self._encode(x)
        return self.latent_scaling(latents)

    def decode(self, latents: Tensor) -> Tensor:
        """Return the rows of standardised latents."""
        assert self.row_scaling is not None and self.latent_scaling is not None
        raw = self.latent_scaling.undo(latents)
        x = self._decode(raw)
        return self.row_scaling.undo(x)

    @torch.no_grad()
    def invert(self, rows: Tensor, *, depth: int | None = None) -> Tensor:
        """Return new rows that keep each row's identity."""
        z = self.encode(rows)
        if depth is None:
            depth = self.options.inversion_depth
        inverted = diffusion.invert(
            self.schedule,
            self._epsilon,
            z,
            depth=depth,
            noise=self._noise("inversion", z),
            use=self.options.inversion_noise,
        )
        return self.decode(inverted)

    @torch.no_grad()
    def sample(self, count: int) -> Tensor:
        """Generate rows from noise alone."""
        latent = self.options.size.latent
        like = torch.empty(count, latent, device=self.slot.device)
        noise = self._noise("sampling", like)
        z = diffusion.sample(self.schedule, self._epsilon, noise)
        return self.decode(z)

    @torch.no_grad()
    def guide(
        self,
        before: Tensor,
        after: Tensor,
        *,
        strength: float,
        start: int,
        steps: int,
        sign: Sign = "progress",
        noise: str | None = None,
    ) -> Tensor:
        """Return rows after local training, guided by what the model has learnt from
        all clients. `noise` names the random stream of fresh noise; None: no noise.
        """
        old = self.encode(before)
        new = self.encode(after)
        guided = diffusion.guide(
            self.schedule,
            self._epsilon,
            new,
            new - old,
            strength=strength,
            start=start,
            steps=steps,
            sign=sign,
            noise=None if noise is None else self._noise(noise, new),
        )
        return self.decode(guided)

    @cuda.without_trials()
    def _epsilon(self, z: Tensor, t: Tensor) -> Tensor:
        return in_chunks(self.denoiser, z, t, widest=self.denoiser.widest)

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

    # Randomness depends on seed, purpose and number of learnings, never on the rank.

    def _derived_seed(self, purpose: str) -> int:
        key = f"server {purpose}"
        numbers = randomness.generator(self._seed, key, self._learnings)
        return int(numbers.integers(2**62))

    def _draws(self, purpose: str) -> Draws:
        """Return a generator that is set to (step, number of the draw)."""
        base = self._derived_seed(purpose)
        random = torch.Generator(self.slot.device)

        def draw(step: int, number: int) -> torch.Generator:
            # A step has fewer than 2^16 draws, so no two draws share a seed.
            position = base + (step << 16) + number
            return random.manual_seed(position % 2**63)

        return draw

    def _noise(self, purpose: str, like: Tensor) -> diffusion.Noise:
        random = torch.Generator(like.device)
        random.manual_seed(self._derived_seed(purpose))
        return lambda: torch.randn(
            like.shape, device=like.device, dtype=like.dtype, generator=random
        )

    def _clock(self) -> float:
        if self.slot.device.type == "cuda":
            torch.cuda.synchronize(self.slot.device)
        return time.perf_counter()

    # Files

    def save(self, path: Path, start: Tensor | None = None) -> None:
        """Write the trained model to a file; `start` is what to add its updates to."""
        assert self.row_scaling is not None and self.latent_scaling is not None
        networks = {}
        for name in NETWORKS:
            networks[name] = getattr(self, name).state_dict()
        saved = SavedServer(
            networks=networks,
            rows=self.row_scaling,
            latents=self.latent_scaling,
            learnings=self._learnings,
            start=start,
        )
        storage.write(path, saved, self._widths, self.options)

    def load(self, path: Path) -> None:
        """Load a saved model; raise UserError if the file does not fit."""
        with storage.refusing(path):
            saved = storage.read(path, self._widths, self.options, self.slot.device)
            for name, tensors in saved.networks.items():
                self._rebuild(name, tensors).to(self.slot.device)
        self.row_scaling = saved.rows
        self.latent_scaling = saved.latents
        self._learnings = saved.learnings
        self.start = saved.start


def _observed(progress: Progress, name: str, steps: int) -> StepProgress:
    """Return a callback that reports each step to progress lines and to a profile."""
    watch = observer()

    def tell(done: int, losses: Tensor) -> None:
        progress(name, done, steps, losses)
        watch.step(name, done, steps)

    return tell
