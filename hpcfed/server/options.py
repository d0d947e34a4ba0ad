"""What can be said about the server's model; imports no torch."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from hpcfed import config
from hpcfed.config import Choice, Switch, option
from hpcfed.errors import UserError, count
from hpcfed.models import MODELS

NETWORKS = ("autoencoder", "denoiser")


@dataclass(frozen=True)
class Size:
    """How large the server's networks are."""

    width: int
    """Channels of the first convolution; later ones have up to 4 times more, the
    denoiser's 2^(depth−2), at least 4.
    """
    latent: int
    depth: int
    """Convolutions of the encoder, each of which halves the length."""
    lr: float = 1e-3
    """AdamW's learning rate."""


SAMPLES = {"autoencoder": 100_000, "denoiser": 400_000}
"""Samples that the networks see while they learn."""
CPU_SAMPLES = {"autoencoder": 20_000, "denoiser": 80_000}
"""Samples for a server that is chosen for a CPU: measured on one core, two minutes for
3,658 generated columns.
"""
BATCH = 50

SIZES = {
    "small": Size(4, 32, 2, 3e-3),
    "paper": Size(64, 256, 5),
    "large": Size(512, 1024, 5),
}
"""`paper`: 40 million parameters of the autoencoder for the CIFAR-10 network's last two
layers; `large`: a billion.
"""


