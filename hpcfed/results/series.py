"""The figures of a round: one table, from which everything else follows.

To add a figure, add a line to the table. The code that computes it sets
`cohort.log.measured[NAME] = number`, once a round on every rank. The figure is reduced
over ranks, written to `rounds/NAME` in run.h5 with its unit and meaning, read back into
`RunRecord.rounds`, and included in the CSV and in `hpcfed show --json`.

For code that shows figures:
- `ROUND_SERIES[name]` has `.unit`, `.meaning`, `.total` and `.key`.
- `RunRecord.rounds[name]` has the values; a round without one has NaN.
- A CSV has a column per series, in the table's order; JSON calls a series `.key`.
- `METRIC_SERIES` are the series that --metrics adds; other runs lack them.
- `.total` labels the sum over all rounds among the costs of `hpcfed show`; it is empty
  if a sum is meaningless.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import nan

import numpy as np

from hpcfed.options.metrics import SERIES, global_name

Reduction = Callable[..., float]
"""Computes a round's figure from those of the ranks: an array [ranks] for each."""


def summed(values: np.ndarray) -> float:
    """Return the sum over ranks."""
    return float(values.sum())


def largest(values: np.ndarray) -> float:
    """Return the largest value of all ranks; a rank without one passes NaN."""
    return float(np.fmax.reduce(values))


def agreed(values: np.ndarray) -> float:
    """Return the root's value; every rank has the same."""
    return float(values[0])


def weighted_mean(sums: np.ndarray, weights: np.ndarray) -> float:
    """Return the mean over all ranks' items, from each rank's sum and its weight."""
    weight = weights.sum()
    if not weight:
        return float("nan")
    return float(sums.sum() / weight)


def imbalance(seconds: np.ndarray) -> float:
    """Return the slowest rank's seconds divided by the mean over ranks.

    It is 1 if all take equally long, and NaN if none takes any time.
    """
    mean = seconds.mean()
    # No client trains in a round whose cohort has no data.
    if not mean > 0:
        return float("nan")
    return float(seconds.max() / mean)


@dataclass(frozen=True)
class RoundSeries:
    """One figure per round."""

    name: str
    unit: str
    meaning: str
    reduce: Reduction
    of: tuple[str, ...] = ()
    """The ranks' figures that `reduce` takes; empty: the one named like the series."""
    total: str = ""
    """The label of its sum over all rounds in `hpcfed show`."""
    json: str = ""
    """Its name in JSON, if different."""
    evaluated: bool = False
    """Whether an evaluation computes it; then other rounds have no value."""
    required: bool = False
    """Whether every file has it: the first files of this schema lack later series."""

    @property
    def figures(self) -> tuple[str, ...]:
        """The ranks' figures that `reduce` takes."""
        return self.of or (self.name,)

    @property
    def key(self) -> str:
        """What JSON calls it."""
        return self.json or self.name


@dataclass(frozen=True)
class RankSeries:
    """One figure per round and rank, recorded for each rank."""

    name: str
    unit: str
    meaning: str


