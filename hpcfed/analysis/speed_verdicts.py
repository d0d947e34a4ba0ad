"""Verdicts about time, in sentences: how a round scales over ranks and clients, what
limits it, and whether it can be predicted.
"""

from collections.abc import Sequence
from math import isfinite

from hpcfed.analysis.choices import grouped
from hpcfed.analysis.costmodel import Fitted
from hpcfed.analysis.groups import Group
from hpcfed.analysis.labels import (
    MOST_SENTENCES,
    few,
    label,
    server_text,
    size_text,
    text,
    times_text,
)
from hpcfed.analysis.scaling import Growth, Limit, Scaling, limits, profiled
from hpcfed.analysis.swept import Swept, point_text
from hpcfed.errors import count
from hpcfed.words import number, times_as

LEAST_ERROR = 0.001
"""Relative error of a time below which its digits mean nothing."""


def _largest(found: Sequence[Scaling]) -> list[Scaling]:
    """Return the scaling with the most clients, for each choice."""
    choices = grouped(found, lambda one: one.key).values()
    # The most clients keep ranks busiest, so they show scaling best.
    return [max(members, key=lambda one: one.clients) for members in choices]


def strong_answers(found: Sequence[Scaling]) -> list[str]:
    """Say how much faster more ranks are with the same clients."""
    largest = _largest(found)
    if len(largest) <= MOST_SENTENCES:
        return [_speedup(one) for one in largest]
    ordered = sorted(largest, key=lambda one: one.efficiency[-1].centre)
    best, worst = _speedup(ordered[-1]), _speedup(ordered[0])
    return [_efficiencies(ordered), f"Best: {best}", f"Worst: {worst}"]


def _efficiencies(found: Sequence[Scaling]) -> str:
    efficiencies = [one.efficiency[-1].centre for one in found]
    return (
        f"The efficiency on the most ranks is {_range(efficiencies, 100)} % over "
        f"{count(len(found), 'choice')} of options."
    )


def _range(values: Sequence[float], scale: float = 1.0) -> str:
    """Return `60 to 72`, or a single number if they are alike."""
    least, most = number(scale * min(values)), number(scale * max(values))
    return least if least == most else f"{least} to {most}"


def _speedup(one: Scaling) -> str:
    where = f"{label(one.key)}, {one.clients:,.0f} clients"
    speedup, efficiency = one.speedup[-1], one.efficiency[-1]
    ranks = count(one.ranks[-1], "rank")
    if speedup.vague:
        faster = times_as(f"{number(speedup.centre)} times", "fast")
        return (
            f"{where}: too few repeats to tell whether {ranks} are faster than "
            f"{one.ranks[0]} ({faster} by the mean)."
        )
    faster = times_as(text(speedup, " times"), "fast")
    return (
        f"{where}: {ranks} are {faster} as {one.ranks[0]}, an "
        f"efficiency of {times_text(efficiency, ' %', 100)}{_no_gain(one)}."
    )


def _no_gain(one: Scaling) -> str:
    """Add a remark if more ranks do not help."""
    last = one.speedup[-1]
    if last.bounded and last.low <= 1 <= last.high:
        return "; this gain is not told apart from noise"
    if last.centre < 1:
        return "; more ranks are slower"
    return ""


def weak_answers(found: Sequence[Scaling]) -> list[str]:
    """Say how efficient more ranks are with the same number of clients on each."""
    largest = _largest(found)
    if len(largest) > MOST_SENTENCES:
        return [_efficiencies(largest)]
    sentences = []
    for one in largest:
        # In weak scaling, efficiency is the inverse of a round's slowdown.
        sentences.append(
            f"{label(one.key)}, {one.clients:g} clients per rank: from {one.ranks[0]} "
            f"to {count(one.ranks[-1], 'rank')} the efficiency is "
            f"{times_text(one.efficiency[-1], ' %', 100)}."
        )
    return sentences


def client_answers(found: Sequence[Growth]) -> list[str]:
    """Say how a round's time grows with clients."""
    if len(found) <= MOST_SENTENCES:
        return [_growth(one) for one in found]
    ordered = sorted(found, key=lambda one: one.power.centre)
    powers = [one.power.centre for one in ordered]
    return [
        f"A round's time grows as clients to the power of {_range(powers)} over "
        f"{count(len(ordered), 'choice')} of options and ranks; 1 would be in "
        "proportion.",
        f"Least: {_growth(ordered[0])}",
        f"Most: {_growth(ordered[-1])}",
    ]


