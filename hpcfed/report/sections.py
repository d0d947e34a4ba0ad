"""What the page shows, section by section: words, charts, tables. A section that has
nothing says why.
"""

import json
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import isnan, nan
from statistics import fmean
from typing import Any

import numpy as np
from markupsafe import Markup

from hpcfed.errors import count
from hpcfed.record.run import RunRecord, mean_accuracy
from hpcfed.report.charts import Axis, Line, bars, chart, spread, stripes
from hpcfed.report.collect import Found, Group, Scaling, final_accuracy, scalings, slope
from hpcfed.report.costmodel import TERMS, CostModel, HeldOut, Measured, fit, hold_out
from hpcfed.report.statistics import Estimate, of_seeds

MOST_LINES = 8
"""In one chart; more could not be told apart."""
MOST_BARS = 12
MOST_POINTS = 60
"""Of a curve; more would only be noise, and are drawn as means."""


@dataclass(frozen=True)
class Table:
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    words: bool = False
    """All cells to the left."""


@dataclass
class Section:
    id: str
    title: str
    text: list[str] = field(default_factory=list)
    charts: list[tuple[str, Markup]] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    listings: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Fitted:
    """A cost model and how it did."""

    name: str
    points: list[Measured]
    model: CostModel
    held_out: HeldOut | None


def sections(every: Sequence[Group], found: Found) -> list[Section]:
    return [
        _overview(every, found),
        _accuracy(every),
        _target(every),
        _scaling(scalings(every)),
        _clients(every),
        _phases(every),
        _memory(every),
        _bytes(every),
        _server(every),
        _attacks(every),
        _model(fitted(every)),
        _environment(every),
        _reproduce(every, found),
    ]


def _overview(every: Sequence[Group], found: Found) -> Section:
    section = Section("overview", "Overview")
    rows = [
        [
            group.label,
            f"{group.clients:,}",
            str(group.ranks),
            str(len(group.samples)),
            str(len(group.seeds)),
            f"{group.columns:,}",
            interval(group.seconds, 1e3),
            *(interval(_last(group, name), 100) for name in ACCURACIES),
        ]
        for group in every
    ]
    about = ("clients", "ranks", "runs", "seeds", "columns", "ms per round")
    columns = ("options", *about, "clients' last accuracy, %", "global model's, %")
    section.tables.append(Table(columns, rows))
    section.text.append(
        "Times are of the slowest rank, without the rounds that warm up. In brackets: "
        "95 % confidence, by Student's t "
        "over runs (on logarithms for times), or between order statistics of the "
        "rounds where there is one run. Charts "
        "cut intervals that reach far beyond the points; tooltips and tables have them whole."
    )
    if any(group.first.stacked_seeds > 1 for group in every):
        section.text.append(
            "Where several seeds advanced together, times and memory are those of all of them."
        )
    if found.unfinished:
        section.tables.append(
            Table(("not finished", "status", "why"), found.unfinished, words=True)
        )
    return section


ACCURACIES = {
    "accuracy": "clients, own test data",
    "global_accuracy": "global model, all test data",
}


def _accuracy(every: Sequence[Group]) -> Section:
    section = Section("accuracy", "Accuracy")
    families: dict[tuple[str, int], list[Group]] = defaultdict(list)
    seen = set()
    for group in sorted(
        every, key=lambda g: g.ranks
    ):  # ranks change nothing but rounding: one number of them will do
        if (group.label, group.clients) not in seen:
            seen.add((group.label, group.clients))
            families[str(group.options["dataset"]), group.clients].append(group)
    for (dataset, clients), members in sorted(families.items()):
        for series, whose in ACCURACIES.items():
            curves = [line for group in members if (line := _curve(group, series)).x]
            for drawn in _curves(curves):
                section.charts.append(
                    (f"{dataset}, {clients:,} clients: {whose}", drawn)
                )
    section.text.append(
        f"Bands are 95 % confidence over seeds. Of more than {MOST_POINTS} evaluations "
        "a curve shows means of several "
        "in a row."
    )
    repeated = [
        group
        for group in every
        if any(_evaluations(group.first, name) > 1 for name in ACCURACIES)
    ]
    if repeated:
        best = [
            [
                group.label,
                f"{group.clients:,}",
                str(group.ranks),
                *(interval(_best(group, name), 100) for name in ACCURACIES),
            ]
            for group in repeated
        ]
        columns = (
            "options",
            "clients",
            "ranks",
            "clients' best accuracy, %",
            "global model's, %",
        )
        section.tables.append(Table(columns, best))
    rows = [
        [
            group.label,
            f"{group.clients:,}",
            str(group.ranks),
            name,
            interval(_final(group, name), 100),
        ]
        for group in every
        for name in group.first.finals
    ]
    if rows:
        columns = (
            "options",
            "clients",
            "ranks",
            "judged at the end",
            "clients, own test data, %",
        )
        section.tables.append(Table(columns, rows))
    return section


