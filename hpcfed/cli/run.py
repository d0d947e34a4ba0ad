"""`hpcfed run`: one run, or several seeds of it."""

from pathlib import Path

from hpcfed.cli.resume import can_be_longer, complete, requeued
from hpcfed.cli.settings import RUN_EXAMPLES, parse_run
from hpcfed.cli.show import print_run
from hpcfed.errors import UserError, command_line, remark, unless_full
from hpcfed.options import RunConfig, Settings
from hpcfed.results.stored import check_start, is_silent, keeps_last, read_run, runs
from hpcfed.runtime import compiler, environment, own_kernels
from hpcfed.runtime.imports import without_collecting
from hpcfed.runtime.launcher import launched
from hpcfed.runtime.waking import wake_gpu

SUMMARY = "one run, or several seeds of it"
EXAMPLES = RUN_EXAMPLES


def command(arguments: list[str]) -> None:
    settings = parse_run(arguments)
    if settings.config.requeue:
        settings = requeued(settings)
    config, resume = settings.config, settings.config.resume
    if resume is not None and complete(resume, config.rounds):
        silent = is_silent(resume, config.generate)
        if silent and not keeps_last(resume):
            _refuse_later_prompts(resume, config.generate)
        if not silent or not keeps_last(resume):
            if launched().rank == 0:
                remark(
                    f"hpcfed: {resume} is complete; there is nothing to go on with"
                    f"{_hint(settings, silent=silent)}"
                )
            return
    # Every rank checks, so that none starts MPI with a mistake; the root reports it.
    check_start(settings, launched())
    _begin_early(config)
    # Late: this loads torch, and MPI starts.
    with without_collecting():
        from hpcfed.experiment.run import run

    # Only the root gets the folder back.
    folder = run(settings)
    if folder is not None:
        with unless_full(f"the run is complete: {command_line('show', folder)}"):
            print_run(folder)


def _begin_early(config: RunConfig) -> None:
    """Begin what needs no torch, while torch is loaded: start a GPU, or compile a kernel
    that clients on CPUs will need; look at the program's source.
    """
    if config.expects_gpu:
        wake_gpu(alone=launched().alone)
    # One rank is enough for the rest: others find the kernel in the cache.
    if launched().rank:
        return
    network = config.model_info()
    on_cpu = own_kernels.are_wanted(config.kernels) and not config.expects_gpu
    if network is not None and network.convolves and on_cpu:
        compiler.begin(compiler.CONVOLUTION)
    environment.look_early()


def _refuse_later_prompts(folder: Path, prompts: int) -> None:
    """Refuse what a complete run is asked for now, and cannot do."""
    asked = min(read_run(run).config.get("generate", 0) for run in runs(folder))
    if prompts > asked:
        raise UserError(
            f"--generate {prompts}: {folder} is complete and has no checkpoint of its last "
            "round, so there is no model to continue prompts"
        )


def _hint(settings: Settings, *, silent: bool) -> str:
    """Say what a complete run can still be asked for, and why not for texts."""
    if silent:
        return ", and --generate needs a checkpoint of the last round, which it has not"
    return " (more --rounds make it longer)" if can_be_longer(settings) else ""
