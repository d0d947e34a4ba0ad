"""pFedGPA: its rounds, what clients get of the server, and new clients."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from hpcfed.clients.job import TrainingJob
from hpcfed.experiment.assemble import Newcomers, Setup
from hpcfed.experiment.newcomers import welcome
from hpcfed.federation.cohort import Cohort
from hpcfed.federation.log import RoundLog
from hpcfed.methods import _guided, pfedgpa
from hpcfed.server.guidance import Guidance
from hpcfed.server.likeness import updates_of
from tests.federations import assembled, traffic
from tests.pfedgpa_runs import COLUMNS, EVERYONE, STARTS, TINY, server_of, states

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Finished:
    setup: Setup
    state: pfedgpa.State
    newcomers: Newcomers


@pytest.fixture(scope="module")
def finished() -> Finished:
    """All rounds and one time of learning are over; three clients are to join."""
    s = assembled(
        **TINY,
        new_clients=3,
        new_updates=4,
        guided_updates=2,
        direct=True,
        memorisation=True,
        finetune_epochs=1,
    )
    assert s.newcomers is not None
    return Finished(s, states(s)[-1], s.newcomers)


def test_fedavg_goes_on_undisturbed_and_only_generated_columns_are_the_servers() -> (
    None
):
    s = assembled(**TINY, model="cnn-digits", generated_layers=1)
    plain = assembled(
        method="fedavg", clients=6, rounds=4, model="cnn-digits", precision="fp32"
    )
    fed, head = s.federation, s.federation.layout.mask([s.federation.layout.head])
    assert torch.equal(fed.generated, head.nonzero().squeeze(1)) and not head.all()
    logs, plain_logs = list[RoundLog](), list[RoundLog]()
    found, expected = states(s, logs), states(plain, plain_logs)
    for state, fedavg in zip(found, expected, strict=True):
        assert torch.equal(pfedgpa.global_row(state), fedavg.w)
    for state in found[:-1]:
        assert torch.equal(
            s.method.personal(fed, state, EVERYONE), state.w.expand(6, -1)
        ), "nothing was learnt yet"
    rows, w = s.method.personal(fed, found[-1], EVERYONE), found[-1].w
    assert torch.equal(rows[:, ~head], w[~head].expand(6, -1))
    assert (rows[:, head] != w[head]).any(1).all() and rows.isfinite().all()
    # Everybody's newest update is one of the last round, which started from the row
    # before it.
    start = found[-2].w[head]
    assert torch.equal(rows[:, head], start + fed.server.invert(fed.clients).rows)
    assert torch.equal(
        s.method.personal(fed, found[-1], np.array([4, 1])), rows[[4, 1]]
    )
    up, _, down = traffic(logs)
    plain_up, _, plain_down = traffic(plain_logs)
    assert up == plain_up and down == plain_down + 6 * len(fed.generated) * 4


def test_a_client_that_the_server_does_not_know_keeps_fedavgs_columns() -> None:
    s = assembled(**TINY | {"bank_rounds": 2}, participation=0.34)
    fed = s.federation
    state = states(s)[-1]
    known = np.union1d(fed.sample(2).clients, fed.sample(3).clients)
    strangers = np.setdiff1d(EVERYONE, known)
    assert 2 <= len(known) <= 4
    everybodys = {"pFedGPA": s.method.personal(fed, state, EVERYONE)}
    everybodys |= {
        name: rows
        for name, rows in pfedgpa.finals(fed, state, EVERYONE)
        if name == "reconstruction"
    }
    for name, rows in everybodys.items():
        assert torch.equal(rows[strangers], state.w.expand(len(strangers), -1)), name
        assert (rows[known] != state.w).any(1).all(), name


def test_the_round_after_learning_starts_from_generated_rows_and_later_ones_go_on_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No round starts where another has started: what a round has learnt is in the
    next.
    """
    s = assembled(**TINY | {"rounds": 6}, server_every=3, participation=0.5)
    fed, starts, train = s.federation, list[Tensor](), s.engine.train

    def listening(job: TrainingJob) -> tuple[Tensor, Tensor]:
        starts.append(job.rows.clone())
        return train(job)

    monkeypatch.setattr(s.engine, "train", listening)
    logs = list[RoundLog]()
    found = states(s, logs)
    reported = [log.server_report is not None for log in logs]
    assert reported == [False, False, True, False, False, True]
    for round, start in enumerate(starts):
        state, here = found[round], fed.sample(round).here
        assert torch.equal(start, s.method.personal(fed, state, here))
        assert torch.equal(start, state.w.expand(3, -1)) == (round != 3)
    assert all(not torch.equal(one[0], other[0]) for one, other in pairwise(starts))
    assert [state.generated.shape[1] for state in found] == [
        0,
        0,
        0,
        COLUMNS,
        0,
        0,
        COLUMNS,
    ]
    down = (
        6 * len(starts[0]) * COLUMNS * 4
    )  # in rounds, and what everybody gets in the end
    assert traffic(logs)[2] == down + 6 * COLUMNS * 4


