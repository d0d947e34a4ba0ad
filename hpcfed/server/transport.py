"""The two ways from workers to the server: the server has its own ranks, or every
worker is a server rank, too.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from hpcfed.errors import UserError
from hpcfed.runtime import accelerator
from hpcfed.runtime.collectives import Collectives
from hpcfed.runtime.link import Link
from hpcfed.runtime.process_group import group_backend
from hpcfed.runtime.world import World
from hpcfed.server import wire
from hpcfed.server.engines import import_engine
from hpcfed.server.half_learnt import Asked
from hpcfed.server.messages import A, Answer, Failure, Posted, Request
from hpcfed.server.options import ServerOptions
from hpcfed.server.progress import ProgressLines
from hpcfed.server.rank import ServerRank
from hpcfed.server.rehearsal import rehearse
from hpcfed.server.requests import Learned, Leave
from hpcfed.server.training_plan import RankSlot


def check_world(options: ServerOptions, world: World) -> None:
    """Refuse options that the server's ranks cannot support on their devices. All ranks
    of the job come to the same result.
    """
    locations = world.server_locations
    on_gpus = any(location.device != "cpu" for location in locations)
    backend = group_backend(locations, world.wanted)
    if options.zero_stage and on_gpus and backend == "gloo":
        raise UserError(
            f"--zero-stage {options.zero_stage} over gloo, which neither reduces to "
            "one rank nor gathers on GPUs; "
            f"add --backend {accelerator.BACKENDS[locations[0].kind]}"
        )


class Transport(Protocol):
    """Takes a worker's requests to the server."""

    def heed(self, asked: Asked) -> None:
        """Let learnings know when `asked` says that the run is to stop."""

    def ask(self, request: Request[A]) -> A | Failure:
        """Send a request, and wait for the answer."""

    def tell(self, request: Request) -> None:
        """Send a request that has no answer."""

    def post(self, request: Request[A]) -> Posted[A]:
        """Send a request whose answer is collected later."""

    def collect(self, posted: Posted[A]) -> A | Failure:
        """Return the answer to a posted request; wait for it if need be."""


class Colocated:
    """The workers are the server's ranks: each handles the requests of all workers."""

    def __init__(
        self,
        widths: Sequence[int],
        options: ServerOptions,
        collectives: Collectives,
        *,
        seeds: Sequence[int],
    ) -> None:
        """Make this worker a server rank; `widths` are as for `ServerRank`."""
        world = collectives.world
        self._collectives = collectives
        self.rank = ServerRank(
            widths,
            options,
            RankSlot.of(world),
            seeds=seeds,
            progress=ProgressLines(visible=world.is_root),
            allgather=world.role_allgather,
        )

    def heed(self, asked: Asked) -> None:
        self.rank.asked = asked

    def ask(self, request: Request[A]) -> A | Failure:
        """Exchange requests with all workers, and handle them on every rank."""
        world = self._collectives.world
        world.join_alone()  # DeepSpeed needs a process group, even for a single rank
        answers = self.rank.handle(wire.allgather(self._collectives, request))
        return answers[world.role_rank]

    def tell(self, request: Request) -> None:
        """Handle a request; ignore `Leave`, since this process continues."""
        if not isinstance(request, Leave):
            self.ask(request)

    def post(self, request: Request[A]) -> Posted[A]:
        """Handle a request at once: this process has nobody to leave it to."""
        return Posted(request, self.ask(request))

    def collect(self, posted: Posted[A]) -> A | Failure:
        """Return the answer, which has been there from the start."""
        assert posted.answer is not None
        return posted.answer


class Remote:
    """The server has its own ranks; the first of them talks to every worker."""

    def __init__(self, world: World) -> None:
        self._link = Link(world)
        self._world = world
        self._server = world.num_workers
        self._posted: deque[Posted] = deque()
        """Requests whose answers have not been received, in the order of sending."""
        self._asked: Asked = lambda: False
        self._has_urged = False

    def heed(self, asked: Asked) -> None:
        self._asked = asked

    def ask(self, request: Request[A]) -> A | Failure:
        """Send a request to the first server rank, and wait for the answer."""
        return self.collect(self._send(request))

    def tell(self, request: Request) -> None:
        """Send a request without waiting for the transfer."""
        if isinstance(request, Leave):
            # An answer that nobody has collected would keep the server waiting.
            for posted in list(self._posted):
                if posted.request.seed == request.seed:
                    self.collect(posted)
        wire.send(self._link, self._server, request)
        # All messages must have been sent before this process ends.
        if isinstance(request, Leave):
            self._link.flush()

    def post(self, request: Request[A]) -> Posted[A]:
        """Send a request, and wait until the server has everything that it needs for
        it: MPI may send a large message only while this process calls MPI, and clients
        train without.
        """
        posted = self._send(request)
        self._link.flush()
        return posted

    def collect(self, posted: Posted[A]) -> A | Failure:
        """Receive answers until that to this request is there: they come in the order
        of the requests, those of other seeds among them.
        """
        while posted.answer is None:
            answer = wire.receive(self._link, self._server, meanwhile=self._urge)
            first = self._posted.popleft()
            first.answer = wire.on_device(answer, self._world.device)
        return posted.answer

    def _urge(self) -> None:
        """Let the server know, once, that the run is to stop: it may be learning."""
        if self._asked() and not self._has_urged:
            self._has_urged = True
            self._link.urge(self._server)

    def _send(self, request: Request[A]) -> Posted[A]:
        wire.send(self._link, self._server, request)
        posted = Posted(request)
        self._posted.append(posted)
        return posted


def serve(
    world: World, widths: Sequence[int], options: ServerOptions, *, seeds: Sequence[int]
) -> None:
    """Handle requests on a server rank until every seed has left."""
    is_first = world.role_rank == 0
    link = Link(world)
    rank = ServerRank(
        widths,
        options,
        RankSlot.of(world),
        seeds=seeds,
        progress=ProgressLines(visible=is_first),
        allgather=world.role_allgather,
    )
    # Signals that reach a server rank mean nothing: workers tell it when to stop.
    if is_first:
        rank.asked = link.is_urged
    # Clients are in their first training meanwhile, so these seconds cost nothing.
    import_engine(options, world.device)
    # On a CPU a learning would take cores from clients.
    if world.device.type != "cpu":
        rehearse(options, rank.slot, world.role_allgather)
    present = set(seeds)
    while present:
        # All workers send the same requests in the same order, so receive one of each.
        received: list[Request] = []
        if is_first:
            for worker in range(world.num_workers):
                received.append(wire.receive(link, worker))
        requests = wire.bcast(world, received)
        first = requests[0]
        # All workers of a seed leave together.
        if isinstance(first, Leave):
            present.remove(first.seed)
            continue
        on_device = [wire.on_device(request, world.device) for request in requests]
        # Every server rank computes all answers; the first one sends them.
        answers = rank.handle(on_device)
        if is_first and first.answered:
            _send_answers(link, answers)
    if is_first:
        # A word that came too late must not stop the next run of this process.
        link.is_urged()
    link.flush()


def _send_answers(link: Link, answers: Sequence[Answer]) -> None:
    for worker, answer in enumerate(answers):
        # A report is large: it holds the losses of all steps. Only the first worker
        # records it.
        if isinstance(answer, Learned) and worker > 0:
            answer = replace(answer, report=None)
        wire.send(link, worker, answer)
