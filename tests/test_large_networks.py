"""What large networks train with, one client at a time: fused batch norms, steps in one
pass over rows, weights in bfloat16.
"""

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight

from hpcfed.clients.engine import Engine
from hpcfed.clients.fisher import Fisher
from hpcfed.clients.job import Recipe, TrainingJob
from hpcfed.clients.pull import Pull
from hpcfed.data.shards import Shard
from hpcfed.kernels import cuda, one_pass, squares
from hpcfed.kernels.batch_norm import Norm, batch_norm, batch_norm_macros, serves
from hpcfed.kernels.one_pass import Terms, one_pass_macros
from hpcfed.kernels.pull import CHUNK, Spans, Strengths, add_pull
from hpcfed.kernels.sgd import Rule, descend
from hpcfed.models.layout import Layout
from hpcfed.models.networks import build
from hpcfed.models.stack import StackedNetwork
from hpcfed.models.stacked_layers import StackedBatchNorm2d
from hpcfed.models.stacking import ResidualBlock

TYPES = [torch.float32, torch.bfloat16]
gpu = pytest.mark.gpu


def relative(found: Tensor, expected: Tensor) -> float:
    """The error beside the size of what is expected."""
    error = found.detach().double().cpu() - expected.detach().double().cpu()
    return float(error.norm() / expected.detach().double().norm().clamp(min=1e-30))


@gpu
@pytest.mark.own_kernels
@pytest.mark.parametrize(
    ("slope", "with_residual"), [(0.0, False), (0.1, True), (1.0, False)]
)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "shape",
    [
        (64, 64, 32, 32),
        (64, 512, 4, 4),
        (33, 40, 16, 9),
        (5, 24, 7, 9),
        (3, 8, 1, 2),
    ],
)
def test_batch_norm_is_that_of_float64(
    shape: tuple[int, ...], dtype: torch.dtype, slope: float, with_residual: bool
) -> None:
    """Far from zero, too: a sum of squares alone would lose the digits there."""
    torch.manual_seed(0)
    channels = shape[1]
    layout = torch.channels_last
    x = (torch.randn(shape, device="cuda") + 20).to(dtype)
    x = x.contiguous(memory_format=layout).requires_grad_()
    residual = torch.randn(shape, device="cuda").to(dtype)
    residual = residual.contiguous(memory_format=layout).requires_grad_()
    weight = torch.randn(channels, device="cuda", requires_grad=True)
    bias = torch.randn(channels, device="cuda", requires_grad=True)
    running = (torch.zeros(channels).cuda(), torch.ones(channels).cuda())
    sinks = (torch.empty(channels).cuda(), torch.empty(channels).cuda())
    inputs = [x, weight, bias] + [residual] * with_residual
    assert serves(x, residual)
    y = batch_norm(
        x,
        weight,
        bias,
        running,
        Norm(1e-5, 0.1, slope),
        residual=residual if with_residual else None,
        sinks=sinks,
    )
    dy = torch.randn(shape, device="cuda").to(dtype).contiguous(memory_format=layout)
    gradients = torch.autograd.grad(y, inputs, dy)
    assert gradients[1].data_ptr() == sinks[0].data_ptr()

    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    mean, var = torch.zeros(channels).cuda().double(), torch.ones(channels).cuda()
    var = var.double()
    z = F.batch_norm(exact[0], mean, var, exact[1], exact[2], True, 0.1, 1e-5)
    z = z + exact[3] if with_residual else z
    # The side that rounding chose, where it is not clear.
    side = torch.where(y > 0, 1.0, slope).double()
    expected = z * side
    expected_gradients = torch.autograd.grad(expected, exact, dy.double())
    tolerance = 2e-5 if dtype == torch.float32 else 1e-2
    for ours, theirs in zip(
        (y, *gradients), (expected, *expected_gradients), strict=True
    ):
        assert relative(ours, theirs) < tolerance
    assert relative(running[0], mean) < 1e-5 and relative(running[1], var) < 1e-4


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
def test_the_kernels_compile_for_other_devices(
    dtype: torch.dtype, residual: bool
) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="no CUDA compiler beside torch")
    macros = batch_norm_macros(
        Norm(1e-5, 0.1, 0.0), residual=residual, dtype=dtype, width=8, whole=residual
    )
    assert cuda.compiled("batch_norm.cu", macros, "sm_80").startswith(b"\x7fELF")
    strengths = Strengths(whole=0.5, masked=0.05) if residual else None
    bf16 = dtype == torch.bfloat16
    macros = one_pass_macros(Rule(0.9, 1e-4), strengths, halves=bf16, rate_each=bf16)
    assert cuda.compiled("one_pass.cu", macros, "sm_80").startswith(b"\x7fELF")


