"""Examines the machine: every rank measures, then all know what each has found."""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hpcfed.doctor import (
    devices,
    hearing,
    limits,
    links,
    placement,
    server_step,
    software,
    storage,
)
from hpcfed.doctor.finding import Finding, error, skipped
from hpcfed.doctor.report import Diagnosis
from hpcfed.errors import one_line
from hpcfed.runtime import probes
from hpcfed.runtime.attempts import NoAnswer, attempt
from hpcfed.runtime.meetings import Meetings
from hpcfed.runtime.world import World, is_first_of_host

T = TypeVar("T")
PATIENCE = 2.0
"""How many times the limit of a check the root waits for other ranks."""
FAILED = "see the reason; without this a run would fail or hang, too"


class RankMissing(Exception):
    """A rank did not come to a meeting, so ranks can do nothing more together."""


@dataclass(frozen=True)
class DoctorRequest:
    """What the user has asked for."""

    out: Path
    timeout: float
    """Seconds that one check may take."""
    device: str = "auto"
    """The value of --device, which means what it means for a run."""


class Examination:
    """One rank's part in the examination."""

    def __init__(self, world: World, request: DoctorRequest) -> None:
        self._world = world
        self._request = request
        self._meetings = Meetings(world.comm, PATIENCE * request.timeout)
        self._began = time.monotonic()
        self.parts: dict[str, list[Finding]] = {}
        self.stage = (0, "the start")
        """How many checks have begun, and the last one's name; for a watcher."""
        self.hangs = False
        """Whether a check still runs on some rank, or a rank is missing."""

    def run(self) -> Diagnosis:
        """Make all checks; the same call on every rank. All get the same diagnosis."""
        try:
            self._look_around()
            self._look_at_storage()
            self._look_at_links()
            self._listen()
        except RankMissing:
            pass
        finally:
            self._begin("the end")
            # In a thread: the file system may be what hangs.
            attempt(storage.remove_left, 2 * storage.REMOVED)
        return Diagnosis(self.parts, time.monotonic() - self._began)

    def _look_around(self) -> None:
        """Make checks that each rank makes by itself."""
        world, host = self._world, self._world.location.host
        placed = self._ask("MPI", "placement", lambda: placement.look(world))
        self._tell("MPI", placement.judge, placed)
        wanted = self._request.device
        versions = self._ask(
            "software", "versions", lambda: software.look(world, wanted)
        )
        self._tell("software", software.judge, versions)
        allowed = self._ask(
            "limits", "limits", lambda: limits.look(host, is_root=world.is_root)
        )
        self._tell("limits", limits.judge, allowed)
        measured = self._ask("device", "speed", lambda: devices.look(world))
        self._tell("device", devices.judge, _known(measured))

    def _look_at_storage(self) -> None:
        world, out = self._world, self._request.out
        is_first = is_first_of_host(world)

        def look() -> storage.StorageProbe | None:
            return storage.look(out, world.location.host) if is_first else None

        firsts = _known(self._ask("storage", "files", look))
        self._tell("storage", lambda own: storage.judge(own, out), firsts)
        if any(not step.failure for one in firsts.values() for step in one.steps):
            self._look_from_other_nodes(is_first and not world.is_root)

    def _look_from_other_nodes(self, look: bool) -> None:
        """Check whether other nodes see what the root writes; `look`: this rank does."""
        if len({location.host for location in self._world.locations}) == 1:
            self._add("storage", storage.judge_shared({}))
            return
        with ExitStack() as held:

            def offer() -> Path | None:
                made = storage.offered(self._request.out)
                return held.enter_context(made) if self._world.is_root else None

            folder = self._ask("storage", "shared", offer).get(0)

            def see() -> storage.Seen | None:
                return storage.see(folder) if look and folder else None

            seen = _known(self._ask("storage", "shared", see))
        # Without a folder of the root, the finding says why.
        if folder is not None:
            self._add("storage", storage.judge_shared(seen))

    def _look_at_links(self) -> None:
        """Make checks among ranks. After one that hangs no other can be made."""
        world, limit = self._world, self._request.timeout
        if not world.alone:
            passed = self._ask(
                "links", "MPI messages", lambda: probes.pass_around(world, limit / 2)
            )
            self._tell("links", links.judge_messages, passed)
        backends = self._ask("links", "connect", lambda: probes.connect(world))
        if len(backends) < world.size:
            self._add("links", skipped("collectives", "not all ranks are connected"))
            return
        backend = backends[0]
        found = self._ask("links", "collectives", lambda: probes.exchanges(world))
        self._tell("links", lambda own: links.judge_exchanges(own, backend), found)
        if len(found) < world.size:
            self._add("server", skipped("DeepSpeed", "collectives do not work"))
            return
        advice = server_step.ADVICE
        step = lambda: server_step.look(world)  # noqa: E731
        stepped = self._ask("server", "DeepSpeed", step, advice)
        if len(stepped) == world.size:
            self._tell("server", server_step.judge, stepped)

    def _listen(self) -> None:
        # Not in a thread: signals reach Python's main thread.
        self._begin("signals")
        heard = hearing.listen(self._world.launch, self._met)
        self._tell("signals", hearing.judge, self._met(heard))

    def _ask(
        self, part: str, check: str, look: Callable[[], T], advice: str = FAILED
    ) -> dict[int, T]:
        """Return what every rank has measured; those that could not are findings."""
        self._begin(check)
        world, limit = self._world, self._request.timeout
        answers = self._met(attempt(look, limit, world.device))
        found: dict[int, T] = {}
        failed: dict[NoAnswer, list[int]] = {}
        for rank, answer in answers.items():
            if isinstance(answer, NoAnswer):
                failed.setdefault(answer, []).append(rank)
                self.hangs = self.hangs or answer.hangs
            else:
                found[rank] = answer
        for answer, ranks in failed.items():
            slow = f"if it is only slow: --timeout {2 * limit:g}s; otherwise "
            what = slow + advice if answer.hangs else advice
            self._add(part, error(check, answer.reason, what, *ranks))
        return found

    def _met(self, value: T) -> dict[int, T]:
        """Return what all ranks have brought; note and raise if some are missing."""
        brought = self._meetings.hold(value)
        missing = [rank for rank in range(self._world.size) if rank not in brought]
        if not missing:
            return brought
        self.hangs = True
        told = "did not come back from this check"
        advice = "see what is wrong with its node, and leave it out"
        _, check = self.stage
        self._add("ranks", error(check, told, advice, *missing))
        raise RankMissing

    def _begin(self, check: str) -> None:
        number, _ = self.stage
        self.stage = (number + 1, check)

    def _tell(
        self,
        part: str,
        judge: Callable[[Mapping[int, T]], list[Finding]],
        measured: Mapping[int, T],
    ) -> None:
        """Add what is found in measurements; without any there is nothing to judge."""
        if not measured:
            return
        try:
            findings = judge(measured)
        except Exception as failure:
            # The report must not end with figures that nobody has foreseen.
            _, check = self.stage
            told = f"measured, but not understood: {one_line(failure)}"
            findings = [error(check, told, "report it to hpcfed's authors")]
        for finding in findings:
            self._add(part, finding)

    def _add(self, part: str, finding: Finding) -> None:
        self.parts.setdefault(part, []).append(finding)


def _known(answers: Mapping[int, T | None]) -> dict[int, T]:
    """Leave out ranks that had nothing to measure."""
    return {rank: one for rank, one in answers.items() if one is not None}
