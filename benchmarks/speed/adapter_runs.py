"""hpcfed's column of the table of adapters: `hpcfed run` in a process of its own."""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import hpcfed
from benchmarks.launching import ROOT, environment
from benchmarks.speed.adapter_rows import Base, Cell, Row
from benchmarks.speed.plain_adapters import RATE
from hpcfed.errors import count
from hpcfed.results.profiles import read_profile


def words_of(
    row: Row, base: Base, folder: Path, options: argparse.Namespace
) -> list[str]:
    """Return the options of `hpcfed run`; the base is a folder with a config.json."""
    folder.mkdir(parents=True)
    about = base.config | {"dtype": options.stored}
    (folder / "config.json").write_text(json.dumps(about))
    data = {"clients": row.clients, "samples": row.steps * row.batch}
    data |= {"length": row.length, "vocabulary": base.config["vocab_size"]}
    rounds = options.warmup + options.rounds
    given = {
        "model": f"hf:{folder}",
        "dataset": f"{ROOT / 'benchmarks/workloads/random_tokens.py'}:tokens",
        "dataset-options": json.dumps(data),
        "lora": base.rank,
        "lora-layers": base.layers,
        "optimiser": "adamw",
        "lr": RATE,
        "precision": "bf16",
        "cohort": row.active,
        "rounds": rounds,
        "evaluate-every": rounds,
        "epochs": 1,
        "batch-size": row.batch,
        "checkpoint-minutes": 0,
        "device": options.device,
        "out": folder / "run",
    }
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def hpcfed_cell(name: str, row: Row, base: Base, options: argparse.Namespace) -> Cell:
    """Run hpcfed in a process of its own, and read its record."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "base"
        words = words_of(row, base, folder, options)
        command = [sys.executable, "-m", "hpcfed", "run", *words]
        if options.profile:
            kernels = ["--profile-warmup", str(options.warmup), "--profile-rounds", "1"]
            command[3:4] = ["profile", *kernels]
        begin = time.perf_counter()
        try:
            ended = subprocess.run(
                command,
                env=environment(),
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=options.longest,
            )
        except subprocess.TimeoutExpired:
            return Cell(name, "hpcfed", note=f"not done after {options.longest:.0f} s")
        seconds = time.perf_counter() - begin
        if ended.returncode:
            last = ended.stdout.strip().splitlines()[-1:] or ["no message"]
            fits = "does not fit: " if "out of memory" in ended.stdout else ""
            return Cell(name, "hpcfed", note=f"{fits}{last[0]}")
        if options.profile:
            print(ended.stdout, kernels_of(folder / "run"), sep="\n", flush=True)
        return of_record(name, row, folder / "run", seconds, ended.stdout, options)


def of_record(
    name: str,
    row: Row,
    folder: Path,
    seconds: float,
    printed: str,
    options: argparse.Namespace,
) -> Cell:
    """Return what a run's record says; its whole command took these seconds."""
    run = hpcfed.open(folder)
    phases = {}
    for phase in ("train", "evaluate", "wall"):
        phases[phase] = np.asarray(run.timing[phase])
    train = phases["train"][options.warmup :]
    # A graph is captured and kernels are compiled in the rounds before.
    speed = len(train) * row.steps * row.tokens / train.sum()
    gib = max(run.summary()["peak_memory"]) / 2**30
    # The first line ends as in "(hf:DIR, batched) on 1 rank (cuda)".
    way = printed.partition(") on ")[0].rpartition(", ")[2]
    tf32 = "computed as with tf32" in " ".join(printed.split())
    instead = "TF32" if options.device == "cuda" else "float32"
    notes = [way, instead if tf32 else "bf16", count(len(train), "round")]
    per_client = train.mean() / row.steps / row.active
    notes.append(f"{1e3 * per_client:.2f} ms per client and step")
    notes.append(
        f"{1024 * gib / row.active:.0f} MiB per client with its share of the base"
    )
    if row.whole:
        round = (phases["wall"] - phases["evaluate"])[options.warmup :].mean()
        told = f"{row.whole} rounds would take {row.whole * round / 60:.1f} min"
        notes.append(f"{told} by {len(train)} measured, without evaluation")
    warm = (phases["wall"] - phases["evaluate"])[: options.warmup].sum()
    notes.append(f"warm-up {warm:.1f} s, evaluation {phases['evaluate'].sum():.1f} s")
    notes.append(f"start and end {seconds - phases['wall'].sum():.1f} s")
    return Cell(name, "hpcfed", float(speed), gib, ", ".join(notes))


def kernels_of(folder: Path, most: int = 30) -> str:
    """Return the longest kernels of the profiled round."""
    profile = read_profile(folder)
    lines = []
    for session in profile.sessions if profile else []:
        total = sum(operator.seconds for operator in session.operators)
        lines.append(f"{session.name}: {1e3 * total:.1f} ms of kernels in a round")
        for one in session.operators[:most]:
            share = f"{1e3 * one.seconds:10.2f} ms {one.seconds / total:6.1%}"
            lines.append(f"{share} {one.calls:7} ×  {one.name[:100]}")
    return "\n".join(lines)
