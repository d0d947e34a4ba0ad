"""Dropout that a module calls as a function: `F.dropout`, and within
`F.scaled_dot_product_attention`.

There is no layer that could be replaced. Instead, the calls of a training pass are
caught and numbered, and draw from the clients' keys, just as dropout layers do.
"""

from collections.abc import Callable
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hpcfed.models.stacked_layer import Batch
from hpcfed.models.stacked_layers import dropped


class FunctionalDropout(TorchFunctionMode):
    """Catches such calls during one training pass."""

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

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return self._dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

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
