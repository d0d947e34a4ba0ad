"""benchmarks/paper: how near tables are to the paper, named tables, and plans."""

import argparse
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from math import inf, isnan, nan
from pathlib import Path

import h5py
import pytest

from benchmarks.paper import __main__ as paper
from benchmarks.paper.cells import Outcome, Outcomes, fits
from benchmarks.paper.entries import Entry, near_text
from benchmarks.paper.measures import MEASURES
from benchmarks.paper.plan import Line, read_line
from benchmarks.paper.runs import alarm, resumed
from benchmarks.paper.study import Printed, Study, read_study
from benchmarks.paper.tables import print_counts, print_measure
from hpcfed.errors import UserError
from hpcfed.results.run import RunRecord
from hpcfed.results.stored import read_seeds
from hpcfed.runtime.signals import STOPPED, Stop
from tests.points import run_of

STUDY = """
measures = ["best", "rounds"]
rival = "fedavg"
[common]
model = "mlp"
rounds = 20000
epochs = 1
batch_size = 64
clients = 4
[datasets.digits]
[columns.base]
[columns.few]
clients = 2
[methods.fedavg]
[methods.local]
"""


def entry(
    measure: str, values: list[float], *figure: float, stopped_at: int | None = None
) -> Entry:
    return Entry(values, Printed(*figure), MEASURES[measure], stopped_at)


def test_entries_near_to_the_paper_are_counted_by_hand() -> None:
    accuracies = [
        entry("best", [90.0, 92.0], 91.2, 0.1),  # 0.2 off: beyond ±0.1, within 2
        entry("best", [50.0], 49.95, 0.1),  # 0.05 off: within both
        entry("best", [40.0], 43.0),  # 3 off, and no error printed
    ]
    text = "within the paper's error: 1 of 2; within 2 points: 2 of 3"
    assert near_text(accuracies) == text
    rounds = [
        entry("rounds", [30.0, 50.0], 30.0),  # 40 is 1.33 times 30
        entry("rounds", [nan, 60.0], 30.0),  # one seed alone: 60 is twice 30
        entry("rounds", [10.0], 30.0),  # a third
        entry("rounds", [nan], 1070.0),
    ]
    text = "within a factor of 2: 2 of 4; never reached: 1"
    assert near_text(rounds) == text
    sizes = [entry("comm", [41.0], 41.66), entry("comm", [8.4], 16.11)]
    # 2 % of 41.66 is 0.83.
    assert near_text(sizes) == "within 2 %: 1 of 2"


def test_an_unfinished_entry_counts_only_if_it_cannot_change() -> None:
    assert not entry("best", [88.0], 91.2, stopped_at=40).counts
    assert entry("rounds", [30.0], 30.0, stopped_at=40).counts
    assert not entry("rounds", [30.0, nan], 30.0, stopped_at=40).counts
    assert str(entry("best", [88.0], 91.2, stopped_at=40)) == (
        "88.00 at round 40 (91.20)"
    )


def test_who_holds_a_target_is_known_at_the_end_alone() -> None:
    assert entry("rounds-stays", [30.0], 30.0).counts
    assert entry("rounds-stays", [nan], 30.0).counts
    assert not entry("rounds-stays", [30.0], 30.0, stopped_at=40).counts
    assert near_text([entry("rounds-stays", [nan], 30.0)]).endswith("never held: 1")
    ended = replace(entry("rounds-stays", [nan], 30.0), unknown=True)
    assert str(ended) == "unknown: ended there (30)" and not ended.counts


def seed_with(curve: list[float], seed: int, **options: object) -> RunRecord:
    """Return a run whose target is 80 %, with this curve of the global model."""
    return run_of(
        seed=seed,
        seconds=[2.0] * len(curve),
        series={"global_accuracy": curve},
        target_accuracy=80,
        **options,
    )


