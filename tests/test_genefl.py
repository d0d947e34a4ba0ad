"""GENE-FL and the methods that it is compared with: their rules, what they send, and mistakes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.paper.gene import lines as gene_lines
from hpcfed import methods
from hpcfed.clients import engine as engines
from hpcfed.clients.pull import Pull, Strengths
from hpcfed.clients.schedule import StepShape
from hpcfed.clients.training import StackTraining
from hpcfed.errors import UserError
from hpcfed.experiment.assemble import Setup
from hpcfed.experiment.evaluate import evaluate, standing_accuracy
from hpcfed.experiment.newcomers import new_rounds
from hpcfed.experiment.opening import opening_lines
from hpcfed.federation.cohort import Sent
from hpcfed.federation.federation import Federation
from hpcfed.federation.log import RoundLog
from hpcfed.methods import genefl
from hpcfed.models.kernel_layout import KernelLayout
from hpcfed.models.layout import Layout
from hpcfed.results.as_json import run_summary
from hpcfed.results.stored import read_run
from hpcfed.runtime import randomness
from tests.federations import assembled, rounds, traffic, trained_alone
from tests.genefl_runs import SMALL, fresh, small, trained
from tests.runs import UNEVEN, assert_same_run, mistake, same_newcomers, started

MIB, GIB = 2**20, 2**30
FAMILY = [
    "clustered-fedavg",
    "fedbn",
    "parfed",
    "fedfina",
    "fedlp",
    "fedlps",
    "fedlg",
    "genefl",
]


def options(**values: Any) -> genefl.Options:
    return genefl.Options(**values)


# The methods' rules


class Naive:
    """A federation by dictionaries and loops over clients and layers."""

    def __init__(self, s: Setup, method: str) -> None:
        self.s, self.method, self.fed = s, method, s.federation
        opts, first = s.settings.options, s.federation.initial_row()
        self.group = s.method.init(s.federation).cluster.tolist()
        self.theta = {k: first.clone() for k in range(opts.clusters)}
        self.own = {i: first.clone() for i in range(len(self.group))}
        self.kept, self.seen = dict[int, Tensor](), set[int]()
        self.gene: dict[int, Tensor] = {}
        self.columns = {e.name: slice(e.start, e.stop) for e in self.fed.layout.entries}
        self.shared = dict.fromkeys(self.columns, True)
        if method == "fedbn":
            self.shared = {name: "bn" not in name for name in self.columns}
        elif method in ("parfed", "fedfina"):
            self.shared = {
                name: name.split(".")[0] in opts.names for name in self.columns
            }
        elif method == "fedlg":
            layers = ("conv1", "conv2", "fc1", "head")
            self.shared = {name: name.split(".")[0] in layers for name in self.columns}
        elif method == "fedlp" and opts.mask_per == "run":
            sent = s.federation.generator("layers sent").random(4) < 0.5
            block_of = s.federation.layout.block_of
            self.shared = {
                name: bool(sent[block_of[at.start]])
                for name, at in self.columns.items()
            }

    def start(self, i: int) -> Tensor:
        theta = self.theta[self.group[i]]
        if self.method == "genefl":
            return self.own[i].clone() if i in self.seen else theta.clone()
        row = self.own[i].clone()
        for name, at in self.columns.items():
            if self.shared[name]:
                row[at] = theta[at]
        return row * self.kept[i] if i in self.kept else row

    def round(self, round: int, cohort: list[int]) -> None:
        s, method, theta = self.s, self.method, self.theta
        told: dict[int, list[tuple[Tensor, Tensor, float]]] = {k: [] for k in theta}
        for i in cohort:
            k, start, pull = self.group[i], self.start(i), None
            if method == "genefl":
                pull = naive_pull(s, self.fed, start, theta[k], i)
            after = trained(self.fed, start, i, round, pull)
            if method == "fedlps":
                self.kept.setdefault(i, naive_channels(s, after))
                after = after * self.kept[i]
            self.own[i] = after
            sent = naive_sent(s, method, start, after, i, round, self.kept.get(i))
            told[k].append((after, sent, float(self.fed.sizes[i])))
            self.seen.add(i)
        weighted = method in ("clustered-fedavg", "fedbn", "parfed", "fedfina")
        for k, uploads in told.items():
            if uploads:
                self.gene[k] = torch.stack([sent for _, sent, _ in uploads]).all(0)
            for name, at in self.columns.items():
                for column in range(at.start, at.stop) if method == "fedlps" else [at]:
                    mine = [
                        (n if weighted else 1, row[column])
                        for row, sent, n in uploads
                        if sent[column].all()
                    ]
                    if mine and self.shared[name]:
                        total = sum(weight for weight, _ in mine)
                        theta[k][column] = sum(
                            weight / total * part for weight, part in mine
                        )

    def adopt(self, state: Any) -> None:
        """Put new clients in the place of the known ones: each joins the cluster whose
        mean is nearest, inherits its gene, and draws the rest for itself.
        """
        assert self.s.newcomers is not None
        self.fed = self.s.newcomers.federation
        points = self.fed.bases(5).reshape(len(self.fed.sizes), -1)
        centres, members = state.centres.clone().numpy(), state.members.tolist()
        self.group, self.own = [], {}
        for i, point in enumerate(points):
            k = int(np.argmin([np.linalg.norm(centre - point) for centre in centres]))
            centres[k] = (members[k] * centres[k] + point) / (members[k] + 1)
            members[k] += 1
            self.group.append(k)
            self.own[i] = fresh(self.s, i)
            if self.method == "genefl":
                self.own[i][self.gene[k]] = self.theta[k][self.gene[k]]
        self.kept, self.seen = {}, set(self.own)


def naive_pull(
    s: Setup, fed: Federation, before: Tensor, cluster: Tensor, client: int
) -> Pull:
    opts, layout = s.settings.options, s.federation.layout
    fisher = s.engine.fisher(before[None], fed.training.train_data, np.array([client]))[
        0, : layout.num_parameters
    ]
    normal = (fisher - fisher.min()) / (fisher.max() - fisher.min())
    mask = torch.zeros_like(before, dtype=torch.bool)
    mask[: layout.num_parameters] = normal <= opts.epsilon
    assert 0 < mask.sum() < layout.num_parameters, "the case needs an ε that divides"
    return Pull(
        Strengths(whole=opts.lambda1, masked=opts.lambda2), cluster[None], mask[None]
    )


def naive_channels(s: Setup, row: Tensor) -> Tensor:
    """Half of the channels of both convolutions, with all that belongs to them."""
    kept = torch.ones_like(row)
    for number in (1, 2):
        tensors = {
            e.name: (e, row[e.start : e.stop].view(e.shape))
            for e in s.federation.layout.entries
        }
        weak = tensors[f"conv{number}.weight"][1].abs().sum((1, 2, 3)).argsort()
        for channel in weak[: len(weak) // 2]:
            for name, (e, _) in tensors.items():
                if name.startswith((f"conv{number}.", f"bn{number}.")):
                    kept[e.start : e.stop].view(e.shape)[channel] = 0
    return kept


def naive_sent(
    s: Setup,
    method: str,
    start: Tensor,
    after: Tensor,
    client: int,
    round: int,
    kept: Tensor | None,
) -> Tensor:
    """Which columns a client sends."""
    fed, layout, opts = s.federation, s.federation.layout, s.settings.options
    sent = torch.ones_like(after, dtype=torch.bool)
    if method == "fedlp" and opts.mask_per == "upload":
        key = randomness.client_keys(
            fed.config.seed, "layers sent", round, torch.tensor([client])
        )
        sent = (randomness.uniform(key, 4)[0] < opts.send_probability)[layout.block_of]
    elif method == "fedlps":
        assert kept is not None
        sent = kept.bool()
    elif method == "fedlg":
        change = (after - start)[: layout.num_parameters].abs()
        share = {
            layer: torch.cat(
                [change[e.start : e.stop] for e in layout.entries if e.layer == layer]
            )
            .gt(change.mean())
            .double()
            .mean()
            for layer in ("conv1", "conv2", "fc1", "head")
        }
        best = {
            max(pool, key=lambda layer: share[layer])
            for pool in (("conv1", "conv2"), ("fc1", "head"))
        }
        sent = layout.mask(best)
    elif method == "genefl":
        score = {}
        for number, (a, b) in enumerate(layout.block_spans):
            score[number] = float(
                after[a:b]
                @ start[a:b]
                / after[a:b].norm()
                / start[a:b].norm()
                / (b - a)
            )
        gamma = max(opts.gene_layers, 4 - round)
        best_blocks = sorted(score, key=lambda number: -score[number])[:gamma]
        sent = torch.isin(layout.block_of, torch.tensor(best_blocks))
    return sent


@pytest.mark.parametrize("method", [*FAMILY, "fedlp --mask-per run"])
def test_the_published_rule(method: str) -> None:
    """Three rounds of known clients, and three of new ones, who join in the first two:
    two, one, and in the end two of the three again.
    """
    method, _, once = method.partition(" ")
    more: dict[str, Any] = {"mask_per": "run"} if once else {}
    if method == "genefl":
        more = {"epsilon": 0.003, "lambda2": 0.3, "gene_layers": 2}
    later = {"new_clients": 3, "new_rounds": 3, "join_rounds": 2, "new_classes": 0.5}
    s = small(method, **more, **later)
    naive = Naive(s, method)
    for round, after in rounds(s, 3):
        state = after
        naive.round(round, s.federation.sample(round).clients.tolist())
    assert len(set(state.cluster.tolist())) == 2, "the case needs two clusters"
    same_rows(s, s.federation, state, naive)
    assert np.isfinite(evaluate(s, state).accuracy)

    assert s.newcomers is not None and s.method.adopt is not None
    fed = s.newcomers.federation
    naive.adopt(state)
    state = s.method.adopt(fed, state, fed.everyone(3))
    cohorts = []
    for new in new_rounds(s, fed, state):
        cohorts.append(new.cohort.clients.tolist())
        naive.round(3 + new.number, cohorts[-1])
    assert cohorts[:2] == [[0, 1], [2]] and len(cohorts[2]) == 2
    same_rows(s, fed, new.state, naive)
    judged = standing_accuracy(s, fed, new.state, np.arange(3))
    assert new.trained is not None
    took_part = ~np.isnan(new.trained.accuracy())
    assert np.isfinite(judged).all() and took_part.nonzero()[0].tolist() == cohorts[2]


def same_rows(s: Setup, fed: Federation, state: Any, naive: Naive) -> None:
    rows = s.method.personal(fed, state, np.arange(len(fed.sizes)))
    for client, row in enumerate(rows):
        expected = naive.start(client)
        torch.testing.assert_close(
            row,
            expected,
            rtol=1e-8,
            atol=1e-10,
            msg=lambda m, c=client: f"{c}: {m}",
        )


@pytest.mark.parametrize("method", ["clustered-fedavg", "fedlp", "genefl"])
def test_one_cluster_that_sends_everything_is_fedavg(method: str) -> None:
    """Weighted for FedAvg's own, and uniform where every sender counts alike; GENE-FL
    in the first round, from Θ.
    """
    own = {
        "fedlp": {"send_probability": 1.0},
        "genefl": {"gene_layers": 4, "lambda1": 0.0, "lambda2": 0.0},
    }
    s = small(method, clusters=1, **own.get(method, {}))
    fed, cohort = s.federation, s.federation.sample(0)
    rows = torch.stack(
        [trained_alone(s, fed.initial_row(), client, 0) for client in cohort.clients]
    )
    weights = torch.from_numpy(
        cohort.weights if method == "clustered-fedavg" else cohort.equally().weights
    )
    state = s.method.round(fed, s.method.init(fed), cohort)
    torch.testing.assert_close(state.shared[0], weights @ rows, rtol=1e-10, atol=1e-12)
    if method == "clustered-fedavg":
        plain = assembled(
            **{name: value for name, value in SMALL.items() if name != "clusters"}
        )
        same = plain.federation.sample(0)
        np.testing.assert_array_equal(same.clients, cohort.clients)
        expected = plain.method.round(
            plain.federation, plain.method.init(plain.federation), same
        )
        torch.testing.assert_close(
            s.method.global_row(state), expected.w, rtol=1e-12, atol=1e-14
        )
        assert traffic([cohort.log]) == traffic([same.log])


def test_fedlp_that_sends_nothing_leaves_the_model() -> None:
    s = small("fedlp", send_probability=0.0)
    logs = list[RoundLog]()
    for _, state in rounds(s, 2, logs):
        assert torch.equal(state.shared, s.federation.initial_row().expand(2, -1))
    up, up_here, down = traffic(logs)
    assert up == up_here == 0 < down


def test_fedlp_draws_for_every_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    s = small("fedlp", participation=1.0)
    uploads = list[Sent]()
    monkeypatch.setattr(
        s.federation,
        "upload",
        lambda rows, cohort, sent: uploads.append(sent) or rows,
    )
    for _ in rounds(s, 2):
        pass
    groups = torch.cat([sent.groups for sent in uploads])
    assert len(groups) == 12 and len(groups.unique(dim=0)) > 4


def test_fedlp_of_one_draw_sends_the_same_layers_in_every_round() -> None:
    s = small("fedlp", mask_per="run", participation=1.0)
    layout, logs = s.federation.layout, list[RoundLog]()
    for _, state in rounds(s, 2, logs):
        drawn = layout.block_of[state.shared_at].unique()
    assert 0 < len(drawn) < 4, "the case needs layers of both kinds"
    columns = int(torch.isin(layout.block_of, drawn).sum())
    up, _, down = traffic(logs)
    assert up == down == 2 * 6 * 8 * columns


def test_fedlp_of_one_draw_refuses_what_needs_whole_rows(capsys: Any) -> None:
    run = ["run", "--method", "fedlp", "--mask-per", "run"]
    said = mistake(capsys, *run, "--compress", "powersgd")
    assert "whole rows" in said
    with pytest.raises(UserError, match="draws none of 4 layers"):
        next(rounds(small("fedlp", mask_per="run", send_probability=0.0), 1))


def test_fedbn_keeps_batch_norm_where_it_is_bit_for_bit() -> None:
    s = small("fedbn")
    norm = s.federation.layout.mask(["bn1", "bn2"])
    kept = s.federation.initial_row().repeat(6, 1)
    train, seen = s.federation.train, []
    s.federation.train = lambda rows, cohort, **how: (
        seen.append((rows, train(rows, cohort, **how))) or seen[-1][1]
    )
    for round, state in rounds(s, 3):
        here = s.federation.sample(round).here
        started_from, trained_to = seen[round]
        assert torch.equal(started_from[:, norm], kept[here][:, norm])
        kept[here] = trained_to
        assert torch.equal(state.private, kept[:, norm])
        assert torch.equal(
            s.method.personal(s.federation, state, np.arange(6))[:, norm], kept[:, norm]
        )
    assert len(kept[:, norm].unique(dim=0)) == 6


def test_without_batch_norm_fedbn_is_fedavg_in_clusters_and_says_so() -> None:
    found = []
    for method in ("fedbn", "clustered-fedavg"):
        s = small(method, model="cnn-digits")
        *_, (_, state) = rounds(s, 1)
        found.append(state.shared)
        said = [line for line in opening_lines(s) if "no batch norm" in line]
        assert len(said) == (method == "fedbn")
    assert torch.equal(*found)


@pytest.mark.parametrize("method", FAMILY)
def test_the_family_makes_do_with_a_small_network(method: str) -> None:
    """Methods that name layers of ResNet-18 choose others by themselves."""
    s = assembled(
        method=method,
        model="cnn-cifar",
        dataset="synthetic",
        synthetic_shape="3x20x20",
        train_per_client=4,
        test_per_client=1,
        clients=3,
        clusters=2,
        epochs=1,
    )
    s.settings.options.check_layout(s.federation.layout, "cnn-cifar")
    logs = list[RoundLog]()
    *_, (_, state) = rounds(s, 1, logs)
    rows = s.method.personal(s.federation, state, np.arange(3))
    assert rows.isfinite().all()
    up, up_here, _ = traffic(logs)
    assert 0 < up + up_here <= 3 * 8 * s.federation.layout.num_columns


def test_channels_that_fedlps_has_dropped_stay_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever training makes of them later."""
    s = small("fedlps", participation=1.0)
    draw = torch.Generator().manual_seed(0)
    monkeypatch.setattr(
        s.federation,
        "train",
        lambda rows, cohort, **how: torch.randn(
            rows.shape, generator=draw, dtype=rows.dtype
        ),
    )
    history = [state.channels.clone() for _, state in rounds(s, 3)]
    assert (
        torch.equal(history[0], history[2]) and (history[0].sum(1) == 1 + 4 + 8).all()
    )
    assert len(history[0].unique(dim=0)) > 1, "clients choose for themselves"


