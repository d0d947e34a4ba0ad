"""Kernels that are compiled by other processes before they are needed."""

import sys
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hpcfed
from hpcfed.clients import foreseeing
from hpcfed.kernels import (
    convolution,
    convolution_plan,
    cuda,
    few_samples,
    foreseen,
    nvrtc,
)
from hpcfed.models.networks import build
from hpcfed.models.stack import StackedNetwork
from hpcfed.models.stacked_convolutions import StackedConv2d
from hpcfed.options import RunConfig

OPTIONS = ["-arch=sm_80"]
KERNEL = 'extern "C" __global__ void f(float *x) { x[threadIdx.x] *= FACTOR; }'


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="no CUDA compiler beside torch")
    monkeypatch.setenv("HPCFED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(foreseen, "_codes", {})


def job(factor: str) -> nvrtc.Job:
    return ("f.cu", KERNEL, [*OPTIONS, f"-DFACTOR={factor}"])


def test_other_processes_compile_the_same_code() -> None:
    jobs = {"two": job("2"), "wrong": job("nothing"), "three": job("3")}
    foreseen.begin(jobs, processes=2)
    assert foreseen.take("two") == nvrtc.compile(*jobs["two"])
    assert foreseen.take("three") == nvrtc.compile(*jobs["three"])
    assert foreseen.take("wrong") is None, "whoever needs it gets the error"
    assert foreseen.take("unknown") is None


def test_nobody_waits_for_a_process_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    python = sys.executable
    monkeypatch.setattr("sys.executable", "/no/such/python")
    foreseen.begin({"two": job("2")}, processes=1)
    assert foreseen.take("two") is None
    # A process that never answers.
    monkeypatch.setattr(foreseen, "PATIENCE", 0.01)
    monkeypatch.setattr(foreseen, "_codes", {"late": Future()})
    assert foreseen.take("late") is None
    # Python, but another compiler: its code would be kept under this one's name.
    monkeypatch.setattr("sys.executable", python)
    monkeypatch.setattr(foreseen, "_codes", {})
    monkeypatch.setattr(nvrtc, "version", lambda: [0, 0])
    foreseen.begin({"two": job("2")}, processes=1)
    assert foreseen.take("two") is None


@pytest.mark.parametrize(
    ("name", "shape"),
    [("cnn-pfl", (3, 32, 32)), ("cnn-digits", (1, 8, 8)), ("cnn-cifar", (3, 32, 32))],
)
def test_foreseen_convolutions_are_those_that_a_pass_uses(
    name: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StackedConv2d, "may_use_kernel", lambda self, like: True)
    monkeypatch.setattr(
        convolution, "shared_memory", lambda device: convolution_plan.SHARED
    )
    monkeypatch.setattr(convolution, "has_warp_groups", lambda device: True)
    config = RunConfig(
        dataset="synthetic", synthetic_shape="x".join(map(str, shape)), model=name
    )
    found = []
    for source in foreseeing._layers(config, torch.device("cpu")):
        if source[0] != "few_samples.cu":
            found.append(source)
    network = build(name, shape=shape, classes=10, seed=0)
    stacked = StackedNetwork(network)
    used: list[Any] = []

    def by_kernel(self: StackedConv2d, x: Tensor) -> None:
        layer = self._kernel_layer(x)
        if layer is not None:
            first = not used
            sources = convolution.sources(layer, 0, first=first, bounded=True)
            used.extend(sources)

    monkeypatch.setattr(StackedConv2d, "_by_kernel", by_kernel)
    tensors = {}
    for key, tensor in network.named_parameters():
        of_two = tensor.detach().expand(2, *tensor.shape)
        # Kernels read the weights of convolutions channels-last.
        if tensor.dim() == 4:
            of_two = of_two.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
        tensors[key] = of_two
    stacked(tensors, torch.zeros(2, *shape))
    assert found == used
    assert found, "the network has convolutions that our kernels serve"


@pytest.mark.gpu
@pytest.mark.own_kernels
def test_a_run_uses_all_foreseen_layers_and_compiles_none_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled_here = []
    compile = nvrtc.compile

    def noting(source: str, text: str, options: Sequence[str]) -> bytes:
        compiled_here.append(source)
        return compile(source, text, options)

    monkeypatch.setattr(nvrtc, "compile", noting)
    # As in a new process.
    cuda.compiled.cache_clear()
    convolution._kernel.cache_clear()
    convolution._adding_kernel.cache_clear()
    few_samples._kernel.cache_clear()
    options: dict[str, Any] = {
        "dataset": "synthetic",
        "synthetic_shape": "3x32x32",
        "model": "cnn-pfl",
        "clients": 4,
        "train_per_client": 8,
        "test_per_client": 4,
        "batch_size": 8,
        "rounds": 1,
    }
    hpcfed.run(**options, out=tmp_path / "run", progress=False)
    device = torch.device("cuda", 0)
    foreseen_names = set()
    for source in foreseeing._layers(RunConfig(**options), device):
        name, _ = cuda._job(*source, cuda._architecture(device))
        foreseen_names.add(name)
    # Two convolutions, without the gradient of the images; what adds up parts; and the
    # last layer, each way.
    assert len(foreseen_names) == 6 + 2
    assert foreseen_names <= {path.name for path in (tmp_path / "cache").iterdir()}
    assert not {"convolution.cu", "few_samples.cu"} & set(compiled_here)