def test_rounds_to_the_target_by_both_readings() -> None:
    """The mean curve is .8, .75, .8, .85, .85 in the evaluated rounds 2, 4, 6, 8, 10."""
    one = seed_with([nan, 0.9, nan, 0.7, nan, 0.7, nan, 0.9, nan, 0.9], 0)
    two = seed_with([nan, 0.7, nan, 0.8, nan, 0.9, nan, 0.8, nan, 0.8], 1)

    def of(name: str, *records: RunRecord) -> list[float]:
        return MEASURES[name].of_all(records)

    assert of("rounds", one, two) == [2, 4]
    assert of("rounds-stays", one, two) == [8, 4]
    assert of("rounds-one-seed", one, two) == [2]
    assert of("rounds-one-seed-stays", one, two) == [8]
    assert of("rounds-mean-curve", one, two) == [2]
    assert of("rounds-mean-curve-stays", one, two) == [6]
    # A round takes 2 s, of which none evaluates, and sends 100 bytes both ways.
    assert of("relative-seconds-stays", one, two) == [16, 8]
    assert of("sent-to-target-stays", two) == [800 / 2**30]
    lost = seed_with([0.8, 0.7], 0)
    assert isnan(of("rounds-stays", lost)[0])
    assert isnan(of("rounds-mean-curve-stays", lost)[0])
    ended = seed_with([0.7, 0.8], 0, stop_at_target=True)
    assert of("rounds", ended) == [2] and isnan(of("rounds-stays", ended)[0])
    assert MEASURES["rounds-stays"].unknown_of([one, ended])
    assert not MEASURES["rounds"].unknown_of([ended])


def found(best: float, rounds: float, seconds: float) -> Outcome:
    measured = {"best": [best], "rounds": [rounds], "relative-seconds": [seconds]}
    return Outcome(measured, finals={}, seconds=1.0, device="cpu")


def test_a_named_table_reads_as_the_papers(capsys: pytest.CaptureFixture[str]) -> None:
    columns: dict[str, dict[str, object]] = {"20": {}, "100": {}, "never": {}}
    study = Study.model_validate(
        {
            "datasets": {"digits": {}, "cifar10": {}},
            "columns": columns,
            "methods": {"genfed": {}, "fedavg": {}, "fedau": {}},
            "rival": "fedavg",
            "measures": ["best"],
            "tables": [
                {
                    "name": "Table 3",
                    "measure": "relative-seconds",
                    "datasets": ["digits"],
                    "columns": ["100", "20", "never"],
                    "methods": ["fedavg", "genfed"],
                }
            ],
            "further_figures": {
                "relative-seconds": {"digits": {"genfed": {"100": [0.07, 0.01]}}}
            },
        }
    )
    done: Outcomes = {
        ("digits", "20", "genfed"): found(90, 30, 5.0),
        ("digits", "20", "fedavg"): found(80, 30, 10.0),
        ("digits", "100", "genfed"): found(90, 30, 4.0),
        ("digits", "100", "fedavg"): found(80, 90, 40.0),
        ("digits", "100", "fedau"): found(80, 90, 40.0),
        ("digits", "never", "genfed"): found(80, 90, 40.0),
        ("digits", "never", "fedavg"): found(80, nan, nan),
        ("cifar10", "20", "fedavg"): found(80, 30, 10.0),
    }
    print_measure(study.tables[0], list(done), done, study)
    # 4 s by 40 s is 0.10: more than 0.01 from 0.07, but within a factor of two.
    title = "seconds to the target accuracy by those of the rival, digits"
    assert capsys.readouterr().out.splitlines() == [
        "",
        f"**Table 3**: {title}",
        "",
        "| method | 100 | 20 | never |",
        "| --- | ---: | ---: | ---: |",
        "| fedavg | 1.00x | 1.00x | – |",
        "| genfed | 0.10x (0.07x) | 0.50x | – |",
        "",
        "within the paper's error: 0 of 1; within a factor of 2: 1 of 1",
    ]