# A line: name and unit, meaning, how the ranks' figures are reduced. CSV columns and
# JSON follow this order.
# fmt: off
_ROUND_TABLE = (
    RoundSeries("accuracy", "fraction",
        "mean over clients of each client's accuracy on its own test data",
        agreed, evaluated=True, required=True),
    RoundSeries("trained_accuracy", "fraction",
        "mean over the round's participants of each one's accuracy on its own test data, "
        "after local training and before aggregation",
        agreed, evaluated=True),
    RoundSeries("global_accuracy", "fraction",
        "accuracy of the global model on the whole test set",
        agreed, evaluated=True, required=True),
    RoundSeries("global_loss", "nats",
        "mean cross-entropy of the global model on the whole test set",
        agreed, evaluated=True, required=True),
    RoundSeries("train_loss", "nats",
        "mean cross-entropy over all samples of the round's local training",
        weighted_mean, of=("loss_sum", "samples_seen"), required=True),
    RoundSeries("trained_samples", "samples",
        "samples in all steps of local training, counted as often as a step takes them",
        summed, total="samples trained on"),
    RoundSeries("trained_steps", "steps",
        "steps of local training of all clients",
        summed, total="local steps"),
    RoundSeries("longest_steps", "steps",
        "steps of local training of the client that takes most",
        largest),
    RoundSeries("trained_positions", "tokens",
        "positions of texts in all steps of local training, with padding; 0 if samples "
        "are not texts",
        summed, total="positions of texts trained on"),
    RoundSeries("learnt_tokens", "tokens",
        "positions of texts in these steps that have a loss",
        summed, total="tokens learnt"),
    RoundSeries("train_flops", "1",
        "floating-point operations of local training, and of Fisher information, in "
        "convolutions and linear layers",
        summed, total="FLOP of local training"),
    RoundSeries("finetuned_samples", "samples",
        "samples in all steps that clients take within an evaluation, before they are "
        "judged",
        summed, total="samples of fine-tuning in evaluations"),
    RoundSeries("finetune_flops", "1",
        "floating-point operations of these steps in convolutions and linear layers",
        summed, total="FLOP of fine-tuning in evaluations"),
    RoundSeries("engine_samples", "samples",
        "samples in all steps of the process, fine-tuning included: of all runs that "
        "advance together and share their seconds",
        summed),
    RoundSeries("bytes_up", "bytes",
        "sent by clients, by the method's own accounting",
        summed, total="sent by clients", required=True),
    RoundSeries("bytes_down", "bytes",
        "sent to clients, by the method's own accounting",
        agreed, total="sent to clients", required=True),
    RoundSeries("cohort", "clients",
        "clients that took part",
        agreed, of=("cohort_size",), required=True),
    RoundSeries("arrived", "clients",
        "clients whose uploads counted, where some may come late or never",
        agreed, total="uploads that arrived in time"),
    RoundSeries("staleness", "versions",
        "mean number of versions of the global model that uploads were behind",
        agreed),
    RoundSeries("kept", "clients",
        "clients whose uploads the server has selected, where it selects",
        agreed, total="uploads that the server selected"),
    RoundSeries("kept_attackers", "clients",
        "attackers among them",
        agreed, total="attackers' among them"),
    RoundSeries("excluded", "clients",
        "clients whose update was not finite, and left out",
        summed, total="updates left out, because they were not finite"),
    RoundSeries("update_norm", "1",
        "mean norm of the updates that the server receives",
        weighted_mean, of=("update_norm_sum", "num_updates")),
    RoundSeries("update_norm_max", "1",
        "largest norm of an update that the server receives",
        largest),
    RoundSeries("clip_norm", "1",
        "norm to which updates were clipped",
        agreed),
    RoundSeries("epsilon", "1",
        "privacy spent after the round, at the run's delta",
        agreed),
    RoundSeries("virtual_seconds", "s",
        "virtual time since the start at which the round ended",
        agreed),
    RoundSeries("seconds", "s",
        "wall time of the slowest rank",
        largest, of=("wall",), total="wall time of all rounds",
        json="seconds_per_round", required=True),
    RoundSeries("cpu_seconds", "s",
        "time that the processes of all ranks that host clients have spent on cores, with "
        "all their threads; others on the host prolong the wall time, and this hardly",
        summed, total="time on cores, all ranks"),
    RoundSeries("imbalance", "1",
        "train seconds of the slowest rank by the mean over ranks",
        imbalance, of=("train_seconds",)),
)
# fmt: on