@pytest.mark.parametrize("pruned", [True, False])
def test_channels_that_fedlps_has_dropped_are_not_trained(
    pruned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leaky network: its channels of zeros have gradients."""
    s = assembled(
        method="fedlps",
        model="cnn-fmnist",
        dataset="synthetic",
        synthetic_shape="1x14x14",
        train_per_client=8,
        test_per_client=1,
        clients=2,
        clusters=1,
        epochs=1,
        train_pruned=pruned,
    )
    train, seen = s.federation.train, list[Tensor]()
    monkeypatch.setattr(
        s.federation,
        "train",
        lambda rows, cohort, **how: seen.append(train(rows, cohort, **how)) or seen[-1],
    )
    for _, after in rounds(s, 2):
        state = after
    dropped = ~state.channels[:, state.group_of]
    # Of 8 and 16 channels 6 and 12 are dropped.
    assert (state.channels.sum(1) == 1 + 2 + 4).all()
    assert seen[0][dropped].all(), "all are there at first"
    assert bool(seen[1][dropped].any()) == (not pruned)


# learnGene


def layers_of(*widths: int) -> Layout:
    return Layout.of(
        nn.Sequential(*[nn.Linear(width, 1, bias=False) for width in widths])
    )


def test_an_unchanged_layer_outranks_a_changed_one_of_equal_size() -> None:
    layout, before = layers_of(6, 6, 6), torch.arange(1.0, 19)[None].double()
    after = before.clone()
    after[:, 6] += 5
    after[:, 12] += 1
    score = genefl.scores(options(), layout, after, before)
    assert score[0, 0] > score[0, 2] > score[0, 1] and score.sum() == pytest.approx(1)
    opposite = options(gene_score="changed")
    assert genefl.scores(opposite, layout, after, before)[0].argsort(
        descending=True
    ).tolist() == [0, 2, 1]
    for choice in (
        options(gene_layers=2),
        options(gene_layers=2, gene_score="changed"),
    ):
        sent = genefl.gene(
            choice, genefl.scores(choice, layout, after, before), round=9
        )
        assert sent.tolist() == [[True, False, True]]


def test_scores_by_hand() -> None:
    """Cosines 1, 0.6 and 1 by dimensions 2, 2 and 4."""
    before = torch.tensor([[1.0, 0, 1, 0, 1, 1, 1, 1]], dtype=torch.float64)
    after = torch.tensor([[2.0, 0, 3, 4, 2, 2, 2, 2]], dtype=torch.float64)
    expected = torch.tensor([[0.5, 0.3, 0.25]], dtype=torch.float64) / 1.05
    torch.testing.assert_close(
        genefl.scores(options(), layers_of(2, 2, 4), after, before), expected
    )


def test_cosines_alone_ignore_how_large_a_layer_is() -> None:
    """Cosines 0.6 and 1 by dimensions 2 and 4: by Eq. 9 the first has the higher score."""
    before = torch.tensor([[1.0, 0, 1, 1, 1, 1]], dtype=torch.float64)
    after = torch.tensor([[3.0, 4, 2, 2, 2, 2]], dtype=torch.float64)
    layout, order = layers_of(2, 4), {}
    for score in ("same", "cosine"):
        found = genefl.scores(options(gene_score=score), layout, after, before)
        order[score] = found[0].argsort(descending=True).tolist()
    assert order == {"same": [0, 1], "cosine": [1, 0]}


def test_layers_of_equal_size_are_told_apart_that_hardly_change() -> None:
    """Clients by turns move the first and the second layer a tenth more, in float32: 1 −
    cos is 1.0e-7 and 1.2e-7, which is no more than an ulp or two.
    """
    width, generator = 200_000, torch.Generator().manual_seed(0)
    before = torch.randn(12, 2 * width, generator=generator)
    # 1 − cos is half the step's square, by the row's.
    step = 2e-7**0.5 * torch.randn(12, 2 * width, generator=generator)
    step[::2, width:] *= 1.1
    step[1::2, :width] *= 1.1
    layout = layers_of(width, width)
    score = genefl.scores(options(), layout, before + step, before)
    assert score.argmax(1).tolist() == [0, 1] * 6


def test_what_either_score_sends_is_told_layer_by_layer() -> None:
    """Cosines 0.6, 1, 1, 1 by dimensions 2, 2, 2, 8; three of four layers are sent."""
    before = torch.tensor([[1.0, 0, *[1] * 12]], dtype=torch.float64)
    after = torch.tensor([[3.0, 4, *[2] * 12]], dtype=torch.float64)
    told = [
        [word.strip() for word in line.split("|")][2:6]
        for line in gene_lines(layers_of(2, 2, 2, 8), before, after)
    ]
    assert told[0] == ["2", "4.0e-01", "100", "0"]
    assert [[columns, *sent] for columns, _, *sent in told[1:]] == [
        ["2", "100", "100"],
        ["2", "100", "100"],
        ["8", "0", "100"],
    ]


def test_the_gene_shrinks_to_sixteen_of_resnets_layers() -> None:
    assert [options().num_sent(round, 21) for round in (0, 1, 4, 5, 6, 99)] == [
        21,
        20,
        17,
        16,
        16,
        16,
    ]
    slow = options(gene_layers=2, gene_every=3)
    assert [slow.num_sent(round, 4) for round in (0, 2, 3, 5, 6, 99)] == [
        4,
        4,
        3,
        3,
        2,
        2,
    ]


def test_epsilon_divides_by_normalised_fisher_information() -> None:
    layout, fisher = (
        layers_of(3, 2),
        torch.tensor([[2.0, 6, 10, 2, 4], [0, 0, 0, 0, 0]]),
    )
    assert genefl.elastic(options(), layout, fisher).tolist() == [
        [True, True, False, True, True],
        [True] * 5,
    ]
    by_layer = genefl.elastic(options(fisher="layer", epsilon=0.4), layout, fisher)
    assert by_layer[0].tolist() == [True, False, False, True, False]
    high = genefl.elastic(options(elastic="high"), layout, fisher)
    assert high[0].tolist() == [False, False, True, False, False]
    assert not high[1].any(), "where all are alike none is high"
    assert not genefl.elastic(options(epsilon=-0.1), layout, fisher[:1]).any()
    assert genefl.elastic(options(epsilon=1.0), layout, fisher).all()


@pytest.mark.parametrize(
    ("scale", "normalised"),
    [
        # (F − 0) / 1.
        ("minmax", [0.0, 1e-4, 1e-2, 1.0]),
        # 0, 1, 2 and 3 are smaller, of three others.
        ("rank", [0.0, 1 / 3, 2 / 3, 1.0]),
        # log10: −4 (0 counts as the least above it), −4, −2 and 0, from −4 to 0.
        ("log", [0.0, 0.0, 0.5, 1.0]),
    ],
)
def test_scales_of_fisher_information_by_hand(
    scale: Any, normalised: list[float]
) -> None:
    layout, fisher = layers_of(4), torch.tensor([[1e-2, 1.0, 0, 1e-4], [0, 0, 0, 0]])
    expected = [normalised[place] for place in (2, 3, 0, 1)]
    for value in normalised:
        for epsilon in (value - 1e-5, value + 1e-5):
            own = options(fisher_scale=scale, epsilon=epsilon)
            mask = genefl.elastic(own, layout, fisher)
            assert mask[0].tolist() == [number <= epsilon for number in expected]
            assert mask[1].all() or epsilon < 0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            {"lambda1": 0.4, "lambda2": 0.3, "epsilon": -1.0},
            {"lambda1": 0.4, "lambda2": 0.0},
        ),
        (
            {"lambda1": 0.0, "lambda2": 0.3, "epsilon": 1.0},
            {"lambda1": 0.3, "lambda2": 0.0, "smooth": "whole"},
        ),
    ],
    ids=["ε below 0 is no term", "ε of 1 is the whole norm"],
)
def test_what_epsilon_means_at_its_ends(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    rows = []
    for own in (one, other, {"lambda1": 0.0, "lambda2": 0.0}):
        s = small("genefl", **own)
        *_, (_, state) = rounds(s, 2)
        rows.append(state.rows)
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-9, atol=1e-11)
    assert not torch.allclose(rows[0], rows[2], rtol=1e-4)


# Bytes


@pytest.fixture(scope="module")
def resnet() -> Setup:
    """ResNet-18 with so little data that nobody is trained."""
    values = {
        "dataset": "synthetic",
        "synthetic_shape": "3x4x4",
        "train_per_client": 6,
        "test_per_client": 1,
    }
    return assembled(
        **values,
        model="resnet18",
        clients=1,
        precision="fp32",
        clusters=1,
        method="clustered-fedavg",
    )


@pytest.mark.parametrize(
    ("method", "columns", "mib"),
    [
        ("clustered-fedavg", 11_183_562, 42.66),
        ("fedbn", 11_167_946, 42.60),
        ("fedfina", 8_257_536, 31.50),
        ("parfed", 3_133_440, 11.95),
        ("fedlg", 4_792_320, 18.28),
        ("genefl", 2_326_986, 8.88),
    ],
)
def test_bytes_of_an_upload_of_resnet18(
    method: str, columns: int, mib: float, resnet: Setup, monkeypatch: Any
) -> None:
    """To the byte; GENE-FL's is that of its last size when no layer changes much: the
    sixteen smallest.
    """
    module, fed = methods.load(method), resnet.federation
    monkeypatch.setattr(
        fed,
        "options",
        module.Options(clusters=1, **({"lambda2": 0.0} if method == "genefl" else {})),
    )
    changed = 1e-3 * torch.rand(1, fed.layout.num_columns)
    monkeypatch.setattr(fed, "train", lambda rows, cohort, **how: rows + changed)
    state = module.init(fed)
    cohort = fed.sample(99)
    state = module.round(fed, state, cohort)
    up = cohort.log.bytes_up + int(cohort.log.bytes_up_here)
    assert up == 4 * columns and round(up / MIB, 2) == mib
    newcomers = fed.everyone(100)
    rows = module.welcome(fed, state, newcomers)
    assert newcomers.log.bytes_down == up and rows.shape == (1, 11_183_562)
    if method == "clustered-fedavg":
        assert round(100 * 10 * up / GIB, 2) == 41.66


def test_comm_is_what_clients_sent_and_the_printed_formula_another(
    tmp_path: Path,
) -> None:
    words = "--method clustered-fedavg --model mlp --clusters 2 --clients 10"
    words += " --participation 0.5 --rounds 3 --device cpu"
    record = read_run(started(*words.split(), "--out", tmp_path / "run"))
    assert record.rounds["bytes_up"].sum() == 3 * 5 * 4 * 4810
    assert (
        record.printed_comm() == 3 * 2 * 4 * 4810 == run_summary(record)["printed_comm"]
    )


# Seeds and ranks


@pytest.mark.parametrize(
    "words", ["genefl --lambda2 0.3 --epsilon 0.01", "fedlg --gene-pools conv1,conv2"]
)
def test_seeds_at_once_are_the_same_runs(words: str, tmp_path: Path) -> None:
    common = [
        "--method",
        *words.split(),
        *UNEVEN,
        "--model",
        "cnn-bn",
        "--clusters",
        2,
        "--epochs",
        1,
    ]
    common += ["--new-clients", 3, "--new-rounds", 2]
    together = started(*common, "--seeds", "0,5", "--out", tmp_path / "together")
    for seed in (0, 5):
        alone = started(*common, "--seed", seed, "--out", tmp_path / f"alone-{seed}")
        assert_same_run(together / f"seed-{seed}", alone, tolerance=1e-10)
        same_newcomers(together / f"seed-{seed}", alone)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "words",
    [
        "genefl --lambda2 0.3 --epsilon 0.01",
        "fedlps",
        "fedlp",
        "fedlg --gene-pools conv1",
        "fedbn",
    ],
)
def test_a_gpu_computes_what_a_cpu_does(
    words: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on the CPU, with rows that lie as on a GPU and the few shapes of steps that
    are captured there.
    """
    common = [
        "--method",
        *words.split(),
        *UNEVEN,
        "--model",
        "cnn-bn",
        "--clusters",
        2,
        "--epochs",
        1,
    ]
    common += ["--new-clients", 3, "--new-rounds", 2]
    expected = started(*common, "--out", tmp_path / "expected")
    if device == "cpu":
        monkeypatch.setattr(
            engines,
            "KernelLayout",
            lambda layout, device: KernelLayout(layout, torch.device("cuda")),
        )
        monkeypatch.setattr(
            StackTraining,
            "_captured_shape",
            lambda self, _: StepShape(self._capacity, self._slots, False),
        )
    there = started(*common, "--device", device, "--out", tmp_path / device)
    assert_same_run(there, expected, tolerance=1e-9)
    same_newcomers(there, expected)


# Mistakes


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "run --method genefl --clients 3 --clusters 4",
            "--clusters 4, but there are 3 clients",
        ),
        (
            "run --method genefl --gene-layers 5",
            "--gene-layers 5, but cnn-digits has 4 layers with weights",
        ),
        (
            "run --method parfed --shared-layers layer1.1.conv2",
            "model cnn-digits has no layer 'layer1.1.conv2'; name others, as in "
            "--shared-layers conv1",
        ),
        ("run --method fedfina --shared-layers conv1,cnv2", "has no layer 'cnv2'"),
        ("run --method fedlg --gene-pools conv1/conv9", "has no layer 'conv9'"),
        ("run --method fedlps --model mlp", "model mlp has no convolutions"),
        (
            "run --new-clients 4 --new-classes 0.5 --partition sharding --classes-per-client 6",
            "--classes-per-client 6, but digits leaves 5 of 10 classes",
        ),
        (
            "run --new-clients 4 --new-classes 0.3 --partition sharding --classes-per-client 4",
            "leaves 3 of 10 classes for new clients",
        ),
        (
            "run --new-clients 4 --new-classes 0.01",
            "leaves no class to the known or to the new clients",
        ),
        (
            "run --new-classes 0.5",
            "--new-classes changes nothing without --new-clients 10",
        ),
        ("run --join-rounds 3", "--join-rounds"),
        (
            "run --new-clients 2 --join-rounds 3",
            "--join-rounds 3 is more than --new-clients 2",
        ),
        (
            "run --method genefl --new-clients 4 --new-rounds 2 --join-rounds 3",
            "--join-rounds 3 is more than --new-clients 4 or --new-rounds 2",
        ),
        (
            "run --method fedper --new-clients 4 --new-rounds 2",
            "new clients of method fedper only train by themselves",
        ),
        (
            "run --method pfedgpa --new-clients 4 --join-rounds 2",
            "guides all new clients at once",
        ),
        (
            "run --method genefl --aggregation median",
            "method genefl takes no mean of all uploads",
        ),
        ("attack", "attack needs idlg, as in: hpcfed attack idlg --out"),
        ("attack dlg", "did you mean 'idlg'?"),
        ("attack idlg --methods fedavgg", "did you mean 'fedavg'?"),
        ("attack idlg --model mlp", "unknown model 'mlp'"),
        ("attack idlg --steps 0", "--steps 0: must be at least 1"),
        ("attack idlg --dataset digts", "did you mean 'digits'?"),
        (
            "run --method genefl --clients 2 --rounds 1 --lora 1 --send-frozen",
            "layers that are not trained, which have no score ξ",
        ),
    ],
)
def test_a_mistake_is_one_line(
    words: str,
    expected: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert expected in mistake(capsys, *words.split())
    assert list(tmp_path.iterdir()) == []