def _growth(one: Growth) -> str:
    where = f"{label(one.key)}, {count(one.ranks, 'rank')}"
    sizes = f"from {one.clients[0]:,} to {one.clients[-1]:,} clients"
    if one.longer.vague:
        longer = times_as(f"{number(one.longer.centre)} times", "long")
        return (
            f"{where}: too few repeats to tell how the time of a round grows {sizes} "
            f"({longer} by the mean)."
        )
    first, last = one.per_client[0], one.per_client[-1]
    longer = times_as(text(one.longer, " times"), "long")
    return (
        f"{where}: {sizes} a round takes {longer}, clients "
        f"to the power of {text(one.power)}; a client costs {number(1e3 * first)} ms, "
        f"then {number(1e3 * last)} ms."
    )


def limit_answers(every: Sequence[Group], options: Sequence[Swept]) -> list[str]:
    """Say which phase takes most of a round, and what profiles found."""
    profiles = []
    for group, part in profiled(every):
        profiles.append(f"Profile of {point_text(group, options)}: {part.words}.")
    return [*_limits(limits(every), options), *few(profiles, "profile")]


def _limits(found: Sequence[Limit], options: Sequence[Swept]) -> list[str]:
    phases = {limit.phase for limit in found}
    alike = len(phases) == 1 and all(limit.loss is None for limit in found)
    if len(found) > 1 and alike and phases != {"server"}:
        shares = [limit.share for limit in found]
        return [
            f"{phases.pop()} takes most of a round everywhere, {_range(shares, 100)} %; "
            "hpcfed profile tells what limits it."
        ]
    if len(found) <= MOST_SENTENCES:
        return [_limit(limit, options) for limit in found]
    # Many choices often have the same limit.
    by_phase = grouped(found, lambda limit: limit.phase)
    sentences = []
    for phase, members in sorted(by_phase.items(), key=lambda item: -len(item[1])):
        shares = [limit.share for limit in members]
        sentences.append(
            f"{phase} takes most of a round in {len(members)} of "
            f"{count(len(found), 'choice')} of options: {_range(shares, 100)} %."
        )
    lossy = [limit for limit in found if limit.loss is not None]
    if lossy:
        worst = max(lossy, key=lambda limit: limit.loss.after if limit.loss else 0.0)
        sentences.append(f"Most is lost to more ranks here: {_limit(worst, options)}")
    return sentences


def _limit(limit: Limit, options: Sequence[Swept]) -> str:
    where = point_text(limit.group, options)
    words = f"{where}: {limit.phase} takes {100 * limit.share:.0f} % of a round"
    if limit.phase == "server" and limit.group.first.learns_seldom:
        # A typical round does not train the server's model.
        share = f"{100 * limit.share:.0f} % of the run"
        timed = limit.group.processes[0].timed
        words = f"{where}: server {server_text(timed)}, {share}"
    if limit.loss is not None:
        loss = limit.loss
        words += (
            f"; against {count(loss.ranks, 'rank')} most is lost in {loss.phase}, "
            f"{number(1e3 * loss.before)} ms there and {number(1e3 * loss.after)} ms "
            "here"
        )
    return f"{words}."


def prediction_answers(found: Sequence[Fitted]) -> list[str]:
    """Say how far off the cost models are."""
    if len(found) <= MOST_SENTENCES:
        return [_model(one) for one in found]
    errors = [max(one.model.error, LEAST_ERROR) for one in found]
    sentences = [
        f"{len(found)} cost models are wrong by {_range(errors, 100)} % on the points "
        "that they were fitted to."
    ]
    checked = [one for one in found if one.held_out is not None]
    if checked:
        worst = max(
            checked, key=lambda one: abs(one.held_out.error if one.held_out else 0)
        )
        sentences.append(f"Worst on its largest point: {_model(worst)}")
    return sentences


def _error(error: float) -> str:
    """Return a relative error in per cent; times are not known to a thousandth."""
    if error < LEAST_ERROR:
        return f"less than {100 * LEAST_ERROR:g} %"
    return f"{number(100 * error)} %"


def _model(one: Fitted) -> str:
    sentence = (
        f"{label(one.key)}: the cost model is wrong by "
        f"{_error(one.model.error)} on the points it was fitted to"
    )
    if isfinite(one.model.left_out_error):
        left_out = _error(one.model.left_out_error)
        sentence += f", by {left_out} on points that it has not seen"
    if one.held_out is not None:
        point = one.held_out.point
        error = 100 * one.held_out.error
        sentence += (
            f"; for the largest ({size_text(point.clients, point.ranks)}) it would have "
            f"been {error:+.3g} % off"
        )
    return f"{sentence}."