@pytest.mark.parametrize("bank_of", ["updates", "uploads"])
def test_the_server_gets_what_clients_did_or_what_they_sent(bank_of: str) -> None:
    """Half of the clients in a round, and generated starts after two: whatever the
    server keeps, a client's newest upload comes back.
    """
    s = assembled(
        **TINY | {"precision": "fp64"},
        bank_of=bank_of,
        server_every=2,
        participation=0.5,
        generated_body="own",
        generated_layers=1,
    )
    fed, at = s.federation, s.federation.generated
    state = s.method.init(fed)
    newest: dict[int, tuple[Tensor, Tensor]] = {}
    for round in range(3):
        cohort = fed.sample(round)
        starts = s.method.personal(fed, state, cohort.here)
        trained = fed.train(starts, cohort)
        for client, start, row in zip(cohort.here, starts, trained, strict=True):
            newest[int(client)] = start[at], row
        state = s.method.round(fed, state, cohort)
    assert starts[:, at].unique(dim=0).shape[0] == 3, "the third round's starts differ"
    clients = np.array(sorted(newest))
    begun, rows = map(torch.stack, zip(*[newest[c] for c in clients], strict=True))
    banked = server_of(s).bank(0).content()
    known, kept = banked.newest(clients)
    updates = rows[:, at] - begun
    expected = updates if bank_of == "updates" else rows[:, at]
    assert known.all()
    torch.testing.assert_close(kept, expected.float())
    torch.testing.assert_close(
        updates_of(banked, clients, kept), updates.float(), rtol=0, atol=1e-6
    )
    recalled, _ = pfedgpa._answered(fed, state, fed.server.recall)
    torch.testing.assert_close(recalled[clients], rows[:, at], rtol=0, atol=1e-7)
    # The body of a client is that of its newest upload.
    assert torch.equal(state.newest[clients], rows)


def test_generated_rows_have_the_clients_own_body_or_fedavgs() -> None:
    own, shared = (
        assembled(
            **TINY | {"bank_rounds": 2},
            participation=0.34,
            generated_layers=1,
            generated_body=body,
        )
        for body in ("own", "global")
    )
    fed = own.federation
    body = torch.ones(COLUMNS, dtype=torch.bool)
    body[fed.generated] = False
    state, plain = states(own)[-1], states(shared)[-1]
    rows = own.method.personal(fed, state, EVERYONE)
    others = shared.method.personal(shared.federation, plain, EVERYONE)
    assert torch.equal(rows[:, ~body], others[:, ~body]), (
        "the server's part is the same"
    )
    assert torch.equal(others[:, body], plain.w[body].expand(6, -1))
    known = np.union1d(fed.sample(2).clients, fed.sample(3).clients)
    strangers = np.setdiff1d(EVERYONE, known)
    assert torch.equal(rows[strangers], state.w.expand(len(strangers), -1))
    assert len(rows[known][:, body].unique(dim=0)) == len(known)
    finals = dict(pfedgpa.finals(fed, state, EVERYONE))
    torch.testing.assert_close(
        finals["upload"][known], state.newest[known], rtol=0, atol=1e-6
    )


