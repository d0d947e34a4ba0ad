"""Going on with a run that was stopped: its state is written down every some rounds,
and read back by client.

Random numbers are keyed by round and client, so nothing but the method's state, the
server's and the results must be kept. Rows are looked up by the ids of clients: any
number of ranks can go on.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpcfed.errors import UserError, count, no_checkpoint
from hpcfed.experiment.assemble import Setup
from hpcfed.record import checkpoints
from hpcfed.record.checkpoints import Checkpoint
from hpcfed.record.reading import read_run
from hpcfed.record.results import ResultsWriter
from hpcfed.runtime.signals import Stop

Say = Callable[[str], None]


def save(
    setup: Setup, folder: Path, rounds: int, state: Any, results: ResultsWriter | None
) -> None:
    """A checkpoint after so many rounds; the same call on every worker, who all know
    then that it is whole.
    """
    check_shared(setup, state)
    there, rank = checkpoints.place(folder, rounds), setup.world.role_rank
    if results is not None:
        results.publish()
        checkpoints.prepare(there)
    setup.collectives.barrier()
    parts = [
        checkpoints.write(there, f"worker-{rank}.clients", setup.federation.clients)
    ]
    for field in fields(state):
        value = getattr(state, field.name)
        if field.metadata.get("fixed"):
            continue
        if field.metadata.get("owned"):
            parts.append(
                checkpoints.write(there, f"worker-{rank}.{field.name}", _array(value))
            )
        elif results is not None:
            parts.append(
                checkpoints.write(there, f"common.{field.name}", _array(value))
            )
    if setup.settings.options.has_server:
        kept = setup.federation.server.store(str(there))
        parts += kept if results is not None else ()
    everyones = setup.collectives.gather(parts)
    if everyones is not None:
        record = checkpoints.copy(there, folder / checkpoints.RECORD)
        # One seed may be a checkpoint ahead when all are killed. Each keeps one more, so
        # that a common round is left even if a checkpoint is then damaged.
        keep = checkpoints.KEPT + (setup.stacked > 1)
        written = [record, *(part for own in everyones for part in own)]
        checkpoints.complete(there, rounds, written, keep=keep)
    setup.collectives.barrier()


def load(setup: Setup, checkpoint: Checkpoint, state: Any) -> Any:
    """The state as it was; `state` is the method's first, which says of what kind each
    tensor is.
    """
    fed = setup.federation
    held = _held(checkpoint, fed.clients)
    values: dict[str, torch.Tensor] = {}
    for field in fields(state):
        like, metadata = getattr(state, field.name), field.metadata
        if metadata.get("fixed"):
            continue
        dtype = _array(like.new_empty(0)).dtype
        if metadata.get("owned"):
            widths = (
                [0, len(fed.generated)]
                if metadata.get("generated")
                else like.shape[1:2]
            )
            rows = _of_clients(checkpoint, field.name, held, fed.clients, dtype, widths)
        else:
            rows = checkpoint.read(f"common.{field.name}", dtype, like.shape)
        if "row_of" in metadata and not (
            rows.min() >= 0 and rows.max() < len(getattr(state, metadata["row_of"]))
        ):
            raise checkpoint.refusal(
                f"common.{field.name}", "numbers of rows that there are not"
            )
        values[field.name] = torch.from_numpy(rows).to(like.device)
    if setup.settings.options.has_server:
        setup.federation.server.restore(str(checkpoint.folder))
    return replace(state, **values)


def _held(checkpoint: Checkpoint, clients: np.ndarray) -> dict[str, np.ndarray]:
    """Which clients each rank had that wrote the checkpoint, these among them."""
    ranks = sorted({name.partition(".")[0] for name in checkpoint.names("worker-")})
    held = {
        rank: checkpoint.read(f"{rank}.clients", clients.dtype, [None])
        for rank in ranks
    }
    ascending = all((np.diff(ids) > 0).all() for ids in held.values())
    if (
        not held
        or not ascending
        or not np.isin(clients, np.concatenate(list(held.values()))).all()
    ):
        raise checkpoint.refusal("worker-0.clients", "other clients")
    return held


def _of_clients(
    checkpoint: Checkpoint,
    name: str,
    held: dict[str, np.ndarray],
    clients: np.ndarray,
    dtype: np.dtype[Any],
    widths: Sequence[int],
) -> np.ndarray:
    """Rows of these clients, whichever ranks had them; as wide as one of these numbers
    says.
    """
    found: np.ndarray | None = None
    for (
        rank,
        theirs,
    ) in (
        held.items()
    ):  # one after the other: all rows may be more than the memory of a node
        rows = checkpoint.read(f"{rank}.{name}", dtype, [len(theirs), None])
        if found is None:
            found = np.empty((len(clients), rows.shape[1]), dtype)
        if rows.shape[1] != found.shape[1] or rows.shape[1] not in widths:
            raise checkpoint.refusal(
                f"{rank}.{name}", f"rows of {count(rows.shape[1], 'column')}"
            )
        here = np.isin(clients, theirs)
        found[here] = rows[np.searchsorted(theirs, clients[here])]
    assert found is not None
    return found


def _array(tensor: torch.Tensor) -> np.ndarray:
    array: np.ndarray = tensor.detach().cpu().numpy()
    return array


def beginning(
    setup: Setup, runs: Sequence[Path], say: Say, stop: Stop
) -> list[Checkpoint] | None:
    """Checkpoints of all runs after the same round, from which they go on; None where
    they begin anew.

    The same call on every worker. The runs' folders are claimed by now, so nobody else
    changes them.
    """
    config, world = setup.settings.config, setup.world
    found: list[Checkpoint] | None = None
    if world.is_root:
        try:
            found = checkpoints.common(runs, say=say, stopping=lambda: stop.asked)
        except checkpoints.Interrupted:
            stop.agreed = True
        rounds = [] if found or stop.agreed else [_rounds_on_disk(run) for run in runs]
        if any(rounds) and not config.overwrite:
            raise UserError(no_checkpoint(config.resume, max(rounds)))
    found, stop.agreed = world.role_bcast((found, stop.agreed))
    return found


def _rounds_on_disk(run: Path) -> int:
    """Rounds that a run has recorded; of a damaged record nobody knows."""
    try:
        return read_run(run).rounds_done
    except UserError:
        return 0


def go_on(
    setup: Setup,
    folder: Path,
    found: Checkpoint | None,
    state: Any,
    results: ResultsWriter | None,
    say: Say,
) -> tuple[int, Any]:
    """Rounds that are done and the state after them, from a checkpoint; without one a
    run begins anew.
    """
    if found is None:
        if results is not None:
            checkpoints.discard_after(
                folder, 0
            )  # damaged ones would count as the newest
            results.begin_anew()
        say(f"no checkpoint in {folder}: the run begins anew")
        return 0, state
    if results is not None:
        kept = found.folder / checkpoints.RECORD
        results.restore(
            kept if kept.exists() else folder / checkpoints.RECORD, found.rounds
        )
    setup.federation.resume_after(found.rounds - 1)  # judged if it was the last
    loaded = load(setup, found, state)
    if results is not None:  # nothing has been refused
        checkpoints.discard_after(folder, found.rounds)
    say(f"going on after round {found.rounds}")
    return found.rounds, loaded


def check_shared(setup: Setup, state: Any) -> None:
    """Refuses a state whose shared fields differ between ranks: a checkpoint has only
    one rank's.

    Ranks on different devices may round differently, so that a small difference is
    none.
    """
    if setup.collectives.size == 1:
        return
    shared = {
        f.name: getattr(state, f.name)
        for f in fields(state)
        if not f.metadata.keys() & {"fixed", "owned"}
    }
    own = {name: _array(value) for name, value in shared.items()}
    digests = {
        name: hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()
        for name, array in own.items()
    }
    everyones = setup.collectives.allgather(digests)
    for name in [
        name for name in digests if len({theirs.get(name) for theirs in everyones}) > 1
    ]:
        first = setup.collectives.bcast(own[name])
        if setup.collectives.any_rank(not _close(own[name], first)):
            method = setup.settings.config.method
            raise RuntimeError(
                f"state field {name} of method {method} differs between ranks, so that "
                "no run could go on with it; "
                "mark it OWNED if it has a row per client, otherwise make it the same on all ranks"
            )


def _close(one: np.ndarray, other: np.ndarray) -> bool:
    if one.shape != other.shape or one.dtype.kind != "f":
        return False
    return bool(np.allclose(one, other, rtol=1e-3, atol=1e-6, equal_nan=True))
