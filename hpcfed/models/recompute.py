"""Activation checkpointing: a block keeps only what enters it, and is computed again when
the backward pass comes to it. That takes a third more arithmetic, and far less memory.
"""

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hpcfed.models.forward import FunctionalDropout

Caught = Callable[[], FunctionalDropout | None]
"""Returns what catches the dropout calls of the current pass, if anything does."""


_Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def recompute(blocks: Iterable[nn.Module], caught: Caught) -> None:
    """Let blocks compute their activations again, in place."""
    for block in blocks:
        block.forward = _Recomputed(block, caught)


class _Recomputed:
    """Calls a block, and calls it again in the backward pass."""

    def __init__(self, block: nn.Module, caught: Caught) -> None:
        self._block = block
        self._forward = block.forward
        self._caught = caught
        self._inside = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._inside or not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        # Clients' tensors are in the block only while the pass goes forward.
        tensors: dict[str, Tensor] = {}
        tensors.update(self._block.named_parameters(remove_duplicate=False))

        def run(*args: Any, **kwargs: Any) -> Any:
            self._inside = True
            try:
                return torch.func.functional_call(self._block, tensors, args, kwargs)
            finally:
                self._inside = False

        return checkpoint(
            run,
            *args,
            use_reentrant=False,
            # Dropout draws from keys. Asking for torch's state would end a capture.
            preserve_rng_state=False,
            context_fn=self._contexts,
            **kwargs,
        )

    def _contexts(self) -> _Contexts:
        """Return what surrounds the block now, and when it is computed again."""
        caught = self._caught()
        if caught is None:
            return nullcontext(), nullcontext()
        # Calls of dropout have the same numbers again.
        again = copy.copy(caught)
        return nullcontext(), again