def test_a_table_has_two_measures_side_by_side(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Only one of them is compared with the paper; a column that is another reading of
    `base` has the same figures.
    """
    study = Study.model_validate(
        {
            "datasets": {"digits": {}},
            "columns": {"base": {}, "share": {}},
            "methods": {"fedavg": {}},
            "measures": ["best"],
            "tables": [
                {"name": "Table 2", "measure": "rounds-stays", "beside": ["rounds"]}
            ],
            "further_figures": {"rounds-stays": {"digits": {"fedavg": {"base": 1070}}}},
            "figures_of": {"share": "base"},
        }
    )

    def both(rounds: float, stays: float, *unknown: str) -> Outcome:
        measured = {"best": [80.0], "rounds": [rounds], "rounds-stays": [stays]}
        return Outcome(measured, {}, 1.0, "cpu", unknown=frozenset(unknown))

    done: Outcomes = {
        ("digits", "base", "fedavg"): both(250, 1150),
        ("digits", "share", "fedavg"): both(40, nan, "rounds-stays"),
    }
    print_measure(study.tables[0], list(done), done, study)
    assert capsys.readouterr().out.splitlines()[3:] == [
        "| method | base: rounds-stays | base: rounds | share: rounds-stays "
        "| share: rounds |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| fedavg | 1150 (1070) | 250 | unknown: ended there (1070) | 40 |",
        "",
        "within a factor of 2: 1 of 1",
    ]


def test_a_few_seeds_say_so_and_differences_are_paired(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Above the other by 1 and 3: 2 ± 1; the paper has 66.9 − 64.7 = 2.2."""
    study = Study.model_validate(
        {
            "datasets": {"digits": {}},
            "columns": {"s-4": {}, "s-5": {}, "s-6": {}},
            "methods": {"genefl": {}, "without": {}},
            "tables": [
                {"name": "I", "measure": "accuracy"},
                {"name": "V", "measure": "accuracy", "minus": "without"},
            ],
            "figures": {
                "digits": {
                    "genefl": {"s-4": 66.9, "s-5": [67.0, 0.5]},
                    "without": {"s-4": 64.7},
                }
            },
        }
    )

    def of(*seeds: int, accuracy: list[float]) -> Outcome:
        return Outcome({"accuracy": accuracy}, {}, 1.0, "cpu", seeds=seeds)

    done: Outcomes = {
        ("digits", "s-4", "genefl"): of(0, 1, accuracy=[65.0, 68.0]),
        ("digits", "s-4", "without"): of(0, 1, accuracy=[64.0, 65.0]),
        ("digits", "s-5", "genefl"): of(0, accuracy=[66.8]),
        ("digits", "s-5", "without"): of(1, accuracy=[64.0]),
        ("digits", "s-6", "genefl"): of(0, 1, 2, accuracy=[50.0, 50.0, 50.0]),
    }
    names = [cell for cell in done if cell[2] == "genefl"]
    counted = []
    for table in study.tables:
        entries = print_measure(table, names, done, study)
        counted.append((table, entries))
    lines = capsys.readouterr().out.splitlines()
    beside = "66.50 ± 1.50, two seeds (66.90) | 66.80, one seed (67.00) | 50.00 ± 0.00"
    assert f"| genefl | {beside} |" in lines
    assert "| genefl | +2.00 ± 1.00, two seeds (+2.20) | – | – |" in lines
    assert any("less that of without, seed by seed" in line for line in lines)
    print_counts(counted, study)
    # Two seeds of s-4 are 0.4 from the paper, the one of s-5 0.2, within its error.
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "| I | 3 | 2 | 1 of 1 | within 2 points: 2 of 2 |",
        "| V | 1 | 1 | – | within 2 points: 1 of 1 |",
    ]


def test_lines_of_a_plan(tmp_path: Path) -> None:
    (tmp_path / "a.toml").touch()
    line = "a.toml  'digits/*'  0..2  lr=0.1 rounds=3  as=low  # why"
    expected = Line(
        tmp_path / "a.toml", "digits/*", "0..2", ("lr=0.1", "rounds=3"), "low"
    )
    assert read_line(line, tmp_path) == expected
    plain = read_line("b.toml * 0", tmp_path)
    assert plain == Line(Path("b.toml"), "*", "0", (), "b")
    assert read_line("  # nothing", tmp_path) is None
    for wrong, reason in {
        "a.toml *": "needs a study's file, a pattern of cells, and seeds",
        "a.toml * 0 rounds": "option rounds: needs a value",
        "a.toml * 0 as=../x": "as=../x: must be the name of a folder",
        "a.toml '* 0": "no closing quotation",
    }.items():
        with pytest.raises(UserError, match=reason):
            read_line(wrong, tmp_path)


