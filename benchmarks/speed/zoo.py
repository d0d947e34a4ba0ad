"""Networks that others wrote: in which way each of them is called, why, and how long a
round takes beside a plain loop over clients.

20 networks of torchvision and 20 architectures of transformers, small and with random
weights (`zoo_networks`), each whole and with adapters (LoRA). For each a way is found, as
a run finds it; then clients train for some rounds, and are evaluated. The loop is what a
careful user writes in torch. Dropout is as the networks have it.

A network that cannot be trained is a line with the reason, and the others go on. The
program ends with 1 if any of them failed in another way than by a message to the user.

examples:
  python -m benchmarks.speed.zoo
  python -m benchmarks.speed.zoo --device cuda --jobs 8 --json zoo.json
  python -m benchmarks.speed.zoo --networks bert mobilenet_v2 --clients 10
  python -m benchmarks.speed.zoo --json zoo.json --resume          those that the file lacks
"""

import json
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.arguments import parser_of
from benchmarks.speed.own import loop, milliseconds, ours, some_data
from benchmarks.speed.zoo_networks import ZOO
from hpcfed.clients.engine import LOOP_ABOVE_COLUMNS
from hpcfed.errors import UserError, one_line
from hpcfed.models.lora import add_adapters
from hpcfed.models.own import check_network

RANK = 4
"""Rank of the adapters."""


@dataclass(frozen=True)
class Work:
    """What every network has to do."""

    device: str
    clients: int
    samples: int
    """Training samples of each client."""
    batch: int
    rounds: int
    threads: int
    """Threads of each process, on a CPU."""


@dataclass(frozen=True)
class Row:
    """A network in the table."""

    network: str
    adapters: bool
    columns: int = 0
    way: str = ""
    why: str = ""
    """Why not a faster way; or why it cannot be trained at all."""
    found_s: float = float("nan")
    """Seconds until the way was found."""
    ours_ms: float = float("nan")
    """A round, like the next."""
    loop_ms: float = float("nan")
    failed: bool = False
    """Whether it ended in anything but a message to the user."""

    @property
    def key(self) -> tuple[str, bool]:
        return self.network, self.adapters


def measured(key: str, adapters: bool, work: Work) -> Row:
    """Try one network; whatever it raises becomes its row's reason."""
    torch.set_num_threads(work.threads)
    if work.device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
    row = Row(key, adapters)
    try:
        return _trained(row, work)
    except UserError as error:
        return replace(row, way="none", why=str(error))
    except Exception as error:
        return replace(row, way="none", why=one_line(error), failed=True)


def _trained(row: Row, work: Work) -> Row:
    sample = ZOO[row.network].sample
    device = torch.device(work.device)
    shard = some_data(sample, work.clients, work.samples, device)
    begin = time.perf_counter()
    train, engine = ours(built(row), sample, shard, work.batch, "auto")
    found_s = time.perf_counter() - begin
    train()  # to warm up, and to see what it raises
    ours_ms = milliseconds(train, work.rounds, device, warmup=0)
    # The first weights of all clients, as before the first round.
    rows = engine.layout.row(built(row)).to(device).repeat(work.clients, 1)
    engine.evaluate(rows, shard, np.arange(work.clients))
    why = engine.reason
    columns = engine.layout.num_columns
    if not why and columns > LOOP_ABOVE_COLUMNS:
        why = f"it has more than {LOOP_ABOVE_COLUMNS:,} columns"
    way = engine.mode
    del train, engine
    plain = loop(built(row), shard, work.batch)
    loop_ms = milliseconds(plain, work.rounds, device, warmup=1)
    return replace(
        row,
        columns=columns,
        way=way,
        why=why,
        found_s=found_s,
        ours_ms=ours_ms,
        loop_ms=loop_ms,
    )


def built(row: Row) -> nn.Module:
    """Build a network with the same weights at every call."""
    animal = ZOO[row.network]
    torch.manual_seed(0)
    network = animal.build()
    check_network(network, animal.name, animal.sample)
    if row.adapters:
        add_adapters(network, rank=RANK, alpha=2.0 * RANK)
    return network


