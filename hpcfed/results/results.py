"""`run.h5`: everything that a run measured, directly readable with h5ls, h5py or h5web.

The file is built in memory with all datasets from the start and published whole, so a
reader never sees a torn file. A finished round costs only a copy into arrays. Moving
them into the file and publishing it takes at most 1 % of the time, because the next
publishing waits a hundred times as long as the last one took.
"""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from hpcfed.results import server as server_group
from hpcfed.results.blank import blank_file
from hpcfed.results.folder import RECORD
from hpcfed.results.format import (
    AT_THE_END,
    EVALUATED,
    NEW_ROUNDS,
    NEWCOMER_STARTS,
    RELOCATIONS,
    SCHEMA,
    STACKS,
    Declared,
    check_same,
    clock_arrays,
    create,
    create_clients,
    create_names,
    create_now_and_then,
    finite_figures,
    metric_arrays,
    restore_entries,
    round_arrays,
    take_down_clock,
    write_rounds,
)
from hpcfed.results.publish import publish
from hpcfed.results.safe import readable, reading
from hpcfed.results.sandbox import note_written
from hpcfed.results.series import EVALUATION_SERIES
from hpcfed.results.server import Learning, RowsUse, ServerSize
from hpcfed.results.telemetry import TelemetryGroup
from hpcfed.runtime.environment import of_resumed
from hpcfed.runtime.timer import PHASES

PAUSE = 100
"""The pause before the next publishing, as a multiple of the last one's duration."""
NOTHING: Mapping[str, np.ndarray] = MappingProxyType({})


