"""Which trials of a study advance in step, as the rows of one process, and which do
not. Does not import torch.

A stack's file, `stacks/NAME.json`, holds the options of its trials. Beside it is the
log of the process that runs them.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcfed.errors import UserError, count
from hpcfed.options import Settings, check_unchanged, facts
from hpcfed.results import checkpoints
from hpcfed.results.as_json import read_json
from hpcfed.results.folder import HALF_LEARNT
from hpcfed.results.publish import publish
from hpcfed.results.stored import changed_files, read_resumable
from hpcfed.results.study import writing
from hpcfed.studies.plan import Trial

SERVER = "the server's model"
MOST_COMPARED = 100
"""Most kinds of trials to search for the one nearest to a single trial."""
MOST_BYTES = 16 * 2**20
"""Largest file of a stack to read."""


@dataclass(frozen=True)
class Stack:
    """Trials that advance in step; a single one runs as it would without stacks."""

    trials: tuple[Trial, ...]
    alone: str = ""
    """Why a single trial is alone."""

    def __str__(self) -> str:
        first, *others = self.trials
        if not others:
            return str(first)
        return f"{count(len(self.trials), 'trial')} together: {first} … {others[-1]}"

    @property
    def file(self) -> str:
        """The name of its file."""
        first = self.trials[0]
        more = len(self.trials) - 1
        return f"repeat-{first.repeat}-point-{first.point.number}-and-{more}-more.json"

    def halves(self) -> list["Stack"]:
        """Return two stacks with half of the trials each; itself if it has only one."""
        if len(self.trials) == 1:
            return [self]
        middle = len(self.trials) // 2
        parts = self.trials[:middle], self.trials[middle:]
        return [Stack(part) for part in parts]


def singles(trials: Iterable[Trial]) -> list[Stack]:
    """Return a stack for each single trial."""
    return [Stack((trial,)) for trial in trials]


def stacked(trials: Sequence[Trial], most: int) -> list[Stack]:
    """Stack up to `most` trials that differ only in stackable options, in order."""
    shared = [_shared(trial) for trial in trials]
    alike: dict[str, list[int]] = {}
    for number, options in enumerate(shared):
        key = json.dumps(options, sort_keys=True, default=str)
        alike.setdefault(key, []).append(number)
    # One trial of each kind shows what the others differ in.
    kinds = [shared[numbers[0]] for numbers in alike.values()]
    made: list[Stack] = []
    for numbers in alike.values():
        members = tuple(trials[number] for number in numbers)
        if len(members) == 1:
            why = _why_alone(shared[numbers[0]], kinds[:MOST_COMPARED])
            made.append(Stack(members, why))
            continue
        # Each seed of a trial counts as one; take at least one trial.
        seeds = max(len(trial.seeds) for trial in members)
        fit = max(1, most // seeds)
        # Evenly, rather than full stacks and a small rest.
        num_stacks = -(-len(members) // fit)
        for number in range(num_stacks):
            begin = number * len(members) // num_stacks
            end = (number + 1) * len(members) // num_stacks
            full = "" if fit > 1 else "--stack is too small for two of these"
            made.append(Stack(members[begin:end], full))
    return made


def in_common(settings: Settings) -> dict[str, Any]:
    """Return the options in which runs of a stack must agree."""
    stated = facts(settings.config.method)
    options = settings.flat()
    return {
        name: value for name, value in options.items() if not stated[name].stackable
    }


def _shared(trial: Trial) -> dict[str, Any]:
    """Return what all trials of a stack must have in common."""
    settings = trial.point.settings
    options = in_common(settings)
    # All trials of a stack begin anew, or continue after the same round.
    has = begun(trial)
    options |= {"rounds done": has.rounds, "complete seeds": has.complete}
    options |= {"ranks": trial.point.ranks, "repeat": trial.repeat}
    if settings.options.has_server:
        # The server's model knows runs by their seeds, and serves one after the other.
        options[SERVER] = str(trial)
    return options


def _why_alone(options: dict[str, Any], others: Sequence[dict[str, Any]]) -> str:
    """Say what separates a trial from the nearest others."""
    if SERVER in options:
        return f"{SERVER} of {options['method']} serves one run at a time"
    nearest: list[str] = []
    for other in others:
        names = options.keys() | other.keys()
        different = sorted(n for n in names if options.get(n) != other.get(n))
        # Skip the trial itself and its other repeats.
        if different in ([], ["repeat"]):
            continue
        if not nearest or len(different) < len(nearest):
            nearest = different
    if not nearest:
        return "there is no other"
    return f"others differ in {', '.join(nearest)}"


@dataclass(frozen=True)
class Begun:
    """What a trial has already, and need not run again."""

    rounds: int = 0
    """Rounds after which all of its unfinished seeds can continue."""
    complete: int = 0
    """Seeds that are complete."""
    half_learnt: bool = False
    """Whether a server has stopped in a learning, perhaps of the first round."""

    @property
    def goes_on(self) -> bool:
        """Whether the trial is resumed; else it begins anew."""
        return self.rounds > 0 or self.complete > 0 or self.half_learnt


def begun(trial: Trial) -> Begun:
    """Return what a trial has already: nothing if it had other options or files.

    One that has failed goes on, too: the cause may be gone, such as a full disk. What
    fails by its options fails again, from its beginning or not.
    """
    complete, newest = 0, []
    every = trial.point.settings.each_seed()
    for folder, settings in zip(trial.run_folders, every, strict=True):
        try:
            record = read_resumable(folder)
            check_unchanged(folder, record.config, settings.flat())
        except UserError:
            return Begun()
        if changed_files(record):
            return Begun()
        if record.status == "complete":
            complete += 1
        else:
            newest.append(checkpoints.newest_rounds(folder))
    # Seeds of a trial continue after the last round that all of them have.
    half_learnt = any((run / HALF_LEARNT).exists() for run in trial.run_folders)
    return Begun(min(newest, default=0), complete, half_learnt)


def options_of(trial: Trial) -> dict[str, Any]:
    """Return the options of a trial in a stack: it continues where it was stopped."""
    if begun(trial).goes_on:
        return {"resume": str(trial.folder)}
    return {**trial.point.given, "out": str(trial.folder), "overwrite": True}


def write_stack(path: Path, stack: Stack) -> None:
    """Write down the options of a stack's trials."""
    every = [options_of(trial) for trial in stack.trials]
    with writing(path):
        path.parent.mkdir(exist_ok=True)
        publish(json.dumps(every, indent=1).encode(), path)