def _curves(lines: Sequence[Line]) -> Iterator[Markup]:
    """Over rounds, or lying bars where runs were evaluated once; the overview has
    single values.
    """
    once = all(len(line.x) == 1 for line in lines)
    if once and len(lines) == 1:
        return
    most = MOST_BARS if once else MOST_LINES
    for start in range(0, len(lines), most):
        part = lines[start : start + most]
        if once:
            ends = {"after the last round": [line.y[0] for line in part]}
            yield stripes([line.name for line in part], ends, Axis("accuracy, %"))
        else:
            yield chart(part, Axis("rounds", whole=True), Axis("accuracy, %"))


def _curve(group: Group, name: str) -> Line:
    shortest = min(run.rounds_done for run in group.seeds)
    series = np.array([run.rounds[name][:shortest] for run in group.seeds])
    known = np.flatnonzero(~np.isnan(series).any(0))
    windows = np.array_split(known, min(len(known), MOST_POINTS)) if len(known) else []
    points = [
        of_seeds((100 * series[:, window].mean(1)).tolist(), most=100)
        for window in windows
    ]
    return Line(
        group.label_without("dataset"),
        [float(window.mean()) + 1 for window in windows],
        [p.centre for p in points],
        [p.low for p in points],
        [p.high for p in points],
        band=True,
    )


def _final(group: Group, name: str) -> Estimate:
    """What the method had judged at the end, over the seeds that have it."""
    return _known(
        [mean_accuracy(run.finals[name]) for run in group.seeds if name in run.finals]
    )


def _evaluations(run: RunRecord, name: str) -> int:
    return int(np.isfinite(run.rounds[name]).sum())


def _best(group: Group, name: str) -> Estimate:
    """The largest value of a series, over seeds."""
    return _known([run.best(name) for run in group.seeds])


def _last(group: Group, name: str) -> Estimate:
    """The last value of a series, over seeds."""
    return _known([run.last(name) for run in group.seeds])


def _known(accuracies: Sequence[float]) -> Estimate:
    known = [value for value in accuracies if not isnan(value)]
    return of_seeds(known, most=1) if known else Estimate(nan)


def best_series(run: RunRecord) -> np.ndarray:
    """Accuracy of the global model, or where there is none of the clients."""
    common = run.rounds["global_accuracy"]
    series: np.ndarray = run.rounds["accuracy"] if np.isnan(common).all() else common
    return series


def _target(every: Sequence[Group]) -> Section:
    section = Section("target", "Time to target")
    rows = []
    for group in every:
        if group.first.target is None:
            continue
        reached = [at for run in group.seeds if (at := run.reached()) is not None]
        means = {
            name: fmean(getattr(at, name) for at in reached) if reached else nan
            for name in ("seconds", "bytes")
        }
        rows.append(
            [
                group.label,
                f"{group.clients:,}",
                str(group.ranks),
                f"{group.first.target:g}",
                f"{len(reached)} of {len(group.seeds)}",
                interval(of_seeds([float(at.rounds) for at in reached]))
                if reached
                else "–",
                number(means["seconds"]),
                number(means["bytes"] / 2**20),
            ]
        )
    columns = (
        "options",
        "clients",
        "ranks",
        "target, %",
        "seeds that reached it",
        "rounds",
        "seconds",
        "MiB sent",
    )
    if rows:
        section.tables.append(Table(columns, rows))
        section.text.append("Means over the seeds that reached the target accuracy.")
    else:
        section.text.append("No run had a target: --target-accuracy gives it one.")
    return section


