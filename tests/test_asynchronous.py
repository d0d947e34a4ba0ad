"""FedAsync and FedBuff: who trains when, and both methods against a naive event loop."""

from collections.abc import Iterator
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcfed.errors import UserError
from hpcfed.methods._timetable import Arrival, Pace, Presence, Timetable, waves

IDS = np.array([4, 7, 9])
SECONDS = np.array([1.0, 2.0, 5.0])


def scripted(*numbers: float) -> Iterator[float]:
    return iter(numbers)


def test_a_timetable_of_three_clients_by_hand() -> None:
    """Clients 4, 7 and 9 take 1, 2 and 5 s; two of them train at a time."""
    table = Timetable(Pace(IDS, SECONDS, places=2))
    # At 0 s the first of three and the second of the other two; then of 4 and 7 the
    # second, the first, the second; at 5 s the first of 4 and 9; and so on.
    numbers = scripted(0.0, 0.99, 0.5, 0.0, 0.9, 0.0, 0.0, 0.0)
    found = table.receive(6, numbers.__next__)
    assert found == [
        Arrival(1.0, 4, version=0, staleness=0),
        Arrival(3.0, 7, version=1, staleness=0),
        Arrival(4.0, 4, version=2, staleness=0),
        Arrival(5.0, 9, version=0, staleness=3),
        # Both arrive at 6 s: the smaller id comes first.
        Arrival(6.0, 4, version=4, staleness=0),
        Arrival(6.0, 7, version=3, staleness=2),
    ]
    assert table.now == 6.0 and table.received == table.version == 6
    runs = [[one.client for one in run] for run in waves(found, received=0, buffer=1)]
    # 7 waits for version 1, the second 4 for version 2, the third 4 for version 4; 9 and
    # the last 7 start from versions that are there.
    assert runs == [[4], [7], [4, 9], [4, 7]]


def test_versions_are_made_of_buffers() -> None:
    """Two uploads make a version; who starts in between starts from the one before."""
    table = Timetable(Pace(IDS, SECONDS, places=2, buffer=2))
    numbers = scripted(0.0, 0.99, 0.5, 0.0, 0.9, 0.0)
    found = table.receive(4, numbers.__next__)
    assert [(one.client, one.version, one.staleness) for one in found] == [
        (4, 0, 0),
        (7, 0, 0),
        (4, 1, 0),
        (9, 0, 1),
    ]
    assert table.version == 2
    runs = [[one.client for one in run] for run in waves(found, received=0, buffer=2)]
    assert runs == [[4, 7], [4, 9]]


def test_nobody_is_twice_in_a_wave() -> None:
    """With a large buffer a client may be back before the next version."""
    table = Timetable(Pace(IDS[:1], SECONDS[:1], places=1, buffer=5))
    found = table.receive(3, lambda: 0.0)
    assert [one.seconds for one in found] == [1.0, 2.0, 3.0]
    assert [len(run) for run in waves(found, received=0, buffer=5)] == [1, 1, 1]


def test_lost_uploads_leave_their_place_when_they_would_have_come() -> None:
    table = Timetable(Pace(IDS, SECONDS, places=1, dropout_rate=0.5))
    # Pairs: who is invited, and whether the upload is lost (below 0.5).
    numbers = scripted(0.0, 0.9, 0.5, 0.1, 0.99, 0.7, 0.0, 0.9)
    found = table.receive(2, numbers.__next__)
    # 4 from 0 to 1 s; 7 from 1 s on, lost at 3 s; 9 from 3 to 8 s.
    assert [(one.client, one.seconds) for one in found] == [(4, 1.0), (9, 8.0)]
    assert found[1].staleness == 0, "what is lost makes no version"
    assert table.lost == 1


class Shifts(Presence):
    """Client 4 is there before 2 s, client 9 from 10 to 18 s, client 7 never."""

    def among(self, now: float) -> np.ndarray:
        return np.array([now < 2, False, 10 <= now < 18])

    def next(self, now: float) -> float:
        if now >= 18:
            return inf
        return now if now < 2 else max(now, 10.0)


def test_who_is_away_is_not_invited() -> None:
    """Time goes on to the next moment at which somebody is there."""
    table = Timetable(Pace(IDS, SECONDS, places=2, presence=Shifts()))
    found = table.receive(3, lambda: 0.5)
    expected = [(4, 1.0), (4, 2.0), (9, 15.0)]
    assert [(one.client, one.seconds) for one in found] == expected
    assert [one.seconds for one in table.training] == [20.0]
    with pytest.raises(UserError, match="ever available again"):
        table.receive(1, lambda: 0.5)


@given(
    st.integers(1, 12),
    st.integers(1, 15),
    st.integers(1, 4),
    st.integers(0, 20),
    st.integers(0, 2**32),
)
def test_timetables_keep_their_promises(
    clients: int, places: int, buffer: int, cut: int, seed: int
) -> None:
    """Nobody trains twice at a time, all places are taken, versions never come from the
    future, and a timetable that goes on from what another left is the same.
    """
    generator = np.random.default_rng(seed)
    seconds = generator.integers(1, 4, clients).astype(float)
    pace = Pace(np.arange(clients), seconds, places, buffer, dropout_rate=0.2)
    whole = Timetable(pace)
    draws = np.random.default_rng(seed).random(1000).tolist()
    found = whole.receive(20, iter(draws).__next__)
    assert [one.seconds for one in found] == sorted(one.seconds for one in found)
    for number, one in enumerate(found):
        assert one.version + one.staleness == number // buffer and one.staleness >= 0
    training = whole.training
    assert len({one.client for one in training}) == len(training)
    assert len(training) == min(places, clients)

    numbers = iter(draws)
    first = Timetable(pace)
    before = first.receive(cut, numbers.__next__)
    second = Timetable(pace, first.training, now=first.now, received=first.received)
    assert before + second.receive(20 - cut, numbers.__next__) == found
    assert second.training == training


@given(st.integers(2, 40), st.integers(1, 30), st.integers(0, 2**32))
def test_invitations_are_uniform_among_the_others(
    clients: int, places: int, seed: int
) -> None:
    """The j-th of those that do not train, in the order of ids, by whatever way."""
    generator = np.random.default_rng(seed)
    busy = generator.permutation(clients)[: min(places, clients - 1)]
    others = np.setdiff1d(np.arange(clients), busy)
    table = Timetable(Pace(np.arange(clients), np.ones(clients), places))
    table._busy = sorted(busy.tolist())
    for rank, client in enumerate(others):
        middle = (rank + 0.5) / len(others)
        assert table._drawn(lambda number=middle: number) == client


def test_nobody_left_to_invite() -> None:
    table = Timetable(Pace(IDS, SECONDS, places=5))
    assert [one.client for one in table.receive(2, lambda: 0.0)] == [4, 4]
    assert len(table.training) == 3
    assert table.training[0].seconds == pytest.approx(2.0)
