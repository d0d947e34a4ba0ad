"""Several seeds at once are the runs of these seeds, one by one: the same numbers,
files and ends.
"""

import itertools
import json
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import Tensor

from hpcfed import cli
from hpcfed.clients.engine import Engine
from hpcfed.clients.job import Losses, Recipe, Score, TrainingJob
from hpcfed.clients.lockstep import Lockstep, Stopped
from hpcfed.clients.objective import NOTHING, Wanted
from hpcfed.data.shards import Shard, join, sub_shard
from hpcfed.methods import fedavg
from hpcfed.results.stored import read_run
from hpcfed.runtime.timer import Timer
from tests.runs import UNEVEN, assert_same_run, flags, mistake, started

HERE = Path(__file__).parent
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "words",
    [
        ["--method", "fedavg", "--epochs", 1],
        ["--method", "fedavg-ft", "--finetune", "head", "--model", "mlp"],
        ["--method", "local", "--model", "mlp", "--lr-decay", 0.9],
        ["--method", "fedavg", "--engine", "loop", "--model", "mlp", "--deterministic"],
        [
            "--method",
            "fedavg",
            "--dataset",
            "synthetic",
            "--synthetic-shape",
            "1x8x8",
            "--train-per-client",
            20,
        ],
    ],
    ids=["fedavg", "fedavg-ft", "local", "loop", "synthetic"],
)
def test_seeds_at_once_are_the_same_runs(words: list[object], tmp_path: Path) -> None:
    together = started(
        *words, *UNEVEN, "--seeds", "0,5,2", "--out", tmp_path / "together"
    )
    assert sorted(path.name for path in together.iterdir()) == [
        "seed-0",
        "seed-2",
        "seed-5",
    ]
    for seed in (0, 2, 5):
        alone = started(
            *words, *UNEVEN, "--seed", seed, "--out", tmp_path / f"alone-{seed}"
        )
        assert_same_run(together / f"seed-{seed}", alone, tolerance=1e-12)
    torch.set_deterministic_debug_mode("default")


