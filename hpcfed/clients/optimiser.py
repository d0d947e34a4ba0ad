"""The optimiser of a stack of clients: its rates, its moments and its steps."""

from collections.abc import Callable, Collection
from math import nan

import numpy as np
import torch
from torch import Tensor

from hpcfed.clients.job import Recipe
from hpcfed.kernels import adam, one_pass, sgd
from hpcfed.kernels.adam import AdamRule
from hpcfed.kernels.linear import Update
from hpcfed.kernels.one_pass import Terms
from hpcfed.kernels.pull import Spans
from hpcfed.kernels.sgd import Rule
from hpcfed.models.kernel_layout import KernelLayout
from hpcfed.models.layout import Entry
from hpcfed.runtime.device import on_device


class StackOptimiser:
    """What the steps of a stack need besides rows and gradient.

    All memory stays in place, because captured steps read it. Every local training
    starts with moments of zero.
    """

    def __init__(
        self,
        recipe: Recipe,
        layout: KernelLayout,
        *,
        steps: int,
        rate_each: bool = False,
        like: Tensor,
    ) -> None:
        """Prepare for clients that take at most `steps` steps each; `rate_each`: each
        client has its own learning rate.
        """
        self._recipe = recipe
        self._layout = layout
        self._steps = steps
        self._rate_each = rate_each
        self._like = like
        self._sgd = Rule(
            recipe.momentum, recipe.weight_decay, recipe.clip, recipe.nesterov
        )
        self._adam: AdamRule | None = None
        if recipe.optimiser != "sgd":
            self._adam = AdamRule(
                recipe.beta1,
                recipe.beta2,
                recipe.epsilon,
                recipe.weight_decay,
                decoupled=recipe.optimiser == "adamw",
                clip=recipe.clip,
            )
            self._bias = adam.bias_corrections(self._adam, steps, like)
        # On the device: a captured step must read it there.
        self._lr = like.new_zeros(())
        self._lr_there = nan
        """The rate that `_lr` holds for all clients; NaN: none yet."""
        self._rates: Tensor | None = None
        """[steps, clients], if rates change from step to step."""
        self._moments: list[Tensor] = []

    @property
    def fits_backward(self) -> bool:
        """Whether weights may take their step in the backward pass, layer by layer."""
        # Clipping needs the norm of the whole gradient before the first weight moves.
        return self._adam is None and not self._recipe.clip

    def reserve(self, gradient: Tensor) -> None:
        """Allocate memory for stacks of as many clients as this matrix has rows."""
        self._moments = []
        for _ in range(self._recipe.num_moments):
            self._moments.append(torch.zeros_like(gradient))
        clients = len(gradient)
        self._lr_there = nan
        if self._rate_each:
            self._lr = self._like.new_zeros(clients)
        if self._recipe.schedule is not None:
            self._rates = self._like.new_zeros(self._steps, clients)
            self._current_rates = self._like.new_zeros(1, clients)
            # A view, so that looking up the rates of a step sets `_lr` where a captured
            # step reads it.
            self._lr = self._current_rates[0]

    def load(self, lr: float | Tensor, steps: Callable[[], np.ndarray]) -> None:
        """Take in the learning rate, one or one per client. A schedule also needs each
        client's steps.
        """
        schedule = self._recipe.schedule
        if self._rates is None or schedule is None:
            if isinstance(lr, Tensor):
                self._lr[: len(lr)] = lr
            elif lr != self._lr_there:
                # Usually it is the last round's, and nothing is to be launched.
                self._lr.fill_(lr)
                self._lr_there = lr
            return
        # A client's schedule spans its own steps, independent of the rest of the stack.
        total = on_device(steps(), self._like.device)
        at = torch.arange(self._steps, device=self._like.device)[:, None]
        self._rates[:, : len(total)] = lr * schedule.factors(at, total)

    def begin(self) -> None:
        """Set all moments to zero."""
        for moment in self._moments:
            moment.zero_()

    def begin_step(self, step: Tensor) -> None:
        """Look up the rates of this step, which is a number on the device."""
        if self._rates is not None:
            torch.index_select(self._rates, 0, step, out=self._current_rates)

    def update(self, e: Entry, clients: int) -> Update:
        """Return how the weights of the first clients update themselves."""
        velocity = None
        if self._moments:
            velocity = self._layout.view(self._moments[0][:clients], e)
        return Update(velocity, self._lr_of(clients), self._sgd)

    def takes_one_pass(self, rows: Tensor, spans: Spans) -> bool:
        """Tell whether a step of all columns may be a single pass over such rows."""
        return self._adam is None and one_pass.serves(rows, spans, self._sgd)

    def descend_in_one_pass(
        self,
        rows: Tensor,
        gradient: Tensor,
        spans: Spans,
        *,
        terms: Terms | None,
        halves: Tensor | None,
    ) -> None:
        """Take a step with the rows of the first clients, in place; the terms draw them
        to their references. `halves` become the rows in bfloat16.
        """
        clients = len(rows)
        velocity = self._moments[0][:clients] if self._moments else None
        one_pass.descend(
            rows,
            gradient,
            velocity,
            self._lr_of(clients),
            self._sgd,
            spans,
            terms=terms,
            halves=halves,
        )

    def descend(
        self,
        rows: Tensor,
        gradient: Tensor,
        trainable: Tensor | None,
        step: Tensor,
        updated: Collection[str],
    ) -> None:
        """Take a step with the rows of the first clients, in place.

        Columns that are not trainable keep their bits. So do the weights in `updated`,
        which have updated themselves.
        """
        # The columns between weights that have updated themselves.
        edges = [0]
        # Entries come in the order of their columns, so edges ascend.
        for e in self._layout.entries:
            if e.name in updated:
                edges += [e.start, e.stop]
        edges.append(self._layout.widths[0])
        # Edges alternate: begin of a span, end of it, begin of the next one.
        starts = edges[::2]
        stops = edges[1::2]
        for start, stop in zip(starts, stops, strict=True):
            self._descend(rows, gradient, trainable, step, slice(start, stop))

    def _descend(
        self,
        rows: Tensor,
        gradient: Tensor,
        trainable: Tensor | None,
        step: Tensor,
        columns: slice,
    ) -> None:
        clients = len(rows)
        lr = self._lr_of(clients)
        moments = [moment[:clients, columns] for moment in self._moments]
        trains = None if trainable is None else trainable[columns]
        rows, gradient = rows[:, columns], gradient[:, columns]
        if self._adam is None:
            velocity = moments[0] if moments else None
            sgd.descend(rows, gradient, velocity, trains, lr, self._sgd)
            return
        means, squares = moments
        adam.descend(
            rows, gradient, means, squares, trains, lr, self._bias, step, self._adam
        )

    def _lr_of(self, clients: int) -> Tensor:
        return self._lr[:clients] if self._lr.dim() else self._lr
