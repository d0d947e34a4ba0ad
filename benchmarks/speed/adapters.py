"""Adapters of many clients over one frozen language model: hpcfed beside plain torch.

  loop            client after client, each with its own adapters and moments
  loop-compiled   the same under torch.compile
  one             one adapter, all clients' samples in one batch: not federated, a bound
  one-compiled    the same under torch.compile
  hpcfed          `hpcfed run`, FedAvg, a process of its own

All do LoRA with AdamW on random tokens, over a base with random weights. Plain columns
have a base in bf16 and adapters in float32 that multiply in bf16; hpcfed has --precision
bf16, and says where it computes in TF32 instead. Tokens per second are those of training:
steps that warm up, compilation, start, evaluation and files are off the clock, and told
beside it. A loop takes as long for every client, so it is timed with a few of them. One
batch that would not fit is summed up over parts of it.

The rows flower (FlowerTune: 20 clients, 2 a round, 10 steps of 16 texts) and many-… say
what a client or 200 rounds take. GPT-2's head has no adapter.

examples:
  python -m benchmarks.speed.adapters --json adapters.json
  python -m benchmarks.speed.adapters --rows llama-1b --columns hpcfed one-compiled
  python -m benchmarks.speed.adapters --rows flower --columns hpcfed --rounds 10
  python -m benchmarks.speed.adapters --rows gpt2-124m --profile    the kernels of hpcfed's rounds
  python -m benchmarks.speed.adapters --quick                       tiny: a test of this program
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

import torch

from benchmarks.arguments import add_device, parser_of
from benchmarks.measuring import free, seconds_of
from benchmarks.speed.adapter_rows import BASES, ROWS, Base, Cell, Row, tiny, tiny_base
from benchmarks.speed.adapter_runs import hpcfed_cell
from benchmarks.speed.plain_adapters import Plain, build
from hpcfed.errors import one_line

COLUMNS = ("loop", "loop-compiled", "one", "one-compiled", "hpcfed")
WARMUP, STEPS, LONGEST = 3, 8, 5.0
"""Plain columns: steps before the clock, steps on it, and seconds after which fewer do."""


def plain_cell(name: str, row: Row, column: str, plain: Plain, vocabulary: int) -> Cell:
    """Measure a column of plain torch."""
    first = plain.row()
    device = first.device
    random = torch.Generator(device).manual_seed(0)

    def texts(*shape: int) -> torch.Tensor:
        size = (*shape, row.batch, row.length + 1)
        return torch.randint(vocabulary, size, generator=random, device=device)

    begin = time.perf_counter()
    if column.startswith("loop"):
        rows = first.repeat(row.clients, 1)
        turns = min(row.active, max(1, STEPS // row.steps))
        tokens = texts(turns, row.steps)
        plain.loop(rows, tokens[:1, :WARMUP])
        ready = time.perf_counter()
        seconds = seconds_of(lambda: plain.loop(rows, tokens), device)
        speed = tokens[..., 1:].numel() / seconds
        note = f"{turns} of {row.active} clients"
    else:
        tokens = texts(row.active).flatten(0, 1)
        optimiser = plain.optimiser()
        at_once = row.at_once or len(tokens)

        def work(steps: int) -> None:
            for _ in range(steps):
                plain.step(optimiser, tokens, at_once=at_once)

        work(WARMUP - 1)
        steps = int(LONGEST / seconds_of(lambda: work(1), device))
        steps = min(STEPS, max(2, steps))
        ready = time.perf_counter()
        seconds = seconds_of(lambda: work(steps), device)
        speed = steps * row.tokens / seconds
        note = f"{-(-len(tokens) // at_once)} parts" if row.at_once else ""
    notes = [plain.precision, note, f"warm-up {ready - begin:.1f} s"]
    gib = None
    if device.type == "cuda":
        gib = torch.cuda.max_memory_allocated() / 2**30
    return Cell(name, column, speed, gib, ", ".join(filter(None, notes)))


def plain_cells(
    rows: Sequence[tuple[str, Row]], base: Base, options: argparse.Namespace
) -> Iterator[Cell]:
    """Measure all columns of plain torch, in rows that have this base."""
    columns = [column for column in options.columns if column != "hpcfed"]
    if not columns:
        return
    device = torch.device(options.device)
    torch.manual_seed(0)
    config = base.config | {"dtype": "float32" if options.quick else "bfloat16"}
    plain = Plain(build(config, device), rank=base.rank, layers=base.layers)
    plain.compile(options.compile == "whole")
    vocabulary = base.config["vocab_size"]
    for name, row in rows:
        for column in columns:
            compiled = column.endswith("compiled")
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            try:
                with torch.compiler.set_stance(
                    "default" if compiled else "force_eager"
                ):
                    cell = plain_cell(name, row, column, plain, vocabulary)
            except torch.OutOfMemoryError:
                cell = Cell(name, column, note="does not fit")
            except Exception as error:  # torch.compile has many of its own
                cell = Cell(name, column, note=f"failed: {one_line(error)}")
            # What a cell held must not count for the next.
            free()
            yield cell
    torch.compiler.reset()


def line(cell: Cell) -> str:
    """Return a line about a cell."""
    speed = "–" if cell.speed is None else f"{cell.speed:,.0f}"
    gib = "–" if cell.gib is None else f"{cell.gib:.1f}"
    return f"{cell.row:16} {cell.column:14} {speed:>11} {gib:>6}  {cell.note}"


def table(cells: Sequence[Cell]) -> str:
    """Return tokens per second and GiB of all cells, in Markdown."""
    found = {(cell.row, cell.column): cell for cell in cells}
    lines = [f"| tokens/s (GiB) | {' | '.join(COLUMNS)} |", "|---|" + "---:|" * 5]
    for name in dict.fromkeys(cell.row for cell in cells):
        texts = []
        for column in COLUMNS:
            cell = found.get((name, column))
            text = "" if cell is None else "–"
            if cell is not None and cell.speed is not None:
                gib = "" if cell.gib is None else f" ({cell.gib:.1f})"
                text = f"{cell.speed:,.0f}{gib}"
            texts.append(text)
        lines.append(f"| {name} | {' | '.join(texts)} |")
    return "\n".join(lines)


def all_cells(options: argparse.Namespace) -> Iterator[Cell]:
    """Measure row by row; a base is made once for all rows that have it."""
    chosen = [(name, row) for name, row in ROWS.items() if name in options.rows]
    for key, group in groupby(chosen, lambda pair: pair[1].base):
        rows, base = list(group), BASES[key]
        if options.quick:
            rows = [(name, tiny(row)) for name, row in rows]
            base = tiny_base(base)
        if not options.profile:
            yield from plain_cells(rows, base, options)
        # After that, so that the plain base is off the device.
        free()
        if "hpcfed" in options.columns:
            for name, row in rows:
                yield hpcfed_cell(name, row, base, options)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    add("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    add("--rounds", type=int, default=2, help="hpcfed: rounds on the clock (2)")
    add("--warmup", type=int, default=2, help="hpcfed: rounds before (2)")
    add("--longest", type=float, default=300, help="hpcfed: seconds of a command (300)")
    helps = "compile block by block, or as a whole, which takes minutes (blocks)"
    add("--compile", choices=["blocks", "whole"], default="blocks", help=helps)
    add("--stored", default="float32", help="dtype in config.json (float32)")
    add("--profile", action="store_true", help="hpcfed alone, with its longest kernels")
    add("--quick", action="store_true", help="tiny networks, in float32")
    add("--json", type=Path, help="write all cells to this file")
    add_device(parser)
    options = parser.parse_args(arguments)
    if find_spec("transformers") is None:
        parser.error("transformers is not installed: pip install 'hpcfed[hf]'")
    cuda = torch.cuda.is_available() and options.device != "cpu"
    options.device = "cuda" if cuda else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = True
    device = torch.cuda.get_device_name() if cuda else "cpu"
    about = f"{datetime.now(UTC):%Y-%m-%d}  {device}, torch {torch.__version__}"
    print(f"{about}, compiled: {options.compile}")
    print(f"{'row':16} {'column':14} {'tokens/s':>11} {'GiB':>6}", flush=True)
    cells = []
    begin = time.perf_counter()
    for cell in all_cells(options):
        print(line(cell), flush=True)
        cells.append(cell)
        if options.json:
            content = {"machine": about, "cells": [asdict(one) for one in cells]}
            options.json.write_text(json.dumps(content, indent=1))
    print(f"\n{table(cells)}\n\n{time.perf_counter() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
