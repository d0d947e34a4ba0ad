"""Reading a run back."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from hpcfed.config import RunConfig
from hpcfed.errors import UserError
from hpcfed.record.folder import check_one_kind, failures, runs
from hpcfed.record.older import unset_zeros
from hpcfed.record.results import SCHEMA
from hpcfed.record.safe import Reader, readable, reading
from hpcfed.record.series import ROUND_SERIES
from hpcfed.record.timing import PHASES

LAST_UPDATES = 10
FACTS = {name: str for name in ("method", "dataset", "model", "status")} | {
    name: int
    for name in (
        "schema",
        "rounds_done",
        "clients",
        "ranks",
        "seed",
        "columns",
        "stacked_seeds",
    )
}
"""Attributes that readers of a run count on."""
MOST = 1e30
"""No second, byte or client is counted beyond it."""
LEAST_SECONDS = 1e-9
"""No round is shorter."""
MOST_DEPTH = 32
"""Levels of JSON that is read."""
MOST_LINE = 10_000
"""Characters of an error."""


@dataclass(frozen=True)
class LearningRecord:
    """One time that the server's model learnt."""

    round: int
    rows: int
    seconds: dict[str, float]
    """By phase."""
    samples_per_second: dict[str, float]
    """By network, as the three that follow."""
    parameters: dict[str, int]
    flops: dict[str, float]
    utilisation: dict[str, float]
    """NaN where the device's peak is not known."""
    peak_memory: np.ndarray
    """Bytes, of every server rank."""
    kept: float
    """The share of clients whose generated row is nearest to the mean latent of their
    own uploads.
    """


@dataclass(frozen=True)
class Reached:
    """What it took to reach the target accuracy."""

    rounds: int
    seconds: float
    """Wall time of these rounds, on the slowest rank."""
    bytes: float
    """Sent by clients and to clients."""


