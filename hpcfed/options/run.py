"""Options of the run itself: its method, its length, its clients, seeds and folder."""

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, Literal

from hpcfed.errors import UserError, count
from hpcfed.options.declare import OptionGroup, Switch, option
from hpcfed.options.seeds import Seed, Seeds
from hpcfed.options.traits import MethodTraits


class RunOptions(OptionGroup):
    title: ClassVar[str] = "the run"

    # Not a Literal: any file of the user's may be a method.
    method: str = option(
        "fedavg", "the method; `hpcfed list` names all; or FILE.py with your own"
    )
    rounds: int = option(20, "communication rounds", ge=1)
    clients: int = option(20, "simulated clients", ge=1)
    participation: float = option(
        1.0, "share of the clients sampled in a round; at least one is", gt=0, le=1
    )
    cohort: int | None = option(
        None, "clients sampled in a round, in place of --participation", ge=0
    )
    sampling: Literal["fixed", "poisson"] = option(
        "fixed",
        "who is sampled in a round: fixed, so many clients without replacement; "
        "poisson, each client by itself, so that their number varies",
    )
    # Each excludes the other; a record of one seed of several holds `seed` alone.
    seed: Seed = option(0, "seed of every random stream")
    seeds: Seeds = option(
        None,
        "several seeds at once, as in 0..4 or 0,3,7; results go to OUT/seed-N",
    )
    # Without --out the folder is named when the run starts: by the root, for all ranks.
    out: Path | None = option(
        None, "folder for the results (default: runs/METHOD-DATASET-TIME)"
    )
    overwrite: bool = option(False, "replace what earlier runs have written to --out")
    init: Path | None = option(
        None,
        "weights to start from: the folder of a run with a global model, or a file "
        "with a tensor for each name (.npz, .safetensors)",
    )
    # `cli.resume` turns the next three into the settings of the run that is there.
    resume: Path | None = option(
        None,
        "continue the run in this folder from its last checkpoint, also a complete "
        "one with more --rounds; takes no other option than that, --device, --backend, "
        "--requeue, --accept-changes, --tensorboard, --wandb, --mlflow and --overwrite, "
        "which starts again where there is no checkpoint",
    )
    accept_changes: bool = option(
        False,
        "with --resume: go on although a file of yours, such as that of the method, "
        "has changed since the run began",
    )
    requeue: bool = option(
        False,
        "for a job that Slurm may requeue: start, or continue what this same job has "
        "written to --out (default: runs/slurm-JOB)",
    )
    # Above 1, because 0.8 can only be a slip for 80.
    target_accuracy: float | None = option(
        None,
        "record when this accuracy in per cent, as in 80, is reached: by the global "
        "model, or by the clients' mean where there is none",
        gt=1,
        le=100,
    )
    stop_at_target: bool = option(
        False, "end the run in the round that reaches --target-accuracy"
    )
    early_stop: int | None = option(
        None,
        "end the run after so many evaluations in a row without a better accuracy: of "
        "the clients' mean, or of the global model where there is none; by the global "
        "model's loss where answers are not right or wrong",
        ge=0,
    )

    @property
    def cohort_size(self) -> int:
        """The number of clients sampled in a round."""
        return self.cohort_among(self.clients)

    def cohort_among(self, clients: int) -> int:
        """Return the number that is sampled in a round from so many clients."""
        if self.cohort is not None:
            return min(self.cohort, clients)
        # max(C·K, 1) of McMahan et al. 2017, Algorithm 1.
        return max(1, round(self.participation * clients))

    @property
    def num_seeds(self) -> int:
        """The number of seeds that this run advances together."""
        return 1 if self.seeds is None else len(self.seeds)


def run_switches(config: RunOptions) -> Iterable[Switch]:
    """Name the options of this group that act only where something else is on."""
    has_target = config.target_accuracy is not None
    yield Switch("stop_at_target", "--target-accuracy 80", has_target)
    yield Switch("participation", "leaving --cohort out", config.cohort is None)
    yield Switch("overwrite", "--out", config.out is not None)
    yield Switch("accept_changes", "--resume", config.resume is not None)


def check_run(config: RunOptions, method: MethodTraits) -> None:
    """Refuse a cohort of more clients than there are, weights that are not there, and to
    stop early a run whose server has yet to be trained.
    """
    if config.cohort is not None and config.cohort > config.clients:
        raise UserError(
            f"--cohort {config.cohort}, but there are {count(config.clients, 'client')}"
        )
    if config.init is not None and not config.init.exists():
        raise UserError(
            f"--init {config.init}: no such file or folder; give a run's folder, or "
            "weights as .npz or .safetensors"
        )
    if not method.has_server:
        return
    for flag, on in (
        ("--stop-at-target", config.stop_at_target),
        ("--early-stop", config.early_stop is not None),
    ):
        if on:
            raise UserError(
                f"{flag}: the server of method {config.method} learns only after the "
                "last round"
            )
