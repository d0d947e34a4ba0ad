"""FedAsync and FedBuff: who trains when, and both methods against a naive event loop."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import inf
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hpcfed.cli import parse_run
from hpcfed.clients.pull import Pull, Strengths
from hpcfed.errors import UserError
from hpcfed.experiment.assemble import Setup
from hpcfed.federation.cohort import Cohort
from hpcfed.federation.log import RoundLog
from hpcfed.methods import fedasync, fedbuff
from hpcfed.methods._asynchronous import Wave
from hpcfed.methods._timetable import Idle, InTraining, Pace, Timetable, waves
from hpcfed.methods._waves import Received
from hpcfed.options import check
from hpcfed.options.channel import channel_line
from hpcfed.runtime.launcher import Launch
from tests.federations import assembled, rounds

SECONDS = np.array([1.0, 2.0, 5.0])
OnTime = tuple[float, int, int]


def scripted(*numbers: float) -> Callable[[], float]:
    return iter(numbers).__next__


def on_time(arrivals: list[InTraining]) -> list[OnTime]:
    """Seconds, client and version of those that were not lost."""
    return [
        (one.seconds, one.position, one.version) for one in arrivals if not one.lost
    ]


def runs_of(arrivals: list[InTraining], buffer: int) -> list[list[int]]:
    clients = [one.position for one in arrivals]
    versions = [one.version for one in arrivals]
    runs = waves(clients, versions, received=0, buffer=buffer)
    return [clients[run.start : run.stop] for run in runs]


def test_a_timetable_of_three_clients_by_hand() -> None:
    """Clients 0, 1 and 2 take 1, 2 and 5 s; two of them train at a time."""
    table = Timetable(Pace(SECONDS, places=2))
    # At 0 s the first of [0, 1, 2], which leaves [2, 1], and the first of these. Then 0
    # is back: of [1, 0] the first, of [0, 1] the first, of [1, 0] the first. At 5 s 2 is
    # back: of [0, 2] the first; and so on.
    found = table.receive(6, scripted(0.0, 0.1, 0.4, 0.2, 0.3, 0.0, 0.0, 0.0))
    assert on_time(found) == [
        (1.0, 0, 0),
        (3.0, 1, 1),
        (4.0, 0, 2),
        (5.0, 2, 0),
        # Both arrive at 6 s: the smaller comes first.
        (6.0, 0, 4),
        (6.0, 1, 3),
    ]
    assert table.now == 6.0 and table.received == 6
    # 1 waits for version 1, the second 0 for version 2, the third 0 for version 4; 2 and
    # the last 1 start from versions that are there.
    assert runs_of(found, buffer=1) == [[0], [1], [0, 2], [0, 1]]


def test_versions_are_made_of_buffers() -> None:
    """Two uploads make a version; who starts in between starts from the one before."""
    table = Timetable(Pace(SECONDS, places=2, buffer=2))
    found = table.receive(4, scripted(0.0, 0.1, 0.4, 0.2, 0.3, 0.0))
    assert on_time(found) == [(1.0, 0, 0), (3.0, 1, 0), (4.0, 0, 1), (5.0, 2, 0)]
    # Both will arrive at 6 s: 0 has started at 5 s, and 1 at 4 s.
    assert [(one.position, one.version) for one in table.training] == [(0, 2), (1, 1)]
    assert runs_of(found, buffer=2) == [[0, 1], [0, 2]]


def test_nobody_is_twice_in_a_wave() -> None:
    """With a large buffer a client may be back before the next version."""
    table = Timetable(Pace(SECONDS[:1], places=1, buffer=5))
    found = table.receive(3, lambda: 0.0)
    assert on_time(found) == [(1.0, 0, 0), (2.0, 0, 0), (3.0, 0, 0)]
    assert runs_of(found, buffer=5) == [[0], [0], [0]]


def test_lost_uploads_leave_their_place_when_they_would_have_come() -> None:
    table = Timetable(Pace(SECONDS, places=1, dropout_rate=0.5))
    # Pairs: who is invited, and whether the upload is lost (below 0.5).
    numbers = scripted(0.0, 0.9, 0.5, 0.1, 0.0, 0.7, 0.0, 0.9)
    found = table.receive(2, numbers)
    # 0 from 0 to 1 s; 1, the second of [2, 1, 0], from 1 s on, lost at 3 s; 2 from 3 to
    # 8 s, from version 1: what is lost makes no version.
    assert on_time(found) == [(1.0, 0, 0), (8.0, 2, 1)]
    assert [(one.seconds, one.position) for one in found if one.lost] == [(3.0, 1)]


class Shifts:
    """Client 0 is there before 2 s, client 2 from 10 to 18 s, client 1 never."""

    def at(self, now: float) -> np.ndarray:
        return np.array([now < 2, False, 10 <= now < 18])

    def next(self, now: float) -> float:
        if now >= 18:
            return inf
        return now if now < 2 else max(now, 10.0)


@pytest.mark.parametrize("number", [0.0, 0.5, 0.9])
def test_who_is_away_is_not_invited(number: float) -> None:
    """Whatever is drawn; time goes on to the next moment at which somebody is there."""
    table = Timetable(Pace(SECONDS, places=2, presence=Shifts()))
    found = table.receive(3, lambda: number)
    assert [(one.seconds, one.position) for one in found] == [(1, 0), (2, 0), (15, 2)]
    assert [one.seconds for one in table.training] == [20.0]
    with pytest.raises(UserError, match="ever available again"):
        table.receive(1, lambda: number)


class Always:
    """The same clients are there at any time."""

    def __init__(self, there: np.ndarray) -> None:
        self._there = there

    def at(self, now: float) -> np.ndarray:
        return self._there

    def next(self, now: float) -> float:
        return now


@pytest.mark.parametrize("share", [1.0, 0.6, 0.05])
def test_whoever_is_idle_and_there_is_invited_equally_often(share: float) -> None:
    """Also where so few are there that they are listed."""
    total, invitations = 60, 3000
    generator = np.random.default_rng(0)
    there = generator.permutation(total) < round(share * total)
    pace = Pace(np.ones(total), places=1, presence=Always(there))
    arrivals = Timetable(pace).receive(invitations, generator.random)
    counts = np.bincount([one.position for one in arrivals], minlength=total)
    assert not counts[~there].any()
    mean = invitations / there.sum()
    # Five standard deviations of a binomial count.
    assert np.abs(counts[there] - mean).max() < 5 * mean**0.5


def test_clients_that_are_there_are_listed_after_sixteen_others() -> None:
    there = np.array([False, True, True])
    table = Timetable(Pace(SECONDS, places=1, presence=Always(there)))
    numbers = scripted(*[0.0] * 16, 0.6, 0.0)
    # The list is [1, 2]; what is left of the numbers is for the next invitation.
    assert table._one_there(Always(there), numbers) == 2
    assert numbers() == 0.0
    nobody = np.zeros(3, bool)
    assert table._one_there(Always(nobody), scripted(*[0.5] * 16)) is None


def test_a_timetable_begins_at_no_time_with_no_upload() -> None:
    table = Timetable(Pace(SECONDS, places=1))
    assert (table.now, table.received, table.training) == (0.0, 0, [])
    pace = Pace(SECONDS, places=1)
    assert (pace.buffer, pace.dropout_rate, pace.presence) == (1, 0.0, None)
    assert waves([0, 1, 2], [0, 1, 1], received=1, buffer=2) == [
        range(1),
        range(1, 3),
    ]


def test_clients_in_training_may_be_given_in_any_order() -> None:
    training = [
        InTraining(second, at, 0, False) for at, second in enumerate((3.0, 1.0))
    ]
    table = Timetable(Pace(SECONDS, places=2), training, now=0.5, received=4)
    assert [one.seconds for one in table.receive(2, lambda: 0.0)] == [1.0, 3.0]
    assert table.received == 6


@given(
    st.integers(1, 12),
    st.integers(1, 15),
    st.integers(1, 4),
    st.integers(0, 2**32),
)
def test_timetables_keep_their_promises(
    clients: int, places: int, buffer: int, seed: int
) -> None:
    """Nobody trains twice at a time, all places are taken, and everybody starts from the
    newest version, when a place is free.
    """
    generator = np.random.default_rng(seed)
    seconds = generator.integers(1, 4, clients).astype(float)
    pace = Pace(seconds, places, buffer, dropout_rate=0.2)
    table = Timetable(pace)
    uploads = table.receive(10, generator.random) + table.receive(10, generator.random)
    came = on_time(uploads)
    assert len(came) == 20 == table.received
    assert [one.seconds for one in uploads] == sorted(one.seconds for one in uploads)
    for moment, client, version in came:
        begin = moment - seconds[client]
        # Those that have arrived at that very moment may have come before or after.
        before = sum(other < begin for other, *_ in came)
        until = sum(other <= begin for other, *_ in came)
        assert before // buffer <= version <= until // buffer
    training = table.training
    assert len({one.position for one in training}) == len(training)
    assert len(training) == min(places, clients)


@given(st.integers(1, 40), st.data())
def test_the_list_of_the_idle_is_one(total: int, data: st.DataObject) -> None:
    """It has everybody who is not busy, once, whoever comes and goes."""
    busy: set[int] = data.draw(st.sets(st.integers(0, total - 1)))
    idle = Idle(total, busy)
    others = set(range(total)) - busy
    for _ in range(10):
        listed = [idle.at(number) for number in range(idle.count)]
        assert len(listed) == len(others) and set(listed) == others
        assert idle.listed().tolist() == listed
        back_first: bool = data.draw(st.booleans())
        if busy and back_first:
            back = busy.pop()
            idle.add(back)
            others.add(back)
        elif others:
            number = data.draw(st.integers(0, idle.count - 1))
            assert idle.take(number) == listed[number]
            others.remove(listed[number])
            busy.add(listed[number])


def test_more_places_than_clients() -> None:
    table = Timetable(Pace(SECONDS, places=5))
    assert on_time(table.receive(2, lambda: 0.0)) == [(1.0, 0, 0), (2.0, 0, 1)]
    assert [one.position for one in table.training] == [1, 0, 2]


# Both methods against a naive event loop


Staleness = Callable[[int], float]


@dataclass
class Naive:
    """A server and its clients, one event after the other: whoever arrives is trained
    then, alone, from the row that it was given.
    """

    setup: Setup
    places: int
    buffer: int
    staleness: Staleness
    rate: float
    """α of FedAsync, or η_g of FedBuff."""
    bad: int | None = None
    """A client whose uploads do not count."""

    def __post_init__(self) -> None:
        fed = self.setup.federation
        self.fed = fed
        self.w = fed.initial_row()
        self.now, self.version, self.lost = 0.0, 0, 0
        self.waiting: list[tuple[int, Tensor]] = []
        self.events: list[tuple[float, int, int, bool, Tensor]] = []
        devices = fed.channel.devices
        assert devices is not None
        ids = np.arange(len(fed.sizes))
        steps = -(-fed.sizes // fed.config.batch_size) * fed.config.epochs
        size = fed.layout.num_columns * 8
        self.seconds = devices.seconds(ids, steps, size, size)

    def begin_round(self) -> None:
        """List who does not train: those that do leave gaps, which the last fill."""
        busy = {client for _, client, *_ in self.events}
        holders = [client for client, n in enumerate(self.fed.sizes) if n]
        self.idle = list(holders)
        last = [c for c in holders[len(holders) - len(busy) :] if c not in busy]
        del self.idle[len(holders) - len(busy) :]
        for number, client in enumerate(self.idle):
            if client in busy:
                self.idle[number] = last.pop(0)

    def invite(self, generator: np.random.Generator) -> None:
        while len(self.events) < self.places and self.idle:
            number = int(generator.random() * len(self.idle))
            client = self.idle[number]
            self.idle[number] = self.idle[-1]
            self.idle.pop()
            rate = self.fed.config.dropout_rate
            lost = bool(rate) and generator.random() < rate
            arrival = self.now + self.seconds[client]
            self.events.append((arrival, client, self.version, lost, self.w))

    def round(self, number: int) -> tuple[list[int], list[int]]:
        """Return the clients that arrive, and how many versions each is behind."""
        generator = self.fed.generator("invitations", number)
        clients: list[int] = []
        behind: list[int] = []
        phase, existing, in_wave = 0, self.version, set[int]()
        self.begin_round()
        self.invite(generator)
        while len(clients) < self.fed.config.cohort_size:
            event = min(self.events, key=lambda event: event[:2])
            self.events.remove(event)
            self.now, client, version, lost, start = event
            self.idle.append(client)
            if lost:
                self.lost += 1
            else:
                if version > existing or client in in_wave:
                    phase, existing, in_wave = phase + 1, self.version, set()
                in_wave.add(client)
                clients.append(client)
                behind.append(self.version - version)
                weight = self.staleness(self.version - version)
                row = self.trained(start, client, number, phase)
                self.receive(row, start, weight, client)
            self.invite(generator)
        return clients, behind

    def trained(self, start: Tensor, client: int, round: int, phase: int) -> Tensor:
        pull = self.pull(start)
        return self.fed.train_alone(start, client, round, phase=phase, pull=pull)

    def pull(self, start: Tensor) -> Pull | None:
        return None

    def receive(self, row: Tensor, start: Tensor, weight: float, client: int) -> None:
        raise NotImplementedError


class NaiveAsync(Naive):
    def receive(self, row: Tensor, start: Tensor, weight: float, client: int) -> None:
        share = self.rate * weight
        if client != self.bad:
            self.w = (1 - share) * self.w + share * row
        self.version += 1

    def pull(self, start: Tensor) -> Pull | None:
        mu = self.fed.options.prox_mu
        return Pull(Strengths(squared=mu), reference=start[None]) if mu else None


class NaiveBuff(Naive):
    def receive(self, row: Tensor, start: Tensor, weight: float, client: int) -> None:
        alike = self.fed.config.weights == "uniform"
        counts = 1 if alike else int(self.fed.sizes[client])
        samples = 0 if client == self.bad else counts
        self.waiting.append((samples, weight * (row - start)))
        if len(self.waiting) == self.buffer:
            total = sum(samples for samples, _ in self.waiting)
            for samples, update in self.waiting:
                share = samples / total if samples else 0.0
                self.w = self.w + self.rate * share * update
            self.waiting.clear()
            self.version += 1


def federation(method: str, **values: Any) -> Setup:
    usual = {"clients": 8, "cohort": 6, "epochs": 1, "batch_size": 60, "alpha": 0.3}
    return assembled(method=method, **{**usual, **values})


ASYNC: list[tuple[dict[str, Any], Staleness]] = [
    ({"staleness": "constant", "mixing": 0.3}, lambda d: 1.0),
    (
        {"staleness": "hinge", "staleness_a": 3.0, "staleness_b": 2, "prox_mu": 0.5},
        lambda d: 1.0 if d <= 2 else 1 / (3 * (d - 2) + 1),
    ),
    ({"concurrency": 3, "dropout_rate": 0.3}, lambda d: (d + 1) ** -0.5),
    # Algorithm 1: the upload that makes version t of a row with stamp τ = t − 1 is fresh.
    ({"staleness_fresh": 1, "staleness_a": 0.7}, lambda d: (d + 2) ** -0.7),
]


@pytest.mark.parametrize(("options", "staleness"), ASYNC)
def test_fedasync_is_the_naive_loop(
    options: dict[str, Any], staleness: Staleness
) -> None:
    s = federation("fedasync", **options)
    places = options.get("concurrency", 6)
    mixing = options.get("mixing", 0.6)
    same_as(NaiveAsync(s, places, 1, staleness, mixing), s)


BUFF: list[tuple[dict[str, Any], Staleness]] = [
    ({"buffer": 4}, lambda d: (d + 1) ** -0.5),
    ({"buffer": 1, "staleness_a": 1.5, "server_lr": 0.4}, lambda d: (d + 1) ** -1.5),
    ({"buffer": 3, "weights": "uniform"}, lambda d: (d + 1) ** -0.5),
    # Buffers that last for more than a round, and clients that come back meanwhile.
    ({"buffer": 9, "staleness": "constant", "concurrency": 8}, lambda d: 1.0),
    (
        {"buffer": 2, "dropout_rate": 0.4, "speed_spread": 2.0},
        lambda d: (d + 1) ** -0.5,
    ),
]


@pytest.mark.parametrize(("options", "staleness"), BUFF)
def test_fedbuff_is_the_naive_loop(
    options: dict[str, Any], staleness: Staleness
) -> None:
    s = federation("fedbuff", **options)
    places, rate = options.get("concurrency", 6), options.get("server_lr", 1.0)
    same_as(NaiveBuff(s, places, options["buffer"], staleness, rate), s)


def same_as(naive: Naive, s: Setup) -> None:
    """Four rounds have the naive loop's rows, times, staleness and bytes."""
    logs: list[RoundLog] = []
    size = s.federation.layout.num_columns * 8
    lost = 0
    for round, state in rounds(s, 4, logs):
        clients, behind = naive.round(round)
        log = logs[-1]
        assert log.arrived is not None and log.arrived.tolist() == clients
        assert log.cohort_size == len(clients)
        assert log.staleness == pytest.approx(np.mean(behind))
        assert log.virtual_seconds == pytest.approx(naive.now, rel=1e-12)
        took = log.times["download"] + log.times["train"] + log.times["upload"]
        np.testing.assert_allclose(took, naive.seconds[clients], rtol=1e-12)
        assert log.times["arrival"][-1] == log.virtual_seconds
        assert log.bytes_up == len(clients) * size
        assert log.bytes_down == (len(clients) + naive.lost - lost) * size
        assert log.update_norms is not None and len(log.update_norms) == len(clients)
        lost = naive.lost
        torch.testing.assert_close(state.w, naive.w, rtol=1e-10, atol=1e-12)
        assert len(state.versions) <= naive.places
    assert max(behind) > 0, "nothing was stale: choose other options"