class ResultsWriter:
    """Writes run.h5 on one rank; rounds come in order."""

    def __init__(
        self,
        folder: Path,
        *,
        settings: dict[str, Any],
        environment: dict[str, Any],
        clients: dict[str, np.ndarray],
        ranks: int,
        facts: dict[str, Any],
        relocations: int = 0,
        server: ServerSize | None = None,
        finals: Sequence[str] = (),
        figures: Sequence[str] = (),
        metrics: Sequence[str] = ("accuracy",),
        classes: int = 0,
        evaluated: np.ndarray | None = None,
        members: int = 0,
        resumed: bool = False,
    ) -> None:
        """`clients` are facts about each client at the start; clients may be moved to
        other ranks `relocations` times. `finals` are the names of what is evaluated at
        the end, `figures` of what is measured then. `evaluated` are the ids of the
        evaluated clients, if not all are. A round has at most `members` on the virtual
        clock.

        If a run is `resumed`, the file on disk stays unchanged until `restore` has read
        it or `begin_anew` discards it.
        """
        self._path = folder / RECORD
        rounds = settings["rounds"]
        num_evaluated = settings["clients"] if evaluated is None else len(evaluated)
        by_metric = [*metric_arrays(metrics, rounds, num_evaluated, classes)]
        # Create all datasets now: a reader of the first round finds each of them.
        declared = [*round_arrays(rounds, ranks), *by_metric]
        if members:
            declared += clock_arrays(rounds, members)
        self._file, self._datasets = blank_file(self._path, tuple(declared))
        """Where rounds go in the file; to find each by name takes as long as to write it."""
        self._arrays = {
            one.name: np.full(one.shape, np.nan, one.dtype) for one in declared
        }
        """Rounds write to these arrays first; `publish` copies them into the file."""
        self._evaluations = [f"rounds/{name}" for name in EVALUATION_SERIES]
        """Arrays that evaluations fill."""
        self._evaluations += [one.name for one in by_metric]
        self.telemetry = TelemetryGroup(self._file)
        self._rounds_done = self._rounds_in_file = 0
        self._next_publish = 0.0
        self._sharing = int(facts.get("stacked_seeds", 1))
        """Runs that share this process, and its time for publishing."""
        self._started = time.time()
        self._seconds_before = 0.0
        self._awaits_restore = resumed
        self.was_shorter = False
        """Whether the resumed run was planned with fewer rounds."""
        self._environment = environment
        self._finals = list(finals)
        self._figures = list(figures)
        self._networks = [] if server is None else list(server.steps)
        self._trainings = 0
        self.relocations = 0
        """How often clients have been relocated."""
        self._write_facts(settings, facts, ranks)
        create_names(self._file, "timing/phase_names", PHASES)
        if evaluated is not None:
            clients = {**clients, EVALUATED: evaluated}
        create_clients(self._file, clients)
        create_now_and_then(
            self._file,
            settings,
            relocations=relocations,
            finals=finals,
            figures=figures,
        )
        if server is not None:
            server_group.create_group(self._file, server)
        if not resumed:
            self._publish_at_once()

    def _write_facts(
        self, settings: dict[str, Any], facts: dict[str, Any], ranks: int
    ) -> None:
        attributes = self._file.attrs
        attributes.update(
            format="hpcfed run",
            schema=SCHEMA,
            status="running",
            rounds_done=0,
            started=_clock(self._started),
            ranks=ranks,
        )
        for name in ("method", "dataset", "clients", "seed"):
            attributes[name] = settings[name]
        attributes.update(facts)
        self._file["config"] = json.dumps(settings, indent=1)
        self._file["environment"] = json.dumps(self._environment, indent=1)

    # Occasional results go straight into the file; the next rounds bring them to disk.

    def write_relocation(self, round: int, rank: np.ndarray, seconds: float) -> None:
        """Record that clients were relocated before this round."""
        group, entry = self._file[RELOCATIONS], self.relocations
        group["round"][entry] = round
        group["seconds"][entry] = seconds
        group["rank"][entry] = rank
        self.relocations += 1

    def write_final(self, name: str, accuracy: np.ndarray) -> None:
        """Record every client's accuracy at the end, under the method's name for it."""
        self._file["finals/accuracy"][self._finals.index(name)] = accuracy

    def write_figure(self, name: str, values: np.ndarray) -> None:
        """Record a number per client at the end, under the method's name for it."""
        self._file["figures/value"][self._figures.index(name)] = values

    def write_depth(
        self, number: int, figures: Mapping[str, float | np.ndarray]
    ) -> None:
        """Record what the server makes from one of the depths of inversion."""
        for name, values in figures.items():
            # A run that an older version has begun goes on in its file.
            if name in self._file["depths"]:
                self._file[f"depths/{name}"][number] = values

    def write_newcomers(self, start: str, update: int, accuracy: np.ndarray) -> None:
        """Record new clients' accuracy after `update` local updates from a start."""
        number = NEWCOMER_STARTS.index(start)
        self._file["newcomers/accuracy"][number, update] = accuracy

    def write_newcomer_bytes(self, sent: float) -> None:
        """Record the bytes sent to a new client before its first local update."""
        self._file["newcomers/bytes"][()] = sent

    def write_new_bytes(self, round: int, up: float, down: float) -> None:
        """Record the bytes sent in a round of new clients."""
        self._file[f"{NEW_ROUNDS}/bytes_up"][round] = up
        self._file[f"{NEW_ROUNDS}/bytes_down"][round] = down

    def write_new_accuracy(
        self, round: int, accuracy: np.ndarray, trained: np.ndarray
    ) -> None:
        """Record accuracies after a round of new clients: of all, and of trained."""
        self._file[f"{NEW_ROUNDS}/accuracy"][round] = accuracy
        self._file[f"{NEW_ROUNDS}/trained_accuracy"][round] = trained
        # All rounds of known clients are done, so nothing else publishes from here on.
        if time.monotonic() >= self._next_publish:
            self.publish()

    def write_server(self, round: int, learning: Learning) -> None:
        """Record a training of the server's model after this round."""
        server_group.write_entry(
            self._file, self._trainings, round, learning, self._networks
        )
        self._trainings += 1

    def write_use(self, use: RowsUse) -> None:
        """Record the use of the last training's rows, or a wait for them."""
        server_group.write_use(self._file, self._trainings - 1, use)

    def write_round(
        self,
        round: int,
        values: dict[str, float],
        *,
        client_accuracy: np.ndarray | None,
        rank_values: dict[str, np.ndarray],
        phases: np.ndarray,
        client_metrics: Mapping[str, np.ndarray] = NOTHING,
        class_accuracy: Mapping[str, np.ndarray] = NOTHING,
        times: Mapping[str, np.ndarray] = NOTHING,
        together: int = 1,
    ) -> bool:
        """Record a finished round; tell whether it and all earlier rounds are now on
        disk. `times` are its members' on the virtual clock; `together` made it at once.
        """
        # Into arrays: a write through h5py is far too slow for a single number.
        arrays = self._arrays
        for name, value in values.items():
            arrays[f"rounds/{name}"][round] = value
        if client_accuracy is not None:
            arrays["clients/accuracy"][round] = client_accuracy
        for name, values_here in client_metrics.items():
            # A diverged client's loss may overflow a short float.
            with np.errstate(over="ignore"):
                arrays[f"clients/{name}"][round] = values_here
        for name, of_classes in class_accuracy.items():
            arrays[f"classes/{name}"][round] = of_classes
        for name, of_ranks in rank_values.items():
            arrays[f"timing/{name}"][round] = of_ranks
        arrays["timing/phases"][round] = phases
        arrays[STACKS][round] = self._sharing = together
        take_down_clock(arrays, round, times)
        self._rounds_done = round + 1
        # Always publish the last round: nothing comes after it.
        is_last = self._rounds_done == len(arrays["rounds/seconds"])
        if time.monotonic() < self._next_publish and not is_last:
            return False
        self.publish()
        return True

    def note_end(self, why: str) -> None:
        """Record why the run ends early, unless its target or patience ended it."""
        self._file.attrs["ended"] = why

    def finish(
        self,
        status: str,
        *,
        error: str = "",
        measured: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Mark the run `complete`, `stopped` or `failed`, and publish a last time.
        `measured` are numbers of every rank, by their names in `AT_THE_END`.
        """
        if self._awaits_restore:
            # It failed or was stopped before it was restored. The file on disk knows
            # more than we do, so keep it.
            self._file.close()
            return
        self._file.attrs.update(status=status, finished=_clock(time.time()))
        if error:
            self._file.attrs["error"] = error
        for name, of_ranks in (measured or {}).items():
            unit, meaning = AT_THE_END[name]
            shape = of_ranks.shape
            create(
                self._file,
                Declared(f"timing/{name}", shape, ("rank",), unit, meaning),
                of_ranks,
            )
        self.publish()
        self._file.close()

    def publish(self) -> None:
        """Write all rounds so far to disk."""
        begin = time.monotonic()
        seconds = self._seconds_before + time.time() - self._started
        self._file.attrs["seconds"] = seconds
        # Earlier rounds are in the file already.
        fresh = slice(self._rounds_in_file, self._rounds_done)
        if fresh.start < fresh.stop:
            for name, array in self._arrays.items():
                write_rounds(self._datasets[name], array, fresh)
        self._rounds_in_file = self._rounds_done
        self._file.attrs["rounds_done"] = self._rounds_done
        self._file.flush()
        # The image of the whole file: HDF5 never writes to the path itself.
        content = self._file.id.get_file_image()
        publish(content, self._path)
        note_written(self._path, content)
        now = time.monotonic()
        # Stacked runs publish one after the other, so each waits for the share of all.
        self._next_publish = now + PAUSE * self._sharing * (now - begin)

    def _publish_at_once(self) -> None:
        """Publish now, so that the folder counts as a run's from the start; the first
        round is then published without a pause.
        """
        self.publish()
        self._next_publish = 0.0

    def series(self, name: str) -> np.ndarray:
        """Return a figure of every round so far; NaN for rounds without it."""
        return self._arrays[f"rounds/{name}"][: self._rounds_done]

    @property
    def rounds_done(self) -> int:
        return self._rounds_done

    @property
    def learnings(self) -> int:
        """How often the server's model has been trained."""
        return self._trainings

    def figures(self, round: int) -> dict[str, float]:
        """Return all finite figures of a round."""
        return finite_figures(self._arrays, round)

    def losses(self, learning: int) -> dict[str, np.ndarray]:
        """Return the loss of every step of a learning, by network."""
        group = self._file[server_group.GROUP]
        return {name: group[f"{name}_loss"][learning] for name in self._networks}

    def begin_anew(self) -> None:
        """Replace what is on disk; restore nothing."""
        self._awaits_restore = False
        self._publish_at_once()

    def restore(self, path: Path, rounds: int) -> None:
        """Copy the first rounds of another writer, as far as shapes agree."""
        with readable(path, "a run"), reading(path) as old:
            facts = old.facts()
            self.was_shorter = old.shape("rounds/seconds")[0] < len(
                self._arrays["rounds/seconds"]
            )
            check_same(path, facts, self._file.attrs)
            # Ranks' figures have another shape if the number of ranks has changed. Then
            # they stay NaN for the rounds before. The run may also have become longer.
            for name, array in self._arrays.items():
                if name not in old:
                    continue
                shape = old.shape(name)
                alike = len(shape) == array.ndim and shape[1:] == array.shape[1:]
                # The old file may be longer than the checkpoint: rounds after it are
                # made again.
                if alike and shape[0] >= rounds:
                    array[:rounds] = old.numbers(name, shape, rounds)
            if STACKS not in old:
                # An older version kept one number for all rounds.
                self._arrays[STACKS][:rounds] = facts.get("stacked_seeds", 1)
            self.relocations = restore_entries(self._file, old, RELOCATIONS, rounds)
            self._trainings = restore_entries(
                self._file, old, server_group.GROUP, rounds
            )
            self.telemetry.restore(old, rounds)
            self._restore_command(old.text("environment"))
            before = map(int, facts.get("resumed", ()))
            self._file.attrs["started"] = str(facts["started"])
            self._file.attrs["resumed"] = [*before, rounds]
            # Older files did not record the run's total seconds.
            seconds = self._arrays["rounds/seconds"][:rounds]
            counted = float(np.nansum(seconds))
            self._seconds_before = float(facts.get("seconds", counted))
        self._rounds_done = rounds
        self._awaits_restore = False

    def forget_evaluations(self, rounds: Sequence[int]) -> None:
        """Remove evaluations that the run would not have made."""
        for name in self._evaluations:
            self._arrays[name][rounds] = np.nan

    def _restore_command(self, text: str) -> None:
        """Keep the command that began the run, beside those that resumed it."""
        self._environment = of_resumed(json.loads(text), self._environment)
        # HDF5 cannot replace a text in place.
        del self._file["environment"]
        self._file["environment"] = json.dumps(self._environment, indent=1)


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
