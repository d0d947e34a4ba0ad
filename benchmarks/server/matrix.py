"""Run pFedGPA with every way to ask for the server on a GPU, and compare each with a
plain PyTorch loop.

A cell is a size of the server's networks, a ZeRO stage and a precision, in one of three
layouts of ranks:

  alone   one process plays both roles
  1+1     a worker and a server rank, which share the GPU
  1+2     a worker and two server ranks over NCCL, which share the GPU too

Further cells offload the optimiser or the parameters to the host, or recompute
activations. A cell is good when its run completes and the loss of every step is
that of the plain loop (--server-engine torch, one process) with the same micro-batches.
Clients train in float64, so that all cells learn from the same uploads. What differs is
rounding, which AdamW's first steps enlarge: the table's first lines show by how much a
second plain loop differs from the first. The largest relative difference over all steps
of both networks must stay below --fp32-tolerance or --bf16-tolerance. With bf16 and
ZeRO 1 to 3 the parameters themselves are bfloat16, which the plain loop's are not.

A job goes through many cells, because starting takes longer than learning; several jobs
run side by side. A cell that fails ends its job, and the next job goes on behind it.

examples:
  python -m benchmarks.server.matrix                                       all 48 cells and the further ones
  python -m benchmarks.server.matrix --sizes small --layouts alone --json matrix.json
  python -m benchmarks.server.matrix --sizes large --stages 0 2 3 --layouts 1+2 --precisions fp32 --basic --uncompared
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from benchmarks import launching
from benchmarks.arguments import parser_of
from benchmarks.server.cells import LAYOUTS, WORK, Cell, cells
from hpcfed.errors import UserError
from hpcfed.results.stored import read_run
from hpcfed.server.options import NETWORKS

JOBS = 2
"""Jobs of one layout that run side by side."""
JOB_SECONDS = 600.0
"""How long a job may say nothing of a further cell."""


@dataclass
class Outcome:
    """What became of a cell."""

    cell: Cell
    error: str = ""
    difference: float | None = None
    """Largest relative difference of a step's loss to the plain loop's, over both
    networks; None: not compared.
    """
    last_loss: float = float("nan")
    """The denoiser's last loss; NaN if any loss is."""
    seconds: float = float("nan")
    """Seconds of learning."""
    peak_gib: tuple[float, ...] = ()
    """Peak memory of each server rank."""


def run_jobs(layout: str, todo: dict[str, str], folder: Path) -> dict[str, str]:
    """Make the runs of one layout, in as many jobs as it takes; return the errors of
    those that failed, by name.
    """
    errors: dict[str, str] = {}
    left = dict(todo)
    while left:
        printed = _job(layout, left, folder)
        for name in list(left):
            # The first run that is not complete has ended its job; those behind it go
            # on in the next one.
            if not _complete(folder / name):
                errors[name] = _reason(folder / name, printed)
                del left[name]
                break
            del left[name]
    return errors


def _job(layout: str, todo: dict[str, str], folder: Path) -> str:
    """Start one job that goes through the runs; return what it printed."""
    ranks, _ = LAYOUTS[layout]
    words: list[str] = []
    for name, own in todo.items():
        words += ["+", *own.split(), "--out", str(folder / name)]
    # By mpi4py, which ends all ranks when one fails.
    program = ["-m", "mpi4py"] if ranks > 1 else []
    program += ["-m", "benchmarks.server.matrix", "--job", *words]
    log = folder / f"{next(iter(todo))}.log"
    with log.open("w") as file:
        job = subprocess.Popen(
            launching.on_ranks(ranks, program),
            stdout=file,
            stderr=subprocess.STDOUT,
            env=launching.environment(),
            start_new_session=True,
        )
        _await(job, lambda: sum(_complete(folder / name) for name in todo))
    return log.read_text(errors="replace")


