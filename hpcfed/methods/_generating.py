"""The options of pFedGPA, in addition to those of every method with a server model."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from hpcfed.errors import UserError
from hpcfed.options import LEFT_OUT, NEWCOMERS, Choice, Need, RunConfig, option
from hpcfed.server.combinations import check_depth
from hpcfed.server.guidance import Guidance, LatentEntry, Sign
from hpcfed.server.options import ServerOptions

_GUIDED = Need(
    "--new-clients 10 and --guided-updates",
    lambda run: run.new_clients > 0 and run.guided_updates > 0,
)
_OF_UPDATES = Need("--bank-of updates", lambda run: run.bank_of == "updates")


def _read_depths(text: Any) -> Any:
    """Parse `50,100`; leave a list from a TOML file to the field's type."""
    return text.split(",") if isinstance(text, str) else text


def _check_depths(depths: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Refuse depths that do not rise."""
    if depths is not None and list(depths) != sorted(set(depths)):
        raise ValueError("must rise, as in 50,100,200")
    return depths or None


Depths = Annotated[
    tuple[Annotated[int, Field(ge=1)], ...] | None,
    BeforeValidator(_read_depths),
    AfterValidator(_check_depths),
]


class Options(ServerOptions):
    finetune_epochs: int | None = option(
        None,
        "epochs of fine-tuning at the end (default: --epochs; 0: none)",
        zero=True,
        ge=0,
        le=100_000,
        zero_was_unset=True,
    )
    direct: bool = option(
        False,
        "also judge rows that are generated without inversion, as in the paper's ablation",
    )
    memorisation: bool = option(
        False,
        "also measure how far generated rows are from uploads, and judge six rivals, "
        "of which four learn nothing",
    )
    depth_sweep: Depths = option(
        None,
        "at the end, also judge rows that the same model generates from other depths "
        "than --inversion-depth, as in 50,100,200,350,500,1000: their accuracy, whose "
        "they are, and how far they are from uploads",
        changes="which figures",
        calibration=LEFT_OUT,
    )
    generated_body: Literal["global", "own"] = option(
        "global",
        "columns beside generated ones: FedAvg's, or those of the client's newest upload "
        "(which keeps a row of every client)",
    )
    warm_start: bool = option(
        False, "clients begin with columns that the loaded server generates"
    )
    warm_rows: Literal["each", "average"] = option(
        "each",
        "a warm start's rows: a sample for each client, or the average of these for all",
        needs=Need("--warm-start", lambda run: run.warm_start),
    )
    guided_updates: int = option(
        3,
        "new clients: local updates after which the server guides them",
        ge=0,
        needs=NEWCOMERS,
    )
    guidance: float = option(
        0.0,
        "new clients: ω, what their own progress counts for beyond once; -1: nothing",
        ge=-1,
        needs=_GUIDED,
    )
    guided_start: int = option(
        20, "new clients: diffusion time at which guidance starts", ge=1, needs=_GUIDED
    )
    guided_steps: int = option(
        20, "new clients: reverse steps of one guidance", ge=1, needs=_GUIDED
    )
    guided_noise: bool = option(
        False,
        "new clients: add fresh noise in each of these steps, as line 12 prints",
        needs=_GUIDED,
    )
    guided_sign: Sign = option(
        "progress",
        "new clients: guide along their progress, or by line 11's printed sign, against "
        "it",
        needs=_GUIDED,
    )
    guided_reference: Literal["fedavg", "before"] = option(
        "fedavg",
        "new clients: the row from which the model counts their update: FedAvg's, or "
        "their own before each local update",
        needs=(_OF_UPDATES, _GUIDED),
    )
    guided_entry: LatentEntry = option(
        "clean",
        "new clients: how a latent enters --guided-start: as it is, scaled as noise would "
        "scale it, or noised",
        needs=_GUIDED,
    )
    guided_return: Literal["auto", "decoded", "moved"] = option(
        "auto",
        "new clients: replace their row by what is decoded, or move it as far as guidance "
        "moved its reconstruction (auto: decoded; span: moved)",
        needs=_GUIDED,
    )

    guided_within: float | None = option(
        None,
        "new clients: pull guided rows towards FedAvg's, to at most N times the usual "
        "distance of generated rows from it (default: not)",
        ge=0,
        needs=_GUIDED,
    )

    def guiding(self, update: int) -> Guidance:
        """Return how new clients are guided after a local update, counted from 0."""
        moved = self.guided_return == "moved"
        if self.guided_return == "auto":
            # Rows of new clients lie outside the space that span knows.
            moved = self.server_model == "span"
        return Guidance(
            strength=self.guidance,
            start=self.guided_start,
            steps=self.guided_steps,
            sign=self.guided_sign,
            entry=self.guided_entry,
            fresh_noise=self.guided_noise,
            moved=moved,
            stream=f"guidance {update}",
        )

    def fit(self, config: RunConfig, ranks: int) -> Iterable[Choice]:
        yield from super().fit(config, ranks)
        if self.guided_start > self.diffusion_steps:
            reason = "it goes no further than --diffusion-steps"
            yield Choice("guided_start", self.diffusion_steps, reason)

    def check(self, config: RunConfig) -> None:
        super().check(config)
        if self.warm_start and not self.server_load:
            raise UserError(
                "--warm-start needs a trained server: add --server-load with a "
                "server.h5 of an earlier run"
            )
        if self.server_load and self.server_model == "span" and not self.warm_start:
            raise UserError(
                "--server-load changes nothing without --warm-start: span learns anew "
                "from every bank"
            )
        if self.depth_sweep:
            check_depth("--depth-sweep", self.depth_sweep[-1], self)
        if config.new_clients and self.guided_updates:
            # Given by the user: `fit` has lowered the default.
            check_depth("--guided-start", self.guided_start, self)
