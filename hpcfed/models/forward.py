"""The common interface of the ways to call a network for many clients."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from math import sqrt
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hpcfed.kernels import linear
from hpcfed.models.stacked_layer import Batch
from hpcfed.models.stacked_layers import dropped
from hpcfed.models.stacking import Names, SharedTensors

# Dropout that a module calls as a function: `F.dropout`, and within
# `F.scaled_dot_product_attention`.
#
# There is no layer that could be replaced. Instead, the calls of a training pass are
# caught and numbered, and draw from the clients' keys, just as dropout layers do.


class CaughtCalls(TorchFunctionMode):
    """Calls a method of its own in place of some of torch's functions."""

    instead: ClassVar[dict[Callable[..., Any], str]]
    """Names of the methods, by torch's functions."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in self.instead:
            func = getattr(self, self.instead[func])
        return func(*args, **(kwargs or {}))


class FunctionalDropout(CaughtCalls):
    """Catches such calls during one training pass."""

    instead: ClassVar = {
        F.dropout: "_dropout",
        F.scaled_dot_product_attention: "_attention",
    }

    def __init__(
        self, batch: Batch, *, first: int, out: Callable[..., Any] | None = None
    ) -> None:
        """`first` is the number of dropout layers, whose keys come first. `out` calls a
        function for all clients at once, if the module sees one client's tensors.
        """
        super().__init__()
        self._batch = batch
        self._first = first
        self._out = out
        self.calls = 0
        """Calls that drop something."""

    def _dropout(
        self,
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Any:
        # Never in place: the result is the same, and no saved tensor changes.
        return self._drop(input, p) if training and p else input

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        if not dropout_p:
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask,
                is_causal=is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        # torch's fused attention draws its own numbers, so attention is spelled out
        # here.
        key = _repeated(key, query, enable_gqa)
        value = _repeated(value, query, enable_gqa)
        weights = _weights(query, key, attn_mask, is_causal, scale)
        return self._drop(weights, dropout_p) @ value

    def _drop(self, x: Tensor, p: float) -> Any:
        number = self.calls
        self.calls += 1
        if self._batch.keys is None:
            return x
        of_calls = self._batch.keys[self._first :]
        # Depending on its data, a module may make more calls than in the trial.
        keys = of_calls[number % len(of_calls)]
        if self._out is None:
            return dropped(x, keys, p)
        return self._out(lambda by_client: dropped(by_client, keys, p), x)


def _weights(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Return attention's weights [..., queries, keys], softmax(Q Kᵀ · scale + mask)."""
    scale = 1 / sqrt(query.shape[-1]) if scale is None else scale
    scores = scale * query @ key.transpose(-2, -1)
    if is_causal:
        mask = torch.ones(
            scores.shape[-2:], dtype=torch.bool, device=scores.device
        ).tril()
    if mask is None:
        return scores.softmax(-1)
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    else:
        scores = scores + mask
    # A query that may attend to nothing gets zeros, as in torch.
    nothing = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(nothing, 0).softmax(-1)
    return weights.masked_fill(nothing, 0)