class ServerOptions(config.Options):
    has_server: ClassVar[bool] = True

    server: Literal["auto", "small", "paper", "large"] = option(
        "auto",
        "size of the server's networks; auto: paper on a GPU, small with fewer samples on a CPU",
        group="server",
    )
    server_width: int | None = option(
        None,
        "channels of their first convolution, fastest as a power of two (default: by "
        "--server)",
        group="server",
        ge=0,
        le=2**16,
    )
    server_latent: int | None = option(
        None,
        "size of the latent space (default: by --server)",
        group="server",
        ge=0,
        le=2**20,
    )
    server_depth: int | None = option(
        None,
        "convolutions of the encoder (default: by --server)",
        group="server",
        ge=0,
        le=12,
    )
    generated_layers: int | None = option(
        None,
        "the server generates the last N layers with weights (default: all, or the "
        "last two of more than 20,000 columns)",
        group="server",
        ge=0,
    )
    bank_rounds: int = option(
        20,
        "the server learns from the uploads of the last N rounds",
        group="server",
        ge=1,
    )
    server_every: int = option(
        0, "train the server after every R rounds too, and start the next one from generated rows; 0: once, at the end",
        group="server", ge=0,
    )  # fmt: skip
    autoencoder_samples: int | None = option(
        None,
        "samples that the autoencoder trains on (default: 100,000, or 20,000 with "
        "--server auto on a CPU)",
        group="server",
        ge=0,
    )
    denoiser_samples: int | None = option(
        None,
        "samples that the denoiser trains on (default: 400,000, or 80,000 with "
        "--server auto on a CPU)",
        group="server",
        ge=0,
    )
    server_batch: int = option(
        BATCH, "samples per step, over all server ranks", group="server", ge=1
    )
    denoiser_batch: int | None = option(
        None,
        "samples per step of the denoiser (default: --server-batch)",
        group="server",
        ge=0,
    )
    server_micro_batch: int | None = option(
        None,
        "samples that a server rank takes at once and that batch norm normalises over "
        "(default: those of a step, over all ranks)",
        group="server",
        ge=0,
    )
    server_lr: float | None = option(
        None,
        "AdamW's learning rate, which follows a cosine (default: by --server)",
        group="server",
        ge=0,
    )
    server_decay: float = option(2e-6, "AdamW's weight decay", group="server", ge=0)
    input_noise: float = option(
        1e-3, "noise on the autoencoder's input while it learns", group="server", ge=0
    )
    latent_noise: float = option(
        0.1, "noise on its latents while it learns", group="server", ge=0
    )
    diffusion_steps: int = option(
        1000, "T: steps from data to noise", group="server", ge=2, le=10**6
    )
    inversion_depth: int = option(100, "t0 ≤ T: how far an upload is diffused before it is generated anew",
                                  group="server", ge=0)  # fmt: skip
    inversion_noise: Literal["recorded", "fresh", "none"] = option(
        "recorded", "noise of generation: the upload's own, taken off (the paper's), fresh, or none (DDIM)",
        group="server",
    )  # fmt: skip
    server_engine: Literal["deepspeed", "torch"] = option(
        "deepspeed",
        "who trains: DeepSpeed, or a plain loop on one rank to compare with",
        group="server",
    )
    zero_stage: int = option(0, "ZeRO: what server ranks share out: 1 optimiser, 2 gradients, 3 parameters",
                             group="server", ge=0, le=3)  # fmt: skip
    server_precision: Literal["fp32", "bf16"] = option(
        "fp32",
        "arithmetic of the server's networks; bf16 with ZeRO 1 to 3 keeps parameters in it too",
        group="server",
    )
    server_checkpointing: bool = option(
        False,
        "compute activations anew in the backward pass, to save memory",
        group="server",
    )
    server_offload: Literal["none", "optimizer", "parameters"] = option(
        "none", "what stays in host memory: the optimiser's state (ZeRO 1 to 3), parameters too (ZeRO 3)",
        group="server",
    )  # fmt: skip
    server_load: str = option(
        "", "start from this server.h5, saved by an earlier run", group="server"
    )
    server_save: bool = option(
        True, "keep the trained server as server.h5 in the run's folder", group="server"
    )

    def fit(self, config: config.RunConfig, ranks: int) -> Iterable[Choice]:
        if self.bank_rounds > config.rounds:
            yield Choice(
                "bank_rounds",
                config.rounds,
                f"the run has only {count(config.rounds, 'round')}; --rounds makes more",
            )
        if self.inversion_depth > self.diffusion_steps:
            yield Choice(
                "inversion_depth",
                self.diffusion_steps,
                "it goes no further than --diffusion-steps",
            )
        learning = config.server_ranks or ranks
        if self.server_batch % learning or self.server_batch < 2 * learning:
            share = max(2, -(-self.server_batch // learning))
            reason = f"{learning} ranks share it evenly; --server-batch takes other multiples of {learning}"
            yield Choice("server_batch", share * learning, reason)

    def choose(self, *, gpu: bool) -> Iterable[Choice]:
        few = self.server == "auto" and not gpu
        if self.server == "auto":
            other = (
                "--server small asks for less"
                if gpu
                else "--server paper asks for the paper's"
            )
            device = "a GPU" if gpu else "a CPU, where larger ones take hours"
            yield Choice(
                "server", "paper" if gpu else "small", f"it learns on {device}; {other}"
            )
        for network in NETWORKS:
            name, samples = (
                f"{network}_samples",
                (CPU_SAMPLES if few else SAMPLES)[network],
            )
            if not getattr(self, name):
                reason = (
                    "it learns on a CPU" if few else f"as --server {self.server} says"
                )
                yield Choice(
                    name, samples, f"{reason}; {config.flag_of(name)} asks for others"
                )

    def switches(self, config: config.RunConfig) -> Iterable[Switch]:
        yield Switch(
            "inversion_noise", "an --inversion-depth above 0", self.inversion_depth > 0
        )

    def check(self, config: config.RunConfig) -> None:
        most = MODELS[config.network()].layers
        if self.generated_layers is not None and self.generated_layers > most:
            raise UserError(
                f"--generated-layers {self.generated_layers}, but {config.network()} "
                f"has {most} layers with weights"
            )
        if self.bank_rounds > config.rounds:
            raise UserError(
                f"--bank-rounds {self.bank_rounds}, but the run has only "
                f"{count(config.rounds, 'round')}"
            )
        if self.server_every > config.rounds:
            raise UserError(
                f"--server-every {self.server_every}, but the run has only "
                f"{count(config.rounds, 'round')}"
            )
        if self.inversion_depth > self.diffusion_steps:
            raise UserError(
                f"--inversion-depth {self.inversion_depth} is beyond --diffusion-steps "
                f"{self.diffusion_steps}"
            )
        if self.server_offload != "none" and not self.zero_stage:
            raise UserError(
                f"--server-offload {self.server_offload} needs --zero-stage 1, 2 or 3"
            )
        if self.server_offload == "parameters" and self.zero_stage != 3:
            raise UserError("--server-offload parameters needs --zero-stage 3")
        if self.server_load and not Path(self.server_load).is_file():
            raise UserError(f"--server-load {self.server_load}: no such file")

    def check_ranks(self, ranks: int) -> None:
        if self.server_engine == "torch" and (ranks > 1 or self.zero_stage):
            raise UserError(
                "--server-engine torch is a plain loop on one rank: no ZeRO, and no "
                "other rank that learns"
            )
        for network in NETWORKS:
            batching(self, ranks, network)

    def batch(self, network: str) -> int:
        """Samples of one step."""
        return (
            self.denoiser_batch or self.server_batch
            if network == "denoiser"
            else self.server_batch
        )

    def samples(self, network: str) -> int:
        """Samples that a network sees while it learns."""
        given: int | None = getattr(self, f"{network}_samples")
        return given or SAMPLES[network]

    @property
    def size(self) -> Size:
        preset = SIZES["paper" if self.server == "auto" else self.server]
        return Size(
            self.server_width or preset.width,
            self.server_latent or preset.latent,
            self.server_depth or preset.depth,
            self.server_lr or preset.lr,
        )


def server_options(settings: config.Settings) -> ServerOptions | None:
    """Return the server's options of a run; None where its method has no server."""
    options = settings.options
    return options if isinstance(options, ServerOptions) else None


@dataclass(frozen=True)
class Batching:
    """How a step's samples are divided."""

    micro: int
    accumulation: int
    ranks: int
    shared: bool = False
    """Ranks normalise and draw for the whole batch, of which each has a part; else for
    every micro-batch by itself.
    """

    @property
    def batch(self) -> int:
        return self.micro * self.accumulation * self.ranks

    @property
    def drawn(self) -> int:
        """Samples that are drawn together."""
        return self.batch if self.shared else self.micro

    def slice_of(self, number: int) -> tuple[int, slice]:
        """Return the draw that a micro-batch of a step belongs to, and its slice of it."""
        if not self.shared:
            return number, slice(None)
        return 0, slice(number * self.micro, (number + 1) * self.micro)


def batching(options: ServerOptions, ranks: int, network: str) -> Batching:
    """Divide the network's batch among micro-batch, accumulation and ranks.

    Without --server-micro-batch every number of ranks learns the same: ranks share the
    statistics of one batch.
    """
    batch, micro = options.batch(network), options.server_micro_batch
    shared = not micro and ranks > 1
    flag = (
        "--denoiser-batch"
        if network == "denoiser" and options.denoiser_batch
        else "--server-batch"
    )
    if batch % ranks:
        raise UserError(
            f"{flag} {batch} cannot be shared by {ranks} server ranks; use a multiple of {ranks}"
        )
    share = batch // ranks
    micro = micro or share
    if share % micro:
        raise UserError(
            f"--server-micro-batch {micro} does not divide the {share} samples of a server rank "
            f"({flag} {batch} on {ranks})"
        )
    if (batch if shared else micro) < 2:
        raise UserError(
            f"{flag} {batch} leaves a micro-batch of {micro}; batch norm needs two samples"
        )
    return Batching(micro, share // micro, ranks, shared)


def check_columns(options: ServerOptions, columns: int) -> None:
    """What depends on the number of generated columns."""
    if options.size.latent > columns:
        raise UserError(
            f"a latent of {options.size.latent} is larger than the {columns} generated columns; "
            "use a smaller --server-latent or more --generated-layers"
        )
