"""Resumes a stopped run: finds its checkpoint, and reads the state back by client."""

from collections.abc import Callable, Sequence
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpcfed.errors import UserError, count, no_checkpoint
from hpcfed.experiment.assemble import Setup
from hpcfed.experiment.checkpointing import CHANNEL, as_array
from hpcfed.experiment.early_end import is_over
from hpcfed.experiment.evaluate import is_due
from hpcfed.options import RunConfig
from hpcfed.results import checkpoints
from hpcfed.results.checkpoints import Checkpoint, Stopping
from hpcfed.results.folder import RECORD, failures
from hpcfed.results.results import ResultsWriter
from hpcfed.results.safe import check_answers
from hpcfed.results.stored import read_run
from hpcfed.runtime.signals import Stop

Say = Callable[[str], None]
OLDER_NAMES = {"private": "own", "channels": "kept"}
"""Names of state fields in checkpoints of the first version."""


def find_checkpoints(
    setup: Setup, runs: Sequence[Path], say: Say, stop: Stop
) -> Sequence[Checkpoint | None]:
    """Find the checkpoint from which each run resumes; None if it begins anew. All that
    have rounds left resume after the same one.

    The same call on every worker. Only the root reads and hashes the checkpoints, and
    tells the others. The runs' folders are claimed by now, so no other process changes
    them. `stop` has agreed on all ranks if a stop was requested in the meantime.
    """
    config = setup.settings.config
    world = setup.world
    if config.resume is None:
        return [None] * len(runs)
    found: list[Checkpoint] | None = None
    if world.is_root:
        try:
            found = _find(runs, config, say, lambda: stop.asked)
        except checkpoints.Interrupted:
            stop.agreed = True
        begins_anew = found is None and not stop.agreed
        if begins_anew and not config.overwrite:
            _check_nothing_is_lost(runs, config.resume)
    # The root may have raised instead; then MPI ends the ranks that wait here.
    found, stop.agreed = world.role_bcast((found, stop.agreed))
    if world.is_root and not stop.agreed:
        _forget_failures(runs)
    return found or [None] * len(runs)


def _find(
    runs: Sequence[Path], config: RunConfig, say: Say, stopping: Stopping
) -> list[Checkpoint] | None:
    """Return the checkpoints of the last round that all runs have. If there is none,
    runs that are over but for new clients go on from their own last one.

    With --overwrite, which replaces runs that cannot be resumed, others do so, too.
    """
    together = checkpoints.common(runs, say=say, stopping=stopping)
    if together is not None or not all(map(checkpoints.exist, runs)):
        return together
    own: dict[Path, Checkpoint] = {}
    under_way = []
    for run in runs:
        of_run = checkpoints.common([run], say=say, stopping=stopping)
        if of_run is None:
            return None
        (own[run],) = of_run
        if not is_over(read_run(own[run].folder), config):
            under_way.append(run)
    if under_way:
        together = checkpoints.common(under_way, say=say, stopping=stopping)
        if together is not None:
            own.update(zip(under_way, together, strict=True))
        elif not config.overwrite:
            return None
    return [own[run] for run in runs]


def _check_nothing_is_lost(runs: Sequence[Path], resume: Path) -> None:
    rounds = max(_rounds_on_disk(run) for run in runs)
    if not rounds:
        return
    if len(runs) > 1 and all(map(checkpoints.exist, runs)):
        raise UserError(
            f"--resume {resume}: its runs have no checkpoint of the same round; "
            f"resume each of them by itself: --resume {runs[0]}"
        )
    raise UserError(no_checkpoint(resume, rounds))


def _rounds_on_disk(run: Path) -> int:
    """Count the rounds that a run has recorded; 0 if the record is damaged."""
    try:
        return read_run(run).rounds_done
    except UserError:
        check_answers(run / RECORD)
        return 0


def _forget_failures(runs: Sequence[Path]) -> None:
    for run in runs:
        for failure in failures(run):
            failure.unlink()


def restore_run(
    setup: Setup,
    folder: Path,
    found: Checkpoint | None,
    state: Any,
    results: ResultsWriter | None,
    say: Say,
) -> tuple[int, Any]:
    """Return the number of finished rounds, and the state after them.

    Without a checkpoint the run begins anew, with the given `state`.
    """
    if found is None:
        if results is not None:
            # Otherwise damaged checkpoints would count as the newest.
            checkpoints.discard_after(folder, 0)
            results.begin_anew()
        say(f"no checkpoint in {folder}: the run begins anew")
        return 0, state
    if results is not None:
        path = found.folder / RECORD
        if not path.exists():
            # Checkpoints of older versions have no copy of the record.
            path = folder / RECORD
        results.restore(path, found.rounds)
        # If the run was shorter, its last round was evaluated in any case.
        config = setup.settings.config
        others = [r for r in range(found.rounds) if not is_due(r, config)]
        results.forget_evaluations(others)
    # The last round's number matters even if no round is left: newcomers continue it.
    setup.federation.members.round = found.rounds - 1
    loaded = load(setup, found, state)
    if results is not None:
        # Only now: if anything had been refused, later checkpoints would still be
        # needed.
        checkpoints.discard_after(folder, found.rounds)
    say(f"going on after round {found.rounds}")
    return found.rounds, loaded


