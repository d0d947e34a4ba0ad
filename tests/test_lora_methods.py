"""Methods about adapters against naive loops over clients and dense products."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hpcfed.clients.network import client_network
from hpcfed.errors import UserError
from hpcfed.experiment.assemble import Setup
from hpcfed.federation.log import RoundLog
from hpcfed.methods._adapters import adapters
from hpcfed.methods.flexlora import nearest
from hpcfed.models.lora import LoraLinear
from hpcfed.runtime import randomness
from tests.federations import assembled, rounds, usual
from tests.naive import naive

RANK, ALPHA = 3, 6.0
SMALL: dict[str, Any] = {
    "lora": RANK, "lora_alpha": ALPHA, "epochs": 1, "lr": 0.05,
}  # fmt: skip


def assembled_with(method: str, **values: Any) -> Setup:
    uneven = {} if "dataset" in values else {"alpha": 0.3}
    return assembled(method=method, **{**SMALL, **uneven, **values})


def shared_by(s: Setup) -> np.ndarray:
    """The clients' weights, nᵢ / Σn."""
    return s.federation.sizes / s.federation.sizes.sum()


def effective(s: Setup, row: Tensor, *, layer: str = "fc1") -> Tensor:
    """W + (α / r) B A of a layer, from the names of its tensors; W is 0 where rows do
    not hold it.
    """
    tensors = s.federation.layout.views(row[None])
    a, b = tensors[f"{layer}.down.weight"][0], tensors[f"{layer}.up.weight"][0]
    base = tensors.get(f"{layer}.base.weight", torch.zeros(1, 1))[0]
    return base + ALPHA / RANK * b @ a


def alone(s: Setup, row: Tensor, client: int, round: int) -> Tensor:
    return s.federation.train_alone(row, client, round)


def b_alone(s: Setup, row: Tensor, client: int, round: int) -> Tensor:
    """One client in plain torch, which trains B and nothing else."""
    fed = s.federation
    network = client_network(s.settings.config, double=True)
    tensors = {name: view[0] for name, view in fed.layout.views(row[None]).items()}
    network.load_state_dict(tensors, strict=False)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(".up." in name)
    seed, number = s.settings.config.seed, torch.tensor([client])
    key = randomness.client_keys(seed, "training", round, number)[0]
    data = fed.training.train_data
    trained = naive(network, data, client, usual(s, round, 1), key)
    return fed.layout.row(trained, dtype=torch.float64)


@pytest.mark.parametrize("method", ["fedrep", "fedper", "fedbabu", "lg-fedavg"])
def test_a_head_is_the_same_whether_frozen_weights_travel_or_not(method: str) -> None:
    """Both factors of the last adapter, though frozen layers stand behind it in a row."""
    values = {**SMALL, "method": method}
    if method == "fedrep":
        values["body_epochs"] = values.pop("epochs")
    found = []
    for sent in (False, True):
        s = assembled(**values, send_frozen=sent)
        assert s.federation.layout.last(1) == ("head.down", "head.up")
        logs: list[RoundLog] = []
        for _ in rounds(s, 2, logs):
            pass
        found.append([log.loss_sum for log in logs])
    assert found[0] == found[1]


def test_the_mean_of_factors_is_not_the_mean_of_products() -> None:
    """What the methods below are for: FedAvg's product is far from the mean."""
    s = assembled_with("fedavg")
    state = s.method.init(s.federation)
    for _, before in rounds(s, 1):
        state = before
    trained = [alone(s, state.w, client, 1) for client in range(4)]
    state = s.method.round(s.federation, state, s.federation.sample(1))
    products = [effective(s, row) for row in trained]
    mean = sum(p * m for p, m in zip(shared_by(s), products, strict=True))
    off = torch.linalg.norm(effective(s, state.w) - mean)
    assert off > 1e-3 * torch.linalg.norm(mean)


def test_ffa_lora_never_changes_a_and_averages_products() -> None:
    s = assembled_with("ffa-lora", weight_decay=0.02, momentum=0.9)
    fed = s.federation
    first = fed.initial_row()
    is_a = torch.zeros(len(first), dtype=torch.bool)
    for e in fed.layout.entries:
        is_a[e.start : e.stop] = ".down." in e.name
    sent = int((~is_a).sum()) * 8
    before = first
    for round, state in rounds(s, 2):
        trained = [b_alone(s, before, client, round) for client in range(4)]
        assert torch.equal(state.w[is_a], first[is_a])
        mean = sum(
            p * effective(s, row) for p, row in zip(shared_by(s), trained, strict=True)
        )
        torch.testing.assert_close(effective(s, state.w), mean, rtol=1e-10, atol=1e-12)
        before = state.w
    assert not torch.equal(before, first)
    cohort = fed.sample(2)
    s.method.round(fed, state, cohort)
    assert cohort.log.bytes_up == cohort.log.bytes_down == 4 * sent


