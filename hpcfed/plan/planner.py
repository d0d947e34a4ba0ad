"""Predicts one run on any number of ranks, and how many to give to the server."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np

from hpcfed.analysis.costmodel import Range
from hpcfed.clients.engine import LOOP_ABOVE_COLUMNS
from hpcfed.clients.network import client_layout
from hpcfed.models.layout import Layout
from hpcfed.options import Settings
from hpcfed.plan.constants import Calibration
from hpcfed.plan.rounds import RoundPlan, Target, plan_round, rank_loads
from hpcfed.plan.server import LearningPlan, plan_learning
from hpcfed.plan.shares import train_sizes
from hpcfed.plan.speeds import LinkSpeed
from hpcfed.server.options import ServerOptions
from hpcfed.server.schedule import banked_rows, num_learnings


@dataclass(frozen=True)
class Split:
    """A run with a given number of server ranks."""

    server_ranks: int
    """0: all ranks are both workers and servers."""
    workers: int
    seconds: Range
    """Seconds of all rounds and learnings."""
    memory: float
    """Bytes of the fullest rank."""


@dataclass(frozen=True)
class Plan:
    """What a run will take."""

    notes: list[str]
    """What the figures are based on."""
    rounds: dict[int, RoundPlan]
    """The prediction of a round, by the number of ranks."""
    learnings: list[LearningPlan]
    """The server's learning by ranks and ZeRO stage; empty without a server."""
    splits: list[Split]
    best: Split | None
    all_rounds: Range
    """Seconds of all rounds if all ranks are workers, without the server's learning."""
    whole: Range | None
    """Seconds of all rounds and learnings on all ranks, with the best split; None if
    the server's learning is not planned.
    """


class Planner:
    """Predicts one run on any number of ranks."""

    def __init__(
        self,
        settings: Settings,
        constants: Calibration,
        link: LinkSpeed,
        *,
        per_node: int,
    ) -> None:
        self._settings = settings
        self._constants = constants
        self._link = link
        self._per_node = per_node
        config = settings.config
        self.layout: Layout = client_layout(config)
        self._sizes: np.ndarray = train_sizes(config)

    def round(self, ranks: int) -> RoundPlan:
        """Predict a round on `ranks` workers."""
        config = self._settings.config
        large = self.layout.num_columns > LOOP_ABOVE_COLUMNS
        mode = "loop" if large or config.engine == "loop" else "batched"
        work = self._settings.options.local_work(config, self.layout)
        loads = rank_loads(self._settings, work, self._sizes, ranks, mode=mode)
        target = Target(ranks=ranks, per_node=self._per_node, link=self._link)
        columns = self.layout.num_columns
        return plan_round(self._constants, loads, target, columns=columns)

    def learning(self, options: ServerOptions, ranks: int, stage: int) -> LearningPlan:
        """Predict a learning on `ranks` ranks."""
        return plan_learning(
            self._constants,
            options,
            self.layout,
            ranks=ranks,
            zero_stage=stage,
            link=self._link,
            clients=self._settings.config.clients,
            rows=banked_rows(options, self._settings.config),
        )

    def all_rounds(self, ranks: int) -> Range:
        """Predict the seconds of all rounds on `ranks` workers."""
        config = self._settings.config
        found = self.round(ranks)
        # Rounded up: the last round is always evaluated.
        evaluations = -(-config.rounds // config.evaluate_every)
        return found.seconds * config.rounds + found.evaluation * evaluations

    def split(self, options: ServerOptions, ranks: int, server_ranks: int) -> Split:
        """Predict the whole run with `server_ranks` for the server."""
        workers = ranks - server_ranks
        trainers = server_ranks or ranks
        learning = self.learning(options, trainers, options.zero_stage)
        times = num_learnings(options, self._settings.config.rounds)
        # Of a worker and of a server rank; the fuller of the two decides whether the
        # run fits.
        memory = [self.round(workers).memory.middle, learning.memory.middle]
        return Split(
            server_ranks=server_ranks,
            workers=workers,
            seconds=self.all_rounds(workers) + learning.seconds * times,
            # Ranks with both roles hold both.
            memory=max(memory) if server_ranks else sum(memory),
        )


def candidates(ranks: int, batches: Sequence[int]) -> list[int]:
    """Return the numbers of server ranks to compare: none, and each number that divides
    every network's batch evenly, with at least two samples per rank for the batch norm,
    and leaves a worker.
    """
    # A number divides all batches if it divides their greatest common divisor.
    common, most = gcd(*batches), min(batches) // 2
    own = range(1, min(ranks - 1, most) + 1)
    return [0, *(number for number in own if common % number == 0)]


def best_split(
    numbers: Sequence[int], split: Callable[[int], Split], memory: float
) -> tuple[Split, list[Split]]:
    """Return the fastest split that fits into `memory` (0: unknown), and all splits."""
    every = [split(number) for number in numbers]
    fitting = [found for found in every if not memory or found.memory <= memory]
    # If nothing fits, take the one that needs least.
    if not fitting:
        return min(every, key=lambda found: found.memory), every
    return min(fitting, key=lambda found: found.seconds.middle), every
