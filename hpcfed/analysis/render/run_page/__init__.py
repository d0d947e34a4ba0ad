"""The page of one run, or of its seeds: the results, and where its time went.

Its tables are those of `hpcfed show`; the page adds charts. Empty sections are left
out.
"""

from collections.abc import Sequence
from math import isnan

import numpy as np

from hpcfed.analysis.collect import Found
from hpcfed.analysis.groups import Group
from hpcfed.analysis.labels import server_text
from hpcfed.analysis.outcomes import last_metric
from hpcfed.analysis.render.page import Content
from hpcfed.analysis.render.run_page import costs, learning
from hpcfed.analysis.render.run_page.machine import machine
from hpcfed.analysis.render.run_page.profile import operators, profile
from hpcfed.analysis.render.sections import origin
from hpcfed.analysis.render.show import of_first, statuses, title
from hpcfed.analysis.run_findings import read_files, run_findings
from hpcfed.analysis.run_findings.learning import last_of_clients, worst_tenth
from hpcfed.errors import UserError, count
from hpcfed.options.metrics import HEADLINES, METRICS, global_name, label_of
from hpcfed.results.profiles import read_profile
from hpcfed.results.run import RunRecord
from hpcfed.results.stacks import stack_text
from hpcfed.results.stored import longest, timed_run
from hpcfed.words import interval, time_text

LEAST_SHARE = 0.05
"""Phases below this share of a round are not mentioned."""
UNEVEN = 1.2
"""The slowest rank is mentioned if its training takes this many times the mean."""


def is_one_run(every: list[Group], found: Found) -> bool:
    """Tell whether a report is about a single run, or seeds that advanced together."""
    return not found.studies and len(every) == 1 and len(every[0].processes) == 1


def run_content(group: Group, found: Found) -> Content:
    """Return the content of a run's page."""
    first = group.first
    files = read_files(group.seeds)
    problems = [*found.unread, *([files.problem] if files.problem else [])]
    warnings = [*(f"left out: {line}" for line in problems), *found.copies]
    if any(run.status != "complete" for run in group.seeds):
        warnings += statuses(group.seeds)
    made = []
    try:
        profiled = read_profile(first.folder)
        # Users who profiled a run want to know first where its time went.
        if profiled is not None:
            made += [profile(profiled), operators(profiled)]
    except UserError as error:
        warnings.append(f"left out: {error}")
    found_tables = run_findings(group.seeds, files)
    details = files.details
    for section in (
        learning.learning(group),
        learning.virtual_time(group),
        learning.privacy(group),
        learning.clients(group),
        learning.classes(details),
        costs.timing(timed_run(group.runs)),
        costs.server(first, details),
        learning.depths(group),
        learning.latents(details),
        costs.traffic_and_memory(first, longest(group.runs)),
        machine(details),
    ):
        section.tables += found_tables.get(section.id, ())
        made.append(section)
    shown = [section for section in made if section.charts or section.tables]
    shown += [origin.environment([group]), origin.reproduce([group], found)]
    name = title(first)
    lead = verdict(group)
    if len(group.seeds) > 1:
        name += f", {len(group.seeds)} seeds"
        lead.append(of_first(group.seeds))
    return Content(name, lead, warnings, shown)


# A run in three sentences: how good its models are, how long it took, and on what.


def verdict(group: Group) -> list[str]:
    """Return the sentences that apply to this run."""
    every = (_accuracy(group), _time(group), _where(group))
    return [sentence for sentence in every if sentence]


def _accuracy(group: Group) -> str:
    name = HEADLINES[group.first.task]
    label = label_of(name, group.first.task)
    metric = METRICS[name]
    unit = " %" if metric.in_percent else ""
    parts = []
    judged, clients = len(group.first.evaluated), group.clients
    reach = "clients reach"
    if judged < clients:
        reach = f"a sample of {judged} of {clients:,} clients reaches"
    for series, beginning in (
        (name, f"on their own test data, {reach}"),
        (global_name(name), "on all test data, the global model reaches"),
    ):
        last = last_metric(group, series)
        if not isnan(last.centre):
            parts.append(f"{beginning} {interval(last, metric.scale)}{unit}")
    if not parts:
        return ""
    sentence = (
        f"{label[0].upper()}{label[1:]} after {_rounds(group)}: {'; '.join(parts)}."
    )
    known = 100 * last_of_clients(group.seeds)
    if name == "accuracy" and len(known) >= 10:
        whose = "the clients" if judged == clients else "these"
        sentence += f" The worst tenth of {whose} is at {worst_tenth(known):.1f} %."
    return sentence + _target(group)


def _rounds(group: Group) -> str:
    """Say after how many rounds the seeds are judged: some may have ended earlier."""
    done = sorted(run.rounds_done for run in group.seeds)
    if done[0] == done[-1]:
        return count(done[0], "round")
    return f"{done[0]} to {done[-1]} rounds"


def _target(group: Group) -> str:
    """Say whether the target was reached, and held; empty without a target."""
    if group.first.target is None:
        return ""
    target = f"The target of {group.first.target:g} % was"
    if len(group.seeds) == 1:
        return f" {target} {_reached_and_held(group.first)}."
    there = [run for run in group.seeds if run.reached() is not None]
    told = f" {target} reached by {len(there)} of {len(group.seeds)} seeds"
    if any(run.ended_at_target for run in there):
        return f"{told}, which ended there."
    stay = [run for run in there if run.stays() is not None]
    until = "to the end" if _have_ended(group.seeds) else "so far"
    return f"{told}, and held {until} by {len(stay)}."


def _reached_and_held(run: RunRecord) -> str:
    reached, stays = run.reached(), run.stays()
    if reached is None:
        return "not reached"
    told = f"reached after {count(reached.rounds, 'round')}"
    if run.ended_at_target:
        return f"{told}, which ended the run"
    if stays is None:
        return f"{told}, and lost again"
    until = "" if _have_ended([run]) else ", so far"
    return f"{told}, and held from round {stays.rounds} on{until}"


def _have_ended(runs: Sequence[RunRecord]) -> bool:
    return all(run.status == "complete" for run in runs)


def _time(group: Group) -> str:
    timed = group.processes[0].timed
    seconds = timed.rounds["seconds"]
    round_text = interval(group.seconds, 1e3)
    whole = time_text(float(np.nansum(seconds)))
    sentence = (
        f"Time: a round takes {round_text} ms (median), all {len(seconds)} took {whole}"
    )
    beside = stack_text(timed.stacks)
    sentence += f" for {beside}." if beside else "."
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
    timed = group.processes[0].timed
    totals = timed.phase_totals()
    whole = sum(totals.values())
    if not whole > 0:
        return ""
    parts = []
    for phase, seconds in sorted(totals.items(), key=lambda item: -item[1]):
        share = seconds / whole
        if share < LEAST_SHARE:
            continue
        if phase == "server" and group.first.learns_seldom:
            parts.append(f"server {server_text(timed)}, {share:.0%} of the run")
        elif phase == "other" and timed.stacked_seeds > 1:
            parts.append(f"other, with the wait for the runs beside it, {share:.0%}")
        else:
            parts.append(f"{phase} {share:.0%}")
    where = f"it went from round {timed.untimed + 1} on" if timed.untimed else "it went"
    sentence = f"Where {where}: {'; '.join(parts)}."
    uneven = timed.imbalance()
    if group.ranks > 1 and uneven >= UNEVEN:
        sentence += f" The slowest rank trains {uneven:.2f} times as long as the mean."
    return sentence