@dataclass(frozen=True)
class RunRecord:
    """A run's results, up to the last finished round."""

    folder: Path
    status: str
    error: str
    facts: dict[str, Any]
    config: dict[str, Any]
    environment: dict[str, Any]
    rounds: dict[str, np.ndarray]
    """Each series of `ROUND_SERIES`: [rounds done]."""
    phases: np.ndarray
    """Seconds: [rounds done, ranks, phases]."""
    wall: np.ndarray
    """Seconds: [rounds done, ranks]."""
    peak_memory: np.ndarray
    """Bytes: [ranks]."""
    client_accuracy: np.ndarray
    """[rounds done, clients]."""
    train_samples: np.ndarray
    """Of every client."""
    energy: float | None
    """Joules of all GPUs; None while the run goes on, NaN where they have no counter.
    """
    moves: tuple[int, ...]
    """Rounds, counted from 0, before which clients moved to other ranks."""
    finals: dict[str, np.ndarray]
    """What the method had judged at the end: every client's accuracy, by name."""
    newcomers: dict[str, np.ndarray]
    """New clients' accuracy by where they started from: [local updates, new clients].
    """
    learnings: tuple[LearningRecord, ...]
    """What the server's model took, each time that it learnt."""
    newcomer_bytes: float = float("nan")
    """Sent to a new client to begin with; NaN when there are none."""

    @property
    def rounds_done(self) -> int:
        return len(self.wall)

    @property
    def stacked_seeds(self) -> int:
        """Seeds that advanced together, this one included: seconds, memory and energy
        are those of all of them.
        """
        return int(self.facts.get("stacked_seeds", 1))

    def last(self, name: str) -> float:
        """The latest value of a series that is not NaN; NaN when there is none."""
        values = self.rounds[name]
        known = values[~np.isnan(values)]
        return float(known[-1]) if len(known) else float("nan")

    @property
    def last_client_accuracy(self) -> np.ndarray:
        """Every client's accuracy at the last evaluation; NaN without test data, empty
        when there was none.
        """
        evaluated = np.flatnonzero(~np.isnan(self.client_accuracy).all(1))
        return (
            self.client_accuracy[evaluated[-1]]
            if len(evaluated)
            else self.client_accuracy[:0, 0]
        )

    def best(self, name: str) -> float:
        """The largest value of a series; NaN when there is none."""
        values = self.rounds[name]
        return float("nan") if np.isnan(values).all() else float(np.nanmax(values))

    @property
    def target(self) -> float | None:
        """Per cent; None when the run had none."""
        target = self.config.get("target_accuracy")
        return None if target is None else float(target)

    def reached(self) -> Reached | None:
        """When the target accuracy was first there; None when it never was."""
        if self.target is None:
            return None
        there = at_target(
            self.rounds["accuracy"], self.rounds["global_accuracy"], self.target
        )
        if not there.any():
            return None
        rounds = int(np.argmax(there)) + 1
        sums = {
            name: float(self.rounds[name][:rounds].sum())
            for name in ("seconds", "bytes_up", "bytes_down")
        }
        return Reached(rounds, sums["seconds"], sums["bytes_up"] + sums["bytes_down"])

    @property
    def untimed(self) -> int:
        """First rounds without times of ranks: the run has gone on with another number
        of them since.
        """
        unknown = np.isnan(self.phases).any((1, 2))
        return int(unknown.sum()) if not unknown.all() else 0

    def phase_seconds(self) -> dict[str, float]:
        """Mean seconds per round by phase: the mean over ranks, of rounds after the
        first, which warms up.
        """
        timed = self.phases[self.untimed :]
        steady = timed[1:] if len(timed) > 1 else timed
        if not len(steady):
            return dict.fromkeys(PHASES, float("nan"))
        return dict(zip(PHASES, steady.mean((0, 1)).tolist(), strict=True))

    def rounds_to(self, share: float) -> int | None:
        """Rounds until the clients' accuracy reached this share of its own peak; None
        when it was never evaluated.
        """
        accuracy = self.rounds["accuracy"]
        if np.isnan(accuracy).all():
            return None
        return (
            int(np.argmax(np.nan_to_num(accuracy) >= share * np.nanmax(accuracy))) + 1
        )

    def newcomers_first(self, start: str) -> float:
        """New clients' mean accuracy, of each as it joined."""
        accuracy = self.newcomers[start]
        joined = np.argmin(np.isnan(accuracy), axis=0)
        return mean_accuracy(accuracy[joined, np.arange(accuracy.shape[1])])

    def newcomers_last(self, start: str) -> float:
        """New clients' mean accuracy over their last ten local updates (fewer, if there
        were fewer).
        """
        return mean_accuracy(self.newcomers[start][1:][-LAST_UPDATES:])

    def printed_comm(self) -> float:
        """Bytes by the formula that GENE-FL's paper prints, twice a mean upload for
        every round.

        Its tables hold what all clients have sent, `bytes_up`.
        """
        return float(2 * (self.rounds["bytes_up"] / self.rounds["cohort"]).sum())

    def imbalance(self) -> float:
        """The slowest rank's train seconds by the mean over ranks: the median over
        rounds; NaN when unknown.
        """
        known = self.rounds["imbalance"][~np.isnan(self.rounds["imbalance"])]
        return float(np.median(known)) if len(known) else float("nan")

    def summary(self) -> dict[str, Any]:
        """The run as JSON values, with NaN and infinite numbers as null."""
        reached = self.reached()
        series = {
            ROUND_SERIES[name].key: _numbers(values)
            for name, values in self.rounds.items()
        }
        return {
            "folder": str(self.folder),
            "status": self.status,
            "error": self.error or None,
            "rounds_done": self.rounds_done,
            **{
                key: self.facts[key]
                for key in (
                    "method",
                    "dataset",
                    "clients",
                    "ranks",
                    "seed",
                    "model",
                    "columns",
                )
            },
            "stacked_seeds": self.stacked_seeds,
            "partition": self.config["partition"],
            **series,
            "best_accuracy": _number(self.best("accuracy")),
            "best_global_accuracy": _number(self.best("global_accuracy")),
            "target_accuracy": self.target,
            "reached_target": None if reached is None else vars(reached),
            "client_accuracy": _numbers(self.last_client_accuracy),
            "seconds_per_phase": {
                name: _number(value) for name, value in self.phase_seconds().items()
            },
            "moves": list(self.moves),
            "rounds_to_95_percent_of_peak": self.rounds_to(0.95),
            "finals": {
                name: _number(mean_accuracy(values))
                for name, values in self.finals.items()
            },
            "newcomers": {
                start: [_number(mean_accuracy(values)) for values in updates]
                for start, updates in self.newcomers.items()
            },
            "newcomers_first": {
                start: _number(self.newcomers_first(start)) for start in self.newcomers
            },
            "newcomers_last_10": {
                start: _number(self.newcomers_last(start)) for start in self.newcomers
            },
            "newcomer_bytes": _number(self.newcomer_bytes),
            "printed_comm": _number(self.printed_comm()),
            "server": [plain(vars(learning)) for learning in self.learnings],
            "peak_memory": _numbers(self.peak_memory),
            "energy": None if self.energy is None else _number(self.energy),
            "config": plain(self.config),
            "environment": plain(self.environment),
        }


