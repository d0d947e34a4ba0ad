"""The two ways to a server: ranks of its own, or the workers themselves."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hpcfed.errors import GRACE, UserError, remark
from hpcfed.record.checkpoints import Part
from hpcfed.runtime.backend import group_backend
from hpcfed.runtime.collectives import Collectives
from hpcfed.runtime.link import Link
from hpcfed.runtime.world import World
from hpcfed.server.model import Learnt
from hpcfed.server.options import ServerOptions
from hpcfed.server.rank import Answer, Request, ServerRank, Verb
from hpcfed.server.training import Place, prepare

LINE_EVERY = 5.0
"""Seconds between two lines about the server's progress."""


def check_world(options: ServerOptions, world: World) -> None:
    """Refuses what the server's ranks cannot do where they are; every rank of the job
    finds the same.
    """
    locations = world.server_locations
    on_gpus = any(location.device != "cpu" for location in locations)
    backend = group_backend(locations, world.wanted)
    if options.zero_stage and on_gpus and backend == "gloo":
        raise UserError(
            f"--zero-stage {options.zero_stage} over gloo, which neither reduces to "
            "one rank nor gathers on GPUs; "
            "add --backend nccl"
        )


class Transport(Protocol):
    """Brings a worker's request to the server."""

    def ask(self, request: Request) -> Answer: ...

    def tell(self, request: Request) -> None:
        """Without waiting for anything."""


