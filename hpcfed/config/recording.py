"""Options of what a run writes, and when."""

from typing import ClassVar

from hpcfed.config.declare import option
from hpcfed.config.run import RunOptions
from hpcfed.errors import UserError


class RecordingOptions(RunOptions):
    title: ClassVar[str] = "evaluation, checkpoints and snapshots"

    evaluate_every: int = option(1, "evaluate every N rounds, and after the last", ge=1)
    # Each 0 below is a plain "never"; nothing else decides in its place.
    checkpoint_every: int = option(
        0,
        "write a checkpoint every N rounds, besides those of --checkpoint-minutes; "
        "0: never",
        ge=0,
    )
    checkpoint_minutes: float = option(
        10.0, "write a checkpoint when the last is this old; 0: never", ge=0
    )
    snapshot_every: int = option(
        0, "write the clients' rows to params-RANK.h5 every N rounds; 0: never", ge=0
    )


def check_recording(config: RecordingOptions) -> None:
    """Refuse snapshots that would never be written."""
    # Rarer evaluation and checkpoints are fine: the last round is always evaluated, and
    # a run that ends needs no checkpoint.
    if config.snapshot_every > config.rounds:
        raise UserError(
            f"--snapshot-every {config.snapshot_every}, but the run has only "
            f"{config.rounds} rounds"
        )
