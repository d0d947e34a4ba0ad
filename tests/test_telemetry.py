"""Telemetry: what counters say over time, recorded, resumed and shown."""

import csv
import ctypes
import json
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import h5py
import numpy as np
import pytest
import torch

from hpcfed import cli
from hpcfed.analysis.run_findings.machine import machine_text, of_machine
from hpcfed.results.run import RunRecord
from hpcfed.results.safe import Reader
from hpcfed.results.signs import RunSign, leave_sign, read_sign
from hpcfed.results.stored import read_details, read_run
from hpcfed.results.telemetry import Telemetry, TelemetryGroup, joined, telemetry_of
from hpcfed.runtime import energy, host_counters
from hpcfed.runtime.gpu_counters import GpuCounters, gpu_counters, told
from hpcfed.runtime.history import MOST, History, Series
from hpcfed.runtime.location import Location, locate
from hpcfed.runtime.telemetry import (
    SHARE,
    GpuSource,
    HostSource,
    ProcessSource,
    SampledSource,
    Sampler,
    Values,
    sampling,
    sources_of,
)
from hpcfed.runtime.world import World
from tests.runs import flags, mistake, one_reading, started
from tests.test_accelerator import FakeGpu, gpu, no_counters  # noqa: F401

POWER = Series("gpu_power", "0")
ROUND_OFF = 2.0**-52


class Driver:
    """An NVML with one GPU that counts who asks it for what."""

    NVML_TEMPERATURE_GPU = 0

    def __init__(self) -> None:
        self.millijoules = 1_000_000
        self.asked: list[str] = []

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:
        assert name == "GPU-u0"
        return "handle"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        self.asked.append("energy")
        return self.millijoules

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        self.asked.append("busy")
        return SimpleNamespace(gpu=37)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        self.asked.append("memory")
        return SimpleNamespace(used=5 * 2**30)

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        self.asked.append("temperature")
        return 61


