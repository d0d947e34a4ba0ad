"""The kernels of our own against float64 autograd, and what can be known about them
without a GPU.
"""

import itertools
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcfed.kernels import (
    batch,
    convolution,
    convolution_plan,
    cuda,
    dropout,
    few_samples,
    linear,
    norms,
    pull,
)
from hpcfed.kernels.convolution_layer import ConvolutionLayer
from hpcfed.kernels.pull import CHUNK, Spans, Strengths, add_pull
from hpcfed.kernels.rows import measures, mixed, row_distances
from hpcfed.kernels.sgd import Rule, descend
from hpcfed.models import MODELS
from hpcfed.models.kernel_layout import KernelLayout
from hpcfed.models.layout import Layout
from hpcfed.models.networks import build
from hpcfed.runtime import own_kernels, randomness

LINEAR = {"SLOTS": 10, "OUTPUTS": 128, "THREADS": 256, "MIN_BLOCKS": 2, "DEPTH": 8}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TYPES = [torch.float32, torch.bfloat16]
LAYERS = {
    "first of cnn-cifar": ConvolutionLayer(32, 32, 3, 16, 5, 0, True, 0.01, True),
    "second of cnn-cifar": ConvolutionLayer(14, 14, 16, 32, 5, 1, True, 0.01, True),
    "third of cnn-cifar": ConvolutionLayer(6, 6, 32, 64, 3, 1, True, 0.01, True),
    "first of cnn-pfl": ConvolutionLayer(32, 32, 3, 32, 3, 0, True, 0.0, False),
    "second of cnn-pfl": ConvolutionLayer(30, 30, 32, 64, 3, 0, True, 0.0, True),
    "second of cnn-pfllib": ConvolutionLayer(12, 12, 32, 64, 5, 0, True, 0.0, True),
    "second of FedAvg's": ConvolutionLayer(14, 14, 32, 64, 5, 2, True, 0.0, True),
    "one channel": ConvolutionLayer(28, 28, 1, 8, 5, 0, True, 0.01, True),
    "odd sides": ConvolutionLayer(15, 13, 32, 32, 3, 0, True, 0.0, True),
    "no bias, no activation": ConvolutionLayer(9, 11, 8, 24, 3, 1, False, 1.0, False),
    "even kernel": ConvolutionLayer(10, 10, 4, 8, 4, 2, True, 0.1, True),
    "one by one": ConvolutionLayer(7, 7, 12, 16, 1, 0, True, 0.0, False),
}


def reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, layer: ConvolutionLayer
) -> Tensor:
    """One client after the other, in the precision of the tensors."""
    biases = [None] * len(weight) if bias is None else bias
    parts = zip(x.chunk(len(weight)), weight, biases, strict=True)
    y = torch.cat([F.conv2d(own, w, b, padding=layer.padding) for own, w, b in parts])
    y = y if layer.slope == 1 else F.leaky_relu(y, layer.slope)
    return F.max_pool2d(y, 2) if layer.pool else y


