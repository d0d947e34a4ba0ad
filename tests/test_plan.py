"""Plans: formulas by hand, fits that find made-up constants again, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcfed
from hpcfed.cli import keyword_settings, main
from hpcfed.clients.waiting import SHIFT
from hpcfed.config.units import parse_bytes_per_second, parse_seconds
from hpcfed.errors import UserError
from hpcfed.plan.constants import (
    Constants,
    LinkPoint,
    Machine,
    Preparation,
    RoundPoint,
    ServerPoint,
    Spread,
    Work,
    read_constants,
    write_constants,
)
from hpcfed.plan.fits import Range, exactly
from hpcfed.plan.links import Link, measured_link, ring_allreduce
from hpcfed.plan.loads import Load, rank_loads
from hpcfed.plan.rounds import Rates, Target, fit_rates, plan_round, stacked
from hpcfed.plan.server import (
    NetworkSize,
    StepRates,
    exchange,
    fit_steps,
    state_bytes,
    zero_overhead,
)
from hpcfed.plan.split import Split, best_split, candidates

LINK = Link(1e9, 0.1, "")
MACHINE = Machine(
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


def spread(seconds: float) -> Spread:
    return Spread(low=seconds, middle=seconds, high=seconds)


def round_point(clients: int, ranks: int = 1) -> RoundPoint:
    """Return what TRUE would make of clients with two steps each, rows of 0 bytes."""
    load = Load(clients=clients, hosted=clients, longest=2, steps=2 * clients)
    return RoundPoint(
        ranks=ranks,
        clients=clients,
        hosted=clients,
        longest=2,
        steps=2 * clients,
        train=spread(TRUE.train(load, ranks)),
        # Empty messages take 0.1 s in each of 2 (n − 1) turns.
        rest=spread(TRUE.rest(load, ranks) + 0.2 * (ranks - 1)),
        evaluate=1 + 0.5 * clients,
        memory=1000 + 100 * clients,
    )


def constants(**changes: Any) -> Constants:
    made: dict[str, Any] = {
        "made": "2026-01-01",
        "machine": MACHINE,
        "work": Work(
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
    return Constants(**(made | changes))


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


def test_the_busiest_rank_is_that_of_a_run() -> None:
    config = keyword_settings(
        {"clients": 3, "epochs": 1, "batch_size": 10, "model": "mlp"}
    ).config
    # 4, 1 and 2 steps: the first rank gets the longest, the second the other two.
    sizes = np.array([40, 10, 20])
    assert rank_loads(config, sizes, 2, mode="loop") == [
        Load(clients=1, hosted=1, longest=4, steps=4)
    ]


def test_a_cohort_is_drawn_from_all_ranks() -> None:
    config = keyword_settings(
        {"clients": 8, "cohort": 2, "epochs": 1, "batch_size": 10, "model": "mlp"}
    ).config
    loads = rank_loads(config, np.full(8, 10), 4, mode="batched")
    # Two clients of eight are sometimes on one rank, and mostly on two.
    assert {load.clients for load in loads} == {1, 2}
    assert all(load.hosted == 2 and load.steps == load.clients for load in loads)


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


def test_stages_of_zero_by_hand() -> None:
    # Weights and gradients of 4 bytes, moments of 8, on 4 ranks.
    assert [state_bytes(100, 4, stage) for stage in range(4)] == [1600, 1000, 700, 400]
    fast = Link(1e9, 0.0, "")
    # 0.4 GB in 3 turns of a quarter each, twice; stage 3 three times.
    twice = 2 * 3 * 0.1
    norms = 2 * 2 * ring_allreduce(8, 4, fast)
    assert exchange(SIZE, 4, 2, fast) == pytest.approx(twice + norms)
    assert exchange(SIZE, 4, 3, fast) == pytest.approx(1.5 * twice + norms)


def test_server_ranks_share_batches_evenly() -> None:
    assert candidates(8, [100, 400]) == [0, 1, 2, 4, 5]
    assert candidates(1, [100, 400]) == [0]


def test_the_split_that_ends_first_fits_into_memory() -> None:
    seconds = {0: 9.0, 1: 5.0, 2: 3.0, 4: 4.0}
    held = {0: 1.0, 1: 2.0, 2: 9.0, 4: 3.0}

    def split(number: int) -> Split:
        return Split(number, 8 - number, exactly(seconds[number]), held[number])

    best, every = best_split(list(seconds), split, memory=0)
    assert best.server_ranks == 2 and len(every) == 4
    best, _ = best_split(list(seconds), split, memory=5)
    assert best.server_ranks == 4
    best, _ = best_split(list(seconds), split, memory=0.5)
    assert best.server_ranks == 0, "the least memory where nothing fits"


def test_ranges_add_up() -> None:
    assert Range(2, 1, 4) * 3 + exactly(1) == Range(7, 4, 13)


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
    assert "another columns" in notes[1]


def test_tables_of_a_plan(
    settings_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["plan", str(settings_file), "--ranks", "4"])
    out = capsys.readouterr().out
    assert "64 clients, 64 in a round" in out
    assert "the whole run:" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks", "65"], "--ranks 65, but there are 64 clients"),
        (["--ranks", "0"], "--ranks 0: must be from 1"),
        (["--link", "50"], "argument --link: must be a number with a unit"),
        (["--latency", "5"], "argument --latency: must be a number with a unit"),
        (["--per-node", "0"], "--per-node 0: must be 1 or more"),
        (["--constants", "none.json"], "--constants none.json: no such file"),
    ],
)
def test_mistakes_are_one_line(
    settings_file: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    said: str,
) -> None:
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
