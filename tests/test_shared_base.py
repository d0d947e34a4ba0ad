"""Clients that share a frozen network, and train adapters of their own: one pass for all
of them, on a GPU in bfloat16.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hpcfed.clients import engine as engines
from hpcfed.clients import network as networks
from hpcfed.clients.engine import Engine
from hpcfed.clients.evaluation import BASE_FLOATS, samples_in_flight
from hpcfed.clients.job import Recipe, TrainingJob
from hpcfed.data.shards import Shard
from hpcfed.kernels import linear
from hpcfed.kernels.adapted import AdapterMemory, Parts, adapted
from hpcfed.kernels.feed_forward import feed_forward
from hpcfed.kernels.gated import gated
from hpcfed.kernels.residual import FrozenNorm, normalised
from hpcfed.kernels.rotary import rotated
from hpcfed.kernels.tokens import next_token
from hpcfed.models import quick as quick_modules
from hpcfed.models.choice import choose
from hpcfed.models.cost import Cost, cost
from hpcfed.models.hugging_face import without_looks
from hpcfed.models.layout import Layout
from hpcfed.models.lora import LoraLinear, add_adapters
from hpcfed.models.own import Sample
from hpcfed.models.plain import PlainNetwork
from hpcfed.models.stack import StackedNetwork
from hpcfed.models.stacked_layers import StackedLora
from hpcfed.models.trial import UNEVEN, nudged, outcome, tolerance, trial_clients
from tests.runs import started

gpu = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]
VOCABULARY, LENGTH, CLIENTS = 97, 16, 3
ROUNDED = 2.0**-8
"""How much rounding to bfloat16 changes a number at most, beside its size; half as much,
in fact.
"""
# A processor without products in bfloat16 says so.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


def relative(found: Tensor, expected: Tensor) -> float:
    error = found.detach().double().cpu() - expected.detach().double().cpu()
    return float(error.norm() / expected.detach().double().norm())


def random(*shape: int, seed: int = 0, device: str = "cpu") -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return drawn.double().to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("turned", [False, True])
def test_an_adapted_layer_is_the_sum_of_both(device: str, turned: bool) -> None:
    x = random(3, 5, 6, device=device).requires_grad_()
    weight, bias = random(4, 6, seed=1, device=device), random(4, device=device)
    if turned:
        weight = weight.mT.contiguous().mT
    down = random(3, 2, 6, seed=2, device=device).requires_grad_()
    up = random(3, 4, 2, seed=3, device=device).requires_grad_()
    found = adapted(x, weight, bias, down, up, 0.7)
    expected = []
    for client in range(3):
        dense = weight + 0.7 * up[client] @ down[client]
        expected.append(x[client] @ dense.T + bias)
    torch.testing.assert_close(found, torch.stack(expected))
    by = random(3, 5, 4, seed=4, device=device)
    leaves = (x, down, up)
    ours = torch.autograd.grad(found, leaves, by)
    theirs = torch.autograd.grad(torch.stack(expected), leaves, by)
    torch.testing.assert_close(ours, theirs)


def test_an_adapted_layer_leaves_out_what_nobody_asks_for() -> None:
    x, weight = random(2, 3, 4), random(5, 4, seed=1)
    down, up = random(2, 1, 4, seed=2), random(2, 5, 1, seed=3).requires_grad_()
    y = adapted(x, weight, None, down, up, 2.0)
    (found,) = torch.autograd.grad(y.sum(), up)
    expected = 2 * (x @ down.mT).sum(1, keepdim=True).expand(2, 5, 1)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("autocast", [False, True])
def test_in_bfloat16_gradients_of_adapters_are_float32(
    device: str, autocast: bool
) -> None:
    x = random(4, 64, 32, device=device).bfloat16().requires_grad_()
    weight = random(24, 32, seed=1, device=device).bfloat16()
    down = random(4, 8, 32, seed=2, device=device).float().requires_grad_()
    up = random(4, 24, 8, seed=3, device=device).float().requires_grad_()
    by = random(4, 64, 24, seed=4, device=device).bfloat16()
    # Under autocast weights come in float32.
    given = weight.float() if autocast else weight
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        z = adapted(x, given, None, down, up, 0.5)
    found = torch.autograd.grad(z, (x, down, up), by)
    assert [each.dtype for each in found] == [torch.bfloat16] + [torch.float32] * 2
    exact = [each.detach().double().requires_grad_() for each in (x, down, up)]
    y = adapted(exact[0], weight.double(), None, exact[1], exact[2], 0.5)
    expected = torch.autograd.grad(y, exact, by.double())
    # Each is a product of at most three rounded factors, and is rounded itself.
    for ours, theirs in zip(found, expected, strict=True):
        assert relative(ours, theirs) < 2 * ROUNDED


def in_a_row(tensor: Tensor) -> Tensor:
    """Return the same tensor of every client, as a part of a longer row."""
    rows = tensor.new_zeros(len(tensor), tensor[0].numel() + 16)
    part = rows[:, 8:-8].unflatten(1, tensor.shape[1:])
    return part.copy_(tensor)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("samples", "width", "rank"), [(64, 32, 8), (131, 264, 5), (50, 520, 32)]
)
def test_two_layers_with_gelu_between(
    device: str, samples: int, width: int, rank: int
) -> None:
    x = random(3, samples, 32, device=device).bfloat16().requires_grad_()
    by = random(3, samples, 32, seed=1, device=device).bfloat16()
    leaves, exact, parts, exact_parts, sinks = [x], [x], [], [], []
    for seed, (inputs, outputs) in enumerate([(32, width), (width, 32)]):
        # So that results of a layer are about as large as what goes in.
        weight = random(outputs, inputs, seed=2 + seed, device=device) / inputs**0.5
        bias = random(outputs, seed=4 + seed, device=device).bfloat16()
        factors = []
        for shape in ((3, rank, inputs), (3, outputs, rank)):
            factor = random(*shape, seed=6 + seed, device=device) / shape[2] ** 0.5
            factors.append(in_a_row(factor.bfloat16().float()).requires_grad_())
        halves = [in_a_row(each.detach().bfloat16()) for each in factors]
        sinks += [in_a_row(torch.zeros_like(each)) for each in factors]
        memory = AdapterMemory((halves[0], halves[1]), (sinks[-2], sinks[-1]))
        weight = weight.bfloat16()
        parts.append(Parts(weight, bias, factors[0], factors[1], 0.5, memory))
        leaves += factors
        exact_factors = [f.detach().double().requires_grad_() for f in factors]
        exact_parts.append(
            Parts(weight.double(), bias.double(), *exact_factors, scale=0.5)
        )
        exact += exact_factors
    exact[0] = x.detach().double().requires_grad_()
    y = feed_forward(x, *parts)
    found = (y, *torch.autograd.grad(y, leaves, by))
    z = feed_forward(exact[0], *exact_parts)
    expected = (z, *torch.autograd.grad(z, exact, by.double()))
    # A chain of at most eight tensors is rounded, each by half of this.
    for ours, theirs in zip(found, expected, strict=True):
        assert relative(ours, theirs) < 4 * ROUNDED
    for gradient, sink in zip(found[2:], sinks, strict=True):
        assert gradient.data_ptr() == sink.data_ptr()


def language_model(kind: str, vocabulary: int = VOCABULARY) -> nn.Module:
    """A small one with adapters that change something."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    common: dict[str, Any] = {"vocab_size": vocabulary, "use_cache": False}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    if kind == "gpt2":
        nothing = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = transformers.GPT2Config(
            n_positions=LENGTH,
            n_embd=64,
            n_layer=2,
            n_head=4,
            **nothing,
            **ends,
            **common,
        )
        network = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            **ends,
            **common,
        )
        network = transformers.LlamaForCausalLM(config)
    add_adapters(network, rank=8, alpha=16)
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, LoraLinear):
                module.up.weight.normal_(std=0.05)
    return without_looks(network)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_frozen_network_in_bfloat16_is_that_of_float64_up_to_rounding(
    kind: str, device: str
) -> None:
    network = language_model(kind)
    layout = Layout.of(network)
    row = layout.row(network, dtype=torch.float64)
    rows = torch.stack([row, 1.1 * row, 0.9 * row]).to(device)
    tokens = torch.randint(0, VOCABULARY, (CLIENTS * 4, LENGTH)).to(device)
    by = random(CLIENTS * 4, LENGTH, VOCABULARY, device=device)
    found = []
    for bf16 in (False, True):
        forward = StackedNetwork(network, layout, bf16=bf16)
        assert forward.over_halves == bf16
        mine = rows.float() if bf16 else rows
        tensors = {}
        for name, view in layout.views(mine).items():
            tensors[name] = view.detach().requires_grad_()
        y = forward(tensors, tokens, training=True)
        # Further tokens, up to a multiple of eight, are impossible.
        assert (y[..., VOCABULARY:] < -9000).all() and y.shape[-1] == (
            104 if bf16 else 97
        )
        y = y[..., :VOCABULARY]
        assert y.dtype == (torch.bfloat16 if bf16 else torch.float64)
        gradients = torch.autograd.grad((y * by.to(y.dtype)).sum(), [*tensors.values()])
        flat = torch.cat([each.flatten().double() for each in gradients])
        assert all(each.dtype == mine.dtype for each in gradients)
        with torch.no_grad():
            judged = forward(tensors, tokens)[..., :VOCABULARY]
        assert judged.dtype == mine.dtype, "evaluation sums in the rows' type"
        found.append((y, flat, judged))
    # Some thirty roundings follow each other, and their errors are independent.
    for exact, rounded in zip(*found, strict=True):
        assert relative(rounded, exact) < 6 * ROUNDED


