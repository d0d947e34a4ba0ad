"""Plans: formulas by hand, fits that find made-up constants again, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcfed
from hpcfed.analysis.costmodel import Range
from hpcfed.cli import keyword_settings, main
from hpcfed.clients.network import client_layout
from hpcfed.clients.waiting import SHIFT
from hpcfed.data.datasets import SPLITS
from hpcfed.errors import UserError
from hpcfed.options import LocalWork, Settings, check
from hpcfed.options.units import parse_bytes_per_second, parse_seconds
from hpcfed.plan.assumptions import STEP, UNMEASURED, assumed, scaled
from hpcfed.plan.calibrate import (
    CLIENTS,
    clients_alone,
    failure_line,
    small_run,
    work_of,
)
from hpcfed.plan.constants import (
    Calibration,
    LinkPoint,
    MeasuredMachine,
    MeasuredWork,
    Preparation,
    RoundPoint,
    ServerPoint,
    Spread,
    ZeroPreparation,
    read_constants,
    write_constants,
)
from hpcfed.plan.make import room_of_rank
from hpcfed.plan.planner import Split, best_split, candidates
from hpcfed.plan.rounds import (
    Load,
    Rates,
    Target,
    evaluation,
    fit_rates,
    memory,
    plan_round,
    rank_loads,
    stacked,
)
from hpcfed.plan.server import (
    StepRates,
    exchange,
    fit_memory,
    fit_steps,
    zero_overhead,
    zero_preparation,
)
from hpcfed.plan.speeds import LinkSpeed, measured_link, ring_allreduce
from hpcfed.plan.work import NetworkSize, client_bytes
from hpcfed.runtime.launcher import Launch

ALONE = Launch("alone", 0, 1)
LINK = LinkSpeed(1e9, 0.1, "")
MACHINE = MeasuredMachine(
    device="made up",
    kind="cpu",
    units=4,
    memory=1e9,
    flops=1e6,
    bytes_per_second=1e9,
    torch="2",
)
TRUE = Rates(
    step=0.5, client_step=0.25, sharing=0.5, fixed=2.0, per_client=0.125, per_doubling=1
)


def round_point(clients: int, ranks: int = 1) -> RoundPoint:
    """Return what TRUE would make of clients with two steps each, rows of 0 bytes."""
    load = Load(clients=clients, hosted=clients, longest=2, steps=2 * clients)
    return RoundPoint(
        ranks=ranks,
        clients=clients,
        hosted=clients,
        longest=2,
        steps=2 * clients,
        train=Spread.exactly(TRUE.train(load, ranks)),
        # Empty messages take 0.1 s in each of 2 (n − 1) turns.
        rest=Spread.exactly(TRUE.rest(load, ranks) + 0.2 * (ranks - 1)),
        evaluate=1 + 0.5 * clients,
        memory=1000 + 100 * clients,
    )


def constants(**changes: Any) -> Calibration:
    made: dict[str, Any] = {
        "made": "2026-01-01",
        "machine": MACHINE,
        "work": MeasuredWork(
            network="mlp",
            columns=10,
            batch_size=16,
            training=100,
            activations=1,
            client_bytes=0,
            method="fedavg",
            precision="tf32",
        ),
        "rounds": (round_point(4), round_point(8), round_point(4, ranks=4)),
    }
    return Calibration(**(made | changes))


@pytest.mark.parametrize(
    ("text", "bytes_per_second"),
    [("50GB/s", 5e10), ("400Gb/s", 5e10), ("1.5 MB/s", 1.5e6), ("2GiB/s", 2.0**31)],
)
def test_speeds_are_read_with_their_units(text: str, bytes_per_second: float) -> None:
    assert parse_bytes_per_second(text) == bytes_per_second


@pytest.mark.parametrize(
    ("text", "seconds"), [("5us", 5e-6), ("5µs", 5e-6), ("5μs", 5e-6), ("20ms", 0.02)]
)
def test_times_are_read_with_their_units(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("text", ["50", "GB/s", "-5GB/s", "5gb/s", "0GB/s", "1e9GB/s"])
def test_a_speed_is_never_guessed(text: str) -> None:
    with pytest.raises(ValueError, match="as in 50GB/s"):
        parse_bytes_per_second(text)


def test_a_ring_takes_its_turns() -> None:
    # 4 ranks: 6 turns, each 0.1 s and a quarter of 4 GB at 1 GB/s.
    assert ring_allreduce(4e9, 4, LINK) == pytest.approx(6.6)
    assert ring_allreduce(4e9, 1, LINK) == 0


def test_a_measured_link_is_found_again() -> None:
    points = []
    for ranks, size in [(2, 1e3), (2, 1e9), (4, 1e6)]:
        seconds = ring_allreduce(size, ranks, LINK)
        points.append(LinkPoint(ranks=ranks, bytes=size, seconds=seconds))
    found = measured_link(tuple(points))
    assert found is not None
    assert found.latency == pytest.approx(0.1)
    assert found.bytes_per_second == pytest.approx(1e9)


def test_costs_of_a_round_are_found_again() -> None:
    points = [round_point(4), round_point(8), round_point(16), round_point(4, ranks=4)]
    found = fit_rates(points, 0.0, LINK)
    for name, value in vars(TRUE).items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-6), name


def test_a_round_on_more_ranks_by_hand() -> None:
    # 16 ranks of 32 clients, 8 on a machine: (0.5·2 + 0.25·64)·(1 + 0.5·3) = 42.5, the
    # rest 2 + 0.125·32 + 4 = 10, and 30 turns of the ring take 3 s.
    load = Load(clients=32, hosted=32, longest=2, steps=64)
    target = Target(ranks=16, per_node=8, link=LINK)
    plan = plan_round(constants(), [load], target, columns=0)
    assert plan.seconds.middle == pytest.approx(55.5, rel=1e-6)
    assert plan.evaluation.middle == pytest.approx(17, rel=1e-6)
    assert plan.memory.middle == pytest.approx(4200, rel=1e-6)
    # The interval has 5 % either way at least.
    assert plan.seconds.low <= 0.95 * 55.5 * (1 + 1e-6)


def test_an_evaluation_judges_rows_that_have_trained_and_all_that_live_there() -> None:
    """1 s, 0.5 s for every row that has trained, and 0.125 s for every client."""
    points = []
    for clients, hosted in [(4, 16), (8, 16), (4, 64), (16, 64)]:
        seconds = 1 + 0.5 * clients + 0.125 * hosted
        change = {"hosted": hosted, "evaluate": seconds}
        points.append(round_point(clients).model_copy(update=change))
    load = Load(clients=2, hosted=800, longest=2, steps=4)
    assert evaluation(points, load) == pytest.approx(1 + 1 + 100, rel=1e-6)


def test_the_largest_points_tell_what_many_clients_add_to_an_evaluation() -> None:
    # Flat up to 8 clients, then 1 s for each: as on a GPU that was never full.
    seconds = {4: 10.0, 8: 10.0, 16: 18.0}
    points = [
        round_point(number).model_copy(update={"evaluate": taken})
        for number, taken in seconds.items()
    ]
    load = Load(clients=100, hosted=100, longest=2, steps=200)
    target = Target(ranks=1, per_node=1, link=LINK)
    plan = plan_round(constants(rounds=points), [load], target, columns=0)
    assert plan.evaluation.middle == pytest.approx(102, rel=1e-6)
    # By all points it is less, and flat without the largest.
    assert plan.evaluation.low == pytest.approx(10, rel=1e-6)


def test_other_data_changes_memory_and_evaluation_alone() -> None:
    """Twice the samples of the same network: 40 bytes a client in place of 20."""
    before = constants()
    old = before.work.model_copy(update={"client_bytes": 20.0})
    new = old.model_copy(update={"client_bytes": 40.0})
    found = scaled(before.model_copy(update={"work": old}), new)
    for ours, theirs in zip(found.rounds, before.rounds, strict=True):
        assert ours.train == theirs.train
        assert ours.evaluate == 2 * theirs.evaluate
        assert ours.memory == theirs.memory + 20 * theirs.hosted


@pytest.mark.parametrize(
    ("given", "fitting", "numbers"),
    [
        ({"clients": 10_000}, 10**6, [10, 30, 100, 300, 1000, 3000]),
        ({"clients": 10_000}, 700, [10, 30, 100, 300, 700]),
        ({"clients": 64}, 10**6, [10, 30, 100, 300]),
        # Fewer clients of a given data set would have more samples each.
        ({"clients": 64, "dataset": "digits"}, 1, [10, 30, 64]),
        ({"clients": 6, "dataset": "digits"}, 1, [3, 6]),
    ],
)
def test_clients_of_a_calibration(
    given: dict[str, Any], fitting: int, numbers: list[int]
) -> None:
    config = keyword_settings({"dataset": "synthetic", **given}).config
    assert clients_alone(config, CLIENTS, fitting=fitting) == numbers


@pytest.mark.parametrize(
    ("stderr", "line"),
    [
        ("hpcfed: no disk\n-----\nmpirun has ended the job\n-----\n", "no disk"),
        ("Traceback\nValueError: odd\n\n------\n", "ValueError: odd"),
        ("", "exit code 7"),
    ],
)
def test_a_failed_calibration_says_why(stderr: str, line: str) -> None:
    assert failure_line(stderr, 7) == line


def test_ranks_on_cores_share_the_memory_of_their_machine() -> None:
    gpu = MACHINE.model_copy(update={"kind": "cuda"})
    assert room_of_rank(MACHINE, 4) == 0.25e9
    assert room_of_rank(gpu, 4) == 1e9


def test_memory_below_the_peak_of_the_start_tells_nothing() -> None:
    """A start takes 1000 bytes; clients take 600 and 100 each, which shows from 5 on."""
    points = []
    for clients in (1, 2, 3, 8, 16):
        held = max(1000, 600 + 100 * clients)
        points.append(round_point(clients).model_copy(update={"memory": held}))
    for clients, wanted in [(2, 1000), (100, 10_600)]:
        load = Load(clients=clients, hosted=clients, longest=2, steps=2 * clients)
        assert memory(points, load, constants()) == pytest.approx(wanted, rel=1e-6)


def test_memory_ends_to_grow_where_stacks_do() -> None:
    """A core trains 2²⁴ activations together: here 1024 clients of 16 samples."""
    work = constants().work.model_copy(update={"activations": 1024.0})
    few = constants(work=work)
    assert [stacked(few, number) for number in (1000, 1024, 1025, 3000)] == [
        1000,
        1024,
        513,
        1000,
    ]


def test_slow_rounds_widen_the_interval() -> None:
    slow = round_point(8)
    slow = slow.model_copy(
        update={"train": Spread(low=1, middle=slow.train.middle, high=50)}
    )
    calm = constants()
    wild = constants(rounds=(round_point(4), slow, round_point(4, ranks=4)))
    load = Load(clients=32, hosted=32, longest=2, steps=64)
    target = Target(ranks=1, per_node=1, link=LINK)
    first, second = (
        plan_round(one, [load], target, columns=0).seconds for one in (calm, wild)
    )
    assert second.middle == pytest.approx(first.middle)
    assert second.high > 1.3 * first.high
    assert second.low < first.low


def declared(settings: Settings) -> LocalWork:
    """Return what the method of these settings declares to train."""
    return settings.options.local_work(settings.config, client_layout(settings.config))


def test_the_busiest_rank_is_that_of_a_run() -> None:
    settings = keyword_settings(
        {"clients": 3, "epochs": 1, "batch_size": 10, "model": "mlp"}
    )
    # 4, 1 and 2 steps: the first rank gets the longest, the second the other two.
    sizes = np.array([40, 10, 20])
    assert rank_loads(settings, declared(settings), sizes, 2, mode="loop") == [
        Load(clients=1, hosted=1, longest=4, steps=4)
    ]


def test_a_cohort_is_drawn_from_all_ranks() -> None:
    settings = keyword_settings(
        {"clients": 8, "cohort": 2, "epochs": 1, "batch_size": 10, "model": "mlp"}
    )
    work = declared(settings)
    loads = rank_loads(settings, work, np.full(8, 10), 4, mode="batched")
    # Two clients of eight are sometimes on one rank, and mostly on two.
    assert {load.clients for load in loads} == {1, 2}
    assert all(load.hosted == 2 and load.steps == load.clients for load in loads)


def test_all_who_are_invited_train() -> None:
    settings = keyword_settings(
        {
            "clients": 8,
            "cohort": 4,
            "oversample": 1.5,
            "devices": "lognormal",
            "epochs": 1,
            "batch_size": 10,
            "model": "mlp",
        }
    )
    loads = rank_loads(settings, declared(settings), np.full(8, 10), 1, mode="batched")
    assert {load.clients for load in loads} == {load.steps for load in loads} == {6}


COUNTING = [
    {"attack": "sign-flip", "attackers": 20},
    {"attack": "ipm", "attackers": 0.02},
    {"evaluate_clients": 100},
    {"method": "fedbuff", "concurrency": 50},
    {"method": "fedbuff", "cohort": 10, "rounds": 100, "buffer": 900},
    {"aggregation": "multi-krum", "krum_keep": 20},
    {"aggregation": "krum", "tolerance": 0.4},
    {"aggregation": "multi-krum", "tolerance": 0.45, "attack": "mimic"},
    {"cohort": 40, "oversample": 1.5, "devices": "lognormal", "deadline": 30.0},
    {"method": "genefl", "clusters": 30},
    {"method": "pfedhn", "new_clients": 10, "welcome_rounds": 3},
    {"new_clients": 40, "join_rounds": 3, "new_updates": 4},
]
"""Options of ordinary runs with many clients."""


@pytest.mark.parametrize("given", COUNTING, ids=str)
@pytest.mark.parametrize("clients", [2, 10, 30])
def test_short_runs_are_not_refused_for_options_that_count_clients(
    given: dict[str, Any], clients: int
) -> None:
    values = {"dataset": "synthetic", "model": "mlp", "clients": 100, **given}
    settings = keyword_settings(values)
    check(settings, ALONE)
    hosted = 100 if "cohort" in given else None
    small, words = small_run(settings, values, clients=clients, hosted=hosted)
    check(small, ALONE)
    assert small.config.cohort_size == clients
    assert keyword_settings(words) == small, "as the short run will read them"


def test_short_runs_keep_the_shares_of_clients() -> None:
    values = {
        "dataset": "synthetic",
        "model": "mlp",
        "clients": 100,
        "cohort": 50,
        "attack": "ipm",
        "attackers": 20,
        "evaluate_clients": 40,
        "aggregation": "multi-krum",
        "krum_keep": 25,
        "tolerance": 0.3,
    }
    small, _ = small_run(keyword_settings(values), values, clients=10, hosted=20)
    config = small.config
    assert (config.num_attackers, config.evaluate_clients) == (4, 8)
    assert (config.krum_keep, config.tolerance) == (5, 0.3)
    asynchronous = {
        "dataset": "synthetic",
        "model": "mlp",
        "clients": 100,
        "cohort": 40,
        "method": "fedbuff",
        "concurrency": 20,
        "buffer": 8,
    }
    small, _ = small_run(
        keyword_settings(asynchronous), asynchronous, clients=10, hosted=100
    )
    assert (small.flat()["concurrency"], small.flat()["buffer"]) == (5, 2)


def test_a_plan_without_measurements_has_fine_tuning() -> None:
    """By hand: 5 epochs of 20 samples, two FLOPs each, at the speed that is assumed."""
    values = {
        "dataset": "synthetic",
        "partition": "iid",
        "model": "mlp",
        "clients": 50,
        "train_per_client": 20,
        "batch_size": 10,
        "device": "cpu",
    }
    load = Load(clients=50, hosted=50, longest=4, steps=200)

    def judging(**more: Any) -> float:
        settings = keyword_settings(values | more)
        found = assumed(settings, work_of(settings.config))
        return evaluation(found.rounds, load)

    multiply_adds = 2 * 3 * 32 * 32 * 64 + 3 * 64 * 10
    more = judging(method="fedavg-ft", finetune_epochs=5) - judging()
    steps = 5 * 2 * STEP["cpu"]
    expected = steps + 50 * 5 * 20 * 2 * multiply_adds / UNMEASURED["cpu"]
    assert more == pytest.approx(expected, rel=1e-6)
    few = judging(method="fedavg-ft", finetune_epochs=5, evaluate_clients=25)
    assert few < judging(method="fedavg-ft", finetune_epochs=5)


SIZE = NetworkSize(flops=1e6, activations=1e3, stages=2, parameters=10**8)


def server_point(size: NetworkSize, batch: int, seconds: float) -> ServerPoint:
    return ServerPoint(
        network="denoiser",
        zero_stage=0,
        batch=batch,
        flops=size.flops * batch,
        activations=size.activations * batch,
        stages=size.stages,
        parameters=size.parameters,
        seconds=seconds,
        first=0,
        memory=0,
    )


def test_a_step_of_the_server_by_hand() -> None:
    # 2 stages of 0.5 s, 3000 activations of 1 ms, 3e6 FLOPs at 1e6 FLOP/s, and 40 bytes
    # of each of 1e8 parameters at 1e9 bytes per second.
    rates = StepRates(0.5, 1e-3, MACHINE)
    assert rates.seconds(SIZE, 3) == pytest.approx(1 + 3 + 3 + 4)
    other = NetworkSize(flops=1e6, activations=1e3, stages=8, parameters=10**6)
    points = [
        server_point(SIZE, 3, rates.seconds(SIZE, 3)),
        server_point(other, 5, rates.seconds(other, 5)),
    ]
    found = fit_steps(points, MACHINE)
    assert found.stage == pytest.approx(0.5, rel=1e-6)
    assert found.activation == pytest.approx(1e-3, rel=1e-6)


def test_zero_adds_what_it_added_on_one_rank() -> None:
    plain = server_point(SIZE, 1, 2.0)
    staged = plain.model_copy(update={"zero_stage": 3, "seconds": 5.0})
    assert zero_overhead([plain, staged], "denoiser", 3) == 3
    assert zero_overhead([plain, staged], "denoiser", 1) == 0
    assert zero_overhead([plain, staged], "autoencoder", 3) == 0


def test_building_for_zero_takes_its_time_and_that_of_loading() -> None:
    # The first stage that is built loads what all of them need.
    measured = [
        ZeroPreparation(stage=1, seconds=0.5, first=2.0),
        ZeroPreparation(stage=2, seconds=0.5, first=0.0),
        ZeroPreparation(stage=3, seconds=1.5, first=0.0),
    ]
    found = [zero_preparation(measured, stage) for stage in range(4)]
    assert found == [0.0, 2.5, 2.5, 3.5]
    assert zero_preparation([], 3) == 0, "a calibration of before has none"


def test_a_process_without_networks_is_on_every_server_rank() -> None:
    """1000 bytes of a process, 4 of an activation, and 20 of a parameter: with its
    gradient, two moments, and a copy of the gradient.
    """
    points = []
    for activations, parameters in [(10, 5), (40, 20)]:
        size = NetworkSize(1.0, activations, 1, parameters)
        held = 1000 + 4 * activations + 20 * parameters
        point = server_point(size, 1, 1.0).model_copy(update={"memory": held})
        # The other network of that size is smaller, and in the same process.
        less = point.model_copy(update={"activations": 1.0, "parameters": 1})
        points += [point, less]
    assert fit_memory(points) == pytest.approx((1000, 4), rel=1e-6)
    assert fit_memory(points[:2]) == pytest.approx((0, 104), rel=1e-6)


def test_stages_of_zero_by_hand() -> None:
    fast = LinkSpeed(1e9, 0.0, "")
    # 0.4 GB in 3 turns of a quarter each, twice; stage 3 three times.
    twice = 2 * 3 * 0.1
    norms = 2 * 2 * ring_allreduce(8, 4, fast)
    assert exchange(SIZE, 4, 2, fast) == pytest.approx(twice + norms)
    assert exchange(SIZE, 4, 3, fast) == pytest.approx(1.5 * twice + norms)


def test_server_ranks_share_batches_evenly() -> None:
    assert candidates(8, [100, 400]) == [0, 1, 2, 4, 5]
    assert candidates(1, [100, 400]) == [0]
    # Batch norm takes two samples of a rank at least.
    assert candidates(8, [4, 8]) == [0, 1, 2]


def test_the_split_that_ends_first_fits_into_memory() -> None:
    seconds = {0: 9.0, 1: 5.0, 2: 3.0, 4: 4.0}
    held = {0: 1.0, 1: 2.0, 2: 9.0, 4: 3.0}

    def split(number: int) -> Split:
        time = Range(seconds[number], seconds[number], seconds[number])
        return Split(number, 8 - number, time, held[number])

    best, every = best_split(list(seconds), split, memory=0)
    assert best.server_ranks == 2 and len(every) == 4
    best, _ = best_split(list(seconds), split, memory=5)
    assert best.server_ranks == 4
    best, _ = best_split(list(seconds), split, memory=0.5)
    assert best.server_ranks == 0, "the least memory where nothing fits"


def test_ranges_add_up() -> None:
    assert Range(2, 1, 4) * 3 + Range(1, 1, 1) == Range(7, 4, 13)


def test_a_calibration_is_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    made = constants(
        server=(server_point(SIZE, 3, 1.0),),
        preparations=(
            Preparation(
                parameters=1, seconds=1, invert=1, first=1, launches=1, flops=1
            ),
        ),
    )
    write_constants(path, made)
    assert read_constants(path) == made
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("machine.flops", -1),
        ("machine.flops", "NaN"),
        ("machine.kind", "tpu"),
        ("version", 2),
        ("command", "rm"),
    ],
)
def test_a_strange_calibration_is_refused(
    tmp_path: Path, place: str, value: object
) -> None:
    content = json.loads(constants().model_dump_json())
    *folders, name = place.split(".")
    inner = content
    for folder in folders:
        inner = inner[folder]
    inner[name] = value
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=f"not a calibration .*{name}"):
        read_constants(path)


@pytest.fixture
def settings_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "my.toml"
    path.write_text(
        'method = "fedavg"\ndevice = "cpu"\ndataset = "synthetic"\n'
        'synthetic_shape = "1x8x8"\nmodel = "mlp"\npartition = "iid"\n'
        "train_per_client = 32\nbatch_size = 16\nepochs = 1\nclients = 64\n"
    )
    return path


def planned(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    main(["plan", *words, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_plan_without_calibration_says_so(
    settings_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned([str(settings_file), "--ranks", "8"], capsys)
    assert "nothing was measured" in found["notes"][0]
    assert list(found["rounds"]) == ["1", "2", "4", "8"]
    seconds = found["rounds"]["8"]["seconds"]
    assert (
        seconds["low"] < seconds["middle"] / 3 and seconds["high"] > seconds["middle"]
    )


def test_a_slower_link_makes_longer_rounds(
    settings_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(settings_file), "--ranks", "2", "--latency", "1s"]
    slow = planned([*words, "--link", "1MB/s"], capsys)["rounds"]["2"]
    fast = planned([*words, "--link", "1TB/s"], capsys)["rounds"]["2"]
    # 4,810 columns of 4 bytes in two turns of one half each.
    added = slow["seconds"]["middle"] - fast["seconds"]["middle"]
    assert added == pytest.approx(4810 * 4 / 1e6, rel=1e-3)
    assert fast["between"] == pytest.approx(2, rel=1e-3)


def test_another_network_than_the_measured_is_doubted(
    settings_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_constants(Path("hpcfed-plan.json"), constants())
    notes = planned([str(settings_file)], capsys)["notes"]
    assert "measured on made up" in notes[0]
    assert "another number of columns, amount of data" in notes[1]


def test_a_plan_that_does_not_fit_says_so(
    settings_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    little = MACHINE.model_copy(update={"memory": 1e6})
    write_constants(Path("hpcfed-plan.json"), constants(machine=little))
    notes = planned([str(settings_file)], capsys)["notes"]
    assert "does not fit: a rank takes" in notes[-1]
    assert "and has 976.56 KiB" in notes[-1]


def test_several_seeds_are_told(
    settings_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings_file.write_text(settings_file.read_text() + "seeds = [0, 1, 2]\n")
    notes = planned([str(settings_file)], capsys)["notes"]
    assert "3 seeds: all figures are of one" in notes[1]


def test_clients_that_fit_on_many_ranks_alone_are_planned(
    settings_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # All samples are 64 · 232 images of 256 bytes: 3.6 MiB, and 0.5 on each of 8 ranks.
    monkeypatch.setattr("hpcfed.options.checks.machine.usable", lambda: 2 * 2**20)
    assert "8" in planned([str(settings_file), "--ranks", "8"], capsys)["rounds"]
    with pytest.raises(SystemExit):
        planned([str(settings_file), "--ranks", "1"], capsys)


def test_server_ranks_of_a_file_are_left_to_the_plan(
    settings_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = settings_file.read_text().replace("fedavg", "pfedgpa")
    text = text.replace("iid", "dominant") + 'server = "tiny"\nserver_ranks = 2\n'
    settings_file.write_text(text)
    assert list(planned([str(settings_file)], capsys)["rounds"]) == ["1"]


@pytest.mark.parametrize("model", ["span", "tokens"])
def test_a_run_is_not_planned_whole_without_its_server(
    model: str, settings_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = planned([str(settings_file)], capsys)
    assert rounds["whole"] == rounds["all_rounds"]
    text = settings_file.read_text().replace("fedavg", "pfedgpa")
    settings_file.write_text(f'{text}server_model = "{model}"\n')
    found = planned([str(settings_file)], capsys)
    assert found["whole"] is None
    assert found["all_rounds"]["middle"] > 0
    main(["plan", str(settings_file)])
    out = capsys.readouterr().out
    assert "all rounds, without the server's learning:" in out
    assert "the whole run" not in out


def test_progress_of_a_calibration_is_no_part_of_the_json(
    settings_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hpcfed.plan.make.calibrate", lambda *_: constants())
    main(["plan", str(settings_file), "--calibrate", "--json"])
    out, err = capsys.readouterr()
    assert json.loads(out)["rounds"]
    assert "calibrated: hpcfed-plan.json" in err


def test_a_model_that_is_not_planned_is_not_measured(
    settings_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = settings_file.read_text().replace("fedavg", "pfedgpa")
    settings_file.write_text(text + 'server_model = "span"\n')
    point = round_point(4)
    monkeypatch.setattr("hpcfed.plan.calibrate.measure_rounds", lambda *_, **__: point)
    monkeypatch.setattr("hpcfed.plan.calibrate.machine_of", lambda *_: MACHINE)
    monkeypatch.setattr("hpcfed.plan.calibrate._measure_link", lambda *_: [])
    # As if only p-diff could be planned.
    for module in ("calibrate", "make"):
        monkeypatch.setattr(f"hpcfed.plan.{module}.PLANNED", ("p-diff",))
    found = planned([str(settings_file), "--calibrate"], capsys)
    told = "the server's model: span is not planned, only p-diff"
    assert told in found["notes"]


def test_a_place_for_the_calibration_is_checked_before_it_is_made(
    settings_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place, said in [("/dev/null", "is a device"), ("no/x.json", "no folder no")]:
        with pytest.raises(SystemExit):
            main(["plan", str(settings_file), "--calibrate", "--constants", place])
        err = capsys.readouterr().err
        assert said in err and "calibrating" not in err


def test_tables_of_a_plan(
    settings_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["plan", str(settings_file), "--ranks", "4"])
    out = capsys.readouterr().out
    assert "64 clients, 64 in a round" in out
    assert "the whole run:" in out


@pytest.mark.parametrize("counts", [{"clients": 2}, {"clients": 1, "new_clients": 1}])
def test_memory_holds_the_samples_of_clients_that_are_chosen(
    counts: dict[str, int], tmp_path: Path
) -> None:
    owners = np.repeat(np.arange(4), 10)
    arrays: dict[str, Any] = {"inputs": np.ones((40, 3)), "clients": owners}
    arrays["targets"] = owners % 2
    path = tmp_path / "own.npz"
    parts = {f"{part}_{name}": arrays[name] for part in SPLITS for name in arrays}
    np.savez(path, **parts)
    config = keyword_settings({"dataset": f"file:{path}", "model": "mlp", **counts})
    # Ten samples of three numbers for training, and ten for testing.
    assert client_bytes(config.config) == 4 * 20 * 3


def test_new_clients_keep_their_samples_from_memory() -> None:
    values = {"model": "mlp", "partition": "iid"}
    few = keyword_settings({**values, "clients": 4, "new_clients": 4}).config
    many = keyword_settings({**values, "clients": 8}).config
    assert client_bytes(few) == pytest.approx(client_bytes(many), rel=0.1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks", "65"], "--ranks 65, but there are 64 clients"),
        (["--ranks", "0"], "--ranks 0: must be from 1"),
        (["--link", "50"], "argument --link: must be a number with a unit"),
        (["--latency", "5"], "argument --latency: must be a number with a unit"),
        (["--per-node", "0"], "--per-node 0: must be 1 or more"),
        (["--constants", "none.json"], "--constants none.json: no such file"),
        (["--constants", "gpu.json"], "measured with device cuda (made up), and the"),
    ],
)
def test_mistakes_are_one_line(
    settings_file: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    said: str,
) -> None:
    gpu = MACHINE.model_copy(update={"kind": "cuda"})
    write_constants(Path("gpu.json"), constants(machine=gpu))
    with pytest.raises(SystemExit) as ending:
        main(["plan", str(settings_file), *words])
    assert ending.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and said in lines[0]


def test_waiting_moves_the_global_model_by_the_clients_mean(tmp_path: Path) -> None:
    models = []
    for rounds in (1, 3):
        run = hpcfed.run(
            **WAITING, rounds=rounds, out=tmp_path / str(rounds), progress=False
        )
        models.append(np.load(run.folder / "model.npz"))
    first, third = models
    # Clients 0 to 3 move by 1 to 4 shifts in each of two more rounds: 2.5 in the mean.
    for name in first.files:
        moved = third[name].astype(np.float64) - first[name]
        assert np.abs(moved - 2 * 2.5 * SHIFT).max() < 2.0**-24


WAITING: dict[str, Any] = {
    "simulate_training": "1ms",
    "dataset": "synthetic",
    "synthetic_shape": "1x8x8",
    "model": "mlp",
    "partition": "iid",
    "clients": 4,
    "train_per_client": 4,
    "test_per_client": 2,
    "device": "cpu",
}


def test_waiting_is_for_one_seed_and_has_a_unit() -> None:
    with pytest.raises(UserError, match="waits for one seed"):
        hpcfed.run(**WAITING, seeds=[0, 1])
    with pytest.raises(UserError, match="must be a number with a unit"):
        hpcfed.run(**(WAITING | {"simulate_training": "20"}))