def test_fedsa_lora_shares_a_and_keeps_b() -> None:
    s = assembled_with("fedsa-lora")
    fed = s.federation
    own = fed.initial_row().repeat(4, 1)
    layout = fed.layout
    for round, state in rounds(s, 3):
        trained = torch.stack([alone(s, own[i], i, round) for i in range(4)])
        for e in layout.entries:
            columns = slice(e.start, e.stop)
            if ".up." not in e.name:
                weights = torch.from_numpy(shared_by(s))
                trained[:, columns] = weights @ trained[:, columns]
        own = trained
        found = s.method.personal(fed, state, np.arange(4))
        torch.testing.assert_close(found, own, rtol=1e-10, atol=1e-12)
    assert s.method.global_row(state) is None


@pytest.mark.parametrize("personal", [None, 0, 2])
def test_dual_lora_averages_some_components_and_keeps_the_others(
    personal: int | None,
) -> None:
    values = {} if personal is None else {"personal_rank": personal}
    s = assembled_with("dual-lora", **values)
    fed = s.federation
    common = RANK - (1 if personal is None else personal)
    own = fed.initial_row().repeat(4, 1)
    weights = torch.from_numpy(shared_by(s))
    for round, state in rounds(s, 3):
        trained = torch.stack([alone(s, own[i], i, round) for i in range(4)])
        tensors = fed.layout.views(trained)
        for layer in ("fc1", "head"):
            a, b = tensors[f"{layer}.down.weight"], tensors[f"{layer}.up.weight"]
            a[:, :common] = torch.einsum("n,nri->ri", weights, a[:, :common])
            b[:, :, :common] = torch.einsum("n,nor->or", weights, b[:, :, :common])
        own = trained
        found = s.method.personal(fed, state, np.arange(4))
        torch.testing.assert_close(found, own, rtol=1e-10, atol=1e-12)
    shared = common * (64 + 64 + 64 + 10)
    cohort = fed.sample(3)
    s.method.round(fed, state, cohort)
    assert cohort.log.bytes_up == 4 * shared * 8


def test_a_personal_rank_leaves_something_to_share() -> None:
    s = assembled_with("dual-lora", personal_rank=RANK)
    with pytest.raises(UserError, match="--personal-rank 3 leaves nothing to share"):
        s.settings.options.check(s.settings.config)


def test_a_single_component_has_no_half() -> None:
    s = assembled_with("dual-lora", lora=1)
    for change, refused in (
        ({}, True),
        ({"lora": 2}, False),
        ({"resume": Path("run")}, False),
    ):
        config = s.settings.config.model_copy(update=change)
        said = pytest.raises(UserError, match="--lora 1 has no half to stay with each")
        with said if refused else nullcontext():
            s.settings.options.check(config)
    shared = assembled_with("dual-lora", lora=1, personal_rank=0)
    shared.settings.options.check(shared.settings.config)


def test_fedex_lora_is_the_exact_mean_of_products() -> None:
    """Frozen weights and adapters together are the mean of the clients' own."""
    s = assembled_with("fedex-lora")
    fed = s.federation
    before = fed.initial_row()
    moved = 0.0
    for round, state in rounds(s, 3):
        trained = [alone(s, before, client, round) for client in range(4)]
        for layer in ("fc1", "head"):
            mean = sum(
                p * effective(s, row, layer=layer)
                for p, row in zip(shared_by(s), trained, strict=True)
            )
            found = effective(s, state.w, layer=layer)
            torch.testing.assert_close(found, mean, rtol=1e-10, atol=1e-12)
        name = "fc1.base.weight"
        base = fed.layout.views(state.w[None])[name]
        moved = float((base - fed.layout.views(before[None])[name]).abs().max())
        before = state.w
    assert moved > 1e-6, "there is nothing beyond the product of the means"
    # Clients send adapters alone.
    cohort = fed.sample(3)
    s.method.round(fed, state, cohort)
    sent = sum(a.stop - a.start + b.stop - b.start for a, b in adapters(fed.layout))
    assert cohort.log.bytes_up == 4 * sent * 8
    assert cohort.log.bytes_down == 4 * fed.layout.num_columns * 8


