"""Reading a run back from the content of run.h5. Every number and option is checked,
since the file may be untrusted.
"""

from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from hpcfed.options import RunConfig, named
from hpcfed.options.metrics import METRICS, USUAL
from hpcfed.options.runconfig import with_old_meaning
from hpcfed.results.as_json import parsed
from hpcfed.results.format import CLASS_SERIES, EVALUATED, NEW_ROUNDS, SCHEMA, STACKS
from hpcfed.results.learnings import LearningRecord
from hpcfed.results.run import DepthSweep, NewRounds, RunRecord
from hpcfed.results.safe import MOST, Reader
from hpcfed.results.series import METRIC_SERIES, ROUND_SERIES, series_of
from hpcfed.results.server import OF_MEMORY, PROMISED
from hpcfed.results.stacks import first_alike
from hpcfed.runtime.starting import FIGURES
from hpcfed.runtime.timer import PHASES

FACTS: dict[str, type] = {
    "method": str,
    "dataset": str,
    "model": str,
    "status": str,
    "schema": int,
    "rounds_done": int,
    "clients": int,
    "ranks": int,
    "seed": int,
    "columns": int,
    "stacked_seeds": int,
}
"""Attributes that readers of a run rely on."""
LEAST_SECONDS = 1e-9
"""Lower limit for the seconds of a round."""


def record_of(folder: Path, file: Reader) -> RunRecord:
    """Read a run from its file, or from a copy of that content inside another file."""
    facts = _facts(file)
    config = check_options(parsed(file.text("config")))
    environment = parsed(file.text("environment"))
    _check_environment(environment)
    # A dataset has room for all rounds; unfinished ones hold nothing yet.
    done, rounds = facts["rounds_done"], config["rounds"]
    clients = config["clients"]
    shape = (rounds, facts["ranks"])
    series = {name: _series(file, name, rounds, done) for name in ROUND_SERIES}
    for name in METRIC_SERIES:
        if f"rounds/{name}" in file:
            series[name] = _series(file, name, rounds, done)
    # Reports divide by the seconds.
    if not (series["seconds"] >= LEAST_SECONDS).all():
        raise ValueError("rounds without seconds")
    # 0 is allowed: no sampled client of the round has training data.
    cohort = series["cohort"]
    known = cohort[~np.isnan(cohort)]
    if ((known < 0) | (known != np.floor(known))).any():
        raise ValueError("rounds have impossible numbers of clients")
    # Every client has its number of samples from the start.
    train_samples = file.between("clients/train_samples", (clients,), known=True)
    stacks = _stacks(file, facts["stacked_seeds"], rounds, done)
    since = first_alike(stacks, facts.get("resumed", ()))
    memory = file.between("timing/peak_memory", shape, done)[since:]
    evaluated = _evaluated(file, clients)
    of_clients = (rounds, len(evaluated))
    accuracy = file.between("clients/accuracy", of_clients, done, high=1)
    newcomers = ("newcomers/start", "newcomers/accuracy")
    return RunRecord(
        folder=folder,
        status=facts["status"],
        error=facts.get("error", ""),
        facts=facts,
        config=config,
        environment=environment,
        rounds=series,
        phases=file.between("timing/phases", (*shape, len(PHASES)), done),
        wall=file.between("timing/wall", shape, done),
        stacks=stacks,
        # It never decreases, but is unknown in rounds before a resume.
        peak_memory=np.fmax.reduce(memory, axis=0, initial=np.nan),
        client_accuracy=accuracy,
        evaluated=evaluated,
        client_metrics=_client_metrics(file, of_clients, done),
        class_accuracy=_class_accuracy(file, rounds, done),
        train_samples=train_samples,
        energy=_energy(file, "timing/energy"),
        cpu_energy=_energy(file, "timing/cpu_energy"),
        starting=_starting(file, facts["ranks"]),
        moves=_relocations(file),
        finals=_named(file, "finals/name", "finals/accuracy", (None, clients)),
        figures=_named(
            file, "figures/name", "figures/value", (None, clients), high=MOST
        ),
        depths=_depths(file, clients),
        newcomers=_named(file, *newcomers, (None, None, None)),
        newcomer_bytes=_newcomer_bytes(file),
        new_rounds=_new_rounds(file),
        learnings=tuple(_learnings(file)),
    )


def _facts(file: Reader) -> dict[str, Any]:
    """Read the attributes, and check those that other code relies on."""
    facts = file.facts()
    if facts.get("format") != "hpcfed run":
        raise ValueError("it was not written by hpcfed")
    # The first files of this schema lack it.
    facts.setdefault("stacked_seeds", 1)
    for name, kind in FACTS.items():
        value = facts[name]
        # In Python, True is an int.
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"its {name} is {str(value)[:100]!r}")
        # HDF5's unsigned numbers may be larger than any size in numpy.
        if isinstance(value, int) and not 0 <= value < 2**63:
            raise ValueError(f"its {name} is {value}")
    if facts["schema"] > SCHEMA:
        raise ValueError(
            f"its schema is {facts['schema']}, this program reads up to {SCHEMA}; use "
            "a newer hpcfed"
        )
    if not facts["ranks"] or not facts["stacked_seeds"]:
        raise ValueError("it has no ranks or no seeds")
    # Only tasks other than the first one are named.
    if facts.get("task", "classification") not in USUAL:
        raise ValueError(f"its task is {str(facts['task'])[:100]!r}")
    resumed = np.asarray(facts.get("resumed", ()))
    if resumed.ndim != 1 or (resumed.size and resumed.dtype.kind not in "iu"):
        raise ValueError("its resumed is not a list of rounds")
    for name in ("error", "uploads", "privacy"):
        if not isinstance(facts.get(name, ""), str):
            raise ValueError(f"its {name} is not a text")
    for name in ("noise_multiplier", "delta"):
        if not isinstance(facts.get(name, 0.0), float):
            raise ValueError(f"its {name} is not a number")
    return facts


