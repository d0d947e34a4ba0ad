"""Kernels in C for CPUs, against torch's own operations."""

import mmap
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Timer

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hpcfed.kernels import cpu, cpu_convolution, dropout
from hpcfed.kernels.cpu_convolution import CpuLayer
from hpcfed.models.layout import Layout
from hpcfed.models.networks import build
from hpcfed.models.stack import StackedNetwork
from hpcfed.runtime import compiler, own_kernels, randomness
from hpcfed.runtime.device import keeping_arithmetic

CLIENTS, SLOTS = 2, 3
pytestmark = [
    pytest.mark.own_kernels,
    pytest.mark.skipif(
        not any(map(shutil.which, compiler.COMPILERS)), reason="there is no compiler"
    ),
]


@pytest.fixture
def many_threads() -> Iterator[None]:
    """Have more threads than clients, so that the samples of one are shared out."""
    before = torch.get_num_threads()
    torch.set_num_threads(5)
    yield
    torch.set_num_threads(before)


def integers(*shape: int) -> Tensor:
    """Return small integers, on which all sums are exact and many values equal."""
    return torch.randint(-2, 3, shape).float().requires_grad_()


def expected(x: Tensor, weight: Tensor, bias: Tensor, layer: CpuLayer) -> Tensor:
    """Return what torch computes, client by client."""
    results = []
    for images, own, own_bias in zip(x.chunk(len(weight)), weight, bias, strict=True):
        y = F.conv2d(images, own, own_bias, padding=layer.padding)
        y = F.leaky_relu(y, layer.slope)
        results.append(F.max_pool2d(y, 2) if layer.pool else y)
    return torch.cat(results)


@pytest.mark.parametrize(
    "layer",
    [
        CpuLayer(3, 0),
        CpuLayer(3, 1, 0.0, True),
        CpuLayer(5, 1, 0.5, True),
        CpuLayer(1, 0, 0.0),
    ],
)
# Channels and outputs of no, one and several whole vectors; an odd and an even side.
@pytest.mark.parametrize("sizes", [(1, 8, 7), (3, 5, 8), (16, 36, 9)])
@pytest.mark.usefixtures("many_threads")
def test_convolution_is_exact_on_small_integers(
    layer: CpuLayer, sizes: tuple[int, int, int]
) -> None:
    torch.manual_seed(0)
    channels, outputs, side = sizes
    x = integers(CLIENTS * SLOTS, channels, side, side)
    weight = integers(CLIENTS, outputs, channels, layer.kernel, layer.kernel)
    bias = integers(CLIENTS, outputs)
    assert cpu_convolution.serves(x, layer)
    y = cpu_convolution.block(x, weight, bias, layer)
    right = expected(x, weight, bias, layer)
    assert torch.equal(y, right)
    dy = torch.randint(-2, 3, y.shape).float()
    ours = torch.autograd.grad(y, (x, weight, bias), dy)
    theirs = torch.autograd.grad(right, (x, weight, bias), dy)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


def test_gradients_go_to_their_sinks() -> None:
    torch.manual_seed(0)
    layer = CpuLayer(3, 1, 0.0)
    x, weight = integers(CLIENTS * SLOTS, 2, 4, 4), integers(CLIENTS, 3, 2, 3, 3)
    bias = integers(CLIENTS, 3)
    sinks = torch.full_like(weight, torch.nan), torch.full_like(bias, torch.nan)
    y = cpu_convolution.block(x, weight, bias, layer, sinks)
    torch.autograd.grad(y.sum(), (weight, bias))
    right = expected(x, weight, bias, layer).sum()
    for sink, gradient in zip(
        sinks, torch.autograd.grad(right, (weight, bias)), strict=True
    ):
        assert torch.equal(sink, gradient)


def test_images_of_other_channels_are_refused() -> None:
    with pytest.raises(ValueError, match="weights of 2 channels, and images of 1"):
        cpu_convolution.block(
            torch.zeros(2, 1, 3, 3), torch.zeros(2, 4, 2, 3, 3), None, CpuLayer(3, 1)
        )


@pytest.mark.parametrize("at", range(4))
def test_a_value_that_is_no_number_survives_pooling(at: int) -> None:
    x = torch.zeros(1, 1, 2, 2)
    x.view(-1)[at] = torch.nan
    one = torch.ones(1, 1, 1, 1, 1)
    y = cpu_convolution.block(x, one, None, CpuLayer(1, 0, 0.0, True))
    assert y.isnan().all()