def read_stack(path: Path) -> list[dict[str, Any]]:
    """Read the options of a stack's trials, still unchecked."""
    try:
        every: list[dict[str, Any]] = read_json(path, list[dict[str, Any]], MOST_BYTES)
    except (OSError, ValueError):
        raise UserError(f"{path} holds no options of a stack's runs") from None
    if not every:
        raise UserError(f"{path} holds no run")
    return every


def folders_of(path: Path) -> list[str]:
    """Return the folders of a stack's trials."""
    return [str(run.get("resume", run.get("out"))) for run in read_stack(path)]


def describe(stacks: Sequence[Stack]) -> list[str]:
    """Say how many trials are stacked, and why others are not."""
    together = [stack for stack in stacks if len(stack.trials) > 1]
    number = sum(len(stack.trials) for stack in together)
    total = sum(len(stack.trials) for stack in stacks)
    stacks_told = count(len(together), "stack")
    lines = [f"{number} of {count(total, 'trial')} advance together, in {stacks_told}"]
    lines += [f"   {stack}" for stack in together]
    reasons: dict[str, list[Trial]] = {}
    for stack in stacks:
        if len(stack.trials) == 1:
            reasons.setdefault(stack.alone, []).append(stack.trials[0])
    for reason, trials in reasons.items():
        more = f" and {len(trials) - 1} more" if len(trials) > 1 else ""
        lines.append(f"   alone: {trials[0]}{more}: {reason}")
    return lines
