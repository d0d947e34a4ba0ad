"""hpcfed: a multi-GPU benchmark harness for federated learning.

From Python:

    import hpcfed

    run = hpcfed.run(method="fedavg", clients=20, rounds=10)
    run.rounds           # a table: a row per round
    hpcfed.open("runs/first").clients
    hpcfed.study({"sweep": {"method": ["fedavg", "fedper"]}}, out="runs/two")
    hpcfed.compare("runs/before", "runs/after").speed

Nothing heavy is loaded before one of these is called.
"""

from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any

from hpcfed.errors import UserError
from hpcfed.version import __version__

if TYPE_CHECKING:
    from hpcfed.api.compared import Compared
    from hpcfed.api.opened import Run
    from hpcfed.api.sweep import Sweep

__all__ = ["UserError", "__version__", "compare", "open", "run", "study"]


def run(
    config: str | PathLike[str] | None = None,
    /,
    *,
    progress: bool = True,
    **options: Any,
) -> "Run":
    """Run to the end in this process, or on every rank under mpirun; return the run.

    Keywords are the options of `hpcfed run --help`, with underscores. `config` is a TOML
    file of options; keywords override it. `method` may be a module, `model` and
    `dataset` may be classes or functions. A mistake raises `hpcfed.UserError`. Ctrl-C
    ends the round, writes a checkpoint, and raises KeyboardInterrupt.
    """
    from hpcfed.api import running

    return running.run(config, options, progress=progress)


def open(folder: str | PathLike[str]) -> "Run":
    """Open the run in a folder, or all its seeds, whatever state the run is in."""
    from hpcfed.api import opened

    return opened.open(folder)


def compare(before: str | PathLike[str], after: str | PathLike[str]) -> "Compared":
    """Compare two runs or studies: what changed from A to B, and its effect."""
    from hpcfed.api import compared

    return compared.compare(before, after)


def study(
    study: str | PathLike[str] | Mapping[str, Any],
    *,
    out: str | PathLike[str] | None = None,
    only: str = "*",
    launcher: str = "auto",
    stack: int = 1,
) -> "Sweep":
    """Run every unfinished point of a sweep, each in its own process; return all
    points. At most `stack` points share one process, if they differ only in lr, seed or
    alpha.

    `study` is a study's TOML file, the name of a ready one such as "quick", or a dict
    with a study's tables, which needs an `out`.
    """
    from hpcfed.api import sweep

    return sweep.study(study, out=out, only=only, launcher=launcher, stack=stack)
