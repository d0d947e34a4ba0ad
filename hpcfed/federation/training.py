"""What clients do on their own: local training, and evaluation on their test data."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from hpcfed.clients.answers import agreement
from hpcfed.clients.job import (
    Losses,
    Recipe,
    RowEngine,
    Score,
    TrainingJob,
)
from hpcfed.clients.network import client_network, has_frozen_base
from hpcfed.clients.objective import NOTHING, Wanted
from hpcfed.clients.pull import Pull
from hpcfed.clients.schedule import num_steps
from hpcfed.data.datasets import Split
from hpcfed.data.shards import Shard
from hpcfed.federation.cohort import Cohort, without_diverged
from hpcfed.federation.keys import ClientKeys
from hpcfed.federation.participants import Participants
from hpcfed.models.frozen import META

Shards = Callable[[Split, np.ndarray], Shard]
"""Gathers the samples of clients, by id, from one split of the data set."""
FLOPS = 2
"""Floating-point operations of a multiply-add."""
_EMPTY = Shard(
    torch.empty(0), torch.empty(0), torch.empty(0), (), np.empty(0, np.int64)
)


class LocalTraining:
    """This rank's clients with their data, and the engine that advances their rows."""

    def __init__(
        self,
        members: Participants,
        *,
        train_data: Shard,
        test_data: Shard,
        engine: RowEngine,
        first_row: Tensor,
    ) -> None:
        self.train_data = train_data
        self.test_data = test_data
        self.engine = engine
        self.layout = engine.layout
        self.device = first_row.device
        self._config = members.config
        self._members = members
        self._first_row = first_row
        self._timer = members.timer
        self._augments = members.config.augment == "crop-flip"
        self._client_keys = ClientKeys(members.config.seed, self.device)
        self._last_recipe: Recipe | None = None
        self._costs: dict[bytes, int] = {}
        """Multiply-adds of a sample, by the columns to train."""

    def initial_row(self) -> Tensor:
        """Return the network's initial weights, which depend only on the seed."""
        return self._first_row.clone()

    def fresh_row(self, client: int) -> Tensor:
        """Return initial weights that a client has drawn for itself. They depend only
        on the seed and its id. Weights from --init are the same for all clients.
        """
        if self._config.init is not None:
            return self.initial_row()
        seed = self._members.generator("fresh weights", client).integers(2**32)
        # A row of adapters does not need the network below them.
        adapters_alone = all(e.trainable for e in self.layout.entries)
        described = adapters_alone and has_frozen_base(self._config)
        onto = META if described else None
        network = client_network(self._config, seed=int(seed), onto=onto)
        row = self.layout.row(network, dtype=self._first_row.dtype)
        return row.to(self.device)

    def keys(self, purpose: str, cohort: Cohort) -> Tensor:
        """Return a key for each member here, for the numbers that it draws itself."""
        return self._keys(purpose, cohort.round, cohort.here)

    def _keys(self, purpose: str, round: int, clients: np.ndarray) -> Tensor:
        return self._client_keys(purpose, round, self._members.clients[clients])

    def reload(self, shards: Shards) -> None:
        """Load the data of this rank's clients again, after some have changed ranks."""
        # The device may not hold both: free the old data before loading the new.
        self.train_data = self.test_data = _EMPTY
        self.engine.forget()
        self.train_data = shards("train", self._members.clients)
        self.test_data = shards("test", self._members.clients)

    def recipe(self, round: int, epochs: int | None = None) -> Recipe:
        """Return the run's recipe of a round; a method may replace its fields."""
        c = self._config
        # From the round's number, not step by step: a resumed run gets the same rate.
        lr = c.lr * c.lr_decay**round
        schedule = None
        if c.lr_schedule != "constant":
            schedule = c.rate_schedule
            # One factor for the whole round; otherwise the engine applies the schedule
            # per step.
            if c.lr_schedule_by == "round":
                lr *= schedule.factor(round, c.rounds)
                schedule = None
        epochs = c.epochs if epochs is None else epochs
        last = self._last_recipe
        # Usually the last round's: with it, what the engine has derived is kept.
        if last is None or (last.epochs, last.lr, last.schedule) != (
            epochs,
            lr,
            schedule,
        ):
            self._last_recipe = last = Recipe(
                epochs,
                c.batch_size,
                lr,
                momentum=c.momentum if c.optimiser == "sgd" else 0.0,
                weight_decay=c.weight_decay,
                clip=c.clip,
                augment=self._augments,
                optimiser=c.optimiser,
                beta1=c.beta1,
                beta2=c.beta2,
                epsilon=c.adam_epsilon,
                schedule=schedule,
                nesterov=c.nesterov and c.optimiser == "sgd",
            )
        return last

    def num_steps(self, cohort: Cohort, recipe: Recipe | None = None) -> np.ndarray:
        """Return the local steps that each member on this rank takes in a round, by
        `recipe` or else the run's; 0 without data.
        """
        return self.everyones_steps(cohort, recipe)[cohort.chosen]

    def everyones_steps(
        self, cohort: Cohort, recipe: Recipe | None = None
    ) -> np.ndarray:
        """Return the local steps of all members on all ranks: as `num_steps`, but with
        --partial no more than each has time for.
        """
        recipe = recipe or self.recipe(cohort.round)
        steps = num_steps(self._members.sizes[cohort.clients], recipe.length)
        clock = cohort.in_flight.clock
        return steps if clock is None else clock.steps_in_time(cohort.clients, steps)

    def train(
        self,
        rows: Tensor,
        cohort: Cohort,
        *,
        epochs: int | None = None,
        columns: Tensor | None = None,
        recipe: Recipe | None = None,
        phase: int = 0,
        pull: Pull | None = None,
        correction: Tensor | None = None,
        gates: Tensor | None = None,
        final: bool = True,
    ) -> Tensor:
        """Return the cohort's rows after local training, by `recipe` or else the run's.
        Only columns that are True in `columns` change.

        `pull` draws each row to a reference. `correction`, a row per member, is added
        to the gradient in every step. Then `gates`, a row of booleans per member, set
        it to 0 where they are False. Phases of one round, numbered by the method, see
        the samples in different orders. If the method goes on with the rows, they are
        not `final` and not in the snapshot; the method then calls `finish`.
        """
        if _all_frozen(columns):
            return rows
        with self._timer.phase("train"):
            recipe = recipe or self.recipe(cohort.round, epochs)
            limits = None
            if cohort.in_flight.clock is not None:
                limits = self._count_steps(cohort, recipe)
            job = TrainingJob(
                rows,
                self.train_data,
                cohort.here,
                recipe,
                self.keys(_purpose("training", phase), cohort),
                columns=columns,
                pull=pull,
                correction=correction,
                gates=gates,
                limits=limits,
            )
            rows, losses = self._descend(job)
            cohort.log.add_losses(losses)
        if final:
            self.finish(rows, cohort)
        return rows

    def finish(self, rows: Tensor, cohort: Cohort) -> None:
        """Declare these rows the result of the cohort's local training: snapshots hold
        them, and an evaluation judges them.
        """
        if cohort.in_flight.on_trained is not None:
            cohort.in_flight.on_trained(cohort.here, rows)

    def gradients(
        self, rows: Tensor, cohort: Cohort, *, phase: int, whole: bool = False
    ) -> Tensor:
        """Return the gradient of each member's mean loss at its row, on one minibatch of
        the run's batch size, or on the `whole` of its data; 0 for members without data.

        The minibatch is the one with which `train` begins in the same phase. Batch norm
        uses the minibatch's statistics, as in training. Running statistics stay
        unchanged, so their columns are 0. Weight decay and clipping are not applied.
        """
        epochs, steps = (1, 0) if whole else (0, 1)
        batch_size = self._config.batch_size
        recipe = Recipe(epochs, batch_size, 0.0, steps=steps, gradient=True)
        if cohort.in_flight.clock is not None:
            self._count_steps(cohort, recipe)
        with self._timer.phase("train"):
            keys = self.keys(_purpose("training", phase), cohort)
            job = TrainingJob(rows, self.train_data, cohort.here, recipe, keys)
            gradients, losses = self._descend(job)
            cohort.log.add_losses(losses)
        return gradients

    def losses(self, rows: Tensor, cohort: Cohort) -> Tensor:
        """Return each member's mean loss on its training data at its row, as in an
        evaluation: without dropout, with running statistics; NaN without data.

        Its arithmetic is counted, but not as training, and takes no virtual time.
        """
        with self._timer.phase("train"):
            samples = int(self.train_data.samples[cohort.here].sum())
            cohort.log.train_flops += FLOPS * samples * self.engine.cost.training_of(())
            score = self.engine.evaluate(rows, self.train_data, cohort.here)
            return score.loss / score.count

    def finetune(
        self,
        rows: Tensor,
        clients: np.ndarray,
        *,
        epochs: int | None = None,
        columns: Tensor | None = None,
        recipe: Recipe | None = None,
        phase: int = 0,
        pull: Pull | None = None,
        round: int | None = None,
    ) -> Tensor:
        """Return rows after training that clients do for themselves, for example before
        they are judged. Neither the round's loss nor a clock counts it. Without
        `epochs` it uses --epochs; learning rate and random numbers are those of
        `round`, or else of the round in progress.
        """
        if epochs == 0 or _all_frozen(columns):
            return rows
        with self._timer.phase("train"):
            round = self._members.round if round is None else round
            recipe = recipe or self.recipe(round, epochs)
            keys = self._keys(_purpose("fine-tuning", phase), round, clients)
            job = TrainingJob(rows, self.train_data, clients, recipe, keys)
            rows, _ = self._descend(replace(job, columns=columns, pull=pull))
            return rows

    def train_alone(
        self,
        row: Tensor,
        client: int,
        round: int,
        *,
        recipe: Recipe | None = None,
        phase: int = 0,
        pull: Pull | None = None,
    ) -> Tensor:
        """Return the row of one client of this rank, by position, after the local
        training of a round, with the random numbers that it draws in `train`. A naive
        loop over clients calls it, to be compared with a round.
        """
        one, recipe = np.array([client]), recipe or self.recipe(round)
        keys = self._keys(_purpose("training", phase), round, one)
        job = TrainingJob(row[None], self.train_data, one, recipe, keys, pull=pull)
        rows, _ = self._descend(job)
        return rows[0]

    def fisher(self, rows: Tensor, cohort: Cohort) -> Tensor:
        """Return the Fisher information's diagonal on the clients' training data."""
        with self._timer.phase("train"):
            # One forward and one backward pass per sample, as in a step that trains
            # all.
            samples = int(self.train_data.samples[cohort.here].sum())
            cohort.log.train_flops += FLOPS * samples * self.engine.cost.training
            return self.engine.fisher(rows, self.train_data, cohort.here)

    def evaluate(
        self, rows: Tensor, clients: np.ndarray, wanted: Wanted = NOTHING
    ) -> Score:
        """Score rows on their clients' test data; metrics need the `wanted` sums."""
        with self._timer.phase("evaluate"):
            return self.engine.evaluate(rows, self.test_data, clients, wanted)

    def agreement(self, rows: Tensor, others: Tensor, clients: np.ndarray) -> Tensor:
        """Return the share of its test samples on which each client's two rows give the
        same answer; NaN without test data or classes.
        """
        data = self._config.data()
        if data.task != "classification":
            return rows.new_full((len(rows),), torch.nan)
        test, classes = self.test_data, data.classes
        with self._timer.phase("evaluate"):
            return agreement(self.engine, rows, others, test, clients, classes=classes)

    def revert_diverged(
        self,
        rows: Tensor,
        before: Tensor,
        cohort: Cohort,
        clients: np.ndarray | None = None,
    ) -> Tensor:
        """Return rows as the cohort's members, or `clients`, have trained them. A row
        that is not finite is taken from `before`, and its client counts as excluded.
        """
        trained = cohort.here if clients is None else clients
        ids, stop = self._members.clients[trained], self._members.stops_at_divergence
        with self._timer.phase("upload"):
            return without_diverged(rows, before, ids, cohort, stop=stop)

    def _descend(self, job: TrainingJob) -> tuple[Tensor, Losses]:
        # A method's own recipe also augments images as the run wants.
        if job.recipe.augment != self._augments:
            recipe = replace(job.recipe, augment=self._augments)
            job = replace(job, recipe=recipe)
        rows, losses = self.engine.train(job)
        self._count(job, losses)
        return rows, losses

    def _count(self, job: TrainingJob, losses: Losses) -> None:
        """Count what clients have trained, for the round in progress."""
        log, samples = self._members.log, job.work.samples
        flops: Tensor | float = FLOPS * samples * self._multiply_adds(job.columns)
        evaluates = self._timer.current == "evaluate"
        if losses.positions is not None and samples:
            positions = losses.positions.sum()
            # A step may leave out positions that its texts do not need.
            whole = samples * job.shard.targets.shape[1]
            flops = flops * (positions.double() / whole)
            if not evaluates:
                log.trained_positions = log.trained_positions + positions
                log.learnt_tokens = log.learnt_tokens + losses.seen.sum()
        # Training within an evaluation is not counted as training, nor is its time.
        if evaluates:
            log.finetuned_samples += samples
            log.finetune_flops = log.finetune_flops + flops
        else:
            log.add_work(job.clients, job.work, flops)

    def _multiply_adds(self, columns: Tensor | None) -> int:
        """Return the multiply-adds of a sample in a step that trains these columns."""
        cost = self.engine.cost
        if columns is None:
            return cost.training
        mask = columns.cpu().numpy()
        # Methods train the same few sets of columns in every round.
        key = mask.tobytes()
        if key not in self._costs:
            self._costs[key] = cost.training_of(self.layout.trained_by(mask))
        return self._costs[key]

    def _count_steps(self, cohort: Cohort, recipe: Recipe) -> np.ndarray | None:
        """Count local steps on the virtual clock; return the most that each member here
        has time for, None if all have time for all steps.
        """
        assert cohort.in_flight.clock is not None
        steps = num_steps(self._members.sizes[cohort.clients], recipe.length)
        limits = cohort.in_flight.clock.train(cohort.clients, steps)
        return None if limits is None else limits[cohort.chosen]


def _purpose(work: str, phase: int) -> str:
    """Name a stream of random numbers."""
    return f"{work}, phase {phase}" if phase else work


def _all_frozen(columns: Tensor | None) -> bool:
    """Return whether there is nothing to train: a network may be all body."""
    return columns is not None and not bool(columns.any())