def test_angles_of_positions_keep_their_digits() -> None:
    network = language_model("llama")
    layout = Layout.of(network)
    forward = StackedNetwork(network, layout, bf16=True)
    row = layout.row(network)
    forward(layout.views(row[None]), torch.zeros(1, LENGTH, dtype=torch.int64))
    rotary = forward._network.model.rotary_emb
    assert rotary.inv_freq.dtype == torch.float32
    frozen = forward._network.model.embed_tokens.weight
    assert frozen.dtype == torch.bfloat16
    adapters = [m for m in forward._network.modules() if isinstance(m, StackedLora)]
    assert len(adapters) == 15, "seven in each of two blocks, and the head"


def test_a_network_without_a_frozen_part_stays_in_its_type() -> None:
    network = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    assert not StackedNetwork(network, bf16=True).over_halves


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("vocabulary", "length"),
    # A GPU works on some tokens at once; the last two cases have more of them.
    [(1001, 4), (50_264, 4), (60_000, 4), (1008, 1200), (50_264, 60)],
)
def test_the_loss_of_logits_in_bfloat16(
    device: str, vocabulary: int, length: int
) -> None:
    logits = random(6, length, vocabulary, device=device).bfloat16()
    targets = (torch.arange(6 * length, device=device) * 40 % vocabulary).view(6, -1)
    targets[0] = targets[3, ::3] = -100
    found = []
    for given in (logits, logits.float()):
        leaf = given.clone().requires_grad_()
        total = torch.zeros(3, device=device)
        seen = torch.zeros(3, dtype=torch.int64, device=device)
        loss = next_token(leaf, targets, total, seen)
        (gradient,) = torch.autograd.grad(loss, leaf)
        found.append((gradient, total, seen))
    (ours, our_total, our_seen), (theirs, total, seen) = found
    assert ours.dtype == torch.bfloat16
    # Only the gradient is rounded, at times to the neighbour: that is up to 2⁻⁷ away.
    torch.testing.assert_close(ours, theirs.bfloat16(), rtol=2 * ROUNDED, atol=0)
    torch.testing.assert_close(our_total, total)
    assert torch.equal(our_seen, seen)


