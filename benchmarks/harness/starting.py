"""Seconds from the command to the end of the first round, and to the command's end.

A line per case and call has the seconds at which a milestone was reached: Python runs,
the command line is checked, torch is imported, hpcfed is imported, the world is entered
(devices, MPI, process group), data is loaded, the run is assembled, its rounds begin, the
first round is over, the command has ended; and the processors' seconds, which other
programs on the machine change less. "torch import" is the time between two of them.
The last lines of a case are median and least. Several packages take turns. `--cold` begins
each call with an empty cache of its own; else the calls share one, and a first call that
is not counted fills it.

A second table has the parts of each run as the run itself recorded them, in seconds, of
the first call and medians of the others: what came before its rounds, one after the other; the first round beyond a
usual one, and what was done once in the rounds, with its number; files after the last
round; what the command prints; the end of the process.

examples:
  python -m benchmarks.harness.starting
  python -m benchmarks.harness.starting --cases cnn pfedgpa --repeats 5 --cold
  python -m benchmarks.harness.starting --cases first --repeats 7 --package ../before .
  python -m benchmarks.harness.starting --cases cifar10 ranks --data-root data
  python -m benchmarks.harness.starting --cases pfl resnet --repeats 1 --cold
"""

import argparse
import json
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import h5py
import numpy as np

from benchmarks import launching
from benchmarks.arguments import parser_of

MILESTONES = (
    "python", "checked", "torch", "hpcfed", "world", "data", "assembled", "begun", "first round",
    "exit",
)  # fmt: skip
COLUMNS = (*MILESTONES, "torch import", "cpu")
STARTED = ("imports", "world", "data", "network", "samples", "opening")
ONCE = ("compiled", "first_steps", "captured")
ENDED = ("files", "printing", "exiting")
FEW = "--clients 10 --partition dominant --train-per-client 20 --test-per-client 10"
CASES: dict[str, tuple[int, str]] = {
    "help": (1, "--help"),
    "first": (1, "run --model mlp --rounds 20"),
    "mlp": (1, "run --model mlp --clients 20 --rounds 1"),
    "two": (2, "run --model mlp --clients 20 --rounds 1"),
    "cnn": (
        1,
        "run --dataset synthetic --synthetic-shape 3x32x32 --model cnn-cifar --clients 10 "
        "--train-per-client 20 --test-per-client 10 --rounds 1",
    ),
    "fashion-mnist": (1, f"run --dataset fashion-mnist {FEW} --rounds 1"),
    "cifar10": (1, f"run --dataset cifar10 {FEW} --rounds 1"),
    "ranks": (4, f"run --dataset cifar10 {FEW} --rounds 1"),
    "pfedgpa": (
        2,
        "run --method pfedgpa --server-ranks 1 --server tiny --clients 4 --rounds 1 "
        "--autoencoder-samples 100 --denoiser-samples 100",
    ),
    "pfl": (
        1,
        "run --dataset synthetic --synthetic-shape 3x32x32 --model cnn-pfl --clients 1000 "
        "--partition iid --train-per-client 50 --test-per-client 10 --cohort 50 "
        "--batch-size 10 --epochs 1 --lr 0.1 --momentum 0 --evaluate-clients 1 "
        "--evaluate-every 10 --rounds 30",
    ),
    "resnet": (
        1,
        "run --model resnet18 --clients 10 --epochs 1 --batch-size 32 --rounds 4",
    ),
    "show": (1, "show RUN"),
}
"""Ranks and words of each command; those with real images need --data-root."""


def main() -> None:
    """Time all cases, and print a table."""
    options = _parse()
    print(f"| case | {' | '.join(COLUMNS)} |")
    print("|---|" + "---:|" * len(COLUMNS))
    parts = []
    with tempfile.TemporaryDirectory() as folder:
        for case in options.cases:
            parts += _time_case(case, options, Path(folder))
    print("\n".join(["", *_head_of_parts(), *parts]))


def _time_case(case: str, options: argparse.Namespace, folder: Path) -> list[str]:
    """Time a case with each package by turns, and print its lines; return those of its
    parts.
    """
    calls: dict[Path, list[dict[str, float]]] = {}
    parts: list[tuple[str, dict[str, float]]] = []
    for call in range(options.repeats + 1):
        for number, package in enumerate(options.package):
            kept = f"{case}-{call}" if options.cold else "cache"
            cache = folder / f"{kept}-{number}"
            seconds = _timed(case, options, package, folder, cache)
            name = f"{case}, {package}, call {call}"
            # The first call fills caches, those of the system as well.
            if call:
                calls.setdefault(package, []).append(seconds)
            else:
                name += " (not counted)"
                parts.append((name, seconds))
            print(_line(name, seconds), flush=True)
    for package, timed in calls.items():
        for name, of in (("median", statistics.median), ("least", min)):
            line = _line(f"**{case}, {package}, {name}**", _over(timed, of))
            print(line, flush=True)
        parts.append((f"{case}, {package}, median", _over(timed, statistics.median)))
    if not CASES[case][1].startswith("run"):
        return []
    return [_line_of_parts(name, seconds) for name, seconds in parts]


