"""GPUs of other makes, played by a module that notes what it is asked for."""

import ctypes
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpcfed.clients.capture import Replays
from hpcfed.clients.lanes import Lanes, take_turns
from hpcfed.errors import UserError
from hpcfed.experiment.opening import _kernels
from hpcfed.runtime import accelerator, energy, graphs, own_kernels
from hpcfed.runtime.device import peak_memory
from hpcfed.runtime.location import Location, choose_device, locate
from hpcfed.runtime.process_group import check_backend, choose_backend, group_backend
from hpcfed.runtime.timer import PHASES, Timer

XPU = torch.device("xpu", 1)


class FakeStream:
    """A queue that knows whom it has waited for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.waited: list[FakeStream] = []

    def wait_stream(self, other: "FakeStream") -> None:
        self.waited.append(other)


class FakeGpu:
    """What `torch.xpu` is, as far as hpcfed asks it; two GPUs with a clock that ticks
    with every event.
    """

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.ticks = 0
        self.current = FakeStream(XPU)
        self.used: list[FakeStream] = []

        fake = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: FakeStream) -> None:
                assert stream is fake.current
                fake.ticks += 1
                self.at = fake.ticks

            def elapsed_time(self, end: Any) -> float:
                return 1000.0 * (end.at - self.at)

        self.Event = Event
        self.Stream = FakeStream

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Note a call that answers nothing."""
        if name.startswith("__") or name == "set_sync_debug_mode":
            raise AttributeError(name)
        return lambda *words: self.asked.append((name, *words))

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def get_device_properties(self, device: torch.device) -> SimpleNamespace:
        name, memory = f"GPU {device.index}", (2 - device.index) * 2**30
        return SimpleNamespace(name=name, total_memory=memory, uuid=f"u{device.index}")

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 5, 9

    def memory_stats_as_nested_dict(self, device: torch.device) -> dict[str, Any]:
        return {"allocated_bytes": {"all": {"peak": 7}}}

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        self.used.append(stream)
        yield
        self.current = before


class FakeGraph:
    """What `torch.accelerator.Graph` is: it replays what was called in a capture."""

    recording: "FakeGraph | None" = None
    pools: list[Any] = []  # noqa: RUF012

    def __init__(self, pool: Any = None) -> None:
        self.given = pool
        self.calls: list[Callable[[], None]] = []

    def capture_begin(self) -> None:
        FakeGraph.recording = self
        FakeGraph.pools.append(self.given)

    def capture_end(self) -> None:
        FakeGraph.recording = None

    def pool(self) -> str:
        return "shared"

    def replay(self) -> None:
        for call in self.calls:
            call()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    fake = FakeGpu()
    monkeypatch.setattr(torch, "xpu", fake)
    monkeypatch.setattr(
        torch.accelerator,
        "current_accelerator",
        lambda check_available=False: torch.device("xpu"),
    )
    monkeypatch.setattr(FakeGraph, "pools", [])
    graphs._has_torch_graphs.cache_clear()
    yield fake
    graphs._has_torch_graphs.cache_clear()


def test_a_gpu_of_another_make_is_found(gpu: FakeGpu) -> None:
    assert accelerator.kind() == "xpu" and accelerator.count() == 2
    assert accelerator.is_gpu(XPU) and accelerator.make_of(XPU) == "Intel"
    assert accelerator.smallest_memory() == 2**30
    assert accelerator.free_memory(XPU) == 5
    assert peak_memory(XPU) == 7
    accelerator.return_memory()
    accelerator.synchronize(XPU)
    accelerator.synchronize(torch.device("cpu"))
    assert gpu.asked == [("empty_cache",), ("synchronize", XPU)]


def test_makes_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.version, "hip", None)
    assert accelerator.make_of(cuda) == "NVIDIA"
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert accelerator.make_of(cuda) == "AMD"
    assert accelerator.make_of(torch.device("cpu")) is None


def test_other_accelerators_are_not_taken_for_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for found in (None, torch.device("mps")):
        monkeypatch.setattr(
            torch.accelerator,
            "current_accelerator",
            lambda check_available=False, found=found: found,
        )
        assert accelerator.kind() is None and accelerator.count() == 0
        assert accelerator.smallest_memory() == 0


def test_a_timer_counts_by_the_gpus_events(gpu: FakeGpu) -> None:
    timer = Timer(XPU)
    with timer.phase("train"):
        pass
    seconds, _ = timer.lap()
    # Four events: begin, train, its end, the round's end.
    assert seconds[PHASES.index("train")] == 1.0
    assert seconds.sum() == gpu.ticks - 1 == 3.0
    assert gpu.asked == [("synchronize", XPU)] * 2


def test_lanes_are_streams_that_wait_for_each_other(gpu: FakeGpu) -> None:
    lanes, here = Lanes(XPU), gpu.current
    seen: list[FakeStream] = []

    def task(number: int) -> Iterator[None]:
        seen.append(gpu.current)
        yield

    with lanes.open(2) as opened:
        take_turns([task] * 2, opened)
    assert len(set(seen)) == 2 and here not in seen
    assert all(stream.waited == [here] for stream in seen)
    assert set(here.waited) == set(seen) and gpu.current is here


def test_steps_are_captured_where_torch_has_graphs(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "Graph", FakeGraph, raising=False)
    done: list[str] = []

    def step() -> None:
        def launch() -> None:
            done.append("step")

        if FakeGraph.recording is None:
            launch()
        else:
            FakeGraph.recording.calls.append(launch)

    replays = Replays(XPU)
    assert replays.captures
    for key in ("a", "a", "a", "b", "b"):
        replays.run(key, step)
    assert len(done) == 5
    # The second graph shares the memory of the first.
    assert FakeGraph.pools == [None, "shared"]
    assert all(stream is not gpu.current for stream in gpu.used)
    replays.forget()
    replays.run("a", step)
    replays.run("a", step)
    assert FakeGraph.pools[2:] == [None]


