"""Options of the server's model, and what follows from them; imports no torch."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, Literal

from hpcfed import options
from hpcfed.errors import count
from hpcfed.options import LEFT_OUT, Choice, Need, check_layers, option
from hpcfed.server.combinations import check_combination, check_engine
from hpcfed.server.model_options import P_DIFF, ModelOptions
from hpcfed.server.rounds import check_rounds
from hpcfed.server.sizes import MODEL_SIZES, Batching, Size

if TYPE_CHECKING:
    from hpcfed.models.layout import Layout

NETWORKS = ("autoencoder", "denoiser")
"""p-diff's networks, in the order of their training."""
SAMPLES = {"autoencoder": 100_000, "denoiser": 400_000}
"""Default number of training samples of each network."""
TOKEN_SAMPLES = {"denoiser": 50_000}
"""The same for --server-model tokens: a sample is a window of a row."""
BATCH = 50


class ServerOptions(ModelOptions):
    """Options of every method that has a server model."""

    has_server: ClassVar[bool] = True

    # When the model learns, and from what.

    bank_rounds: int = option(
        20,
        "the server learns from the uploads of the last N rounds",
        group="server",
        ge=1,
        calibration=1,
    )
    bank_precision: Literal["fp32", "bf16"] = option(
        "fp32", "type of the numbers in the bank", group="server"
    )
    bank_on: Literal["device", "host"] = option(
        "device",
        "memory that holds the bank",
        group="server",
        tunable=True,
    )
    bank_of: Literal["updates", "uploads"] = option(
        "updates",
        "what the server learns: uploads less the row that their round started from, or "
        "uploads as they are",
        group="server",
        before="uploads",
    )
    server_every: int = option(
        0,
        "train the server after every R rounds too, and start the next one from "
        "generated rows; 0: once, at the end",
        group="server",
        ge=0,
        calibration=LEFT_OUT,
    )
    server_overlap: int = option(
        0,
        "the server begins to learn R rounds before its rows are used, and clients go "
        "on; the rows are then R rounds old; 0: clients wait (the paper's)",
        group="server",
        ge=0,
        calibration=LEFT_OUT,
        needs=Need("--server-ranks 1", lambda run: run.server_ranks > 0),
    )
    autoencoder_samples: int | None = option(
        None,
        "samples that the autoencoder trains on (default: 100,000, or up to 16,000 "
        "with --server auto on a CPU)",
        group="server",
        ge=0,
        calibration=200,
        chosen_later=True,
        zero_was_unset=True,
        needs=P_DIFF,
    )
    denoiser_samples: int | None = option(
        None,
        "samples that the denoiser trains on (default: 400,000, or up to 32,000 with "
        "--server auto on a CPU)",
        group="server",
        ge=0,
        calibration=200,
        chosen_later=True,
        zero_was_unset=True,
    )
    # The steps of AdamW.

    server_batch: int = option(
        BATCH,
        "samples per step, over all server ranks",
        group="server",
        ge=1,
    )
    denoiser_batch: int | None = option(
        None,
        "samples per step of the denoiser (default: --server-batch; --server auto on a "
        "GPU: 400)",
        group="server",
        ge=0,
        chosen_later=True,
        zero_was_unset=True,
    )
    server_micro_batch: int | None = option(
        None,
        "samples that a server rank takes at once and that batch norm normalises over "
        "(default: those of a step, over all ranks)",
        group="server",
        ge=0,
        zero_was_unset=True,
        tunable=True,
    )
    server_lr: float | None = option(
        None,
        "AdamW's learning rate, which follows a cosine (default: by --server)",
        group="server",
        ge=0,
        zero_was_unset=True,
    )
    server_decay: float = option(2e-6, "AdamW's weight decay", group="server", ge=0)
    input_noise: float = option(
        1e-3,
        "noise on the autoencoder's input while it learns",
        group="server",
        ge=0,
        needs=P_DIFF,
    )
    latent_noise: float = option(
        0.1, "noise on its latents while it learns", group="server", ge=0, needs=P_DIFF
    )
    # Diffusion and generation.

    diffusion_steps: int = option(
        1000,
        "T: steps from data to noise",
        group="server",
        ge=2,
        le=10**6,
        shapes_server=True,
    )
    inversion_depth: int = option(
        100,
        "t0 ≤ T: how far an upload is diffused before it is generated anew; after 100 "
        "of 1000 steps 95 % of it is still signal, after T, where the paper's equations "
        "end, nothing",
        group="server",
        ge=0,
    )
    inversion_noise: Literal["recorded", "fresh", "none"] = option(
        "recorded",
        "noise of generation: the upload's own, taken off (the paper's), fresh, or "
        "none (DDIM)",
        group="server",
        needs=Need("an --inversion-depth above 0", lambda run: run.inversion_depth > 0),
    )
    # The training engine, its precision, and where its state is kept.

    server_engine: Literal["deepspeed", "torch"] = option(
        "deepspeed",
        "who trains: DeepSpeed, or a plain loop on one rank to compare with",
        group="server",
        tunable=True,
    )
    zero_stage: int = option(
        0,
        "ZeRO: what server ranks share out: 1 optimiser, 2 gradients, 3 parameters",
        group="server",
        ge=0,
        le=3,
        calibration=LEFT_OUT,
        tunable=True,
    )
    server_precision: Literal["fp32", "bf16"] = option(
        "fp32",
        "arithmetic of the server's networks; bf16 with ZeRO 1 to 3 keeps parameters "
        "in it too (--server auto on a GPU without ZeRO: bf16)",
        group="server",
        chosen_later=True,
        chosen_with="server",
        tunable=True,
    )
    server_checkpointing: bool = option(
        False,
        "compute activations anew in the backward pass, to save memory",
        group="server",
        tunable=True,
    )
    server_offload: Literal["none", "optimizer", "parameters"] = option(
        "none",
        "what stays in host memory: the optimiser's state (ZeRO 1 to 3), parameters "
        "too (ZeRO 3)",
        group="server",
        tunable=True,
    )
    # The trained model in a file.

    server_load: str = option(
        "",
        "start from this server.h5, saved by an earlier run",
        group="server",
        calibration=LEFT_OUT,
    )
    server_save: bool = option(
        True,
        "keep the trained server as server.h5 in the run's folder",
        group="server",
        follows_network=True,
        chosen_later=True,
    )

    def fit(self, config: options.RunConfig, ranks: int) -> Iterable[Choice]:
        """Replace defaults that do not fit the run."""
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
        # Without server ranks every worker trains the model, too.
        trainers = config.server_ranks or ranks
        # At least two samples per rank: batch norm needs them.
        if self.server_batch % trainers or self.server_batch < 2 * trainers:
            share = max(2, -(-self.server_batch // trainers))
            reason = (
                f"{trainers} ranks share it evenly; --server-batch takes other "
                f"multiples of {trainers}"
            )
            yield Choice("server_batch", share * trainers, reason)

    def check_layout(self, layout: "Layout", network: str) -> None:
        """Refuse to generate more layers than the network has."""
        self._check_layers(len(layout.trained_blocks), network)

    def _check_layers(self, most: int, network: str) -> None:
        check_layers("generated_layers", self.generated_layers, most, network)

    def check(self, config: options.RunConfig) -> None:
        """Refuse options that do not fit the run or each other."""
        info = config.model_info()
        if info is not None:
            self._check_layers(info.layers, config.network())
        check_rounds(
            bank_rounds=self.bank_rounds,
            every=self.server_every,
            overlap=self.server_overlap,
            rounds=config.rounds,
        )
        check_combination(self)

    def check_ranks(self, ranks: int) -> None:
        """Refuse options with which this number of ranks cannot train."""
        check_engine(self, ranks)
        for network in self.networks:
            batching(self, ranks, network)

    @property
    def networks(self) -> tuple[str, ...]:
        """The model's networks, in the order of their training."""
        return NETWORKS if self.server_model == "p-diff" else ("denoiser",)

    def batch(self, network: str) -> int:
        """Return the number of samples of one step, over all server ranks."""
        if network == "denoiser" and self.denoiser_batch:
            return self.denoiser_batch
        return self.server_batch

    def samples(self, network: str) -> int:
        """Return the number of training samples of a network."""
        given: int | None = getattr(self, f"{network}_samples")
        return given or self.default_samples[network]

    @property
    def default_samples(self) -> dict[str, int]:
        """The number of training samples of each network if no option says it."""
        return TOKEN_SAMPLES if self.server_model == "tokens" else SAMPLES

    @property
    def size(self) -> Size:
        """The size of the networks: that of --server, unless single options differ."""
        # A run turns auto into a size once it knows its devices (see auto.py).
        sizes = MODEL_SIZES[self.server_model]
        preset = sizes["paper" if self.server == "auto" else self.server]
        return Size(
            width=self.server_width or preset.width,
            latent=self.server_latent or preset.latent,
            depth=self.server_depth or preset.depth,
            lr=self.server_lr or preset.lr,
            denoiser_depth=self.denoiser_depth,
        )


def server_options(settings: options.Settings) -> ServerOptions | None:
    """Return the server's options of a run; None if its method has no server model."""
    options = settings.options
    return options if isinstance(options, ServerOptions) else None


def batching(options: ServerOptions, ranks: int, network: str) -> Batching:
    """Divide the network's batch into micro-batches, over accumulated passes and ranks."""
    own = network == "denoiser" and options.denoiser_batch
    return Batching.of(
        options.batch(network),
        ranks,
        micro=options.server_micro_batch,
        flag="--denoiser-batch" if own else "--server-batch",
        # Only p-diff has batch norm.
        least=2 if options.server_model == "p-diff" else 1,
    )
