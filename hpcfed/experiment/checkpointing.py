"""Writing checkpoints: when one is due, what is in it, and that all ranks agree on it.

Random numbers are keyed by round and client. So a checkpoint holds only the method's
state, what the channel keeps, the server's state and the results. Rows are stored with
the ids of their clients, so the run can resume on any number of ranks.
"""

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpcfed.errors import one_line
from hpcfed.experiment.assemble import Setup
from hpcfed.federation.federation import Federation
from hpcfed.options import RunConfig
from hpcfed.results import checkpoints
from hpcfed.results.checkpoints import StoredFile
from hpcfed.results.folder import CHECKPOINTS, RECORD, checkpoint_folder
from hpcfed.results.results import ResultsWriter
from hpcfed.results.server import RowsUse
from hpcfed.runtime.signals import Stop
from hpcfed.server.options import server_options
from hpcfed.server.schedule import learns_after

LAST_BYTES = 64 * 2**20
"""A complete run keeps a checkpoint unasked if all states take at most these bytes."""
CHANNEL = "way-"
"""Prefix of the channel's tensors in all files; no state's field has such a name."""


class Checkpointer:
    """Writes a checkpoint after the rounds that need one."""

    def __init__(
        self,
        setup: Setup,
        folder: Path,
        results: ResultsWriter | None,
        stop: Stop,
        say: Callable[[str], None],
        *,
        done: int = 0,
    ) -> None:
        """`done`: number of rounds in the checkpoint that the run resumes from."""
        self._setup = setup
        self._folder = folder
        self._results = results
        self._stop = stop
        self._say = say
        self._told_of_failure = False
        self._newest = done
        """Number of rounds in the newest checkpoint."""
        self._passing: set[int] = set()
        """Rounds in checkpoints that a complete run does not keep: they were only written
        because the server learns, or new clients make rounds.
        """

    def after_round(self, round: int, state: Any, *, is_last: bool) -> bool:
        """Write a checkpoint if one is due; tell whether all ranks stop after this
        round. The last round may not be the planned one: a run can end early.
        """
        setup, stop = self._setup, self._stop
        config = setup.settings.config
        with setup.timer.phase("record"):
            # A signal may reach only some ranks: one that gets it stops all. The root's
            # clock decides.
            sampler = setup.sampler
            collects = sampler is not None and sampler.is_due(round)
            orders = (stop.after(round), stop.is_due(round), collects)
            # One collective for all questions: all ranks must write, or none.
            everyones = setup.collectives.allgather(orders)
            asked = any(asked for asked, *_ in everyones)
            _, by_time, collects = everyones[0]
            # A run that ends with this round anyway just completes.
            stopping = asked and not is_last
            required = stopping or _asked_for(round, config)
            kept = is_last and self._keeps_last(state)
            if sampler is not None:
                sampler.note_rounds(round + 1)
            # A checkpoint has a copy of the record.
            if collects or required or by_time or kept:
                collect_telemetry(setup, self._results)
            if required or by_time or kept:
                with stop.checkpoints.writing():
                    self._write(round + 1, state, required=required)
        if stopping:
            stop.agreed = True
        return stopping

    def before_learning(self, round: int, state: Any) -> None:
        """Before a round in which the server begins to learn, make sure of a checkpoint:
        the learning may stop, and the round is then repeated.

        The last one will do if to write another would take more than a hundredth of the
        time since. Seeds that advance together would stop in different rounds: theirs
        learn to the end.
        """
        setup, config = self._setup, self._setup.settings.config
        options = server_options(setup.settings)
        if options is None:
            return
        every = 60 * config.checkpoint_minutes
        if setup.stacked > 1 or not learns_after(options, round + 1, config.rounds):
            every = 0.0
        if every and self._newest < round:
            wanted = not self._newest or self._stop.checkpoints.is_worth_it
            if setup.collectives.bcast(wanted):
                with setup.timer.phase("record"), self._stop.checkpoints.writing():
                    # It has a copy of the record.
                    collect_telemetry(setup, self._results)
                    self._passing.add(round)
                    self._write(round, state, required=False)
        # A run that is stopped in its first round begins anew.
        is_sure = self._newest > 0 or (round == 0 and not options.server_overlap)
        setup.federation.server.saves_every = every if is_sure else 0.0

    def after_completion(self) -> None:
        """Remove checkpoints that a complete run does not keep."""
        if self._results is None:
            return
        for rounds in self._passing:
            checkpoints.remove(checkpoint_folder(self._folder, rounds))
        with suppress(OSError):
            (self._folder / CHECKPOINTS).rmdir()

    def before_new_rounds(self, state: Any) -> None:
        """Write a checkpoint to resume from if the run is killed while new clients make
        rounds. These begin anew, but the known clients' rounds are not repeated.
        """
        wanted = self._setup.settings.config.checkpoint_minutes > 0
        if wanted and self._newest < self._done:
            self._passing.add(self._done)
            self._write(self._done, state, required=False)

    def after_new_rounds(self, state: Any, *, stopping: bool) -> None:
        """Write that checkpoint if all ranks stop and lack it."""
        if stopping and self._newest < self._done:
            self._write(self._done, state, required=True)

    @property
    def _done(self) -> int:
        """Rounds of the known clients; fewer than planned if the run ended early."""
        return self._setup.federation.round + 1

    def _keeps_last(self, state: Any) -> bool:
        """Tell whether a complete run keeps a checkpoint of its last round, so that it
        can be extended: it does if the checkpoint is small.

        If the server learns after the last round, the run cannot be extended from
        there.
        """
        setup = self._setup
        config = setup.settings.config
        if setup.settings.options.has_server or not config.checkpoint_minutes:
            return False
        memory = setup.federation.channel.memory
        kept = [*memory.rows.values(), *memory.shared.values()]
        for field in fields(state):
            kept.append(getattr(state, field.name))
        size = sum(tensor.numel() * tensor.element_size() for tensor in kept)
        # Ranks have different numbers of clients, but must decide alike.
        return sum(setup.collectives.allgather(size)) <= LAST_BYTES

    def _write(self, rounds: int, state: Any, *, required: bool) -> None:
        """Write a checkpoint. One that is only due by age may fail: then the last whole
        one stays, and the next is tried when it is due.
        """
        failure = save(
            self._setup,
            self._folder,
            rounds,
            state,
            self._results,
            required=required,
            passing=self._passing,
        )
        if failure is None:
            self._newest = rounds
        elif not self._told_of_failure:
            self._told_of_failure = True
            self._say(
                f"no checkpoint after round {rounds}: {failure}; going on without it "
                "and trying again later (--checkpoint-minutes 0 writes none by time)"
            )