@pytest.mark.parametrize("method", ["fedasync", "fedbuff"])
def test_an_upload_that_is_not_finite_changes_nothing(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes its place in the buffer, and has no weight; a buffer of such uploads
    alone is no step.
    """
    options = {} if method == "fedasync" else {"buffer": 2}
    s = federation(method, **options)
    fed, honest, bad = s.federation, s.federation.train, 3

    def train(rows: Tensor, cohort: Cohort, **how: Any) -> Tensor:
        trained = honest(rows, cohort, **how).clone()
        trained[torch.from_numpy(cohort.clients == bad)] = float("nan")
        return trained

    monkeypatch.setattr(fed, "train", train)
    kind, buffer, rate = (
        (NaiveAsync, 1, 0.6) if method == "fedasync" else (NaiveBuff, 2, 1.0)
    )
    naive = kind(s, 6, buffer, lambda d: (d + 1) ** -0.5, rate, bad=bad)
    logs: list[RoundLog] = []
    excluded = 0
    for round, state in rounds(s, 4, logs):
        clients, _ = naive.round(round)
        assert logs[-1].excluded == {bad} & set(clients)
        excluded += bad in clients
        torch.testing.assert_close(state.w, naive.w, rtol=1e-10, atol=1e-12)
    assert excluded, "the bad client never arrived"


def test_fedbuff_of_single_fresh_updates_is_fedasync() -> None:
    """Where one client trains at a time nothing is stale, and w + η_g (x − w) is (1 − α)
    w + α x.
    """
    usual = {"concurrency": 1, "cohort": 5}
    one = federation("fedasync", mixing=0.3, **usual)
    other = federation("fedbuff", buffer=1, server_lr=0.3, **usual)
    for (_, mixed), (_, moved) in zip(rounds(one, 2), rounds(other, 2), strict=True):
        torch.testing.assert_close(mixed.w, moved.w, rtol=1e-12, atol=1e-14)


def test_a_buffer_averages_running_statistics() -> None:
    """The server's rate is for parameters: statistics are the buffer's mean."""
    s = federation("fedbuff", model="cnn-bn", buffer=3, cohort=3, server_lr=0.1)
    fed, state = s.federation, s.method.init(s.federation)
    seen: list[tuple[np.ndarray, Tensor]] = []
    cohort = fed.sample(0)
    cohort.in_flight.on_trained = lambda here, rows: seen.append((here, rows))
    after = s.method.round(fed, state, cohort)
    ids = np.concatenate([here for here, _ in seen])
    rows = torch.cat([rows for _, rows in seen])
    weights = torch.from_numpy(fed.sizes[ids] / fed.sizes[ids].sum())
    mean = weights @ rows
    parameters = fed.layout.num_parameters
    assert parameters < fed.layout.num_columns
    torch.testing.assert_close(after.w[parameters:], mean[parameters:])
    step = 0.1 * (mean - state.w)[:parameters]
    torch.testing.assert_close(after.w[:parameters], state.w[:parameters] + step)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--deadline 30", "--deadline: method fedbuff waits for no client"),
        ("--oversample 1.5 --cohort 2", "--oversample: method fedbuff waits"),
        ("--sampling poisson", "--sampling poisson: method fedbuff invites"),
        ("--deadline 3 --partial", "--deadline: method fedbuff waits for no client"),
        ("--devices none", "--devices none, but clients of method fedbuff"),
        ("--concurrency 30", "--concurrency 30, but there are 20 clients"),
        ("--aggregation median", "method fedbuff takes no mean of all uploads"),
        ("--staleness-b 2", "--staleness-b changes nothing without --staleness hinge"),
        ("--staleness constant --staleness-a 2", "--staleness-a changes nothing"),
        (
            "--clients 4 --rounds 2 --buffer 9",
            "--buffer changes nothing without --rounds 3 or more: 8 uploads never fill",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(words: str, said: str) -> None:
    settings_of = ["--method", "fedbuff", *words.split()]
    with pytest.raises(UserError) as refused:
        check(parse_run(settings_of), Launch("none", 0, 1))
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_a_short_run_has_a_buffer_that_it_fills() -> None:
    few = ["--method=fedbuff", "--clients=4", "--rounds=2"]
    made = parse_run(few)
    assert made.flat()["buffer"] == 4
    assert "--buffer is 4: the run has only 8 uploads" in str(made.choices[-1])
    # As many as one step takes, and what only a round among new clients fills.
    for more, buffer in (
        (["--rounds=3"], 10),
        (["--buffer=8"], 8),
        (["--buffer=9", "--new-clients=20", "--new-rounds=1"], 9),
    ):
        made = parse_run([*few, *more])
        check(made, Launch("none", 0, 1))
        assert made.flat()["buffer"] == buffer


def test_a_timetable_of_another_run_is_refused() -> None:
    s = federation("fedbuff", buffer=4)
    fed, state = s.federation, s.method.init(s.federation)
    state = s.method.round(fed, state, fed.sample(0))
    nobody = state.training.clone()
    nobody[0, 1] = 99
    twice = torch.cat([state.training, state.training[:1]])
    wrongs: list[dict[str, Tensor]] = [
        {"training": nobody},
        {"training": twice},
        {"due": state.due[:0]},
        {"due": state.due * float("nan")},
        {"versions": torch.cat([state.versions, state.w[None]])},
    ]
    for wrong in wrongs:
        with pytest.raises(UserError, match="timetable is not of this run"):
            s.method.round(fed, replace(state, **wrong), fed.sample(1))


def test_the_chain_says_that_nobody_is_waited_for() -> None:
    words = ["--method=fedbuff", "--attack=ipm", "--dropout-rate=0.1"]
    settings = parse_run(words)
    assert channel_line(settings.config, settings.options) == (
        "attack: ipm by 4 attackers → arrive: each at its own pace, 10% lost → "
        "aggregate: by staleness"
    )


def test_packed_uploads_arrive_earlier() -> None:
    """A tenth of the columns, as the clock and the bytes have it; attackers act before,
    and what is left out is sent later.
    """
    options = {
        "buffer": 2,
        "attack": "sign-flip",
        "downlink": 1e12,
        "link_spread": 0.0,
    }
    dense: list[RoundLog] = []
    packed: list[RoundLog] = []
    for _ in rounds(federation("fedbuff", **options), 2, dense):
        pass
    s = federation("fedbuff", **options, compress="topk", keep=0.1)
    for _, state in rounds(s, 2, packed):
        assert state.w.isfinite().all()
    for one, other in zip(packed, dense, strict=True):
        share = one.bytes_up / other.bytes_up
        # A value of 8 bytes and its place.
        assert 0.1 < share < 0.2
        upload = one.times["upload"].sum() / other.times["upload"].sum()
        assert upload == pytest.approx(share)
    assert packed[1].virtual_seconds < dense[1].virtual_seconds
    residual = s.federation.channel.memory.rows["residual-0"]
    sent = np.concatenate([log.times["client"] for log in packed])
    left = residual.abs().sum(1).numpy() > 0
    assert np.flatnonzero(left).tolist() == np.unique(sent).tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("method", [fedasync, fedbuff])
def test_a_gpu_takes_uploads_in_as_a_cpu_does(method: ModuleType) -> None:
    """And nothing is read from the device meanwhile: the host would wait for it. One of
    the uploads is not finite.
    """
    options = method.Options()
    fed: Any = SimpleNamespace(
        options=options,
        weights=np.array([3, 1, 4, 1, 5, 9, 2, 6]),
        layout=SimpleNamespace(num_parameters=20),
        sum=lambda tensor: tensor,
        timed=lambda phase: nullcontext(),
    )
    everyone = np.arange(8)
    cohort = Cohort(0, everyone, np.full(8, 1 / 8), everyone, everyone, [everyone])
    order = np.array([3, 1, 0, 7, 5, 6, 2, 4])
    weights = options.staleness_weights(everyone[::-1].copy())
    wave = Wave(0, cohort, np.zeros(8, np.int64), weights, order, 7, frozenset())
    torch.manual_seed(0)
    starts, rows = torch.randn(2, 8, 24, dtype=torch.float64)
    w, buffer = torch.randn(2, 24, dtype=torch.float64)

    def made(device: str) -> tuple[Tensor, Tensor]:
        finite = (torch.arange(8) != 2).to(device)
        received = Received(starts.to(device), rows.to(device), finite)
        given, waiting = w.to(device), torch.ones((), device=device).double()
        filled = buffer.to(device)
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            if method is fedasync:
                versions, heard = fedasync.mixed(fed, given, received, wave)
                return versions[max(versions)], heard
            sums, samples, heard = fedbuff.summed(fed, received, wave)
            server = fedbuff.Server(given, filled, waiting)
            rate = options.server_lr
            server, _ = fedbuff.stepped(fed, server, wave, sums, samples, rate=rate)
            return server.w + server.buffer, heard
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")

    (row, heard), (expected, seven) = made("cuda"), made("cpu")
    torch.testing.assert_close(row.cpu(), expected, rtol=1e-12, atol=1e-12)
    assert int(heard) == int(seven) == 7