def _timed(
    case: str, options: argparse.Namespace, package: Path, folder: Path, cache: Path
) -> dict[str, float]:
    """Run a case's command; return the seconds at which its milestones were reached."""
    ranks, text = CASES[case]
    words = text.replace("RUN", str(folder / "run")).split()
    if words[0] == "run":
        words += ["--out", str(folder / "run"), "--overwrite"]
    if "cifar10" in words or "fashion-mnist" in words:
        words += ["--data-root", str(options.data_root)]
    marks = folder / "marks.json"
    program = [str(Path(__file__).with_name("milestones.py")), str(marks), *words]
    command = launching.on_ranks(ranks, program)
    variables = launching.environment(package) | {"HPCFED_CACHE": str(cache)}
    used, begin = _cpu_seconds(), time.monotonic()
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    end = time.monotonic()
    if done.returncode:
        raise SystemExit(f"{case}: {done.stderr}")
    seconds = {}
    for milestone, at in json.loads(marks.read_text()).items():
        seconds[milestone] = at - begin
    seconds["exit"] = end - begin
    seconds["cpu"] = _cpu_seconds() - used
    if "torch" in seconds:
        seconds["torch import"] = seconds["torch"] - seconds["torch begins"]
    if words[0] == "run":
        seconds |= _parts(folder / "run/run.h5")
        seconds["files"] = seconds["written"] - seconds["last round"]
        seconds["printing"] = seconds["end"] - seconds["written"]
        seconds["exiting"] = seconds["exit"] - seconds["end"]
    return seconds


def _parts(file: Path) -> dict[str, float]:
    """Return what the root of a run recorded; older versions record less."""
    found = {}
    with h5py.File(file) as run:
        wall = run["timing/wall"][: run.attrs["rounds_done"]].max(1)
        usual = np.median(wall[1:]) if len(wall) > 1 else np.nan
        found["a usual round"] = float(usual)
        found["first round beyond it"] = float(wall[0] - usual)
        for part in STARTED:
            found[f"start_{part}"] = _of_root(run, f"start_{part}")
        for work in ONCE:
            found[work] = _of_root(run, work)
            found[f"{work}_seconds"] = _of_root(run, f"{work}_seconds")
    return found


def _of_root(run: h5py.File, name: str) -> float:
    return float(run[f"timing/{name}"][0]) if f"timing/{name}" in run else np.nan


def _head_of_parts() -> list[str]:
    titles = [*STARTED, "first round beyond a usual one", "a usual round"]
    titles += [work.replace("_", " ") for work in ONCE]
    titles += ENDED
    return [f"| case | {' | '.join(titles)} |", "|---|" + "---:|" * len(titles)]


def _line_of_parts(name: str, seconds: dict[str, float]) -> str:
    cells = [f"{seconds[f'start_{part}']:.2f}" for part in STARTED]
    cells.append(f"{seconds['first round beyond it']:.2f}")
    cells.append(f"{seconds['a usual round']:.4f}")
    for work in ONCE:
        cells.append(f"{seconds[work]:.0f} in {seconds[f'{work}_seconds']:.2f}")
    cells += [f"{seconds[part]:.2f}" for part in ENDED]
    return f"| {name} | {' | '.join(cells)} |"


def _cpu_seconds() -> float:
    """Return the processors' seconds of all ended child processes."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime


def _over(
    calls: list[dict[str, float]], of: Callable[[Iterable[float]], float]
) -> dict[str, float]:
    """Return the median or least of each column."""
    return {column: of([call[column] for call in calls]) for column in calls[0]}


def _line(name: str, seconds: dict[str, float]) -> str:
    cells = []
    for column in COLUMNS:
        at = seconds.get(column)
        cells.append("" if at is None else f"{at:.2f}")
    return f"| {name} | {' | '.join(cells)} |"


def _parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=CASES,
        default=["help", "mlp", "two", "cnn", "pfedgpa", "show"],
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--data-root", type=Path, help="folder of the data sets")
    parser.add_argument("--cold", action="store_true", help="an empty cache each time")
    parser.add_argument(
        "--package",
        nargs="+",
        type=Path,
        default=[launching.ROOT],
        help="folders that hold the versions to run (default: this checkout)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