def collect_telemetry(setup: Setup, results: ResultsWriter | None) -> None:
    """Record what all ranks have sampled so far; the same call on every worker."""
    if setup.sampler is None:
        return
    histories = setup.collectives.gather(setup.sampler.history())
    if results is not None and histories is not None:
        results.telemetry.write(histories, setup.sampler.began)


def _asked_for(round: int, config: RunConfig) -> bool:
    """Tell whether --checkpoint-every asks for a checkpoint after a round."""
    every = config.checkpoint_every
    return every > 0 and (round + 1) % every == 0


def save(
    setup: Setup,
    folder: Path,
    rounds: int,
    state: Any,
    results: ResultsWriter | None,
    *,
    required: bool = True,
    passing: Collection[int] = (),
) -> str | None:
    """Write a checkpoint after `rounds` rounds; the same call on every worker. Those of
    `passing` rounds take no other's place.

    When it returns, every rank knows that the checkpoint is whole. If the disk refuses
    a `required` checkpoint, the run ends; for any other, every rank gets the reason.
    The server's own part is always required.
    """
    _await_server(setup, results)
    # Early: a state that ranks disagree on must not replace a good checkpoint.
    check_shared(setup, state)
    is_root = results is not None
    there = checkpoint_folder(folder, rounds)
    refused: list[OSError] = []
    if results is not None:
        # The record's copy must include every round that the state has seen.
        results.publish()
        with _tolerating(refused, required=required):
            checkpoints.prepare(there)
    # The other ranks write into the folder that the root makes.
    setup.collectives.barrier()
    written: list[StoredFile] = []
    with _tolerating(refused, required=required):
        written = _write_state(setup, there, state, is_root=is_root)
    # Only a checkpoint that may fail needs this extra collective.
    if not required:
        reasons = setup.collectives.allgather([one_line(error) for error in refused])
        if any(reasons):
            if is_root:
                checkpoints.remove(there)
            return next(reason[0] for reason in reasons if reason)
    if setup.settings.options.has_server:
        # Every rank asks, because requests to the server are collective.
        of_server = setup.federation.server.store(str(there))
        written += of_server if is_root else ()
    everyones = setup.collectives.gather(written)
    if everyones is not None:
        with _tolerating(refused, required=required):
            _complete(setup, folder, rounds, everyones, passing)
    # This also holds the other ranks until the marker exists.
    reason: str | None = setup.collectives.bcast(
        one_line(refused[0]) if refused else None
    )
    return reason


def _await_server(setup: Setup, results: ResultsWriter | None) -> None:
    """Wait for a learning that may still go on, and record it: a checkpoint holds its
    rows. If the run is to stop, the learning may stop instead, which raises Halted.
    """
    late = setup.federation.server_side.late
    if late is None:
        return
    late.settle()
    report, waited = late.recordable()
    if results is not None and report is not None:
        assert report.after is not None
        results.write_server(report.after, report)
        results.write_use(RowsUse(waited))