def test_finals_are_what_their_names_say(
    finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    s, state = finished.setup, finished.state
    fed = s.federation
    finals = dict(pfedgpa.finals(fed, state, EVERYONE))
    assert set(finals) == set(pfedgpa.FINALS)
    tuned = assembled(
        method="fedavg-ft",
        clients=6,
        rounds=4,
        precision="fp32",
        new_clients=3,
        finetune_epochs=1,
    )
    assert torch.equal(
        finals["FedAvg-FT"],
        tuned.method.personal(tuned.federation, states(tuned)[-1], EVERYONE),
    )
    assert torch.equal(finals["FedAvg"], state.w.expand(6, -1))
    assert torch.equal(finals["pFedGPA"], s.method.personal(fed, state, EVERYONE))
    for name in ("pFedGPA", "direct"):
        assert torch.equal(
            finals[f"{name}-FT"], fed.finetune(finals[name], EVERYONE, epochs=1)
        )
    # The MLP is generated as a whole. An upload that is not diffused at all only passes
    # the autoencoder.
    undiffused = fed.server.invert(fed.clients, depth=0)
    assert undiffused.known.all()
    torch.testing.assert_close(finals["reconstruction"], state.starts + undiffused.rows)
    assert torch.equal(finals["direct"], state.w + fed.server.sample(fed.clients))
    uploads = state.starts + fed.server.recall(fed.clients)[0]
    torch.testing.assert_close(
        (finals["upload+noise"] - uploads).norm(dim=1),
        (finals["pFedGPA"] - uploads).norm(dim=1),
        rtol=1e-4,
        atol=0,
    )
    banked = server_of(s).bank(0).content().rows().view(3, 6, COLUMNS)
    torch.testing.assert_close(finals["mean of uploads"], state.starts + banked.mean(0))
    halfway = (banked.mean(0) + banked.mean((0, 1))) / 2
    torch.testing.assert_close(finals["halfway mean"], state.starts + halfway)
    inverted, _ = fed.server.invert_average(fed.clients)
    torch.testing.assert_close(finals["inverted mean"], state.starts + inverted)
    # The first inversion is the run's own; the others have other noise.
    model, (_, newest) = (
        server_of(s).model(0),
        server_of(s).bank(0).content().newest(EVERYONE),
    )
    each = torch.stack([model.invert(newest, draw=draw) for draw in range(8)])
    assert torch.equal(state.starts + each[0], finals["pFedGPA"])
    assert len(each.flatten(1).unique(dim=0)) == 8
    torch.testing.assert_close(
        finals["mean of inversions"], state.starts + each.mean(0)
    )
    pairs = [finals[name] for name in ("FedAvg", "pFedGPA", "reconstruction", "direct")]
    assert not any(torch.equal(a, b) for i, a in enumerate(pairs) for b in pairs[:i])

    fewer_asked = {"direct": False, "memorisation": False, "finetune_epochs": None}
    options = fed.options.model_copy(update=fewer_asked)
    monkeypatch.setattr(fed, "options", options)
    fewer = dict(pfedgpa.finals(fed, state, EVERYONE))
    assert list(fewer) == [
        "FedAvg",
        "FedAvg-FT",
        "pFedGPA",
        "pFedGPA-FT",
        "upload",
        "reconstruction",
    ]
    assert torch.equal(
        fewer["FedAvg-FT"], fed.finetune(state.w.expand(6, -1), EVERYONE, epochs=2)
    ), "as a round's"


def test_figures_tell_what_generated_rows_are(finished: Finished) -> None:
    s, state = finished.setup, finished.state
    fed = s.federation
    found = dict(pfedgpa.figures(fed, state, np.array([4, 1])))
    assert list(found) == list(pfedgpa.FIGURES)
    updates = fed.server.recall(fed.clients)[0]
    far = (state.generated - state.starts - updates).norm(dim=1) / updates.norm(dim=1)
    torch.testing.assert_close(found["distance to own upload"], far[[4, 1]])
    nearest = found["distance to nearest upload"]
    assert (nearest <= found["distance to own upload"] + 1e-6).all()
    uploads = state.starts + updates
    torch.testing.assert_close(
        found["agreement with own upload"],
        fed.agreement(state.generated[[4, 1]], uploads[[4, 1]], np.array([4, 1])),
    )


# New clients


class Notes:
    """Keeps what a run would write to its results about new clients."""

    def __init__(self) -> None:
        self.curves: dict[str, list[np.ndarray]] = {}

    def write_newcomer_bytes(self, given: float) -> None:
        self.given = given

    def write_newcomers(self, start: str, update: int, accuracy: np.ndarray) -> None:
        assert len(self.curves.setdefault(start, [])) == update
        self.curves[start].append(accuracy)


def welcomed(setup: Setup, state: Any) -> dict[str, list[np.ndarray]]:
    assert setup.newcomers is not None
    notes = Notes()
    welcome(setup, setup.newcomers, state, cast(Any, notes))
    return notes.curves


def test_new_clients_are_judged_after_every_update_from_four_starts(
    finished: Finished,
) -> None:
    s, state, fed = finished.setup, finished.state, finished.newcomers.federation
    curves = welcomed(s, state)
    here = np.arange(3)
    starts = {"random": fed.initial_row(), "global model": state.w, "method": state.w}
    starts["random, guided"] = starts["random"]
    assert curves.keys() == starts.keys() == STARTS
    for name, start in starts.items():
        rows, expected = start.expand(3, -1), []
        for update in range(5):
            if update:
                before, rows = rows, fed.finetune(rows, here, phase=update)
                if name in ("method", "random, guided") and update <= 2:
                    led = fed.server.guide(
                        fed.clients,
                        before - state.w,
                        rows - state.w,
                        Guidance(strength=0.0, start=20, steps=20),
                    )
                    rows = state.w + led
            expected.append(
                fed.evaluate(rows, here).correct.numpy()
                / finished.newcomers.clients.test_samples
            )
        np.testing.assert_allclose(curves[name], expected, err_msg=name)
    for one, other in (("method", "global model"), ("random, guided", "random")):
        assert not np.array_equal(curves[one][1], curves[other][1]), (
            "guidance must be seen in the accuracy"
        )


def test_without_guidance_the_method_is_plain_local_training(
    finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed, state = finished.newcomers.federation, finished.state
    before, after = torch.zeros(3, COLUMNS), torch.ones(3, COLUMNS)
    assert pfedgpa.lead(fed, state, 2, before, after) is after, (
        "two updates are guided, this is the third"
    )
    assert not torch.equal(pfedgpa.lead(fed, state, 1, before, after), after)
    monkeypatch.setattr(
        fed, "options", fed.options.model_copy(update={"guided_updates": 0})
    )
    curves = welcomed(finished.setup, finished.state)
    np.testing.assert_array_equal(curves["method"], curves["global model"])
    np.testing.assert_array_equal(curves["random, guided"], curves["random"])
    assert not np.array_equal(curves["method"], curves["random"])


@pytest.mark.parametrize("reference", ["fedavg", "before"])
def test_an_update_is_counted_from_fedavgs_row_or_the_clients_own(
    reference: str, finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed, state = finished.newcomers.federation, finished.state
    before, after = torch.full((3, COLUMNS), 2.0), torch.full((3, COLUMNS), 5.0)
    chosen = {"guided_reference": reference, "guided_return": "moved", "guidance": -1.0}
    monkeypatch.setattr(fed, "options", fed.options.model_copy(update=chosen))
    asked = list[tuple[Tensor, Tensor, Guidance]]()

    def guide(
        clients: np.ndarray, before: Tensor, after: Tensor, how: Guidance
    ) -> Tensor:
        asked.append((before, after, how))
        return after + 0.5

    monkeypatch.setattr(fed.server, "guide", guide)
    led = pfedgpa.lead(fed, state, 1, before, after)
    torch.testing.assert_close(led, torch.full((3, COLUMNS), 5.5))
    [(old, new, how)] = asked
    start = before if reference == "before" else state.w
    torch.testing.assert_close(old, before - start)
    torch.testing.assert_close(new, after - start)
    assert how == Guidance(
        strength=-1.0, start=20, steps=20, moved=True, stream="guidance 1"
    )


def test_far_rows_are_pulled_towards_fedavgs_by_hand(
    finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known clients lie 1 and 7 from FedAvg's columns, which are (1, 1): √((1 + 49) / 2)
    = 5 is usual. A third one is unknown. Twice that is allowed: a row at 20 is pulled
    half of its way, one at 10 stays.
    """
    fed = finished.newcomers.federation
    monkeypatch.setattr(
        fed, "options", fed.options.model_copy(update={"guided_within": 2.0})
    )
    centre = torch.ones(2)
    generated = torch.tensor([[2.0, 1.0], [1.0, 8.0], [1.0, 1.0]])
    columns = torch.tensor([[13.0, 17.0], [7.0, 9.0], [1.0, 1.0]])
    found = _guided.keep_within(fed, columns, centre, generated)
    expected = torch.tensor([[7.0, 9.0], [7.0, 9.0], [1.0, 1.0]])
    torch.testing.assert_close(found, expected)


def test_guidance_changes_generated_columns_alone() -> None:
    s = assembled(
        **TINY | {"rounds": 1, "bank_rounds": 1}, generated_layers=1, new_clients=3
    )
    state = states(s)[-1]
    assert s.newcomers is not None
    fed = s.newcomers.federation
    rows = torch.randn(2, 3, COLUMNS, generator=torch.Generator().manual_seed(0))
    led, others = (
        pfedgpa.lead(fed, state, 0, rows[0], rows[1]),
        torch.ones(COLUMNS, dtype=torch.bool),
    )
    others[fed.generated] = False
    assert torch.equal(led[:, others], rows[1][:, others])
    assert (led[:, ~others] != rows[1][:, ~others]).any(
        1
    ).all() and led.isfinite().all()


def test_clients_that_join_later_take_data_and_nothing_else() -> None:
    """The rounds of four clients beside two newcomers are those in which only four of
    six clients are sampled.
    """
    s, whole = assembled(clients=4, new_clients=2), assembled(clients=6)
    assert s.newcomers is not None
    sizes = np.concatenate([s.clients.train_samples, s.newcomers.clients.train_samples])
    np.testing.assert_array_equal(sizes, whole.clients.train_samples)
    found, expected = s.method.init(s.federation), whole.method.init(whole.federation)
    four = np.arange(4)
    for round in range(2):
        cohort = s.federation.sample(round)
        found = s.method.round(s.federation, found, cohort)
        same = Cohort(
            round,
            four,
            sizes[:4] / sizes[:4].sum(),
            here=four,
            chosen=four,
            per_rank=[four],
        )
        np.testing.assert_array_equal(cohort.weights, same.weights)
        expected = whole.method.round(whole.federation, expected, same)
        assert torch.equal(found.w, expected.w)
    fed, here = s.newcomers.federation, np.arange(2)
    rows = found.w.expand(2, -1)
    np.testing.assert_array_equal(
        fed.evaluate(rows, here).correct,
        whole.federation.evaluate(rows, here + 4).correct,
    )