@gpu
@pytest.mark.own_kernels
@pytest.mark.parametrize(
    "rule", [Rule(), Rule(0.9, 1e-3), Rule(0.9, 1e-3, nesterov=True)]
)
@pytest.mark.parametrize("rate_each", [False, True])
@pytest.mark.parametrize(
    "strengths",
    [
        None,
        Strengths(whole=0.5, masked=0.05),
        Strengths(layers=0.2, squared=0.1),
    ],
)
def test_a_step_in_one_pass_is_that_of_several(
    strengths: Strengths | None, rate_each: bool, rule: Rule
) -> None:
    """Three steps: sums of one are the next one's norms."""
    edges = [0, 12, 12 + CHUNK, 36 + 3 * CHUNK]
    device = torch.device("cuda")
    spans = Spans(list(pairwise(edges)), device)
    torch.manual_seed(0)
    shape = (3, edges[-1])
    rows = torch.randn(shape, device=device)
    expected = rows.clone()
    reference = rows + 0.1 * torch.randn(shape, device=device)
    mask = torch.rand(shape, device=device) < 0.5
    velocity = torch.zeros(shape, device=device) if rule.momentum else None
    expected_velocity = None if velocity is None else velocity.clone()
    halves = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    lr = torch.tensor([0.1, 0.2, 0.3] if rate_each else 0.1, device=device)
    terms = None
    if strengths is not None:
        masked = mask if strengths.masked else None
        sums = torch.full((2, 3, spans.chunks), torch.nan, device=device)
        terms = Terms(strengths, reference, masked, sums[0], sums[1])
        one_pass.measure(rows, terms, spans)
    assert one_pass.serves(rows, spans, rule)
    for _ in range(3):
        gradient = torch.randn(shape, device=device)
        one_pass.descend(
            rows, gradient, velocity, lr, rule, spans, terms=terms, halves=halves
        )
        if terms is not None:
            add_pull(expected, reference, terms.mask, gradient, spans, terms.strengths)
        descend(expected, gradient, expected_velocity, None, lr, rule)
    torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(halves, rows.bfloat16())


def test_torchvisions_blocks_are_fused_and_compute_the_same() -> None:
    network = build("resnet18", shape=(3, 4, 4), classes=3, seed=0).double()
    layout = Layout.of(network)
    stacked = StackedNetwork(network, layout)
    blocks = [m for m in stacked._network.modules() if isinstance(m, ResidualBlock)]
    assert len(blocks) == 8 and type(stacked._network.relu) is nn.Identity
    views = layout.views(layout.row(network, dtype=torch.float64)[None])
    tensors = {name: view.clone().requires_grad_() for name, view in views.items()}
    torch.manual_seed(0)
    images = torch.randn(3, 3, 4, 4, dtype=torch.float64)
    weights = [tensors[name] for name, _ in network.named_parameters()]
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensors[name] = tensor.detach() if "running" in name else tensor
    ours = stacked(tensors, images, training=True)
    theirs = network(images)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    gradients = torch.autograd.grad(ours.square().sum(), weights)
    expected = torch.autograd.grad(theirs.square().sum(), list(network.parameters()))
    for found, plain in zip(gradients, expected, strict=True):
        torch.testing.assert_close(found[0], plain)
    name = "layer4.1.bn2.running_var"
    torch.testing.assert_close(tensors[name][0], network.get_buffer(name))


