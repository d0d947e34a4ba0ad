"""TensorBoard: event files in the run's own folder."""

from collections.abc import Sequence
from typing import Any

from hpcfed.experiment.tracking.interface import Figures, Tracked
from hpcfed.results.folder import TENSORBOARD

METRICS = ("rounds/accuracy", "rounds/global_accuracy", "rounds/train_loss")
"""What the hyperparameter tab shows next to the options."""


class TensorBoard:
    """Writes to `OUT/tensorboard`."""

    id = ""

    def __init__(self, run: Tracked, known: str) -> None:
        # torch's module loads TensorBoard, which takes seconds.
        from torch.utils import tensorboard

        board: Any = tensorboard
        self._writer = board.SummaryWriter(str(run.folder / TENSORBOARD))
        self._writer.add_text("command", f"`{run.command}`")
        self._writer.add_text("options", _table(run))
        options = {}
        for name, value in run.options.items():
            plain = isinstance(value, bool | int | float | str)
            options[name] = value if plain else str(value)
        shown = dict.fromkeys(METRICS, 0.0)
        *begin, self._end = board.summary.hparams(options, shown)
        for summary in begin:
            self._writer.file_writer.add_summary(summary)

    def rounds(self, figures: Sequence[Figures]) -> None:
        self._add(figures)

    def losses(self, figures: Sequence[Figures]) -> None:
        self._add(figures)

    def _add(self, figures: Sequence[Figures]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        for step, values in figures:
            # One event for all series: add_scalar writes one for each, and takes eight
            # times as long.
            entries = []
            for name, value in values.items():
                entries.append(Summary.Value(tag=name, simple_value=value))
            self._writer.file_writer.add_summary(Summary(value=entries), step)
        # A thread writes them. Flush here, so that its time counts for the tracker.
        self._writer.flush()

    def close(self, status: str) -> None:
        self._writer.add_text("status", status)
        self._writer.file_writer.add_summary(self._end)
        self._writer.close()


def _table(run: Tracked) -> str:
    lines = ["| option | value |", "|---|---|"]
    for name, value in run.options.items():
        # Only these two characters have a meaning inside a Markdown table.
        text = str(value).replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {name} | {text} |")
    return "\n".join(lines)