def _await(job: subprocess.Popen[bytes], done: Callable[[], int]) -> None:
    """Wait for the end of a job; kill one that gets no further."""
    seen, since = -1, time.monotonic()
    while job.poll() is None:
        time.sleep(0.5)
        now = done()
        if now != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > JOB_SECONDS:
            os.killpg(job.pid, signal.SIGKILL)  # all ranks, not mpirun alone


def _complete(folder: Path) -> bool:
    """Return whether the run there has come to its end; the job itself leaves this
    mark, after the run.
    """
    return (folder / "done").exists()


def _reason(folder: Path, printed: str) -> str:
    """Return one line about a run that failed: what a rank left in its folder, or what
    the job printed last.
    """
    for path in sorted(folder.glob("error-*.txt")):
        return path.read_text(errors="replace").partition("\n")[0]
    told = [line for line in printed.splitlines() if line.startswith("hpcfed:")]
    errors = [line for line in printed.splitlines() if "Error" in line]
    said = told or errors or ["no word"]
    return said[-1]


def job(words: Iterable[str]) -> None:
    """Make runs one after the other on the ranks of this job; each has its options
    behind a plus sign.
    """
    from itertools import groupby

    import torch

    from hpcfed.cli import parse_run
    from hpcfed.experiment.run import run

    # "+" parts the options of one run from those of the next.
    for parting, own in groupby(words, key="+".__eq__):
        if parting:
            continue
        # Or every run would report the most that any before it has taken.
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
        folder = run(parse_run(list(own)))
        if folder is not None:
            (folder / "done").touch()


def losses(folder: Path) -> np.ndarray:
    """Return the loss of every step of both networks, the last time that they learned."""
    with h5py.File(folder / "run.h5") as file:
        return np.concatenate([file[f"server/{name}_loss"][-1] for name in NETWORKS])


def outcome(
    cell: Cell, folder: Path, errors: dict[str, str], *, compared: bool
) -> Outcome:
    """Read what a cell's run has left; compare its losses with the plain loop's if they
    are to be compared.
    """
    for name in (cell.folder, cell.reference):
        if name in errors:
            return Outcome(cell, errors[name])
    own = losses(folder / cell.folder)
    # Without a comparison there is no plain loop's run.
    plain = losses(folder / cell.reference) if compared else own
    learning = read_run(folder / cell.folder).learnings[-1]
    return Outcome(
        cell,
        difference=float(np.max(np.abs(own - plain) / plain)) if compared else None,
        last_loss=float(own[-1]) if np.isfinite(own).all() else float("nan"),
        seconds=sum(learning.seconds[name] for name in NETWORKS),
        peak_gib=tuple(float(peak) / 2**30 for peak in learning.peak_memory),
    )


def measure(chosen: Sequence[Cell], folder: Path, *, compared: bool) -> list[Outcome]:
    """Run all cells and, to be compared, their references: some jobs side by side, each
    with a share of the runs.
    """
    runs: dict[str, dict[str, str]] = {layout: {} for layout in LAYOUTS}
    for cell in chosen:
        if compared:
            runs["alone"][cell.reference] = cell.plain_words()
        runs[cell.layout][cell.folder] = cell.words()
    shares = [
        (layout, share) for layout, own in runs.items() for share in _shares(own, JOBS)
    ]
    # A large cell fills half a GPU.
    large = any(cell.size == "large" for cell in chosen)
    at_once = 1 if large else len(shares)
    errors: dict[str, str] = {}
    with ThreadPoolExecutor(at_once) as pool:
        for failed in pool.map(
            lambda share: run_jobs(share[0], share[1], folder), shares
        ):
            errors |= failed
    return [outcome(cell, folder, errors, compared=compared) for cell in chosen]


def _shares(runs: dict[str, str], number: int) -> list[dict[str, str]]:
    """Deal the runs out to at most this number of jobs."""
    names = list(runs)
    dealt = [names[first::number] for first in range(number)]
    return [{name: runs[name] for name in share} for share in dealt if share]


