"""Local training of a stack of clients, in place, so that a step can be captured."""

from collections.abc import Generator, Sequence
from functools import partial

import torch
from torch import Tensor

from hpcfed.clients.capture import Repeats, Replays, Run, plainly
from hpcfed.clients.differentiation import (
    Differentiation,
    StepBatch,
    StepMemory,
    TrainableColumns,
)
from hpcfed.clients.job import Losses, Recipe, TrainingJob
from hpcfed.clients.lanes import launch_all
from hpcfed.clients.lengths import positions, text_lengths
from hpcfed.clients.objective import OBJECTIVES, StepTargets
from hpcfed.clients.optimiser import StackOptimiser
from hpcfed.clients.pull import StackPull, Strengths
from hpcfed.clients.schedule import (
    StepShape,
    in_a_row,
    num_steps,
    rounded_shape,
    step_shapes,
)
from hpcfed.clients.step_tables import StepTables
from hpcfed.data.shards import Shard
from hpcfed.kernels.batch import gather_inputs, gatherable
from hpcfed.kernels.cuda import without_trials
from hpcfed.kernels.pull import Spans
from hpcfed.models.forward import Forward
from hpcfed.models.kernel_layout import KernelLayout, KernelRows
from hpcfed.models.layout import check_whole

STEPS_AT_ONCE = 8
"""Steps of one shape that several clients take in one replay. A replay begins some 9 µs
after the previous one has ended: on an H200, 24 steps of 100 clients of a small network
take 22.8 ms this way, and 23.5 ms one by one.
"""

MOST_AT_ONCE = 128
"""The most steps of a graph of all of a round's steps, which takes long to capture."""


