"""New clients with classes of their own: what they are given, and how they join."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpcfed.analysis.render.show import status
from hpcfed.analysis.render.watch import run_line
from hpcfed.analysis.render.watch.looking import Looker
from hpcfed.analysis.run_findings.costs import of_costs
from hpcfed.analysis.run_findings.learning import learning_of_run
from hpcfed.cli import parse_run
from hpcfed.data import PartitionPlan
from hpcfed.data.partition import partition
from hpcfed.experiment import checkpointing, newcomers
from hpcfed.experiment.evaluate import standing_accuracy
from hpcfed.experiment.progress import RunProgress
from hpcfed.experiment.run import run
from hpcfed.methods import clustered_fedavg, genefl
from hpcfed.results.run import NewRounds, RunRecord
from hpcfed.results.stored import read_run
from hpcfed.runtime.signals import Stop
from tests.genefl_runs import fresh, small
from tests.runs import same, started


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "sharding", "dominant"])
def test_new_clients_hold_other_classes_than_known_ones(kind: str) -> None:
    labels = np.random.default_rng(0).integers(0, 10, 2000)
    plan = PartitionPlan(
        scheme=kind,
        classes=10,
        clients=9,
        new_clients=4,
        new_classes=5,
        seed=3,
        alpha=0.5,
        classes_per_client=2,
        uniform_share=0.2,
        train_per_client=30,
        test_per_client=10,
    )
    parts = partition(plan, labels, labels[:500])
    for lists, of in ((parts.train, labels), (parts.test, labels[:500])):
        known, new = (
            {int(c) for own in some for c in of[own]} for some in (lists[:5], lists[5:])
        )
        assert len(known) == len(new) == 5 and not known & new
    if kind != "dominant":
        assert (
            sum(map(len, parts.train)) == 2000 == len(set(np.concatenate(parts.train)))
        )


@pytest.mark.parametrize("new_classes", [0, 2])
def test_a_client_may_be_judged_on_all_of_its_classes(new_classes: int) -> None:
    plan = PartitionPlan(
        scheme="dirichlet",
        classes=4,
        clients=6,
        new_clients=3,
        new_classes=new_classes,
        seed=3,
        alpha=0.1,
        classes_per_client=2,
        uniform_share=0.2,
        train_per_client=30,
        test_per_client=10,
    )
    labels, judged = np.arange(80) % 4, np.arange(20) % 4
    share = partition(plan, labels, judged)
    held = partition(replace(plan, test_classes="held"), labels, judged)
    for client in range(6):
        np.testing.assert_array_equal(share.train[client], held.train[client])
        classes = set(labels[share.train[client]].tolist())
        # Test samples 0, 4, 8 … are of class 0, and so on.
        expected = [sample for sample in range(20) if sample % 4 in classes]
        assert held.test[client].tolist() == expected
    assert sum(map(len, held.test)) > 20 == sum(map(len, share.test))


def test_without_new_classes_the_partition_is_what_it_was() -> None:
    plan = PartitionPlan(
        scheme="dirichlet",
        classes=10,
        clients=9,
        seed=3,
        alpha=0.5,
        classes_per_client=2,
        uniform_share=0.2,
        train_per_client=30,
        test_per_client=10,
    )
    labels = np.random.default_rng(0).integers(0, 10, 500)
    one = partition(plan, labels, labels)
    other = partition(replace(plan, new_clients=4), labels, labels)
    assert all(
        np.array_equal(a, b) for a, b in zip(one.train, other.train, strict=True)
    )


NEW = "--clients 6 --new-clients 5 --new-updates 12 --rounds 3 --epochs 1 --device cpu --participation 0.7"


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    words = f"--method genefl --model cnn-bn --clusters 2 --gene-layers 2 --join-rounds 3 --new-classes 0.5 {NEW}"
    return read_run(
        started(*words.split(), "--out", tmp_path_factory.mktemp("joined") / "run")
    )


def test_new_clients_join_as_many_in_each_update(joined: RunRecord) -> None:
    absent = np.isnan(joined.newcomers["method"])
    assert absent.sum(1).tolist() == [3, 1, 0, *[0] * 10], "two, two and one"
    assert (
        not absent[0, :2].any()
        and not absent[1:, 2:4].any()
        and not absent[2:, 4].any()
    )
    accuracy = joined.newcomers["method"]
    assert joined.newcomers_last("method") == pytest.approx(accuracy[3:].mean())
    assert joined.newcomers_first("method") == pytest.approx(
        np.mean([*accuracy[0, :2], *accuracy[1, 2:4], accuracy[2, 4]])
    )
    assert np.nanmean(accuracy[-1]) > 0.8 > np.nanmean(accuracy[0])


@pytest.mark.parametrize(("given", "layers"), [("common", [1]), ("any", [0, 1, 2])])
def test_what_a_new_client_is_given(
    given: str, layers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three clients of one cluster send layers {0, 1}, {1, 2} and {1}: common to them
    is layer 1, sent by any are 0, 1 and 2. Others are drawn by each for itself.
    """
    s = small("genefl", clients=3, clusters=1, participation=1.0, gene_given=given)
    fed, none = s.federation, [False, True, False, False]
    sent = torch.tensor([[True, True, False, False], [False, True, True, False], none])
    monkeypatch.setattr(genefl, "gene", lambda *_: sent)
    state = s.method.round(fed, s.method.init(fed), fed.sample(0))
    assert state.gene[0].nonzero()[:, 0].tolist() == layers
    everyone = fed.everyone(1)
    rows = s.method.welcome(fed, state, everyone)
    has = torch.isin(fed.layout.block_of, torch.tensor(layers))
    for client, row in enumerate(rows):
        assert torch.equal(row[has], state.shared[0][has])
        assert torch.equal(row[~has], fresh(s, client)[~has])
    assert everyone.log.bytes_down == 3 * 8 * int(has.sum())
    weights = fed.layout.mask(["head"])
    assert len(rows[:, weights].unique(dim=0)) == 3, "everyone draws for itself"


