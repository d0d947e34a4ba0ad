"""What changed from A to B besides the figures: options, code and machine."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcfed.analysis.choices import SIZES, defaults_of
from hpcfed.analysis.groups import Group
from hpcfed.analysis.labels import value_text
from hpcfed.options import RunConfig, named
from hpcfed.results.run import RunRecord
from hpcfed.runtime.environment import OF_TIME

ABSENT = "–"
"""Shown for what a side does not have."""
DIGITS = 10
"""Characters of a commit or a checksum: enough to distinguish them."""

Values = dict[str, dict[str, Any]]
"""An option's different values on one side, by their JSON, under the option's name."""


@dataclass(frozen=True)
class Change:
    name: str
    before: str
    after: str
    default: str = ""
    """An option's default."""


def option_changes(before: Sequence[Group], after: Sequence[Group]) -> list[Change]:
    """Return the options whose values differ, and the seeds if they differ."""
    ours, theirs = _values(before), _values(after)
    # A method that is not installed here has no defaults of its own.
    defaults = dict(defaults_of(str(after[0].options["method"])))
    changes = []
    for name in (*SIZES, *sorted({*ours, *theirs} - {*SIZES, "on"})):
        old, new = ours.get(name, {}), theirs.get(name, {})
        if old.keys() != new.keys():
            default = value_text(defaults[name]) if name in defaults else ""
            changes.append(Change(name, *_both_listed(old, new), default))
    seeds = [_seeds(before), _seeds(after)]
    if seeds[0] != seeds[1]:
        changes.append(Change("seed", *seeds))
    return changes


def changed_as_a_whole(before: Sequence[Group], after: Sequence[Group]) -> set[str]:
    """Return options that have one value in all of A and another in all of B. Points
    that differ only in these still match.
    """
    ours, theirs = _values(before), _values(after)
    changed = set()
    for name in {*ours, *theirs}:
        old, new = ours.get(name, {}), theirs.get(name, {})
        swept = len(old) > 1 or len(new) > 1
        if not swept and old.keys() != new.keys():
            changed.add(name)
    return changed


def _values(groups: Sequence[Group]) -> Values:
    """Return each option's values, ignoring groups of methods without it."""
    found: Values = defaultdict(dict)
    defaults = RunConfig().model_dump(mode="json")
    for group in groups:
        values = dict(group.options)
        stored = defaults | group.first.config
        # They do not distinguish runs, but may affect their time.
        for name in (*named(changes="time"), *named(changes="which figures")):
            values[name] = stored.get(name)
        for name, value in values.items():
            found[name][json.dumps(value)] = value
    return found


def _both_listed(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, str]:
    """Return both sides' values, with their folders if files have the same name."""
    before, after = _listed(old), _listed(new)
    if before == after:
        before = ", ".join(map(str, old.values()))
        after = ", ".join(map(str, new.values()))
    return before, after


def _listed(values: Mapping[str, Any]) -> str:
    texts = [value_text(value) for value in values.values()]
    return ", ".join(texts) or ABSENT


def _seeds(groups: Sequence[Group]) -> str:
    seeds: set[int] = set()
    for group in groups:
        seeds.update(int(run.facts["seed"]) for run in group.runs)
    return ", ".join(map(str, sorted(seeds)))


def code_changes(before: Sequence[Group], after: Sequence[Group]) -> list[Change]:
    """Return what differs in source, the user's files, packages and machines."""
    ours, theirs = _facts(before), _facts(after)
    changes = []
    for name in dict.fromkeys((*ours, *theirs)):
        old, new = ours.get(name, set()), theirs.get(name, set())
        if old != new:
            texts = [", ".join(sorted(side)) or ABSENT for side in (old, new)]
            changes.append(Change(name, *texts))
    return changes


def _facts(groups: Sequence[Group]) -> dict[str, set[str]]:
    """Return each fact's different values, by its display name."""
    found: dict[str, set[str]] = defaultdict(set)
    for group in groups:
        for process in group.processes:
            # Seeds of one process share its environment.
            for name, value in _facts_of(process.runs[0]):
                found[name].add(value)
    return found


def _facts_of(run: RunRecord) -> list[tuple[str, str]]:
    about = run.environment
    source = about.get("source") or {}
    facts = [("hpcfed", str(source.get("version", "?")))]
    if source.get("commit"):
        changed = "+" if source.get("changed") else ""
        facts.append(("commit (+: changed)", str(source["commit"])[:DIGITS] + changed))
    facts.append(("hpcfed's source, sha256", str(source.get("sha256", "?"))[:DIGITS]))
    for path, checksum in (about.get("files") or {}).items():
        facts.append((f"{Path(path).name}, sha256", checksum[:DIGITS]))
    # None of a data set that options describe; older files lack it.
    if run.facts.get("data"):
        facts.append(("samples, fingerprint", str(run.facts["data"])[:DIGITS]))
    for package, version in (about.get("packages") or {}).items():
        if package != "hpcfed":  # already listed above
            facts.append((str(package), str(version)))
    for name, key in _PLAIN.items():
        if about.get(key) is not None:
            facts.append((name, str(about[key])))
    for rank in about.get("ranks", []):
        facts.append(("host", str(rank.get("host", "?"))))
        facts.append(("device", str(rank.get("device", "?"))))
        for name, key in {"processor": "cpu", "cores of a rank": "cores"}.items():
            if rank.get(key):  # older runs have not recorded all of these
                facts.append((name, str(rank[key])))
    return facts + _variables(about.get("variables"))


_PLAIN = {
    "CUDA": "cuda",
    "NCCL": "nccl",
    "Python": "python",
    "platform": "platform",
    "launcher": "launcher",
    "collectives": "backend",
    "threads per rank": "threads_per_rank",
}
"""Facts of a run's environment, by display name."""


def _variables(recorded: object) -> list[tuple[str, str]]:
    if not isinstance(recorded, dict):  # no run writes anything else
        return []
    found = []
    for name, value in recorded.items():
        if str(name).startswith(OF_TIME):
            found.append((str(name), str(value)))
    return found
