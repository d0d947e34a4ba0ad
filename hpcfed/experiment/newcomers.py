"""Clients that join after the last round: they train alone, or in further rounds."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from hpcfed import methods
from hpcfed.errors import UserError
from hpcfed.experiment import checkpointing
from hpcfed.experiment.assemble import Newcomers, Setup
from hpcfed.experiment.evaluate import AfterTraining, client_accuracy, standing_accuracy
from hpcfed.experiment.progress import RunProgress
from hpcfed.federation.cohort import Cohort
from hpcfed.federation.federation import Federation
from hpcfed.methods import not_led
from hpcfed.options import RunConfig, Settings
from hpcfed.results.format import GUIDED
from hpcfed.results.results import ResultsWriter
from hpcfed.results.run import LAST_UPDATES, mean_accuracy
from hpcfed.runtime.device import on_device
from hpcfed.runtime.signals import Stop


def check_new_rounds(settings: Settings) -> None:
    """Refuse rounds of new clients if the method has no state for them."""
    config = settings.config
    if config.new_rounds and methods.load(config.method).adopt is None:
        raise UserError(
            f"--new-rounds: new clients of method {config.method} only train by "
            "themselves; use --new-updates, or a method with `adopt`, such as genefl"
        )


def join_updates(config: RunConfig) -> np.ndarray:
    """Return the update or round, from 0, in which each new client joins. They join one
    by one, evenly spread over the first ones.
    """
    numbers = np.arange(config.new_clients)
    # Rounding down spreads clients over the joins as evenly as whole numbers allow.
    return numbers * config.join_rounds // config.new_clients


# New clients that train alone


def welcome(
    setup: Setup, newcomers: Newcomers, state: Any, results: ResultsWriter | None
) -> None:
    """Record new clients' accuracy after every local update, for each of their starts.

    A client that has not joined yet has NaN.
    """
    fed = newcomers.federation
    config = setup.settings.config
    # Rounds may have ended early, at the target.
    cohort = fed.everyone(setup.federation.round + 1)
    starts = _starts(setup, fed, state, cohort)
    _record_given(fed, cohort, results)
    everyone = np.arange(len(fed.clients))
    joins = join_updates(config)
    for start, rows in starts.items():
        # Update 0 is the start.
        for update in range(config.new_updates + 1):
            if update:
                # A client that joins in update u makes its first one in u + 1.
                joined = np.flatnonzero(joins[fed.clients] < update)
                rows = _next_rows(setup, fed, state, rows, joined, start, update)
            accuracy = client_accuracy(setup, fed, rows, everyone, config.new_clients)
            if results is not None:
                there = np.where(joins <= update, accuracy, np.nan)
                results.write_newcomers(start, update, there)


def _record_given(
    fed: Federation, cohort: Cohort, results: ResultsWriter | None
) -> None:
    """Record what a new client is sent at the start."""
    if results is not None:
        results.write_newcomer_bytes(cohort.log.bytes_down / max(1, fed.num_holders))


def _starts(
    setup: Setup, fed: Federation, state: Any, cohort: Cohort
) -> dict[str, Tensor]:
    """Return the rows from which new clients start, by the name of the start."""
    # All other starts are for comparison: how much is the method's own start worth?
    method = setup.method
    count = len(fed.clients)
    starts = {"method": method.welcome(fed, state, cohort)}
    if setup.settings.config.new_starts != "all":
        return starts
    starts["random"] = fed.initial_row().expand(count, -1)
    # Only a method that guides has its own `lead`.
    if method.lead is not not_led:
        starts[GUIDED] = starts["random"]
    row = method.global_row(state)
    if row is not None:
        starts["global model"] = row.expand(count, -1)
    return starts


def _next_rows(
    setup: Setup,
    fed: Federation,
    state: Any,
    rows: Tensor,
    joined: np.ndarray,
    start: str,
    update: int,
) -> Tensor:
    """Return the rows after a local update of the clients that have joined.

    A method may then guide clients that started from it, as if they were in a round.
    For comparison, it may also guide others that start from a random row.
    """
    at = on_device(joined, fed.device)
    trained = fed.finetune(rows[at], joined, phase=update)
    updated = rows.index_copy(0, at, trained)
    if start not in ("method", GUIDED):
        return updated
    return setup.method.lead(fed, state, update - 1, rows, updated)


# New clients that continue together


class NewRound(NamedTuple):
    """A round of new clients."""

    number: int
    """Counted from 0."""
    cohort: Cohort
    trained: AfterTraining | None
    """What judged the participants after their training, if the round is judged."""
    joined: np.ndarray
    """This rank's clients that have joined, as positions."""
    state: Any
    """The state after the round."""