@pytest.mark.parametrize("p", [0.25, 0.5, 0.1])
def test_dropout_draws_the_numbers_of_the_stream(p: float) -> None:
    torch.manual_seed(0)
    keys = torch.tensor([1, -(2**62)])
    # Channels-last: numbers count values channels-first all the same.
    x = torch.randn(2 * SLOTS, 4, 5, 6).to(memory_format=torch.channels_last)
    x.requires_grad_()
    assert dropout.serves(x)
    y = dropout.dropout(x, keys, p)
    stays = randomness.uniform(keys, x.numel() // 2).view_as(x) >= p
    expected = x * stays / (1 - p)
    assert torch.equal(y, expected)
    dy = torch.randn(x.shape)
    (ours,) = torch.autograd.grad(y, x, dy)
    (theirs,) = torch.autograd.grad(expected, x, dy)
    torch.testing.assert_close(ours, theirs)


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Forget what is loaded, before and after."""
    _forget()
    yield
    _forget()


def _forget() -> None:
    cpu._library.cache_clear()
    compiler._compiled.cache_clear()


@pytest.mark.usefixtures("forgotten")
def test_without_a_compiler_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    network = build("cnn-digits", shape=(1, 8, 8), classes=10, seed=0)
    layout = Layout.of(network)
    stacked = StackedNetwork(network, layout)
    tensors = {}
    for name, parameter in network.named_parameters():
        tensors[name] = torch.stack([parameter.detach(), 2 * parameter.detach()])
    x = torch.randn(2 * SLOTS, 1, 8, 8)
    ours = stacked(tensors, x)
    _forget()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert not cpu_convolution.serves(x, CpuLayer(3, 1))
    torch.testing.assert_close(stacked(tensors, x), ours)


@pytest.mark.parametrize("name", ["cnn-digits", "cnn-pfl"])
def test_torch_alone_gives_what_the_kernels_give(name: str) -> None:
    """A step's outputs and gradients of two clients, with dropout in one network."""
    network = build(name, shape=(1, 8, 8), classes=10, seed=0)
    layout = Layout.of(network)
    rows = layout.row(network).repeat(2, 1)
    # A row of keys for every layer with dropout.
    keys = torch.arange(4).view(2, 2)
    torch.manual_seed(0)
    x = torch.randn(2 * SLOTS, 1, 8, 8)
    found = []
    with keeping_arithmetic():
        for allowed in (True, False):
            own_kernels.allow(allowed)
            assert cpu_convolution.serves(x, CpuLayer(3, 1)) == allowed
            assert dropout.serves(x) == allowed
            weights = rows.clone().requires_grad_()
            views = layout.views(weights)
            y = StackedNetwork(network, layout)(views, x, training=True, keys=keys)
            (gradient,) = torch.autograd.grad(y.square().sum(), weights)
            found.append((y.detach(), gradient))
    assert own_kernels.are_allowed()
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.usefixtures("forgotten")
def test_what_was_compiled_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCFED_CACHE", str(tmp_path / "cache"))
    assert cpu.library("cpu_convolution.c") is not None
    _forget()

    def refuse(text: bytes, compiler: str) -> bytes:
        raise AssertionError("compiled a second time")

    monkeypatch.setattr(compiler, "_compile", refuse)
    assert cpu.library("cpu_convolution.c") is not None


@pytest.mark.usefixtures("forgotten")
def test_what_is_compiled_in_the_background_is_not_compiled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HPCFED_CACHE", "off")
    began, go_on = Event(), Event()
    calls: list[str] = []

    def compile(text: bytes, program: str) -> bytes:
        calls.append(program)
        began.set()
        assert go_on.wait(60)
        return text[:4]

    monkeypatch.setattr(compiler, "_compile", compile)
    compiler.begin(compiler.CONVOLUTION)
    assert began.wait(60)
    # Whoever needs it now must wait.
    Timer(0.05, go_on.set).start()
    source = Path(cpu.__file__).with_name(compiler.CONVOLUTION)
    assert compiler.compiled(compiler.CONVOLUTION) == source.read_bytes()[:4]
    assert len(calls) == 1


def test_mapped_files_may_have_any_names(tmp_path: Path) -> None:
    file = tmp_path / os.fsdecode(b"caf\xe9")
    file.write_bytes(b"x" * 4096)
    with open(file, "rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    with mapped:
        assert Path(cpu._openmp()).is_file()


@pytest.mark.usefixtures("forgotten")
def test_a_compiler_that_fails_is_as_good_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCFED_CACHE", "off")
    monkeypatch.setattr(compiler, "COMPILERS", ("false",))
    assert cpu.library("cpu_convolution.c") is None
