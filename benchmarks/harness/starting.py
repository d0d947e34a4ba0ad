"""Seconds from the command to the end of the first round, and to the command's end.

A line per case and call has the seconds at which a milestone was reached: Python runs,
the command line is checked, torch is imported, hpcfed is imported, the world is entered
(devices, MPI, process group), data is loaded, the run is assembled, its rounds begin, the
first round is over. The last line of a case is the median. `--cold` begins each call with
an empty cache of its own; else the calls of a case share one, and the first fills it.

examples:
  python -m benchmarks.harness.starting
  python -m benchmarks.harness.starting --cases cnn pfedgpa --repeats 5 --cold
  python -m benchmarks.harness.starting --cases cifar10 ranks --data-root data --package ../before
"""

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks import launching
from benchmarks.arguments import parser_of

MILESTONES = (
    "python",
    "checked",
    "torch",
    "hpcfed",
    "world",
    "data",
    "assembled",
    "begun",
    "first round",
    "exit",
)
FEW = "--clients 10 --partition dominant --train-per-client 20 --test-per-client 10"
CASES: dict[str, tuple[int, str]] = {
    "help": (1, "--help"),
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
    "show": (1, "show RUN"),
}
"""Ranks and words of each command; those with real images need --data-root."""


def main() -> None:
    """Time all cases, and print a table."""
    options = _parse()
    print(f"| case | {' | '.join(MILESTONES)} |")
    print("|---|" + "---:|" * len(MILESTONES))
    with tempfile.TemporaryDirectory() as folder:
        for case in options.cases:
            calls = []
            for call in range(options.repeats):
                cache = Path(folder) / (f"{case}-{call}" if options.cold else "cache")
                calls.append(_timed(case, options, Path(folder), cache))
                print(_line(f"{case}, call {call + 1}", calls[-1]), flush=True)
            print(_line(f"**{case}, median**", _median(calls)), flush=True)


def _timed(
    case: str, options: argparse.Namespace, folder: Path, cache: Path
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
    variables = launching.environment(options.package) | {"HPCFED_CACHE": str(cache)}
    begin = time.monotonic()
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    end = time.monotonic()
    if done.returncode:
        raise SystemExit(f"{case}: {done.stderr}")
    seconds = {}
    for milestone, at in json.loads(marks.read_text()).items():
        seconds[milestone] = at - begin
    seconds["exit"] = end - begin
    return seconds


def _median(calls: list[dict[str, float]]) -> dict[str, float]:
    medians = {}
    for milestone in calls[0]:
        medians[milestone] = statistics.median(call[milestone] for call in calls)
    return medians


def _line(name: str, seconds: dict[str, float]) -> str:
    cells = []
    for milestone in MILESTONES:
        at = seconds.get(milestone)
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
        type=Path,
        default=launching.ROOT,
        help="folder that holds the version to run (default: this checkout)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
