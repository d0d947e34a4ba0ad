"""Options of what a run writes, and when."""

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BeforeValidator

from hpcfed.config.declare import Switch, option
from hpcfed.config.run import RunOptions
from hpcfed.errors import UserError, count
from hpcfed.record.metrics import METRICS


def _read_metrics(text: Any) -> Any:
    """Parse `accuracy,top5`; a list of a TOML file is left to the field's type."""
    if not isinstance(text, str):
        return text
    return [word.strip() for word in text.split(",")]


def _check_metrics(names: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Refuse metrics that are unknown or named twice."""
    for name in names or ():
        if name not in METRICS:
            raise ValueError(f"must be of {', '.join(METRICS)}")
    if names is not None and len(set(names)) < len(names):
        raise ValueError("must name every metric once")
    return names or None


Metrics = Annotated[
    tuple[str, ...] | None,
    BeforeValidator(_read_metrics),
    AfterValidator(_check_metrics),
]


class RecordingOptions(RunOptions):
    title: ClassVar[str] = "evaluation, checkpoints and snapshots"

    evaluate_every: int = option(1, "evaluate every N rounds, and after the last", ge=1)
    evaluate_clients: int | None = option(
        None,
        "evaluate only a sample of so many clients, the same in every round "
        "(default: all)",
        ge=0,
    )
    metrics: Metrics = option(
        None,
        f"what models are judged by, as in accuracy,top5: any of {', '.join(METRICS)} "
        "(default: accuracy; for texts also perplexity; for regression loss,r2)",
    )
    # Each 0 below is a plain "never"; nothing else decides in its place.
    checkpoint_every: int = option(
        0,
        "write a checkpoint every N rounds, besides those of --checkpoint-minutes; "
        "0: never",
        ge=0,
    )
    checkpoint_minutes: float = option(
        10.0,
        "write a checkpoint when the last is this old, and a small one after the last "
        "round; 0: never",
        ge=0,
    )
    snapshot_every: int = option(
        0, "write the clients' rows to params-RANK.h5 every N rounds; 0: never", ge=0
    )


def recording_switches(config: RecordingOptions) -> Iterable[Switch]:
    """Name the options of when a run ends that act only where something else is on."""
    if config.early_stop is not None:
        # The first evaluation is always the best so far, and the last ends the run.
        needed = (config.early_stop + 1) * config.evaluate_every + 1
        yield Switch(
            "early_stop", f"--rounds {needed} or more", config.rounds >= needed
        )


def check_recording(config: RecordingOptions) -> None:
    """Refuse a sample of more clients than there are, and snapshots of no round."""
    if config.evaluate_clients is not None and config.evaluate_clients > config.clients:
        raise UserError(
            f"--evaluate-clients {config.evaluate_clients}, but there are "
            f"{count(config.clients, 'client')}"
        )
    # Rarer evaluation and checkpoints are fine: the last round is always evaluated, and
    # a run that ends needs no checkpoint.
    if config.snapshot_every > config.rounds:
        raise UserError(
            f"--snapshot-every {config.snapshot_every}, but the run has only "
            f"{config.rounds} rounds"
        )