class StackTraining:
    """The memory of a stack in training and the steps on it, for one shard, one recipe
    and a set of columns.

    A stack is loaded into the first rows. Its clients are ordered by their number of
    steps, longest first. Steps are captured only for a few sizes of stacks, so a
    finished client may be advanced further; its result is set aside before that.
    """

    def __init__(
        self,
        network: Forward,
        layout: KernelLayout,
        shard: Shard,
        recipe: Recipe,
        trainable: TrainableColumns | None,
        strengths: Strengths | None = None,
        *,
        corrected: bool = False,
        gated: bool = False,
        rate_each: bool = False,
        limited: bool = False,
        lengths: int = 1,
        dtype: torch.dtype,
    ) -> None:
        """`lengths`: how many lengths steps on texts may have."""
        self._network = network
        self._layout = layout
        self._shard = shard
        self._recipe = recipe
        self._trainable = trainable
        self._pull = None if strengths is None else StackPull(strengths, layout)
        self._corrected = corrected
        self._gated = gated
        self._device = shard.inputs.device
        self._objective = OBJECTIVES[shard.task]
        self._inputs = gatherable(shard.inputs)
        self._tables = StepTables(shard, recipe, network.random_layers, limited=limited)
        self._slots = self._tables.slots
        self._lengths = text_lengths(network, shard, lengths, training=True)
        self._replays = Replays(
            self._device, on=network.captures, may_fail=network.capture_may_fail
        )
        self._repeats = Repeats()
        self._like = torch.zeros((), dtype=dtype, device=self._device)
        self._optimiser = StackOptimiser(
            recipe,
            layout,
            steps=self._tables.steps,
            rate_each=rate_each,
            like=self._like,
        )
        # A weight that updates itself never shows its gradient, so nothing may be added
        # to it.
        self._differentiate = Differentiation(
            network,
            layout,
            shard,
            self._optimiser,
            trainable,
            gradient_first=(
                self._pull is not None or corrected or gated or recipe.gradient
            ),
        )
        # On the device: a captured step must read it there.
        self._step = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._capacity = 0
        self._aside: tuple[Tensor, ...] = ()
        self._memories: dict[int, StepMemory] = {}
        """The memory of the first clients, by their number."""
        self._collected: Tensor | None = None
        """Sum of the gradients of several steps, if only gradients are asked for."""
        self._spans: Spans | None = None
        """Positions of layers, if a step is a single pass over the rows."""

    def run(self, job: TrainingJob, trained: Tensor) -> Losses:
        """Train a stack's rows into `trained`; return the clients' losses."""
        return launch_all(self.steps(job, trained))

    def steps(self, job: TrainingJob, trained: Tensor) -> Generator[None, None, Losses]:
        """Train a stack's rows into `trained`, and yield after every step, so that
        others may launch theirs; return the clients' losses.
        """
        count = len(job.rows)
        sizes = self._tables.sizes[job.clients]
        shapes = step_shapes(sizes, self._recipe.length, job.limits)
        self._reserve(count)
        kernel_rows, counts = self._memory(count).rows, self._tables.counts[:, :count]
        self._layout.load(job.rows, kernel_rows)
        if self._pull is not None:
            assert job.pull is not None, "made for clients that are pulled"
            self._pull.load(job.pull)
        if self._corrected:
            assert job.correction is not None, "made for corrected gradients"
            parameters, statistics = self._correction
            self._layout.load(job.correction, (parameters[:count], statistics[:count]))
        if self._gated:
            assert job.gates is not None, "made for gated gradients"
            parameters, statistics = self._gates
            self._layout.load(job.gates, (parameters[:count], statistics[:count]))
        run = self._replays.run
        self._tables.load(job.clients, sizes, job.keys, job.limits, run=run)
        lr = job.recipe.lr if job.rates is None else job.rates
        self._optimiser.load(lr, partial(num_steps, sizes, self._recipe.length))
        if not self._take_at_once(count, shapes):
            self._replays.run(count, partial(self._begin, count))
            if self._lengths is not None:
                samples = self._tables.samples[:, :count]
                shapes = self._lengths.shortened(shapes, samples, counts)
            yield from self._take(count, shapes, run)
        seen, in_texts = self._tables.seen, None
        if self._objective.counts_tokens:
            seen = self._tokens[:count].clone()
            in_texts = positions(shapes, counts, self._shard.targets.shape[1])
        if self._recipe.gradient:
            gradient = self._gradient[:count]
            if self._collected is not None:
                gradient = self._collected[:count] / seen[:, None].to(gradient.dtype)
            # `_gradient` holds means over a batch, `_collected` their sum weighted by
            # samples. Statistics have no gradient, so return zeros for them.
            kernel_rows = gradient, torch.zeros_like(kernel_rows[1])
        self._layout.store(kernel_rows, trained)
        check_whole(self._layout.plain, trained)
        return Losses(self._total_loss[:count] / seen, seen, in_texts)

    def _take_at_once(self, count: int, shapes: Sequence[StepShape]) -> bool:
        """Take all steps in one replay, if cohort after cohort takes the same; tell
        whether that was done.
        """
        few = len(shapes) <= MOST_AT_ONCE and self._capacity > 1
        # A language model's step is long, and takes long to capture; besides, lengths
        # of texts depend on what is drawn.
        may = self._replays.captures and few and not self._objective.counts_tokens
        if not may or not self._repeats((count, shapes)):
            return False

        def all_steps() -> None:
            self._begin(count)
            for _ in self._take(count, shapes, plainly):
                pass

        return self._replays.run_whole((count, shapes), all_steps)

    def _take(
        self, count: int, shapes: Sequence[StepShape], run: Run
    ) -> Generator[None, None, None]:
        """Take these steps with the first clients, and yield after every one."""
        # Clients are sorted from long to short, so they finish from the end of the
        # stack.
        active = count
        # A large network's step is long, and takes long to capture.
        at_once = STEPS_AT_ONCE if self._capacity > 1 else 1
        for shape, steps in in_a_row(shapes, at_once):
            if shape.clients < active:
                self._set_aside(slice(shape.clients, active))
                active = shape.clients
            # The captured shape may hold more clients than are active. Finished ones
            # are advanced again, which is harmless: their rows have been set aside.
            captured = self._captured_shape(shape)
            run((steps, captured), partial(self._advance_by, steps, captured))
            yield
        if active < count:
            for matrix, aside in zip(self._rows, self._aside, strict=True):
                matrix[active:count] = aside[active:count]

    def _first(self, clients: int) -> KernelRows:
        parameters, statistics = self._rows
        return parameters[:clients], statistics[:clients]

    def _captured_shape(self, shape: StepShape) -> StepShape:
        """Return a step's shape, rounded up on a GPU."""
        # A stack of one needs no mask in torch's own kernels, if its shape is exact.
        if self._device.type == "cpu" or self._capacity == 1:
            return shape
        return rounded_shape(shape, self._capacity, self._slots)

    def _set_aside(self, clients: slice) -> None:
        """Save the rows of clients that have finished."""
        # Allocated only if clients have different numbers of steps.
        if not self._aside:
            self._aside = self._layout.zeros(self._capacity, self._like)
        for matrix, aside in zip(self._rows, self._aside, strict=True):
            aside[clients] = matrix[clients]

    def _reserve(self, clients: int) -> None:
        """Make the memory large enough; captured steps are lost if it moves."""
        if clients <= self._capacity:
            return
        self._capacity = clients
        # Graphs hold addresses of the memory that is replaced here.
        self._replays.forget()
        self._repeats = Repeats()
        self._aside = ()
        self._memories = {}
        self._rows = self._layout.zeros(clients, self._like)
        self._gradient = torch.zeros_like(self._rows[0])
        self._optimiser.reserve(self._gradient)
        if self._pull is not None:
            self._pull.reserve(clients, self._like)
        if self._corrected:
            self._correction = self._layout.zeros(clients, self._like)
        if self._gated:
            self._gates = self._layout.zeros(clients, self._like)
        self._total_loss = self._like.new_zeros(clients)
        self._tokens = torch.zeros(clients, dtype=torch.int64, device=self._device)
        self._tables.reserve(clients)
        # The gradient of a single step needs no sum.
        if self._recipe.gradient and self._tables.steps > 1:
            self._collected = torch.zeros_like(self._gradient)
        self._halves = None
        if self._differentiate.choose_halves(clients, self._device):
            self._halves = torch.zeros_like(self._rows[0], dtype=torch.bfloat16)
        self._spans = self._spans_of_one_pass()

    def _spans_of_one_pass(self) -> Spans | None:
        """Return where layers are, if all after the gradient can be one pass."""
        if self._pull is None and self._halves is None:
            return None
        in_between = self._corrected or self._gated or self._recipe.gradient
        if in_between or self._trainable is not None:
            return None
        spans = Spans(self._layout.block_spans, self._device)
        fits = self._optimiser.takes_one_pass(self._rows[0], spans)
        return spans if fits else None

    def _begin(self, clients: int) -> None:
        """Draw the order of samples, and reset losses, step and moments."""
        # A diverged client may have left NaN between the tensors of the gradient;
        # loading sets the padding of rows to zero.
        self._layout.clear_padding(self._gradient[:clients])
        self._tables.draw(clients)
        self._total_loss.zero_()
        self._tokens.zero_()
        if self._collected is not None:
            self._collected.zero_()
        self._step.zero_()
        self._optimiser.begin()
        # Each step leaves halves and distances for the next one; the first needs them
        # here.
        parameters, _ = self._first(clients)
        if self._halves is not None:
            self._halves[:clients] = parameters
        if self._pull is not None and self._spans is not None:
            self._pull.measure(parameters)

    def _advance_by(self, steps: int, shape: StepShape) -> None:
        """Take a number of steps with the first clients."""
        # A client alone keeps the exact size of its short batches. cuDNN would try its
        # kernels for every size, and take seconds for a deep network.
        with without_trials(unless=self._capacity > 1 or shape.slots == self._slots):
            for _ in range(steps):
                self._advance(shape)

    def _advance(self, shape: StepShape) -> None:
        """Take one step with the first clients."""
        clients, slots = shape.clients, shape.slots
        tables = self._tables
        self._optimiser.begin_step(self._step)
        inputs = gather_inputs(
            self._inputs,
            tables.samples,
            self._step,
            clients,
            slots,
            shifts=tables.shifts,
            blank=self._shard.blank,
        )
        if shape.length:
            inputs = inputs[..., : shape.length].contiguous()
        valid = None
        if self._network.masked and not shape.full:
            valid = tables.valid(self._step, clients, slots)
        batch = StepBatch(
            inputs,
            StepTargets(self._shard.targets, tables.samples, tables.counts, self._step),
            valid,
            keys=tables.layer_keys(self._step, clients),
            widest=slots == self._slots,
        )
        tokens_before = None
        if self._collected is not None:
            tokens_before = self._tokens[:clients].clone()
        updated = self._differentiate(batch, self._memory(clients))
        if self._spans is not None:
            self._descend_in_one_pass(clients, self._spans)
        else:
            self._complete_gradient(clients)
            if not self._recipe.gradient:
                self._descend(clients, updated)
            elif tokens_before is not None:
                self._collect(clients, tokens_before)
        # On the device, too, so that a replayed step advances by itself.
        self._step += 1

    def _memory(self, clients: int) -> StepMemory:
        """Return the memory of the first clients."""
        if clients not in self._memories:
            self._memories[clients] = StepMemory(
                self._layout,
                self._first(clients),
                self._gradient[:clients],
                None if self._halves is None else self._halves[:clients],
                self._total_loss[:clients],
                self._tokens[:clients],
            )
        return self._memories[clients]

    def _collect(self, clients: int, tokens_before: Tensor) -> None:
        """Add this step's gradient to the sum, weighted by its samples or tokens:
        divided by their total, the sum is the gradient of the mean loss.
        """
        assert self._collected is not None
        seen = self._tables.counts.index_select(0, self._step)[0, :clients]
        if self._objective.counts_tokens:
            seen = self._tokens[:clients] - tokens_before
        gradient = self._gradient[:clients]
        weighted = gradient * seen[:, None].to(gradient.dtype)
        # A finished client has no samples, and its gradient may be invalid.
        self._collected[:clients] += weighted.where(seen[:, None] > 0, 0)

    def _complete_gradient(self, clients: int) -> None:
        """Add the terms that do not come from the network's loss."""
        if self._pull is not None:
            parameters, _ = self._first(clients)
            self._pull.add(parameters, self._gradient[:clients])
        if self._corrected:
            self._gradient[:clients] += self._correction[0][:clients]
        if self._gated:
            self._gradient[:clients] *= self._gates[0][:clients]

    def _descend(self, clients: int, updated: set[str]) -> None:
        """Take a step on the rows in place; frozen columns keep their bits."""
        parameters, _ = self._first(clients)
        trainable = None if self._trainable is None else self._trainable.parameters
        gradient = self._gradient[:clients]
        self._optimiser.descend(parameters, gradient, trainable, self._step, updated)
        if self._halves is not None:
            self._halves[:clients] = parameters

    def _descend_in_one_pass(self, clients: int, spans: Spans) -> None:
        """Take a step on the rows in place, including all terms and roundings."""
        parameters, _ = self._first(clients)
        gradient = self._gradient[:clients]
        terms = None if self._pull is None else self._pull.terms(clients)
        halves = None if self._halves is None else self._halves[:clients]
        self._optimiser.descend_in_one_pass(
            parameters, gradient, spans, terms=terms, halves=halves
        )
