"""Where the time goes: timelines of real ranks, sums of operators by hand, and verdicts
at their limits.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from math import isnan, sqrt
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpcfed.analysis.render.console import Output
from hpcfed.plan.speeds import Ceilings
from hpcfed.profile import watch as watching
from hpcfed.profile.profile_run import print_verdicts, short_name
from hpcfed.profile.timeline import Timeline, trace
from hpcfed.profile.verdict import Workload, advice, busy, words
from hpcfed.profile.watch import Event, covered, operators
from hpcfed.results.profiles import Ceiling, Profile, Session
from hpcfed.results.stored import read_run
from hpcfed.runtime.timer import PHASES, Observer, observed_by, observer
from tests.conftest import Finished
from tests.runs import mistake

QUICK = [
    "--clients",
    6,
    "--model",
    "mlp",
    "--epochs",
    1,
    "--rounds",
    6,
    "--bank-rounds",
    2,
    "--method",
    "pfedgpa",
]
QUICK += [
    "--server",
    "small",
    "--autoencoder-samples",
    200,
    "--denoiser-samples",
    200,
    "--server-batch",
    20,
]


@pytest.fixture(scope="module")
def profiled(
    tmp_path_factory: pytest.TempPathFactory, mpirun: Callable[..., Finished]
) -> tuple[Path, str]:
    """One rank with clients and one of the server."""
    out = tmp_path_factory.mktemp("profile") / "run"
    words = [
        "-m",
        "hpcfed",
        "profile",
        *QUICK,
        "--server-ranks",
        1,
        "--profile-rounds",
        2,
        "--out",
        out,
    ]
    result = mpirun(2, *words)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr and "ERROR" not in result.stderr, (
        result.stderr
    )
    return out, result.stdout


def slices(
    events: list[dict[str, Any]], *, rank: int, category: str
) -> list[dict[str, Any]]:
    return [
        e
        for e in events
        if e["ph"] == "X" and e["pid"] == rank and e["cat"] == category
    ]


def test_the_trace_has_all_ranks(profiled: tuple[Path, str]) -> None:
    folder, _ = profiled
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(named) == [0, 1]
    assert "worker" in named[0] and "server" in named[1]
    record = read_run(folder)
    own = slices(events, rank=0, category="phases")
    assert {e["name"] for e in own} >= {
        "sample",
        "train",
        "aggregate",
        "evaluate",
        "server",
        "other",
    }
    for number, phase in enumerate(PHASES):
        drawn = sum(e["dur"] for e in own if e["name"] == phase) / 1e6
        assert drawn == pytest.approx(record.phases[:, 0, number].sum(), abs=1e-3), (
            phase
        )
    assert slices(events, rank=0, category="operators")
    spans = slices(events, rank=1, category="server")
    assert {"autoencoder", "encode", "denoiser", "invert"} <= {e["name"] for e in spans}
    learning = next(e for e in spans if e["name"] == "autoencoder")
    inside = [
        e
        for e in slices(events, rank=1, category="operators")
        if e["name"].startswith("aten::convolution")
    ]
    assert inside, "the server's steps are looked at, not only rounds"
    ends = learning["ts"], spans[-1]["ts"] + spans[-1]["dur"]
    assert all(ends[0] <= e["ts"] <= ends[1] for e in inside), (
        "operators lie within the server's spans"
    )
    memory = [e for e in events if e["ph"] == "C"]
    assert {e["pid"] for e in memory} == {0, 1} and all(
        e["args"]["MiB"] > 10 for e in memory
    )
    assert all(e["ts"] >= 0 and e.get("dur", 0) >= 0 for e in events if e["ph"] != "M")


def test_what_is_told(profiled: tuple[Path, str]) -> None:
    folder, said = profiled
    for expected in (
        "seconds of the start", "seconds by phase", "rank 0", "the server's seconds", "operators in 2 rounds",
        "operators in 2 steps of the autoencoder", "operators in 2 steps of the denoiser", "cpu, measured: float32",
        "TFLOP/s", "GB/s", "MFU", "most memory: ", "trace.json",
    ):  # fmt: skip
        assert expected in said, expected
    assert "No round was profiled" not in said
    for part in ("clients' training", "autoencoder", "denoiser"):
        assert f"{part} is " in said
    content = json.loads(
        (folder / "profile.json").read_text(),
        parse_constant=lambda word: pytest.fail(word),
    )
    assert [line["role"] for line in content["ranks"]] == ["worker", "server"]
    assert [s["name"] for s in content["ranks"][1]["sessions"]] == [
        "autoencoder",
        "denoiser",
    ]
    assert [(s["name"], s["number"]) for s in content["ranks"][0]["sessions"]] == [
        ("rounds", 2)
    ]
    for part in content["parts"]:
        assert (
            0 < part["busy"] <= 1
            and 0 < part["compute"] < 1
            and 0 < part["bandwidth"] < 1
        ), part
        assert part["words"].startswith(f"{part['name']} is {part['bound']}")
    assert all(seconds >= 0 for seconds in content["server"][0]["seconds"].values())


def test_what_the_denoiser_moves_by_hand(profiled: tuple[Path, str]) -> None:
    """200 samples in 10 steps: of every parameter ten floats a step, and of every
    activation ten a sample.
    """
    folder, _ = profiled
    content = json.loads((folder / "profile.json").read_text())
    part = next(part for part in content["parts"] if part["name"] == "denoiser")
    parameters = read_run(folder).learnings[0].parameters["denoiser"]
    activations = (4 + 8 + 16 + 8 + 4) * 32
    expected = 40 * parameters * 10 + 40 * activations * 200
    moved = (
        part["bandwidth"]
        * part["warm"]
        * content["ceilings"]["float32"]["bytes_per_second"]
    )
    assert moved == pytest.approx(expected)


def test_a_run_that_is_there_is_not_profiled_over(
    profiled: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "a profile follows a run from its start" in mistake(
        capsys, "profile", "--resume", profiled[0]
    )


def test_long_names_leave_room_for_numbers() -> None:
    assert short_name("void at::native::reduce_kernel<4>") == "reduce_kernel<4>"
    assert (
        len(
            short_name(
                "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64"
            )
        )
        == 42
    )


def test_alone_and_without_a_server(tmp_path: Path, hpcfed: Callable) -> None:
    out = tmp_path / "run"
    words_ = ["--clients", 4, "--model", "mlp", "--rounds", 1, "--out", out]
    result = hpcfed("profile", *words_)
    assert result.returncode == 0, result.stderr
    assert "the server's" not in result.stdout and "clients' training" in result.stdout
    assert "No round was profiled by kernel" in result.stdout
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {0}
    record = read_run(out)
    assert record.status == "complete"
    assert record.starting["start_imports"] > record.starting["start_network"] > 0
    assert record.starting["compiled"] == 0, "CUDA's kernels are not for CPUs"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("profile --rouns 3", "unknown option --rouns; did you mean '--rounds'?"),
        ("profile --profile-rounds 0", "--profile-rounds"),
        ("profile --method fedagv", "did you mean 'fedavg'?"),
        ("profile --seeds 0,1", "a profile takes one seed; use --seed"),
    ],
)
def test_a_mistake_is_one_line(
    said: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert expected in mistake(capsys, *said.split())


def test_operators_count_without_what_they_call() -> None:
    events = [
        Event("outer", 0, 100, "a"), Event("inner", 10, 30, "a"), Event("leaf", 15, 5, "a"),
        Event("inner", 50, 20, "a"), Event("outer", 100, 10, "a"), Event("leaf", 20, 7, "b"),
    ]  # fmt: skip
    found = {
        one.name: (round(1e9 * one.seconds), one.calls) for one in operators(events)
    }
    assert found == {
        "outer": (100 - 30 - 20 + 10, 2),
        "inner": (30 - 5 + 20, 2),
        "leaf": (5 + 7, 2),
    }
    assert [one.name for one in operators(events)] == ["outer", "inner", "leaf"]


def test_the_pace_is_of_steps_after_the_profilers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr(
        watching, "time", SimpleNamespace(perf_counter=lambda: clock[0])
    )
    watch = watching.ProfileWatch(warmup=2, active=3, rounds=1, nvtx=False)
    watch.device, watch.timeline, watch._base = (
        torch.device("cpu"),
        Timeline(0, "server", "host", "cpu"),
        0.0,
    )
    with watch.span("denoiser"):
        for done in range(1, 11):
            clock[0] += (
                100 if done == 1 else 10 if done <= 5 else 2
            )  # captured, seen, alone
            watch.step("denoiser", done, 10)
    assert watch.timeline.paces == {"denoiser": 2.0}
    with watch.span("autoencoder"):
        watch.step("autoencoder", 1, 1)
    assert watch._open is None, "too short to look at"
    with watch.span("encoder"):
        for done in (1, 2, 3):
            watch.step("encoder", done, 3)
        assert watch._open is None, (
            "what comes after the last step is not the network's"
        )
    assert watch.timeline.paces.keys() == {"denoiser"} and [
        one.name for one in watch._closed
    ] == ["denoiser", "encoder"]


def test_a_gpu_is_as_busy_as_without_the_profiler() -> None:
    """Three steps whose kernels took 3 s in all, in 12 s with the profiler; without it
    steps take 1.25 s, or 0.5.
    """
    line, other = (
        Timeline(0, "server", "host", "gpu"),
        Timeline(1, "server", "host", "gpu"),
    )
    for each, pace in ((line, 1.25), (other, 0.5)):
        session = Session(
            name="denoiser", number=3, seconds=12.0, busy=0.25, operators=[]
        )
        each.sessions.append(session)
        each.paces["denoiser"] = pace
    assert busy([line], "denoiser", cuda=True) == pytest.approx(0.8)
    assert busy([line, other], "denoiser", cuda=True) == 1.0, "not more than always"
    assert busy([line], "denoiser", cuda=False) == 0.25, (
        "there the profiler slows the work itself"
    )
    assert isnan(busy([line], "autoencoder", cuda=True))


def test_busy_time_counts_once() -> None:
    assert covered([(0, 2), (1, 3), (5, 6), (5.5, 5.7)]) == pytest.approx(4)
    assert covered([]) == 0


def test_a_trace_of_nothing_is_a_trace() -> None:
    events = trace([Timeline(3, "worker", "here", "cpu")])["traceEvents"]
    assert [e["name"] for e in events] == ["process_name", "process_sort_index"]


@pytest.mark.parametrize(
    ("busy", "compute", "bandwidth", "expected"),
    [
        (0.49, 0.9, 0.9, "launch-bound"),
        (0.51, 0.7, 0.4, "compute-bound"),
        (0.51, 0.4, 0.7, "bandwidth-bound"),
        (0.99, 0.34, 0.59, "at no ceiling"),
        (float("nan"), 0.7, float("nan"), "compute-bound"),
        (float("nan"), 0.3, float("nan"), "at no ceiling"),
        (float("nan"), float("nan"), float("nan"), "not known"),
    ],
)
def test_verdicts(busy: float, compute: float, bandwidth: float, expected: str) -> None:
    part = Workload("it", 1.0, 1.0, busy, compute, bandwidth)
    assert part.bound == expected
    for cuda in (True, False):
        assert "nan" not in words(part, cuda=cuda)
        for server in (True, False):
            tips = advice(part, {}, cuda=cuda, server=server)
            assert bool(tips) == (expected != "not known"), "what to try"


def test_nothing_is_bound_by_a_ceiling_that_varies() -> None:
    """A ceiling that others have pushed down is near whatever is done."""
    part = Workload("it", 1.0, 1.0, 0.9, 0.8, 0.1, variation=0.11)
    assert part.bound == "near a ceiling that varies"
    assert "vary by 11%" in words(part, cuda=False)
    assert "measure again" in advice(part, {}, cuda=False, server=True)[-1]
    assert replace(part, variation=0.1).bound == "compute-bound"


def test_a_ceiling_is_the_best_of_its_trials_and_tells_how_they_vary() -> None:
    """Copies of 1, 1 and 4 s: their mean is 2, and their standard deviation √3."""
    found = Ceilings.of_trials([4.0, 1.0, 1.0], [2.0] * 3, moved=10.0, arithmetic=6.0)
    assert (found.bytes_per_second, found.flops) == (10.0, 3.0)
    assert found.variation == pytest.approx(sqrt(3) / 2)


@pytest.mark.parametrize("variation", [0.09, 0.11])
def test_ceilings_that_vary_are_warned_of(
    variation: float, capsys: pytest.CaptureFixture[str]
) -> None:
    ceiling = Ceiling(bytes_per_second=1e9, flops=1e12, variation=variation)
    profile = Profile(device="cpu", ceilings={"float32": ceiling}, parts=[], ranks=[])
    print_verdicts(Output(), profile)
    said = capsys.readouterr().out
    assert f"vary by {variation:.1%}" in said
    assert ("The machine was not quiet" in said) == (variation > 0.1)


def test_advice_fits_what_was_asked_for() -> None:
    slow = Workload("autoencoder", 1.0, 1.0, 0.2, 0.1, 0.1)
    assert "captured" in advice(slow, {"zero_stage": 3}, cuda=True, server=True)[0]
    assert not any(
        "captured" in tip
        for tip in advice(slow, {"zero_stage": 1}, cuda=True, server=True)
    )
    full = Workload("autoencoder", 1.0, 1.0, 0.9, 0.8, 0.1)
    assert "--server-precision bf16" in advice(
        full, {"server_precision": "fp32"}, cuda=True, server=True
    )
    assert "--server-precision bf16" not in advice(
        full, {"server_precision": "bf16"}, cuda=True, server=True
    )
    assert (
        "batched"
        in advice(
            Workload("clients", 1.0, 1.0, 0.9, 0.8, 0.1),
            {"engine": "loop"},
            cuda=True,
            server=False,
        )[0]
    )


def test_ceilings_are_of_the_device() -> None:
    before = torch.get_float32_matmul_precision()
    found = Ceilings.of(torch.device("cpu"))
    assert 1e8 < found.bytes_per_second < 1e13 and 1e8 < found.flops < 1e14
    assert torch.get_float32_matmul_precision() == before, (
        "a run's arithmetic stays as it was"
    )


def test_a_run_that_nobody_watches_has_an_observer_that_does_nothing() -> None:
    other = Observer()
    with observed_by(other):
        assert observer() is other
    assert observer() is not other and type(observer()) is Observer