def test_fedex_lora_changes_weights_that_are_stored_transposed(
    tmp_path: Path,
) -> None:
    """GPT-2 stores [inputs, outputs]; one of its layers is square."""
    transformers = pytest.importorskip(
        "transformers", reason="pip install 'hpcfed[hf]'"
    )
    transformers.utils.logging.disable_progress_bar()
    config = transformers.GPT2Config(
        vocab_size=30, bos_token_id=0, eos_token_id=0, n_embd=8, n_layer=1, n_head=2,
        n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "base")
    (tmp_path / "texts").mkdir()
    for number in range(3):
        text = f"client {number} says {number} times. " * (4 + number)
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    values = {
        "model": f"hf:{tmp_path / 'base'}", "dataset": f"text:{tmp_path / 'texts'}",
        "text_length": 12, "clients": 3, "batch_size": 8,
    }  # fmt: skip
    s = assembled_with("fedex-lora", **values, lora_layers="*.attn.*")
    fed = s.federation

    def weights(row: Tensor) -> list[Tensor]:
        network = client_network(s.settings.config, double=True)
        views = fed.layout.views(row[None])
        network.load_state_dict({n: v[0] for n, v in views.items()}, strict=False)
        found = [m.weight for m in network.modules() if isinstance(m, LoraLinear)]
        return [weight.detach() for weight in found]

    before = fed.initial_row()
    for round, state in rounds(s, 2):
        trained = [weights(alone(s, before, client, round)) for client in range(3)]
        for number, found in enumerate(weights(state.w)):
            mean = sum(
                p * own[number] for p, own in zip(shared_by(s), trained, strict=True)
            )
            torch.testing.assert_close(found, mean, rtol=1e-10, atol=1e-12)
        before = state.w
    assert [tuple(weight.shape) for weight in weights(before)] == [(8, 24), (8, 8)]
    s = assembled_with("fedex-lora", **values)
    with pytest.raises(UserError, match=r"would change lm_head.base.weight, which is"):
        s.method.init(s.federation)


def test_flexlora_is_the_nearest_of_its_rank_to_the_mean_of_products() -> None:
    s = assembled_with("flexlora")
    fed = s.federation
    before = fed.initial_row()
    for round, state in rounds(s, 2):
        trained = [alone(s, before, client, round) for client in range(4)]
        for layer in ("fc1", "head"):
            mean = sum(
                p * effective(s, row, layer=layer)
                for p, row in zip(shared_by(s), trained, strict=True)
            )
            u, sizes, vt = np.linalg.svd(mean.numpy(), full_matrices=False)
            expected = (u[:, :RANK] * sizes[:RANK]) @ vt[:RANK]
            found = effective(s, state.w, layer=layer).numpy()
            np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-11)
            assert round == 0 or sizes[RANK] > 1e-6 * sizes[0], "nothing is cut off"
        before = state.w