class ServerClient:
    """The server as a worker's federation sees it. All workers call the same verbs in
    the same order.
    """

    def __init__(
        self, transport: Transport, seed: int, collectives: Collectives
    ) -> None:
        self._transport, self._seed, self._collectives = transport, seed, collectives
        self._reports: list[tuple[int, Learnt]] = []

    def reports(self) -> list[tuple[int, Learnt]]:
        """What learning has told since this was last asked, with the round after which
        it was.
        """
        told, self._reports = self._reports, []
        return told

    def bank(self, round: int, clients: np.ndarray, rows: Tensor) -> None:
        """Uploads of a round, of this worker's clients. They travel while the worker
        goes on.
        """
        self._tell(Request("bank", self._seed, clients, {"round": round}, rows.float()))

    def learn(self, round: int) -> None:
        answer, seconds = self._ask(Request("learn", self._seed))
        assert answer.report is not None
        answer.report.seconds["collect"] = seconds - answer.seconds
        self._reports.append((round, answer.report))

    def invert(
        self, clients: np.ndarray, *, depth: int | None = None
    ) -> tuple[Tensor, np.ndarray]:
        """Generated columns for clients of this worker, and which of them the server
        knows; others are zero.
        """
        return self._generate("invert", clients, {"depth": depth})

    def recall(self, clients: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Their newest uploads as they were."""
        return self._generate("recall", clients, {})

    def reconstruct(self, clients: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Their uploads through the autoencoder alone."""
        return self._generate("reconstruct", clients, {})

    def sample(self, clients: np.ndarray) -> Tensor:
        """Columns out of noise alone, as many as clients."""
        rows = self._ask(Request("sample", self._seed, clients))[0].rows
        assert rows is not None
        return rows

    def guide(
        self,
        clients: np.ndarray,
        before: Tensor,
        after: Tensor,
        *,
        strength: float,
        start: int,
        steps: int,
    ) -> Tensor:
        """Columns of new clients after local training, led on by the model."""
        details = {"strength": strength, "start": start, "steps": steps}
        rows = self._ask(
            Request("guide", self._seed, clients, details, torch.cat([before, after]))
        )[0].rows
        assert rows is not None
        return rows

    def save(self, path: str) -> None:
        self._ask(Request("save", self._seed, details={"path": path}))

    def store(self, folder: str) -> tuple[Part, ...]:
        """Writes what the server knows to a checkpoint's folder; its files."""
        return self._ask(Request("store", self._seed, details={"folder": folder}))[
            0
        ].parts

    def restore(self, folder: str) -> None:
        self._ask(Request("restore", self._seed, details={"folder": folder}))

    def leave(self) -> None:
        """Nothing more will be asked."""
        self._tell(Request("leave", self._seed))

    def _ask(self, request: Request) -> tuple[Answer, float]:
        """The answer, and the seconds until it was there; those before our turn belong
        to other seeds.
        """

        def ask() -> tuple[Answer, float]:
            begin = time.perf_counter()
            return self._transport.ask(request), time.perf_counter() - begin

        self._count(request)
        answer, seconds = self._collectives.in_turn(ask)
        if answer.failure:
            if not self._collectives.world.is_root:
                time.sleep(GRACE)  # the root says it for all, and ends them
            raise ArithmeticError(answer.failure)
        return answer, seconds

    def _tell(self, request: Request) -> None:
        self._count(request)
        self._collectives.in_turn(lambda: self._transport.tell(request))

    def _count(self, request: Request) -> None:
        if request.rows is not None and not self._collectives.world.alone:
            self._collectives.bytes_sent += (
                request.rows.numel() * request.rows.element_size()
            )

    def _generate(
        self, verb: Verb, clients: np.ndarray, details: dict[str, int | None]
    ) -> tuple[Tensor, np.ndarray]:
        answer, waited = self._ask(Request(verb, self._seed, clients, details))
        assert answer.rows is not None and answer.known is not None
        if verb == "invert" and self._reports:
            self._reports[-1][1].kept = answer.kept
            seconds = self._reports[-1][1].seconds
            seconds["invert"] = seconds.get("invert", 0.0) + answer.seconds
            seconds["return"] = seconds.get("return", 0.0) + waited - answer.seconds
        return answer.rows, answer.known


class Among:
    """No rank is set apart: every worker gets all requests and handles them, as one of
    the server's ranks.
    """

    def __init__(
        self,
        widths: Sequence[int],
        options: ServerOptions,
        collectives: Collectives,
        *,
        seeds: Sequence[int],
    ) -> None:
        world = collectives.world
        self._collectives = collectives
        place = Place(world.device, world.role_rank, world.role_size)
        told = _Teller(visible=world.is_root)
        self._room = ServerRank(
            widths, options, place, seeds=seeds, told=told, gather=world.role_allgather
        )

    def ask(self, request: Request) -> Answer:
        answer = self._handle(request)
        assert answer is not None
        return answer

    def tell(self, request: Request) -> None:
        if request.verb != "leave":
            self._handle(request)

    def _handle(self, request: Request) -> Answer | None:
        self._collectives.world.join_alone()
        parts = self._collectives.allgather_rows(
            replace(request, rows=None), request.rows
        )
        answers = self._room.handle(
            [replace(other, rows=rows) for other, rows in parts]
        )
        return answers[self._collectives.world.role_rank]


class Apart:
    """The server has ranks of its own; the first of them hears all workers."""

    def __init__(self, world: World) -> None:
        self._link, self._world = Link(world), world
        self._server = world.num_workers

    def ask(self, request: Request) -> Answer:
        self.tell(request)
        answer, rows = self._link.receive(self._server)
        assert isinstance(answer, Answer)
        return (
            answer
            if rows is None
            else replace(answer, rows=torch.from_numpy(rows).to(self._world.device))
        )

    def tell(self, request: Request) -> None:
        self._link.send(self._server, replace(request, rows=None), request.rows)
        if request.verb == "leave":
            self._link.flush()


def serve(
    world: World, widths: Sequence[int], options: ServerOptions, *, seeds: Sequence[int]
) -> None:
    """A server rank's whole life: handles requests until every seed has left."""
    place = Place(world.device, world.role_rank, world.role_size)
    link, workers = Link(world), range(world.num_workers)
    told = _Teller(visible=world.role_rank == 0)
    room = ServerRank(
        widths, options, place, seeds=seeds, told=told, gather=world.role_allgather
    )
    prepare(options, place)
    staying = set(seeds)
    while staying:
        requests = None
        if world.role_rank == 0:
            requests = [_with_rows(*link.receive(worker)) for worker in workers]
        requests = _share(world, requests)
        if requests[0].verb == "leave":
            staying.remove(requests[0].seed)
            continue
        there = [
            replace(r, rows=None if r.rows is None else r.rows.to(world.device))
            for r in requests
        ]
        for worker, answer in enumerate(room.handle(there)):
            if answer is not None and world.role_rank == 0:
                report = (
                    answer.report
                    if worker == 0 or answer.report is None
                    else Learnt(answer.report.rows)
                )
                link.send(
                    worker, replace(answer, rows=None, report=report), answer.rows
                )
    link.flush()


def _with_rows(request: Request, rows: np.ndarray | None) -> Request:
    return replace(request, rows=None if rows is None else torch.from_numpy(rows))


def _share(world: World, requests: list[Request] | None) -> list[Request]:
    """The first server rank's requests on all of them; rows go as one buffer each."""
    own = None
    if requests is not None:
        own = [
            (replace(r, rows=None), None if r.rows is None else tuple(r.rows.shape))
            for r in requests
        ]
    headers = world.role_bcast(own)
    if requests is None:
        requests = [
            replace(header, rows=None if shape is None else torch.empty(shape))
            for header, shape in headers
        ]
    for request in requests:
        if request.rows is not None:
            world.role_bcast_array(request.rows.numpy())
    return requests


class _Teller:
    """Lines about the server's progress, on the one rank that speaks."""

    def __init__(self, *, visible: bool) -> None:
        self._visible, self._next, self._network = visible, 0.0, ""

    def __call__(self, network: str, done: int, steps: int) -> None:
        now = time.monotonic()
        if network != self._network:
            self._network, self._next = network, now + LINE_EVERY
        if self._visible and (done == steps or now >= self._next):
            remark(f"server: {network} step {done}/{steps}")
            self._next = now + LINE_EVERY