def _scaling(found: Sequence[Scaling]) -> Section:
    section = Section("scaling", "Speed-up and parallel efficiency")
    if not found:
        section.text.append("No options were run on different numbers of ranks.")
        return section
    section.text.append(
        "Strong scaling has the same clients on more ranks, weak scaling as many "
        "clients on every rank. Speed-up is "
        "over the fewest ranks, of weak scaling in clients per second; efficiency is "
        "speed-up by its ideal."
    )
    for kind in ("strong", "weak"):
        members = [one for one in found if one.kind == kind]
        for start in range(0, len(members), MOST_LINES):
            section.charts += _scaling_charts(kind, members[start : start + MOST_LINES])
    columns = (
        "options",
        "scaling",
        "ranks",
        "ms per round",
        "speed-up",
        "ideal",
        "efficiency, %",
    )
    rows = [
        [one.name, one.kind, str(ranks), interval(s, 1e3), interval(f), number(ideal), interval(e, 100)]
        for one in found
        for ranks, s, f, e, ideal in zip(
            one.ranks, one.seconds, one.speedup, one.efficiency, one.ideal, strict=True
        )
    ]  # fmt: skip
    section.tables.append(Table(columns, rows))
    return section


def _scaling_charts(kind: str, members: Sequence[Scaling]) -> list[tuple[str, Markup]]:
    every = sorted({float(ranks) for one in members for ranks in one.ranks})
    x = Axis("ranks", log=True, ticks=every)
    widest = max(members, key=lambda one: one.ideal[-1])
    over = [float(ranks) for ranks in widest.ranks]
    speed = Line("ideal", over, widest.ideal, ideal=True)
    whole = Line("ideal", every, [100.0] * len(every), ideal=True)
    times = [_line(one.name, one.ranks, one.seconds, 1e3) for one in members]
    return [
        (f"{kind} scaling: time", chart(times, x, Axis("ms per round", log=True))),
        (f"{kind} scaling: speed-up",
         chart([*(_line(o.name, o.ranks, o.speedup) for o in members), speed], x, Axis("speed-up, times", log=True))),
        (f"{kind} scaling: efficiency",
         chart([*(_line(o.name, o.ranks, o.efficiency, 100) for o in members), whole], x,
               Axis("parallel efficiency, %", zero=True))),
    ]  # fmt: skip


def _line(
    name: str, x: Sequence[float], estimates: Sequence[Estimate], scale: float = 1.0
) -> Line:
    return Line(
        name,
        [float(value) for value in x],
        [scale * e.centre for e in estimates],
        [scale * e.low for e in estimates],
        [scale * e.high for e in estimates],
    )


def _clients(every: Sequence[Group]) -> Section:
    section = Section("clients", "Scaling by clients")
    families = _by_ranks(every)
    lines, each, rows = [], [], []
    for (label, ranks), members in families.items():
        if len(members) > 1:
            name, x = (
                f"{label}, {ranks} rank{'s' * (ranks > 1)}",
                [float(group.clients) for group in members],
            )
            lines.append(_line(name, x, [group.seconds for group in members], 1e3))
            per = [1e3 / group.cohort for group in members]
            each.append(
                Line(
                    name,
                    x,
                    [g.seconds.centre * f for g, f in zip(members, per, strict=True)],
                )
            )
            power = slope(x, lines[-1].y)
            rows.append(
                [
                    name,
                    f"{x[0]:,.0f} … {x[-1]:,.0f}",
                    number(each[-1].y[0]),
                    number(each[-1].y[-1]),
                    number(power),
                ]
            )
    if not lines:
        section.text.append("No options were run with different numbers of clients.")
        return section
    axis = Axis(
        "clients", log=True, ticks=sorted({value for line in lines for value in line.x})
    )
    for start in range(0, len(lines), MOST_LINES):
        part = slice(start, start + MOST_LINES)
        section.charts.append(
            (
                "time of a round",
                chart(lines[part], axis, Axis("ms per round", log=True)),
            )
        )
        y = Axis(
            "ms per client and round",
            log=spread([v for line in each for v in line.y]) > 20,
        )
        section.charts.append(
            ("time by client that takes part", chart(each[part], axis, y))
        )
    columns = (
        "options",
        "clients",
        "ms per client, fewest",
        "ms per client, most",
        "power of clients",
    )
    section.tables.append(
        Table(
            columns,
            rows,
            "time grows as clients to this power: 1 is proportional, 0 is flat",
        )
    )
    return section


def _by_ranks(every: Sequence[Group]) -> dict[tuple[str, int], list[Group]]:
    families: dict[tuple[str, int], list[Group]] = defaultdict(list)
    for group in every:
        families[group.label, group.ranks].append(group)
    return families


