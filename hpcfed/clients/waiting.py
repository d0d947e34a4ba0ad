"""An engine that waits instead of training, to observe the harness alone."""

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcfed.clients.engine import Engine
from hpcfed.clients.job import Losses, TrainingJob
from hpcfed.runtime.device import on_device

SHIFT = 2.0**-20
"""What a wait adds to every trained column of client 0; client i gets i + 1 times as
much. A power of 2, so that float32 loses little of it.
"""


class WaitingEngine(Engine):
    """Waits instead of training, to observe the harness alone: more ranks than cores can
    start, aggregate, record and resume.

    A call takes the same time, however many clients it is for.
    Each client's row moves by a known amount, so that a mean over clients can be
    checked. Evaluation is real.
    """

    def __init__(self, *arguments: Any, seconds: float, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._seconds = seconds
        self.reason = f"waits {seconds:g} s in place of training, for tests"

    def train(self, job: TrainingJob) -> tuple[Tensor, Losses]:
        """Wait, and return rows that have moved by their client's shift."""
        time.sleep(self._seconds)
        sizes = job.shard.samples[job.clients]
        ids = job.shard.clients[job.clients]
        has_data = sizes > 0
        shifts = np.where(has_data, SHIFT * (ids + 1), 0.0)
        by_client = on_device(shifts, job.rows.device).to(job.rows.dtype)
        moved = by_client[:, None].expand_as(job.rows)
        if job.columns is not None:
            moved = moved * job.columns
        trained = moved.clone() if job.recipe.gradient else job.rows + moved
        # No loss was computed: report 0, because NaN would cause a warning.
        losses = job.rows.new_zeros(len(job.rows))
        losses[on_device(~has_data, job.rows.device)] = torch.nan
        seen = job.num_samples()
        self.samples += int(seen.sum())
        return trained, Losses(losses, on_device(seen, job.rows.device))