def is_complete(folder: Path) -> bool:
    """Whether a run, or every seed of it, has come to its end; one whose record cannot
    be read has not.
    """
    try:
        return all(read_run(run).status == "complete" for run in runs(folder))
    except UserError:
        return False


def read_seeds(folder: Path) -> list[RunRecord]:
    """The runs in `folder/seed-N`, in the order of their seeds; none when the folder
    holds a run of its own.
    """
    found = runs(folder)
    return (
        []
        if found == [folder]
        else sorted(map(read_run, found), key=lambda run: run.facts["seed"])
    )


def read_run(folder: Path) -> RunRecord:
    """Reads `folder/run.h5`; anything that is not a run's folder is one line for the
    user.
    """
    path = folder / "run.h5"
    if not folder.exists():
        raise UserError(f"no such folder: {folder}")
    if not path.is_file():
        if (folder / "study.h5").is_file():
            raise UserError(
                f"{folder} holds a study; look at all of its runs: hpcfed report {folder}"
            )
        raise UserError(f"{folder} holds no run (there is no run.h5 in it)")
    check_one_kind(folder)
    with readable(path, "a run"), reading(path) as file:
        record = record_of(folder, file)
        # The first to fail knows why; others may have failed because it was gone. What
        # is complete has not failed.
        found = [] if record.status == "complete" else failures(folder)
        if found:
            first = min(
                found, key=lambda failure: (failure.stat().st_mtime_ns, failure.name)
            )
            with open(first, errors="replace") as told:
                record = replace(
                    record, status="failed", error=told.readline(MOST_LINE).rstrip("\n")
                )
    return record


