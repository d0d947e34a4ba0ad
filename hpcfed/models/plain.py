"""A network of any module at all, one client after another."""

import copy
import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from hpcfed.kernels import linear
from hpcfed.models.functional_dropout import FunctionalDropout
from hpcfed.models.layout import Changes, Layout
from hpcfed.models.own import answers
from hpcfed.models.stacked_layers import Batch, StackedDropout
from hpcfed.models.stacking import Constants, Names


class PlainNetwork:
    """Calls a network as it is, for a stack of one; used as `StackedNetwork` is.

    Dropout layers draw the same numbers as in a stacked network. A module that draws
    torch's own random numbers gets a seed for every step, from the client's key.
    """

    masked = False
    capture_may_fail = True

    def __init__(
        self,
        network: nn.Module,
        layout: Layout,
        *,
        draws: bool,
        drops: int = 0,
        bf16: bool = False,
    ) -> None:
        """`drops`: calls of a training pass that drop by a function."""
        self._bf16 = bf16
        self._batch = Batch()
        names = Names.of(network, layout)
        self._buffers = [e for e in layout.entries if not e.trainable]
        self._changes = Changes()
        self._network = copy.deepcopy(network)
        self._constants = Constants(self._network, names)
        numbers = itertools.count()
        _replace_dropout(self._network, self._batch, numbers)
        self._draws = draws
        self._drops = drops
        self._layers = next(numbers)
        # The last key of a step is the seed of what the module draws itself.
        self.random_layers = self._layers + drops + draws
        self.captures = not draws
        """A seed is set on the host, which cannot be captured."""

    def __call__(
        self,
        tensors: dict[str, Tensor],
        x: Tensor,
        *,
        training: bool = False,
        valid: Tensor | None = None,
        keys: Tensor | None = None,
        sinks: dict[str, Tensor] | None = None,
        updates: dict[str, linear.Update] | None = None,
        bounded: bool = False,
    ) -> Tensor:
        """Pass [slots, …] forward through tensors [1, …]."""
        like = next(iter(tensors.values()))
        assert len(like) == 1, "one client at a time"
        self._batch.keys = keys
        self._constants.move(like)
        if self._network.training != training:
            self._network.train(training)
        own = {name: tensor[0] for name, tensor in tensors.items()}
        for e in self._buffers:
            own[e.name] = e.taken(own[e.name])
        taken = dict(own)
        self._changes.forget()
        autocast = self._bf16 and x.is_cuda
        seeded: AbstractContextManager[object] = nullcontext()
        if self._draws:
            # What is drawn in evaluation depends on nobody who drew before.
            key = 0 if keys is None else int(keys[-1])
            seeded = _seeded(key, x.device)
        caught: AbstractContextManager[object] = nullcontext()
        if self._drops and training:
            caught = FunctionalDropout(self._batch, first=self._layers)
        autocasting = torch.autocast(x.device.type, torch.bfloat16, enabled=autocast)
        with seeded, caught, autocasting:
            # Steps gather images channels-last; a module may want to view them.
            x = x.contiguous()
            y: Tensor = answers(torch.func.functional_call(self._network, own, x))
        if training:
            self._constants.check()
            for e in self._buffers:
                tensor = tensors[e.name][0]
                self._changes.note(e, tensor, taken[e.name], own[e.name])
        return y.to(like.dtype)

    def halved(self, clients: int, device: torch.device) -> set[str]:
        """Let no weight come in bfloat16: a module may use it anywhere."""
        return set()

    def updating(self, tensors: dict[str, Tensor], slots: int) -> list[str]:
        """Let no weight update itself: a module may use it anywhere."""
        return []

    def copies(self, like: Tensor) -> int:
        """Return as how many clients one row is best evaluated."""
        return 1

    def join(self) -> None:
        """Write the buffers that the module has changed into the rows."""
        self._changes.write()


def _replace_dropout(module: nn.Module, batch: Batch, numbers: Iterator[int]) -> None:
    for name, child in module.named_children():
        if type(child) is nn.Dropout:
            setattr(module, name, StackedDropout(child, batch, "", numbers))
        else:
            _replace_dropout(child, batch, numbers)


@contextmanager
def _seeded(key: int, device: torch.device) -> Iterator[None]:
    """Seed torch's own generators, and leave them as they were."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(key & 0x7FFFFFFFFFFFFFFF)
        yield
