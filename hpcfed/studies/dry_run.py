"""What a study would do: every point, its command, and its estimated cost.

Seconds are the counted work at the speed of the study's finished runs, or at a guessed
speed until one is finished.
"""

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from hpcfed.errors import count, printable
from hpcfed.experiment.serving import choose_server
from hpcfed.options import Settings
from hpcfed.plan.assumptions import UNMEASURED
from hpcfed.plan.work import RunWork, run_work
from hpcfed.results.run import RunRecord
from hpcfed.results.study import read_outcome
from hpcfed.runtime import accelerator
from hpcfed.studies import execute
from hpcfed.studies.execute import Finished
from hpcfed.studies.plan import Point, StudyOrder
from hpcfed.studies.stacks import describe, stacked
from hpcfed.words import bytes_text, flops_text

START = 8.0
"""Assumed seconds for the start of a run, if nothing was measured."""


@dataclass(frozen=True)
class Speed:
    """The speed of ranks, as far as finished runs tell."""

    flops: float
    """FLOPs per second and rank."""
    start: float
    """Seconds before the first round and after the last."""
    measured: int
    """Number of finished runs behind it; 0: it is a guess."""

    def seconds(self, point: Point, work: RunWork) -> float:
        """Predict the seconds of a run."""
        # Without its own ranks, the server's model is trained on the clients' ranks.
        server_ranks = point.settings.config.server_ranks or point.ranks
        flops = work.clients / point.ranks + work.server / server_ranks
        return self.start + flops / self.flops


def speed(
    measured: Sequence[tuple[Point, RunWork, float, float]], *, cuda: bool
) -> Speed:
    """Derive a speed from finished runs: point, work, seconds of rounds, and in all."""
    rates, starts = [], []
    for point, work, rounds, process in measured:
        at_one = Speed(1.0, 0.0, 0).seconds(point, work)  # seconds at 1 FLOP/s
        if rounds > 0:
            rates.append(at_one / rounds)
        if not math.isnan(process):
            starts.append(process - rounds)
    if not rates:
        return Speed(UNMEASURED["cuda" if cuda else "cpu"], START, 0)
    return Speed(median(rates), median(starts) if starts else START, len(rates))


def print_dry_run(order: StudyOrder) -> None:
    """Print every point, its command, and its estimated cost."""
    cuda = accelerator.kind() is not None
    ended = execute.check_finished(order.trials)
    works = {}
    # Without a GPU it is unknown: a study is often planned where it does not run.
    memory = accelerator.smallest_memory()
    for point in order.chosen:
        works[point.name] = run_work(completed(point, gpu=cuda, memory=memory))
    reached = speed(_measured(order, works, ended), cuda=cuda)
    total = 0.0
    # The first repeats represent all.
    for trial in order.trials[: len(order.chosen)]:
        point = trial.point
        work = works[point.name]
        seconds = reached.seconds(point, work)
        left = 0
        for other in order.trials:
            left += other.point is point and other.folder not in ended
        total += left * seconds
        print(f"{point.number}: {point.name}")
        print(
            f"   {_ranks(point)}, {_most(point)}{flops_text(work.clients)} of clients, "
            f"{flops_text(work.server)} of the server, {bytes_text(work.sent)} if clients "
            f"exchange whole rows; "
            f"{_time(seconds)} × {left} of {order.study.repeats}"
        )
        words = shlex.join(execute.command(trial, order.start))
        print(f"   {printable(words)}")
    basis = "a guess, since nothing is measured yet"
    if reached.measured:
        basis = count(reached.measured, "finished run")
    print(
        f"{count(len(works), 'point')}, {count(len(order.trials), 'trial')}, "
        f"{len(ended)} finished; {_time(total)} to go "
        f"({reached.flops / 1e9:,.1f} GFLOP/s a rank: {basis})"
    )
    if order.most > 1:
        # Say which of the remaining trials would advance together.
        trials = [trial for trial in order.trials if trial.folder not in ended]
        for line in describe(stacked(trials, order.most)):
            print(line)


def completed(point: Point, *, gpu: bool, memory: int) -> Settings:
    """Return a point's settings with what its run would choose on devices with this many
    bytes; 0: unknown.
    """
    ranks = point.settings.config.server_ranks or point.ranks
    return choose_server(point.settings, gpu=gpu, memory=memory, ranks=ranks)


def _measured(
    order: StudyOrder, works: dict[str, RunWork], ended: Finished
) -> list[tuple[Point, RunWork, float, float]]:
    """Return the seconds of finished trials: of all rounds, and of the process."""
    measured = []
    for trial in order.trials:
        runs = ended.get(trial.folder)
        if runs:
            point = trial.point
            # A run of a stack has recorded the time of the whole stack.
            rounds = sum(float((r.rounds["seconds"] / r.stacks).sum()) for r in runs)
            process = read_outcome(trial.outcome).seconds
            work = done(runs, works[point.name])
            measured.append((point, work, rounds, process))
    return measured


def done(runs: Sequence[RunRecord], planned: RunWork) -> RunWork:
    """Return the work that runs have done: they may have ended early."""
    counted = 0.0
    for run in runs:
        for name in ("train_flops", "finetune_flops"):
            counted += float(run.rounds[name].sum())
    # Older versions did not count it.
    return planned if math.isnan(counted) else replace(planned, clients=counted)


def _ranks(point: Point) -> str:
    servers = point.settings.config.server_ranks
    ranks = count(point.ranks, "rank")
    return f"{ranks} + {count(servers, 'server rank')}" if servers else ranks


def _most(point: Point) -> str:
    """Say that clients without enough time train less, as runs do that end early."""
    config = point.settings.config
    ends_early = config.stop_at_target or config.early_stop is not None
    return "at most " if config.partial or ends_early else ""


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"about {seconds:.0f} s"
    if seconds < 7200:
        return f"about {seconds / 60:.0f} min"
    return f"about {seconds / 3600:.1f} h"
