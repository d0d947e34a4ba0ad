"""A ReFrame check: run a study of hpcfed and read its figures of merit.

    reframe -C benchmarks/reframe/settings.py --system local -c benchmarks/reframe -r \
        -S python=.venv/bin/python

On Slurm the study is one job with as many tasks as its largest point has ranks; inside
of it hpcfed starts a step for every trial. The check's variables say what can be set by
-S; benchmarks/studies/README.md has what ReFrame reports.
"""

import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import reframe as rfm
import reframe.utility.sanity as sn
import reframe.utility.typecheck as typ
from reframe.core.backends import getlauncher
from reframe.core.builtins import run_before, sanity_function, variable

STUDY, FIGURES = "study.toml", "figures.json"
"""Files in the stage folder: what is run, and what came out."""
SMALL = """\
title = "Digits, as ReFrame runs them"
repeats = {repeats}
warmup = 2

[common]
dataset = "digits"
partition = "iid"
model = "mlp"
rounds = {rounds}

[sweep]
clients = {clients}
ranks = {ranks}
"""
"""The study that is run where no file is named."""
UNITS = {
    "seconds_per_round": "s",
    "speedup": "x",
    "samples_per_second": "samples/s",
    "accuracy": "%",
    "peak_memory": "MiB",
}


@rfm.simple_test
class HpcfedStudy(rfm.RunOnlyRegressionTest):
    """Run a study; every point of it has its figures of merit."""

    descr = "federated learning with hpcfed: a study"
    valid_systems = ["*"]
    valid_prog_environs = ["*"]
    tags = {"hpcfed", "performance"}
    keep_files = [STUDY, FIGURES]

    study = variable(str, value="")
    """A study file; without one a small study of the digits is made of the next four."""
    clients = variable(typ.List[int], value=[20])
    ranks = variable(typ.List[int], value=[1, 2])
    rounds = variable(int, value=12)
    repeats = variable(int, value=2)
    python = variable(str, value=os.environ.get("HPCFED_PYTHON", "python3"))
    """The Python that hpcfed is installed in."""
    least_accuracy = variable(float, value=0.5)
    """Every point must reach this accuracy: a run that learns nothing does not count."""
    references = variable(str, value="")
    """A JSON file: references by system, then by figure, as ReFrame has them."""

    @run_before("run")
    def prepare(self) -> None:
        """Write the study beside the job and say how to run it."""
        text = self._study_text()
        Path(self.stagedir, STUDY).write_text(text)
        self.num_tasks = most_ranks(tomllib.loads(text))
        # A relative path is the user's, and the job starts in the stage folder.
        python = self.python
        if os.sep in python:
            python = os.path.abspath(python)
        self.executable = python
        self.executable_opts = ["-m", "hpcfed", "study", STUDY, "--out", "study"]
        # Also of a study that failed: the figures name what is missing.
        self.postrun_cmds = [f"{python} -m hpcfed show study --json > {FIGURES}"]
        # hpcfed starts its ranks itself, by srun or mpirun.
        self.job.launcher = getlauncher("local")()

    def _study_text(self) -> str:
        if self.study:
            return Path(self.study).read_text()
        return SMALL.format(
            repeats=self.repeats,
            rounds=self.rounds,
            clients=list(self.clients),
            ranks=list(self.ranks),
        )

    @sanity_function
    def has_learned(self) -> Any:
        """Refuse a study that did not end, has trials missing, or has learned too
        little.
        """
        path = Path(self.stagedir, FIGURES)
        ended = path.exists() and path.stat().st_size > 0
        if not ended:
            return sn.assert_true(ended, f"the study failed; see {self.stderr}")
        found = json.loads(path.read_text())
        trials = found["trials"]
        complete = f"{found['complete']} of {trials} trials are complete"
        checks = [sn.assert_eq(found["complete"], trials, complete)]
        for point in found["points"]:
            low = f"{point['point']}: accuracy {point['accuracy']} is too low"
            learned = (point["accuracy"] or 0.0) >= self.least_accuracy
            checks.append(sn.assert_true(learned, low))
        return sn.all(checks)

    @run_before("performance")
    def read_figures(self) -> None:
        """Make a performance variable of every figure of every point."""
        path = Path(self.stagedir, FIGURES)
        found = figures_of_merit(json.loads(path.read_text()))
        for name, (value, unit) in found.items():
            self.perf_variables[name] = sn.make_performance_function(
                sn.defer(value), unit
            )
        if self.references:
            self.reference = references_of(
                json.loads(Path(self.references).read_text())
            )


def most_ranks(study: Mapping[str, Any]) -> int:
    """Return how many ranks the largest point of a study has, with its server's."""
    tables = [study.get("common", {}), study.get("sweep", {})]
    tables += study.get("variants", {}).values()
    largest = {"ranks": 1, "server_ranks": 0}
    for table in tables:
        for name in largest:
            value = table.get(name, 0)
            numbers = value if isinstance(value, list) else [value]
            largest[name] = max(largest[name], *numbers)
    return largest["ranks"] + largest["server_ranks"]


def figures_of_merit(found: Mapping[str, Any]) -> dict[str, tuple[float, str]]:
    """Return `figure(point)` with its value and unit, of what is known."""
    # No colon in the name: ReFrame takes what comes before one for a system.
    figures = {}
    for point in found["points"]:
        values = {
            "seconds_per_round": point["seconds_per_round"]["centre"],
            "speedup": point["speedup"]["centre"],
            "samples_per_second": point["samples_per_second"],
            "accuracy": _times(point["accuracy"], 100),
            "peak_memory": _times(point["peak_memory"], 2**-20),
        }
        for name, value in values.items():
            if value is not None:
                rounded = float(f"{value:.6g}")
                figures[f"{name}({point['point']})"] = (rounded, UNITS[name])
    return figures


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def references_of(
    written: Mapping[str, Mapping[str, list[Any]]],
) -> dict[str, dict[str, tuple[Any, ...]]]:
    """Return references as ReFrame wants them: JSON has lists instead of tuples."""
    made = {}
    for system, figures in written.items():
        made[system] = {name: tuple(values) for name, values in figures.items()}
    return made