def load(setup: Setup, checkpoint: Checkpoint, state: Any) -> Any:
    """Read the state back; the method's first `state` gives the tensors' kinds."""
    holders = _holders(checkpoint, setup.federation.clients)
    values: dict[str, torch.Tensor] = {}
    for field in fields(state):
        if field.metadata.get("fixed"):
            continue
        # An empty tensor gives numpy's type without copying anything.
        like = getattr(state, field.name)
        dtype = as_array(like.new_empty(0)).dtype
        if field.metadata.get("owned"):
            # No option needs it, and a checkpoint of an older version does not have it.
            if like.shape[1:] == (0,) and not field.metadata.get("generated"):
                continue
            rows = _rows_of_clients(setup, checkpoint, field, holders, like, dtype)
        else:
            shape: list[int | None] = [*like.shape]
            if field.metadata.get("varies"):
                shape[0] = None
            rows = checkpoint.read(f"common.{field.name}", dtype, shape)
        # Row numbers are used as indices: wrong ones would read out of bounds.
        if "row_of" in field.metadata:
            table = getattr(state, field.metadata["row_of"])
            row_count = len(table)
            if rows.min() < 0 or rows.max() >= row_count:
                raise checkpoint.refusal(
                    f"common.{field.name}", "numbers of rows that there are not"
                )
        tensor = torch.from_numpy(rows)
        values[field.name] = tensor.to(like.device)
    _remember(setup, checkpoint, holders)
    if setup.settings.options.has_server:
        setup.federation.server.restore(str(checkpoint.folder))
    return replace(state, **values)


def _remember(
    setup: Setup, checkpoint: Checkpoint, holders: dict[str, np.ndarray]
) -> None:
    """Read back what the channel has kept.

    Its parts ask for it by name and kind, and refuse what does not belong to them.
    """
    memory, clients = setup.federation.channel.memory, setup.federation.clients
    for name in checkpoint.names(f"common.{CHANNEL}"):
        memory.shared[name.removeprefix(f"common.{CHANNEL}")] = _numbers(
            checkpoint, name
        )
    # Every rank has kept the same names, so the first one's files tell them.
    first = min(holders)
    for name in checkpoint.names(f"{first}.{CHANNEL}"):
        kept = name.removeprefix(f"{first}.{CHANNEL}")
        memory.rows[kept] = _entries(checkpoint, kept, holders, clients)


def _entries(
    checkpoint: Checkpoint,
    kept: str,
    holders: dict[str, np.ndarray],
    clients: np.ndarray,
) -> torch.Tensor:
    """Return the entries of this rank's clients, whichever ranks wrote them."""
    found: torch.Tensor | None = None
    for rank, theirs in holders.items():
        name = f"{rank}.{CHANNEL}{kept}"
        entries = _numbers(checkpoint, name)
        if found is None:
            found = entries.new_empty(len(clients), *entries.shape[1:])
        alike = entries.shape[1:] == found.shape[1:] and entries.dtype == found.dtype
        if entries.shape[:1] != (len(theirs),) or not alike:
            held = f"{entries.dtype} of shape {tuple(entries.shape)}"
            raise checkpoint.refusal(name, held)
        # Clients may have moved since: each row is found by its client's id.
        here = np.isin(clients, theirs)
        positions = np.searchsorted(theirs, clients[here])
        found[torch.from_numpy(here)] = entries[torch.from_numpy(positions)]
    assert found is not None
    return found


def _numbers(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """Read an array, whose type must be known to torch."""
    array = checkpoint.read_any(name)
    try:
        return torch.from_numpy(array)
    except TypeError:
        raise checkpoint.refusal(name, str(array.dtype)) from None


def _holders(checkpoint: Checkpoint, clients: np.ndarray) -> dict[str, np.ndarray]:
    """Return the client ids of each rank that wrote the checkpoint.

    Refuse the checkpoint unless all of `clients` are among them.
    """
    # Files are called worker-RANK.FIELD.npy.
    ranks = {name.partition(".")[0] for name in checkpoint.names("worker-")}
    holders = {}
    for rank in sorted(ranks):
        ids = checkpoint.read(f"{rank}.clients", clients.dtype, [None])
        holders[rank] = ids
    missing = clients
    for ids in holders.values():
        # Rows are looked up by bisection.
        if not (np.diff(ids) > 0).all():
            raise checkpoint.refusal("worker-0.clients", "other clients")
        missing = np.setdiff1d(missing, ids)
    if not holders or len(missing):
        raise checkpoint.refusal("worker-0.clients", "other clients")
    return holders


def _rows_of_clients(
    setup: Setup,
    checkpoint: Checkpoint,
    field: Field[Any],
    holders: dict[str, np.ndarray],
    like: torch.Tensor,
    dtype: np.dtype[Any],
) -> np.ndarray:
    """Return the rows of this rank's clients, whichever ranks wrote them."""
    fed = setup.federation
    widths: Sequence[int] = like.shape[1:2]
    if field.metadata.get("generated"):
        # These columns do not exist until the server's model has been trained.
        widths = [0, len(fed.generated)]
    found: np.ndarray | None = None
    # One rank's rows at a time: all of them may exceed a node's memory.
    for rank, theirs in holders.items():
        name = _stored_name(checkpoint, rank, field.name)
        rows = checkpoint.read(name, dtype, [len(theirs), None])
        width = rows.shape[1]
        if found is None:
            found = np.empty((len(fed.clients), width), dtype)
        if width != found.shape[1] or width not in widths:
            raise checkpoint.refusal(name, f"rows of {count(width, 'column')}")
        here = np.isin(fed.clients, theirs)
        positions = np.searchsorted(theirs, fed.clients[here])
        found[here] = rows[positions]
    assert found is not None
    return found


def _stored_name(checkpoint: Checkpoint, rank: str, field: str) -> str:
    """Return the name of a rank's array of a field, perhaps an older one."""
    name = f"{rank}.{field}"
    older = f"{rank}.{OLDER_NAMES.get(field)}"
    stored = checkpoint.names(f"{rank}.")
    return older if name not in stored and older in stored else name