@pytest.mark.parametrize("device", DEVICES)
def test_gated_layers(device: str) -> None:
    gate = (4 * random(5, 48, device=device)).bfloat16().requires_grad_()
    up = random(5, 48, seed=1, device=device).bfloat16().requires_grad_()
    by = random(5, 48, seed=2, device=device).bfloat16()
    y = gated(gate, up)
    ours = (y, *torch.autograd.grad(y, (gate, up), by))
    exact = [each.detach().double().requires_grad_() for each in (gate, up)]
    z = F.silu(exact[0]) * exact[1]
    theirs = (z, *torch.autograd.grad(z, exact, by.double()))
    for found, expected in zip(ours, theirs, strict=True):
        # torch's own rounds in between.
        assert relative(found, expected) < ROUNDED


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("width", [40, 768, 2304, 4096])
@pytest.mark.parametrize("added", [False, True])
def test_a_norm_with_the_sum_before_it(
    device: str, rms: bool, width: int, added: bool
) -> None:
    halves = {"device": device, "dtype": torch.bfloat16}
    branch = random(2, 3, width).to(**halves).requires_grad_()
    residual = (3 * random(2, 3, width, seed=1) + 1).to(**halves).requires_grad_()
    weight = (1 + random(width, seed=2) / 4).to(**halves)
    bias = None if rms else random(width, seed=3).to(**halves)
    norm = FrozenNorm(weight, bias, 1e-5, rms=rms)
    total, y = normalised(norm, branch, residual if added else None)
    d_total = random(2, 3, width, seed=4).to(**halves)
    dy = random(2, 3, width, seed=5).to(**halves)
    leaves = (branch, residual) if added else (branch,)
    found = torch.autograd.grad((total, y), leaves, (d_total, dy))

    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    summed = sum(exact[1:], start=exact[0])
    # The norm is that of the sum as it is returned: a small difference of large rounded
    # numbers would hide mistakes, or seem to be one.
    rounded = total.detach().double().requires_grad_()
    plain = FrozenNorm(
        weight.double(), None if bias is None else bias.double(), 1e-5, rms=rms
    )
    expected = plain.plainly(rounded)
    (through,) = torch.autograd.grad(expected, rounded, dy.double())
    assert relative(total, summed) < ROUNDED
    assert relative(y, expected) < 2 * ROUNDED
    for gradient in found:
        assert relative(gradient, through + d_total.double()) < 2 * ROUNDED


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("texts", [1, 3])
def test_rotated_queries_and_keys(device: str, texts: int) -> None:
    halves = {"device": device, "dtype": torch.bfloat16}
    # Two heads of keys, four of queries, as layers leave them: by position.
    query = random(3, 5, 4, 32).to(**halves).transpose(1, 2).requires_grad_()
    key = random(3, 5, 2, 32, seed=1).to(**halves).transpose(1, 2).requires_grad_()
    cosines, sines = random(2, texts, 5, 32, seed=2).to(**halves)
    found = rotated(query, key, cosines, sines)
    by = [random(*y.shape, seed=3).to(**halves) for y in found]
    gradients = torch.autograd.grad(found, (query, key), by)
    for x, y, dy, dx in zip((query, key), found, by, gradients, strict=True):
        exact = x.detach().double().requires_grad_()
        first, second = exact[..., :16], exact[..., 16:]
        turned = torch.cat([-second, first], -1)
        rotation = exact * cosines.double()[:, None] + turned * sines.double()[:, None]
        assert relative(y, rotation) < 2 * ROUNDED
        (expected,) = torch.autograd.grad(rotation, exact, dy.double())
        assert relative(dx, expected) < 2 * ROUNDED


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_blocks_of_transformers_call_the_faster_functions(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    for name in ("normalised", "rotated"):
        ours = getattr(quick_modules, name)

        def counted(*given: Any, name: str = name, ours: Any = ours) -> Any:
            calls.append(name)
            return ours(*given)

        monkeypatch.setattr(quick_modules, name, counted)
    network = language_model(kind)
    depth = network.config.num_hidden_layers
    quick_modules.quick(network)(torch.zeros(1, 4, dtype=torch.int64))
    assert calls.count("normalised") == 2 * depth + 1
    assert calls.count("rotated") == (depth if kind == "llama" else 0)


@pytest.mark.parametrize("kind", ["GPTNeoX", "Olmo"])
def test_other_rotations_stay_those_of_their_networks(kind: str) -> None:
    """One rotates a quarter of a head, one takes its angles in float32."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    network = getattr(transformers, f"{kind}ForCausalLM")(config).bfloat16().eval()
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH)
    expected = network(tokens).logits
    found = quick_modules.quick(network)(tokens).logits[..., :VOCABULARY]
    assert relative(found, expected) < 2 * ROUNDED


class Looks(TorchDispatchMode):
    """Counts numbers that the host reads, for which it waits on a GPU."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_language_model_never_looks_at_its_numbers(kind: str) -> None:
    network = language_model(kind)
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH)
    with Looks() as looks:
        found = network(tokens).logits
    assert looks.count == 0
    # The function that looks is there again for others, and finds one text in a row.
    plain = type(network)(network.config)
    add_adapters(plain, rank=8, alpha=16)
    plain.load_state_dict(network.state_dict())
    with Looks() as looks:
        expected = plain(tokens).logits
    assert looks.count > 0
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_captured_step_has_the_attention_of_a_plain_one(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a mask that is only causal other kernels would serve, which round otherwise.
    Some versions of transformers make one when they learn of a capture.
    """
    from transformers import masking_utils

    asked = []
    attention = F.scaled_dot_product_attention

    def noted(*tensors: Tensor, **options: Any) -> Tensor:
        masked = options.get("attn_mask") is not None
        asked.append((masked, options.get("is_causal"), masking_utils.is_tracing()))
        return attention(*tensors, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    capturing = "transformers.utils.import_utils.is_cuda_stream_capturing"
    monkeypatch.setattr(capturing, lambda: True)
    network = language_model(kind)
    network(torch.arange(2 * LENGTH).view(2, LENGTH))
    assert asked and set(asked) == {(False, True, False)}
    assert masking_utils.is_tracing(), "others are told of a capture"


@gpu
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_steps_of_a_language_model_are_captured(kind: str) -> None:
    network = language_model(kind)
    sample = Sample((LENGTH,), (LENGTH, VOCABULARY), VOCABULARY)
    device = torch.device("cuda")
    layout = Layout.of(network)
    way = choose(network, layout, sample, mode="auto", bf16=True, device=device)
    assert way.mode == "batched"
    assert way.forward.over_halves
    assert way.forward.captures


def shard_of(tokens: Tensor) -> Shard:
    samples = len(tokens) // CLIENTS
    return Shard(
        inputs=tokens,
        targets=tokens.roll(-1, 1),
        index=torch.arange(len(tokens), device=tokens.device).view(CLIENTS, samples),
        sizes=(samples,) * CLIENTS,
        clients=np.arange(CLIENTS),
        task="next-token",
    )


def engine_of(network: nn.Module, device: str, *, bf16: bool) -> Engine:
    sample = Sample((LENGTH,), (LENGTH, VOCABULARY), VOCABULARY)
    return Engine(
        network,
        Layout.of(network),
        shape=(LENGTH,),
        bf16=bf16,
        trial=sample,
        device=torch.device(device),
    )


def test_an_evaluation_has_room_for_logits() -> None:
    """GPT-2's body of 388,000 floats a token, and 50,257 logits of each of 256 tokens."""
    gpt2 = Cost(training=0, activations=256 * 388_000, outputs=256 * 50_257)
    shard = shard_of(torch.zeros(CLIENTS * 2, LENGTH, dtype=torch.int64))
    # 256 · (388,000 / 16 + 2 · 50,257) = 31,939,584 floats; 2³⁰ hold 33 such samples.
    assert samples_in_flight(shard, gpt2, over_halves=True) == 33
    # In float32 a sample's activations in training: 99,328,000 of 2²⁸.
    assert samples_in_flight(shard, gpt2) == 2
    sample = Sample((LENGTH,), (LENGTH, VOCABULARY), VOCABULARY)
    assert cost(language_model("gpt2"), sample).outputs == LENGTH * VOCABULARY


@gpu
def test_an_evaluation_over_a_large_vocabulary_takes_the_memory_it_may() -> None:
    network = language_model("gpt2", vocabulary=50_257)
    tokens = torch.randint(0, VOCABULARY, (CLIENTS * 300, LENGTH)).cuda()
    engine = engine_of(network, "cuda", bf16=True)
    rows = Layout.of(network).row(network).cuda().repeat(CLIENTS, 1)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    engine.evaluate(rows, shard_of(tokens), np.arange(CLIENTS))
    # 900 samples are more than fit at once. A quarter more for a step's shape, which
    # is rounded up, and for all that is not counted.
    most = 1.25 * 4 * BASE_FLOATS
    assert 0.4 * most < torch.cuda.max_memory_allocated() - before < most


def test_clients_share_a_frozen_network_however_large_their_adapters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engines, "LOOP_ABOVE_COLUMNS", 100)
    network = language_model("gpt2")
    assert engine_of(network, "cpu", bf16=False).mode == "batched"
    network.requires_grad_(True)
    assert engine_of(network, "cpu", bf16=False).mode == "loop"


