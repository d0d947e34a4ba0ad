"""hpcfed with a clock: `python milestones.py FILE WORD …` does what `hpcfed
WORD …` does, and its root writes to FILE when it reached each milestone.

A line of JSON has, for each milestone, the seconds on the machine's monotonic clock.
"""

import builtins
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARKS: dict[str, float] = {"python": time.monotonic()}
MODULES = {
    "torch": "torch",
    "deepspeed": "deepspeed",
    "hpcfed.experiment.run": "hpcfed",
}
"""Modules, and the milestones that their imports are."""
FUNCTIONS = {
    "hpcfed.cli.run:check_start": "checked",
    "hpcfed.runtime.world:enter": "world",
    "hpcfed.experiment.assemble:load_dataset": "data",
    "hpcfed.experiment.run:assemble": "assembled",
    "hpcfed.experiment.loop:begin_early_end": "begun",
    "hpcfed.experiment.recording:Recorder.record": "first round",
    "hpcfed.experiment.run:run": "written",
}
"""Functions, and the milestones that their first returns are."""
LAST = {"first round": "last round"}
"""Milestones that are also reached by the last return of their function."""


def main() -> None:
    """Run the command, then write the milestones down."""
    file, *words = sys.argv[1:]
    sys.argv = ["hpcfed", *words]
    _watch_imports()
    from hpcfed.__main__ import main as command
    from hpcfed.runtime.launcher import launched

    try:
        command()
    finally:
        if launched().rank == 0:
            _mark("end")
            Path(file).write_text(json.dumps(MARKS))


def _watch_imports() -> None:
    """Note when modules are there, and watch their functions from then on."""
    real = builtins.__import__
    waiting = dict(MODULES)

    def watching(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name == "torch" or name.startswith("torch."):
            _mark("torch begins")
        found = real(name, *arguments, **keywords)
        for module in list(waiting):
            if _is_loaded(module):
                _mark(waiting.pop(module))
        for function in list(FUNCTIONS):
            module, _, path = function.partition(":")
            if _is_loaded(module):
                _watch(sys.modules[module], path, FUNCTIONS.pop(function))
        return found

    builtins.__import__ = watching


def _is_loaded(name: str) -> bool:
    """Tell whether a module is there, and not only on its way."""
    module = sys.modules.get(name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)


def _watch(module: Any, path: str, milestone: str) -> None:
    """Note when a function of the module returns for the first time."""
    *owners, name = path.split(".")
    owner = module
    for part in owners:
        owner = getattr(owner, part)
    setattr(owner, name, _marking(getattr(owner, name), milestone))


def _marking(function: Callable[..., Any], milestone: str) -> Callable[..., Any]:
    def marking(*arguments: Any, **keywords: Any) -> Any:
        answer = function(*arguments, **keywords)
        _mark(milestone)
        if milestone in LAST:
            MARKS[LAST[milestone]] = time.monotonic()
        return answer

    return marking


def _mark(milestone: str) -> None:
    MARKS.setdefault(milestone, time.monotonic())


if __name__ == "__main__":
    main()