def test_without_graphs_every_step_is_plain(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> None:
        raise RuntimeError("no graphs for this device")

    monkeypatch.setattr(torch.accelerator, "Graph", refused, raising=False)
    assert not Replays(XPU).captures
    graphs._has_torch_graphs.cache_clear()
    monkeypatch.delattr(torch.accelerator, "Graph")
    assert not Replays(XPU).captures


@pytest.mark.own_kernels
def test_cudas_graphs_are_for_our_kernels_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.version, "hip", None)
    for allowed in (True, False):
        own_kernels.allow(allowed)
        assert graphs.has_cuda_graphs(cuda) == allowed
    own_kernels.allow(True)
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert not graphs.has_cuda_graphs(cuda)
    assert not graphs.can_capture(torch.device("cpu"))


@pytest.mark.own_kernels
def test_a_run_says_that_it_does_without_own_kernels() -> None:
    assert not list(_kernels(torch.device("cpu")))
    (line,) = _kernels(XPU)
    assert "hpcfed's own do not run on this GPU" in line
    own_kernels.allow(False)
    (line,) = _kernels(torch.device("cpu"))
    assert line.startswith("--kernels torch")


def test_ranks_of_a_host_take_its_gpus_in_turn(gpu: FakeGpu) -> None:
    assert [choose_device(wanted, 3) for wanted in ("auto", "xpu")] == [XPU, XPU]
    assert gpu.asked == [("set_device", XPU)] * 2
    assert choose_device("cpu", 3) == torch.device("cpu")
    here = locate(XPU)
    assert (here.device, here.device_name, here.kind) == ("u1", "GPU 1", "xpu")
    assert here.memory == 2**30


def test_a_kind_of_gpu_that_is_missing_is_named(gpu: FakeGpu) -> None:
    with pytest.raises(UserError, match="--device cuda, but torch finds no CUDA dev"):
        choose_device("cuda", 0)
    with pytest.raises(UserError, match="no CUDA device with NCCL; use --backend gloo"):
        check_backend("nccl")
    check_backend("gloo")


def test_collectives_are_those_of_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (Location("a", 1, name, name, (), kind="xpu") for name in "xy")
    other = Location("b", 1, "z", "z", (), kind="cuda")
    assert choose_backend((first, second)) == (
        "xccl",
        "every rank has a GPU of its own",
    )
    assert choose_backend((first, first))[0] == "gloo"
    assert "--backend xccl asks for it" in choose_backend((first, first))[1]
    assert choose_backend((first, first), "xccl")[0] == "xccl"
    assert choose_backend((first, other)) == (
        "gloo",
        "ranks have GPUs of different kinds",
    )
    assert group_backend((first,), "auto") == "xccl"
    with pytest.raises(UserError, match="--backend nccl needs a GPU on every rank"):
        choose_backend((first, second), "nccl")


def test_amds_gpus_are_known_by_their_address(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=2, uuid="u")
    monkeypatch.setattr(accelerator, "properties", lambda device: found)
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.version, "hip", None)
    assert accelerator.unique_id(cuda) == "u"
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert accelerator.unique_id(cuda) == "0000:c1:02.0"


@pytest.fixture
def no_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries of counters cannot be imported."""
    for name in ("pynvml", "amdsmi", "pyzes"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.usefixtures("no_counters")
def test_energy_is_unknown_without_a_library() -> None:
    assert math.isnan(energy.joules("0000:c1:02.0"))


@pytest.mark.usefixtures("no_counters")
@pytest.mark.parametrize("key", ["energy_accumulator", "power"])
def test_energy_of_amds_gpus(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {1: "0000:C1:00.0", 2: "0000:C1:02.0"}
    # A unit is 15.3 microjoules.
    counts = {1: 10, 2: 2_000_000}
    library = SimpleNamespace(
        amdsmi_init=lambda: None,
        amdsmi_get_processor_handles=lambda: [1, 2],
        amdsmi_get_gpu_device_bdf=addresses.get,
        amdsmi_get_energy_count=lambda handle: {
            key: counts[handle],
            "counter_resolution": 15.3,
        },
    )
    monkeypatch.setitem(sys.modules, "amdsmi", library)
    assert energy.joules("0000:c1:02.0") == pytest.approx(30.6)
    assert math.isnan(energy.joules("0000:c1:03.0"))


@pytest.mark.usefixtures("no_counters")
@pytest.mark.parametrize("refused", [False, True])
def test_energy_of_intels_gpus(
    refused: bool, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Counter(ctypes.Structure):
        _fields_ = [("energy", ctypes.c_uint64)]

    def read(handle: str, counter: Any) -> int:
        assert handle == "handle 1"
        counter._obj.energy = 7_500_000
        return int(refused)

    library = SimpleNamespace(
        zes_power_energy_counter_t=Counter, zesPowerGetEnergyCounter=read
    )
    monkeypatch.setitem(sys.modules, "pyzes", library)
    properties = gpu.get_device_properties
    by_number = {at: properties(torch.device("xpu", at)) for at in range(2)}
    monkeypatch.setattr(gpu, "get_device_properties", by_number.get)
    monkeypatch.setattr(
        gpu, "_get_zes_power_handle", lambda at: f"handle {at}", raising=False
    )
    found = energy.joules("u1")
    assert math.isnan(found) if refused else found == 7.5
