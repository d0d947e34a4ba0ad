"""The server learns while clients go on: which rows are used when, and what is recorded
of it.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hpcfed import cli
from hpcfed.errors import Diverged, UserError
from hpcfed.experiment.assemble import Setup
from hpcfed.experiment.run import run_setup
from hpcfed.federation.log import RoundLog
from hpcfed.methods import pfedgpa
from hpcfed.results.stored import read_run
from hpcfed.runtime.timer import PHASES
from hpcfed.server.messages import A, Failure, Posted, Request
from hpcfed.server.requests import LearnAndInvert
from hpcfed.server.rounds import check_rounds
from hpcfed.server.schedule import is_banked, learns_after, num_learnings, rows_are_due
from hpcfed.server.transport import Colocated, Transport
from tests.federations import assembled
from tests.pfedgpa_runs import TINY, losses, states
from tests.runs import flags, mistake, same
from tests.small_runs import OWN, SMALL
from tests.stopped_run import StopAfter

pytestmark = pytest.mark.usefixtures("one_thread")

HERE = Path(__file__).parent
SIX = TINY | {"rounds": 6, "bank_rounds": 2, "participation": 0.34}
"""Two of six clients in a round: the server never knows all of them."""


@given(
    rounds=st.integers(1, 30),
    bank_rounds=st.integers(1, 30),
    every=st.integers(0, 30),
    overlap=st.integers(0, 30),
)
def test_learnings_begin_before_their_rows_are_due(
    rounds: int, bank_rounds: int, every: int, overlap: int
) -> None:
    """Rows are due when they are without overlap, but for those that would have to be
    learnt before round 1. Of two learnings at once, one would be refused.
    """
    options = pfedgpa.Options(
        bank_rounds=bank_rounds, server_every=every, server_overlap=overlap
    )
    due = sorted({rounds} | (set(range(every, rounds + 1, every)) if every else set()))
    begins = [done - overlap for done in due if done > overlap]
    at_once = any(later - earlier < overlap for earlier, later in pairwise(due))
    if max(bank_rounds, every) <= rounds:
        check = partial(
            check_rounds,
            bank_rounds=bank_rounds,
            every=every,
            overlap=overlap,
            rounds=rounds,
        )
        if at_once or not begins:
            with pytest.raises(UserError):
                check()
        else:
            check()
    if at_once or not begins:
        return
    assert num_learnings(options, rounds) == len(begins)
    for done in range(1, rounds + 1):
        assert rows_are_due(options, done, rounds) == (done - overlap in begins)
        assert learns_after(options, done, rounds) == (done in begins)
        wanted = any(begin - bank_rounds < done <= begin for begin in begins)
        assert is_banked(options, done, rounds) == wanted


class Busy:
    """A server that does not look at its requests until somebody waits for an answer."""

    def __init__(self, server: Transport) -> None:
        self._server = server
        self._queue: list[Request | Posted] = []
        self.posts = 0

    def tell(self, request: Request) -> None:
        self._queue.append(request)

    def ask(self, request: Request[A]) -> A | Failure:
        return self.collect(self._sent(request))

    def post(self, request: Request[A]) -> Posted[A]:
        assert isinstance(request, LearnAndInvert)
        self.posts += 1
        return self._sent(request)

    def collect(self, posted: Posted[A]) -> A | Failure:
        while posted.answer is None:
            first = self._queue.pop(0)
            if isinstance(first, Posted):
                first.answer = self._server.ask(first.request)
            else:
                self._server.tell(first)
        return posted.answer

    def _sent(self, request: Request[A]) -> Posted[A]:
        posted = Posted(request)
        self._queue.append(posted)
        return posted


def busy(s: Setup) -> Busy:
    """Make the server of a run answer as late as it may."""
    client = s.federation.server
    assert isinstance(client._transport, Colocated)
    client._transport = transport = Busy(client._transport)
    return transport


def by_hand(
    options: dict[str, Any], begins: list[int], overlap: int
) -> list[tuple[Tensor, Tensor | None]]:
    """FedAvg's row and the generated columns after every round, with a server that
    learns when it is told to, and clients that wait for it.
    """
    s = assembled(**options)
    fed, at = s.federation, s.federation.generated
    learns_updates = fed.options.bank_of == "updates"
    w, generated = fed.initial_row(), None
    starts = w.new_zeros(len(fed.clients), len(at))
    made: dict[int, tuple[Tensor, np.ndarray, Tensor]] = {}
    found = []
    for round in range(fed.config.rounds):
        cohort, done = fed.sample(round), round + 1
        start = w.repeat(len(cohort.here), 1)
        if generated is not None:
            start[:, at] = generated[cohort.here]
        rows = fed.train(start.clone(), cohort)
        uploads, begun = rows[:, at], start[:, at]
        ids = fed.clients[cohort.here]
        if learns_updates:
            fed.server.bank(round, ids, uploads - begun)
            starts[cohort.here] = begun
        else:
            fed.server.bank(round, ids, uploads, begun)
        w, generated = fed.mean(rows, cohort), None
        if done in begins:
            fed.server.learn()
            answer = fed.server.invert(fed.clients)
            columns = answer.rows + starts
            made[done + overlap] = columns, answer.known, w[at]
        if done in made:
            columns, known, then = made[done]
            generated = columns + (w[at] - then)
            assert not known.all()
            generated[~known] = w[at]
        found.append((w, generated))
    return found


@pytest.mark.parametrize("bank_of", ["updates", "uploads"])
@pytest.mark.parametrize(
    ("every", "overlap", "begins"),
    [(3, 0, [3, 6]), (3, 2, [1, 4]), (3, 3, [3]), (0, 1, [5])],
)
def test_rows_are_of_the_uploads_of_some_rounds_ago(
    every: int, overlap: int, begins: list[int], bank_of: str
) -> None:
    """However late the server looks at its requests: uploads of later rounds wait
    behind the learning.
    """
    options = SIX | {"bank_of": bank_of, "server_every": every}
    s = assembled(**options, server_overlap=overlap)
    transport = busy(s)
    logs = list[RoundLog]()
    found = states(s, logs)[1:]
    assert transport.posts == (len(begins) if overlap else 0)
    for state, (w, generated) in zip(
        found, by_hand(options, begins, overlap), strict=True
    ):
        assert torch.equal(state.w, w)
        assert state.generated.numel() == (
            0 if generated is None else generated.numel()
        )
        if generated is not None:
            assert torch.equal(state.generated, generated)
    used = [begin + overlap for begin in begins]
    for done, log in enumerate(logs, start=1):
        report, use = log.server_report, log.rows_use
        assert (report is not None) == (done in used)
        assert (use is not None) == (done in used and overlap > 0)
        if report is not None and use is not None:
            assert report.after == done - overlap - 1 and use.first == done
    memory = s.federation.channel.memory
    assert not memory.rows and not memory.shared


def test_what_is_judged_beside_late_rows_moves_along() -> None:
    """A client's upload of the bank is as far from FedAvg's row of now as it was from
    that of its time.
    """
    s = assembled(**SIX | {"precision": "fp64"}, server_overlap=2)
    fed = s.federation
    found = states(s)
    last, then = found[-1], found[4]
    newest: dict[int, Tensor] = {}
    for round in (2, 3):
        cohort = fed.sample(round)
        start = found[round].w.repeat(len(cohort.here), 1)
        for client, row in zip(cohort.here, fed.train(start, cohort), strict=True):
            newest[int(client)] = row
    clients = sorted(newest)
    expected = torch.stack([newest[client] for client in clients]) + last.w - then.w
    recalled, known = pfedgpa._answered(fed, last, fed.server.recall)
    assert np.flatnonzero(known).tolist() == clients
    torch.testing.assert_close(recalled[clients], expected, rtol=0, atol=1e-6)


def test_a_run_that_stops_while_the_server_learns_goes_on_as_if_it_had_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {**SMALL, **OWN["pfedgpa"], "method": "pfedgpa", "deterministic": True}
    options["server_overlap"] = 2
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    run_setup(assembled(**options), whole, quiet=True)
    assert (whole / "server.h5").is_file()
    # Learnings begin after rounds 2 and 4.
    run_setup(assembled(**options), cut, quiet=True, stop=StopAfter(3))
    [learning] = read_run(cut).learnings
    assert learning.round == 1 and np.isnan(learning.used) and learning.waited >= 0
    run_setup(assembled(**options, resume=str(cut), out=str(cut)), cut, quiet=True)
    same(whole, cut)
    for folder in (whole, cut):
        assert (folder / "server.h5").exists()
        first, second = read_run(folder).learnings
        assert (first.round, first.used, second.round, second.used) == (1, 4, 3, 6)
        assert first.staleness == second.staleness == 2
        # In one process all of the learning is waited for.
        assert second.waited >= sum(second.seconds.values()) and second.hidden == 0
        seconds = {"denoiser": 3.0, "invert": 1.0}
        assert replace(second, seconds=seconds, waited=1.5).hidden == 2.5
    cli.main(["show", str(whole)])
    told = capsys.readouterr().out
    assert "its rows used 2 rounds later" in told and "clients waited" in told


def test_clients_move_with_the_rows_that_are_on_their_way() -> None:
    """The server's answer is for clients of this rank: it is waited for before."""
    s = assembled(**SIX, server_overlap=2)
    busy(s)
    fed, state = s.federation, s.method.init(s.federation)
    late = fed.server_side.late
    assert late is not None
    for round in range(5):
        state = s.method.round(fed, state, fed.sample(round))
    assert not fed.channel.memory.rows
    late.settle()
    kept = fed.channel.memory.rows
    assert {len(entries) for entries in kept.values()} == {6} and len(kept) == 2
    assert late.recordable()[0] is not None and late.recordable() == (None, 0.0)