def test_two_ranks_whose_clients_need_different_numbers_of_calls(
    tmp_path: Path, mpirun: Callable
) -> None:
    """Groups of three clients at evaluation: seeds and ranks then call the engine a
    different number of times.
    """
    script = tmp_path / "small_groups.py"
    script.write_text(
        "import sys\nfrom hpcfed.cli import commands\n"
        "from hpcfed.experiment import evaluate\nevaluate.PERSONAL_FLOATS = 3 * 3 * 4810\n"
        "commands.main(sys.argv[1:])\n"
    )
    words = ["--method", "fedavg-ft", "--model", "mlp", *UNEVEN, "--alpha", 0.15]
    result = mpirun(
        2, script, "run", *words, "--seeds", "0..2", "--out", tmp_path / "together"
    )
    assert result.returncode == 0, result.stderr
    groups = set()
    for seed in range(3):
        alone = started(*words, "--seed", seed, "--out", tmp_path / f"alone-{seed}")
        assert_same_run(tmp_path / f"together/seed-{seed}", alone, tolerance=1e-12)
        with h5py.File(tmp_path / f"together/seed-{seed}/run.h5") as file:
            groups |= {tuple(-(-np.bincount(file["clients/rank"][()]) // 3))}
    assert len(groups) > 1, (
        "choose an alpha that makes the numbers of calls differ between seeds, and so between ranks"
    )
    # Of the last and of the best accuracy: the root alone prints.
    assert result.stdout.count("mean ± standard error") == 2


def test_the_engine_trains_all_seeds_in_one_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int]] = []
    train, evaluate = Engine.train, Engine.evaluate

    def counted_train(self: Engine, job: TrainingJob) -> tuple[Tensor, Tensor]:
        calls.append(("train", len(job.rows)))
        return train(self, job)

    def counted_evaluate(self: Engine, rows: Tensor, *arguments: Any) -> Score:
        calls.append(("evaluate", len(rows) if rows.stride(0) else 1))
        return evaluate(self, rows, *arguments)

    monkeypatch.setattr(Engine, "train", counted_train)
    monkeypatch.setattr(Engine, "evaluate", counted_evaluate)
    words = [
        "--model",
        "mlp",
        "--rounds",
        2,
        "--clients",
        10,
        "--participation",
        0.5,
        "--device",
        "cpu",
    ]
    started(*words, "--seeds", "0..3", "--out", tmp_path / "fedavg")
    one_row_of_each_seed = [("evaluate", 1)] * 4
    participants = ("evaluate", 20)
    one_round = [("train", 20), participants, *one_row_of_each_seed, ("evaluate", 4)]
    assert calls == one_round * 2
    calls.clear()
    started("--method", "local", *words, "--seeds", "0..3", "--out", tmp_path / "local")
    assert calls == [("train", 20), participants, ("evaluate", 40)] * 2


def test_every_seed_has_an_ordinary_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "run",
        "--model",
        "mlp",
        "--clients",
        "4",
        "--rounds",
        "2",
        "--out",
        str(tmp_path / "runs"),
    ]
    cli.main([*words, "--seeds", "1..3"])
    said = capsys.readouterr()
    assert said.err.count("round 2/2") == 1, "one display for all seeds"
    runs = [read_run(tmp_path / f"runs/seed-{seed}") for seed in (1, 2, 3)]
    assert [(r.config["seed"], r.config["seeds"], r.stacked_seeds) for r in runs] == [
        (s, None, 3) for s in (1, 2, 3)
    ]
    assert runs[0].config["out"] == str(tmp_path / "runs/seed-1")
    for record in runs:
        np.testing.assert_allclose(record.phases.sum(2), record.wall, rtol=0.05)
    last = [record.last("accuracy") for record in runs]
    error = np.std(last, ddof=1) / np.sqrt(3)
    assert f"{np.mean(last):.2%} ± {100 * error:.2f}" in said.out
    cli.main(["show", str(tmp_path / "runs")])
    assert capsys.readouterr().out == said.out
    cli.main(["show", str(tmp_path / "runs/seed-2")])
    assert "one of 3 runs at once" in capsys.readouterr().out
    cli.main(["show", str(tmp_path / "runs"), "--json"])
    assert [one["seed"] for one in json.loads(capsys.readouterr().out)["seeds"]] == [
        1,
        2,
        3,
    ]

    assert "already holds a run; add --overwrite" in mistake(
        capsys, *words, "--seeds", "3,4"
    )
    (tmp_path / "runs/seed-1/notes.txt").write_text("mine")
    cli.main([*words, "--seeds", "3,4", "--overwrite"])
    left = sorted(
        str(path.relative_to(tmp_path / "runs"))
        for path in (tmp_path / "runs").glob("*/*")
        if path.name in ("notes.txt", "run.h5")
    )
    assert not (tmp_path / "runs/seed-1/model.npz").exists()
    assert left == ["seed-1/notes.txt", "seed-3/run.h5", "seed-4/run.h5"], (
        "no old seed among the new ones"
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--seeds 4..0", "--seeds 4..0: must count upwards, as in 0..4"),
        (
            "--seeds 0..x",
            "--seeds 0..x: must be a range such as 0..4 or a list such as 0,3,7",
        ),
        ("--seeds 0..2..4", "must be a range"),
        ("--seeds 1,2,1", "must name every seed once"),
        ("--seeds 0,,1", "must be a range"),
        ("--seeds=", "must be a range"),
        ("--seeds=-1", "must be a range"),
        ("--seeds 0..99999999999999999999", "must be 1 to 256 seeds"),
        ("--seeds 9223372036854775808", "less than 9223372036854775808"),
        ("--seed 0 --seeds 0..4", "--seed 0 and --seeds 0..4 exclude each other"),
        ("two.toml --seed 1", "two.toml: seeds exclude each other"),
        ("bad.toml", "bad.toml: seeds: must be greater than or equal to 0"),
        ("none.toml", "none.toml: seeds: must be 1 to 256 seeds"),
    ],
)
def test_bad_seeds_are_one_line(
    words: str,
    expected: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.toml").write_text("seeds = [4, 2]\n")
    (tmp_path / "bad.toml").write_text("seeds = [4, -2]\n")
    (tmp_path / "none.toml").write_text("seeds = []\n")
    assert expected in mistake(capsys, "run", *words.split())
    assert not (tmp_path / "runs").exists()


def test_seeds_as_they_may_be_written(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text("seeds = [4, 2]\n")
    assert cli.parse_run([str(tmp_path / "my.toml")]).config.seeds == (4, 2)
    assert cli.parse_run(["--seeds", "2..4"]).config.seeds == (2, 3, 4)
    assert cli.parse_run(["--seeds", "7"]).config.seeds == (7,)
    assert cli.parse_run([]).config.seeds is None


def test_a_seed_that_fails_ends_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = fedavg.round

    def failing(fed: Any, state: Any, cohort: Any) -> Any:
        if fed.config.seed == 1 and cohort.round == 1:
            raise FloatingPointError("planted failure")
        return original(fed, state, cohort)

    monkeypatch.setattr(fedavg, "round", failing)
    with pytest.raises(SystemExit) as ended:
        started(
            "--model",
            "mlp",
            "--clients",
            4,
            "--rounds",
            3,
            "--seeds",
            "0..2",
            "--out",
            tmp_path / "runs",
        )
    assert ended.value.code == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("hpcfed: rank 0 ") and line.endswith(
        "FloatingPointError: planted failure (in seed 1)"
    )
    for seed in range(3):
        record = read_run(tmp_path / f"runs/seed-{seed}")
        assert (
            record.status == "failed" and "planted failure (in seed 1)" in record.error
        )
        # They meet between rounds.
        assert record.rounds_done == 1
    assert not [
        thread for thread in threading.enumerate() if thread.name.startswith("seed")
    ]


def test_an_engine_that_fails_names_phase_clients_and_seed_on_every_rank(
    tmp_path: Path, mpirun: Callable
) -> None:
    words = [
        "--model",
        "mlp",
        "--clients",
        6,
        "--engine",
        "loop",
        "--seeds",
        "0..2",
        "--out",
        tmp_path / "runs",
    ]
    result = mpirun(2, HERE / "failing_rank.py", "run", *words)
    assert result.returncode == 1
    line = next(
        (line for line in result.stderr.splitlines() if "hpcfed: rank 1" in line), ""
    )  # mpirun may indent it
    assert line, result.stderr
    assert "failed in phase train" in line and "planted failure" in line
    assert "while training client " in line and line.endswith(" (seed 0))")
    for seed in range(3):
        assert (
            (tmp_path / f"runs/seed-{seed}/error-1.txt")
            .read_text()
            .startswith("rank 1")
        )


class Doubling:
    """Stands in for the engine: twice the rows, and the positions of the clients as
    scores.
    """

    layout: Any = None
    fisher: Any = None
    mode = "toy"

    halvings = 0

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.rates: list[list[float] | None] = []

    def train(self, job: TrainingJob) -> tuple[Tensor, Losses]:
        self.calls.append(job.clients.tolist())
        self.rates.append(None if job.rates is None else job.rates.tolist())
        return 2 * job.rows, Losses(job.keys.double(), job.keys)

    def evaluate(
        self, rows: Tensor, shard: Shard, clients: np.ndarray, wanted: Wanted = NOTHING
    ) -> Score:
        self.calls.append(clients.tolist())
        positions = torch.from_numpy(clients)
        return Score({"correct": positions, "loss": rows.sum(1), "count": positions})


def toy(seeds: int) -> tuple[Doubling, Lockstep, list[Shard]]:
    """Two clients for every seed, all in one shard."""
    images, sizes = torch.zeros(1, 1, 1, 1), (1,) * 2 * seeds
    whole = Shard(
        images, torch.zeros(1), torch.zeros(2 * seeds, 1), sizes, np.arange(2 * seeds)
    )
    engine = Doubling()
    lockstep = Lockstep(
        engine, [f"seed {n}" for n in range(seeds)], [Timer(CPU) for _ in range(seeds)]
    )
    return (
        engine,
        lockstep,
        [sub_shard(whole, 2 * seed, np.arange(2)) for seed in range(seeds)],
    )


def test_only_calls_that_are_alike_become_one() -> None:
    engine, lockstep, shards = toy(4)
    sgds = [Recipe(1, 1, lr) for lr in (0.1, 0.1, 0.2, 0.1)]
    masks = [torch.tensor(mask) for mask in ([True], [True], [True], [False])]
    answers = {}

    def program(number: int) -> None:
        seed, rows, both = (
            lockstep.programs[number],
            torch.full((2, 1), 1.0 + number),
            np.arange(2),
        )
        keys = torch.tensor([10 * number, 10 * number + 1])
        answers[number] = seed.train(
            TrainingJob(
                rows,
                shards[number],
                both,
                sgds[number],
                keys=keys,
                columns=masks[number],
            )
        )
        answers[number] += (
            seed.evaluate(rows[: number + 1], shards[number], both[: number + 1]),
        )

    lockstep.run([partial(program, n) for n in range(4)], CPU)
    assert engine.calls[:2] == [[0, 1, 2, 3, 4, 5], [6, 7]], (
        "seed 3 has another mask; another rate, as seed 2 has, is no hindrance"
    )
    assert engine.rates == [[0.1, 0.1, 0.1, 0.1, 0.2, 0.2], None]
    assert engine.calls[2:] == [[0, 2, 3, 4, 5, 6, 7]]
    for number, (rows, losses, score) in answers.items():
        assert rows.flatten().tolist() == [2.0 * (1 + number)] * 2
        assert losses.mean.tolist() == [10 * number, 10 * number + 1]
        assert losses.seen.tolist() == [10 * number, 10 * number + 1]
        assert (
            score.correct.tolist()
            == score.count.tolist()
            == [2 * number, 2 * number + 1][: number + 1]
        )


def test_collectives_keep_their_order_whatever_the_engine_is_asked() -> None:
    """Two sets of programs call the engine different numbers of times, as the seeds of
    two ranks do.
    """

    def program(
        number: int,
        calls: list[int],
        lockstep: Lockstep,
        shard: Shard,
        order: list[tuple[int, int]],
    ) -> None:
        seed = lockstep.programs[number]
        for collective in range(4 + number):
            for _ in range(calls[(number + collective) % 3]):
                seed.evaluate(torch.zeros(2, 1), shard, np.arange(2))
            seed.turn(partial(order.append, (collective, number)))

    orders: list[list[tuple[int, int]]] = [[], []]
    for calls, order in zip(([0, 3, 1], [2, 0, 5]), orders, strict=True):
        _, lockstep, shards = toy(3)
        lockstep.run(
            [partial(program, n, calls, lockstep, shards[n], order) for n in range(3)],
            CPU,
        )
    assert orders[0] == orders[1] == sorted(orders[0])


def test_programs_that_meet_wait_for_all_others() -> None:
    """For those that are still in an earlier round, and not for one that has ended."""
    engine, lockstep, shards = toy(3)
    order: list[tuple[int, int]] = []

    def program(number: int) -> None:
        seed = lockstep.programs[number]
        for round in range(3 - number % 2):
            for _ in range(1 + (number + round) % 3):
                seed.evaluate(torch.zeros(2, 1), shards[number], np.arange(2))
                seed.turn(lambda: None)
            order.append((round, number))
            seed.meet()

    lockstep.run([partial(program, number) for number in range(3)], CPU)
    assert [round for round, _ in order] == [0, 0, 0, 1, 1, 1, 2, 2]
    # In each round as many calls as its longest program has.
    assert len(engine.calls) == 3 + 3 + 3


def test_an_interrupt_stops_every_program() -> None:
    """Also the one that runs when it comes; each gets the chance to close its files."""
    _, lockstep, _ = toy(3)
    closed = []

    def program(number: int) -> None:
        try:
            lockstep.programs[number].turn(lambda: None)
            if number == 1:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                time.sleep(0.2)
            lockstep.programs[number].turn(lambda: None)
        except BaseException as error:
            closed.append((number, type(error)))
            raise

    # Shells start what runs in the background with interrupts ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            lockstep.run([partial(program, n) for n in range(3)], CPU)
    finally:
        signal.signal(signal.SIGINT, before)
    assert closed == [(number, KeyboardInterrupt) for number in range(3)]


def test_a_failure_is_raised_as_it_was_and_stops_the_others() -> None:
    _, lockstep, _ = toy(3)
    ends: dict[int, BaseException] = {}

    def program(number: int) -> None:
        try:
            lockstep.programs[number].turn(lambda: None)
            if number == 1:
                raise ValueError("wrong")
            lockstep.programs[number].turn(lambda: None)
        except BaseException as error:
            ends[number] = error
            raise

    with pytest.raises(ValueError, match="wrong") as raised:
        lockstep.run([partial(program, n) for n in range(3)], CPU)
    assert raised.value is ends[1] and raised.value.__notes__ == ["in seed 1"]
    assert [str(ends[number]) for number in (0, 2)] == [
        "ValueError: wrong (in seed 1)"
    ] * 2
    assert isinstance(ends[0], Stopped) and lockstep.at_work.number == 1


def test_joined_shards_show_every_client_the_same_samples() -> None:
    """Shards of other widths, also with clients without data; beyond a client's own
    samples the index stays 0.
    """
    rng = np.random.default_rng(0)
    shards, first = [], 0
    for sizes in ((2, 0), (3,), (1, 4)):
        index = np.zeros((len(sizes), max(sizes)), np.int64)
        for row, size in zip(index, sizes, strict=True):
            row[:size] = rng.choice(5, size, replace=False)
        images, labels = (
            torch.from_numpy(rng.random((5, 1, 2, 2))),
            torch.from_numpy(rng.integers(9, size=5)),
        )
        shards.append(
            Shard(
                images,
                labels,
                torch.from_numpy(index),
                sizes,
                first + np.arange(len(sizes)),
            )
        )
        first += len(sizes)
    whole = join(shards)
    assert whole.sizes == (2, 0, 3, 1, 4) and whole.clients.tolist() == [0, 1, 2, 3, 4]
    assert (
        whole.index[torch.arange(4) >= torch.tensor(whole.sizes)[:, None]] == 0
    ).all()
    firsts = itertools.accumulate((len(s.sizes) for s in shards), initial=0)
    for own, first in zip(shards, firsts, strict=False):
        same = sub_shard(whole, first, own.clients)
        assert same.sizes == own.sizes and same.whole is whole
        for client, size in enumerate(own.sizes):
            seen, expected = same.index[client, :size], own.index[client, :size]
            assert torch.equal(same.inputs[seen], own.inputs[expected])
            assert torch.equal(same.targets[seen], own.targets[expected])


@pytest.mark.parametrize("kind", ["persistent", "buffer", "attribute"])
def test_seeds_do_not_share_what_each_would_draw(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine has one copy of a constant. Equal ones, and NaN, are no obstacle."""
    words = flags(model="tests/own/networks.py:Drawn", clients=2, rounds=1)
    seeds = ["--seeds", "0,1", "--out", tmp_path / "run"]
    started(*words, *seeds)
    capsys.readouterr()
    drawn = ["--model-options", f'{{"kind": "{kind}"}}', "--overwrite"]
    said = mistake(capsys, "run", *words, *seeds, *drawn)
    assert "seed 1 has another frozen table than seed 0, and runs that advance" in said
