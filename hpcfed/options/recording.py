"""Options of what a run writes, and when."""

from importlib.util import find_spec
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BeforeValidator

from hpcfed.errors import UserError, count
from hpcfed.options.data import LANGUAGE
from hpcfed.options.declare import LEFT_OUT, facts_of, option
from hpcfed.options.metrics import METRICS
from hpcfed.options.run import RunOptions


def _read_metrics(text: Any) -> Any:
    """Parse `accuracy,top5`; leave a list from a TOML file to the field's type."""
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


LEAST_TELEMETRY = 0.1
"""Least seconds between two samples: drivers renew their figures as seldom."""


class RecordingOptions(RunOptions):
    title: ClassVar[str] = "evaluation, checkpoints and snapshots"

    evaluate_every: int = option(
        1,
        "evaluate every N rounds, and after the last",
        ge=1,
        calibration=LEFT_OUT,
        also="eval_every eval_interval eval_gap test_every eval_freq "
        "frequency_of_the_test evaluation_frequency rounds_per_eval "
        "test_interval",
    )
    evaluate_clients: int | None = option(
        None,
        "evaluate only a sample of this many clients, the same in every round "
        "(default: all)",
        ge=0,
        counts="clients",
        also="eval_clients num_eval_clients fraction_evaluate "
        "min_evaluate_clients test_clients val_cohort_size",
    )
    metrics: Metrics = option(
        None,
        f"what models are judged by, as in accuracy,top5: any of {', '.join(METRICS)} "
        "(default: accuracy; for texts also perplexity; for regression loss,r2)",
        changes="which figures",
        also="metric measures eval_metrics",
    )
    # Each 0 below means "never", not "unset".
    checkpoint_every: int = option(
        0,
        "write a checkpoint every N rounds, besides those of --checkpoint-minutes; "
        "0: never",
        ge=0,
        changes="time",
        calibration=LEFT_OUT,
        also="checkpoint save_every checkpoint_interval save_freq",
    )
    checkpoint_minutes: float = option(
        10.0,
        "write a checkpoint when the last is this old, save a server's learning as "
        "often, and write a small checkpoint after the last round; 0: never",
        ge=0,
        changes="time",
        calibration=LEFT_OUT,
    )
    snapshot_every: int = option(
        0,
        "write the clients' rows to params-RANK.h5 every N rounds; 0: never",
        ge=0,
        calibration=LEFT_OUT,
        also="snapshots snapshot_interval",
    )
    generate: int = option(
        0,
        "after the last round, let the language model continue this many prompts of the "
        "test set, and write that to OUT/generated.jsonl",
        ge=0,
        changes="nothing",
        beside_resume=True,
        calibration=LEFT_OUT,
        also="generate_samples num_generate sample_outputs",
        needs=LANGUAGE,
    )
    telemetry: float = option(
        1.0,
        "seconds between samples of GPUs, cores, memory and network, which the record "
        "and the run's page show over time; 0: none",
        ge=0,
        le=1e6,
        changes="nothing",
        beside_resume=True,
        calibration=0.0,
        also="system_metrics log_system_metrics monitor_gpu sample_interval",
    )
    # Trackers get copies: the record has all figures without them.
    tensorboard: bool = option(
        False,
        "also write all figures for TensorBoard, to OUT/tensorboard; look at them with "
        "tensorboard --logdir OUT",
        changes="nothing",
        beside_resume=True,
        calibration=LEFT_OUT,
        package=True,
    )
    wandb: str | None = option(
        None,
        "also send all figures to this project of Weights & Biases, as its own package "
        "is set up (WANDB_MODE=offline sends nothing)",
        changes="nothing",
        beside_resume=True,
        from_record=False,
        calibration=LEFT_OUT,
        package=True,
    )
    mlflow: str | None = option(
        None,
        "also send all figures to this experiment of MLflow, at MLFLOW_TRACKING_URI",
        changes="nothing",
        beside_resume=True,
        from_record=False,
        calibration=LEFT_OUT,
        package=True,
    )


def check_trackers(config: RecordingOptions) -> None:
    """Refuse trackers whose packages are not installed."""
    for package, field in RecordingOptions.model_fields.items():
        if not facts_of(field).package:
            continue
        if getattr(config, package) and find_spec(package) is None:
            raise UserError(
                f"--{package} needs the package {package}, which is not installed: "
                f"pip install {package}"
            )


def check_recording(config: RecordingOptions) -> None:
    """Refuse to evaluate more clients than there are, and snapshots of no round."""
    check_trackers(config)
    if 0 < config.telemetry < LEAST_TELEMETRY:
        raise UserError(
            f"--telemetry {config.telemetry:g}: from {LEAST_TELEMETRY} seconds on, or 0"
        )
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