def _repeated(heads: Tensor, query: Tensor, enable_gqa: bool) -> Tensor:
    """Repeat heads to the query's number, if several queries share one."""
    if not enable_gqa:
        return heads
    return heads.repeat_interleave(query.shape[-3] // heads.shape[-3], -3)


class Forward:
    """A network that is called with the tensors of many clients.

    A subclass must not allow what it does not know about its module. By default,
    weights come in the rows' type, and only the engine changes them.
    """

    capture_may_fail = True
    """Whether only a trial shows that a step cannot be captured."""
    masked = False
    """Whether it must know which slots hold samples."""
    takes_halves = False
    """Whether its kernels may take bounded gradients in halves."""
    causal = False
    """Whether outputs at the first positions of texts depend on these alone, in
    evaluation.
    """
    causal_in_training = False
    """Whether they depend on these alone in training, too. Dropout draws a number for
    every position, so that a longer text would draw others.
    """
    over_halves = False
    """Whether clients share a frozen network that computes in bfloat16."""

    def __init__(
        self, network: nn.Module, names: Names, batch: Batch, *, layers: int, drops: int
    ) -> None:
        """`layers`: number of the network's dropout layers. `drops`: functional dropout
        calls in a training pass.
        """
        self.captures = True
        """Whether a step on a GPU can be captured and replayed."""
        self.random_layers = layers + drops
        """Layers and calls that draw random numbers in training."""
        # As every loop does before its first step: a module's own `train` may keep layers
        # in evaluation, such as batch norm with fixed statistics.
        self._network = network.train()
        self._shared = SharedTensors(network, names)
        self._tied = names.tied
        self._batch = batch
        self._layers = layers
        self._drops = drops

    def __call__(
        self,
        tensors: dict[str, Tensor],
        x: Tensor,
        *,
        training: bool = False,
        valid: Tensor | None = None,
        keys: Tensor | None = None,
        sinks: dict[str, Tensor] | None = None,
        halves: dict[str, Tensor] | None = None,
        updates: dict[str, linear.Update] | None = None,
        bounded: bool = False,
        widest: bool = False,
    ) -> Tensor:
        """Pass [clients · slots, …] forward through tensors [clients, …].

        Gradients of a tensor may be written to its sink, in the shape of the tensor,
        instead of new memory; they are complete after `join`. `halves` are the tensors
        that `halved` names, in bfloat16: layers need not round them. Weights named in
        `updates` update themselves in the backward pass and have no gradient. Gradients
        of the outputs are `bounded` if they are at most 1: then kernels may take them
        in halves. `widest`: no step has more slots.
        """
        like = _like(tensors)
        batch = self._batch
        batch.num_clients = len(like)
        batch.slots = len(x) // len(like)
        batch.valid = valid
        batch.keys = keys
        # A copy, because layers remove their sinks. Tied weights get several gradients,
        # which autograd adds up.
        batch.sinks = _without(sinks or {}, self._tied)
        batch.halves = halves or {}
        batch.updates = updates or {}
        batch.bounded = bounded and self.takes_halves
        batch.widest = widest
        self._shared.move(like, halves=self.over_halves)
        # This walks over all modules, so call it only on a change.
        if self._network.training != training:
            self._network.train(training)
        y = self._outputs(tensors, x, like)
        # In evaluation nothing may change either, but checking every pass would cost
        # time.
        if training:
            self._shared.check()
        # A network may answer in bfloat16; losses need the rows' type, but that of
        # tokens, whose logits are too large for a copy.
        if training and self.over_halves and y.dim() == 3:
            return y
        return y.to(like.dtype)

    def _outputs(self, tensors: dict[str, Tensor], x: Tensor, like: Tensor) -> Tensor:
        """Return the module's outputs; `like` is a tensor of the rows' own kind."""
        raise NotImplementedError

    def _catching_drops(
        self, out: Callable[..., Any] | None = None
    ) -> AbstractContextManager[object]:
        """Let functional dropout calls draw from the clients' keys."""
        if self._drops and self._network.training:
            return FunctionalDropout(self._batch, first=self._layers, out=out)
        return nullcontext()

    def copies(self, like: Tensor) -> int:
        """Return how many copies of a row to use as clients when evaluating it."""
        return 1

    def halved(self, clients: int, device: torch.device) -> set[str]:
        """Return the weights that may be bfloat16: those that only layers use."""
        return set()

    def updating(self, tensors: dict[str, Tensor], slots: int) -> list[str]:
        """Return the weights that update themselves in a step; none by default."""
        return []

    def join(self) -> None:
        """Finish what a pass leaves for after the backward pass: gradients that go to
        sinks, and buffers that the module has changed.
        """
        self._batch.branch.join()


def _like(tensors: dict[str, Tensor]) -> Tensor:
    """Return a tensor of the rows' own type; weights may come in bfloat16."""
    for tensor in tensors.values():
        if tensor.dtype != torch.bfloat16:
            return tensor
    # Only float32 is ever rounded to it.
    clients = len(next(iter(tensors.values())))
    return torch.empty(clients, device=tensor.device)


def _without(table: dict[str, Tensor], names: set[str]) -> dict[str, Tensor]:
    """Return a copy of a table without some names."""
    return {name: tensor for name, tensor in table.items() if name not in names}