@pytest.mark.gpu
@pytest.mark.own_kernels
@pytest.mark.parametrize(
    ("warp_groups", "bounded"), [(True, True), (True, False), (False, True)]
)
@pytest.mark.parametrize(("clients", "slots"), [(3, 7), (1, 1), (40, 2)])
@pytest.mark.parametrize("name", LAYERS)
def test_convolution_is_exact_on_small_integers(
    name: str,
    clients: int,
    slots: int,
    warp_groups: bool,
    bounded: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Small integers are TensorFloat-32 numbers and halves, and their sums are exact:
    nothing but a slope is rounded.
    """
    if warp_groups and not convolution.has_warp_groups(0):
        pytest.skip("warp-group instructions are Hopper's")
    monkeypatch.setattr(convolution, "has_warp_groups", lambda device: warp_groups)
    convolution._kernel.cache_clear()
    layer = LAYERS[name]
    if not convolution.serves(layer, 0, bounded=bounded):
        pytest.skip("does not fit into shared memory without halves")

    def integers(*shape: int) -> Tensor:
        return torch.randint(-3, 4, shape, device="cuda").float()

    torch.manual_seed(0)
    side = (layer.kernel, layer.kernel)
    x = integers(clients * slots, layer.channels, layer.height, layer.width)
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    weight = (
        integers(clients, layer.outputs, *side, layer.channels)
        .permute(0, 1, 4, 2, 3)
        .requires_grad_()
    )
    bias = integers(clients, layer.outputs).requires_grad_() if layer.bias else None
    inputs = [tensor for tensor in (x, weight, bias) if tensor is not None]
    sink = torch.full((clients, layer.columns), torch.nan, device="cuda")
    y = convolution.block(x, weight, bias, layer, sink, bounded=bounded)
    dy = integers(*y.shape)
    gradients = torch.autograd.grad(y, inputs, dy)
    assert gradients[1].data_ptr() == sink.data_ptr() and not sink.isnan().any()

    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = reference(exact[0], exact[1], exact[2] if layer.bias else None, layer)
    expected_gradients = torch.autograd.grad(expected, exact, dy.double())
    # A slope such as 0.01 is rounded, and what passes it once more to the precision of
    # the tensor cores.
    tolerance = 0.0 if layer.slope in (0.0, 1.0) else 1e-3
    for ours, theirs in zip(
        (y, *gradients), (expected, *expected_gradients), strict=True
    ):
        assert (
            float(
                (ours.detach().double() - theirs.detach()).norm()
                / theirs.detach().norm()
            )
            <= tolerance
        )


@pytest.mark.gpu
@pytest.mark.own_kernels
@pytest.mark.parametrize("scale", [1.0, 1e-6])
@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize(
    "name", ["no bias, no activation", "second of cnn-pfl", "second of cnn-pfllib"]
)
def test_convolution_of_any_numbers_has_the_precision_of_tf32(
    name: str, bounded: bool, scale: float
) -> None:
    """Gradients may be as small as those of a client that has nearly learned its data."""
    layer = LAYERS[name]
    if not convolution.serves(layer, 0, bounded=bounded):
        pytest.skip("does not fit into shared memory without halves")
    torch.manual_seed(0)
    x = torch.randn(15, layer.channels, layer.height, layer.width, device="cuda")
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    shape = (3, layer.outputs, layer.kernel, layer.kernel, layer.channels)
    weight = torch.randn(shape, device="cuda").permute(0, 1, 4, 2, 3).requires_grad_()
    bias = torch.randn(3, layer.outputs, device="cuda") if layer.bias else None
    y = convolution.block(x, weight, bias, layer, None, bounded=bounded)
    dy = scale * torch.randn_like(y)
    gradients = torch.autograd.grad(y, (x, weight), dy)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    expected = reference(*exact, None if bias is None else bias.double(), layer)
    theirs = torch.autograd.grad(expected, exact, dy.double())

    def error(ours: Tensor, theirs: Tensor) -> float:
        difference = ours.detach().double() - theirs.detach()
        return float(difference.norm() / theirs.detach().norm())

    assert 1e-7 < error(y, expected) < 1e-3
    # A winner of the pooling or a sign may turn over where two values are close. How much
    # that changes is known from exact sums of operands that were rounded before.
    rounded = [t.detach().half().double().requires_grad_() for t in (x, weight)]
    of_rounded = reference(*rounded, None if bias is None else bias.double(), layer)
    turned = torch.autograd.grad(of_rounded, rounded, dy.double())
    for ours, right, other in zip(gradients, theirs, turned, strict=True):
        assert error(ours, right) < 1e-3 + 1.5 * error(other, right)


@pytest.mark.gpu
@pytest.mark.own_kernels
@pytest.mark.parametrize("blocks", [1, 5, 64, 1000])
@pytest.mark.parametrize(("clients", "slots"), [(300, 1), (7, 5), (2, 23)])
@pytest.mark.parametrize(
    "name", ["first of cnn-pfl", "odd sides", "one by one", "second of cnn-pfllib"]
)
def test_gradients_of_weights_are_exact_however_blocks_share_clients(
    name: str, clients: int, slots: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks have several clients, clients several blocks, or both; warps that divide
    the pixels add up their sums. The sink's rows have columns that are not ours.
    """
    monkeypatch.setattr(
        convolution, "sharing_blocks", lambda units, capacity: min(units, blocks)
    )
    layer = LAYERS[name]
    torch.manual_seed(0)
    images = (clients * slots, layer.channels, layer.height, layer.width)
    x = torch.randint(-3, 4, images, device="cuda").float()
    x = x.contiguous(memory_format=torch.channels_last)
    side = (layer.kernel, layer.kernel)
    shape = (clients, layer.outputs, *side, layer.channels)
    weight = torch.randint(-3, 4, shape, device="cuda").float()
    weight = weight.permute(0, 1, 4, 2, 3).requires_grad_()
    bias = torch.zeros(clients, layer.outputs, device="cuda", requires_grad=True)
    wide = torch.full((clients, layer.columns + 4), torch.nan, device="cuda")
    sink = wide[:, : layer.columns]
    for bounded in (True, False):
        if not convolution.serves(layer, 0, bounded=bounded):
            continue
        y = convolution.block(
            x, weight, bias, layer, sink.fill_(torch.nan), bounded=bounded
        )
        dy = torch.randint(-3, 4, y.shape, device="cuda").float()
        ours = torch.autograd.grad(y, (weight, bias), dy)
        exact = [tensor.detach().double().requires_grad_() for tensor in (weight, bias)]
        expected = reference(x.double(), *exact, layer)
        theirs = torch.autograd.grad(expected, exact, dy.double())
        assert all(map(torch.equal, [g.double() for g in ours], theirs))
        assert wide[:, layer.columns :].isnan().all()


def test_every_kernel_waits_for_those_before_it() -> None:
    """It may be launched while they still run, so it looks at no tensor before."""
    sources = list(Path(cuda.__file__).parent.glob("*.cu"))
    assert len(sources) > 15
    kernels = 0
    for source in sources:
        text = re.sub(r"//.*", "", source.read_text())
        for kernel in re.finditer("__global__([^{]*){", text):
            tensors = re.findall(r"\*\s*(\w+)", kernel[1])
            before, waits, _ = text[kernel.end() :].partition("await_others();")
            touched = set(tensors) & set(re.findall(r"\w+", before))
            assert tensors and waits and not touched, (source.name, kernel[0])
            kernels += 1
    assert kernels > 40


@pytest.mark.gpu
@pytest.mark.own_kernels
def test_dropout_draws_the_numbers_of_the_stream() -> None:
    keys = randomness.client_keys(0, "dropout", 0, torch.arange(5)).cuda()
    x = torch.randn(15, 6, 4, 4, device="cuda")
    keep = randomness.uniform(keys, 3 * 6 * 4 * 4).view_as(x) >= 0.25
    for given in (x, x.contiguous(memory_format=torch.channels_last)):
        given = given.detach().requires_grad_()
        y = dropout.dropout(given, keys, 0.25)
        torch.testing.assert_close(y, x * keep / 0.75)
        (gradient,) = torch.autograd.grad(y, given, torch.ones_like(y))
        torch.testing.assert_close(gradient, keep / 0.75)


@pytest.mark.gpu
@pytest.mark.own_kernels
@pytest.mark.parametrize("shape", [(15, 6, 4, 4), (6, 64, 14, 14), (3, 33, 1, 40)])
def test_dropout_to_vectors_is_dropout_and_flatten(shape: tuple[int, ...]) -> None:
    keys = randomness.client_keys(0, "dropout", 0, torch.arange(3)).cuda()
    x = torch.randn(shape, device="cuda").contiguous(memory_format=torch.channels_last)
    one, two = x.clone().requires_grad_(), x.clone().requires_grad_()
    turned = dropout.dropout(one, keys, 0.25, flat=True)
    plain = dropout.dropout(two, keys, 0.25).flatten(1)
    assert torch.equal(turned, plain) and turned.is_contiguous()
    dy = torch.randn_like(plain)
    (ours,) = torch.autograd.grad(turned, one, dy)
    (theirs,) = torch.autograd.grad(plain, two, dy)
    assert torch.equal(ours, theirs)


@pytest.mark.gpu
@pytest.mark.own_kernels
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    ("slots", "outputs", "inputs"), [(10, 128, 12544), (1, 512, 1000), (16, 48, 6004)]
)
def test_a_product_that_reads_weights_once(
    slots: int,
    outputs: int,
    inputs: int,
    biased: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Small integers are exact; rows are slices of a wider matrix."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, device="cuda").float()

    torch.manual_seed(0)
    weight = integers(3, outputs * inputs + 8)[:, 4:-4].unflatten(1, (outputs, inputs))
    x = integers(3, slots, inputs)
    bias = integers(3, outputs) if biased else None
    assert linear._reads_once(x, weight) == (outputs * inputs >= linear.MANY_WEIGHTS)
    expected = x.double() @ weight.double().transpose(1, 2)
    if bias is not None:
        expected += bias.double()[:, None]
    assert torch.equal(linear._forward(x, weight, bias).double(), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("slope", [1.0, 0.0, 0.25])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    ("clients", "slots", "outputs", "inputs"),
    [(10, 10, 128, 1568), (3, 10, 10, 128), (2, 1, 1, 4), (3, 16, 37, 100)],
)
def test_a_layer_of_few_samples(
    clients: int,
    slots: int,
    outputs: int,
    inputs: int,
    biased: bool,
    slope: float,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Small integers are exact; rows and sinks are slices of wider matrices, whose
    other columns stay.
    """
    # As with --precision tf32; what torch itself multiplies stays exact.
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    torch.manual_seed(0)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, device=device).float()

    width = outputs * inputs + 8
    wide = integers(2, clients, width)
    weight, dw = (rows[:, 4:-4].unflatten(1, (outputs, inputs)) for rows in wide)
    edges = wide[1, :, :4].clone(), wide[1, :, -4:].clone()
    dw.fill_(torch.nan)
    x, bias = integers(clients, slots, inputs), integers(clients, outputs)
    ours = device == "cuda" and own_kernels.are_allowed()
    assert few_samples.serves(x, weight) == ours
    leaves = [x, weight.detach(), *([bias] if biased else [])]
    for leaf in leaves:
        leaf.requires_grad_()
    db = torch.full_like(bias, torch.nan)
    y = linear.linear(
        x,
        leaves[1],
        leaves[2] if biased else None,
        sinks=(dw, db if biased else None),
        slope=slope,
        widest=True,
    )
    dy = integers(*y.shape)
    dx, *_ = torch.autograd.grad(y, leaves, dy)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    sums = exact[0] @ exact[1].transpose(1, 2)
    if biased:
        sums = sums + exact[2][:, None]
    expected = linear.activated(sums, slope)
    assert torch.equal(y.double(), expected)
    theirs = torch.autograd.grad(expected, exact, dy.double())
    found = [dx, dw, *([db] if biased else [])]
    assert all(map(torch.equal, [g.double() for g in found], theirs))
    # The first layer of a network needs no gradient of its inputs.
    dw.fill_(torch.nan)
    alone = linear.linear(
        x.detach(), leaves[1], None, sinks=(dw, None), slope=slope, widest=True
    )
    torch.autograd.grad(alone, leaves[1], dy)
    sums = exact[0].detach() @ exact[1].transpose(1, 2)
    (dw_alone,) = torch.autograd.grad(
        linear.activated(sums, slope), exact[1], dy.double()
    )
    assert torch.equal(dw.double(), dw_alone)
    assert all(map(torch.equal, edges, (wide[1, :, :4], wide[1, :, -4:])))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "rule",
    [
        Rule(),
        Rule(momentum=0.5, weight_decay=0.01),
        Rule(momentum=0.5, weight_decay=0.01, nesterov=True),
    ],
    ids=["plain", "momentum", "nesterov"],
)
@pytest.mark.parametrize("slots", [1, 10, 16])
def test_a_linear_layer_that_updates_itself(
    slots: int, rule: Rule, device: str
) -> None:
    """Gradient of the input and the step of SGD against autograd in float64; rows are
    slices of a wider matrix.
    """
    torch.manual_seed(0)
    rows, velocities = torch.randn(2, 3, 8 * 520 + 12, device=device)
    weight, velocity = (
        matrix[:, 4 : 4 + 8 * 520].unflatten(1, (8, 520))
        for matrix in (rows, velocities)
    )
    x = torch.randn(3, slots, 520, device=device, requires_grad=True)
    bias = torch.randn(3, 8, device=device)
    dy = torch.randn(3, slots, 8, device=device)
    before = rows.clone()
    exact = [tensor.detach().double() for tensor in (x, weight, velocity)]
    lr = torch.tensor(0.1, device=device)
    update = linear.Update(velocity if rule.momentum else None, lr, rule)
    y = linear.linear(x, weight, bias, update=update)
    (dx,) = torch.autograd.grad(y, x, dy)
    torch.testing.assert_close(
        dx.double(), dy.double() @ exact[1], rtol=1e-3, atol=1e-3
    )
    gradient = dy.double().transpose(1, 2) @ exact[0] + rule.weight_decay * exact[1]
    if rule.momentum:
        speed = rule.momentum * exact[2] + gradient
        gradient = gradient + rule.momentum * speed if rule.nesterov else speed
    torch.testing.assert_close(
        weight.double(), exact[1] - 0.1 * gradient, rtol=1e-3, atol=1e-3
    )
    assert torch.equal(rows[:, :4], before[:, :4]) and torch.equal(
        rows[:, -8:], before[:, -8:]
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "rule",
    [
        Rule(),
        Rule(momentum=0.5, weight_decay=0.01),
        Rule(clip=0.5, momentum=0.9),
        Rule(momentum=0.5, weight_decay=0.01, nesterov=True),
        Rule(clip=0.5, momentum=0.9, nesterov=True),
    ],
    ids=str,
)
def test_a_step_of_sgd(rule: Rule, masked: bool, device: str) -> None:
    """Of a slice of columns, against torch's own optimiser for every client."""
    torch.manual_seed(0)
    matrices = torch.randn(3, 4, 40, device=device)
    rows, gradient, velocity = (matrix[:, 8:28] for matrix in matrices)
    before = matrices.clone()
    moving = torch.arange(20, device=device) % 3 > 0 if masked else None
    expected = []
    for row, slope, speed in zip(
        rows.clone(), gradient.clone(), velocity.clone(), strict=True
    ):
        parameter = nn.Parameter(row.clone())
        parameter.grad = slope if moving is None else slope * moving
        if rule.clip:
            nn.utils.clip_grad_norm_([parameter], rule.clip)
        optimiser = torch.optim.SGD(
            [parameter],
            lr=0.1,
            momentum=rule.momentum,
            weight_decay=rule.weight_decay,
            nesterov=rule.nesterov,
        )
        if rule.momentum:
            optimiser.state[parameter]["momentum_buffer"] = speed
        optimiser.step()
        expected.append(
            parameter.detach()
            if moving is None
            else torch.where(moving, parameter.detach(), row)
        )
    descend(
        rows,
        gradient,
        velocity if rule.momentum else None,
        moving,
        torch.tensor(0.1, device=device),
        rule,
    )
    torch.testing.assert_close(rows, torch.stack(expected))
    assert torch.equal(matrices[0, :, :8], before[0, :, :8]) and torch.equal(
        matrices[0, :, 28:], before[0, :, 28:]
    )
    if moving is not None:
        assert torch.equal(rows[:, ~moving], before[0, :, 8:28][:, ~moving])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_and_its_gradient(device: str, dtype: torch.dtype) -> None:
    """Three clients with 4, 2 and no samples in the second step, against autograd of
    the plain formula.

    A client that has finished makes NaN of its empty slots where it normalises them.
    """
    torch.manual_seed(0)
    labels = torch.randint(10, (50,), device=device)
    samples = torch.randint(50, (3, 5, 6), device=device)
    counts = torch.tensor([[6] * 5, [4, 2, 0, 6, 6], [1] * 5], device=device)
    step = torch.tensor([1], device=device)
    logits = torch.randn(3 * 4, 10, device=device, dtype=dtype)
    logits[8:] = torch.nan
    logits.requires_grad_()
    total = torch.ones(3, device=device, dtype=dtype)
    loss = batch.cross_entropy(logits, labels, samples, counts, step, total)
    (gradient,) = torch.autograd.grad(loss, logits)
    expected = torch.zeros(3, device=device, dtype=dtype)
    mean = logits.new_zeros(())
    for client, count in enumerate([4, 2, 0]):
        own = slice(client * 4, client * 4 + count)
        losses = F.cross_entropy(
            logits[own], labels[samples[1, client, :count]], reduction="none"
        )
        expected[client] = losses.sum()
        mean = mean + (losses.mean() if count else 0)
    torch.testing.assert_close(total, expected.detach() + 1)
    torch.testing.assert_close(gradient, torch.autograd.grad(mean, logits)[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(4, 4, 3), (5, 5, 1)])
def test_images_of_a_step(device: str, shape: tuple[int, int, int]) -> None:
    images = torch.randn(20, *shape, device=device)
    samples = torch.randint(20, (3, 5, 6), device=device)
    got = batch.gather_inputs(
        images, samples, torch.tensor([2], device=device), clients=4, slots=3
    )
    assert torch.equal(got, images[samples[2, :4, :3].flatten()].permute(0, 3, 1, 2))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(9, 12, 3), (5, 6, 1)])
