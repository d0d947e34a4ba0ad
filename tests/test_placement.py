"""Clients on ranks of different speed: placed by steps, then by measured time, with the
same results.
"""

import io
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from hpcfed.analysis.render.show import show
from hpcfed.clients.balance import MAX_RELOCATIONS, WINDOW, Balance
from hpcfed.clients.placement import client_loads, place, rank_loads
from hpcfed.options import RunConfig
from hpcfed.results.as_json import run_summary
from hpcfed.results.run import RunRecord
from hpcfed.results.series import imbalance
from hpcfed.results.stored import read_run
from hpcfed.runtime.timer import PHASES
from tests.conftest import Finished
from tests.runs import TWELVE_CLIENTS, rows_of, run_alone

HERE = Path(__file__).parent
LOADS = st.lists(st.integers(0, 1000), min_size=1, max_size=100)
SPEEDS = st.lists(st.floats(0.05, 20), min_size=1, max_size=8)


@given(LOADS, SPEEDS)
def test_no_rank_would_finish_its_last_client_earlier_elsewhere(
    numbers: list[int], paces: list[float]
) -> None:
    """Which bounds the slowest rank by an even share of the whole work and one more
    client.
    """
    loads, speeds = np.array(numbers) + 0.25, np.array(paces[: len(numbers)])
    rank_of = place(loads, len(speeds), speeds=speeds)
    assert set(rank_of) == set(range(len(speeds))), "every rank has a client"
    totals = rank_loads(loads, rank_of, len(speeds))
    for rank in range(len(speeds)):
        own = loads[rank_of == rank]
        if (
            len(own) > 1
        ):  # a rank's only client may be there because every rank gets one
            others = np.arange(len(speeds)) != rank
            elsewhere = (totals[others] + own.min()) / speeds[others]
            assert totals[rank] / speeds[rank] <= elsewhere.min(initial=np.inf) * (
                1 + 1e-12
            )
            even = (totals.sum() + (len(speeds) - 1) * own.min()) / speeds.sum()
            assert totals[rank] / speeds[rank] <= even * (1 + 1e-12)


@given(
    st.lists(st.integers(0, 12), min_size=9, max_size=60),
    st.integers(2, 9),
    st.sampled_from([0.0, 0.5, 2.0]),
)
def test_equal_ranks_are_no_special_case(
    steps: list[int], ranks: int, longest: float
) -> None:
    """Ranks whose equal speeds are named are placed by the general rule."""
    loads = np.array(steps) + 0.25
    found = place(loads, ranks, longest=longest)
    by_speed = place(loads, ranks, longest=longest, speeds=np.ones(ranks))
    assert found.tolist() == by_speed.tolist()


def test_a_rank_twice_as_quick_gets_twice_the_work() -> None:
    rank_of = place(np.ones(300), 3, speeds=np.array([1.0, 2.0, 3.0]))
    assert np.bincount(rank_of).tolist() == [50, 100, 150]


def test_a_rank_that_is_hopelessly_slow_still_gets_the_smallest_client() -> None:
    rank_of = place(np.array([5.0, 1.0, 7.0, 3.0]), 2, speeds=np.array([1.0, 1e-9]))
    assert rank_of.tolist() == [0, 1, 0, 0]


def test_the_longest_client_of_a_stack_counts_more() -> None:
    """By hand: 6 alone counts 3 · 6 = 18, as much as 4 (3 · 4) and three of 2."""
    loads = np.array([6.0, 4, 2, 2, 2])
    rank_of = place(loads, 2, longest=2)
    assert rank_of.tolist() == [0, 1, 1, 1, 1]
    assert rank_loads(loads, rank_of, 2, longest=2).tolist() == [18, 18]


def test_loads_are_steps_and_clients_without_data_are_dealt_out() -> None:
    loads = client_loads(np.array([0, 1, 16, 17]), epochs=2, batch_size=16)
    assert (loads - loads[0]).tolist() == [0, 2, 2, 4]
    assert np.bincount(
        place(client_loads(np.zeros(8, int), epochs=1, batch_size=1), 4)
    ).tolist() == [2, 2, 2, 2]