def _by_label(every: Sequence[Group]) -> dict[str, list[Group]]:
    families: dict[str, list[Group]] = defaultdict(list)
    for group in sorted(every, key=lambda g: (g.ranks, g.clients)):
        families[group.label].append(group)
    return families


def _bar_names(members: Sequence[Group]) -> list[str]:
    return [f"{group.clients:,} on {group.ranks}" for group in members]


def _phases(every: Sequence[Group]) -> Section:
    section = Section("phases", "Seconds per round by phase")
    section.text.append(
        "Means over ranks, counted rounds and runs. Bars are named clients on ranks."
    )
    milliseconds = {
        name: partial(_phase_milliseconds, phase=name)
        for name in every[0].phase_seconds
    }
    section.charts += _stacked_bars(every, milliseconds, Axis("ms per round"))
    return section


def _phase_milliseconds(group: Group, phase: str) -> float:
    return 1e3 * group.phase_seconds[phase]


def _stacked_bars(
    every: Sequence[Group], parts: Mapping[str, Callable[[Group], float]], y: Axis
) -> list[tuple[str, Markup]]:
    """A chart for each of the options, or one for all of them where each has a single
    bar.
    """
    families = _by_label(every)
    if _single(families):
        return _lying(
            every,
            {name: [part(group) for group in every] for name, part in parts.items()},
            y,
        )
    charts = []
    for label, members in families.items():
        for start in range(0, len(members), MOST_BARS):
            own = members[start : start + MOST_BARS]
            stacked = {
                name: [part(group) for group in own] for name, part in parts.items()
            }
            charts.append(
                (label, bars(_bar_names(own), stacked, y, "clients on ranks"))
            )
    return charts


def _single(families: dict[str, list[Group]]) -> bool:
    """Whether each of several options was run with one number of clients and ranks:
    there is nothing to draw over.
    """
    return len(families) > 1 and all(len(members) == 1 for members in families.values())


def _lying(
    every: Sequence[Group], stacked: dict[str, list[float]], x: Axis
) -> list[tuple[str, Markup]]:
    charts = []
    for start in range(0, len(every), MOST_BARS):
        part = slice(start, start + MOST_BARS)
        names = [
            f"{group.label}: {group.clients:,} on {group.ranks}"
            for group in every[part]
        ]
        drawn = stripes(
            names, {name: values[part] for name, values in stacked.items()}, x
        )
        charts.append(("by options: clients on ranks", drawn))
    return charts


def _memory(every: Sequence[Group]) -> Section:
    section = Section("memory", "Memory")
    section.text.append(
        "Of the device's allocator on a GPU, of the whole process on a CPU."
    )
    if _single(_by_label(every)):
        peaks = {
            "of the rank that has most": [group.peak_memory / 2**20 for group in every]
        }
        section.charts += _lying(every, peaks, Axis("peak memory of a rank, MiB"))
        return section
    lines = []
    for (label, ranks), members in _by_ranks(every).items():
        values = [group.peak_memory / 2**20 for group in members]
        lines.append(
            Line(
                f"{label}, {ranks} rank{'s' * (ranks > 1)}",
                [float(g.clients) for g in members],
                values,
            )
        )
    for start in range(0, len(lines), MOST_LINES):
        part = lines[start : start + MOST_LINES]
        x = Axis(
            "clients",
            log=True,
            ticks=sorted({value for line in part for value in line.x}),
        )
        y = Axis("peak memory of a rank, MiB", zero=True)
        section.charts.append(("of the rank that has most", chart(part, x, y)))
    return section


def _bytes(every: Sequence[Group]) -> Section:
    section = Section("bytes", "Bytes")
    rows = [
        [
            group.label,
            f"{group.clients:,}",
            str(group.ranks),
            number(group.per_round("bytes_up") / 2**20),
            number(group.per_round("bytes_down") / 2**20),
            number(sum(float(run.rounds["bytes_up"].sum() + run.rounds["bytes_down"].sum()) for run in group.seeds)
                   / len(group.seeds) / 2**20),
        ]
        for group in every
    ]  # fmt: skip
    columns = (
        "options",
        "clients",
        "ranks",
        "up, MiB per round",
        "down, MiB per round",
        "both, MiB in all",
    )
    section.tables.append(Table(columns, rows, "by the methods' own accounting"))
    return section


