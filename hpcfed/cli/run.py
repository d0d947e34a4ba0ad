"""`hpcfed run`: one run, or several seeds of it."""

from hpcfed.cli.resume import can_be_longer, complete, requeued
from hpcfed.cli.settings import RUN_EXAMPLES, parse_run
from hpcfed.cli.show import print_run
from hpcfed.errors import remark, unless_full
from hpcfed.results.stored import check_start
from hpcfed.runtime.imports import without_collecting
from hpcfed.runtime.launcher import launched

SUMMARY = "one run, or several seeds of it"
EXAMPLES = RUN_EXAMPLES


def command(arguments: list[str]) -> None:
    settings = parse_run(arguments)
    if settings.config.requeue:
        settings = requeued(settings)
    # Every rank checks, so that none starts MPI with a mistake; the root reports it.
    check_start(settings, launched())
    resume = settings.config.resume
    if resume is not None and complete(resume, settings.config.rounds):
        if launched().rank == 0:
            hint = " (more --rounds make it longer)" if can_be_longer(settings) else ""
            remark(
                f"hpcfed: {resume} is complete; there is nothing to go on with{hint}"
            )
        return
    # Late: this loads torch, and MPI starts.
    with without_collecting():
        from hpcfed.experiment.run import run

    # Only the root gets the folder back.
    folder = run(settings)
    if folder is not None:
        with unless_full(f"the run is complete: hpcfed show {folder}"):
            print_run(folder)
