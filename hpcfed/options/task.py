"""Refuse metrics, or an accuracy, that the data's task does not have."""

from hpcfed.data import DatasetInfo
from hpcfed.errors import UserError
from hpcfed.options.metrics import METRICS, fitting
from hpcfed.options.runconfig import RunConfig


def check_task(config: RunConfig) -> None:
    """Refuse options that need an accuracy or a metric which the task does not have."""
    data = config.data()
    _check_metrics(config, data)
    is_for = f"{config.dataset} is for {data.task}"
    if data.task in METRICS["accuracy"].tasks:
        return
    if config.target_accuracy is not None:
        raise UserError(f"--target-accuracy: {is_for}, which has no accuracy")
    if config.new_clients:
        raise UserError(
            f"--new-clients are judged by their accuracy, and {is_for}, which has none"
        )


def _check_metrics(config: RunConfig, data: DatasetInfo) -> None:
    for name in config.metrics or ():
        if data.task not in METRICS[name].tasks:
            raise UserError(
                f"--metrics {name} is not for {data.task}, which {config.dataset} is "
                f"for; use {', '.join(fitting(data.task))}"
            )
        if name == "top5" and data.classes <= 5:
            raise UserError(f"--metrics top5 is always 100 % of {data.classes} classes")