def test_shifted_images_of_a_step(device: str, shape: tuple[int, int, int]) -> None:
    """Every way to shift an image, against an image that is padded, cut out and turned
    by hand.
    """
    torch.manual_seed(0)
    images = torch.randn(20, *shape, device=device)
    blank = torch.randn(shape[2], device=device)
    samples = torch.randint(20, (3, 2, batch.SHIFTS), device=device)
    shifts = (
        torch.stack([torch.randperm(batch.SHIFTS) for _ in range(6)])
        .view(3, 2, -1)
        .to(device)
    )
    got = batch.gather_inputs(
        images,
        samples,
        torch.tensor([1], device=device),
        clients=2,
        slots=batch.SHIFTS - 1,
        shifts=shifts,
        blank=blank,
    ).unflatten(0, (2, -1))
    for client in range(2):
        for slot in range(batch.SHIFTS - 1):
            shift = int(shifts[1, client, slot])
            wide = blank.expand(shape[0] + 8, shape[1] + 8, -1).clone()
            wide[4:-4, 4:-4] = images[samples[1, client, slot]]
            top, left = shift % 9, shift // 9 % 9
            cut = wide[top : top + shape[0], left : left + shape[1]]
            assert torch.equal(
                got[client, slot],
                (cut.flip(1) if shift >= 81 else cut).permute(2, 0, 1),
            )


