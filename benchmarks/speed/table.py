"""The figures that rounds and starts are judged by, each beside its goal, in one call.

  pfl-cifar10      1000 users × 50 images, cohort 50, batch 10, 1 epoch
  pfedgpa-cifar10  100 clients × 600 images, all take part, batch 50, 2 epochs
  uneven           the same clients by Dirichlet(0.1): what their round takes as a share of the bound
                   of any schedule (benchmarks/speed/engine.py)
  genfed-fmnist    GenFed's round on Fashion-MNIST by benchmarks/paper/genfed.toml: 10 of 100
                   clients by Dirichlet(0.1), batch 10, 5 epochs
  mlp-10 … -300    10 to 300 clients of the mlp, 100 images each, batch 50, 1 epoch
  start            start and end of the published pfl run (benchmarks/rivals/published.py),
                   nothing in the cache
  start-kept       the same, with kernels in the cache

A round is sampling, download, local training, aggregation and the training loss, without
evaluation. Rounds that warm up are not counted; a row counts rounds until it has taken
--seconds. Figures are the median, and the range from 10 to 90 %, of rounds; of calls for
the start, which run the first 50 of 1500 rounds. "Longest" is the steps of a round's
longest client, and what each takes if they fill the round. Where the files of CIFAR-10 or
Fashion-MNIST are not, synthetic images of the same shape and number take their place; the
start then reads no files. --before reads the JSON of an earlier call, and compares. Alone
on one device.

examples:
  python -m benchmarks.speed.table --json table.json
  python -m benchmarks.speed.table --data-root /data --rows genfed-fmnist mlp-10 --before table.json
"""

import argparse
import json
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import data
from benchmarks.arguments import add_data_root, add_device, parser_of
from benchmarks.launching import ROOT
from benchmarks.measuring import LEAST, free, milliseconds, rounds_of, setup_of
from benchmarks.rivals import published
from benchmarks.speed import clients, engine
from benchmarks.speed.round import WORKS
from hpcfed.errors import one_line
from hpcfed.experiment.assemble import Setup
from hpcfed.runtime import world as worlds
from hpcfed.runtime.world import World

GENFED = ROOT / "benchmarks/paper/genfed.toml"
START_ROUNDS = 50


@dataclass(frozen=True)
class Bench:
    """What every row is measured with."""

    world: World
    options: argparse.Namespace
    folder: Path
    """For runs and caches that nobody keeps."""

    @property
    def root(self) -> Path | None:
        """The folder of real data sets."""
        return self.options.data_root

    def deadline(self, share: float = 1.0) -> float:
        """Return when a row, or a part of it, that begins now should end."""
        return time.perf_counter() + share * self.options.seconds

    @property
    def common(self) -> dict[str, Any]:
        """Options of all rounds that are timed."""
        return {"precision": "tf32", "device": self.options.device}

    def time(self, setup: Setup, until: float) -> np.ndarray:
        """Return the milliseconds of rounds."""
        one = rounds_of(setup)
        return milliseconds(
            lambda round: float(one(round).loss_sum),  # a user reads the loss, too
            self.world.device,
            rounds=self.options.rounds,
            warmup=self.options.warmup,
            until=until,
        )


@dataclass(frozen=True)
class Found:
    """What a row has measured."""

    values: Sequence[float]
    """One for every round or call that counts, in the row's unit."""
    data: str
    steps: Sequence[int] = ()
    """Steps that the longest client takes in each of these rounds."""
    more: dict[str, float] = field(default_factory=dict)
    """Other figures that were measured on the way."""

    @property
    def median(self) -> float:
        return float(np.median(self.values))

    @property
    def longest(self) -> str:
        """The longest client's steps, and what each takes if they fill the round."""
        if not self.steps:
            return ""
        each = np.median(np.divide(self.values, self.steps))
        return f"{np.median(self.steps):.0f} × {1e3 * each:.0f} µs"


@dataclass(frozen=True)
class Row:
    unit: str
    goal: float | None
    """None: half of what --before says."""
    measure: Callable[[Bench], Found]
    more_is_better: bool = False

    def reaches(self, found: float, goal: float) -> bool:
        """Tell whether a figure reaches the goal."""
        return found >= goal if self.more_is_better else found <= goal