def check_options(stored: dict[str, Any]) -> dict[str, Any]:
    """Return a stored config with its general options checked, as a command line's."""
    stored = with_old_meaning(stored)
    fields = RunConfig.model_fields
    # An older record lacks newer options, and null means an option was not given.
    known = {}
    for name, value in stored.items():
        if name in fields and value is not None:
            known[name] = value
    try:
        checked = RunConfig.model_validate(known)
    except ValidationError as failure:
        error = failure.errors()[0]
        raise ValueError(f"its option {error['loc'][0]}: {error['msg']}") from None
    # But no run has ever stored null for an option that has a default.
    for name, field in fields.items():
        if name in stored and stored[name] is None and field.default is not None:
            raise ValueError(f"its option {name} is null")
    for name in named(in_every_record=True):
        if name not in known:
            raise ValueError(f"its config has no {name}")
    return stored | checked.model_dump(mode="json", include=set(known))


def _check_environment(environment: dict[str, Any]) -> None:
    """Check that the parts which a page uses have the form that a run writes."""
    fits = True
    for name in ("source", "packages", "files"):
        fits &= isinstance(environment.get(name) or {}, dict)
    for name, kind in {"ranks": dict, "command": str}.items():
        entries = environment.get(name, [])
        fits &= isinstance(entries, list)
        fits = fits and all(isinstance(entry, kind) for entry in entries)
    checksums = environment.get("files") or {}
    fits = fits and all(isinstance(text, str) for text in checksums.values())
    if not fits:
        raise ValueError("its environment is not as a run writes it")


def _series(file: Reader, name: str, rounds: int, done: int) -> np.ndarray:
    """Read a series of rounds; all NaN if the run is older than the series."""
    where, series = f"rounds/{name}", series_of(name)
    if not series.required and where not in file:
        return np.full(done, np.nan)
    if series.unit == "nats" or (name in METRIC_SERIES and series.unit != "fraction"):
        # The loss of a diverged run may be anything.
        values = file.numbers(where, (rounds,), done)
        return values.astype(np.float64, copy=False)
    high = 1.0 if series.unit == "fraction" else MOST
    # A run without noise has spent an infinite ε, and one that diverges has any norm.
    if name in ("epsilon", "update_norm", "update_norm_max", "clip_norm"):
        high = inf
    return file.between(where, (rounds,), done, high=high)


def _stacks(file: Reader, all_rounds: int, rounds: int, done: int) -> np.ndarray:
    """Read how many runs advanced together in each round; in older files one number
    stands for all.
    """
    if STACKS not in file:
        return np.full(done, all_rounds)
    stacks = file.between(STACKS, (rounds,), done, known=True)
    # Reports divide by it.
    if (stacks < 1).any():
        raise ValueError(f"{STACKS} holds impossible numbers")
    return stacks.astype(np.int64)


def _evaluated(file: Reader, clients: int) -> np.ndarray:
    """Return the ids of the evaluated clients: all, unless the file lists them."""
    where = f"clients/{EVALUATED}"
    if where not in file:
        return np.arange(clients)
    ids = file.between(where, (None,), high=clients - 1, known=True)
    if not (np.diff(ids) > 0).all():
        raise ValueError(f"{where} holds impossible numbers")
    return ids.astype(np.int64)


def _client_metrics(
    file: Reader, shape: tuple[int, int], done: int
) -> dict[str, np.ndarray]:
    """Read metrics of each evaluated client other than accuracy."""
    found = {}
    for name, metric in METRICS.items():
        where = f"clients/{name}"
        if name == "accuracy" or where not in file:
            continue
        if metric.in_percent:
            found[name] = file.between(where, shape, done, high=1)
        else:
            found[name] = file.numbers(where, shape, done).astype(np.float64)
    return found


def _class_accuracy(file: Reader, rounds: int, done: int) -> dict[str, np.ndarray]:
    found = {}
    for name in CLASS_SERIES:
        where = f"classes/{name}"
        if where in file:
            found[name] = file.between(where, (rounds, None), done, high=1)
    return found


def _energy(file: Reader, name: str) -> float | None:
    return float(file.numbers(name, (None,)).sum()) if name in file else None


def _starting(file: Reader, ranks: int) -> dict[str, np.ndarray]:
    found = {}
    for name in FIGURES:
        if f"timing/{name}" in file:
            found[name] = file.between(f"timing/{name}", (ranks,))
    return found


