"""A run in three sentences: how good its models are, how long it took, and on what."""

from math import isnan

import numpy as np

from hpcfed.analysis.groups import Group
from hpcfed.analysis.outcomes import known_metric
from hpcfed.analysis.run_findings.learning import last_of_clients, worst_tenth
from hpcfed.errors import count
from hpcfed.options.metrics import HEADLINES, METRICS, global_name, label_of
from hpcfed.words import interval, time_text

LEAST_SHARE = 0.05
"""Phases below this share of a round are not mentioned."""
UNEVEN = 1.2
"""The slowest rank is mentioned if its training takes this many times the mean."""


def verdict(group: Group) -> list[str]:
    """Return the sentences that apply to this run."""
    every = (_accuracy(group), _time(group), _where(group))
    return [sentence for sentence in every if sentence]


def _accuracy(group: Group) -> str:
    name = HEADLINES[group.first.task]
    label = label_of(name, group.first.task)
    parts = []
    whose = {name: "on their own test data, clients reach", global_name(name): ""}
    whose[global_name(name)] = "on all test data, the global model reaches"
    for series, beginning in whose.items():
        last = _told(group, name, [run.last(series) for run in group.seeds])
        if last:
            parts.append(f"{beginning} {last}")
    if not parts:
        return ""
    rounds = count(group.first.rounds_done, "round")
    sentence = f"{label[0].upper()}{label[1:]} after {rounds}: {'; '.join(parts)}."
    known = 100 * last_of_clients(group.seeds)
    if name == "accuracy" and len(known) >= 10:
        sentence += f" The worst tenth of the clients is at {worst_tenth(known):.1f} %."
    return sentence + _target(group)


def _target(group: Group) -> str:
    """Say whether the target was reached; empty without a target."""
    if group.first.target is None:
        return ""
    reached = [run.reached() for run in group.seeds]
    there = [one for one in reached if one is not None]
    target = f"The target of {group.first.target:g} % was"
    if not there:
        return f" {target} not reached."
    if len(reached) == 1:
        return f" {target} reached after {count(there[0].rounds, 'round')}."
    return f" {target} reached by {len(there)} of {len(reached)} seeds."


def _told(group: Group, name: str, values: list[float]) -> str:
    """Return a metric with its interval over seeds; empty if no seed has it."""
    in_percent = METRICS[name].in_percent
    estimate = known_metric(name, values)
    if isnan(estimate.centre):
        return ""
    text = interval(estimate, 100 if in_percent else 1)
    return f"{text} %" if in_percent else text


def _time(group: Group) -> str:
    seconds = group.first.rounds["seconds"]
    round_text = interval(group.seconds, 1e3)
    whole = time_text(float(np.nansum(seconds)))
    sentence = (
        f"Time: a round takes {round_text} ms (median), all {len(seconds)} took {whole}"
    )
    if group.first.stacked_seeds > 1:
        sentence += f" for {group.first.stacked_seeds} runs at once"
    sentence += "."
    if group.first.has_clock:
        virtual = time_text(group.first.last("virtual_seconds"))
        sentence += f" By the virtual clock they took {virtual}."
    slowest = int(np.nanargmax(seconds))
    if len(seconds) > 2 and seconds[slowest] > 3 * group.seconds.centre:
        text = time_text(float(seconds[slowest]))
        sentence += f" The slowest, round {slowest + 1}, took {text}."
    return sentence


def _where(group: Group) -> str:
    """Say where the time of all rounds went: a single round that trains the server's
    model may be most of it.
    """
    totals = group.first.phase_totals()
    whole = sum(totals.values())
    if not whole > 0:
        return ""
    parts = []
    for phase, seconds in sorted(totals.items(), key=lambda item: -item[1]):
        share = seconds / whole
        if share < LEAST_SHARE:
            continue
        if phase == "server" and group.first.learns_seldom:
            parts.append(f"server {group.first.server_text()}, {share:.0%} of the run")
        else:
            parts.append(f"{phase} {share:.0%}")
    sentence = f"Where it went: {'; '.join(parts)}."
    uneven = group.first.imbalance()
    if group.ranks > 1 and uneven >= UNEVEN:
        sentence += f" The slowest rank trains {uneven:.2f} times as long as the mean."
    return sentence