_RANK_TABLE = (
    RankSeries("wall", "s", "wall time of the round"),
    RankSeries(
        "peak_memory",
        "bytes",
        "largest memory so far: of the device's allocator on a GPU, of the process on a CPU",
    ),
    RankSeries("wire", "bytes", "payload handed to collectives in the round"),
    RankSeries(
        "halvings",
        "1",
        "times so far that memory ran out, and half as many clients were advanced together",
    ),
    RankSeries(
        "trained_samples",
        "samples",
        "samples in all steps of the rank's local training",
    ),
    RankSeries(
        "train_flops", "1", "floating-point operations of the rank's local training"
    ),
)

ROUND_SERIES = {series.name: series for series in _ROUND_TABLE}
"""Series of rounds by name."""
EVALUATION_SERIES = [series.name for series in _ROUND_TABLE if series.evaluated]
"""Evaluation series in every record; --metrics adds others."""
RANK_SERIES = {series.name: series for series in _RANK_TABLE}
"""Series of rounds and ranks by name."""


def _metric_series() -> Iterator[RoundSeries]:
    """Yield two series for each metric that is not yet in the table."""
    for metric in SERIES:
        mean = f"mean over clients on their own test data: {metric.meaning}"
        if metric.pooled:
            mean = f"clients on their own test data, taken together: {metric.meaning}"
        whole = f"global model on the whole test set: {metric.meaning}"
        for name, meaning in ((metric.name, mean), (global_name(metric.name), whole)):
            if name not in ROUND_SERIES:
                yield RoundSeries(name, metric.unit, meaning, agreed)


METRIC_SERIES = {series.name: series for series in _metric_series()}
"""Series of metrics that a run may request; all ranks know them without gathering."""


def metric_series(metrics: Sequence[str]) -> list[RoundSeries]:
    """Return the series that these metrics add to those of every run."""
    found = []
    for name in metrics:
        for series in (name, global_name(name)):
            if series in METRIC_SERIES:
                found.append(METRIC_SERIES[series])
    return found


def series_of(name: str) -> RoundSeries:
    """Return a series of every run, or of a metric."""
    return ROUND_SERIES.get(name) or METRIC_SERIES[name]


def _rank_figures() -> tuple[str, ...]:
    """Return the names of all figures that ranks send, each once."""
    # Some figures, such as wall, are used by several series.
    names = list(RANK_SERIES)
    for series in _ROUND_TABLE:
        names += series.figures
    return tuple(dict.fromkeys(names))


RANK_FIGURES = _rank_figures()
"""What a rank sends after a round, in this order."""
KNOWN = frozenset(RANK_FIGURES)
"""Names that a rank may send, as a set: it is asked for every figure of a round."""
_AS_IT_IS = {summed, largest, agreed}
_OF_ONE_RANK = {s.name: s.figures[0] for s in _ROUND_TABLE if s.reduce in _AS_IT_IS}
"""By series: the figure that it is if there is one rank."""


def as_vector(figures: Mapping[str, float]) -> np.ndarray:
    """Return a rank's figures in the order of `RANK_FIGURES`; NaN for missing ones."""
    unknown = figures.keys() - KNOWN
    assert not unknown, f"no series is made of {', '.join(sorted(unknown))}"
    # The table's order, not the caller's: the vectors of all ranks must match.
    vector = [figures.get(name, nan) for name in RANK_FIGURES]
    return np.array(vector)


def by_rank(gathered: np.ndarray) -> dict[str, np.ndarray]:
    """Return each figure for all ranks [ranks], from their vectors [ranks, figures]."""
    return dict(zip(RANK_FIGURES, gathered.T, strict=True))


def round_figures(figures: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Reduce the ranks' figures to the round's; NaN if no rank has sent any."""
    # Most runs have one rank, and would call numpy for every number.
    is_one = len(figures["wall"]) == 1
    reduced = {}
    for series in _ROUND_TABLE:
        if is_one and series.name in _OF_ONE_RANK:
            reduced[series.name] = float(figures[_OF_ONE_RANK[series.name]][0])
            continue
        taken = [figures[name] for name in series.figures]
        reduced[series.name] = series.reduce(*taken)
    return reduced