def test_every_line_of_the_shipped_plan_names_cells() -> None:
    path = Path(paper.__file__).with_name("plan.txt")
    studies: dict[Path, list[str]] = {}
    for text in path.read_text().splitlines():
        line = read_line(text, path.parent)
        if line is None:
            continue
        if line.study not in studies:
            study = read_study(path.with_name(line.study.name))
            names = product(study.datasets, study.across, study.methods)
            every = ["/".join(one) for one in names]
            studies[line.study] = [one for one in every if fits(one, study.cells)]
        named = [one for one in studies[line.study] if fits(one, [line.pattern])]
        assert named, line.pattern
    assert len(studies) == 3


Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs a plan in this process: exit code, output, errors."""
    (tmp_path / "study.toml").write_text(STUDY)

    def call(plan: str, *words: str) -> tuple[int, str, str]:
        path = tmp_path / "plan.txt"
        path.write_text(plan)
        common = ["--plan", str(path), "--out", str(tmp_path / "out")]
        code = paper.main([*common, "--device", "cpu", *words])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def test_the_alarm_rings_within_its_block_alone() -> None:
    with Stop().listening() as stop:
        with alarm(60):
            pass
        with alarm(0.01):
            deadline = time.monotonic() + 10
            while not stop.asked and time.monotonic() < deadline:
                time.sleep(0.01)
            assert stop.asked
        stop.asked = False
        with alarm(inf):
            time.sleep(0.05)
        assert not stop.asked


def test_a_plan_that_is_stopped_goes_on(
    planned: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = """
    study.toml  digits/few/fedavg  0..1  rounds=2    # first
    study.toml  digits/base/local  0     lr=0.5 as=fast
    study.toml  digits/few/*       7     rounds=1    # only local is left of it
    """
    monkeypatch.setattr(Stop, "after", lambda _, round: round == 4)
    code, out, err = planned(plan)
    assert code == STOPPED and "stopped; start it again" in err
    first, second = out.splitlines()
    assert first.startswith("study/digits/few/fedavg ") and first.endswith(" s")
    assert second.startswith("fast/digits/base/local ")
    assert "stopped after round 5 of 20000  " in second
    (before,) = read_seeds(tmp_path / "out/fast/digits/base/local")
    assert before.status == "stopped" and before.config["lr"] == 0.5
    assert not (tmp_path / "out/study/digits/few/local").exists()

    monkeypatch.setattr(Stop, "after", lambda _, round: round == 7)
    code, out, _ = planned(plan)
    assert code == STOPPED and "there already" in out.splitlines()[0]
    (after,) = read_seeds(tmp_path / "out/fast/digits/base/local")
    assert after.rounds_done == 8
    same = after.rounds["seconds"][:5] == before.rounds["seconds"]
    assert same.all(), "its rounds were made anew"

    code, out, _ = planned(plan, "--only", "*/few/*")
    assert code == 0
    (last,) = read_seeds(tmp_path / "out/study/digits/few/local")
    assert last.facts["seed"] == 7 and last.rounds_done == 1
    code, out, _ = planned(plan, "--table", "--unfinished")
    assert code == 0 and " at round 8 |" in out
    code, out, _ = planned(plan, "--table")
    assert code == 0 and "no cell is finished" in out and "at round" not in out
    assert "\n## " in out, "each study of a plan has tables of its own"


def test_a_killed_cell_goes_on_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = tmp_path / "study.toml"
    study.write_text(STUDY)
    words = [str(study), "--out", str(tmp_path / "out"), "--device", "cpu"]
    words += ["--seeds", "0", "--only", "*/few/fedavg"]
    monkeypatch.setattr(Stop, "after", lambda _, round: round == 2)
    # So often that the first round is due; the next waits a hundred times as long as
    # writing took, and the last is that of the stop.
    often = ["--set", "checkpoint_minutes=1e-9"]
    assert paper.main([*words, *often]) == STOPPED
    options: argparse.Namespace = paper.parse_arguments(words)
    (cell,) = paper.plan(paper.read_study(study), options)
    assert cell.settings.config.checkpoint_minutes == 1
    written = (cell.folder / "seed-0/checkpoints").iterdir()
    assert sorted(path.name for path in written) == ["00000001", "00000003"]
    # A killed run has written no end.
    with h5py.File(cell.folder / "seed-0/run.h5", "r+") as file:
        file.attrs["status"] = "running"
    assert resumed(cell) is not None
    shutil.rmtree(cell.folder / "seed-0/checkpoints")
    assert resumed(cell) is None


@pytest.mark.parametrize(
    ("plan", "words", "expected"),
    [
        ("study.toml * 0 rondz=3", (), "line 1: --set rondz: unknown option"),
        ("\nstudy.toml x 0", (), "line 2: --only x leaves no cell"),
        ("study.toml * 0", ("--only", "x"), "no cell is asked for"),
        ("study.toml * 0", ("--seeds", "1"), "every line of a plan has its own"),
        ("nobody.toml * 0", (), "line 1: cannot read nobody.toml"),
    ],
)
def test_a_mistake_in_a_plan_is_one_line(
    planned: Call, tmp_path: Path, plan: str, words: tuple[str, ...], expected: str
) -> None:
    code, out, error = planned(plan, *words)
    assert (code, out) == (2, "")
    assert expected in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()