def followed(
    paces: np.ndarray,
    *,
    rounds: int = 200,
    cost: float = 0.0,
    share: float = 1.0,
    noise: float = 0.0,
) -> tuple[Balance, list[int], np.ndarray]:
    """A run on ranks of these paces: where its clients moved, after which rounds, and
    where they are at the end.
    """
    rng, ranks = np.random.default_rng(0), len(paces)
    loads = rng.integers(1, 50, size=40) + 0.25
    rank = place(loads, ranks, longest=2)
    balance = Balance(loads, rank, ranks, longest=2, relocation_seconds=cost)
    moves = []
    for round in range(rounds):
        clients = np.sort(rng.choice(40, int(share * 40), replace=False))
        seconds = rank_loads(loads[clients], rank[clients], ranks, longest=2) * paces
        if balance.note(clients, seconds * (1 + noise * rng.uniform(-1, 1, ranks))):
            proposal = balance.propose(rounds - round - 1)
            if proposal is not None:
                moves.append(round)
                rank = proposal.rank
                balance.relocated(rank, cost)
    return balance, moves, rank


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 6), st.floats(1e-6, 10), st.sampled_from([1.0, 0.3]))
def test_balanced_ranks_never_move(ranks: int, pace: float, share: float) -> None:
    assert followed(np.full(ranks, pace), share=share, noise=0.04)[1] == []


@pytest.mark.parametrize("share", [1.0, 0.4])
def test_a_slow_rank_is_relieved_once(share: float) -> None:
    _, moves, rank = followed(np.array([1e-3, 3e-3, 1e-3]), share=share, noise=0.02)
    assert moves == [WINDOW], "rounds count from 0, and the first warms up"
    loads = np.random.default_rng(0).integers(1, 50, size=40) + 0.25
    seconds = rank_loads(loads, rank, 3, longest=2) * [1e-3, 3e-3, 1e-3]
    assert imbalance(seconds) < 1.1


def test_clients_move_only_when_it_pays() -> None:
    paces = np.array([1e-3, 3e-3])
    gain = 0.3  # seconds a round, roughly
    assert followed(paces, rounds=200, cost=100 * gain)[1]
    assert not followed(paces, rounds=20, cost=100 * gain)[1]
    assert not followed(paces, rounds=WINDOW + 1)[1], (
        "no round is left to gain anything"
    )


def test_one_noisy_round_moves_nobody() -> None:
    loads, rank = np.ones(8), np.arange(8) % 2
    balance = Balance(loads, rank, 2, longest=0, relocation_seconds=0)
    for round in range(WINDOW + 1):
        last = balance.note(np.arange(8), np.array([1.0, 3.0 if round != 3 else 0.9]))
    assert last and balance.propose(1000) is None
    for _ in range(WINDOW):
        last = balance.note(np.arange(8), np.array([1.0, 3.0]))
    assert last and balance.propose(1000) is not None


def test_clients_move_a_few_times_at_most() -> None:
    loads, rank = np.ones(8), np.array([0, 0, 0, 0, 0, 0, 1, 1])
    balance, moves = Balance(loads, rank, 2, longest=0, relocation_seconds=0), 0
    for round in range(
        100
    ):  # the rank with more clients is always the slow one: whatever one does is wrong
        counts = np.bincount(rank, minlength=2)
        paces = np.where(counts == counts.max(), 3.0, 1.0)
        if balance.note(np.arange(8), counts * paces):
            proposal = balance.propose(100 - round)
            if proposal is not None:
                moves, rank = moves + 1, proposal.rank
                balance.relocated(rank, 0.0)
    assert moves == MAX_RELOCATIONS


def test_imbalance_by_hand() -> None:
    assert imbalance(np.array([1.0, 2.0, 3.0])) == 1.5
    assert imbalance(np.array([4.0])) == 1
    assert np.isnan(imbalance(np.zeros(3)))


def test_clients_stay_where_files_or_bits_depend_on_it() -> None:
    assert RunConfig().movable
    for options in (
        {"snapshot_every": 5},
        {"deterministic": True},
        {"placement": "steps"},
    ):
        assert not RunConfig(**options).movable


def test_entries_arrive_bit_for_bit_with_their_clients(mpirun: Callable) -> None:
    result = mpirun(3, "-m", "mpi4py", HERE / "relocating.py")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("all arrived") == 3


def shown(record: RunRecord) -> str:
    text = io.StringIO()
    show(record, Console(file=text))
    return text.getvalue()