def _depths(file: Reader, clients: int) -> DepthSweep | None:
    """Read the depths of inversion that were judged; None if none was."""
    if "depths" not in file:
        return None
    group = file.within("depths")
    depth = group.between("depth", (None,))
    # NaN marks what a run has not reached.
    done = int(np.count_nonzero(~np.isnan(depth)))
    if not done or np.isnan(depth[:done]).any():
        return None
    shape = (len(depth), clients)
    # Older versions recorded which update is nearest, not which direction.
    own = "own" if "own" in group else "recognised"
    return DepthSweep(
        depth=depth[:done],
        signal=group.between("signal", depth.shape, done, high=1),
        accuracy=group.between("accuracy", shape, done, high=1),
        own=group.between(own, shape, done, high=1),
        distance=group.between("distance", shape, done),
    )


def _newcomer_bytes(file: Reader) -> float:
    if "newcomers/bytes" not in file:
        return float("nan")
    return float(file.between("newcomers/bytes", ()))


def _new_rounds(file: Reader) -> NewRounds | None:
    if NEW_ROUNDS not in file:
        return None
    accuracy = file.between(f"{NEW_ROUNDS}/accuracy", (None, None), high=1)
    trained = f"{NEW_ROUNDS}/trained_accuracy"
    return NewRounds(
        accuracy=accuracy,
        trained_accuracy=file.between(trained, accuracy.shape, high=1),
        bytes_up=file.between(f"{NEW_ROUNDS}/bytes_up", accuracy.shape[:1]),
        bytes_down=file.between(f"{NEW_ROUNDS}/bytes_down", accuracy.shape[:1]),
    )


def _relocations(file: Reader) -> tuple[int, ...]:
    """Return the rounds before which clients were relocated."""
    if "moves" not in file:
        return ()
    rounds = file.between("moves/round", (None,))
    known = rounds[~np.isnan(rounds)]
    return tuple(known.astype(int).tolist())


def _named(
    file: Reader,
    names: str,
    values: str,
    shape: tuple[int | None, ...],
    *,
    high: float = 1,
) -> dict[str, np.ndarray]:
    """Read the entries of a dataset by name, except those that were never written."""
    if names not in file:
        return {}
    entries = file.between(values, shape, high=high)
    # A stopped run may have evaluated none or only some of them.
    found = {}
    for name, entry in zip(file.texts(names), entries, strict=True):
        if not np.isnan(entry).all():
            found[name] = entry
    return found


def _learnings(file: Reader) -> Iterator[LearningRecord]:
    """Read all trainings of the server's model."""
    if "server" not in file:
        return
    group = file.within("server")
    phases, networks = group.texts("phase_names"), group.texts("network_names")
    # NaN marks trainings that have not happened yet.
    rounds = group.between("round", (None,))
    times = len(rounds)
    by_network = {}
    for name in ("samples_per_second", "flops", "utilisation", "parameters"):
        by_network[name] = group.between(name, (times, len(networks)))
    for name in OF_MEMORY:
        by_network[name] = _of_newer(group, name, (times, len(networks)))
    rows = group.between("rows", (times,))
    by_time = {}
    for name in ("own", "own_uploads", "kept", "kept_uploads"):
        by_time[name] = _of_newer(group, name, (times,), high=1)
    for name in ("used", "waited"):
        by_time[name] = _of_newer(group, name, (times,))
    # Older versions could not go on with a learning.
    by_time["earlier"] = np.nan_to_num(_of_newer(group, "earlier", (times,)))
    bank = _of_newer(group, "bank_bytes", (times, None))
    seconds = group.between("seconds", (times, len(phases)))
    memory = group.between("peak_memory", (times, None))
    if not memory.shape[1]:
        raise ValueError("server/peak_memory names no rank")
    for time in np.flatnonzero(~np.isnan(rounds)):
        fields: dict[str, Any] = {}
        for name, of_times in by_time.items():
            fields[name] = float(of_times[time])
        for name, values in by_network.items():
            fields[name] = dict(zip(networks, values[time].tolist(), strict=True))
        # Stored as floats, like everything that may be NaN.
        parameters = fields["parameters"]
        fields["parameters"] = {name: int(count) for name, count in parameters.items()}
        promised: dict[str, dict[str, float]] = {name: {} for name in networks}
        for part in PROMISED:
            for name, size in fields.pop(f"promised_{part}").items():
                promised[name][part] = size
        yield LearningRecord(
            round=int(rounds[time]),
            rows=int(rows[time]),
            seconds={
                phase: float(taken)
                for phase, taken in zip(phases, seconds[time], strict=True)
                if not np.isnan(taken)
            },
            peak_memory=memory[time],
            bank_bytes=bank[time],
            promised=promised,
            **fields,
        )


def _of_newer(
    group: Reader, name: str, shape: tuple[int | None, ...], *, high: float = MOST
) -> np.ndarray:
    """Read what only newer records have; NaN if the record is older."""
    if name in group:
        return group.between(name, shape, high=high)
    return np.full([1 if size is None else size for size in shape], np.nan)