def all_measured(
    todo: Sequence[tuple[str, bool]], work: Work, jobs: int
) -> Iterator[Row]:
    """Measure one network after the other, or `jobs` at once in processes."""
    if jobs == 1:
        for key, adapters in todo:
            yield measured(key, adapters, work)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        futures: dict[Future[Row], tuple[str, bool]] = {}
        for cell in todo:
            futures[pool.submit(measured, *cell, work)] = cell
        for future in as_completed(futures):
            try:
                yield future.result()
            # A process that died takes those with it that it was to do.
            except Exception as error:
                lost = Row(*futures[future], way="none", failed=True)
                yield replace(lost, why=one_line(error))


def line(row: Row) -> str:
    """Return a row of the printed table, in Markdown."""
    name = row.network.replace(":", " ") + (" + LoRA" if row.adapters else "")
    columns = f"{row.columns:,}" if row.columns else ""
    times = ["", "", ""]
    if row.columns:
        faster = row.loop_ms / row.ours_ms
        times = [f"{row.ours_ms:.0f}", f"{row.loop_ms:.0f}", f"{faster:.2f} ×"]
    failed = "**failed** " if row.failed else ""
    cells = [name, columns, row.way, *times, failed + row.why.replace("|", "/")]
    return f"| {' | '.join(cells)} |"


HEAD = """\
| network | columns | way | ours, ms | plain loop, ms | faster by | why not a faster way |
|---|---:|---|---:|---:|---:|---|"""


def read(path: Path) -> list[Row]:
    """Return the rows of an earlier call."""
    return [Row(**row) for row in json.loads(path.read_text())["rows"]]


def write(path: Path, facts: dict[str, Any], rows: Sequence[Row]) -> None:
    """Write all rows so far; a file that is half written replaces none."""
    values = []
    for row in rows:
        # JSON has no NaN: what was not measured is left out.
        known = {name: value for name, value in asdict(row).items() if value == value}
        values.append(known)
    text = json.dumps({**facts, "rows": values}, indent=1)
    half = path.with_name(path.name + ".new")
    half.write_text(text)
    half.replace(path)


def chosen(names: Sequence[str]) -> list[str]:
    """Return the networks that names mean, with or without their library."""
    if not names:
        return list(ZOO)
    keys = [key for key in ZOO if key in names or key.partition(":")[2] in names]
    known = {name for key in keys for name in (key, key.partition(":")[2])}
    unknown = set(names) - known
    if unknown:
        raise SystemExit(f"no such network: {', '.join(sorted(unknown))}")
    return keys


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--networks", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--samples", type=int, default=16, help="of each client")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1, help="after one to warm up")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all rows there"
    )
    parser.add_argument("--resume", action="store_true", help="keep rows of --json")
    arguments = parser.parse_args(words)
    cores = len(os.sched_getaffinity(0))
    work = Work(
        device=arguments.device,
        clients=arguments.clients,
        samples=arguments.samples,
        batch=arguments.batch,
        rounds=arguments.rounds,
        # torch's own number, which OMP_NUM_THREADS sets.
        threads=max(1, torch.get_num_threads() // arguments.jobs),
    )
    rows: list[Row] = []
    if arguments.resume and arguments.json and arguments.json.exists():
        rows = read(arguments.json)
    done = {row.key for row in rows}
    cells = [
        (key, adapters)
        for key in chosen(arguments.networks)
        for adapters in (False, True)
    ]
    todo = [cell for cell in cells if cell not in done]
    facts = {
        "torch": torch.__version__,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "cores": cores,
        "jobs": arguments.jobs,
        **asdict(work),
    }
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    print(HEAD, flush=True)
    for row in rows:
        print(line(row))
    for row in all_measured(todo, work, arguments.jobs):
        print(line(row), flush=True)
        rows.append(row)
        if arguments.json:
            write(arguments.json, facts, rows)
    failed = sum(row.failed for row in rows)
    ways = [row.way for row in rows]
    told = ", ".join(f"{ways.count(way)} {way}" for way in dict.fromkeys(ways))
    print(f"{len(rows)} rows: {told}; {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