MOVED = {
    2: ["--method", "fedavg", "--participation", 1.0],
    3: ["--method", "local", "--participation", 0.7],
}
"""Runs on so many ranks of which the last is slow, and whose clients move."""


def options_of(ranks: int) -> list[object]:
    return [*TWELVE_CLIENTS, *MOVED[ranks], "--precision", "fp64"]


@pytest.fixture(scope="module")
def slow_jobs(
    tmp_path_factory: pytest.TempPathFactory, mpirun: Callable
) -> dict[int, tuple[Path, Finished]]:
    """The folder of the runs on two and on three ranks, and what their jobs said. Two
    ranks make two deterministic runs as well, since starting them takes longer.
    """
    ended = {}
    for ranks in MOVED:
        folder = tmp_path_factory.mktemp("slow")
        words = ["run", *options_of(ranks), "--out", folder / "moved"]
        for placement in ("measured", "steps") if ranks == 2 else ():
            words += ["+", "run", *TWELVE_CLIENTS, "--rounds", WINDOW + 2]
            words += ["--deterministic", "--placement", placement]
            words += ["--out", folder / placement]
        job = mpirun(ranks, HERE / "slow_rank.py", *words, SLOW="4", ROWS="1")
        assert job.returncode == 0, job.stderr
        ended[ranks] = folder, job
    return ended


@pytest.mark.parametrize("ranks", MOVED)
def test_moving_clients_changes_no_result(
    ranks: int,
    slow_jobs: dict[int, tuple[Path, Finished]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, slow = slow_jobs[ranks]
    expected = run_alone(options_of(ranks), tmp_path / "one", monkeypatch)
    moved, stayed = read_run(folder / "moved"), read_run(tmp_path / "one")
    assert moved.moves == (WINDOW + 1,) and stayed.moves == ()
    assert slow.stderr.count("of 12 clients moved in") == 1
    np.testing.assert_array_equal(moved.client_accuracy, stayed.client_accuracy)
    np.testing.assert_allclose(
        moved.rounds["train_loss"], stayed.rounds["train_loss"], rtol=1e-12
    )
    rows = rows_of(folder / "moved-rows")
    np.testing.assert_allclose(rows, expected, rtol=0, atol=1e-12)

    seconds = moved.phases[:, :, PHASES.index("train")]
    np.testing.assert_allclose(
        moved.rounds["imbalance"], seconds.max(1) / seconds.mean(1), rtol=1e-12
    )
    with h5py.File(folder / "moved/run.h5") as file:
        before, after = file["clients/rank"][()], file["moves/rank"][0]
        assert set(after) == set(range(ranks)) and (before != after).any()
        assert np.count_nonzero(after == ranks - 1) < np.count_nonzero(
            before == ranks - 1
        ), "the slow rank has fewer"
        assert (
            file["moves/seconds"][0] > 0
            and np.isnan(file["moves/seconds"][1])
            and (file["moves/rank"][1] == -1).all()
        )
    if moved.config["participation"] == 1:
        assert np.median(moved.rounds["imbalance"][: WINDOW + 1]) > 1.4
        assert np.median(moved.rounds["imbalance"][WINDOW + 1 :]) < 1.25
    median = f"{np.median(moved.rounds['imbalance']):.2f}"
    assert slow.stdout.partition("training by the mean")[2].split()[0] == median
    assert "clients changed ranks after round" in slow.stdout
    told = run_summary(moved)
    assert told["moves"] == [WINDOW + 1] and len(told["imbalance"]) == 9
    assert "by the mean" not in shown(stayed), "a single rank has no imbalance"


def test_a_deterministic_run_does_not_heed_the_clock(
    slow_jobs: dict[int, tuple[Path, Finished]],
) -> None:
    """Its clients would move, by what is measured: one rank is slow."""
    folder, _ = slow_jobs[2]
    by_clock, by_steps = (
        rows_of(folder / "measured-rows"),
        rows_of(folder / "steps-rows"),
    )
    assert by_clock.tobytes() == by_steps.tobytes()
    measured, steps = read_run(folder / "measured"), read_run(folder / "steps")
    assert measured.moves == () and np.median(measured.rounds["imbalance"]) > 1.2
    losses = [record.rounds["train_loss"].tobytes() for record in (measured, steps)]
    assert losses[0] == losses[1]
