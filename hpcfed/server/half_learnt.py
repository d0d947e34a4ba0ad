"""What a run that is stopped or killed keeps of a learning: `learning.h5` in its folder.

It holds the network in training (parameters in float32, moments, buffers), the networks
that are ready, the losses so far, and what the learning has found out before. A resumed
run repeats the round whose learning was cut off, and the learning goes on from there.
Like all files of the server it holds only numbers and JSON.

All server ranks save, stop and go on after the same step: they ask each other about once
a second.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from pydantic import TypeAdapter
from torch import Tensor

from hpcfed.errors import Halted, UserError, one_line, remark
from hpcfed.results.as_json import parsed
from hpcfed.results.publish import replacing_hdf5
from hpcfed.results.safe import Reader, check_file, reading
from hpcfed.runtime.signals import WritingPace
from hpcfed.server.identity import ALIKE, Identity, distance
from hpcfed.server.storage import MOST_BYTES, put
from hpcfed.server.trainer import Parts, Trainer

FORMAT, SCHEMA = "hpcfed learning", 1
SECONDS = 1.0
"""About how often ranks ask each other whether to save or to stop: an exchange of a few
numbers, which takes far less than a hundredth of that.
"""
Asked = Callable[[], bool]
"""Tells whether this rank knows that the run is to stop."""
AllGather = Callable[[Any], list[Any]]
"""Returns every server rank's value."""


@dataclass(frozen=True)
class TrainingCost:
    """What the report says of a network, beside its losses."""

    seconds: float
    memory: float
    """Bytes that training took; NaN if not on a GPU."""


@dataclass(frozen=True)
class LearningFacts:
    """What a file says of a learning, beside arrays."""

    identity: dict[str, Any]
    network: str
    """The one in training."""
    step: int
    """Steps that it has made."""
    seconds: float
    """That these took."""
    ready: dict[str, TrainingCost]
    """The networks that are ready."""


@dataclass(frozen=True)
class Ready:
    """A network that has ended its training in this learning."""

    tensors: Callable[[], Mapping[str, Tensor]]
    losses: np.ndarray
    figures: TrainingCost


@dataclass(frozen=True)
class HalfTrained:
    """A network whose training goes on."""

    done: int
    losses: np.ndarray
    seconds: float
    """That these steps took."""
    state: Parts


@dataclass(frozen=True)
class Fitting:
    """The training of a network, as far as it has come."""

    network: str
    trainer: Trainer
    steps: int
    parameters: int
    losses: Callable[[int, Tensor], np.ndarray]
    """Returns the mean over ranks of the losses of this number of steps, which all ranks
    ask for together.
    """
    seconds: Callable[[], float]


