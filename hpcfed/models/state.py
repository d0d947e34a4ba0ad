"""What training changes in a user's network besides its weights.

A buffer belongs to the client's row. Anything else that a module remembers between
calls, such as a counter in a plain attribute, has no place there: all clients of a rank
would share it, and a checkpoint would lose it. It is found by calling a copy of the
network several times, and refused by name.
"""

import copy
import hashlib
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hpcfed import plugins
from hpcfed.errors import UserError
from hpcfed.models.layout import idle_counters
from hpcfed.runtime import accelerator, draws

ROUNDINGS = 1e-5
"""Relative difference in float32 that rounding explains."""
MANY = 1_000_000
"""A batch count to give to norms, to see whether anything depends on it."""
ITEMS = 10_000
"""How many items of a list or a dict are checked."""
DEPTH = 6
"""How deep attributes of attributes are checked."""
OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes that every module has: its parameters, buffers, modules and hooks."""

Call = Callable[[nn.Module, Tensor], Tensor]


def keep_state(network: nn.Module, name: str, inputs: Tensor, call: Call) -> None:
    """Make exactly those buffers of a network persistent that training changes.

    Refuse a network that remembers anything else between calls. `call` passes a batch
    forward; half of the inputs make a batch.
    """
    with plugins.one_line_of(f"model {name} cannot be copied"):
        trial = _Trial(copy.deepcopy(network).train(), call)
    other, same = inputs.chunk(2)
    foreign = _foreign_states(network)
    frozen = trial.frozen_sums()
    # This fills caches, and the next call sees what an earlier one leaves.
    earlier = trial.called(other)
    first = trial.called(same)
    # The same inputs, weights, buffers and seed: any difference is hidden state, or
    # depends on the counters of norms, which are set to MANY.
    again = trial.called(same, counted=MANY)
    for kind, state in _foreign_states(network).items():
        if state != foreign[kind]:
            raise UserError(
                f"model {name} draws random numbers of {kind}; draw torch's, which are "
                "seeded by client and step"
            )
    for parameter, total in trial.frozen_sums().items():
        if total != frozen[parameter]:
            raise UserError(
                f"model {name} changes its frozen parameter {parameter} in training, "
                "which all clients share; make it a buffer, which each has for itself"
            )
    changed = _different(first.others, again.others)
    if not changed and not again.gives_as(first):
        if trial.counters and trial.called(same).gives_as(first):
            counters = ", ".join(sorted(trial.counters))
            raise UserError(
                f"model {name} depends on {counters}, which no row holds; count in a "
                "buffer of your own"
            )
        changed = _different(earlier.others, first.others)
    if changed or not again.gives_as(first):
        raise UserError(f"model {name} {_remembered(changed)}")
    _mark(network, name, trial.changed_by(earlier, first), trial.counters)


def keep_no_buffers(network: nn.Module) -> None:
    """Make no buffer persistent, for a network that cannot be called."""
    _mark(network, "", set(), set())


def _remembered(names: list[str]) -> str:
    if not names:
        return (
            "gives other outputs when it is called again in training, with the same "
            "inputs, weights, buffers and seed: hpcfed cannot find what it remembers, such "
            "as a variable of its file that a call changes"
        )
    own = names[0].rpartition(".")[2]
    return (
        f"remembers {', '.join(names)} from call to call in training, which no client "
        f'can keep; make it a buffer of fixed shape: self.register_buffer("{own}", …)'
    )


@dataclass(frozen=True)
class _After:
    """What a call in training has returned and left behind."""

    seen: dict[str, Tensor]
    """Outputs (by an empty name), and buffers that a row can hold."""
    others: dict[str, bytes]
    """Digests of attributes of modules, and of buffers that no row can hold."""

    def gives_as(self, other: "_After") -> bool:
        """Tell whether two calls gave the same, but for threads' rounding."""
        if self.seen.keys() != other.seen.keys():
            return False
        return all(alike(own, other.seen[name]) for name, own in self.seen.items())


class _Trial:
    """A copy of a network that is called repeatedly from the same state."""

    def __init__(self, network: nn.Module, call: Call) -> None:
        self._network = network
        self._call = call
        self._tensors = dict(network.named_buffers())
        self._before = {key: buffer.clone() for key, buffer in self._tensors.items()}
        self._moving: set[str] = set()
        """Buffers that are created in training, or change their shape or type there."""
        self.counters = idle_counters(network) & self._before.keys()
        self.written: set[str] = set()
        """Buffers that were written in place, even if their values did not change."""

    def frozen_sums(self) -> dict[str, str]:
        """Return the sum of each parameter that gets no gradient."""
        found = {}
        for name, parameter in self._network.named_parameters():
            if not parameter.requires_grad:
                # As text: NaN differs from itself.
                found[name] = str(float(parameter.detach().sum(dtype=torch.float64)))
        return found

    @torch.no_grad()
    def called(self, x: Tensor, *, counted: int | None = None) -> _After:
        """Call from the initial buffers; norms have counted `counted` batches."""
        for name, tensor in self._tensors.items():
            if name in self._moving:
                continue
            tensor.copy_(self._before[name])
            if counted is not None and name in self.counters:
                tensor.fill_(counted)
            module, _, own = name.rpartition(".")
            # The module may have assigned another tensor.
            self._network.get_submodule(module)._buffers[own] = tensor
        # torch counts in-place writes there, even those of equal values.
        versions = {name: tensor._version for name, tensor in self._tensors.items()}
        with accelerator.keeping_draws(x.device):
            # Equal draws in every call, so that only what the network remembers makes a
            # difference.
            torch.default_generator.manual_seed(20)
            if accelerator.is_gpu(x.device):
                accelerator.seed(x.device, 20)
            y = self._call(self._network, x.clone())
        for name, tensor in self._tensors.items():
            if tensor._version != versions[name]:
                self.written.add(name)
        seen = {"": y.clone()}
        for name, buffer in self._network.named_buffers():
            before = self._before.get(name)
            kind = None if before is None else (before.shape, before.dtype)
            if kind != (buffer.shape, buffer.dtype):
                self._moving.add(name)
            elif name not in self.counters:
                seen[name] = buffer.clone()
        return _After(seen, self._others())

    def _others(self) -> dict[str, bytes]:
        buffers = dict(self._network.named_buffers())
        found = {name: _digest(buffers[name]) for name in self._moving & buffers.keys()}
        # Modules, parameters and buffers are checked elsewhere.
        known: _Known = {id(module): module for module in self._network.modules()}
        for tensor in (*self._network.parameters(), *buffers.values()):
            known[id(tensor)] = tensor
        for prefix, module in self._network.named_modules():
            for own, value in vars(module).items():
                if own not in OF_TORCH:
                    found[f"{prefix}.{own}".lstrip(".")] = _digest(value, known)
        return found

    def changed_by(self, *calls: _After) -> set[str]:
        """Return the buffers that some call has changed or written to."""
        found = set(self.written)
        for name, before in self._before.items():
            for call in calls:
                if not _equal(call.seen.get(name, before), before):
                    found.add(name)
        return found - self._moving