def table(outcomes: Sequence[Outcome], limits: dict[str, float]) -> str:
    """Return a table with a line per size, precision, stage and further option, and a
    column per layout.
    """
    there = {one.cell.layout for one in outcomes}
    layouts = [name for name in LAYOUTS if name in there]
    lines = [f"{'':44}" + "".join(f"{name:>26}" for name in layouts)]
    for row in dict.fromkeys(one.cell.row for one in outcomes):
        entries = {
            one.cell.layout: _entry(one, limits)
            for one in outcomes
            if one.cell.row == row
        }
        lines.append(
            f"{row:44}" + "".join(f"{entries.get(name, ''):>26}" for name in layouts)
        )
    return "\n".join(lines)


def _entry(one: Outcome, limits: dict[str, float]) -> str:
    if one.error:
        return "FAILED"
    verdict = "" if good(one, limits) else " TOO FAR"
    memory = " + ".join(f"{gib:.1f}" for gib in one.peak_gib)
    told = f"loss {one.last_loss:.5f}"
    if one.difference is not None:
        told = f"{one.difference:.0e}"
    return f"{told}, {memory} GiB{verdict}"


def good(one: Outcome, limits: dict[str, float]) -> bool:
    """Return whether the cell completed with the losses that it should have, where they
    were compared.
    """
    # A difference of NaN is not near: it compares as false.
    near = one.difference is None or one.difference < limits[one.cell.precision]
    return not one.error and near and bool(np.isfinite(one.last_loss))


def versions() -> str:
    """Return the machine and what runs on it; a process of its own is asked, which then
    leaves the device.
    """
    program = (
        "import torch, deepspeed; gpu = torch.cuda.is_available(); "
        "print(torch.cuda.get_device_name() if gpu else 'cpu', 'torch', torch.__version__, "
        "'NCCL', '.'.join(map(str, torch.cuda.nccl.version())) if gpu else 'none', "
        "'DeepSpeed', deepspeed.__version__)"
    )
    asked = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True
    )
    return asked.stdout.strip().splitlines()[-1] if asked.stdout.strip() else "unknown"


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--sizes", nargs="+", choices=WORK, default=["small", "paper"])
    add("--stages", nargs="+", type=int, choices=range(4), default=[0, 1, 2, 3])
    add("--precisions", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    add("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    add(
        "--basic",
        action="store_true",
        help="without offload, checkpointing, and a second plain loop",
    )
    add("--uncompared", action="store_true", help="run no plain loop to compare with")
    add("--fp32-tolerance", type=float, default=5e-3)
    add("--bf16-tolerance", type=float, default=5e-2)
    add("--keep", type=Path, help="keep the runs in this folder, which must be new")
    add("--json", type=Path, help="also write every cell to this file")
    return parser.parse_args(arguments)


def main() -> None:
    if sys.argv[1:2] == ["--job"]:
        job(sys.argv[2:])
        return
    options = parsed(sys.argv[1:])
    limits = {"fp32": options.fp32_tolerance, "bf16": options.bf16_tolerance}
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=options.keep is None)
        outcomes = measure(cells(options), folder, compared=not options.uncompared)
    print(f"{datetime.now(UTC):%Y-%m-%d}  {versions()}")
    told = "largest relative difference of a step's loss to the plain loop's"
    if options.uncompared:
        told = "the last loss"
    print(f"{told}, and peak memory of each server rank")
    print(table(outcomes, limits))
    bad = [one for one in outcomes if not good(one, limits)]
    for one in bad:
        told = one.error or f"losses differ by {one.difference:.1e}"
        print(f"{one.cell.row.strip()}, {one.cell.layout}: {told}")
    seconds = time.monotonic() - begin
    print(
        f"{len(outcomes) - len(bad)} of {len(outcomes)} cells are good, {seconds:.0f} s"
    )
    if options.json:
        options.json.write_text(json.dumps([_plain(one) for one in outcomes], indent=1))
    sys.exit(1 if bad else 0)


def _plain(one: Outcome) -> dict[str, Any]:
    return asdict(one) | {"row": one.cell.row}


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"matrix.py: {error}") from None