class HalfLearnt:
    """Saves a learning while it goes on, and finds what an earlier run has saved of it.

    The calls are collective over the server's ranks.
    """

    def __init__(
        self,
        path: Path | None = None,
        identity: Identity | None = None,
        *,
        rank: int = 0,
        every: float = 0.0,
        asked: Asked = lambda: False,
        allgather: AllGather = lambda value: [value],
    ) -> None:
        """`path`: the file; None: nothing is kept. `every`: seconds between two savings;
        0: do not save, and do not stop.
        """
        self.saving = 0.0
        """Seconds that saving has taken."""
        self._path = path
        self._identity = identity
        self._rank = rank
        self._every = every
        self._asked = asked
        self._allgather = allgather
        self._pace = WritingPace(every)
        self._found: LearningFacts | None = None
        """Facts of the file that this learning goes on from; None if it begins anew."""
        self._file: Reader | None = None
        self._open = ExitStack()
        self._ready: dict[str, Ready] = {}
        self._once: dict[str, Tensor] = {}
        self._sketch: Tensor | None = None
        self._told = False
        if path is not None and any(allgather(path.exists())):
            self._look(path)

    # Going on

    def _look(self, path: Path) -> None:
        """Find what is there of this learning, or say why it begins anew."""
        sketch = self._sketched()
        why = ""
        found: LearningFacts | None = None
        try:
            found = self._checked(path, sketch.numpy())
            self._file = self._open.enter_context(reading(path, most=MOST_BYTES))
        except ValueError as error:
            why = str(error).partition("\n")[0]
        except Exception as error:
            # A damaged file makes libhdf5 and h5py raise anything.
            why = one_line(error)
        reasons = [reason for reason in self._allgather(why) if reason]
        if not reasons:
            self._found = found
        elif self._rank == 0:
            remark(f"server: the learning begins anew: {path}: {reasons[0]}")

    def _checked(self, path: Path, sketch: np.ndarray) -> LearningFacts:
        """Return the facts of a file of this learning; raise an exception over any
        other.
        """
        assert self._identity is not None
        check_file(path, MOST_BYTES)
        with reading(path, most=MOST_BYTES) as file:
            attributes = file.facts()
            if (attributes.get("format"), attributes.get("schema")) != (FORMAT, SCHEMA):
                raise ValueError("it is of another version")
            written = parsed(file.text("facts"))
            for name, fact in self._identity.facts.items():
                if written["identity"][name] != fact:
                    raise ValueError(f"it is of another learning: its {name} differ")
            found = TypeAdapter(LearningFacts).validate_python(written)
            self._check_losses(file.within("losses"), found)
            kept = file.within("bank").numbers("sketch", sketch.shape)
            if not distance(kept, sketch) <= ALIKE:
                raise ValueError("it is of another learning: its uploads differ")
        with reading(path, most=MOST_BYTES) as file:
            # Checksums are compared where numbers are read. So do that before any is
            # used.
            for name in file.names():
                if name != "facts":
                    _read_all(file.within(name))
        return found

    def _check_losses(self, losses: Reader, found: LearningFacts) -> None:
        """Refuse steps that the learning does not have, and losses of others."""
        assert self._identity is not None
        steps: dict[str, int] = self._identity.facts["steps"]
        if not 0 < found.step < steps.get(found.network, 0):
            raise ValueError(f"step {found.step} of {found.network} is impossible")
        losses.numbers(found.network, (found.step,))
        for network in found.ready:
            losses.numbers(network, (steps.get(network, 0),))

    def once(
        self, name: str, make: Callable[[], Mapping[str, Tensor]]
    ) -> dict[str, Tensor]:
        """Return what the learning has found out before its first step: as saved, or as
        made now. Networks are trained on it, and rounding could make it quite another.
        """
        if self._found is not None:
            assert self._identity is not None
            device = self._identity.bank.device
            made = {key: one.to(device) for key, one in self._read("once", name)}
        else:
            # In the order of a file: then sums over them are the same, to the bit.
            made = {key: one.contiguous() for key, one in make().items()}
        for key, tensor in made.items():
            self._once[f"once/{name}/{key}"] = tensor
        return made

    def ready(self, network: str) -> Ready | None:
        """Return the network if an earlier run has ended its training."""
        found = self._found
        if found is None or network not in found.ready:
            return None
        tensors = dict(self._read("ready", network))
        return Ready(lambda: tensors, self._losses(network), found.ready[network])

    def begun(self, network: str) -> HalfTrained | None:
        """Return how far an earlier run has trained the network, and say it."""
        found = self._found
        if found is None or found.network != network:
            return None
        if self._rank == 0:
            steps = found.identity["steps"][network]
            where = f"step {found.step} of {steps} ({network})"
            remark(f"server: learning resumed at {where}")
        losses = self._losses(network)
        return HalfTrained(found.step, losses, found.seconds, self._part)

    def _part(self, kind: str, name: str) -> Tensor:
        assert self._file is not None
        return _tensor(self._file.within("state").within(kind), name)

    def _losses(self, network: str) -> np.ndarray:
        assert self._file is not None
        return _tensor(self._file.within("losses"), network).numpy()

    def _read(self, group: str, name: str) -> Iterator[tuple[str, Tensor]]:
        assert self._file is not None
        reader = self._file.within(group).within(name)
        for key in reader.names():
            yield key, _tensor(reader, key)

    # Saving

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Turn an error over what the file has for a network into one line."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, KeyError) as error:
            raise UserError(
                f"{self._path} does not fit the server's networks: {one_line(error)}; "
                "remove it to begin the learning anew"
            ) from None

    def note_ready(self, network: str, ready: Ready) -> None:
        """Remember a network that has ended its training."""
        self._ready[network] = ready

    def begin(self, done: int) -> None:
        """Begin to train a network that has made this number of steps."""
        self._asked_after = self._next = done
        self._asked_at = time.monotonic()

    def after_step(self, training: Fitting, done: int, losses: Tensor) -> None:
        """Save the learning if it is time; raise Halted if the run is to stop."""
        if not self._every or done < self._next or done >= training.steps:
            return
        stops, due = self._agree(done)
        if stops or due:
            begin = time.perf_counter()
            with self._pace.writing():
                self._save(training, done, losses)
            self.saving += time.perf_counter() - begin
        if stops:
            if self._rank == 0:
                where = f"step {done} of {training.steps} ({training.network})"
                remark(f"server: learning stopped at {where}")
            raise Halted

    def _agree(self, done: int) -> tuple[bool, bool]:
        """Return whether to stop and whether to save, the same on all ranks, and choose
        the step after which to ask again.
        """
        seconds = max(time.monotonic() - self._asked_at, 1e-9)
        # Twice as many at most: the first steps take longer than others.
        steps = int((done - self._asked_after) * min(2.0, SECONDS / seconds))
        answers = self._allgather((self._asked(), self._pace.is_due, max(1, steps)))
        # The first rank's clock decides for all.
        _, due, steps = answers[0]
        self.begin(done)
        self._next = done + steps
        return any(asked for asked, *_ in answers), due

    def _save(self, training: Fitting, done: int, losses: Tensor) -> None:
        """Write the file. If the disk refuses it, say so once: the last one stays."""
        assert self._identity is not None
        parts = self._parts(training)
        facts = LearningFacts(
            identity=dict(self._identity.facts),
            network=training.network,
            step=done,
            seconds=training.seconds(),
            ready={name: ready.figures for name, ready in self._ready.items()},
        )
        means = {name: ready.losses for name, ready in self._ready.items()}
        means[training.network] = training.losses(done, losses)
        sketch = self._sketched()
        # Parameters and two moments, in float32.
        size = 12 * training.parameters
        try:
            if self._rank == 0:
                self._write(facts, sketch, means, parts, size)
        except OSError as error:
            if not self._told:
                remark(f"server: cannot save how far it has learnt: {one_line(error)}")
            self._told = True
        finally:
            # Parts are collective: other ranks wait for this one.
            deque(parts, maxlen=0)

    def _sketched(self) -> Tensor:
        assert self._identity is not None
        if self._sketch is None:
            self._sketch = self._identity.sketch()
        return self._sketch

    def _parts(self, training: Fitting) -> Iterator[tuple[str, Tensor]]:
        # One tensor at a time: all together may not fit beside the network.
        for kind, name, tensor in training.trainer.state():
            yield f"state/{kind}/{name}", tensor
        for network, ready in self._ready.items():
            for name, tensor in ready.tensors().items():
                yield f"ready/{network}/{name}", tensor
        yield from self._once.items()

    def _write(
        self,
        facts: LearningFacts,
        sketch: Tensor,
        losses: Mapping[str, np.ndarray],
        parts: Iterator[tuple[str, Tensor]],
        size: int,
    ) -> None:
        assert self._path is not None
        with replacing_hdf5(self._path, size) as there, h5py.File(there, "w") as file:
            file.attrs.update(format=FORMAT, schema=SCHEMA)
            file["facts"] = json.dumps(asdict(facts), indent=1)
            put(file, "bank/sketch", sketch)
            for name, values in losses.items():
                put(file, f"losses/{name}", torch.from_numpy(values))
            for name, tensor in parts:
                put(file, name, tensor)

    def close(self) -> None:
        """Close the file: everything has been read."""
        self._open.close()

    def end(self) -> None:
        """Remove what was saved: the learning is over."""
        self.close()
        if self._path is not None and self._rank == 0:
            self._path.unlink(missing_ok=True)


def _tensor(reader: Reader, name: str) -> Tensor:
    return torch.from_numpy(reader.numbers(name, reader.shape(name)))


def _read_all(reader: Reader) -> None:
    for name in reader.names():
        try:
            _read_all(reader.within(name))
        except ValueError:
            reader.numbers(name, reader.shape(name))
