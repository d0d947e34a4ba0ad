"""Random combinations of options keep what is promised, and the swarm that draws and
judges them would notice if they did not.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from benchmarks.harness import waiting
from benchmarks.harness.waiting import Forking
from benchmarks.swarm import drawing, jobs, judging, recorded, shrinking, values
from benchmarks.swarm.__main__ import drawn
from benchmarks.swarm.drawing import EXACT, OWNERS, Case, Options
from benchmarks.swarm.jobs import CRASHED, HUNG, Ended
from benchmarks.swarm.judging import Judge, Settled, Verdict
from benchmarks.swarm.neutral import METHODS, STAGES
from benchmarks.swarm.shrinking import shrink
from benchmarks.swarm.table import Row, read, table
from hpcfed import methods
from hpcfed.options import RunConfig, option
from hpcfed.options.declare import OptionGroup

NUMBER = 6
"""Combinations that the suite runs."""
SEED = 1
SIZES: Options = {
    "method": "fedavg",
    "clients": 4,
    "rounds": 2,
    "epochs": 1,
    "batch_size": 40,
    "model": "mlp",
}
SMALL: Options = {**SIZES, **drawing.FEW_SAMPLES}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forking]:
    folder = tmp_path_factory.mktemp("server")
    loaded = ("sklearn.datasets", "hpcfed.analysis.render.show", "tests.planted")
    with waiting.fork_server(folder, "benchmarks.swarm.worker", *loaded) as started:
        yield started


@pytest.fixture(scope="module")
def judge(server: Forking, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judge]:
    """Judges cases by jobs without a planted fault."""
    found = Judge(tmp_path_factory.mktemp("judge"), server)
    yield found
    found.end()


def judged_with(fault: str, case: Case, server: Forking, folder: Path) -> Verdict:
    """Judge a case by jobs in which a fault is planted."""
    judge = Judge(folder, server, [f"tests.planted:{fault}"])
    try:
        return judge.judge(case)
    finally:
        judge.end()


def test_combinations_keep_what_is_promised(judge: Judge, tmp_path: Path) -> None:
    file = tmp_path / "swarm.jsonl"
    for number in range(NUMBER):
        case = drawn(SEED, number)
        verdict = judge.judge(case)
        assert verdict.good, (verdict, verdict.commands)
        Row.of(SEED, number, case, verdict).append_to(file)
    rows = read(file, SEED)
    assert [row.number for row in rows] == [*range(NUMBER)]
    # Four of five combinations complete.
    assert any(row.outcome == "completed" for row in rows)
    assert read(file, SEED + 1) == []
    lines = table(rows).splitlines()
    assert lines[len(judging.GOOD) + 1].split() == [
        "all",
        *[str(sum(row.relation == one for row in rows)) for one in drawing.RELATIONS],
        str(NUMBER),
    ]


FAULTS: dict[str, tuple[str, Case]] = {
    "ranks": (
        "double_weight_of_rank_1",
        Case({**SMALL, **EXACT}, "ranks", others=2),
    ),
    "seeds": ("train_seeds_more_slowly", Case({**SMALL, **EXACT}, "seeds")),
    "resume": (
        "forget_momentum",
        Case(
            {**SMALL, "method": "fedavgm", "deterministic": True, "snapshot_every": 1},
            "resume",
            stop_after=1,
        ),
    ),
    "off": (
        "prox_of_its_own",
        Case(
            {**SMALL, **EXACT},
            "off",
            neutral=(
                replace(
                    METHODS["fedprox"], options={"method": "fedprox", "prox_mu": 0.0}
                ),
            ),
        ),
    ),
    "names": (
        "prefer_client_0",
        Case(
            {**SIZES, **EXACT, "dataset": f"file:{drawing.OWNED}", "clients": OWNERS}
            | {"partition": "natural"}
            # The server draws for its row with a key of no client.
            | {"compress_down": "randomk", "keep": 0.5},
            "names",
            names=(3, 0, 4, 1, 2),
        ),
    ),
}


@pytest.mark.parametrize("relation", FAULTS)
def test_every_comparison_notices_a_fault(
    relation: str, judge: Judge, server: Forking, tmp_path: Path
) -> None:
    """And finds none where none is."""
    fault, case = FAULTS[relation]
    assert judge.judge(case).outcome == "completed"
    found = judged_with(fault, case, server, tmp_path)
    assert found.outcome == f"{relation}: differs", found
    assert len(found.commands) >= 2 and found.runs >= 2


def test_a_checkpoint_that_is_refused_is_no_good_end(
    server: Forking, tmp_path: Path
) -> None:
    """Though a refusal is one where nothing has been promised yet."""
    _, case = FAULTS["resume"]
    found = judged_with("refuse_to_resume", case, server, tmp_path)
    assert (found.outcome, found.reason) == ("resume: refused", "planted")
    assert not found.good


def test_a_run_that_hangs_is_ended(
    server: Forking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "HANG", 5.0)
    assert judged_with("hang", Case(SMALL), server, tmp_path).outcome == "hangs"


@pytest.mark.parametrize(
    ("ended", "outcome"),
    [
        (Ended(2, err="hpcfed: no\n"), "refused"),
        (Ended(2, err="hpcfed: no\nhpcfed: rank 1: no\n"), "refused"),
        (Ended(2, "beside", "hpcfed: no\n"), "many lines"),
        (Ended(2, err="hpcfed: no\nhpcfed: rank 1: never\n"), "many lines"),
        (Ended(2, err="hpcfed: no\nhpcfed: and no\n"), "many lines"),
        (Ended(2, err="hpcfed: no\nand more\n"), "many lines"),
        (Ended(-1, err="Traceback (most recent call last):\nKeyError: 1"), "traceback"),
        (Ended(1, err="Traceback (most recent call last):\nKeyError: 1"), "traceback"),
        (Ended(0, err="x.py:1: UserWarning: slow\n"), "warning"),
        (Ended(0, err="[W1118 Module.cpp:1] slow\n"), "warning"),
        (Ended(1, err="hpcfed: rank 0 failed: OSError: gone\n"), "failed"),
        (Ended(CRASHED), "crash"),
        (Ended(HUNG), "hangs"),
        (Ended(7), "exit code"),
        (Ended(0), "not readable"),
    ],
)
def test_the_end_of_a_run_is_judged(ended: Ended, outcome: str, tmp_path: Path) -> None:
    with pytest.raises(Settled) as found:
        judging.check(ended, tmp_path / "nothing")
    assert found.value.outcome == outcome


def test_a_combination_is_drawn_again_by_its_number() -> None:
    assert drawn(5, 3) == drawn(5, 3) != drawn(5, 4)


class Late(OptionGroup):
    """Options that nobody has told the swarm about."""

    share: float = option(0.2, "a share", gt=0, lt=1)
    few: int = option(3, "a small number", ge=1, le=4)
    count: int | None = option(None, "a number", ge=0)
    on: bool = option(False, "a switch")
    out: Path | None = option(None, "a folder")


def test_a_new_option_is_drawn_by_its_declaration() -> None:
    random, fields = Random(0), Late.model_fields
    assert not values.is_drawn(fields["out"])
    for name in ("share", "few", "count", "on"):
        assert values.is_drawn(fields[name])
        made = {values.draw(random, name, fields[name]) for _ in range(50)}
        for value in made:
            Late.model_validate({name: value})
        assert name == "on" or len(made) > 2


@pytest.mark.parametrize("method", [None, *methods.names()])
def test_values_are_within_limits(method: str | None) -> None:
    """Every option that is drawn gets values of its type; texts may be refused."""
    random = Random(0)
    group = RunConfig if method is None else methods.load(method).Options
    for name, declared in group.model_fields.items():
        if not values.is_drawn(declared):
            continue
        for _ in range(8):
            value = values.draw(random, name, declared)
            if not isinstance(value, str):
                group.model_validate({name: value})


def test_neutral_options_exist() -> None:
    for method, part in METHODS.items():
        assert {*part.options, *part.both} <= {*drawing.fields_of(method)}
    for part in STAGES:
        assert {*part.options, *part.both} <= {*RunConfig.model_fields}


def test_a_fault_is_shrunk_to_what_shows_it() -> None:
    """Here a run fails if it is compressed and has an attack. Of a schedule and its unit
    neither can go alone.
    """
    more: Options = {
        "lr": 0.1, "momentum": 0.5, "compress": "topk", "keep": 0.3, "alpha": 0.2,
        "attack": "noise", "seed": 3, "snapshot_every": 1, "lr_schedule": "cosine",
        "lr_schedule_by": "step",
    }  # fmt: skip
    case = Case({**SMALL, "rounds": 3, **more}, kept=frozenset({"snapshot_every"}))

    def judge(case: Case) -> Verdict:
        both = {"compress", "attack"} <= case.options.keys()
        if ("lr_schedule" in case.options) != ("lr_schedule_by" in case.options):
            return Verdict("refused", "no")
        return Verdict("traceback", "KeyError: 3") if both else Verdict("completed")

    found = shrink(case, judge(case), judge)
    kept = {"compress": "topk", "attack": "noise", "snapshot_every": 1}
    sizes = {name: SMALL[name] for name in ("method", "model")}
    sizes |= {"clients": 2, "rounds": 1, "epochs": 1, "batch_size": 64}
    assert found.options == {**sizes, **kept}


def test_another_fault_is_not_taken_for_the_first() -> None:
    case = Case({**SMALL, "lr": 0.1})

    def judge(case: Case) -> Verdict:
        name = "KeyError" if "lr" in case.options else "ValueError"
        return Verdict("traceback", f"{name}: no")

    assert shrink(case, judge(case), judge).options["lr"] == 0.1
    assert 2 * len(SMALL) < shrinking.MOST_TRIES


def test_names_are_taken_back() -> None:
    """Client i of the second run is called names[i] in the first."""
    first = {
        "rows/0/0": np.array([1.0]),
        "rows/0/1": np.array([2.0]),
        "rows/0/2": np.array([3.0]),
        "clients/accuracy": np.array([[0.1, 0.2, 0.3]]),
        "clients/classes": np.array([[1, 0], [2, 0], [3, 0]]),
    }
    second = {
        "rows/0/0": np.array([3.0]),
        "rows/0/1": np.array([1.0]),
        "rows/0/2": np.array([2.0]),
        "clients/accuracy": np.array([[0.3, 0.1, 0.2]]),
        "clients/classes": np.array([[3, 0], [1, 0], [2, 0]]),
    }
    back = recorded.with_names(second, judging._inverse([2, 0, 1]))
    assert recorded.difference(first, back, 0.0) == ("", 0.0)
    assert recorded.difference(first, second, 0.0)[1] > 0
