"""Merges engine calls of several runs into one call with more rows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hpcfed.clients.job import Losses, RowEngine, Score, TrainingJob
from hpcfed.clients.objective import Wanted
from hpcfed.clients.pull import Pull, merge_pulls
from hpcfed.data.shards import Shard, SubShard
from hpcfed.runtime.accelerator import is_gpu
from hpcfed.runtime.device import on_device


@dataclass(frozen=True, eq=False)
class EvaluationJob:
    rows: Tensor
    shard: Shard
    clients: np.ndarray
    wanted: Wanted


Job = TrainingJob | EvaluationJob
Answer = tuple[Tensor, Losses] | Score
"""Rows and losses of a training, or a score."""


def mergeable(a: Job, b: Job) -> bool:
    """Whether two jobs can be one: equal work on clients of one larger shard."""
    if not isinstance(a.shard, SubShard) or not isinstance(b.shard, SubShard):
        return False
    # Clients of different shards have their images in different memory.
    if a.shard.whole is not b.shard.whole:
        return False
    if isinstance(a, TrainingJob) and isinstance(b, TrainingJob):
        # Rows may have different learning rates.
        same_recipe = a.recipe == replace(b.recipe, lr=a.recipe.lr)
        return (
            same_recipe
            and a.rates is b.rates is None
            and _mergeable_pulls(a.pull, b.pull)
            and (a.correction is None) == (b.correction is None)
            and (a.gates is None) == (b.gates is None)
            and (a.limits is None) == (b.limits is None)
            and _equal(a.columns, b.columns)
        )
    if isinstance(a, EvaluationJob) and isinstance(b, EvaluationJob):
        return a.wanted == b.wanted and _stackable(a.rows) and _stackable(b.rows)
    return False


def _stackable(rows: Tensor) -> bool:
    """Whether the engine scores such rows of several runs faster in one call.

    On a CPU one row expanded to many clients is scored faster than that many rows. On a
    GPU it takes as long for each run as one call takes for all of them.
    """
    expanded = len(rows) > 1 and rows.stride(0) == 0
    return is_gpu(rows.device) or not expanded


def _mergeable_pulls(a: Pull | None, b: Pull | None) -> bool:
    if a is None:
        return b is None
    return a.mergeable(b)


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a is b or torch.equal(a, b)


def run_merged(jobs: Sequence[Job], engine: RowEngine) -> list[Answer]:
    """Run mergeable jobs by one call of the engine; return an answer for each."""
    if len(jobs) == 1:
        return [_run(_on_whole(jobs[0]), engine)]
    answer = _run(_merged(jobs), engine)
    # Each run gets its own rows back, in the order in which they went in.
    counts = [len(job.rows) for job in jobs]
    if not isinstance(answer, Score):
        rows, losses = answer
        means = losses.mean.split(counts)
        seen = losses.seen.split(counts)
        positions: Sequence[Tensor | None] = [None] * len(jobs)
        if losses.positions is not None:
            positions = losses.positions.split(counts)
        of_jobs = map(Losses, means, seen, positions)
        return list(zip(rows.split(counts), of_jobs, strict=True))
    split = {name: sums.split(counts) for name, sums in answer.sums.items()}
    scores: list[Answer] = []
    for number in range(len(jobs)):
        scores.append(Score({name: sums[number] for name, sums in split.items()}))
    return scores


def _on_whole(job: Job) -> Job:
    """Return the job on the larger shard, for which the engine already has memory and
    captured steps from other runs' jobs.
    """
    part = job.shard
    if not isinstance(part, SubShard):
        return job
    return replace(job, shard=part.whole, clients=job.clients + part.first)


def _run(job: Job, engine: RowEngine) -> Answer:
    if isinstance(job, TrainingJob):
        return engine.train(job)
    return engine.evaluate(job.rows, job.shard, job.clients, job.wanted)


def _merged(jobs: Sequence[Job]) -> Job:
    """Return one job on the larger shard, for the clients of all jobs in turn."""
    positions = []
    for job in jobs:
        assert isinstance(job.shard, SubShard)
        # From positions in the run's shard to those in the larger one.
        positions.append(job.clients + job.shard.first)
        whole = job.shard.whole
    rows = torch.cat([job.rows for job in jobs])
    clients = np.concatenate(positions)
    trainings = [job for job in jobs if isinstance(job, TrainingJob)]
    if not trainings:
        wanted = [job.wanted for job in jobs if isinstance(job, EvaluationJob)]
        return EvaluationJob(rows, whole, clients, wanted[0])
    pulls = [job.pull for job in trainings if job.pull is not None]
    corrections = [job.correction for job in trainings if job.correction is not None]
    gates = [job.gates for job in trainings if job.gates is not None]
    limits = [job.limits for job in trainings if job.limits is not None]
    # What is not replaced, such as the recipe and the columns, is equal: see
    # `mergeable`.
    return replace(
        trainings[0],
        rows=rows,
        shard=whole,
        clients=clients,
        keys=torch.cat([job.keys for job in trainings]),
        pull=merge_pulls(pulls) if pulls else None,
        correction=torch.cat(corrections) if corrections else None,
        gates=torch.cat(gates) if gates else None,
        rates=_merged_rates(trainings),
        limits=np.concatenate(limits) if limits else None,
    )


def _merged_rates(jobs: Sequence[TrainingJob]) -> Tensor | None:
    """Return a learning rate per client; None if the first job's holds for all."""
    if len({job.recipe.lr for job in jobs}) == 1:
        return None
    each = [np.full(len(job.rows), job.recipe.lr) for job in jobs]
    return on_device(np.concatenate(each), jobs[0].rows.device)
