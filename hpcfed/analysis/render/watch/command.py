"""`hpcfed watch` after its command line has been understood."""

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live

from hpcfed.analysis.render.console import say
from hpcfed.analysis.render.watch.frame import run_frame
from hpcfed.analysis.render.watch.lines import run_line, study_line
from hpcfed.analysis.render.watch.looking import Looker, RunView, holds_any_run
from hpcfed.analysis.render.watch.study_frame import study_frame
from hpcfed.analysis.render.watch.trials import StudyLooker, StudyView, holds_study
from hpcfed.errors import UserError, did_you_mean, printable, remark

View = RunView | StudyView
LOOK_EVERY = 1.0
"""Seconds between two looks."""
PAUSE = 20
"""How many times longer than a look the pause before the next is, at least: a shared
file system has other work.
"""
SEED_FOLDERS = "seed-*"


def watch(
    folder: Path | None, *, once: bool, wait: bool, every: float, console: Console
) -> int:
    """Show a run or a study until its end; return the exit code.

    `every` are the seconds between lines where the output is no terminal.
    """
    found = folder or _newest(Path("runs"))
    try:
        _await(found, once=once, wait=wait)
        look = _looking_at(found)
        if once:
            view = look()
            console.print(_frame(view, console))
        elif console.is_terminal:
            view = _draw(look, console)
        else:
            view = _tell(look, console, every)
    except KeyboardInterrupt:
        remark(f"hpcfed: no longer watching {found}, which goes on undisturbed")
        return 0
    if view.over:
        say(console, _hint(view))
    return 1 if view.over and view.status != "complete" else 0


class _looking_at:
    """Looks at a folder, as a run's or as a study's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._look = StudyLooker().look if holds_study(folder) else Looker().look

    def __call__(self) -> View:
        return self._look(self._folder)


def _views(look: "_looking_at") -> Iterator[View]:
    """Look again and again, up to the end."""
    while True:
        begin = time.monotonic()
        view = look()
        yield view
        if view.over:
            return
        took = time.monotonic() - begin
        time.sleep(max(LOOK_EVERY, PAUSE * took))


def _draw(look: "_looking_at", console: Console) -> View:
    """Draw over and over in the same place of a terminal."""
    with Live(console=console, auto_refresh=False) as live:
        for view in _views(look):
            live.update(_frame(view, console), refresh=True)
    return view


def _tell(look: "_looking_at", console: Console, every: float) -> View:
    """Print a line every so many seconds, and one at the end."""
    due = 0.0
    for view in _views(look):
        now = time.monotonic()
        if now >= due or view.over:
            clock = time.strftime("%H:%M:%S")
            line = study_line(view) if isinstance(view, StudyView) else run_line(view)
            say(console, f"{clock}  {line}")
            due = now + every
    return view


def _frame(view: View, console: Console) -> RenderableType:
    if isinstance(view, StudyView):
        return study_frame(view, console)
    return run_frame(view, console)


def _hint(view: View) -> str:
    """Return what to do after the end."""
    if isinstance(view, StudyView):
        return f"look at all of it: hpcfed report {view.folder}"
    if view.status in ("stopped", "interrupted"):
        return f"go on with it: hpcfed run --resume {view.folder}"
    return f"look at all of it: hpcfed show {view.folder}"


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
        # A folder that we have waited for may just have been made.
        if folder.exists() and (once or not (wait or told)):
            raise UserError(
                f"{folder} holds neither a run nor a study; add --wait to wait for one"
            )
        if not told:
            remark(f"hpcfed: waiting for a run in {folder}{_guess(folder)}")
            told = True
        time.sleep(LOOK_EVERY)


def _guess(folder: Path) -> str:
    """Return a folder beside it that is spelt nearly so."""
    beside: list[str] = []
    with suppress(OSError):
        beside = [path.name for path in folder.parent.iterdir()]
    return did_you_mean(folder.name, beside)


def _newest(folder: Path) -> Path:
    """Return the run or study under a folder in which something has happened last."""
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