def test_a_way_may_differ_by_what_the_network_itself_rounds() -> None:
    exact = random(3, 4), random(2, 5), random(2, 0)
    assert tolerance(exact, exact) == 1e-8
    largest = exact[1].abs().max()
    others = exact[0], exact[1] + 2e-7 * largest, exact[2]
    assert tolerance(exact, others) == pytest.approx(3 * 2e-7)
    wild = exact[0], 2 * exact[1], exact[2]
    assert tolerance(exact, wild) == 1e-4
    single = tuple(each.float() for each in exact)
    assert tolerance(single, single) == 1e-2


def test_a_norm_in_float32_widens_the_tolerance() -> None:
    """The trial is in float64, but Llama's norms round to float32."""
    found = []
    for kind in ("gpt2", "llama"):
        network = language_model(kind)
        layout = Layout.of(network)
        sample = Sample((LENGTH,), (LENGTH, VOCABULARY), VOCABULARY)
        cpu = torch.device("cpu")
        trial = trial_clients(network, layout, sample, cpu, torch.float64)
        plain = PlainNetwork(network, layout, draws=False)
        outcomes = []
        for clients in (trial, nudged(trial)):
            outcomes.append(outcome(plain, clients, layout, UNEVEN, alone=True))
        found.append(tolerance(*outcomes))
    assert found[0] == 1e-8 < found[1] < 1e-5