def new_rounds(setup: Setup, fed: Federation, state: Any) -> Iterator[NewRound]:
    """Run rounds of the method among new clients, whose federation this is; `state` is
    the one that the method has adopted for them.

    In the first rounds the joining clients take part, afterwards a sample of all. Round
    numbers continue from the known clients' last one.
    """
    method, config = setup.method, setup.settings.config
    first = setup.federation.round + 1
    joins = join_updates(config)
    for number in range(config.new_rounds):
        trained = AfterTraining(setup, fed) if is_judged(number, config) else None
        joining = np.flatnonzero(joins == number)
        if len(joining):
            cohort = fed.invite(first + number, joining, trained)
        else:
            pool = method.pool(fed, state, first + number)
            cohort = fed.sample(first + number, trained, pool)
        state = method.round(fed, state, cohort)
        joined = np.flatnonzero(joins[fed.clients] <= number)
        yield NewRound(number, cohort, trained, joined, state)


def collaborate(
    setup: Setup,
    newcomers: Newcomers,
    state: Any,
    results: ResultsWriter | None,
    progress: RunProgress,
    stop: Stop,
) -> bool:
    """Run and record all rounds of new clients, after the known clients' last one; tell
    whether all ranks stop before the end.
    """
    fed, method = newcomers.federation, setup.method
    assert method.adopt is not None, "`check_new_rounds` refuses such methods"
    everyone = fed.everyone(setup.federation.round + 1)
    state = method.adopt(fed, state, everyone)
    checkpointing.check_owned(setup, fed, state, "adopt")
    _record_given(fed, everyone, results)
    last = setup.settings.config.new_rounds - 1
    for round in new_rounds(setup, fed, state):
        _record(setup, fed, round, results, progress)
        asked = setup.collectives.allgather(stop.after(round.cohort.round))
        if any(asked) and round.number < last:
            stop.agreed = True
            return True
    return False


def is_judged(number: int, config: RunConfig) -> bool:
    """Tell whether a round of new clients, counted from 0, ends with an evaluation: the
    first, the last ten, and those due by --evaluate-every do.
    """
    if number == 0 or number >= config.new_rounds - LAST_UPDATES:
        return True
    return (number + 1) % config.evaluate_every == 0


def _record(
    setup: Setup,
    fed: Federation,
    round: NewRound,
    results: ResultsWriter | None,
    progress: RunProgress,
) -> None:
    """Record what was sent in a round, and how good clients are if it is judged."""
    log = round.cohort.log
    # If each client chooses what it sends, only its rank knows the bytes.
    chosen = np.array([float(log.bytes_up_here)])
    everyones = setup.collectives.gather_vectors(chosen)
    if results is not None and everyones is not None:
        bytes_up = log.bytes_up + float(everyones.sum())
        results.write_new_bytes(round.number, bytes_up, log.bytes_down)
    if round.trained is None:
        return
    standing = standing_accuracy(setup, fed, round.state, round.joined)
    participants = round.trained.accuracy()
    if results is not None:
        results.write_new_accuracy(round.number, standing, participants)
    config = setup.settings.config
    whose = f" of seed {config.seed}" if setup.stacked > 1 else ""
    progress.say(
        f"new clients{whose}, round {round.number + 1}/{config.new_rounds}  as they stand "
        f"{mean_accuracy(standing):.2%}  after training {mean_accuracy(participants):.2%}"
    )
