"""`hpcfed watch`: look at a run or a study repeatedly, only through its files, and draw
it, or print a line for logs and pipes.

`looking` reads runs, `trials` reads studies, and `frame` draws them.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from math import isnan
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live

from hpcfed.analysis.labels import all_series
from hpcfed.analysis.render.console import say
from hpcfed.analysis.render.show import of_new_clients
from hpcfed.analysis.render.watch.frame import (
    channel_facts,
    life_line,
    run_frame,
    speed,
    study_frame,
)
from hpcfed.analysis.render.watch.looking import (
    Looker,
    RunView,
    error_files,
    holds_any_run,
    unrecorded,
)
from hpcfed.analysis.render.watch.trials import StudyLooker, StudyView, holds_study
from hpcfed.errors import (
    UserError,
    command_line,
    did_you_mean,
    printable,
    remark,
    while_read,
)
from hpcfed.options.metrics import text_of
from hpcfed.results.folder import RUNS
from hpcfed.words import duration

View = RunView | StudyView
Look = Callable[[], View]
LOOK_EVERY = 1.0
"""Seconds between two looks."""
PAUSE = 20
"""The minimum pause before the next look, as a multiple of the last one's duration: a
shared file system has other work.
"""
SEED_FOLDERS = "seed-*"
SHORT = ("clients", "participants", "global")
"""Short names of a metric's series in a line."""
MOST_PHASES = 3


def watch(
    folder: Path | None, *, once: bool, wait: bool, every: float, console: Console
) -> int:
    """Show a run or a study until its end; return the exit code.

    `every` is the number of seconds between two lines, if the output is not a terminal.
    """
    found = folder or _newest(RUNS)
    try:
        _await(found, once=once, wait=wait)
        looker = StudyLooker() if holds_study(found) else Looker()
        look = partial(looker.look, found)
        if once:
            view = look()
            with while_read():
                console.print(_frame(view, console))
        elif console.is_terminal:
            view = _draw(look, console)
        else:
            view = _tell(look, console, every)
    except KeyboardInterrupt:
        remark(f"hpcfed: no longer watching {found}, which goes on undisturbed")
        return 0
    if view.over:
        with while_read():
            say(console, _hint(view))
    return 1 if view.over and view.status != "complete" else 0


def _views(look: Look) -> Iterator[View]:
    """Look repeatedly, until the end."""
    while True:
        begin = time.monotonic()
        view = look()
        yield view
        if view.over:
            return
        took = time.monotonic() - begin
        time.sleep(max(LOOK_EVERY, PAUSE * took))


def _draw(look: Look, console: Console) -> View:
    """Redraw in the same place of a terminal."""
    with Live(console=console, auto_refresh=False) as live:
        for view in _views(look):
            live.update(_frame(view, console), refresh=True)
    return view


def _tell(look: Look, console: Console, every: float) -> View:
    """Print a line now and then, and one at the end."""
    due = 0.0
    for view in _views(look):
        now = time.monotonic()
        if now >= due or view.over:
            clock = time.strftime("%H:%M:%S")
            line = study_line(view) if isinstance(view, StudyView) else run_line(view)
            # The exit code tells the end also if nobody reads the line.
            with while_read() if view.over else nullcontext():
                say(console, f"{clock}  {line}")
            due = now + every
    return view


def _frame(view: View, console: Console) -> RenderableType:
    if isinstance(view, StudyView):
        return study_frame(view)
    return run_frame(view, console)


def _hint(view: View) -> str:
    """Return what to do after the end."""
    if isinstance(view, StudyView):
        if view.status == "stopped":
            return "start the study again to go on: hpcfed study"
        return f"look at all of it: {command_line('report', view.folder)}"
    if view.error:
        return f"its error is in {printable(str(error_files(view.folder)[0]))}"
    if view.status in ("stopped", "interrupted"):
        return f"go on with it: {command_line('run', '--resume', view.folder)}"
    return f"look at all of it: {command_line('show', view.folder)}"


def _await(folder: Path, *, once: bool, wait: bool) -> None:
    """Wait for a folder in which something begins; refuse one that holds something
    else, unless told to wait.
    """
    told = False
    while not (folder.is_dir() and (holds_study(folder) or holds_any_run(folder))):
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} is a file; name the folder of a run or a study")
        if once and not folder.exists():
            raise UserError(f"no such folder: {folder}{_guess(folder)}")
        # A folder that we have waited for may just have been created.
        if folder.exists() and (once or not (wait or told)):
            raise UserError(
                f"{folder} holds neither a run nor a study; add --wait to wait for one"
            )
        if not told:
            remark(f"hpcfed: waiting for a run in {folder}{_guess(folder)}")
            told = True
        time.sleep(LOOK_EVERY)


def _guess(folder: Path) -> str:
    """Return the folder beside it with the most similar name, if any."""
    beside: list[str] = []
    with suppress(OSError):
        beside = [path.name for path in folder.parent.iterdir()]
    return did_you_mean(folder.name, beside)


def _newest(folder: Path) -> Path:
    """Return the run or study under a folder with the most recent activity."""
    found = []
    with suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir() and (holds_study(path) or holds_any_run(path)):
                found.append(path)
    if not found:
        raise UserError(
            f"there is no run in {folder}/; name a folder, as in hpcfed watch runs/first"
        )
    newest = max(found, key=_changed)
    remark(f"hpcfed: watching {printable(str(newest))}, the newest in {folder}/")
    return newest


def _changed(folder: Path) -> float:
    """Return when something was last renamed in a folder, or in those of its seeds and
    points.
    """
    times = [folder.stat().st_mtime]
    for pattern in (SEED_FOLDERS, "points/*", "points/*/*"):
        for path in folder.glob(pattern):
            with suppress(OSError):
                times.append(path.lstat().st_mtime)
    return max(times)


# A line for logs and pipes.


def run_line(view: RunView) -> str:
    """Return how far a run is, its figures, and where its time goes."""
    words = [view.status]
    if view.records:
        new = of_new_clients(view.timed)
        words.append(f"round {view.done}/{view.planned}{new}")
    else:
        words.append(unrecorded(view))
    words += last_figures(view)
    words += channel_facts(view)
    words.append(speed(view))
    phases = view.phases()
    total = sum(phases.values())
    shares = []
    for name, seconds in list(phases.items())[:MOST_PHASES]:
        shares.append(f"{name} {seconds / total:.0%}")
    if not view.over:
        words.append(", ".join(shares))
    words.append(life_line(view).plain.strip())
    return printable("  ".join(filter(None, words)))


def last_figures(view: RunView) -> list[str]:
    """Return the last loss, and the last values of the main metric."""
    if not view.done:
        return []
    found = [f"loss {view.last('train_loss'):.4f}"]
    metric = view.metric
    # Some metrics, such as perplexity, are not computed for participants.
    names = SHORT if len(all_series(metric)) == len(SHORT) else SHORT[::2]
    for short, name in zip(names, all_series(metric), strict=True):
        value = view.last(name)
        if not isnan(value):
            found.append(f"{short} {text_of(metric, value)}")
    return found


def study_line(view: StudyView) -> str:
    """Return how many trials are done, and how far the running ones are."""
    words = [view.counts()]
    for trial in view.trials:
        if trial.status == "running" and trial.run is not None:
            words.append(f"{trial.name}: {run_line(trial.run)}")
    if not view.over and not isnan(view.left):
        words.append(f"ETA of all about {duration(view.left)}")
    return printable("; ".join(words))
