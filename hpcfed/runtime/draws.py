"""Random numbers of the generators that everyone shares: torch's, numpy's and Python's.

hpcfed draws from none of them: see `randomness`. A user's function may. So they are
seeded before it, and afterwards are as they were. Several runs of this process may be
within such functions and take turns; then each has numbers of its own.
"""

import os
import random
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand

from hpcfed.runtime import accelerator

Generator = (
    torch.Generator | random.Random | np.random.Generator | np.random.RandomState
)
"""A generator that a user's code has made for itself."""
_NUMPYS = np.random.MT19937(0)
"""Takes the place of numpy's own: to put another there takes a hundredth of the time
that its state takes to copy.
"""
_here = threading.local()
"""What the function that this thread is in draws from, if that is seeded."""


@contextmanager
def seeded(number: int, device: torch.device) -> Iterator[None]:
    """Let everything within draw what follows from a number below 2^32."""
    own = _Own(device)
    own.enter()
    try:
        random.seed(number)
        np.random.seed(number)  # noqa: NPY002
        torch.default_generator.manual_seed(number)
        if accelerator.is_gpu(device):
            accelerator.seed(device, number)
        _here.own = own
        yield
    finally:
        _here.own = None
        own.leave()


@contextmanager
def put_aside() -> Iterator[None]:
    """Let others draw within the block, while this thread's function waits."""
    own: _Own | None = getattr(_here, "own", None)
    if own is None:
        yield
        return
    kept = own.states(), np.random.get_state()  # noqa: NPY002
    own.leave()
    try:
        yield
    finally:
        own.enter()
        own.restore(kept[0])
        np.random.set_state(kept[1])  # noqa: NPY002


class _Own:
    """Generators while a function draws from them, and what was there before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: tuple[Any, ...] = ()

    def enter(self) -> None:
        self._before = self.states(), mtrand.get_bit_generator()
        mtrand.set_bit_generator(_NUMPYS)

    def leave(self) -> None:
        states, of_numpy = self._before
        self.restore(states)
        mtrand.set_bit_generator(of_numpy)

    def states(self) -> tuple[Any, ...]:
        """Return the states of all but numpy's."""
        on_gpu = None
        if accelerator.is_gpu(self._device):
            on_gpu = accelerator.generator_state(self._device)
        return random.getstate(), torch.get_rng_state(), on_gpu

    def restore(self, states: tuple[Any, ...]) -> None:
        of_python, of_torch, on_gpu = states
        random.setstate(of_python)
        torch.set_rng_state(of_torch)
        if on_gpu is not None:
            accelerator.restore_generator(self._device, on_gpu)


# Generators that a user's code has made for itself: nobody seeds them.


def state_of(generator: Generator) -> bytes:
    """Return what changes with every draw."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    state: Any
    if isinstance(generator, random.Random):
        state = generator.getstate()
    elif isinstance(generator, np.random.Generator):
        state = generator.bit_generator.state
    else:
        state = generator.get_state()
    with np.printoptions(threshold=sys.maxsize):
        return repr(state).encode()


def taken_from_outside(functions: Iterable[FunctionType]) -> dict[str, Generator]:
    """Return the generators that functions take from outside of them, by name: variables
    of their files, and of functions around them.
    """
    left = list(functions)
    found: dict[str, Generator] = {}
    seen: set[FunctionType] = set()
    while left:
        function = left.pop()
        if function in seen:
            continue
        seen.add(function)
        for name, value in _outside_of(function):
            if isinstance(value, Generator):
                found[name] = value
                continue
            # A function or a class beside it may draw for it.
            for part in functions_of(value):
                if _folder(part) == _folder(function):
                    left.append(part)
    return found


def functions_of(thing: Any) -> list[FunctionType]:
    """Return a function itself, or those that a class defines; none of anything else."""
    parts = vars(thing).values() if isinstance(thing, type) else [thing]
    found = []
    for part in parts:
        holds = isinstance(part, staticmethod | classmethod | MethodType)
        function = part.__func__ if holds else part
        if isinstance(function, FunctionType):
            found.append(function)
    return found


def _outside_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the names in a function's code that stand for something outside of it."""
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
        for name in code.co_names:
            if name not in function.__globals__:
                continue
            value = function.__globals__[name]
            yield name, value
            # As in noise.generator, of a file that is imported as a whole.
            for part in code.co_names if isinstance(value, ModuleType) else ():
                yield f"{name}.{part}", vars(value).get(part)
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        # A name that is defined later has an empty cell.
        with suppress(ValueError):
            yield name, cell.cell_contents


def _folder(function: FunctionType) -> str:
    return os.path.dirname(function.__code__.co_filename)