def test_a_learning_that_diverges_ends_the_run_when_its_rows_are_due() -> None:
    s = assembled(**SIX, server_overlap=2, server_lr=1e30)
    fed, state = s.federation, s.method.init(s.federation)
    for round in range(5):
        state = s.method.round(fed, state, fed.sample(round))
    with pytest.raises(Diverged, match="the server's autoencoder has diverged"):
        s.method.round(fed, state, fed.sample(5))


def test_two_seeds_on_two_workers_and_a_server_rank(
    tmp_path: Path, mpirun: Callable
) -> None:
    own = TINY | {"precision": "fp64", "server_every": 2, "server_overlap": 1}
    own["placement"] = "steps"
    words = flags(**own, seeds="0..1", server_ranks=1, out=tmp_path / "run")
    result = mpirun(3, "-m", "hpcfed", "run", *words)
    assert result.returncode == 0, result.stderr
    for seed in (0, 1):
        alone = tmp_path / f"alone-{seed}"
        alone.mkdir()
        run_setup(assembled(**own, epochs=1, seed=seed), alone, quiet=True)
        together = tmp_path / f"run/seed-{seed}"
        one, two = read_run(together), read_run(alone)
        assert one.status == "complete"
        assert [vars(each)["used"] for each in one.learnings] == [2, 4]
        assert [each.round for each in one.learnings] == [0, 2]
        # The third round starts from generated rows, and the server's networks are of
        # float32.
        for rounds, rtol in ((slice(2), 1e-12), (slice(2, 4), 1e-2)):
            np.testing.assert_allclose(
                one.rounds["train_loss"][rounds],
                two.rounds["train_loss"][rounds],
                rtol=rtol,
            )
        for network in ("autoencoder", "denoiser"):
            np.testing.assert_allclose(
                losses(together, network), losses(alone, network), rtol=1e-2
            )
        # The first worker's wait is part of its phase `server`.
        waited = [learning.waited for learning in one.learnings]
        counted = one.phases[:, 0, PHASES.index("server")].sum()
        assert min(waited) >= 0 and sum(waited) <= counted


def test_without_overlap_the_record_says_nothing_of_it(tmp_path: Path) -> None:
    run_setup(assembled(**TINY, epochs=1), tmp_path, quiet=True)
    with h5py.File(tmp_path / "run.h5") as file:
        assert not {"used", "waited"} & set(file["server"])
    [learning] = read_run(tmp_path).learnings
    assert np.isnan([learning.used, learning.waited, learning.hidden]).all()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"server_overlap": 1}, "changes nothing without --server-ranks 1"),
        (
            {"server_overlap": 4, "server_ranks": 1},
            "--server-overlap 4, but the run has only 4 rounds",
        ),
        (
            {"server_overlap": 2, "server_every": 1, "server_ranks": 1},
            "--server-overlap 2 is more than --server-every 1",
        ),
        (
            {"server_overlap": 2, "server_every": 3, "server_ranks": 1},
            "the last two learnings would overlap, since 4 rounds are not a multiple of "
            "--server-every 3; use --rounds 6",
        ),
    ],
)
def test_an_overlap_that_does_not_fit_is_one_line(
    values: dict[str, Any],
    expected: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert expected in mistake(capsys, "run", *flags(**TINY | values))