def record_of(folder: Path, file: Reader) -> RunRecord:
    """A run out of its file, or out of a copy of that file's content in another one."""
    facts = _facts(file)
    config, environment = (
        _config(unset_zeros(parsed(file.text("config")))),
        parsed(file.text("environment")),
    )
    _check_environment(environment)
    done, rounds, clients = facts["rounds_done"], config["rounds"], config["clients"]
    shape = (rounds, facts["ranks"])
    series = {name: _series(file, name, rounds, done) for name in ROUND_SERIES}
    if not (series["seconds"] >= LEAST_SECONDS).all() or (series["cohort"] < 1).any():
        raise ValueError("rounds without seconds or clients cannot be")
    train_samples = _between(file, "clients/train_samples", (clients,))
    if np.isnan(train_samples).any():
        raise ValueError("clients/train_samples holds numbers that cannot be")
    return RunRecord(
        folder=folder,
        status=facts["status"],
        error=facts.get("error", ""),
        facts=facts,
        config=config,
        environment=environment,
        rounds=series,
        phases=_between(file, "timing/phases", (*shape, len(PHASES)), done),
        wall=_between(file, "timing/wall", shape, done),
        peak_memory=np.fmax.reduce(
            _between(file, "timing/peak_memory", shape, done), axis=0, initial=0
        ),
        client_accuracy=_between(
            file, "clients/accuracy", (rounds, clients), done, high=1
        ),
        train_samples=train_samples,
        energy=float(file.numbers("timing/energy", (None,)).sum())
        if "timing/energy" in file
        else None,
        moves=_moves(file),
        finals=_named(file, "finals/name", "finals/accuracy", (None, clients)),
        newcomers=_named(
            file, "newcomers/start", "newcomers/accuracy", (None, None, None)
        ),
        newcomer_bytes=float(_between(file, "newcomers/bytes", ()))
        if "newcomers/bytes" in file
        else float("nan"),
        learnings=tuple(_learnings(file.within("server"))) if "server" in file else (),
    )


def _facts(file: Reader) -> dict[str, Any]:
    """The attributes, those of which are checked that something depends on."""
    facts = file.facts()
    if facts.get("format") != "hpcfed run":
        raise ValueError("it was not written by hpcfed")
    facts.setdefault("stacked_seeds", 1)
    for name, kind in FACTS.items():
        if not isinstance(facts[name], kind) or isinstance(facts[name], bool):
            raise ValueError(f"its {name} is {str(facts[name])[:100]!r}")
        if isinstance(facts[name], int) and not 0 <= facts[name] < 2**63:
            raise ValueError(f"its {name} is {facts[name]}")
    if facts["schema"] > SCHEMA:
        raise ValueError(
            f"its schema is {facts['schema']}, this program reads up to {SCHEMA}; use "
            "a newer hpcfed"
        )
    if not facts["ranks"] or not facts["stacked_seeds"]:
        raise ValueError("it has no ranks or no seeds")
    if not isinstance(facts.get("error", ""), str):
        raise ValueError("its error is no text")
    return facts


