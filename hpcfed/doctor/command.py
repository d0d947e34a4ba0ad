"""Enters the world, examines it, and reports: what `hpcfed doctor` does."""

import os
import sys
import time
from pathlib import Path
from typing import NoReturn

from hpcfed.analysis.render.console import Output
from hpcfed.doctor.examine import DoctorRequest, Examination
from hpcfed.doctor.report import Diagnosis, print_diagnosis, write_json
from hpcfed.errors import remark
from hpcfed.runtime import world as worlds
from hpcfed.runtime.ending import ended_from_outside
from hpcfed.runtime.launcher import launched
from hpcfed.runtime.process_group import Backend
from hpcfed.runtime.stalls import ending_stalls
from hpcfed.runtime.world import World

STUCK = 4.0
"""How many times the limit of a check a rank may stay in one stage: then not even its own
limit has ended it, or rank 0 is gone.
"""


def examine(request: DoctorRequest, *, backend: Backend, json: Path | None) -> int:
    """Examine the machine, print the report on the root, and return the exit code."""
    rank = launched().rank
    limit = STUCK * request.timeout

    def give_up(check: str, seconds: float) -> None:
        remark(f"hpcfed: rank {rank}: no end of '{check}' after {seconds:.0f} s")

    late = (
        f"rank {rank}: no end of 'start of MPI' after {limit:g} s; is a rank missing?"
    )
    with ended_from_outside(f"hpcfed: {late}", limit):
        world = worlds.enter(device=request.device, backend=backend, connect=False)
    examination = Examination(world, request)
    with ending_stalls(lambda: examination.stage, limit, give_up):
        diagnosis = examination.run()
        if world.is_root:
            _report(world, diagnosis, json)
        if examination.hangs:
            _end_all(world, request.timeout)
        world.close()
    return diagnosis.exit_code


def _report(world: World, diagnosis: Diagnosis, json: Path | None) -> None:
    hosts = [location.host for location in world.locations]
    print_diagnosis(Output(), diagnosis, hosts)
    if json is not None:
        write_json(json, diagnosis, world)


def _end_all(world: World, patience: float) -> NoReturn:
    """End all ranks: one that hangs would keep the others from ending."""
    if not world.is_root:
        # The root prints first.
        time.sleep(patience)
    sys.stdout.flush()
    sys.stderr.flush()
    world.abort(1)
    # Alone. Python's own end would meet the thread that hangs, in CUDA or NCCL.
    os._exit(1)
