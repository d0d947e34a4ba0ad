"""Do new clients gain from pFedGPA's guidance? Readings of it beside plain local training.

For every seed, a federation makes its rounds and the server learns. Then new clients
join, from FedAvg's row and from a random one. They train alone, and once more for every
reading, with the same random numbers. A reading is a list of options, such as
guided_reference=before,guided_return=moved; `default` has none. Readings that differ
only in options of guidance share the rounds and the learning.

The tables have the accuracy of plain local training after every update, and what each
reading adds to it: the mean difference over seeds ± its standard error. The last column
is the update with the lowest one. What was measured stays in curves.json, and is not
measured again.

examples:
  python -m benchmarks.server.guidance --out runs/guidance --seeds 0 1 2
  python -m benchmarks.server.guidance --out runs/guidance-span --set server_model=span clients=20
  python -m benchmarks.server.guidance --out runs/guidance --readings default guided_return=moved
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from torch import Tensor

from benchmarks.arguments import add_set, parser_of
from benchmarks.paper.cells import flag_words, pairs_of
from benchmarks.paper.pictures import estimate
from hpcfed import cli
from hpcfed.analysis.render import charts
from hpcfed.analysis.render.chart_files import image
from hpcfed.analysis.render.charts import Axis, Line
from hpcfed.errors import UserError
from hpcfed.experiment.assemble import Setup, assemble
from hpcfed.experiment.evaluate import client_accuracy
from hpcfed.experiment.serving import choose_server
from hpcfed.options import Settings
from hpcfed.results.run import mean_accuracy
from hpcfed.runtime import world as worlds
from hpcfed.runtime.timer import Timer
from hpcfed.runtime.world import World

COMMON = {
    "method": "pfedgpa",
    "clients": "15",
    "new_clients": "5",
    "rounds": "30",
    "server_engine": "torch",
}
"""Options of all runs, unless --set has others."""
READINGS = (
    "default",
    "guidance=-1",
    "guided_entry=noised",
    "guided_return=moved",
    "guided_reference=before",
    "guided_reference=before,guided_return=moved",
    "guided_reference=before,guided_return=moved,guidance=-1",
    "guided_reference=before,guided_return=moved,guidance=-1,guided_within=2",
)
STARTS = {"fedavg": "FedAvg's row", "random": "a random row"}
PLAIN = "plain local training"
CURVES = "curves.json"

Curves = dict[str, dict[str, list[float]]]
"""Accuracies after every update, in per cent: by reading and start."""


def main() -> None:
    """Measure what is missing, print the tables, and draw the figures."""
    asked = _parse()
    try:
        given = COMMON | pairs_of("--set", asked.set, "server_model=span")
        plans = {}
        for seed in asked.seeds:
            plans[seed] = {name: settings(given, name, seed) for name in asked.readings}
        measured = _read(asked.out, given)
    except UserError as error:
        raise SystemExit(f"guidance.py: {error}") from None
    world = worlds.enter(device=given.get("device", "auto"))
    for seed, plan in plans.items():
        found = measured.setdefault(str(seed), {})
        for group in sharing(plan):
            if group.keys() <= found.keys():
                continue
            found |= measure(group, world)
            _write(asked.out, given, measured)
            print(f"seed {seed}: {', '.join(group)}", flush=True)
    world.close()
    chosen = [measured[str(seed)] for seed in asked.seeds]
    for start, name in STARTS.items():
        print(f"\nfrom {name}, {len(chosen)} seeds")
        print("\n".join(table(chosen, start, asked.readings)))
        path = asked.out / f"from-{start}.svg"
        path.write_bytes(_figure(chosen, start, asked.readings))
        print(path)


def settings(given: dict[str, str], reading: str, seed: int) -> Settings:
    """Return the settings of a reading, checked as those of a run are."""
    own = {}
    if reading != "default":
        own = pairs_of("--readings", reading.split(","), "guided_return=moved")
    return cli.parse_run(flag_words(given | own | {"seed": str(seed)}))


def sharing(plan: dict[str, Settings]) -> Iterator[dict[str, Settings]]:
    """Yield groups of readings whose rounds and learning are the same."""
    groups: dict[str, dict[str, Settings]] = {}
    for name, one in plan.items():
        options = one.flat().items()
        others = {key: value for key, value in options if not key.startswith("guid")}
        groups.setdefault(str(others), {})[name] = one
    yield from groups.values()


def measure(group: dict[str, Settings], world: World) -> Curves:
    """Make the rounds that these readings share; return the curves of each, and of
    plain local training.
    """
    on_gpu = world.device.type == "cuda"
    chosen = {name: choose_server(one, gpu=on_gpu) for name, one in group.items()}
    first = next(iter(chosen.values()))
    setup = assemble(first, world, Timer(world.device))
    fed, method = setup.federation, setup.method
    state = method.init(fed)
    for round in range(first.config.rounds):
        cohort = fed.sample(round)
        state = method.round(fed, state, cohort)
        fed.close_round(cohort)
    assert setup.newcomers is not None, "there are new clients"
    newcomers = setup.newcomers.federation
    # As in a run, their random numbers follow those of the last round.
    newcomers.everyone(fed.round + 1)
    rows = {"fedavg": state.w, "random": newcomers.initial_row()}
    curves: Curves = {PLAIN: {}}
    for start, row in rows.items():
        curves[PLAIN][start] = _curve(setup, state, row, guided=False)
        for name, one in chosen.items():
            newcomers.options = one.options
            guided = _curve(setup, state, row, guided=True)
            curves.setdefault(name, {})[start] = guided
    fed.server.leave()
    return curves


def _curve(setup: Setup, state: Any, start: Tensor, *, guided: bool) -> list[float]:
    """Return new clients' mean accuracy after every local update from this row."""
    assert setup.newcomers is not None
    fed, config = setup.newcomers.federation, setup.settings.config
    everyone = np.arange(len(fed.clients))
    rows = start.expand(len(everyone), -1)
    curve = []
    for update in range(config.new_updates + 1):
        # Update 0 is the start.
        if update:
            before, rows = rows, fed.finetune(rows, everyone, phase=update)
            if guided:
                rows = setup.method.lead(fed, state, update - 1, before, rows)
        accuracy = client_accuracy(setup, fed, rows, everyone, config.new_clients)
        curve.append(100 * mean_accuracy(accuracy))
    return curve