def work(name: str, bench: Bench) -> Found:
    """Measure a work of benchmarks/speed/round.py."""
    return _rounds(_like_cifar10(WORKS[name], bench), "cifar10", bench)


def mlp(number: int, bench: Bench) -> Found:
    """Measure a round of the mlp with a number of clients."""
    values = _like_cifar10(clients.settings("mlp", number), bench)
    return _rounds(values, "cifar10", bench)


def genfed(bench: Bench) -> Found:
    """Measure GenFed's round on Fashion-MNIST, as the paper's study runs it."""
    study = tomllib.loads(GENFED.read_text())
    name = "fashion-mnist"
    values = study["common"] | study["datasets"][name] | study["methods"]["genfed"]
    values["method"] = "genfed"
    found = data.real(name, bench.root) or data.synthetic(name, values["clients"])
    return _rounds(values | found, name, bench)


def uneven(bench: Bench) -> Found:
    """Measure what share of the bound a round of uneven clients reaches, in %."""

    def timed(setup: Setup) -> np.ndarray:
        # Three pieces of work share the row's time.
        return bench.time(setup, bench.deadline(1 / 3))

    values = WORKS["pfedgpa-cifar10"] | bench.common
    made = engine.measure_uneven(bench.world, timed, values, root=bench.root)
    told = data.told(_like_cifar10(values, bench), "cifar10")
    more = {
        "even_ms": float(np.median(made.even)),
        "uneven_ms": float(np.median(made.found)),
        "alone_ms": float(np.median(made.alone)),
        "bound_ms": made.bound,
    }
    return Found((100 * made.bound / made.found).tolist(), told, more=more)


def start(bench: Bench, *, kept: bool) -> Found:
    """Measure start and end of the published pfl run; `kept`: with a filled cache."""
    until = bench.deadline()

    def call(cache: Path) -> published.Outcome:
        return published.run(
            "pfl-cifar10",
            bench.folder / "run",
            bench.root,
            ["--device", bench.options.device],
            rounds=START_ROUNDS,
            variables={"HPCFED_CACHE": str(cache)},
        )

    first = bench.folder / "cache"
    if kept and not first.exists():
        call(first)
    made = [call(first)]
    # Another call begins only if it is likely to end in time.
    while time.perf_counter() + made[-1].command < until:
        made.append(call(first if kept else bench.folder / f"cache-{len(made)}"))
    more = {
        "command_s": float(np.median([outcome.command for outcome in made])),
        # Kernels that are compiled in the first round count here, not as start.
        "rounds_s": float(np.median([outcome.training for outcome in made])),
    }
    return Found([outcome.start for outcome in made], made[0].data, more=more)


def _like_cifar10(values: dict[str, Any], bench: Bench) -> dict[str, Any]:
    return data.dealt(values, "cifar10", bench.root, partition="dominant")


def _rounds(values: dict[str, Any], name: str, bench: Bench) -> Found:
    """Measure the rounds of a run on a data set, or on samples like it."""
    until = bench.deadline()
    setup = setup_of(values | bench.common, bench.world)
    found = bench.time(setup, until)
    first = bench.options.warmup
    steps = [longest(setup, first + round) for round in range(len(found))]
    return Found(found.tolist(), data.told(values, name), steps)


