"""The virtual clock: when uploads arrive, which of them count, and when a round ends.

A member's time is that of its downloads, its local steps and its uploads. Members work
in parallel, and the server takes no time. Work that clients do for themselves, such as
fine-tuning before an evaluation, is not counted.

- The server waits for the cohort's number of uploads: with --oversample more clients are
  invited, and the first uploads count.
- After --deadline it goes on with what it has. If that is nothing, it waits for the
  first upload.
- Clients that vanish (--dropout-rate) send nothing. Without a deadline the server goes on
  once all others have arrived. If all vanish, the fastest comes back.
- With --privacy central a round may end without any upload: if one client's absence let
  another's late upload count, it would change the sum by more than its own update. If
  clients come and go, such rounds begin and end at fixed times, every --deadline: if
  one client's time moved the end of a round, it would change who is available in the
  next.
- With --partial a client does the local steps that fit before the deadline, at least
  one. It reserves time for an upload as large as the largest of the last round. In the
  first round, and with --privacy central, it expects to upload as much as it was sent.
- Late clients give up. They may be invited to the next round like any other client.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from hpcfed.errors import UserError
from hpcfed.federation.channel import Memory
from hpcfed.federation.channel.devices import Devices
from hpcfed.options import RunConfig
from hpcfed.runtime import randomness

SLACK = 1 + 1e-9
"""Rounding may move a sum of times just past the deadline that it was planned for."""
MOST_STEPS = 2**53
"""More steps than any client takes, and still exact as a float."""
KEPT = "clock"
"""Name of the clock's numbers in the channel's memory."""
NOTHING = torch.zeros(2, dtype=torch.float64)
"""These numbers before the first round."""


@dataclass
class VirtualClock:
    """The clock of a run: the future is in `devices`, the past in `memory`."""

    config: RunConfig
    devices: Devices
    holders: np.ndarray
    """Ids of the clients that have training data."""
    memory: Memory

    def __post_init__(self) -> None:
        config = self.config
        comes_and_goes = self.devices.availability is not None
        central = config.privacy == "central" and not config.clips_alone
        # Without noise there is no promise that a round's end could break.
        self._fixed = central and comes_and_goes
        """Whether rounds begin and end at fixed times."""
        if self._fixed and config.deadline is None:
            raise UserError(
                "--privacy central would not hold with clients that come and go: the "
                "end of a round would depend on its members, and decide who is "
                "available in the next; give --deadline, as in 30, so that rounds "
                "end at fixed times"
            )
        # If no client has data, there is no availability to ask for.
        there = self.devices.presence(self.holders) if len(self.holders) else None
        self._holders_there = there
        self._everyone = np.arange(len(self.devices.speed))
        self._last: tuple[float, float] | None = None
        """What is in the memory, once it has been read or written."""

    @property
    def now(self) -> float:
        """Virtual seconds since the run's start, at the end of the last round."""
        now, _ = self._kept()
        return now

    def _kept(self) -> tuple[float, float]:
        """Return the time, and the bytes of the last round's largest upload."""
        # As Python numbers: a few torch operations would take longer than all the rest.
        if self._last is None:
            now, largest = self.memory.common(KEPT, NOTHING).tolist()
            if not (0 <= now < np.inf and 0 <= largest < np.inf):
                raise UserError(f"the checkpoint's {KEPT} holds impossible numbers")
            self._last = now, largest
        return self._last

    def next_moment(self) -> float:
        """Return when the next round can begin: as soon as a client with data is
        available, or immediately if rounds have fixed times.
        """
        moment = self._next()
        if not np.isfinite(moment):
            raise UserError(
                f"{self.config.devices}: no client with data is available after "
                f"{self.now:,.0f} virtual seconds; a period in the trace lets clients "
                "come back"
            )
        return moment

    @property
    def is_over(self) -> bool:
        """Whether no client with data will ever be available again."""
        return not np.isfinite(self._next())

    def _next(self) -> float:
        """Return when a client with data is available next; infinity: never."""
        there = self._holders_there
        return self.now if there is None or self._fixed else there.next(self.now)

    def available(self, now: float) -> np.ndarray:
        """Return the ids of the clients that are available at this moment."""
        if self.devices.availability is None:
            return self._everyone
        return self.devices.available(now)

    def begin(self, round: int, clients: np.ndarray, now: float) -> "MembersTime":
        """Begin a round with these clients."""
        config = self.config
        _, largest = self._kept()
        lost = np.zeros(len(clients), bool)
        if config.dropout_rate:
            generator = randomness.generator(config.seed, "vanishing clients", round)
            lost = generator.random(len(clients)) < config.dropout_rate
        return MembersTime(
            devices=self.devices,
            clients=clients,
            begin=now,
            lost=lost,
            wanted=self._wanted(len(clients)),
            needs_one=config.privacy != "central",
            deadline=np.inf if config.deadline is None else config.deadline,
            partial=config.partial,
            # The last round's largest upload is not hidden by noise.
            expected_upload=0.0 if config.privacy == "central" else largest,
        )

    def _wanted(self, invited: int) -> int:
        """Return the number of uploads that the server waits for."""
        # With --sampling poisson a round may have more clients than its cohort size.
        if self.config.oversample == 1:
            return invited
        return self.config.cohort_among(len(self.devices.speed))

    def end(self, round: "MembersTime") -> np.ndarray:
        """End a round; return the ids of the clients whose uploads the server has."""
        round.close()
        if self._fixed:
            # Even if all uploads came early: the end must not tell who took part.
            round.end = round.begin + round.deadline
        self._keep(round.end, float(round.sent.max(initial=0.0)))
        return round.clients[round.arrived]

    def skip(self) -> None:
        """End a round without members. It takes no time, unless times are fixed."""
        if self._fixed:
            now, largest = self._kept()
            assert self.config.deadline is not None
            self._keep(now + self.config.deadline, largest)

    def _keep(self, now: float, largest: float) -> None:
        self._last = now, largest
        self.memory.keep(KEPT, torch.from_numpy(np.array(self._last)))


