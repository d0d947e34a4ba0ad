"""`hpcfed doctor`: check the machine before a long run."""

import sys
from typing import get_args

from hpcfed.cli.parser import CommandParser
from hpcfed.errors import UserError
from hpcfed.options import check_text
from hpcfed.options.units import parse_seconds
from hpcfed.results.folder import RUNS, check_export
from hpcfed.results.publish import check_folder

SUMMARY = "whether this machine is fit for a long run, on every rank at once"
EXAMPLES = """\
  hpcfed doctor --out runs                                    this machine, and where runs go
  mpirun -n 4 python -m hpcfed doctor --json doctor.json      four ranks; the same for programs
  srun --mpi=pmix python -m hpcfed doctor --out $SCRATCH/runs all ranks of a Slurm job"""

FLAGS = """\
--out DIR
  the folder that runs will be written to; if it does not exist yet, the folder above it is
  checked (default: runs)
--device {DEVICES}
  as of hpcfed run (default: auto)
--backend {BACKENDS}
  as of hpcfed run (default: auto)
--timeout TIME
  longest time of one check, as in 20s; what takes longer is an error (default: 20s)
--json FILE
  also write the findings to a file, for programs
"""


def _flags() -> str:
    """Return the flags, with the choices that a run has."""
    # Late: this loads all that options are made of.
    from hpcfed.options.machine import MachineOptions

    text = FLAGS
    for word, name in (("DEVICES", "device"), ("BACKENDS", "backend")):
        choices = get_args(MachineOptions.model_fields[name].annotation)
        text = text.replace(word, ",".join(choices))
    return text


def command(arguments: list[str]) -> None:
    parser = CommandParser(
        "doctor",
        EXAMPLES,
        description="Checks MPI and where ranks are, versions, limits, devices and their "
        "speed, files, messages and collectives between ranks, DeepSpeed, and signals, "
        "in less than a minute. Each finding is OK, a warning or an error, and says what "
        "to do. Exit code 0: no error; 1: there is one.",
    )
    parser.add_flags(_flags(), TIME=parse_seconds)
    parser.set_defaults(out=RUNS, device="auto", backend="auto", timeout=20.0)
    options = parser.parse_args(arguments)
    check_text(str(options.out), "--out")
    check_folder("--out", options.out)
    if options.json is not None:
        check_export("--json", options.json)
        if not options.json.absolute().parent.is_dir():
            raise UserError(f"--json {options.json}: there is no such folder")
    # Late: this loads torch.
    from hpcfed.doctor.command import examine
    from hpcfed.doctor.examine import DoctorRequest

    code = examine(
        DoctorRequest(options.out, options.timeout, options.device),
        backend=options.backend,
        json=options.json,
    )
    if code:
        sys.exit(code)
