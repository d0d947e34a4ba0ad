"""A run or a study in one line, for logs and pipes."""

from math import isnan

from hpcfed.analysis.labels import all_series
from hpcfed.analysis.render.watch.frame import life_line, speed, way_facts
from hpcfed.analysis.render.watch.looking import RunView
from hpcfed.analysis.render.watch.trials import StudyView
from hpcfed.errors import printable
from hpcfed.options.metrics import text_of
from hpcfed.words import duration

SHORT = ("clients", "participants", "global")
"""What the series of a metric are called in a line."""
MOST_PHASES = 3


def run_line(view: RunView) -> str:
    """Return how far a run is, its figures, and where its time goes."""
    words = [view.status]
    if view.records:
        words.append(f"round {view.done}/{view.planned}")
    words += figures(view)
    words += way_facts(view)
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


def figures(view: RunView) -> list[str]:
    """Return the last loss, and the last values of the main metric."""
    if not view.done:
        return []
    found = [f"loss {view.last('train_loss'):.4f}"]
    metric = view.metric
    # Of perplexity and the like nobody judges participants.
    names = SHORT if len(all_series(metric)) == len(SHORT) else SHORT[::2]
    for short, name in zip(names, all_series(metric), strict=True):
        value = view.last(name)
        if not isnan(value):
            found.append(f"{short} {text_of(metric, value)}")
    return found


def study_line(view: StudyView) -> str:
    """Return how many trials are done, and how far those are that run."""
    words = [view.counts()]
    for trial in view.trials:
        if trial.status == "running" and trial.run is not None:
            words.append(f"{trial.name}: {run_line(trial.run)}")
    if not view.over and not isnan(view.left):
        words.append(f"ETA of all about {duration(view.left)}")
    return printable("; ".join(words))
