"""A plan as tables on the terminal."""

from hpcfed.analysis.render.console import Output, bare_table, say
from hpcfed.errors import count
from hpcfed.options import Settings
from hpcfed.plan.fits import Range
from hpcfed.plan.planner import Plan
from hpcfed.words import bytes_text, seconds_text


def print_plan(plan: Plan, settings: Settings) -> None:
    """Print what the plan is based on, and its tables; intervals are in brackets."""
    console = Output()
    config = settings.config
    say(
        console,
        f"{config.method} on {config.dataset}: {count(config.clients, 'client')}, "
        f"{config.cohort_size} in a round, {count(config.rounds, 'round')}",
    )
    say(console, *plan.notes, "")
    table = bare_table("ranks", "a round", "", "efficiency", "evaluation", "memory", "")
    first = plan.rounds[1].seconds.middle
    for ranks, found in plan.rounds.items():
        efficiency = first / ranks / found.seconds.middle
        table.add_row(
            str(ranks),
            seconds_text(found.seconds.middle),
            _interval(found.seconds),
            f"{efficiency:.0%}",
            seconds_text(found.evaluation.middle),
            bytes_text(found.memory.middle),
            f"\\[{bytes_text(found.memory.low)} – {bytes_text(found.memory.high)}]",
        )
    console.print(table)
    if plan.learnings:
        _print_learnings(plan, console)
    say(console, "")
    if plan.best is not None:
        best = plan.best
        whose = "all ranks do both"
        if best.server_ranks:
            whose = f"{best.workers} workers and --server-ranks {best.server_ranks}"
        say(console, f"ends first: {whose}")
    whole = plan.whole
    low, high = seconds_text(whole.low), seconds_text(whole.high)
    say(console, f"the whole run: {seconds_text(whole.middle)} [{low} – {high}]")


def _print_learnings(plan: Plan, console: Output) -> None:
    """Print one row for every number of server ranks."""
    say(console, "")
    stages = sorted({found.zero_stage for found in plan.learnings})
    table = bare_table(
        "server ranks", *(f"ZeRO {stage}" for stage in stages), "memory, ZeRO 0 – 3"
    )
    for ranks in sorted({found.ranks for found in plan.learnings}):
        row = [found for found in plan.learnings if found.ranks == ranks]
        times = []
        for found in row:
            times.append(
                f"{seconds_text(found.seconds.middle)} {_interval(found.seconds)}"
            )
        first, last = row[0].memory.middle, row[-1].memory.middle
        table.add_row(str(ranks), *times, f"{bytes_text(first)} – {bytes_text(last)}")
    console.print(table)
    say(console, "", "server ranks   whole run")
    for split in plan.splits:
        low, high = seconds_text(split.seconds.low), seconds_text(split.seconds.high)
        name = str(split.server_ranks or "0 (both)")
        say(console, f"{name:14} {seconds_text(split.seconds.middle)} [{low} – {high}]")


def _interval(found: Range) -> str:
    # Escaped, because rich reads a bracket as the beginning of a style.
    return f"\\[{seconds_text(found.low)} – {seconds_text(found.high)}]"
