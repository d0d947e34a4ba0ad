"""One run inside a program or a notebook, which afterwards continues as before."""

import json
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Any

from hpcfed import plugins
from hpcfed.api.handed_in import name_of
from hpcfed.api.opened import Run, path_of
from hpcfed.cli import keyword_settings
from hpcfed.cli.resume import complete, requeued
from hpcfed.data import brought
from hpcfed.options import Settings, facts, flag_of
from hpcfed.results.stored import check_start
from hpcfed.runtime.launcher import launched
from hpcfed.runtime.signals import STOPPED, Stop

OPTIONS = "a TOML file, and options as keywords, as in hpcfed.run(model=MyNet)"
"""What a run takes, for messages."""


def run(
    config: str | PathLike[str] | None, options: Mapping[str, Any], *, progress: bool
) -> Run:
    """Run to the end. Every rank makes the same call and gets the run."""
    # The author may have edited files and data since the last run.
    plugins.forget_changed()
    brought.forget()
    path = None if config is None else path_of(config, "hpcfed.run", OPTIONS)
    values = _named(options)
    settings = keyword_settings(values, path)
    settings = replace(settings, command=_command(values, path))
    if settings.config.requeue:
        settings = requeued(settings)
    resume = settings.config.resume
    if resume is not None and complete(resume, settings.config.rounds):
        return Run(resume)
    launch = launched()
    check_start(settings, launch)
    folder = _run(settings, quiet=not progress)
    from hpcfed.runtime import mpi

    # Only the root knows a folder whose name contains the time.
    return Run(mpi.from_root(launch, folder))


def _named(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with names in place of objects that were passed in."""
    named = dict(options)
    for option, value in options.items():
        if isinstance(value, PathLike):
            # This may be a run, as in `init` and `resume`.
            named[option] = str(Path(value))
    objects = {name: one.names_code for name, one in facts().items() if one.names_code}
    resumes = named.get("resume") is not None
    for option, kind in objects.items():
        value = options.get(option)
        if isinstance(value, ModuleType) or callable(value) or _is_data(value):
            named[option] = name_of(value, kind, resumes=resumes)
    if resumes:
        # The record names them; it is enough that they have been passed in.
        for option in objects:
            if not isinstance(options.get(option), str):
                named.pop(option, None)
    return named


def _is_data(value: object) -> bool:
    """Tell whether a value is arrays or samples: only a function of them has a name."""
    return hasattr(value, "__len__") and not isinstance(value, str)


def _command(values: Mapping[str, Any], path: Path | None) -> tuple[str, ...]:
    """Return the command line that repeats the same run."""
    words = ["hpcfed", "run"]
    if path is not None:
        words.append(str(path))
    for name, value in values.items():
        flag = flag_of(name)
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, Mapping):
            words += [flag, json.dumps(value)]
        elif isinstance(value, list | tuple | range):
            words += [flag, ",".join(map(str, value))]
        elif value is not None:
            words += [flag, str(value)]
    return tuple(words)


def _run(settings: Settings, *, quiet: bool) -> Path | None:
    """Run, and raise exceptions where the command-line program would exit."""
    # Imported late, because this loads torch.
    from hpcfed.experiment import run as experiment
    from hpcfed.experiment.failures import Failed
    from hpcfed.runtime.device import leaving_unchanged

    stop = Stop(60 * settings.config.checkpoint_minutes, ends_process=False)
    with leaving_unchanged():
        try:
            return experiment.run(settings, stop, quiet=quiet)
        except Failed as failed:
            raise failed.error from None
        except SystemExit as ending:
            if ending.code != STOPPED:
                raise
            raise KeyboardInterrupt(
                "stopped after a checkpoint; hpcfed.run(resume=FOLDER) goes on"
            ) from None
