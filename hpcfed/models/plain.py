"""Calls a network of any module, one client after another."""

import copy
import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcfed.models.forward import CaughtCalls, Forward
from hpcfed.models.layout import Changes, Layout, uncounted
from hpcfed.models.own import answers
from hpcfed.models.stacked_layer import Batch
from hpcfed.models.stacked_layers import StackedDropout
from hpcfed.models.stacking import Names
from hpcfed.runtime import accelerator


class PlainNetwork(Forward):
    """Calls a network unchanged, for a stack of one.

    Dropout layers draw the same numbers as in a stacked network. If a module draws
    torch's own random numbers, it is seeded in every step, from the client's key.
    """

    def __init__(
        self,
        network: nn.Module,
        layout: Layout,
        *,
        draws: bool,
        drops: int = 0,
        bf16: bool = False,
    ) -> None:
        """`drops`: functional dropout calls in a training pass."""
        self._bf16 = bf16
        self._draws = draws
        self._buffers = [e for e in layout.entries if not e.trainable]
        self._changes = Changes()
        batch = Batch()
        names = Names.of(network, layout)
        own = copy.deepcopy(network)
        numbers = itertools.count()
        _replace_dropout(own, batch, numbers)
        super().__init__(own, names, batch, layers=next(numbers), drops=drops)
        # The last key of a step seeds what the module draws itself.
        self.random_layers += draws
        # Seeding happens on the host, which cannot be captured.
        self.captures = not draws

    def _outputs(self, tensors: dict[str, Tensor], x: Tensor, like: Tensor) -> Tensor:
        assert len(like) == 1, "one client at a time"
        own = {name: tensor[0] for name, tensor in tensors.items()}
        for e in self._buffers:
            own[e.name] = e.taken(uncounted(own[e.name]))
        # functional_call puts buffers that the module assigns anew into `own`;
        # comparing both tables finds them.
        taken = dict(own)
        self._changes.forget()
        autocast = self._bf16 and accelerator.is_gpu(x.device)
        autocasting = torch.autocast(x.device.type, torch.bfloat16, enabled=autocast)
        single = SingleValues() if len(x) == 1 else nullcontext()
        with self._seeding(x.device), self._catching_drops(), single, autocasting:
            # Steps gather channels-last images, but a module may want to view them.
            x = x.contiguous()
            y: Tensor = answers(torch.func.functional_call(self._network, own, x))
        for e in self._buffers if self._network.training else ():
            tensor = tensors[e.name][0]
            self._changes.note(e, tensor, taken[e.name], own[e.name])
        return y

    def _seeding(self, device: torch.device) -> AbstractContextManager[object]:
        if not self._draws:
            return nullcontext()
        keys = self._batch.keys
        # Numbers drawn in evaluation must not depend on earlier draws.
        return _seeded(0 if keys is None else int(keys[-1]), device)

    def join(self) -> None:
        """Write the buffers that the module has changed into the rows."""
        self._changes.write()


class SingleValues(CaughtCalls):
    """Lets batch norm take one value per channel, which torch refuses: the value is its
    own mean, its variance is 0, and so is what the running variance is mixed with.

    So it is in a stack, where others have more values at the same time.
    """

    instead: ClassVar = {F.batch_norm: "_batch_norm"}

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Any:
        norm = partial(
            F.batch_norm,
            running_mean=running_mean,
            running_var=running_var,
            weight=weight,
            bias=bias,
            training=training,
            momentum=momentum,
            eps=eps,
        )
        if not training or input.numel() != input.shape[1]:
            return norm(input)
        # Twice the same value has this mean, and these variances.
        return norm(torch.cat([input, input]))[:1]


def _replace_dropout(module: nn.Module, batch: Batch, numbers: Iterator[int]) -> None:
    for name, child in module.named_children():
        if type(child) is nn.Dropout:
            setattr(module, name, StackedDropout(child, batch, "", numbers))
        else:
            _replace_dropout(child, batch, numbers)


@contextmanager
def _seeded(key: int, device: torch.device) -> Iterator[None]:
    """Seed torch's own generators, and restore them afterwards."""
    with accelerator.keeping_draws(device):
        # Keys are signed, seeds are not negative.
        torch.manual_seed(key & 0x7FFFFFFFFFFFFFFF)
        yield
