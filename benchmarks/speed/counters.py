"""The kernels of a round, counted by the GPU itself: time, bytes that pass through its
memory, and bytes that must.

Nsight Compute (`ncu`) runs this program once more and reads the counters of every kernel
of one round, each kernel alone on the device. What a kernel of ours must move is what it
is given: every tensor once, those that it changes in place twice. For torch's kernels
it is unknown. "Floor" is what the bytes that must move take at the speed of a large copy,
as a share of the kernel's time.

examples:
  python -m benchmarks.speed.counters
  python -m benchmarks.speed.counters --works pfl-cifar10 --rows 12
"""

import argparse
import csv
import json
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.arguments import parser_of
from benchmarks.launching import environment
from benchmarks.measuring import setup_of
from benchmarks.speed.round import WORKS
from hpcfed.kernels.cuda import Kernel
from hpcfed.plan.speeds import Ceilings
from hpcfed.runtime import world as worlds

TIME = "gpu__time_duration.sum"
READ = "dram__bytes_read.sum"
WRITTEN = "dram__bytes_write.sum"
TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
METRICS = (TIME, READ, WRITTEN, TENSOR)
UNITS = {"Gbyte": 1e9, "Mbyte": 1e6, "Kbyte": 1e3, "byte": 1.0} | {
    "ms": 1e3,
    "us": 1.0,
    "ns": 1e-3,
    "msecond": 1e3,
    "usecond": 1.0,
    "nsecond": 1e-3,
    "%": 1.0,
}
"""To bytes and microseconds."""
IN_PLACE = {"linear_backward": (2, 3), "sgd": (0, 2)}
"""Arguments that a kernel reads and writes."""
GATHERS = ("gather_images", "gather_shifted")
"""Kernels that read as much as they write, out of something larger."""

Notes = dict[str, list[int]]
"""Bytes that must move in every launch, by the kernel's name and grid."""


@dataclass
class Counted:
    """Launches of one kernel for one layer in a round."""

    name: str
    must: int | None
    """Bytes that a launch must move, where that is known."""
    launches: int = 0
    microseconds: float = 0.0
    read: float = 0.0
    written: float = 0.0
    tensor: list[float] = field(default_factory=list)


def note_launches(notes: Notes) -> None:
    """Write down from now on what every kernel of ours is given."""
    launch = Kernel.__call__

    def noted(self: Kernel, grid: tuple[int, int], *arguments: Any) -> None:
        key = f"{self.name} {grid[0]} {grid[1]}"
        notes.setdefault(key, []).append(necessary(self.name, arguments))
        launch(self, grid, *arguments)

    Kernel.__call__ = noted  # type: ignore[method-assign]


def necessary(name: str, arguments: tuple[Any, ...]) -> int:
    """Return the bytes that a kernel must move for these arguments."""
    sizes = [_bytes(a) if isinstance(a, Tensor) else 0 for a in arguments]
    if name in GATHERS:
        return 2 * sizes[1]
    return sum(sizes) + sum(sizes[i] for i in IN_PLACE.get(name, ()))


def _bytes(tensor: Tensor) -> int:
    """Return a tensor's bytes; a row that is expanded counts once."""
    numbers = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numbers *= size if stride else 1
    return numbers * tensor.element_size()


def play(works: list[str], file: Path) -> None:
    """Do rounds of the works, the last of each under the profiler's eyes."""
    world = worlds.enter(device="cuda")
    notes: dict[str, Notes] = {}
    for name in works:
        notes[name] = {}
        note_launches(notes[name])
        values = WORKS[name] | {"engine": "batched", "device": "cuda"}
        setup = setup_of(values, world)
        fed = setup.federation
        state = setup.method.init(fed)
        for round in range(4):
            if round == 3:
                torch.cuda.synchronize()
                torch.cuda.cudart().cudaProfilerStart()
            state = setup.method.round(fed, state, fed.sample(round))
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()
    speed = Ceilings.of(world.device).bytes_per_second
    file.write_text(json.dumps({"notes": notes, "bytes_per_second": speed}))
    world.close()