def _server(every: Sequence[Group]) -> Section:
    section = Section("server", "Server")
    members = [group for group in every if group.first.learnings]
    if not members:
        section.text.append("No run had a model on the server.")
        return section
    every_run = [
        run for group in members for sample in group.samples for run in sample.runs
    ]
    names = list(
        dict.fromkeys(
            name for run in every_run for one in run.learnings for name in one.seconds
        )
    )
    seconds = {name: partial(_learning_seconds, phase=name) for name in names}
    section.charts += _stacked_bars(members, seconds, Axis("seconds of learning"))
    rows = []
    for label, own in _by_label(members).items():
        for group in own:
            last = group.first.learnings[-1]
            server = sum(_learning_seconds(group, name) for name in names)
            whole = fmean(
                float(sample.runs[0].rounds["seconds"].sum())
                for sample in group.samples
            )
            for network, parameters in last.parameters.items():
                rows.append([
                    label, f"{group.clients:,}", str(group.options.get("server_ranks", 0)), network, f"{parameters:,}",
                    number(last.samples_per_second[network]), number(100 * last.utilisation[network]),
                    number(float(last.peak_memory.max()) / 2**20), number(100 * server / whole),
                ])  # fmt: skip
    columns = ("options", "clients", "server ranks", "network", "parameters", "samples per second", "of peak, %",
               "peak memory, MiB", "server's share of the run, %")  # fmt: skip
    section.tables.append(Table(columns, rows))
    section.text.append(
        "Bars are named clients on ranks; a share of the peak is known for GPUs alone."
    )
    return section


def _learning_seconds(group: Group, phase: str) -> float:
    """Over all times that it learnt, for all seeds of a sample; mean over samples."""
    return fmean(
        sum(one.seconds.get(phase, 0.0) for run in s.runs for one in run.learnings)
        for s in group.samples
    )


def _attacks(every: Sequence[Group]) -> Section:
    section = Section("attacks", "Attacks and defences")
    members = [
        g
        for g in every
        if g.options.get("attack", "none") != "none"
        or g.options["aggregation"] != "mean"
    ]
    if not members:
        section.text.append(
            "No run had attackers or a robust rule: --attack and --aggregation ask for them."
        )
        return section
    rows = [
        [
            str(group.options["method"]),
            str(group.options["attack"]),
            str(group.options["attackers"])
            if group.options["attack"] != "none"
            else "–",
            str(group.options["aggregation"]),
            f"{group.clients:,}",
            str(group.ranks),
            interval(_over_seeds(group), 100),
            interval(
                of_seeds(
                    [float(np.nanmax(best_series(run))) for run in group.seeds], most=1
                ),
                100,
            ),
        ]
        for group in every
    ]
    columns = (
        "method",
        "attack",
        "attackers",
        "aggregation",
        "clients",
        "ranks",
        "last accuracy, %",
        "best, %",
    )
    section.tables.append(Table(columns, rows, "runs without attackers stand beside"))
    return section


def _over_seeds(group: Group) -> Estimate:
    return of_seeds([final_accuracy(run) for run in group.seeds], most=1)


def fitted(every: Sequence[Group]) -> list[Fitted]:
    """A cost model for every set of groups that differ in clients, ranks and network
    alone.
    """
    families: dict[str, list[Measured]] = defaultdict(list)
    for group in every:
        name = ", ".join(
            part for part in group.label.split(", ") if not part.startswith("model ")
        )
        families[name].append(_measured(group))
    made = []
    for name, points in families.items():
        model = fit(points)
        if model is not None:
            made.append(Fitted(name, points, model, hold_out(points)))
    return made


def _measured(group: Group) -> Measured:
    return Measured(
        group.cohort, group.ranks, group.columns, group.seconds.centre, group.steps
    )


def _model(models: Sequence[Fitted]) -> Section:
    section = Section("model", "Cost model")
    if not models:
        section.text.append(
            "There are too few different points to fit one: three numbers of clients "
            "or ranks, at least."
        )
        return section
    section.text.append(
        "Seconds per round as a sum of costs, fitted to the points above with errors "
        "relative to the time. It predicts "
        "what was measured as the error says, and further away less well: a machine's "
        "other limits are not in it."
    )
    for one in models:
        measured = [1e3 * point.seconds for point in one.points]
        predicted = [1e3 * one.model(point) for point in one.points]
        ends = [min(measured), max(measured)]
        lines = [
            Line("points", measured, predicted, joined=False),
            Line("as measured", ends, ends, ideal=True),
        ]
        x, y = (
            Axis("measured, ms per round", log=True),
            Axis("model, ms per round", log=True),
        )
        section.charts.append((one.name, chart(lines, x, y)))
        terms = [
            [name, f"{value:.3g} {TERMS[name][0]}"]
            for name, value in one.model.coefficients.items()
        ]
        section.tables.append(Table(("cost", "coefficient"), terms, one.name))
        section.tables.append(Table(("checked", "error, %"), _checks(one)))
        section.tables.append(_predictions(one))
    return section