def test_a_rank_above_the_layers_sizes_is_exact() -> None:
    matrix = torch.randn(5, 2, dtype=torch.float64)
    known = torch.randn(4, 2, dtype=torch.float64)
    a, b = nearest(matrix, known)
    assert a.shape == (4, 2) and b.shape == (5, 4)
    torch.testing.assert_close(b @ a, matrix, rtol=1e-12, atol=1e-12)
    assert torch.equal(a[2:], known[2:]) and not b[:, 2:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_components_that_the_mean_lacks_do_not_follow_rounding(
    dtype: torch.dtype,
) -> None:
    """Two sums of the same products in another order differ by rounding; so must what
    clients train from.
    """
    generator = torch.Generator().manual_seed(0)
    known = torch.randn(6, 30, generator=generator, dtype=dtype)
    columns = torch.randn(3, 40, 1, generator=generator, dtype=dtype)
    products = columns @ torch.randn(3, 1, 30, generator=generator, dtype=dtype)
    (a, b), (other_a, other_b) = (
        nearest(products[order].sum(0), known) for order in ([0, 1, 2], [2, 1, 0])
    )
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(a, other_a, rtol=0, atol=1000 * eps)
    torch.testing.assert_close(b, other_b, rtol=0, atol=10_000 * eps)
    torch.testing.assert_close(b @ a, products.sum(0), rtol=0, atol=10_000 * eps)
    assert torch.equal(a[3:], known[3:])


RANKS = [1, 3]
"""Ranks of clients 0 and 2, and of clients 1 and 3."""


@pytest.mark.parametrize("way", ["holders", "padded", "norms"])
def test_hetlora_averages_clients_of_different_ranks(way: str) -> None:
    s = assembled_with("hetlora", client_ranks="1,3", rank_mean=way)
    fed = s.federation
    before = fed.initial_row()
    for round, state in rounds(s, 2):
        trained = []
        for client in range(4):
            row = before.clone()
            rank = RANKS[client % 2]
            for layer in ("fc1", "head"):
                tensors = fed.layout.views(row[None])
                tensors[f"{layer}.down.weight"][0, rank:] = 0
                tensors[f"{layer}.up.weight"][0, :, rank:] = 0
            trained.append(alone(s, row, client, round))
        weights = shared_by(s).copy()
        if way == "norms":
            for client, row in enumerate(trained):
                squares = 0.0
                for layer in ("fc1", "head"):
                    product = RANK / ALPHA * effective(s, row, layer=layer)
                    squares += float(product.square().sum())
                weights[client] *= squares**0.5
            weights /= weights.sum()
        found = fed.layout.views(state.w[None])
        every = [fed.layout.views(row[None]) for row in trained]
        for layer in ("fc1", "head"):
            for component in range(RANK):
                has = [component < RANKS[client % 2] for client in range(4)]
                counted = has if way == "holders" else [True] * 4
                total = sum(w for w, c in zip(weights, counted, strict=True) if c)
                for name, at in (
                    ("down", (component,)),
                    ("up", (slice(None), component)),
                ):
                    mean = sum(
                        w / total * one[f"{layer}.{name}.weight"][0][at]
                        for w, c, one in zip(weights, counted, every, strict=True)
                        if c
                    )
                    torch.testing.assert_close(
                        found[f"{layer}.{name}.weight"][0][at], mean,
                        rtol=1e-10, atol=1e-12,
                    )  # fmt: skip
        before = state.w
    # Each is judged with its own components, and sends these alone.
    rows = s.method.personal(fed, state, np.arange(4))
    ups = fed.layout.views(rows)["fc1.up.weight"]
    assert (ups[0, :, 1:] == 0).all() and (ups[1, :, 2] != 0).any()
    cohort = fed.sample(2)
    s.method.round(fed, state, cohort)
    each = 64 + 64 + 64 + 10
    assert int(cohort.log.bytes_up_here) == sum(2 * rank * each * 8 for rank in RANKS)


@pytest.mark.parametrize("method", ["hetlora", "flexlora"])
def test_a_client_is_sent_the_components_of_its_rank(method: str) -> None:
    """Two clients of rank 1 and two of rank 3; a component has 64 + 64 numbers in one
    layer, and 64 + 10 in the other, of 8 bytes each.
    """
    s = assembled_with(method, client_ranks="1,3", devices="lognormal")
    fed = s.federation
    state = s.method.init(fed)
    cohort = fed.sample(0)
    s.method.round(fed, state, cohort)
    each = 202 * 8
    assert cohort.log.bytes_down == 2 * 1 * each + 2 * 3 * each
    assert int(cohort.log.bytes_up_here) == 2 * 1 * each + 2 * 3 * each
    clock = cohort.in_flight.clock
    assert clock is not None
    assert clock._dense.tolist() == clock.sent.tolist() == [each, 3 * each] * 2
    newcomers = fed.everyone(1)
    s.method.welcome(fed, state, newcomers)
    assert newcomers.log.bytes_down == 8 * each


def test_a_packed_row_is_sent_where_it_is_smaller_than_the_clients_part() -> None:
    s = assembled_with("hetlora", client_ranks="1,3", compress_down="topk", keep=0.5)
    fed, first, second = s.federation, 202 * 8, 303 * 8 + 76
    sent = []
    state = s.method.init(fed)
    for round in range(2):
        cohort = fed.sample(round)
        state = s.method.round(fed, state, cohort)
        sent.append(cohort.log.bytes_down)
    # At first all is sent unpacked. Then half of the 606 columns, and a bit for each of
    # all columns, are more than rank 1 has, and less than rank 3 has.
    assert sent == [8 * first, 2 * first + 2 * second]


def test_flexlora_of_equal_ranks_equals_different_ones_that_are_all_the_largest() -> (
    None
):
    *_, (_, one) = rounds(assembled_with("flexlora"), 2)
    *_, (_, other) = rounds(assembled_with("flexlora", client_ranks="3,3"), 2)
    assert torch.equal(one.w, other.w)


@pytest.mark.parametrize("ranks", ["0,3", "1,4", "two"])
def test_ranks_that_make_no_sense_are_refused(ranks: str) -> None:
    s = assembled_with("flexlora")
    changed = s.settings.options.model_copy(update={"client_ranks": ranks})
    with pytest.raises(UserError, match=f"--client-ranks {ranks}: give whole numbers"):
        changed.check(s.settings.config)


def test_without_adapters_there_is_nothing_to_do() -> None:
    """Unless the user forbids adapters, such a method takes some."""
    assert assembled(method="ffa-lora").settings.config.lora == 8
    s = assembled(method="ffa-lora", lora=0)
    with pytest.raises(UserError, match=r"has no adapters, .* add --lora 8"):
        s.settings.options.check_layout(s.federation.layout, "mlp")