@dataclass
class MembersTime:
    """The seconds that each member of a round takes; arrays are in the order of ids."""

    devices: Devices
    clients: np.ndarray
    """Ids of the members, ascending."""
    begin: float
    """Virtual time at which the round has begun."""
    lost: np.ndarray
    """Members whose uploads never arrive."""
    wanted: int
    """Number of uploads that the server waits for."""
    needs_one: bool
    """Whether the server always waits for at least one upload."""
    deadline: float
    """Seconds after which the server stops waiting; infinity: never."""
    partial: bool
    """Whether members stop training in time for the deadline."""
    expected_upload: float
    """Bytes that a member expects to send; 0: as many as it was sent."""
    end: float = np.nan
    """Virtual time at which the round has ended."""
    arrived: np.ndarray = field(init=False)
    """Positions of the members whose uploads count, once the round is closed."""

    def __post_init__(self) -> None:
        members = len(self.clients)
        # One allocation, not five: a round of a small model is very short.
        sums = np.zeros((5, members))
        self._download, self._train, self._upload, self._dense, self.sent = sums
        """Seconds of downloads, training and uploads; the bytes that each member would
        have been sent without packing, and the bytes that it has sent.
        """
        self._steps = np.zeros(members, np.int64)
        self._time_for: np.ndarray | None = None

    def download(
        self,
        clients: np.ndarray,
        num_bytes: np.ndarray | float,
        dense: np.ndarray | float,
    ) -> None:
        """Count the bytes that each of these members is sent."""
        at = self._at(clients)
        self._download[at] += self.devices.download_seconds(clients, num_bytes)
        self._dense[at] += dense

    def train(self, clients: np.ndarray, steps: np.ndarray) -> np.ndarray | None:
        """Count local steps; return how many each member has time for, None if all."""
        at = self._at(clients)
        limits = None
        if self.partial:
            left = self._limits()[at] - self._steps[at]
            steps = limits = np.clip(steps, 0, left)
        self._steps[at] += steps
        self._train[at] += self.devices.train_seconds(clients, steps)
        return limits

    def upload(self, clients: np.ndarray, num_bytes: np.ndarray | float) -> None:
        """Count the bytes that each of these members sends."""
        at = self._at(clients)
        self._upload[at] += self.devices.upload_seconds(clients, num_bytes)
        self.sent[at] += num_bytes

    def steps_in_time(self, clients: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Return how many of its `steps` each client has time for in this round."""
        if not self.partial:
            return steps
        return np.minimum(steps, self._limits()[self._at(clients)])

    def close(self) -> None:
        """Decide whose uploads count, and when the round ends."""
        self.arrived, duration = arrivals(
            self._seconds(),
            self.lost,
            wanted=self.wanted,
            deadline=self.deadline,
            needs_one=self.needs_one,
        )
        self.end = self.begin + duration

    def came(self, clients: np.ndarray) -> np.ndarray:
        """Return which of these members' uploads arrived in a closed round."""
        came = np.zeros(len(self.clients), bool)
        came[self.arrived] = True
        found: np.ndarray = came[self._at(clients)]
        return found

    def table(self) -> dict[str, np.ndarray]:
        """Return what is recorded about every member of a closed round, by name."""
        counted = np.zeros(len(self.clients))
        counted[self.arrived] = 1
        arrival = self.begin + self._seconds()
        # The fastest of the vanished clients may have come back.
        arrival[self.lost & (counted == 0)] = np.nan
        return {
            "client": self.clients,
            "download": self._download,
            "train": self._train,
            "upload": self._upload,
            "steps": self._steps,
            "arrival": arrival,
            "arrived": counted,
        }

    def _seconds(self) -> np.ndarray:
        """Return the total time of each member."""
        return self._download + self._train + self._upload

    def _at(self, clients: np.ndarray) -> np.ndarray | slice:
        """Return these clients' positions among the members; usually all."""
        if clients is self.clients:
            return slice(None)
        return np.searchsorted(self.clients, clients)

    def _limits(self) -> np.ndarray:
        """Return the local steps that each has time for; known after its download."""
        if self._time_for is None:
            expected = self.expected_upload or self._dense
            upload = self.devices.upload_seconds(self.clients, expected)
            left = self.deadline * SLACK - self._download - upload
            one = self.devices.train_seconds(self.clients, 1)
            # At least one: a client without time for it is late.
            self._time_for = np.clip(left // one, 1, MOST_STEPS).astype(np.int64)
        return self._time_for


def arrivals(
    seconds: np.ndarray,
    lost: np.ndarray,
    *,
    wanted: int,
    deadline: float,
    needs_one: bool = True,
) -> tuple[np.ndarray, float]:
    """Return the positions of the members whose uploads count, ascending, and the
    seconds after which the round ends.

    `seconds` is what each member takes; `lost` marks uploads that never arrive. The
    server waits for `wanted` uploads, and at most until the deadline, unless it
    `needs_one` and has none.
    """
    last = float(seconds.max())
    if last <= deadline * SLACK and wanted >= len(seconds) and not lost.any():
        # All arrive, as in most rounds without a deadline: no need to sort.
        return np.arange(len(seconds)), min(last, deadline)
    if lost.all() and needs_one:
        lost = np.arange(len(lost)) != seconds.argmin()
    # Of equally fast members, the smaller id comes first.
    order = np.argsort(seconds, kind="stable")
    coming = order[~lost[order]]
    in_time = np.count_nonzero(seconds[coming] <= deadline * SLACK)
    if not in_time and needs_one:
        return coming[:1], float(seconds[coming[0]])
    if not in_time:
        return coming[:0], last if np.isinf(deadline) else deadline
    came = coming[: min(in_time, wanted)]
    last = float(seconds[came[-1]])
    is_all = len(came) == min(wanted, len(seconds))
    if is_all or np.isinf(deadline):
        return np.sort(came), min(last, deadline)
    # The server cannot know that a client has vanished: it waits until the deadline.
    return np.sort(came), deadline