def activations(*shape: int, device: str, dtype: torch.dtype) -> Tensor:
    """[samples, channels, 1, length], channels-last, off zero."""
    samples, channels, length = shape
    x = torch.randn(samples, channels, 1, length, device=device) * 2 + 1
    return x.to(dtype).contiguous(memory_format=torch.channels_last).requires_grad_()


def assert_near(ours: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """A result of float32 arithmetic that was stored in the type."""
    error = float((ours.detach().double() - exact).norm() / exact.norm())
    assert error < (1e-5 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "shape",
    [(5, 32, 11), (300, 64, 40), (2, 256, 3), (4, 12, 6), (300, 192, 7), (9, 1544, 5)],
)
def test_batch_norm_and_its_activation(
    shape: tuple[int, int, int], dtype: torch.dtype, device: str
) -> None:
    """Against torch in float64: results, gradients and running statistics."""
    torch.manual_seed(0)
    x = activations(*shape, device=device, dtype=dtype)
    weight, bias = torch.randn(2, shape[1], device=device).unbind()
    inputs = [x, weight.requires_grad_(), bias.requires_grad_()]
    running = norms.Running(
        torch.zeros(shape[1], device=device), torch.ones(shape[1], device=device), 0.3
    )
    y = norms.batch_norm(x, weight, bias, running, training=True, eps=1e-5, slope=0.01)
    dy = torch.randn_like(y)
    gradients = torch.autograd.grad(y, inputs, dy)

    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    moments = [
        torch.zeros(shape[1]).double().to(device),
        torch.ones(shape[1]).double().to(device),
    ]
    expected = F.leaky_relu(
        F.batch_norm(exact[0], *moments, *exact[1:], training=True, momentum=0.3), 0.01
    )
    for ours, theirs in zip(
        (y, *gradients),
        (expected, *torch.autograd.grad(expected, exact, dy.double())),
        strict=True,
    ):
        assert_near(ours, theirs.detach(), dtype)
    for ours, theirs in zip((running.mean, running.var), moments, strict=True):
        assert_near(ours, theirs, torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ((3, 64, 37), 8),
        ((2, 512, 20), 8),
        ((40, 32, 9), 4),
        ((2, 1024, 5), 8),
        ((3, 192, 37), 8),
        ((2, 1600, 11), 8),
        ((2, 96, 30), 4),
        ((2, 40, 4), 1),
    ],
)
def test_group_norm_shift_and_activation(
    shape: tuple[int, int, int], groups: int, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(0)
    x = activations(*shape, device=device, dtype=dtype)
    weight, bias = torch.randn(2, shape[1], device=device).unbind()
    shift = torch.randn(shape[0], shape[1], device=device)
    inputs = [x, *(tensor.requires_grad_() for tensor in (weight, bias, shift))]
    y = norms.group_norm(x, groups, weight, bias, shift, eps=1e-5)
    dy = torch.randn_like(y)
    gradients = torch.autograd.grad(y, inputs, dy)

    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = F.silu(
        F.group_norm(exact[0], groups, *exact[1:3]) + exact[3][:, :, None, None]
    )
    for ours, theirs in zip(
        (y, *gradients),
        (expected, *torch.autograd.grad(expected, exact, dy.double())),
        strict=True,
    ):
        assert_near(ours, theirs.detach(), dtype)


@pytest.mark.gpu
@pytest.mark.own_kernels
def test_norms_of_the_usual_sizes_are_served_by_kernels() -> None:
    x = activations(2, 64, 8, device="cuda", dtype=torch.bfloat16)
    assert norms.serves(x, 64) and norms.serves(x, 8) and not norms.serves(x, 4)
    assert norms.serves(x, 24) and norms.serves(x, 2048)
    assert not norms.serves(x, 2056)


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_blocks_of_group_norm_hold_whole_groups(groups: int) -> None:
    """Every channel has one thread, whatever the width of the network."""
    for channels in range(8 * groups, 2049, 8 * groups):
        width = norms.block_width(channels // groups, channels)
        assert channels % width == 0 and width % (channels // groups) == 0
        threads = norms.block_threads(width)
        assert threads % (width // 8) == 0 and 128 <= threads <= 256


def convolutions(name: str) -> list[ConvolutionLayer]:
    """The layers that `StackedNetwork` would make of a network, for images of 32 pixels
    a side.
    """
    found = []

    def seen(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(module, nn.Conv2d)
        _, channels, height, width = inputs[0].shape
        padding = module.padding[0]
        assert isinstance(padding, int)
        found.append(
            ConvolutionLayer(
                height,
                width,
                channels,
                module.out_channels,
                module.kernel_size[0],
                padding,
                True,
                0.0,
                True,
            )
        )

    network = build(name, shape=(3, 32, 32), classes=10, seed=0)
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(seen)
    network(torch.zeros(1, 3, 32, 32))
    return found


CONVOLVED_BY_TORCH = ("cnn-lenet",)
"""LeNet's six channels are no multiple of eight."""
ONLY_ON_HOPPER = ("cnn-pfllib",)
"""The second layer, 64 × 32 kernels of 5 × 5, fits into shared memory only in halves."""


@pytest.mark.parametrize(
    "name",
    [n for n in MODELS if n.startswith("cnn") and n not in CONVOLVED_BY_TORCH],
)
def test_every_convolution_of_the_small_networks_fits(name: str) -> None:
    for layer in convolutions(name):
        assert convolution_plan.supported(layer, warp_groups=True, bounded=True), layer
        if name in ONLY_ON_HOPPER:
            continue
        assert convolution_plan.supported(layer), layer
        assert convolution_plan.supported(layer, 163 * 1024), "Ampere has less"


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_do_not_change_the_forward_pass(name: str) -> None:
    """An evaluation does not say whether they are bounded, and runs the same kernel."""
    layer, shared = LAYERS[name], convolution_plan.SHARED
    for warp_groups in (False, True):
        bounded = convolution_plan.plans(layer, shared, warp_groups, True)
        unbounded = convolution_plan.plans(layer, shared, warp_groups, False)
        if unbounded:
            assert bounded["forward"] == unbounded["forward"]


@pytest.mark.parametrize("name", LAYERS)
def test_sources_compile(name: str) -> None:
    """The compiler needs no GPU: every kernel of every layer compiles for Ampere and
    for Hopper.
    """
    pytest.importorskip("cuda.bindings.nvrtc", reason="no CUDA compiler beside torch")
    layer = LAYERS[name]
    shared = convolution_plan.SHARED
    for architecture, bounded in itertools.product(("sm_80", "sm_90a"), (True, False)):
        plans = convolution_plan.plans(layer, shared, architecture == "sm_90a", bounded)
        for kind, plan in plans.items():
            assert plan.shared <= convolution_plan.SHARED
            macros = convolution_plan.macros(layer, kind, plan)
            assert cuda.compiled("convolution.cu", macros, architecture).startswith(
                b"\x7fELF"
            )


@pytest.mark.parametrize(
    ("source", "macros"),
    [
        ("relayout.cu", {}),
        ("mixing.cu", {}),
        ("parts.cu", {"THREADS": 256}),
        ("pull.cu", dict(pull.macros(Strengths(layers=0.5, masked=0.05)))),
        ("distances.cu", {"THREADS": 256, "CHUNK": 2**14}),
        ("linear.cu", LINEAR | {"LINEAR_FORWARD": 1, "CHUNK": 448}),
        (
            "linear.cu",
            LINEAR
            | {"MOMENTUM": "0.5f", "NESTEROV": 1, "DECAY": "0.0f", "RATE_EACH": 1},
        ),
        (
            "dropout.cu",
            {"CHANNELS": 64, "PIXELS": 196, "THRESHOLD": 9, "SCALE": 2, "BACKWARD": 1},
        ),
    ],
    ids=str,
)
def test_other_sources_compile(source: str, macros: dict[str, int | str]) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="no CUDA compiler beside torch")
    code = cuda.compiled(source, tuple(macros.items()), "sm_90a")
    assert code.startswith(b"\x7fELF")


@pytest.mark.parametrize("slots", [1, 10, 16])
def test_sources_of_few_samples_compile(slots: int) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="no CUDA compiler beside torch")
    for architecture in ("sm_80", "sm_90a"):
        for name, macros in (
            few_samples.forward_source(slots, 128, 1568, 0.0, biased=True),
            few_samples.backward_source(
                slots, 128, 1568, 0.01, biased=True, needs_x=True
            ),
            few_samples.backward_source(
                slots, 10, 64, 1.0, biased=False, needs_x=False
            ),
        ):
            code = cuda.compiled("few_samples.cu", macros, architecture)
            assert code.startswith(b"\x7fELF") and name.encode() in code


def test_source_of_batches_compiles() -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="no CUDA compiler beside torch")
    assert cuda.compiled(
        "batch.cu", batch.macros(HEIGHT=32, WIDTH=32, CHANNELS=3), "sm_80"
    ).startswith(b"\x7fELF")


@pytest.mark.parametrize("dtype", TYPES)
def test_sources_of_norms_compile(dtype: torch.dtype) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="no CUDA compiler beside torch")
    for channels in (32, 192):
        for backward in (False, True):
            macros = norms.batch_macros(channels, dtype, 0.01, backward)
            assert cuda.compiled("norms.cu", macros, "sm_80").startswith(b"\x7fELF")
        macros = norms.group_macros(channels, channels // 4, dtype, 1e-5)
        assert cuda.compiled("norms.cu", macros, "sm_80").startswith(b"\x7fELF")


def test_without_trials_cudnn_itself_stays_as_it_is() -> None:
    before = (
        torch.backends.cudnn.enabled,
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark,
    )
    with cuda.without_trials():
        assert (
            torch.backends.cudnn.enabled,
            torch.backends.cudnn.allow_tf32,
        ) == before[:2]
        assert not torch.backends.cudnn.benchmark
    assert (
        torch.backends.cudnn.enabled,
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark,
    ) == before


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "strengths",
    [
        Strengths(layers=0.5, masked=0.05),
        Strengths(whole=0.3, squared=0.1),
        Strengths(layers=0.2, whole=0.3, masked=0.4, squared=0.1),
    ],
)
def test_the_pull_is_the_gradient_of_its_norms(
    strengths: Strengths, device: str
) -> None:
    """Layers shorter than a chunk, as long as one, and longer; a client at its goal."""
    edges = [0, 12, 12 + CHUNK, 36 + 3 * CHUNK]
    layers = list(itertools.pairwise(edges))
    torch.manual_seed(0)
    rows = torch.randn(3, edges[-1])
    reference = torch.randn(3, edges[-1])
    reference[1] = rows[1]
    mask = torch.rand(3, edges[-1]) < 0.5
    before = torch.randn(3, edges[-1])
    exact = rows.double().requires_grad_()
    d = exact - reference.double()

    def norm(x: Tensor) -> Tensor:
        return (x.square().sum(1) + 1e-12).sqrt().sum()

    loss = strengths.whole * norm(d) + strengths.masked * norm(mask.double() * d)
    loss = loss + strengths.squared * d.square().sum() / 2
    loss = loss + strengths.layers * sum(norm(d[:, a:b]) for a, b in layers)
    (expected,) = torch.autograd.grad(loss, exact)

    gradient = before.clone().to(device)
    add_pull(
        rows.to(device),
        reference.to(device),
        mask.to(device) if strengths.masked else None,
        gradient,
        Spans(layers, torch.device(device)),
        strengths,
    )
    pulled = gradient.cpu().double() - before.double()
    torch.testing.assert_close(pulled, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cnn-pfl", "resnet18", "mlp"])
def test_rows_reach_the_kernels_and_come_back(name: str) -> None:
    """One pass by a table does what a copy of every tensor does, and clears padding."""
    layout = Layout.of(build(name, shape=(3, 32, 32), classes=10, seed=0))
    kernels = KernelLayout(layout, torch.device("cuda"))
    wide = torch.randn(5, layout.num_columns + 3, device="cuda")
    for rows in (wide[:, 3:], wide[:1, 1:-2].expand(5, -1)):
        ours, theirs = (kernels.zeros(5, rows) for _ in range(2))
        for matrix in (*ours, *theirs):
            matrix.fill_(torch.nan)
        kernels.load(rows, ours)
        kernels.load(rows.double(), theirs)  # float64 goes the other way
        for matrix, expected in zip(ours, theirs, strict=True):
            assert torch.equal(matrix, expected)
        back = torch.full_like(wide, torch.nan)[:, 3:]
        kernels.store(ours, back)
        assert torch.equal(back, rows)


def test_large_tensors_begin_at_a_line() -> None:
    layout = Layout.of(build("cnn-pfl", shape=(3, 32, 32), classes=10, seed=0))
    kernels = KernelLayout(layout, torch.device("cuda"))
    starts = {e.name: e.start for e in kernels.entries}
    # 32 · 27 weights and 32 biases make 896, a multiple of 32; 64 biases follow 18,432
    # weights, and 128 biases the large layer.
    assert starts["conv2.weight"] == 896
    assert starts["fc1.weight"] == 896 + 18_432 + 64
    assert starts["head.weight"] == starts["fc1.weight"] + 128 * 12_544 + 128
    assert kernels.widths[0] % 32 == 0


@pytest.mark.gpu
@pytest.mark.own_kernels
def test_distances_of_rows() -> None:
    torch.manual_seed(0)
    wide = torch.randn(4, 40_003, device="cuda")
    for rows in (wide[:, 3:], wide[:, :5]):
        for start in (torch.randn_like(rows), torch.randn_like(rows[:1]).expand(4, -1)):
            expected = (rows.double() - start.double()).norm(dim=1)
            assert measures(rows, start)
            found = row_distances(rows, start)
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)
    rows[1, 2] = torch.nan
    assert row_distances(rows, start).isnan().tolist() == [
        False,
        True,
        False,
        False,
    ]


@pytest.mark.gpu
def test_random_numbers_are_those_of_a_cpu() -> None:
    """One kernel mixes what eleven of torch's do, bit for bit."""
    keys = randomness.client_keys(3, "test", 7, torch.arange(1000))
    on_gpu = randomness.client_keys(3, "test", 7, torch.arange(1000, device="cuda"))
    assert (mixed(on_gpu) is not None) == own_kernels.are_allowed()
    assert torch.equal(on_gpu.cpu(), keys)
    steps = torch.arange(5)[:, None]
    children = randomness.child_keys(on_gpu, steps.cuda())
    assert torch.equal(children.cpu(), randomness.child_keys(keys, steps))
    drawn = randomness.bits(on_gpu[::2], 33)
    assert torch.equal(drawn.cpu(), randomness.bits(keys[::2], 33))
