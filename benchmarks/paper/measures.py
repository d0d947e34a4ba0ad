"""What tables show of a run: measures, and when one is near to what a paper prints."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from hpcfed.results.run import LAST_UPDATES, RunRecord, mean_accuracy
from hpcfed.results.target import Reached, first_round, stays_from
from hpcfed.runtime.timer import PHASES


class Near(NamedTuple):
    """When a measurement counts as near to what the paper prints."""

    text: str
    holds: Callable[[float, float], bool]
    """Takes ours and the paper's."""


POINTS = Near("within 2 points", lambda ours, paper: abs(ours - paper) <= 2)
FACTOR = Near("within a factor of 2", lambda ours, paper: 0.5 <= ours / paper <= 2)
SHARE = Near("within 2 %", lambda ours, paper: abs(ours - paper) <= 0.02 * paper)


class Measure(NamedTuple):
    """One thing that a table shows."""

    title: str
    value: Callable[[RunRecord], float]
    """Returns it for the run of one seed; NaN when there is none."""
    digits: int = 2
    near: Near = POINTS
    relative: bool = False
    """Whether tables show it by what the study's rival has in the same column."""
    reading_of: str = ""
    """The measure whose printed figures it is another reading of."""
    stays: bool = False
    """Whether it is of the round from which on the target is held, which the end of a
    run tells, unless the target ended it.
    """
    pooled: Callable[[Sequence[RunRecord]], float] | None = None
    """Returns one number for all seeds, in place of one for each."""

    @property
    def to_target(self) -> bool:
        """Whether it is what reaching the target took: known for good as soon as the
        target is reached, unless it is `stays`, and "never" until then.
        """
        return self.near is FACTOR

    def unknown_of(self, records: Sequence[RunRecord]) -> bool:
        """Tell whether runs ended too early to have it."""
        return self.stays and any(record.ended_at_target for record in records)

    def of_all(self, records: Sequence[RunRecord]) -> list[float]:
        """Return the values of a cell's seeds, or the one that they have together."""
        if self.pooled is not None:
            return [self.pooled(records)]
        return [self.of(record) for record in records]

    def of(self, record: RunRecord) -> float:
        """Return the value of a run; NaN where it lacks what is measured, as a run does
        that was stopped.
        """
        try:
            return self.value(record)
        except KeyError:
            return math.nan


def best(record: RunRecord) -> float:
    """Return the best accuracy of the global model, or of the mean client where there
    is none, in per cent.
    """
    of_global_model = record.best("global_accuracy")
    if not math.isnan(of_global_model):
        return 100 * of_global_model
    return 100 * record.best("accuracy")


SETTLED = 0.9
"""A target must be held from this part of a run on. A curve that swings around it is
above it at the end of some runs, and would tell where these were cut.
"""


def to_target(record: RunRecord, *, stays: bool) -> Reached | None:
    """Return the cost up to the round that first reaches the target, or from which on
    the run `stays` there.
    """
    if not stays:
        return record.reached()
    held = record.stays()
    return held if held and _settled(held.rounds, record.rounds_done) else None


def _settled(held_from: int, rounds: int) -> bool:
    return held_from <= SETTLED * rounds


def rounds_to_target(record: RunRecord, *, stays: bool) -> float:
    """Return after how many rounds the target accuracy was reached; NaN if never."""
    reached = to_target(record, stays=stays)
    return math.nan if reached is None else float(reached.rounds)


def rounds_of_mean_curve(records: Sequence[RunRecord], *, stays: bool) -> float:
    """Return the rounds to the target of the mean accuracy over seeds, as far as all of
    them have come.
    """
    target, curves = records[0].target, [record.judged() for record in records]
    if target is None:
        return math.nan
    common = min(map(len, curves))
    curve = np.mean([one[:common] for one in curves], axis=0)
    rounds = stays_from(curve, target) if stays else first_round(curve, target)
    if rounds is None or (stays and not _settled(rounds, common)):
        return math.nan
    return float(rounds)


def seconds_to_target(record: RunRecord, *, stays: bool) -> float:
    """Return the seconds that the target took, without those of evaluations, which no
    method needs; NaN if it was never reached.

    Seeds that advance together share their seconds: each counts with its part, so that
    rows of different numbers of seeds compare.
    """
    reached = to_target(record, stays=stays)
    if reached is None:
        return math.nan
    # Ranks evaluate together. Rounds before a change of ranks have no phases.
    by_rank = record.phases[: reached.rounds, :, PHASES.index("evaluate")]
    evaluating = np.nan_to_num(by_rank).max(1)
    others = record.rounds["seconds"][: reached.rounds] - evaluating
    return float((others / record.stacks[: reached.rounds]).sum())


def sent_to_target(record: RunRecord, *, stays: bool) -> float:
    """Return the GiB that were sent both ways until the target; NaN if never reached."""
    reached = to_target(record, stays=stays)
    return math.nan if reached is None else reached.bytes / 2**30


def rounds_to_peak(record: RunRecord) -> float:
    """Return the rounds to 95 % of the clients' own best accuracy; NaN if it was never
    evaluated.
    """
    rounds = record.rounds_to(0.95)
    return math.nan if rounds is None else float(rounds)


def identity(record: RunRecord) -> float:
    """Return how many per cent of the clients have a generated update in their own
    direction; NaN without a server, and in records of older versions.
    """
    if not record.learnings:
        return math.nan
    return 100 * record.learnings[-1].own


def failures(record: RunRecord, final: str, *, below: float = 0.6) -> float:
    """Return how many per cent of the clients end below this accuracy by a final."""
    known = record.finals[final][~np.isnan(record.finals[final])]
    return 100 * float((known < below).mean()) if len(known) else math.nan


