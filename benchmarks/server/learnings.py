"""Watch the memory of a process whose server model learns again and again, by ZeRO
stage.

After every tenth learning and the first two, a line has the process's memory, what the
GPU's allocator has given out and what it holds, and the engines of DeepSpeed that are
still alive. Stages run one after the other, each in a process of its own.

examples:
  python -m benchmarks.server.learnings                              50 learnings with ZeRO 0, 1, 2 and 3
  python -m benchmarks.server.learnings --stages 3 --learnings 200 --server paper
"""

import argparse
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks import launching
from benchmarks.arguments import add_device, parser_of
from hpcfed.runtime import world as worlds
from hpcfed.server.bank import BankedRows
from hpcfed.server.engines import import_engine
from hpcfed.server.latent_diffusion import LatentDiffusion
from hpcfed.server.options import ServerOptions
from hpcfed.server.training_plan import RankSlot

COLUMNS = (3000, 658)
"""Widths of the generated tensors; together as many as the digits' network has."""
ROWS, BATCH, STEPS = 100, 16, 3


def learn(
    stage: int, learnings: int, server: Any, device: str
) -> list[dict[str, float]]:
    """Learn again and again; return memory after each learning, in MiB, and how many of
    DeepSpeed's engines are alive.
    """
    world = worlds.enter(device=device)
    world.join_alone()
    slot = RankSlot(world.device)
    options = ServerOptions(
        server=server,
        server_batch=BATCH,
        zero_stage=stage,
        autoencoder_samples=STEPS * BATCH,
        denoiser_samples=STEPS * BATCH,
    )
    import_engine(options, world.device)
    rows = torch.randn(ROWS, sum(COLUMNS), device=world.device)
    model = LatentDiffusion(COLUMNS, options, slot, seed=0)
    found = []
    for _ in range(learnings):
        model.learn(BankedRows.of(rows, COLUMNS))
        found.append(memory(world.device))
    world.close()
    return found


def memory(device: torch.device) -> dict[str, float]:
    """Return the memory of this process and of its GPU, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    found = {"process": pages * os.sysconf("SC_PAGE_SIZE") / 2**20}
    if device.type == "cuda":
        found["allocated"] = torch.cuda.memory_allocated(device) / 2**20
        found["reserved"] = torch.cuda.memory_reserved(device) / 2**20
    found["engines"] = sum(
        # By name, and among all objects that the collector knows: also one that only a
        # cycle still holds.
        type(one).__name__ == "DeepSpeedEngine"
        for one in gc.get_objects()
    )
    return found


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--stages", nargs="+", type=int, choices=range(4), default=[0, 1, 2, 3])
    add("--learnings", type=int, default=50)
    add("--server", choices=("small", "paper"), default="small")
    add_device(parser)
    add("--json", type=Path, help="also write every learning's figures to this file")
    add("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        stage = options.stages[0]
        found_here = learn(stage, options.learnings, options.server, options.device)
        print(json.dumps(found_here))
        return
    found: dict[int, list[dict[str, float]]] = {}
    for stage in options.stages:
        command = [sys.executable, "-m", "benchmarks.server.learnings", "--child"]
        command += ["--stages", str(stage)]
        command += ["--learnings", str(options.learnings)]
        command += ["--server", options.server, "--device", options.device]
        child = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env=launching.environment(),
        )
        found[stage] = json.loads(child.stdout.splitlines()[-1])
        for number, line in enumerate(found[stage], start=1):
            if number <= 2 or number % 10 == 0:
                told = ", ".join(
                    f"{name} {value:,.1f}"
                    for name, value in line.items()
                    if name != "engines"
                )
                print(
                    f"ZeRO {stage}, learning {number:3}: MiB: {told}; engines "
                    f"{line['engines']:.0f}",
                    flush=True,
                )
    if options.json:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
