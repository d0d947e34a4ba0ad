"""Random numbers of the generators that everyone shares: torch's, numpy's and Python's.

hpcfed draws from none of them: see `randomness`. A user's function may. So they are
seeded before it, and afterwards are as they were. Several runs of this process may be
within such functions and take turns; then each has numbers of its own.
"""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand

from hpcfed.runtime import accelerator

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