def _checks(one: Fitted) -> list[list[str]]:
    rows = [["mean over the points it was fitted to", number(100 * one.model.error)]]
    rows.append(
        [
            "mean over points, each predicted by a fit of the others",
            number(100 * one.model.left_out_error),
        ]
    )
    if one.held_out is not None:
        point = one.held_out.point
        what = f"{point.clients:,.0f} clients on {count(point.ranks, 'rank')}, predicted by a fit of all smaller points"
        rows.append([what, f"{100 * one.held_out.error:+.3g}"])
    return rows


def _predictions(one: Fitted) -> Table:
    largest = max(one.points, key=lambda m: (m.clients, m.ranks))
    ranks = max(point.ranks for point in one.points)
    rows = []
    for more in (ranks, 2 * ranks, 4 * ranks, 8 * ranks):
        if more <= largest.clients:
            asked = replace(largest, ranks=more)
            rows.append(
                [
                    f"{largest.clients:,.0f} clients on {count(more, 'rank')}",
                    number(1e3 * one.model(asked)),
                ]
            )
    return Table(("predicted", "ms per round"), rows)


def _environment(every: Sequence[Group]) -> Section:
    section = Section("environment", "Environment and options")
    facts = []
    for group in every:
        about = group.first.environment
        source = about.get("source") or {}
        facts.append([
            group.label, f"{group.clients:,} on {group.ranks}",
            ", ".join(sorted({str(place.get("host", "?")) for place in about.get("ranks", [])})),
            str(group.options["on"]), str(about.get("threads_per_rank", "?")), str(about.get("launcher", "?")),
            str(about.get("backend", "?")), str((about.get("packages") or {}).get("torch", "?")),
            str(about.get("cuda") or "–"), _version(source),
            str(group.first.facts.get("started", "?")),
        ])  # fmt: skip
    columns = ("options", "clients on ranks", "hosts", "devices", "threads per rank", "launcher", "collectives",
               "torch", "CUDA", "commit (+: changed) or version and checksum", "started")  # fmt: skip
    section.tables.append(Table(columns, facts, words=True))
    shared = {
        name: value
        for name, value in every[0].options.items()
        if all(group.options.get(name, value) == value for group in every)
    }
    section.listings.append(
        ("options that all runs share", json.dumps(shared, indent=1))
    )
    section.listings.append(
        (
            "environment of the first run",
            json.dumps(every[0].first.environment, indent=1),
        )
    )
    return section


def _version(source: Mapping[str, Any]) -> str:
    """What was run: a commit or, from a wheel, a version and the checksum of its files."""
    if source.get("commit"):
        return str(source["commit"])[:10] + "+" * bool(source.get("changed"))
    return f"{source.get('version', '?')} {str(source.get('sha256', ''))[:10]}".strip()


def _reproduce(every: Sequence[Group], found: Found) -> Section:
    section = Section("reproduce", "Reproduce")
    section.text.append("The commands that made these figures, as they were given.")
    for study in found.studies:
        section.listings.append(
            (f"study file: {study.title or study.path.parent.name}", study.text)
        )
        lines = [
            trial.outcome.command for trial in study.trials if trial.outcome.command
        ]
        section.listings.append(
            (f"commands of {study.path.parent.name}", "\n".join(lines))
        )
    alone = {shlex.join(_command(group.first)): None for group in every}
    section.listings.append(("hpcfed's part of every command", "\n".join(alone)))
    return section


def _command(run: RunRecord) -> list[str]:
    return ["hpcfed", *run.environment.get("command", ["?"])[1:]]


def interval(estimate: Estimate, scale: float = 1.0) -> str:
    """`12.3 [11.8, 12.9]`."""
    text = number(scale * estimate.centre)
    return text + (
        f" [{number(scale * estimate.low)}, {number(scale * estimate.high)}]"
        if estimate.bounded
        else ""
    )


def number(value: float) -> str:
    if isnan(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