def _equal(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors hold the same bits: NaN equals itself, too."""
    return _bytes_of(one) == _bytes_of(other)


def alike(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors are equal up to the rounding of threads."""
    if one.is_floating_point() and one.shape == other.shape:
        size = float(one.abs().nan_to_num().max()) if one.numel() else 0.0
        return torch.allclose(
            one, other, rtol=ROUNDINGS, atol=ROUNDINGS * size, equal_nan=True
        )
    return _equal(one, other)


def _different(ours: dict[str, bytes], theirs: dict[str, bytes]) -> list[str]:
    names = sorted(ours.keys() | theirs.keys())
    return [name for name in names if ours.get(name) != theirs.get(name)]


def _mark(network: nn.Module, name: str, changed: set[str], counters: set[str]) -> None:
    """Make changed buffers persistent, so that rows hold them, and the others not.

    A mask or a table of positions is not part of a row: every client would send it, and
    -inf in it would look like divergence.
    """
    for prefix, module in network.named_modules():
        for own, buffer in list(module.named_buffers(recurse=False)):
            full = f"{prefix}.{own}".lstrip(".")
            if full in changed and buffer.is_complex():
                raise UserError(
                    f"model {name}: training changes its buffer {full}, which is "
                    f"{buffer.dtype}; rows hold floats, integers and booleans"
                )
            # Registering a buffer again changes only whether it is persistent.
            if full not in counters:
                module.register_buffer(own, buffer, persistent=full in changed)


def _foreign_states(network: nn.Module) -> dict[str, bytes]:
    """Return the state of generators that are not seeded for clients."""
    found = {
        "Python's module random": _digest(random.getstate()),
        # The generator of numpy.random.rand and similar functions.
        "numpy": _digest(np.random.mtrand._rand.get_state()),
    }
    for name, generator in _own_generators(network).items():
        found[name] = draws.state_of(generator)
    return found


def _own_generators(network: nn.Module) -> dict[str, draws.Generator]:
    """Return the generators that code of a network's modules takes from outside."""
    functions: list[FunctionType] = []
    for kind in {kind for module in network.modules() for kind in type(module).__mro__}:
        # torch draws from its own generator alone, which is seeded.
        if kind.__module__.partition(".")[0] not in ("torch", "builtins"):
            functions += draws.functions_of(kind)
    return draws.taken_from_outside(functions)


_Known = dict[int, object]
"""Objects by their ids. It keeps them alive, so no other object can get such an id."""


def _digest(value: Any, known: _Known | None = None) -> bytes:
    """Return a checksum of whatever an attribute holds, as far as possible.

    `known` are objects to skip.
    """
    found = hashlib.blake2b()
    for piece in _pieces(value, dict(known or {}), DEPTH):
        found.update(piece)
    return found.digest()


def _pieces(value: Any, known: _Known, depth: int) -> Iterator[bytes]:
    yield type(value).__name__.encode()
    if value is None or isinstance(value, int | float | complex | str | bytes):
        yield repr(value).encode()
        return
    # Classes, functions and the like do not change, or it cannot be determined.
    passed = type | FunctionType | BuiltinFunctionType | MethodType | ModuleType
    if isinstance(value, passed) or id(value) in known or not depth:
        return
    known[id(value)] = value
    if isinstance(value, Tensor):
        yield _bytes_of(value)
        return
    if isinstance(value, np.ndarray | np.generic):
        yield str(value.shape).encode()
        yield value.tobytes()
        return
    for item in _items(value):
        yield from _pieces(item, known, depth - 1)


def _items(value: Any) -> Iterator[Any]:
    """Yield the parts of an object."""
    if isinstance(value, draws.Generator):
        yield draws.state_of(value)
    elif isinstance(value, Mapping):
        yield len(value)
        yield from islice(value.items(), ITEMS)
    elif isinstance(value, list | tuple | deque | set | frozenset):
        yield len(value)
        yield from islice(value, ITEMS)
    elif type(value).__module__ == "itertools":
        yield repr(value)
    else:
        yield from getattr(value, "__dict__", {}).items()


def _bytes_of(tensor: Tensor) -> bytes:
    shape = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    try:
        flat = tensor.detach().cpu().flatten().contiguous()
        return shape + flat.view(torch.uint8).numpy().tobytes()
    except (RuntimeError, TypeError):
        # Sparse and other rare kinds have no contiguous bytes.
        return shape