class Clock:
    """A clock that only tests turn."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def counters() -> GpuCounters:
    """Return the counters of the GPU that tests know."""
    found = gpu_counters("u0")
    assert found is not None
    return found


def written(histories: list[History]) -> Telemetry:
    """Return what a reader finds of these histories."""
    with h5py.File("telemetry", "w", driver="core", backing_store=False) as file:
        TelemetryGroup(file).write(histories, 1e9)
        found = telemetry_of(Reader(file, [2**30]))
    assert found is not None
    return found


def energy_of(telemetry: Telemetry) -> float:
    """Return the integral of power over time."""
    power = telemetry.figures["gpu_power"][:, 0]
    return float((power * telemetry.moments["seconds"]).sum())


def test_a_reading_is_shared_out_among_moments() -> None:
    history = History([POWER, Series("gpu_busy", "0")], 1.0, most=4)
    history.add(0.0, 1.5, np.array([2.0, np.nan]), rounds=0)
    history.add(1.5, 2.0, np.array([4.0, 0.5]), rounds=3)
    assert history.means()[:2, 0].tolist() == [2.0, 3.0]
    np.testing.assert_array_equal(history.means()[:2, 1], [np.nan, 0.5])
    assert history.seconds[:2].tolist() == [1.0, 1.0]
    # A fifth second: neighbours are merged, and nothing of them is lost.
    history.add(2.0, 4.5, np.array([1.0, 1.0]), rounds=7)
    assert history.step == 2.0
    assert history.means()[:, 0].tolist() == [2.5, 1.0, 1.0]
    assert history.seconds.tolist() == [2.0, 2.0, 0.5]
    assert history.rounds.tolist() == [3.0, 7.0, 7.0]
    assert history.sums[:, 0].sum() == 2.0 * 1.5 + 4.0 * 0.5 + 1.0 * 2.5


def test_power_adds_up_to_the_counter_of_energy(driver: Driver) -> None:
    """Whatever the times of the readings, and however often moments are merged."""
    clock, used = Clock(), 0
    sampler = Sampler([GpuSource(0, counters())], 1.0, clock=clock)
    draws = np.random.default_rng(1)
    looks = 3 * MOST
    for length, power in draws.uniform([0.3, 60.0], [1.9, 700.0], (looks, 2)):
        clock.now += length
        growth = int(1000 * length * power)
        driver.millijoules += growth
        used += growth
        sampler.look()
    history = sampler.history()
    assert history.step == 4.0 and len(history.seconds) <= MOST
    assert history.rounds[-1] == 0
    sampler.note_rounds(5)
    assert sampler.history().rounds[-2:].tolist() == [0, 5]
    sums = float(history.sums[:, history.series.index(POWER)].sum())
    # Each reading is rounded a few times, and all terms are positive.
    assert sums == pytest.approx(used / 1e3, rel=10 * looks * ROUND_OFF)
    telemetry = written([history])
    # The file has short floats.
    assert energy_of(telemetry) == pytest.approx(used / 1e3, rel=2.0**-23)
    assert telemetry.figures["gpu_busy"].max() == np.float32(0.37)
    assert telemetry.moments["seconds"].sum() == pytest.approx(clock.now - 100.0)


def test_a_reading_is_a_fixed_number_of_calls(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened: list[str] = []
    watching = [False]

    def hook(event: str, words: tuple[Any, ...]) -> None:
        if watching[0] and event in ("open", "os.listdir", "os.scandir"):
            opened.append(str(words[0]))

    sys.addaudithook(hook)
    clock = Clock()
    every: list[SampledSource] = [
        GpuSource(0, counters()), ProcessSource(0), HostSource("a"),
    ]  # fmt: skip
    sampler = Sampler(every, 1.0, clock=clock)
    driver.asked.clear()
    watching[0] = True
    for _ in range(10):
        clock.now += 1
        sampler.look()
    watching[0] = False
    assert len(driver.asked) == 40
    # Of the process its memory; of the host cores, memory, interfaces, and InfiniBand.
    folders = [name for name in opened if "infiniband" in name]
    assert len(opened) - len(folders) <= 40
    assert sampler.pause_after(0.01) == pytest.approx(0.01 / SHARE)
    assert sampler.pause_after(0.0) == 1.0


def test_a_long_run_stays_small() -> None:
    """Twelve hours: few moments, few times that ranks send them."""
    clock = Clock()
    sampler = Sampler([ProcessSource(0)], 10.0, clock=clock)
    collected = 0
    for round in range(4320):
        clock.now += 10
        sampler.look()
        answer = sampler.is_due(round)
        assert sampler.is_due(round) == answer, "for the other runs of a stack"
        collected += answer
    history = sampler.history()
    assert history.step == 80.0 and len(history.seconds) == 540
    # MOST / 10 until moments are merged the first time, then half as many each time.
    assert collected <= MOST // 10 + 3 * MOST // 20 + 3


def test_what_a_driver_does_not_tell_is_unknown(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise OSError("not supported")

    monkeypatch.setattr(driver, "nvmlDeviceGetTemperature", refused)
    clock = Clock()
    sampler = Sampler([GpuSource(0, counters())], 1.0, clock=clock)
    for millijoules in (1_300_000, 5):
        clock.now += 1
        driver.millijoules = millijoules
        sampler.look()
    telemetry = written([sampler.history()])
    assert "gpu_temperature" not in telemetry.figures
    # The counter was reset: that second is unknown.
    np.testing.assert_array_equal(telemetry.figures["gpu_power"], [[300.0], [np.nan]])


@pytest.mark.usefixtures("no_counters")
def test_amds_gpus_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = SimpleNamespace(VRAM="vram", JUNCTION="junction", CURRENT="current")
    answers = {"vram": 7.0, ("junction", "current"): 55}
    library = SimpleNamespace(
        amdsmi_init=lambda: None,
        amdsmi_get_processor_handles=lambda: [1],
        amdsmi_get_gpu_device_bdf=lambda handle: "0000:C1:00.0",
        amdsmi_get_gpu_activity=lambda handle: {"gfx_activity": "N/A"},
        amdsmi_get_gpu_memory_usage=lambda handle, kind: answers[kind],
        amdsmi_get_temp_metric=lambda handle, *which: answers[which],
        AmdSmiMemoryType=kinds,
        AmdSmiTemperatureType=kinds,
        AmdSmiTemperatureMetric=kinds,
    )
    monkeypatch.setitem(sys.modules, "amdsmi", library)
    found = gpu_counters("0000:c1:00.0")
    assert found is not None
    assert (found.memory(), found.temperature()) == (7.0, 55.0)
    assert np.isnan(told(found.busy)) and np.isnan(told(found.joules))


@pytest.mark.usefixtures("no_counters")
def test_intels_gpus_are_asked(
    gpu: FakeGpu,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pyzes", SimpleNamespace(c=ctypes))
    properties = gpu.get_device_properties
    by_number = {at: properties(torch.device("xpu", at)) for at in range(2)}
    monkeypatch.setattr(gpu, "get_device_properties", by_number.get)
    monkeypatch.setattr(gpu, "utilization", lambda at: 25.0 * at, raising=False)
    monkeypatch.setattr(gpu, "temperature", lambda at: 40.0 + at, raising=False)
    found = gpu_counters("u1")
    assert found is not None
    assert (found.busy(), found.memory(), found.temperature()) == (0.25, 4.0, 41.0)


def proc(folder: Path, *, worked: int = 0, moved: int = 0) -> Path:
    """Write what Linux tells of a host that has worked for some hundredths of a second,
    and moved some bytes.
    """
    (folder / "net").mkdir(exist_ok=True)
    (folder / "self").mkdir(exist_ok=True)
    ticks = [worked, 20, 30, 9999, 999, 4, 5, 6, 7, 8]
    (folder / "stat").write_text(f"cpu  {' '.join(map(str, ticks))}\ncpu0 1 2 3\n")
    (folder / "meminfo").write_text("MemTotal: 900 kB\nMemAvailable:   400 kB\n")
    (folder / "self" / "statm").write_text("50 3 2 1 0 4 0\n")
    lines = ["Inter-| Receive | Transmit", " face |bytes packets"]
    for name, received, sent in (("lo", 8, 8), ("eth0", 100 + moved, 50), ("d", 0, 0)):
        lines.append(f"  {name}:{received} 1 0 0 0 0 0 0 {sent} 1 0 0 0 0 0 0")
    (folder / "net" / "dev").write_text("\n".join(lines) + "\n")
    return folder


def test_a_host_is_read_as_linux_counts(tmp_path: Path) -> None:
    folder = proc(tmp_path, worked=100)
    ticks = 100 + 20 + 30 + 4 + 5
    hertz = host_counters.os.sysconf("SC_CLK_TCK")
    assert host_counters.host_cpu(folder) == ticks / hertz
    assert host_counters.host_memory(folder) == 500 * 1024
    page = host_counters.os.sysconf("SC_PAGE_SIZE")
    assert host_counters.process_memory(folder) == 3 * page
    port = tmp_path / "ib" / "mlx5_0" / "ports" / "1" / "counters"
    port.mkdir(parents=True)
    (port / "port_rcv_data").write_text("1000\n")
    (port / "port_xmit_data").write_text("250\n")
    moved = host_counters.traffic(folder, tmp_path / "ib")
    assert moved == {
        "lo": (8.0, 8.0), "eth0": (100.0, 50.0), "d": (0.0, 0.0),
        "mlx5_0/1": (4000.0, 1000.0),
    }  # fmt: skip
    assert host_counters.busiest(moved) == ["mlx5_0/1", "eth0", "lo"]


def test_a_host_without_proc_tells_nothing(tmp_path: Path) -> None:
    assert host_counters.host_cpu(tmp_path) is None
    assert host_counters.host_memory(tmp_path) is None
    assert host_counters.process_memory(tmp_path) is None
    assert host_counters.traffic(tmp_path, tmp_path) == {}


def test_rates_are_growth_by_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hertz = host_counters.os.sysconf("SC_CLK_TCK")
    now = {"worked": 0, "moved": 0}
    real, real_traffic = host_counters.host_cpu, host_counters.traffic
    monkeypatch.setattr(host_counters, "host_cpu", lambda: real(proc(tmp_path, **now)))
    monkeypatch.setattr(
        host_counters, "traffic", lambda: real_traffic(proc(tmp_path, **now), tmp_path)
    )
    clock = Clock()
    sampler = Sampler([ProcessSource(0), HostSource("a")], 1.0, clock=clock)
    clock.now += 2
    now |= {"worked": 3 * hertz, "moved": 400}
    sampler.look()
    telemetry = written([sampler.history()])
    assert telemetry.owners["link"] == ["a eth0", "a lo"]
    assert telemetry.figures["host_cpu"].tolist() == [[1.5], [1.5]]
    assert telemetry.figures["received"].tolist() == [[200.0, 0.0]] * 2
    assert telemetry.figures["sent"].tolist() == [[0.0, 0.0]] * 2


def test_what_is_shared_is_read_once(driver: Driver) -> None:
    """Hosts x, x, y, x; the first two ranks share a GPU, the last has none."""
    places = (("x", "u0"), ("x", "u0"), ("y", "u0"), ("x", "cpu"))
    locations = [Location(host, 0, device, "", ()) for host, device in places]
    kinds = []
    for rank, location in enumerate(locations):
        world = SimpleNamespace(rank=rank, locations=locations, location=location)
        kinds.append([type(one) for one in sources_of(cast(World, world))])
    whole = [ProcessSource, HostSource, GpuSource]
    assert kinds == [whole, [ProcessSource], whole, [ProcessSource]]


def history_of(step: float, values: dict[Series, list[float]]) -> History:
    """Return a history with a value for each moment."""
    history = History(list(values), step)
    for moment, row in enumerate(zip(*values.values(), strict=True)):
        begin, end = moment * step, (moment + 1) * step
        history.add(begin, end, np.array(row), rounds=moment + 1)
    return history


def test_ranks_are_joined_and_resumed_elsewhere() -> None:
    first = history_of(1.0, {
        Series("process_cpu", "0"): [1.0, 3.0, 5.0, 7.0], Series("host_cpu", "a"): [2.0] * 4,
    })  # fmt: skip
    # This rank has merged its moments already.
    second = history_of(2.0, {Series("process_cpu", "1"): [4.0]})
    whole = joined([first, second], 1000.0)
    assert whole is not None
    np.testing.assert_array_equal(
        whole.figures["process_cpu"], [[2.0, 4.0], [6.0, np.nan]]
    )
    assert whole.moments["began"].tolist() == [1000.0, 1002.0]
    assert whole.moments["rounds"].tolist() == [2.0, 4.0]

    # Two of the four rounds are in the checkpoint; one rank goes on, on another host.
    name = "resumed"
    with h5py.File(name, "w", driver="core", backing_store=False) as old:
        group = TelemetryGroup(old)
        group.write([first, second], 1000.0)
        with h5py.File("new", "w", driver="core", backing_store=False) as file:
            now = TelemetryGroup(file)
            now.restore(Reader(old, [2**30]), rounds=2)
            third = history_of(1.0, {
                Series("process_cpu", "0"): [9.0], Series("host_cpu", "b"): [8.0],
            })  # fmt: skip
            now.write([third], 1100.0)
            found = telemetry_of(Reader(file, [2**30]))
    assert found is not None
    assert found.owners["host"] == ["a", "b"]
    np.testing.assert_array_equal(
        found.figures["process_cpu"], [[2.0, 4.0], [9.0, np.nan]]
    )
    np.testing.assert_array_equal(
        found.figures["host_cpu"], [[2.0, np.nan], [np.nan, 8.0]]
    )
    assert found.moments["part"].tolist() == [0.0, 1.0]
    record = SimpleNamespace(environment={"ranks": [{"device": "cpu"}]})
    (table,) = of_machine(cast(RunRecord, record), found)
    assert "a gap of 98 s after round 2, until resumed" in table.caption
    assert "figures of GPUs (no rank has one)" in table.caption
    assert "traffic of networks (/proc/net/dev" in table.caption
    assert table.texts[1][1:] == ["9.00", "8.00"]


def test_many_parts_stay_few_moments() -> None:
    """Merging keeps the energy, and never joins what a gap separates."""
    values = {POWER: [float(10 + moment % 7) for moment in range(41)]}
    found: Telemetry | None = None
    for part in range(3):
        now = joined([history_of(1.0, values)], 1000.0 * part, part=part)
        assert now is not None
        found = now if found is None else found.then(now)
    assert found is not None
    thin = found.thinned(70)
    assert len(thin) == 3 * 21
    assert np.diff(thin.moments["part"]).tolist().count(1.0) == 2
    assert energy_of(thin) == pytest.approx(energy_of(found), rel=123 * ROUND_OFF)


WAITING = {"clients": 3, "simulate_training": "20ms", "telemetry": 0.1}


def test_a_run_records_and_shows_what_the_machine_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = started(*flags(rounds=20, out=tmp_path / "run", **WAITING))
    before = read_details(folder).telemetry
    assert before is not None
    assert {"process_cpu", "process_memory"} <= before.figures.keys()
    assert before.moments["rounds"][-1] == 20
    assert not _sampling_threads()

    # It goes on behind what it has sampled.
    started("--resume", folder, "--rounds", 40, "--device", "cpu")
    after = read_details(folder).telemetry
    assert after is not None
    assert np.unique(after.moments["part"]).tolist() == [0.0, 1.0]
    assert after.moments["rounds"][-1] > 20
    assert len(after) > len(before) - 1
    capsys.readouterr()
    cli.main(["show", str(folder)])
    said = capsys.readouterr().out
    assert "the machine" in said and "after round 20, until resumed" in said
    page, table = tmp_path / "page.html", tmp_path / "runs.csv"
    cli.main(["report", str(folder), "--out", str(page), "--csv", str(table)])
    assert "What the machine did" in page.read_text()
    with open(tmp_path / "runs-telemetry.csv") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(after) * sum(map(len, after.owners.values()))
    told = [line for line in lines if line["of"] == "rank"]
    assert told[0]["process_memory"] == f"{after.of('process_memory')[0, 0]:.6g}"
    assert {line["sent"] for line in told} == {""}

    # A damaged group is left out, and nothing else.
    with h5py.File(folder / "run.h5", "r+") as file:
        file["telemetry/began"][0] = np.nan
    capsys.readouterr()
    cli.main(["show", str(folder)])
    said = capsys.readouterr().out
    assert "left out" in said and "telemetry/began" in said
    assert "the machine" not in said


def test_runs_that_advance_together_share_what_is_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcfed.experiment.run.sampling", one_reading)
    folder = started(*flags(clients=2, rounds=2, seeds="1,2", out=tmp_path / "run"))
    found = [read_details(folder / f"seed-{seed}").telemetry for seed in (1, 2)]
    for telemetry in found:
        assert telemetry is not None
        assert telemetry.moments["began"][0] == found[0].moments["began"][0]
    assert not _sampling_threads()


def test_sampling_can_be_switched_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    waiting = {**WAITING, "telemetry": 0}
    folder = started(*flags(rounds=8, out=tmp_path / "run", **waiting))
    assert read_details(folder).telemetry is None
    assert read_run(folder).config["telemetry"] == 0
    capsys.readouterr()
    said = mistake(capsys, "run", "--telemetry", "0.01")
    assert "--telemetry 0.01: from 0.1 seconds on, or 0" in said
    # No clock waits for so long.
    assert "--telemetry 1e37" in mistake(capsys, "run", "--telemetry", "1e37")


def _sampling_threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name == "telemetry"]


def test_a_hanging_driver_does_not_hold_up_the_end() -> None:
    reached, release = threading.Event(), threading.Event()

    class Hanging:
        def counters(self) -> Values:
            return {}

        def gauges(self) -> Values:
            if reached.is_set():
                release.wait(20)
            reached.set()
            return {POWER: 1.0}

    world = cast(World, SimpleNamespace(role_barrier=lambda: None))
    begin = time.monotonic()
    with sampling(world, 0.1, lambda _: [Hanging()]) as sampler:
        assert sampler is not None
        # The thread hangs in its first reading; what was read so far is there.
        assert len(sampler.history().seconds) == 0
    assert time.monotonic() - begin < 15
    release.set()


def test_a_sign_of_life_says_what_the_machine_does(tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    machine = {"gpu_busy": 0.937, "gpu_power": None, "host_cpu": 3.5, "other": 1.0}
    leave_sign(path, RunSign("train", 1.0, machine))
    sign = read_sign(path, RunSign)
    assert sign is not None
    assert machine_text(sign) == "rank 0: GPU at work 93.7% · cores of a host 3.50"
    path.write_text(json.dumps({"phase": "train", "seconds": 1.0}))
    older = read_sign(path, RunSign)
    assert older is not None and machine_text(older) == ""


@pytest.mark.gpu
def test_a_real_gpu_is_sampled() -> None:
    device = torch.device("cuda", 0)
    here = locate(device)
    world = cast(World, SimpleNamespace(rank=0, locations=(here,), location=here))
    bounds = [energy.joules(here.device)]
    sampler = Sampler(sources_of(world), 0.1)
    bounds.append(energy.joules(here.device))
    factor = torch.rand(4096, 4096, device=device)
    for _ in range(10):
        end = time.monotonic() + 0.1
        while time.monotonic() < end:
            factor @ factor
            torch.cuda.synchronize()
        last = energy.joules(here.device)
        sampler.look()
    bounds.append(energy.joules(here.device))
    history = sampler.history()
    telemetry = written([history])
    # The first reading lies between the first two of ours, the last between the others.
    least, most = last - bounds[1], bounds[2] - bounds[0]
    assert least * (1 - 2.0**-22) <= energy_of(telemetry) <= most * (1 + 2.0**-22)
    assert telemetry.figures["gpu_busy"].max() > 0.5
    assert telemetry.figures["gpu_memory"].min() >= factor.nbytes
    assert 10 < telemetry.figures["gpu_temperature"].max() < 120