def parsed(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("its JSON is no object")
    _check_depth(found)
    json.dumps(
        found, ensure_ascii=False
    ).encode()  # refuses halves of characters, which nothing could print
    return found


def _check_depth(value: Any) -> None:
    """Refuses JSON that those who go through it could not get to the end of."""
    level = [value]
    for _ in range(MOST_DEPTH):
        level = [
            item
            for one in level
            if isinstance(one, dict | list)
            for item in _items(one)
        ]
        if not level:
            return
    raise ValueError("its JSON is nested too deeply")


def _items(value: dict[str, Any] | list[Any]) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value


def _config(stored: dict[str, Any]) -> dict[str, Any]:
    """As it was, its options of every run checked as those of a command line are; a
    method's are not needed here.
    """
    known = {
        name: value
        for name, value in stored.items()
        if name in RunConfig.model_fields and value is not None
    }
    try:
        checked = RunConfig.model_validate(known)
    except ValidationError as failure:
        error = failure.errors()[0]
        raise ValueError(f"its option {error['loc'][0]}: {error['msg']}") from None
    config = stored | checked.model_dump(mode="json", include=set(known))
    for name, field in RunConfig.model_fields.items():
        if name in stored and stored[name] is None and field.default is not None:
            raise ValueError(f"its option {name} is null")
    for name in ("rounds", "clients", "partition"):
        if name not in known:
            raise ValueError(f"its config has no {name}")
    return config


def _check_environment(environment: dict[str, Any]) -> None:
    """What a page looks into has the form that a run gives it."""
    lists = {"ranks": dict, "command": str}
    fits = all(
        isinstance(environment.get(name) or {}, dict) for name in ("source", "packages")
    ) and all(
        isinstance(environment.get(name, []), list)
        and all(isinstance(one, kind) for one in environment.get(name, []))
        for name, kind in lists.items()
    )
    if not fits:
        raise ValueError("its environment is not as a run writes it")


def _between(
    file: Reader,
    name: str,
    shape: tuple[int | None, ...],
    first: int | None = None,
    *,
    high: float = MOST,
) -> np.ndarray:
    """Numbers from 0 to `high`, or NaN; as floats of 64 bits, whatever the file has."""
    values = file.numbers(name, shape, first)
    with np.errstate(over="ignore"):  # of short floats, which a file may have
        wrong = (values < 0) | (values > high)
    if wrong.any():
        raise ValueError(f"{name} holds numbers that cannot be")
    return values.astype(np.float64, copy=False)


def _moves(file: Reader) -> tuple[int, ...]:
    if "moves" not in file:
        return ()
    return tuple(
        int(round)
        for round in _between(file, "moves/round", (None,))
        if not np.isnan(round)
    )


def _named(
    file: Reader, names: str, values: str, shape: tuple[int | None, ...]
) -> dict[str, np.ndarray]:
    """Entries of a dataset by name, without those that nobody wrote."""
    if names not in file:
        return {}
    pairs = zip(file.texts(names), _between(file, values, shape, high=1), strict=True)
    return {name: value for name, value in pairs if not np.isnan(value).all()}


def _learnings(group: Reader) -> Iterator[LearningRecord]:
    phases, networks = (group.texts(name) for name in ("phase_names", "network_names"))
    rounds = _between(group, "round", (None,))
    times = len(rounds)
    by_network = {
        name: _between(group, name, (times, len(networks)))
        for name in ("samples_per_second", "flops", "utilisation", "parameters")
    }
    rows, kept = (
        _between(group, "rows", (times,)),
        _between(group, "kept", (times,), high=1),
    )
    seconds, memory = (
        _between(group, "seconds", (times, len(phases))),
        _between(group, "peak_memory", (times, None)),
    )
    if not memory.shape[1]:
        raise ValueError("server/peak_memory is of no rank")
    for time, round in enumerate(rounds):
        if not np.isnan(round):
            own = {
                name: dict(zip(networks, values[time].tolist(), strict=True))
                for name, values in by_network.items()
            }
            own["parameters"] = {
                name: int(value) for name, value in own["parameters"].items()
            }
            yield LearningRecord(
                round=int(round),
                rows=int(rows[time]),
                seconds=dict(zip(phases, seconds[time].tolist(), strict=True)),
                peak_memory=memory[time],
                kept=float(kept[time]),
                **own,
            )


def at_target(
    accuracy: np.ndarray | float, common: np.ndarray | float, target: float
) -> Any:
    """Where the global model has so many per cent, or the clients' mean if there is no
    global model.
    """
    return (accuracy if np.isnan(common).all() else common) >= target / 100


def mean_accuracy(accuracy: np.ndarray) -> float:
    """Over the clients that have test data."""
    return float("nan") if np.isnan(accuracy).all() else float(np.nanmean(accuracy))


def _series(file: Reader, name: str, rounds: int, done: int) -> np.ndarray:
    """A series of rounds; all NaN when the run was written before there was such a
    series.
    """
    where = f"rounds/{name}"
    if not ROUND_SERIES[name].required and where not in file:
        return np.full(done, np.nan)
    if ROUND_SERIES[name].unit == "nats":
        return file.numbers(where, (rounds,), done).astype(np.float64, copy=False)
    return _between(
        file,
        where,
        (rounds,),
        done,
        high=1 if ROUND_SERIES[name].unit == "fraction" else MOST,
    )


def plain(value: Any) -> Any:
    """Return a value as JSON knows it: NaN and infinite numbers as null."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return _numbers(value)
    if isinstance(value, np.generic):
        value = value.item()
    return _number(value) if isinstance(value, float) else value


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _numbers(values: np.ndarray) -> list[float | None]:
    return [_number(value) for value in values]