def test_a_batch_norm_of_many_clients_applies_its_activation() -> None:
    layers = nn.Sequential(nn.BatchNorm2d(2), nn.LeakyReLU(0.1), nn.Conv2d(2, 1, 1))
    network = StackedNetwork(layers.double())
    norm, activation, _ = network._network.children()
    assert isinstance(norm, StackedBatchNorm2d) and norm.slope == 0.1
    assert type(activation) is nn.Identity
    layout = Layout.of(layers)
    rows = layout.row(layers, dtype=torch.float64).repeat(2, 1)
    torch.manual_seed(0)
    images = torch.randn(6, 2, 2, 2, dtype=torch.float64)
    found = network(layout.views(rows), images, training=True)
    expected = [layers(images[:3]), layers(images[3:])]
    torch.testing.assert_close(found, torch.cat(expected))


def shard_of(images: Tensor, labels: Tensor, clients: int) -> Shard:
    each = len(images) // clients
    index = torch.arange(len(images), device=images.device).view(clients, each)
    return Shard(
        inputs=images.contiguous(memory_format=torch.channels_last),
        targets=labels,
        index=index,
        sizes=(each,) * clients,
        clients=np.arange(clients),
    )


@gpu
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("pulled", [False, True])
def test_a_large_network_trains_as_on_the_cpu(
    bf16: bool, pulled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps of two clients, in lanes; steps of the last call are captured ones. In
    bfloat16 it is one step, because the second would turn roundings into differences.
    """
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    network = build("resnet18", shape=(3, 16, 16), classes=10, seed=0)
    layout = Layout.of(network)
    torch.manual_seed(0)
    steps = 1 if bf16 else 2
    images = torch.randn(2 * 16 * steps, 3, 16, 16)
    labels = torch.randint(10, (len(images),))
    rows = layout.row(network).repeat(2, 1)
    mask = torch.rand_like(rows) < 0.5
    recipe = Recipe(1, 16, 0.01, momentum=0.9, weight_decay=1e-3)
    found = {}
    for device in ("cpu", "cuda"):
        pull = None
        if pulled:
            strengths = Strengths(whole=0.5, masked=0.05)
            pull = Pull(strengths, (0.99 * rows).to(device), mask.to(device))
        engine = Engine(
            network,
            layout,
            shape=(3, 16, 16),
            mode="loop",
            bf16=bf16,
            device=torch.device(device),
        )
        job = TrainingJob(
            rows.to(device),
            shard_of(images.to(device), labels.to(device), 2),
            np.arange(2),
            recipe,
            keys=torch.arange(2, device=device),
            pull=pull,
        )
        for _ in range(1 if device == "cpu" else 3):
            trained, losses = engine.train(job)
        found[device] = (trained.cpu() - rows, losses.mean.cpu())
    # float32 beside float64 is at 1e-3 for the rows.
    assert relative(found["cuda"][0], found["cpu"][0]) < (0.2 if bf16 else 5e-3)
    assert relative(found["cuda"][1], found["cpu"][1]) < (2e-2 if bf16 else 1e-4)


CONVOLUTIONS = {
    "stage 1": (nn.Conv2d(64, 64, 3, padding=1), 32),
    "between stages": (nn.Conv2d(64, 128, 3, stride=2, padding=1), 32),
    "around": (nn.Conv2d(64, 128, 1, stride=2), 32),
    "stage 3": (nn.Conv2d(256, 256, 3, padding=1), 8),
    "stage 4": (nn.Conv2d(512, 512, 3, padding=1), 4),
    "odd sides": (nn.Conv2d(16, 64, 3), 13),
    "one pixel": (nn.Conv2d(48, 64, 3, padding=1), 1),
    "many positions": (nn.Conv2d(16, 64, 1, padding=1), 70),
}


@gpu
@pytest.mark.own_kernels
@pytest.mark.parametrize("samples", [1, 7, 131])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_squares_of_samples_gradients_are_exact_on_small_integers(
    name: str, samples: int
) -> None:
    """Sums of products are exact then, and so are their squares up to float32."""
    module, side = CONVOLUTIONS[name]
    torch.manual_seed(0)

    def integers(*shape: int) -> Tensor:
        drawn = torch.randint(-1, 2, shape, device="cuda").bfloat16()
        return drawn.contiguous(memory_format=torch.channels_last)

    x = integers(samples, module.in_channels, side, side)
    with torch.no_grad():
        shape = module(torch.zeros(1, module.in_channels, side, side)).shape
    dy = integers(samples, *shape[1:])
    sizes = squares.geometry(module, x, dy)
    assert sizes is not None
    found = squares.convolution_squares(x, dy, sizes)
    expected = torch.zeros(module.weight.shape, dtype=torch.float64, device="cuda")
    for one, gradient in zip(x.double(), dy.double(), strict=True):
        expected += conv2d_weight(
            one[None],
            list(module.weight.shape),
            gradient[None],
            stride=module.stride,
            padding=module.padding,
        ).square()
    assert relative(found, expected) < 1e-6


@gpu
@pytest.mark.parametrize("shape", [(3, 64, 9, 7), (130, 24, 4, 4), (2, 512, 1, 1)])
def test_sums_of_samples_are_those_of_float64(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, dy = torch.randn(2, *shape, device="cuda").bfloat16()
    mean, rstd = torch.rand(2, shape[1], device="cuda")
    found = squares.sample_sums(x, dy, mean, rstd)
    expected = squares.sample_sums(
        x.double(), dy.double(), mean.double(), rstd.double()
    )
    assert relative(found, expected) < 1e-5


def test_fisher_kernels_compile_for_other_devices() -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="no CUDA compiler beside torch")
    sizes = squares.ConvolutionSizes(13, 13, 11, 11, 3, 1, 0, 16)
    for macros in (sizes.macros, squares.sums_macros(8)):
        assert cuda.compiled("squares.cu", macros, "sm_80").startswith(b"\x7fELF")


@pytest.mark.parametrize(
    ("side", "band", "group", "steps"), [(4, 4, 4, 1), (8, 8, 1, 4), (7, 7, 1, 4)]
)
def test_small_images_are_multiplied_whole(
    side: int, band: int, group: int, steps: int
) -> None:
    """4 × 4 positions are one step, so four images are fetched at once."""
    sizes = squares.ConvolutionSizes(side, side, side, side, 3, 1, 1, 16)
    assert (sizes.band, sizes.group, sizes.steps) == (band, group, steps)
    large = squares.ConvolutionSizes(32, 32, 32, 32, 3, 1, 1, 16)
    assert (large.band, large.group, large.steps) == (2, 1, 4)


@gpu
def test_fisher_information_in_bfloat16_is_near() -> None:
    network = build("resnet18", shape=(3, 32, 32), classes=10, seed=0)
    layout = Layout.of(network)
    torch.manual_seed(0)
    shard = shard_of(
        torch.randn(24, 3, 32, 32).cuda(), torch.randint(10, (24,)).cuda(), 2
    )
    rows = layout.row(network).repeat(2, 1).cuda()
    cost = Engine(network, layout, shape=(3, 32, 32)).cost
    plain, halves = (
        Fisher(network, layout, cost, bf16=bf16)(rows, shard, np.arange(2))
        for bf16 in (False, True)
    )
    assert relative(halves, plain) < 0.05
    for e in layout.entries:
        if e.trainable:
            columns = slice(e.start, e.stop)
            # The first layers have the roundings of all layers behind them.
            assert relative(halves[:, columns], plain[:, columns]) < 0.2, e.name