def longest(setup: Setup, round: int) -> int:
    """Return the steps of the longest client in a round."""
    fed, config = setup.federation, setup.settings.config
    samples = fed.sizes[fed.sample(round).clients].max()
    return config.epochs * int(-(-samples // config.batch_size))


ROWS = {
    "pfl-cifar10": Row("ms", 4.4, partial(work, "pfl-cifar10")),
    "pfedgpa-cifar10": Row("ms", 17.0, partial(work, "pfedgpa-cifar10")),
    "uneven": Row("%", 80.0, uneven, more_is_better=True),
    "genfed-fmnist": Row("ms", None, genfed),
    # Half of 1.6, 2.6 and 2.8 ms; 30 clients were not timed then, so as with 10.
    "mlp-10": Row("ms", 0.8, partial(mlp, 10)),
    "mlp-30": Row("ms", 0.8, partial(mlp, 30)),
    "mlp-100": Row("ms", 1.3, partial(mlp, 100)),
    "mlp-300": Row("ms", 1.4, partial(mlp, 300)),
    "start": Row("s", 7.0, partial(start, kept=False)),
    "start-kept": Row("s", 7.0, partial(start, kept=True)),
}
HEADER = """\
| row | median | 10 to 90 % | counted | goal | reached | before | longest | data |
|---|---:|---:|---:|---:|---|---:|---:|---|"""


def figures(row: Row, found: Found, before: float | None) -> dict[str, Any]:
    """Return a row's figures, as they are written to JSON."""
    low, high = np.quantile(found.values, [0.1, 0.9])
    goal = row.goal
    if goal is None and before is not None:
        goal = before / 2
    return {
        "unit": row.unit,
        "median": found.median,
        "low": float(low),
        "high": float(high),
        "values": list(found.values),
        "goal": goal,
        "reached": None if goal is None else row.reaches(found.median, goal),
        "before": before,
        "longest": found.longest,
        "data": found.data,
        **found.more,
    }


def line(name: str, told: dict[str, Any]) -> str:
    """Return a row of the table, in Markdown."""
    unit = told["unit"]
    sign = "≥" if ROWS[name].more_is_better else "≤"
    goal = "" if told["goal"] is None else f"{sign} {told['goal']:.4g}"
    reached = {None: "", True: "yes", False: "no"}[told["reached"]]
    before = "" if told["before"] is None else f"{told['before']:.4g}"
    return (
        f"| {name} | {told['median']:.4g} {unit} | {told['low']:.4g} to {told['high']:.4g} | "
        f"{len(told['values'])} | {goal} | {reached} | {before} | {told['longest']} | "
        f"{told['data']} |"
    )


def measure(
    names: Sequence[str], bench: Bench, before: Mapping[str, float]
) -> tuple[dict[str, Any], bool]:
    """Measure rows and print them; return their figures, and whether all were found.

    A row that fails is told, and does not keep the others from being measured.
    """
    rows: dict[str, Any] = {}
    for name in names:
        try:
            found = ROWS[name].measure(bench)
        except (Exception, SystemExit) as error:  # a published run ends by SystemExit
            print(f"| {name} | failed: {one_line(error)} |", flush=True)
            continue
        finally:
            free()
        rows[name] = figures(ROWS[name], found, before.get(name))
        print(line(name, rows[name]), flush=True)
        if bench.options.json:
            bench.options.json.write_text(json.dumps(about(bench, rows), indent=1))
    return rows, len(rows) == len(names)


def about(bench: Bench, rows: dict[str, Any]) -> dict[str, Any]:
    """Return all figures, with where and when they were measured."""
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "device": bench.world.locations[0].device_name,
        "torch": torch.__version__,
        "rows": rows,
    }


def medians(path: Path | None) -> dict[str, float]:
    """Return the medians of an earlier call, by row."""
    if path is None:
        return {}
    rows = json.loads(path.read_text())["rows"]
    return {name: row["median"] for name, row in rows.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    add("--seconds", type=float, default=12.0, help="of a row, about (12)")
    add("--rounds", type=int, default=200, help="counted at most (200)")
    add("--warmup", type=int, default=10, help="rounds before (10)")
    add("--json", type=Path, help="also write everything to this file")
    add("--before", type=Path, help="the JSON of an earlier call")
    add_data_root(parser)
    add_device(parser)
    options = parser.parse_args(arguments)
    if options.rounds < LEAST:
        parser.error(f"--rounds {options.rounds}: a median needs {LEAST} or more")
    try:
        before = medians(options.before)
    except (OSError, ValueError, LookupError) as error:
        parser.error(f"--before {options.before}: {one_line(error)}")
    world = worlds.enter(device=options.device)
    if not world.alone:
        parser.error("start it without mpirun or srun: it is about one device")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(world, options, Path(folder))
        told = about(bench, {})
        print(f"{told['date']}  {told['device']}, torch {told['torch']}\n{HEADER}")
        _, complete = measure(options.rows, bench, before)
    world.close()
    if not complete:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
