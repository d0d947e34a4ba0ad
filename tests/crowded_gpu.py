"""Not a test: a run whose GPU another process fills as soon as the run has seen how
much memory is free.

Arguments are the MiB that are left, and those of hpcfed. The other process holds the
memory until the run ends.
"""

import subprocess
import sys

import torch

from hpcfed import cli
from hpcfed.clients.stacks import Stacks

HOLD = """
import sys, torch
left = int(sys.argv[1]) * 2**20
free, _ = torch.cuda.mem_get_info()
held = torch.empty(free - left, dtype=torch.uint8, device="cuda")
print(free - left, flush=True)
sys.stdin.read()
"""
left, *words = sys.argv[1:]
stack_size = Stacks.size
holders: list[subprocess.Popen[str]] = []


def then_crowd(self, *arguments, **options):  # type: ignore[no-untyped-def]
    clients = stack_size(self, *arguments, **options)
    if not holders:
        torch.cuda.empty_cache()
        command = [sys.executable, "-c", HOLD, left]
        holders.append(
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        )
        assert holders[0].stdout is not None
        assert int(holders[0].stdout.readline()) > 2**30, "there was memory to take"
    return clients


Stacks.size = then_crowd  # type: ignore[method-assign]
try:
    cli.main(words)
finally:
    for holder in holders:
        holder.kill()