@gpu
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_training_in_bfloat16_moves_adapters_as_in_float32(kind: str) -> None:
    network = language_model(kind)
    generator = torch.Generator().manual_seed(9)
    shape = (CLIENTS * 8, LENGTH)
    tokens = torch.randint(0, VOCABULARY, shape, generator=generator).cuda()
    shard = shard_of(tokens)
    row = Layout.of(network).row(network).cuda()
    moved, scores = [], []
    for bf16 in (False, True):
        engine = engine_of(network, "cuda", bf16=bf16)
        assert engine.bf16 == bf16 and engine.mode == "batched"
        job = TrainingJob(
            rows=row.expand(CLIENTS, -1),
            shard=shard,
            clients=np.arange(CLIENTS),
            keys=torch.arange(CLIENTS, device="cuda"),
            recipe=Recipe(epochs=3, batch_size=4, lr=0.05),
        )
        engine.train(job)
        # Again: now steps are captured.
        trained, _ = engine.train(job)
        moved.append(trained - row)
        scores.append(engine.evaluate(trained, shard, np.arange(CLIENTS)).sums["loss"])
    assert relative(moved[1], moved[0]) < 0.1
    assert relative(scores[1], scores[0]) < ROUNDED


def test_a_run_builds_its_network_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried before the run, and the next run builds another."""
    built = []
    real = networks.build

    def counted(*arguments: Any, **keywords: Any) -> nn.Module:
        built.append(arguments)
        return real(*arguments, **keywords)

    monkeypatch.setattr(networks, "build", counted)
    common = (
        "--model",
        "tests/own/networks.py:Counting",
        "--clients",
        2,
        "--rounds",
        1,
    )
    for number in (1, 2):
        started(*common, "--out", tmp_path / str(number))
        assert len(built) == number
    assert not networks._tried


def adapted_layers(width: int) -> nn.Module:
    network = nn.Sequential(
        nn.Linear(width, 16), nn.Linear(16, width), nn.Linear(width, 8)
    )
    add_adapters(network, rank=2, alpha=4.0, layers="0,1", train="2")
    return network


def test_factors_of_adapters_never_update_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their layers are not called, so nobody would; a layer trained as a whole may."""
    monkeypatch.setattr(linear, "updates_itself", lambda weight, slots: True)
    network = adapted_layers(32)
    layout = Layout.of(network)
    tensors = layout.views(layout.row(network).expand(2, -1))
    assert StackedNetwork(network, layout).updating(tensors, 4) == ["2.weight"]
    halves = StackedNetwork(network, layout, bf16=True)
    assert halves.over_halves and not halves.updating(tensors, 4)