def table(measured: Sequence[Curves], start: str, readings: Sequence[str]) -> list[str]:
    """Return the lines of a table: plain local training, and what readings add to it."""
    plain = [curves[PLAIN][start] for curves in measured]
    updates = range(1, len(plain[0]))
    lines = [
        f"| after local updates | {' | '.join(map(str, updates))} | lowest |",
        f"|---|{'---:|' * (len(updates) + 1)}",
        f"| {PLAIN} | {' | '.join(f'{mean(at):.2f}' for at in _by_update(plain))} | |",
    ]
    for name in readings:
        guided = [curves[name][start] for curves in measured]
        differences = []
        for ours, theirs in zip(_by_update(guided), _by_update(plain), strict=True):
            differences.append([a - b for a, b in zip(ours, theirs, strict=True)])
        added = [estimate(values) for values in differences]
        cells = [f"{middle:+.2f} ± {error:.2f}" for middle, error in added]
        lines.append(f"| {name} | {' | '.join(cells)} | {min(added)[0]:+.2f} |")
    return lines


def _by_update(curves: Sequence[list[float]]) -> Iterator[tuple[float, ...]]:
    """Yield the values of all seeds after every update but the start."""
    yield from list(zip(*curves, strict=True))[1:]


def _figure(measured: Sequence[Curves], start: str, readings: Sequence[str]) -> bytes:
    """Draw the accuracy over updates, without guidance and with it."""
    lines = []
    for name in (PLAIN, *readings):
        curves = [one[name][start] for one in measured]
        points = [estimate(at) for at in zip(*curves, strict=True)]
        middle = [value for value, _ in points]
        low = [value - error for value, error in points]
        high = [value + error for value, error in points]
        at = list(range(len(points)))
        lines.append(Line(name, at, middle, low, high, interval="standard error"))
    title = f"New clients from {STARTS[start]}"
    x, y = Axis("local updates", whole=True), Axis("accuracy, %")
    notes = [f"mean of {len(measured)} seeds, standard error"]
    drawn = charts.lines(title, lines, x, y)
    return image(drawn, "svg", inches=6.5, title=title, notes=notes)


def _read(folder: Path, given: dict[str, str]) -> dict[str, Curves]:
    """Return what was measured before, by seed; refuse that of other options."""
    path = folder / CURVES
    if not path.exists():
        return {}
    kept = json.loads(path.read_text())
    if kept["options"] != given:
        raise UserError(f"{path} has other options; use another --out")
    measured: dict[str, Curves] = kept["measured"]
    return measured


def _write(folder: Path, given: dict[str, str], measured: dict[str, Curves]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    kept = {"options": given, "measured": measured}
    (folder / CURVES).write_text(json.dumps(kept, indent=1))


def _parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the figures")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--readings", nargs="+", default=READINGS, metavar="OPTION=VALUE,…"
    )
    add_set(parser, "server_model=span")
    return parser.parse_args()


if __name__ == "__main__":
    main()
