"""The federation as a method sees it: clients of this rank, rows, and a few verbs. No
MPI, no CUDA, no file.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from hpcfed.attacks import NEED_BENIGN
from hpcfed.attacks.view import Scene, attacked
from hpcfed.clients.engine import Score, Sgd
from hpcfed.clients.lockstep import RowEngine
from hpcfed.clients.placement import Clients
from hpcfed.clients.pull import Pull
from hpcfed.clients.schedule import num_samples
from hpcfed.config import Options, RunConfig
from hpcfed.data.datasets import Split
from hpcfed.data.shards import Shard
from hpcfed.errors import remark
from hpcfed.federation.aggregation import Aggregation, member_rows
from hpcfed.federation.clustering import left_vectors
from hpcfed.federation.cohort import Cohort, Sent, shares
from hpcfed.federation.log import OnTrained, RoundLog
from hpcfed.federation.selection import best
from hpcfed.models.layout import Layout
from hpcfed.record.timing import Timer
from hpcfed.runtime import randomness
from hpcfed.runtime.collectives import Collectives
from hpcfed.runtime.device import on_device
from hpcfed.server.client import ServerClient

T = TypeVar("T")
Shards = Callable[[Split, np.ndarray], Shard]
"""Gathers the samples of clients, by id, from one split of the data set."""
NOBODY = np.empty(0, np.int64)
_NOTHING = Shard(
    torch.empty(0), torch.empty(0), torch.empty(0), (), np.empty(0, np.int64)
)


class Federation:
    """What one rank knows and can do. Client ids are global; positions count this
    rank's clients from 0.
    """

    def __init__(
        self,
        config: RunConfig,
        options: Options,
        *,
        clients: Clients,
        train_data: Shard,
        test_data: Shard,
        engine: RowEngine,
        first_row: Tensor,
        collectives: Collectives,
        timer: Timer,
        server: ServerClient | None = None,
        generated: Tensor | None = None,
        validation: Shard | None = None,
        attackers: np.ndarray = NOBODY,
    ) -> None:
        """`generated` are the positions of the columns that the server's model is
        about.

        `validation` is the server's own data, the whole of it on every rank, as the
        data of one client.
        """
        self.config = config
        self.options = options
        self.clients = clients.on(collectives.world.role_rank)
        """Ids of this rank's clients, ascending."""
        self.sizes = clients.train_samples
        """Training samples of every client of the federation."""
        self._round = 0
        self._rank_of = clients.rank
        self._train_data = train_data
        self._test_data = test_data
        self._engine = engine
        self._first_row = first_row
        self._collectives = collectives
        self._timer = timer
        self._server = server
        self._generated = generated
        self._validation = validation
        self._attackers = attackers
        self._aggregation = Aggregation(config, collectives)
        self._told_of_no_benign = False

    @property
    def round(self) -> int:
        """The round in progress, or the last one: what is trained outside of rounds
        takes its learning rate and random numbers from it.
        """
        return self._round

    def resume_after(self, round: int) -> None:
        """Go on as if this round, counted from 0, had just been done."""
        self._round = round

    @property
    def server(self) -> ServerClient:
        """The server's model, for methods that have one."""
        assert self._server is not None
        return self._server

    @property
    def generated(self) -> Tensor:
        assert self._generated is not None
        return self._generated

    def settle(self, clients: Clients, shards: Shards) -> None:
        """This rank's clients and their data from now on, after some have moved."""
        self.clients = clients.on(self._collectives.world.role_rank)
        self._rank_of = clients.rank
        self._train_data = self._test_data = (
            _NOTHING  # what was there is given up before new data comes
        )
        self._engine.forget()
        self._train_data = shards("train", self.clients)
        self._test_data = shards("test", self.clients)

    @property
    def layout(self) -> Layout:
        return self._engine.layout

    @property
    def device(self) -> torch.device:
        return self._first_row.device

    def initial_row(self) -> Tensor:
        """The network's initial weights, which depend on the seed alone."""
        return self._first_row.clone()

    def generator(self, purpose: str, *numbers: int) -> np.random.Generator:
        """Random numbers for a decision that all ranks take alike."""
        return randomness.generator(self.config.seed, purpose, *numbers)

    def sample(
        self,
        round: int,
        on_trained: OnTrained | None = None,
    ) -> Cohort:
        """The cohort of a round, drawn without replacement from all clients.

        Whoever has been drawn and has no training data takes no part: it is sent
        nothing, sends nothing and has no weight. A cohort in which nobody has data
        stays as drawn, leaves all rows as they are, and counts as empty. The cohort
        carries the round's log; `on_trained` gets the rows that local training leaves.
        """
        self._round = round
        with self._timer.phase("sample"):
            total = len(self.sizes)
            count = self.config.cohort_size
            clients = np.arange(total)
            if count < total:
                clients = np.sort(
                    self.generator("cohort", round).choice(total, count, replace=False)
                )
            holders = clients[self.sizes[clients] > 0]
            log = RoundLog(cohort_size=len(holders), on_trained=on_trained)
            if len(holders):
                clients = holders
            return self._cohort(round, clients, log)

    def everyone(self, round: int) -> Cohort:
        """A cohort of all clients of this federation, such as those that join late.

        It has a log of its own, which belongs to no round of another federation.
        """
        self._round = round
        return self._cohort(round, np.arange(len(self.sizes)), RoundLog())

    def _cohort(self, round: int, clients: np.ndarray, log: RoundLog) -> Cohort:
        hosts = self._rank_of[clients]
        per_rank = [
            np.flatnonzero(hosts == rank) for rank in range(self._collectives.size)
        ]
        chosen = per_rank[self._collectives.world.role_rank]
        return Cohort(
            round=round,
            clients=clients,
            weights=shares(self.sizes[clients]),
            here=np.searchsorted(self.clients, clients[chosen]),
            chosen=chosen,
            per_rank=per_rank,
            log=log,
        )

    @property
    def num_holders(self) -> int:
        """Clients of the federation that have training data."""
        return int(np.count_nonzero(self.sizes))

    def _taking_part(self, cohort: Cohort) -> int:
        """Members of the cohort that have training data: what others are said to send
        or get counts for nothing.
        """
        return int(np.count_nonzero(self.sizes[cohort.clients]))

    def download(
        self, row: Tensor, cohort: Cohort, *, everyone: bool = False
    ) -> Tensor:
        """The row, or some columns of it, for every member of the cohort on this rank;
        or a row for each of them.

        `everyone` gets it where clients that are not sampled need it, too.
        """
        with self._timer.phase("download"):
            receivers = self.num_holders if everyone else self._taking_part(cohort)
            cohort.log.bytes_down += receivers * row.shape[-1] * row.element_size()
            rows = row.expand(len(cohort.here), -1)
            if len(self._attackers):
                cohort.log.downloaded = rows
            return rows

    def train(
        self,
        rows: Tensor,
        cohort: Cohort,
        *,
        epochs: int | None = None,
        columns: Tensor | None = None,
        sgd: Sgd | None = None,
        phase: int = 0,
        pull: Pull | None = None,
    ) -> Tensor:
        """The cohort's rows after local training, by the run's SGD unless given; only
        True `columns` change.

        `pull` draws each row to a reference. Phases of one round, numbered by the
        method, see the samples in different orders.
        """
        if _nothing_moves(columns):
            return rows
        with self._timer.phase("train"):
            sgd = sgd or self._sgd(epochs or self.config.epochs, cohort.round)
            purpose = _purpose("training", phase)
            rows, losses = self._descend(
                purpose,
                rows,
                cohort.here,
                sgd,
                round=cohort.round,
                columns=columns,
                pull=pull,
            )
            cohort.log.add_losses(
                losses, num_samples(self.sizes[self.clients[cohort.here]], sgd.length)
            )
        if cohort.log.on_trained is not None:
            with self._timer.phase("record"):
                cohort.log.on_trained(cohort.here, rows)
        return rows

    def finetune(
        self,
        rows: Tensor,
        clients: np.ndarray,
        *,
        epochs: int | None = None,
        columns: Tensor | None = None,
        sgd: Sgd | None = None,
        phase: int = 0,
    ) -> Tensor:
        """Training that a client does for itself, as before it is judged; it is no part
        of a round's.
        """
        if _nothing_moves(columns):
            return rows
        with self._timer.phase("train"):
            sgd = sgd or self._sgd(epochs or self.config.epochs, self.round)
            purpose = _purpose("fine-tuning", phase)
            return self._descend(
                purpose, rows, clients, sgd, round=self.round, columns=columns
            )[0]

    def fisher(self, rows: Tensor, cohort: Cohort) -> Tensor:
        """The diagonal of the Fisher information of the cohort's rows on their own
        training data.
        """
        with self._timer.phase("train"):
            return self._engine.fisher(rows, self._train_data, cohort.here)

    def keys(self, purpose: str, cohort: Cohort) -> Tensor:
        """Of the cohort's members on this rank, for random numbers that each draws for
        itself.
        """
        ids = on_device(self.clients[cohort.here], self.device)
        return randomness.client_keys(self.config.seed, purpose, cohort.round, ids)

    def upload(self, rows: Tensor, cohort: Cohort, sent: Sent | None = None) -> Tensor:
        """What the server receives of the cohort's rows, or of some columns of them;
        all of it unless `sent` says.
        """
        if len(self._attackers):
            with self._timer.phase("attack"):
                rows = self._attacked(rows, cohort, sent)
        with self._timer.phase("upload"):
            log, members = cohort.log, self._taking_part(cohort)
            if sent is None:
                log.bytes_up += members * rows.shape[1] * rows.element_size()
            elif members:
                chosen_bytes = sent.columns().sum() * rows.element_size()
                log.bytes_up_here = log.bytes_up_here + chosen_bytes
        return rows

    def select(self, rows: Tensor, cohort: Cohort, count: int) -> tuple[Tensor, Cohort]:
        """The uploads that do best on the server's validation set, and their clients.

        Fewer than `count` where fewer are finite. Weights sum to one again.
        """
        with self._timer.phase("server"):
            answers = self._validated(rows, cohort)
            finite = int(np.count_nonzero(answers >= 0))
            selected = best(answers, min(count, finite))
            clients = cohort.clients[selected]
            cohort.log.selected = clients[self.sizes[clients] > 0]
        with self._timer.phase("aggregate"):
            return member_rows(rows, cohort, selected)

    def mean(self, rows: Tensor, cohort: Cohort) -> Tensor:
        """Σ weightᵢ rowᵢ over all members, or what --aggregation makes of their rows;
        the same on every rank.
        """
        with self._timer.phase("aggregate"):
            if (
                self.config.aggregation != "mean"
            ):  # a robust rule would bear them, and nobody would hear of it
                rows, cohort = member_rows(rows, cohort, self._good(rows, cohort))
            made = self._aggregation(rows, cohort)
            # Asked of the row that was made, the same on every rank: looking at all
            # rows would cost a pass over them.
            if bool(torch.isfinite(made).all()):
                return made
            good = self._good(rows, cohort)
            if len(good) == len(cohort.clients):
                raise ArithmeticError(
                    f"all updates of round {cohort.round + 1} are finite, but not what "
                    "is made of them"
                )
            return self._aggregation(*member_rows(rows, cohort, good))

    def _good(self, rows: Tensor, cohort: Cohort) -> np.ndarray:
        """Positions of the cohort's members whose rows are finite, on every rank;
        others count as left out.
        """
        finite = torch.isfinite(rows).all(1).cpu().numpy()
        good = np.sort(
            np.concatenate(self._collectives.allgather(cohort.chosen[finite]))
        )
        bad = np.delete(cohort.clients, good)
        if len(bad) and (self.config.on_bad_update == "stop" or not len(good)):
            raise _complaint(bad, cohort.round)
        cohort.log.excluded.update(cohort.clients[cohort.chosen[~finite]].tolist())
        return good

    def revert_diverged(
        self,
        rows: Tensor,
        before: Tensor,
        cohort: Cohort,
        clients: np.ndarray | None = None,
    ) -> Tensor:
        """What the cohort's members on this rank, or `clients`, by position, retain of
        their training.

        One whose row is not finite gets the one that it had before, and counts as left
        out.
        """
        with self._timer.phase("upload"):
            finite = torch.isfinite(rows).all(1)
            if bool(finite.all()):
                return rows
            trained = cohort.here if clients is None else clients
            bad = self.clients[trained[~finite.cpu().numpy()]]
            sound_before = bool(torch.isfinite(before[~finite]).all())
            if self.config.on_bad_update == "stop" or not sound_before:
                raise _complaint(bad, cohort.round)
            cohort.log.excluded.update(bad.tolist())
            return rows.where(finite[:, None], before)

    def cluster_means(
        self,
        rows: Tensor,
        cohort: Cohort,
        cluster: Tensor,
        previous: Tensor,
        sent: Sent | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The mean of every cluster's uploads, by the cohort's weights, on every rank;
        one collective for all clusters.

        `cluster` is that of every client of the federation. A part that nobody has sent
        stays as it was in `previous`, [clusters, columns]. Beside the means: [clusters,
        parts], the weight of those who sent a part; without `sent` there is one part.
        """
        with self._timer.phase("aggregate"):
            width = rows.shape[1]
            if sent is None:
                sent = Sent(
                    rows.new_ones(len(rows), 1, dtype=torch.bool),
                    cluster.new_zeros(width),
                )
            told = torch.cat(
                [rows.where(sent.columns(), 0), sent.parts.to(rows.dtype)], 1
            )
            totals = self._cluster_sums(told, cohort, cluster, len(previous))
            if not bool(torch.isfinite(totals).all()):
                told, cohort = member_rows(told, cohort, self._good(told, cohort))
                totals = self._cluster_sums(told, cohort, cluster, len(previous))
            sums, weights = totals.split([width, sent.parts.shape[1]], 1)
            by_column = weights[:, sent.part_of]
            return torch.where(by_column > 0, sums / by_column, previous), weights

    def _cluster_sums(
        self, rows: Tensor, cohort: Cohort, cluster: Tensor, clusters: int
    ) -> Tensor:
        own = cluster[on_device(cohort.clients, self.device)]
        return self._aggregation.sums(rows, cohort, own, clusters)

    def bases(self, vectors: int, *, by_class: bool = False) -> np.ndarray:
        """Left singular vectors of every client's training data, [clients, features,
        vectors], on every rank.
        """
        own = left_vectors(
            self._train_data,
            vectors,
            classes=self.config.data().classes if by_class else None,
        )
        everyones = own.new_zeros(len(self.sizes), *own.shape[1:])
        everyones[on_device(self.clients, own.device)] = own
        return self._collectives.allreduce(everyones).cpu().numpy()

    def agreed(self, value: T) -> T:
        """The first rank's value on every rank, so that no rounding can make ranks
        decide differently.
        """
        answer: T = self._collectives.bcast(value)
        return answer

    def greet(self, rows: Tensor, cohort: Cohort, columns: int | None = None) -> Tensor:
        """What clients that join are given to begin with; so many columns of all of
        them, if not whole rows.

        Those without training data count for nothing, as in a round.
        """
        width = rows.shape[-1] * self.num_holders if columns is None else columns
        cohort.log.bytes_down += width * rows.element_size()
        return rows

    def bank(self, columns: Tensor, cohort: Cohort) -> None:
        """Hands the generated columns of the cohort's uploads to the server, which
        keeps them for learning.
        """
        with self._timer.phase("server"):
            self.server.bank(cohort.round, self.clients[cohort.here], columns)

    def learn(self, cohort: Cohort) -> None:
        """Let the server's model learn from what was banked; all workers wait."""
        with self._timer.phase("server"):
            cohort.log.server_report = self.server.learn()

    def invert(self, cohort: Cohort, clients: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Return columns that the server generates from the clients' newest uploads, and
        which of the clients it knows. What it measures goes to the round's report.
        """
        with self._timer.phase("server"):
            inversion = self.server.invert(clients)
        report = cohort.log.server_report
        if report is not None:
            cohort.log.server_report = report.with_inversion(inversion)
        return inversion.rows, inversion.known

    def sum(self, tensor: Tensor) -> Tensor:
        """Σ over the ranks of what each has summed over its own clients, on every rank;
        may overwrite its argument.
        """
        with self._timer.phase("aggregate"):
            return self._collectives.allreduce(tensor)

    def timed(self, phase: str) -> AbstractContextManager[None]:
        """Counts what a method computes by itself, such as a server's model, as time of
        this phase.
        """
        return self._timer.phase(phase)

    def evaluate(self, rows: Tensor, clients: np.ndarray) -> Score:
        """Scores rows on the own test data of clients of this rank."""
        with self._timer.phase("evaluate"):
            return self._engine.evaluate(rows, self._test_data, clients)

    def _attacked(self, rows: Tensor, cohort: Cohort, sent: Sent | None) -> Tensor:
        start = cohort.log.downloaded
        assert start is not None, "a method downloads before it uploads"
        if sent is not None:
            rows = rows.where(
                sent.columns(), start
            )  # what stays with a client is no update that anybody sees
        malicious = np.isin(cohort.clients, self._attackers)
        if malicious.all() and self.config.attack in NEED_BENIGN:
            self._tell_of_no_benign(cohort.round)
        scene = Scene(
            rows=rows,
            start=start,
            cohort=cohort,
            attackers=np.flatnonzero(malicious),
            benign=np.flatnonzero(~malicious),
            strength=self.config.attack_strength,
            seed=self.config.seed,
            collectives=self._collectives,
            mean=self._aggregation.mean,
            sent=sent,
        )
        return attacked(self.config.attack, scene)

    def _tell_of_no_benign(self, round: int) -> None:
        if self._collectives.world.is_root and not self._told_of_no_benign:
            remark(
                f"hpcfed: all clients of round {round + 1} are attackers, and "
                f"{self.config.attack} needs benign "
                "ones: in such rounds they upload what they trained"
            )
        self._told_of_no_benign = True

    def _validated(self, rows: Tensor, cohort: Cohort) -> np.ndarray:
        """Right answers of all uploads on the server's data: each rank asks its own,
        only the counts travel.

        They are read on the host, which decides whose rows go on. Uploads that are not
        finite are below all others.
        """
        assert self._validation is not None
        good = self._good(rows, cohort)
        score = self._engine.evaluate(
            rows, self._validation, np.zeros(len(rows), np.int64)
        )
        right = torch.zeros(
            len(cohort.clients), dtype=torch.float64, device=self.device
        )
        right[on_device(cohort.chosen, self.device)] = score.correct.double()
        answers: np.ndarray = np.full(len(cohort.clients), -1.0)
        answers[good] = self._collectives.allreduce(right).cpu().numpy()[good]
        return answers

    def _sgd(self, epochs: int, round: int) -> Sgd:
        c = self.config
        lr = c.lr * c.lr_decay**round
        return Sgd(
            epochs,
            c.batch_size,
            lr,
            momentum=c.momentum,
            weight_decay=c.weight_decay,
            clip=c.clip,
        )

    def _descend(
        self,
        purpose: str,
        rows: Tensor,
        clients: np.ndarray,
        sgd: Sgd,
        *,
        round: int,
        columns: Tensor | None,
        pull: Pull | None = None,
    ) -> tuple[Tensor, Tensor]:
        sgd = replace(sgd, augment=self.config.augment == "crop-flip")
        ids = on_device(self.clients[clients], self.device)
        keys = randomness.client_keys(self.config.seed, purpose, round, ids)
        return self._engine.train(
            rows, self._train_data, clients, sgd, keys=keys, columns=columns, pull=pull
        )


def _purpose(work: str, phase: int) -> str:
    """Of a stream of random numbers."""
    return f"{work}, phase {phase}" if phase else work


def _nothing_moves(columns: Tensor | None) -> bool:
    """As in a phase that trains the head of a network that is all body."""
    return columns is not None and not bool(columns.any())


def _complaint(bad: np.ndarray, round: int) -> ArithmeticError:
    named = ", ".join(map(str, bad[:8])) + (", …" if len(bad) > 8 else "")
    return ArithmeticError(
        f"updates that are not finite, of clients {named} in round {round + 1}"
    )