@pytest.mark.parametrize("bf16", [False, True])
def test_a_layer_that_is_trained_as_a_whole_gets_its_gradient(bf16: bool) -> None:
    """With sinks, as the engine gives them."""
    network = adapted_layers(32)
    layout = Layout.of(network)
    rows = layout.row(network).expand(2, -1).clone()
    rows[1] *= 1.1
    x = random(6, 32).float()
    found = []
    for forward in (StackedNetwork(network, layout, bf16=bf16), None):
        tensors, sinks = {}, {}
        for name, view in layout.views(rows).items():
            tensors[name] = view.detach().requires_grad_()
            sinks[name] = torch.zeros_like(view)
        if forward is None:
            y = StackedNetwork(network, layout)(tensors, x, training=True)
        else:
            y = forward(tensors, x, training=True, sinks=sinks)
        gradients = torch.autograd.grad(y.square().sum(), [*tensors.values()])
        found.append(torch.cat([each.flatten().double() for each in gradients]))
    assert relative(found[0], found[1]) < (6 * ROUNDED if bf16 else 1e-6)


class LooksUp(nn.Module):
    """Takes an input for the number of a row, which bfloat16 would round."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.randn(2000, 64, generator=torch.Generator().manual_seed(1))
        self.table = nn.Parameter(table, requires_grad=False)
        self.last = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = (1000 + 900 * x[:, 0].tanh()).long()
        y: Tensor = self.last(self.table[rows])
        return y


def test_bfloat16_is_left_out_where_it_changes_more_than_digits() -> None:
    cpu = torch.device("cpu")
    common: dict[str, Any] = {"mode": "auto", "bf16": True, "device": cpu}
    network: nn.Module = LooksUp()
    way = choose(network, Layout.of(network), Sample((4,), (3,)), **common)
    assert way.mode == "batched" and not way.forward.over_halves
    network = language_model("gpt2")
    sample = Sample((LENGTH,), (LENGTH, VOCABULARY), VOCABULARY)
    assert choose(network, Layout.of(network), sample, **common).forward.over_halves