def test_clients_that_send_nothing_in_common_leave_nothing_to_a_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    s = small("genefl", clients=2, clusters=1, participation=1.0)
    fed, sent = s.federation, torch.eye(4, dtype=torch.bool)[:2]
    monkeypatch.setattr(genefl, "gene", lambda *_: sent)
    state = s.method.round(fed, s.method.init(fed), fed.sample(0))
    everyone = fed.everyone(1)
    rows = s.method.welcome(fed, state, everyone)
    assert everyone.log.bytes_down == 0 and torch.equal(rows[0], fresh(s, 0))


@pytest.mark.parametrize(
    ("method", "columns"), [("fedavg", 4810), ("fedper", 4160), ("local", 0)]
)
def test_other_methods_are_compared_on_new_clients_too(
    method: str, columns: int, tmp_path: Path
) -> None:
    words = ["--method", method, "--model", "mlp", *NEW.split(), "--new-updates", 5]
    once = read_run(started(*words, "--out", tmp_path / "once"))
    assert once.newcomer_bytes == 4 * columns
    late = read_run(
        started(
            *words,
            "--join-rounds",
            5,
            "--new-starts",
            "method",
            "--out",
            tmp_path / "late",
        )
    )
    assert late.newcomers.keys() == {"method"} and once.newcomers.keys() >= {
        "method",
        "random",
    }
    assert not np.isnan(once.newcomers["method"]).any()
    for update in range(6):
        there = ~np.isnan(late.newcomers["method"][update])
        assert there.tolist() == [client <= update for client in range(5)]
    np.testing.assert_array_equal(
        late.newcomers["method"][0, 0], once.newcomers["method"][0, 0]
    )


def test_an_adopted_state_is_that_of_the_new_clients() -> None:
    """GENE-FL's with what other methods adopt has still the rows of known clients."""
    s = small("genefl", new_clients=2, new_rounds=1)
    s.method = replace(s.method, adopt=clustered_fedavg.EXTENDS.adopt)
    state = s.method.init(s.federation)
    progress = RunProgress(1, visible=False)
    assert s.newcomers is not None
    with pytest.raises(RuntimeError, match="rows of method genefl has 6 rows after"):
        newcomers.collaborate(s, s.newcomers, state, None, progress, Stop())


