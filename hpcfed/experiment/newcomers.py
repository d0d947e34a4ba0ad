"""Clients that join after the last round, and how quickly they learn."""

from typing import Any

import numpy as np
from torch import Tensor

from hpcfed.experiment.assemble import Newcomers, Setup
from hpcfed.experiment.evaluate import client_accuracy
from hpcfed.federation.cohort import Cohort
from hpcfed.federation.federation import Federation
from hpcfed.methods import not_led
from hpcfed.record.results import ResultsWriter
from hpcfed.runtime.device import on_device

GUIDED = "random, guided"
"""A start from the random row, led on by the method."""


def welcome(
    setup: Setup, newcomers: Newcomers, state: Any, results: ResultsWriter | None
) -> None:
    """Record new clients' accuracy after every local update, for each of their starts.

    A client that has not joined yet has NaN.
    """
    fed = newcomers.federation
    config = setup.settings.config
    # Rounds may have ended at the target, long before the last one.
    cohort = fed.everyone(setup.federation.round + 1)
    starts = _starts(setup, fed, state, cohort)
    if results is not None:
        sent_to_each = cohort.log.bytes_down / max(1, fed.num_holders)
        results.write_newcomer_bytes(sent_to_each)
    # They join one after the other, evenly spread over the first updates.
    numbers = np.arange(config.new_clients)
    everyone = np.arange(len(fed.clients))
    joins = numbers * config.join_rounds // config.new_clients
    for start, rows in starts.items():
        # Update 0 is how they start.
        for update in range(config.new_updates + 1):
            if update:
                joined = np.flatnonzero(joins[fed.clients] < update)
                rows = _next_rows(setup, fed, state, rows, joined, start, update)
            accuracy = client_accuracy(setup, fed, rows, everyone, config.new_clients)
            if results is not None:
                there = np.where(joins <= update, accuracy, np.nan)
                results.write_newcomers(start, update, there)


def _starts(
    setup: Setup, fed: Federation, state: Any, cohort: Cohort
) -> dict[str, Tensor]:
    """Return the rows from which new clients start, by the name of the start."""
    # All others are for comparison: what is the method's own start worth?
    method = setup.method
    count = len(fed.clients)
    starts = {"method": method.welcome(fed, state, cohort)}
    if setup.settings.config.new_starts != "all":
        return starts
    starts["random"] = fed.initial_row().expand(count, -1)
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

    A method may then lead those that started from it, as if they were in a round; and,
    for comparison, others that start from a random row.
    """
    at = on_device(joined, fed.device)
    trained = fed.finetune(rows[at], joined, phase=update)
    updated = rows.index_copy(0, at, trained)
    if start not in ("method", GUIDED):
        return updated
    return setup.method.lead(fed, state, update - 1, rows, updated)
