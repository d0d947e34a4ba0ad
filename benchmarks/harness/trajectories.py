"""Twenty tiny rounds of every method: what clients lose and how often they are right
after each, exactly, and with noise as large as rounding could be.

Networks are smooth, so that rounding flips nothing inside them. What a method chooses
(GenFed's uploads, pruned channels, the layers that clients send) can still flip, and so
can an answer: the noise shows how near the next tie is.
"""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness.fingerprints import METHODS
from hpcfed import cli
from hpcfed.clients.job import Losses, TrainingJob
from hpcfed.experiment.assemble import Setup, assemble
from hpcfed.experiment.evaluate import evaluate
from hpcfed.experiment.serving import choose_server
from hpcfed.runtime import world as worlds
from hpcfed.runtime.device import leaving_unchanged
from hpcfed.runtime.timer import Timer
from hpcfed.runtime.world import World

ROUNDS = 20
FIGURES = ("train_loss", "loss", "accuracy")
"""Mean loss in a round's local training; then means over clients on their own test data."""
UNITS = {"fp64": 2.0**-53, "fp32": 2.0**-24}
"""Half the distance from 1 to the next number: the largest relative error of rounding."""
TERMS = 64
"""Rounding errors of a gradient, which is a sum of thousands of terms with both signs, in
units of an update; the tests of the engine allow the same.
"""
SMOOTH = "benchmarks.harness.smooth"
COMMON = (
    f"--rounds {ROUNDS} --dataset {SMOOTH}:digits --clients 4 --participation 0.7 "
    "--epochs 1 --batch-size 64 --lr 0.1 --metrics accuracy,loss --deterministic"
)
NETWORKS = {
    "--model cnn-digits": f"--model {SMOOTH}:convolved",
    "--model cnn-bn": f'--model {SMOOTH}:convolved --model-options {{"norm":true}}',
}
"""Smooth networks in place of the catalogue's."""
OWN = {
    "fedfina": "--shared-layers fc1",
    "fedlg": "--gene-pools fc1",
    **dict.fromkeys(
        ("genfed", "genfedau", "genfedumf"), "--schedule constant --rho-max 2"
    ),
    "parfed": "--shared-layers fc1",
    "pfedgpa": "--server-engine torch --server-latent 8 --autoencoder-samples 100 "
    "--denoiser-samples 100 --server-batch 20 --diffusion-steps 50 "
    "--inversion-depth 10 --server-every 10",
}
"""Options beyond those of fingerprints, or with other values."""

Trainer = Callable[[TrainingJob], tuple[Tensor, Losses]]
Change = Callable[[Setup], None]
"""Changes a run before its first round."""


@dataclass(frozen=True)
class Trajectory:
    """What a run showed after each round."""

    figures: dict[str, list[float]]
    bits: str
    """SHA-256 of the figures and of all clients' rows after the last round."""


@dataclass(frozen=True)
class Noise:
    """Moves every row that local training returns: by `times` what rounding could have
    moved it, which is two units of the row in each step and `TERMS` of its update.
    """

    unit: float
    times: float
    draw: int

    def __call__(self, setup: Setup) -> None:
        """Let this run's clients train with noise."""
        setattr(setup.engine, "train", self._around(setup.engine.train))  # noqa: B010

    def _around(self, train: Trainer) -> Trainer:
        generator = torch.Generator().manual_seed(self.draw)

        def moved(job: TrainingJob) -> tuple[Tensor, Losses]:
            trained, losses = train(job)
            start = torch.zeros_like(trained) if job.recipe.gradient else job.rows
            update = trained - start
            drawn = torch.randn(update.shape, generator=generator, dtype=torch.float64)
            # What stayed as it was has not been computed.
            drawn = drawn.to(update) * (update != 0)
            lengths = drawn.norm(dim=1).clamp(min=torch.finfo(drawn.dtype).tiny)
            size = TERMS * update.norm(dim=1)
            if not job.recipe.gradient:
                steps = torch.from_numpy(job.num_steps()).to(update)
                size += 2 * steps * trained.norm(dim=1)
            factors = self.unit * self.times * size / lengths
            return trained + drawn * factors.unsqueeze(1), losses

        return moved


def words_of(method: str) -> str:
    """Return the options of a method's run, without precision and device."""
    own = METHODS.get(method, "")
    for catalogued, smooth in NETWORKS.items():
        own = re.sub(rf"{catalogued}\b", smooth, own)
    if "--model" not in own:
        own += f" --model {SMOOTH}:dense"
    words = f"--method {method} {COMMON} {own} {OWN.get(method, '')}"
    return " ".join(words.split())


def follow(
    method: str,
    precision: str,
    *,
    device: str = "cpu",
    rounds: int = ROUNDS,
    more: str = "",
    change: Change | None = None,
) -> Trajectory:
    """Make the first rounds of a method's run, in one thread. `more` options replace the
    run's own.
    """
    words = f"{words_of(method)} --precision {precision} --device {device} {more}"
    if device != "cpu":
        # Bits are compared on CPUs alone, and cuBLAS would have to be set up for this.
        words += " --no-deterministic"
    with leaving_unchanged():
        world = worlds.enter(device=device)
        setup = _assembled(words, world)
        torch.set_num_threads(1)
        if change is not None:
            change(setup)
        return _followed(setup, rounds)


def _assembled(words: str, world: World) -> Setup:
    settings = cli.parse_run(words.split())
    settings = choose_server(settings, gpu=world.device.type != "cpu")
    return assemble(settings, world, Timer(world.device))


def _followed(setup: Setup, rounds: int) -> Trajectory:
    method, fed = setup.method, setup.federation
    state = method.init(fed)
    figures: dict[str, list[float]] = {name: [] for name in FIGURES}
    for round in range(rounds):
        cohort = fed.sample(round, None, method.pool(fed, state, round))
        state = method.round(fed, state, cohort)
        fed.close_round(cohort)
        found = evaluate(setup, state)
        figures["train_loss"].append(
            float(cohort.log.loss_sum) / float(cohort.log.samples_seen)
        )
        figures["loss"].append(found.metrics["loss"])
        figures["accuracy"].append(found.accuracy)
    rows = method.personal(fed, state, np.arange(len(fed.clients)))
    if setup.settings.options.has_server:
        fed.server.leave()
    digest = hashlib.sha256(np.array([figures[name] for name in FIGURES]).tobytes())
    digest.update(rows.cpu().contiguous().numpy().tobytes())
    return Trajectory(figures, digest.hexdigest())