def test_the_last_rounds_of_new_clients_are_the_last_that_are_done() -> None:
    """Twelve of twenty rounds, of which every second was evaluated: 4, 6 … 12 count."""
    done = np.arange(1, 21) <= 12
    curve = np.where(done & (np.arange(1, 21) % 2 == 0), np.arange(1, 21) / 100, np.nan)
    sent = np.where(done, 100.0, np.nan)
    rounds = NewRounds(curve[:, None], curve[:, None], sent, sent)
    assert rounds.latest("accuracy").tolist() == [0.04, 0.06, 0.08, 0.1, 0.12]
    assert rounds.last("accuracy") == pytest.approx(0.08)


@pytest.mark.parametrize("killed", [True, False])
@pytest.mark.parametrize("early", [False, True])
def test_new_clients_go_on_after_a_stop_as_if_there_was_none(
    early: bool, killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut short in their first round, of six: known clients' rounds are not repeated,
    and what they sent is counted apart. One that is killed writes nothing any more.
    Known clients may have ended early, at their target.
    """
    monkeypatch.setattr(checkpointing, "LAST_BYTES", 0)  # as if rows were large
    words = "--method genefl --model mlp --clusters 2 --clients 4 --rounds 2 --epochs 1"
    words += " --device cpu --new-clients 4 --new-rounds 6 --join-rounds 2"
    words += " --participation 0.5 --evaluate-every 100"
    words += f" --checkpoint-minutes {60 if killed else 0}"
    if early:
        words = words.replace("--rounds 2", "--rounds 4").replace(
            "every 100", "every 2"
        )
        words += " --target-accuracy 2 --stop-at-target"
    whole = started(*words.split(), "--out", tmp_path / "whole")
    assert not any((whole / "checkpoints").glob("*")), "of no use when all is done"
    stop, there = Stop(), tmp_path / "stopped"

    def stopping(*given: Any) -> np.ndarray:
        if killed:
            raise MemoryError
        stop.asked = True
        return standing_accuracy(*given)

    with monkeypatch.context() as patched, pytest.raises(SystemExit):
        patched.setattr(newcomers, "standing_accuracy", stopping)
        run(parse_run([*words.split(), "--out", str(there)]), stop)
    assert stop.agreed == (not killed)
    first = read_run(there)
    assert first.status == ("failed" if killed else "stopped")
    assert first.new_rounds is not None
    assert first.new_rounds.rounds_done == 1
    assert status(first).startswith(f"status: {first.status}, 2 of ")
    assert ", then 1 of 6 rounds of new clients" in status(first)
    assert ", then 1 of 6 rounds of new clients" in run_line(Looker().look(there))
    started("--resume", there)
    same(whole, there)
    record = read_run(there)
    assert record.facts["resumed"].tolist() == [2] and record.new_rounds is not None
    assert "new clients" not in status(record), "as planned"
    new = record.new_rounds
    # The first two clients, then the other two; two of four in each round.
    assert np.isnan(new.accuracy).sum(1).tolist() == [2, 0, 0, 0, 0, 0]
    assert np.isnan(new.trained_accuracy).sum(1).tolist() == [2] * 6
    assert new.last("accuracy") == pytest.approx(new.curve("accuracy").mean())
    assert len(record.rounds["bytes_up"]) == 2
    (table,) = (one for one in learning_of_run(record) if "new clients" in one.columns)
    assert table.rows[-1][0] == "mean of the last 6", "there are no ten"
    costs = {str(name): str(cell) for name, cell in of_costs([record]).rows}
    assert costs["sent to new clients in their rounds"] == "225.47 KiB"
    # Two clients get all 4810 columns of the cluster's row.
    assert new.bytes_down.tolist() == [2 * 4 * 4810] * 6
    assert (new.bytes_up > 0).all()