def counters(words: list[str]) -> list[dict[str, str]]:
    """Return a table of the kernels that a program launches, from Nsight Compute."""
    ncu = shutil.which("ncu")
    if ncu is None:
        sys.exit("ncu is not on the PATH: it comes with NVIDIA's Nsight Compute")
    options = ["--clock-control", "none", "--profile-from-start", "off", "--csv"]
    options += ["--page", "raw", "--metrics", ",".join(METRICS)]
    found = subprocess.run(
        [ncu, *options, sys.executable, *words],
        capture_output=True,
        text=True,
        env=environment(),
    )
    if found.returncode:
        sys.exit(f"ncu failed:\n{found.stdout[-2000:]}{found.stderr[-2000:]}")
    lines = [line for line in found.stdout.splitlines() if line.startswith('"')]
    return list(csv.DictReader(lines))


def table(rows: list[dict[str, str]], notes: Notes) -> list[Counted]:
    """Return what was counted, one entry per kernel and layer."""
    units, *launches = rows
    found: dict[tuple[str, int], Counted] = {}
    seen: dict[str, int] = defaultdict(int)
    for launch in launches:

        def value(metric: str, launch: dict[str, str] = launch) -> float:
            number = float(launch[metric].replace(",", "") or "nan")
            return number * UNITS.get(units[metric], 1.0)

        name = _short(launch["Kernel Name"])
        grid = launch["Grid Size"].strip("()").replace(",", "").split()
        key = f"{name} {grid[0]} {grid[1]}"
        layers = one_step(notes.get(key, []))
        # Layers follow each other in every step in the same order.
        layer = seen[key] % max(1, len(layers))
        seen[key] += 1
        if (key, layer) not in found:
            found[key, layer] = Counted(name, layers[layer] if layers else None)
        own = found[key, layer]
        own.launches += 1
        own.microseconds += value(TIME)
        own.read += value(READ)
        own.written += value(WRITTEN)
        own.tensor.append(value(TENSOR))
    return list(found.values())


def one_step(sizes: list[int]) -> list[int]:
    """Return the shortest beginning that the whole list repeats."""
    for length in range(1, len(sizes)):
        repeated = sizes[:length] * (len(sizes) // length + 1)
        if repeated[: len(sizes)] == sizes:
            return sizes[:length]
    return sizes


def _short(name: str) -> str:
    """Return a kernel's name without template arguments and types."""
    return name.split("<")[0].split("(")[0].removeprefix("void ").replace(" ", "")


def show(found: list[Counted], bytes_per_second: float, *, rows: int) -> None:
    """Print the kernels that take most of a round."""
    total = sum(own.microseconds for own in found)
    moved = sum(own.read + own.written for own in found)
    print(f"  {total / 1e3:.2f} ms of kernels, one by one; {moved / 1e9:.2f} GB moved")
    print(
        "| kernel | launches | µs each | must move, MB | moves, MB | tensor cores busy "
        "| floor |\n|---|---:|---:|---:|---:|---:|---:|"
    )
    for own in sorted(found, key=lambda own: -own.microseconds)[:rows]:
        each = own.microseconds / own.launches
        must = floor = ""
        if own.must is not None:
            must = f"{own.must / 1e6:.1f}"
            floor = f"{100e6 * own.must / bytes_per_second / each:.0f} %"
        moves = (own.read + own.written) / own.launches / 1e6
        busy = sum(own.tensor) / own.launches
        print(
            f"| {own.name[:40]} | {own.launches} | {each:.1f} | {must} | {moves:.1f} | "
            f"{busy:.0f} % | {floor} |"
        )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--rows", type=int, default=16, help="kernels (default: 16)")
    parser.add_argument("--play", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.play:
        play(options.works, options.play)
        return
    print(f"{datetime.now(UTC):%Y-%m-%d}")
    with tempfile.TemporaryDirectory() as folder:
        for work in options.works:
            file = Path(folder, "notes.json")
            words = ["-m", "benchmarks.speed.counters"]
            words += ["--works", work, "--play", str(file)]
            rows = counters(words)
            noted = json.loads(file.read_text())
            print(work)
            found = table(rows, noted["notes"][work])
            show(found, noted["bytes_per_second"], rows=options.rows)


if __name__ == "__main__":
    main()
