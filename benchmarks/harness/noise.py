"""How often `hpcfed benchmark --by-turns` tells a slowdown apart, and raises a false alarm.

Takes recorded turns of a program with itself, and so of equal programs, on a machine as
busy as it was:

    hpcfed benchmark fedavg --by-turns . --runs 50 --out runs/same
    python -m benchmarks.harness.noise runs/same/turns.json --pairs 5 10 20

Draws pairs of these again and again; which of both is "this" program is a coin's choice,
and its times are made longer by a factor. Two calls, one after the other, are judged
likewise: as many neighbouring runs, then as many that follow them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.arguments import parser_of
from hpcfed.benchmark.result import TimedRun
from hpcfed.benchmark.turns import Ratio, TurnsResult, ratios_of
from hpcfed.errors import UserError

Runs = Sequence[TimedRun]
Judge = Callable[[Runs, Runs], list[Ratio]]


def longer(run: TimedRun, factor: float) -> TimedRun:
    """Return a run that has taken longer."""
    cores = None if run.cpu_seconds is None else factor * run.cpu_seconds
    times = {"all_seconds": factor * run.all_seconds, "cpu_seconds": cores}
    return run.model_copy(update=times)


def by_turns(
    recorded: TurnsResult, pairs: int, random: np.random.Generator
) -> tuple[Runs, Runs]:
    """Return some of the recorded pairs, each in an order that a coin has chosen."""
    both = list(zip(recorded.runs["this"], recorded.runs["other"], strict=True))
    chosen = [both[at] for at in random.choice(len(both), pairs, replace=False)]
    coins = random.integers(2, size=pairs)
    ours = [pair[coin] for pair, coin in zip(chosen, coins, strict=True)]
    theirs = [pair[1 - coin] for pair, coin in zip(chosen, coins, strict=True)]
    return ours, theirs


def one_after_the_other(
    recorded: TurnsResult, pairs: int, random: np.random.Generator
) -> tuple[Runs, Runs]:
    """Return neighbouring runs of one program, and as many that follow them; a coin
    chooses which come first.
    """
    runs = recorded.runs["this"]
    begin = int(random.integers(len(runs) - 2 * pairs + 1))
    first, then = runs[begin : begin + pairs], runs[begin + pairs : begin + 2 * pairs]
    return (first, then) if random.integers(2) else (then, first)


def rates(
    draw: Callable[[], tuple[Runs, Runs]], judge: Judge, factor: float, draws: int
) -> tuple[float, float]:
    """Return how often equal programs are told apart, and how often a slower one is."""
    alarms = detected = 0
    for _ in range(draws):
        ours, theirs = draw()
        alarms += any(one.verdict != "within noise" for one in judge(ours, theirs))
        slow = [longer(run, factor) for run in ours]
        detected += any(one.verdict == "slower" for one in judge(slow, theirs))
    return alarms / draws, detected / draws


def on_cpu(ours: Runs, theirs: Runs) -> list[Ratio]:
    """Judge as on a CPU: by wall time and by time on cores."""
    return ratios_of(ours, theirs, on_cpu=True)


def by_wall_time(ours: Runs, theirs: Runs) -> list[Ratio]:
    """Judge as on a GPU."""
    return ratios_of(ours, theirs, on_cpu=False)


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("files", nargs="+", type=Path, help="turns.json of equal programs")
    add("--pairs", nargs="+", type=int, default=[5, 10, 20])
    add("--slower", type=float, default=1.1, help="factor of the slowdown")
    add("--draws", type=int, default=1000)
    options = parser.parse_args()
    for file in options.files:
        recorded = TurnsResult.model_validate_json(file.read_bytes())
        number = len(recorded.runs["this"])
        print(f"{recorded.benchmark} {recorded.size}, {number} recorded pairs ({file})")
        for pairs in options.pairs:
            if pairs > number:
                raise UserError(f"--pairs {pairs}: {file} has only {number}")
            random = np.random.default_rng(pairs)
            cases = [
                ("by turns", by_turns, on_cpu),
                ("by turns, wall time alone", by_turns, by_wall_time),
            ]
            if 2 * pairs <= number:
                cases.append(
                    ("two calls, wall time", one_after_the_other, by_wall_time)
                )
            for name, draw, judge in cases:
                alarms, detected = rates(
                    partial(draw, recorded, pairs, random),
                    judge,
                    options.slower,
                    options.draws,
                )
                print(
                    f"  {pairs} pairs, {name}: false alarms {alarms:.1%}, "
                    f"told apart {detected:.1%}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