@contextmanager
def _tolerating(refused: list[OSError], *, required: bool) -> Iterator[None]:
    """Note what the disk refuses within the block, unless it is required."""
    try:
        yield
    except OSError as error:
        if required:
            raise
        refused.append(error)


def _complete(
    setup: Setup,
    folder: Path,
    rounds: int,
    everyones: Sequence[Sequence[StoredFile]],
    passing: Collection[int],
) -> None:
    """Write the marker for all ranks' files and a copy of the record."""
    there = checkpoint_folder(folder, rounds)
    # `save` has just published the record, so the copy has all rounds of the state.
    files = [checkpoints.copy(there, folder / RECORD)]
    for of_rank in everyones:
        files += of_rank
    # One seed may be a checkpoint ahead when all are killed. So each keeps one more:
    # a common round is left even if a checkpoint is also damaged.
    keep = checkpoints.KEPT + (setup.stacked > 1)
    checkpoints.complete(there, rounds, files, keep=keep, passing=passing)


def _write_state(
    setup: Setup, there: Path, state: Any, *, is_root: bool
) -> list[StoredFile]:
    """Write this rank's rows, and on the root what all ranks share."""
    rank = setup.world.role_rank
    ids = setup.federation.clients
    written = [checkpoints.write(there, f"worker-{rank}.clients", ids)]
    for field in fields(state):
        # It follows from the network: a resumed run has it already.
        if field.metadata.get("fixed"):
            continue
        array = as_array(getattr(state, field.name))
        if field.metadata.get("owned"):
            name = f"worker-{rank}.{field.name}"
            written.append(checkpoints.write(there, name, array))
        elif is_root:
            written.append(checkpoints.write(there, f"common.{field.name}", array))
    memory = setup.federation.channel.memory
    # Like owned fields: entries follow the ids in worker-RANK.clients.
    for name, tensor in memory.rows.items():
        name = f"worker-{rank}.{CHANNEL}{name}"
        written.append(checkpoints.write(there, name, as_array(tensor)))
    for name, tensor in memory.shared.items() if is_root else ():
        name = f"common.{CHANNEL}{name}"
        written.append(checkpoints.write(there, name, as_array(tensor)))
    return written


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor's numbers in host memory."""
    array: np.ndarray = tensor.detach().cpu().numpy()
    return array


def check_shared(setup: Setup, state: Any) -> None:
    """Refuse a state whose shared fields differ between ranks: a checkpoint holds only
    those of the root.

    Ranks on different devices may round differently, so a small difference is allowed.
    """
    check_owned(setup, setup.federation, state, "a round")
    if setup.collectives.size == 1:
        return
    shared, digests = {}, {}
    for field in fields(state):
        if not field.metadata.keys() & {"fixed", "owned"}:
            shared[field.name] = as_array(getattr(state, field.name))
    for name, tensor in setup.federation.channel.memory.shared.items():
        shared[f"{CHANNEL}{name}"] = as_array(tensor)
    for name, array in shared.items():
        # Compare digests first: arrays are as large as a model.
        content = np.ascontiguousarray(array).data
        digests[name] = hashlib.sha256(content).hexdigest()
    everyones = setup.collectives.allgather(digests)
    for name, array in shared.items():
        if len({theirs.get(name) for theirs in everyones}) == 1:
            continue
        # Digests differ, perhaps only by rounding: now the arrays themselves travel.
        first = setup.collectives.bcast(array)
        if setup.collectives.any_rank(not _close(array, first)):
            raise RuntimeError(
                f"state field {name} of method {setup.settings.config.method} differs "
                "between ranks, so the run could not be resumed; mark it OWNED if it "
                "has a row per client, otherwise make it the same on all ranks"
            )


def check_owned(setup: Setup, fed: Federation, state: Any, after: str) -> None:
    """Refuse an OWNED field that does not have one row for every client of this rank in
    the federation; `after` says what has made the state.
    """
    clients = len(fed.clients)
    for field in fields(state):
        if not field.metadata.get("owned"):
            continue
        rows = len(getattr(state, field.name))
        if rows != clients:
            raise RuntimeError(
                f"state field {field.name} of method {setup.settings.config.method} has "
                f"{rows} rows after {after}, but there are {clients} clients here; "
                "state.field[cohort.here] are the cohort's"
            )


def _close(one: np.ndarray, other: np.ndarray) -> bool:
    if one.shape != other.shape or one.dtype.kind != "f":
        return False
    return bool(np.allclose(one, other, rtol=1e-3, atol=1e-6, equal_nan=True))