def mean_figure(record: RunRecord, name: str) -> float:
    """Return the mean over clients of what the method has measured at the end."""
    return mean_accuracy(record.figures[name])


def last_rounds(record: RunRecord, name: str) -> float:
    """Return the mean of a series over the last ten rounds, as far as they were
    evaluated.
    """
    return mean_accuracy(record.rounds[name][-LAST_UPDATES:])


def joined(record: RunRecord) -> float:
    """Return the accuracy of new clients over their last ten rounds, or their last ten
    updates where they trained alone.
    """
    if record.new_rounds is None:
        return record.newcomers_last("method")
    return record.new_rounds.last("accuracy")


def joining(record: RunRecord) -> float:
    """Return the accuracy of those who join first, after one local training: "round 0"
    of GENE-FL's Fig. 3. NaN where new clients trained alone.
    """
    if record.new_rounds is None:
        return math.nan
    return float(record.new_rounds.curve("trained_accuracy")[0])


def joined_trained(record: RunRecord) -> float:
    """Return the accuracy of participants in the last ten rounds of new clients; NaN
    where they trained alone.
    """
    if record.new_rounds is None:
        return math.nan
    return record.new_rounds.last("trained_accuracy")


def _to_target(*, stays: bool) -> dict[str, Measure]:
    """Return what the target took by one of two readings: up to the first round that
    reaches it, or up to the one from which on the run stays there.
    """
    suffix, target = "", "the target accuracy"
    if stays:
        suffix, target = "-stays", "holding the target accuracy"
    title = f"rounds to {target}"
    rounds = Measure(
        title,
        lambda record: rounds_to_target(record, stays=stays),
        digits=0,
        near=FACTOR,
        stays=stays,
    )
    reading = rounds._replace(reading_of=f"rounds{suffix}")
    return {
        f"rounds{suffix}": rounds,
        f"rounds-one-seed{suffix}": reading._replace(
            title=f"{title}, first seed alone",
            pooled=lambda records: rounds_to_target(records[0], stays=stays),
        ),
        f"rounds-mean-curve{suffix}": reading._replace(
            title=f"{title}, mean curve of all seeds",
            pooled=lambda records: rounds_of_mean_curve(records, stays=stays),
        ),
        f"relative-seconds{suffix}": Measure(
            f"seconds to {target} by those of the rival",
            lambda record: seconds_to_target(record, stays=stays),
            near=FACTOR,
            relative=True,
            stays=stays,
        ),
        f"sent-to-target{suffix}": Measure(
            f"sent until {target}, GiB",
            lambda record: sent_to_target(record, stays=stays),
            near=FACTOR,
            stays=stays,
        ),
    }


MEASURES = {
    "accuracy": Measure(
        "last accuracy of clients, %", lambda record: 100 * record.last("accuracy")
    ),
    "best": Measure("best accuracy, %", best),
    "best-clients": Measure(
        "best accuracy of clients, own test data, %",
        lambda record: 100 * record.best("accuracy"),
    ),
    **_to_target(stays=False),
    **_to_target(stays=True),
    "comm": Measure(
        "sent by clients, GiB",
        lambda record: float(record.rounds["bytes_up"].sum()) / 2**30,
        near=SHARE,
    ),
    "given": Measure(
        "sent to a new client to begin with, MiB",
        lambda record: record.newcomer_bytes / 2**20,
        near=SHARE,
    ),
    "joining": Measure(
        "accuracy of the first new clients after their first local training, %",
        lambda record: 100 * joining(record),
    ),
    "joined": Measure(
        "accuracy of new clients as they stand, mean of the last ten rounds, %",
        lambda record: 100 * joined(record),
    ),
    "joined-trained": Measure(
        "accuracy of new clients after local training, mean of the last ten rounds, %",
        lambda record: 100 * joined_trained(record),
        reading_of="joined",
    ),
    "participants": Measure(
        "accuracy of participants after local training, mean of the last ten rounds, %",
        lambda record: 100 * last_rounds(record, "trained_accuracy"),
        reading_of="accuracy",
    ),
    "from-random": Measure(
        "accuracy of new clients from a random row, mean of their updates, %",
        lambda record: 100 * record.newcomers_last("random"),
    ),
    "from-random-guided": Measure(
        "accuracy of new clients from a random row, guided, mean of their updates, %",
        lambda record: 100 * record.newcomers_last("random, guided"),
    ),
    "rounds-to-peak": Measure(
        "rounds to 95 % of the clients' own peak", rounds_to_peak, digits=0
    ),
    "identity": Measure(
        "generated updates in their own client's direction, %", identity
    ),
    "direct-failures": Measure(
        "clients whose row out of noise is below 60 % before fine-tuning, %",
        lambda record: failures(record, "direct"),
    ),
    "to-own": Measure(
        "distance of generated rows to the own upload, by the update's length",
        lambda record: mean_figure(record, "distance to own upload"),
    ),
    "to-nearest": Measure(
        "distance of generated rows to the nearest upload, by the update's length",
        lambda record: mean_figure(record, "distance to nearest upload"),
    ),
    "nearest-own": Measure(
        "generated rows whose nearest upload is the client's own, %",
        lambda record: 100 * mean_figure(record, "nearest upload is own"),
    ),
    "agreement": Measure(
        "answers on test data that are those of the own upload, %",
        lambda record: 100 * mean_figure(record, "agreement with own upload"),
    ),
    "direct-to-nearest": Measure(
        "distance of rows out of noise to the nearest upload, by the update's length",
        lambda record: mean_figure(record, "direct: distance to nearest upload"),
    ),
}
