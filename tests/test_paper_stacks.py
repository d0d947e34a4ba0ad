"""benchmarks/paper --stack: cells that advance together in one process."""

from pathlib import Path

import pytest

from benchmarks.paper import __main__ as paper
from benchmarks.paper.cells import Cell
from benchmarks.paper.runs import stacks
from hpcfed.results.stored import read_seeds
from hpcfed.runtime.signals import STOPPED, Stop
from tests.runs import assert_same_run

STUDY = """
[common]
model = "mlp"
precision = "fp64"
rounds = 3
epochs = 1
batch_size = 64
clients = 4
participation = 0.5
validation = 100
supplement_below = "mean"
[datasets.digits]
[columns.small]
supplement_share = 0.1
[columns.large]
supplement_share = 0.5
[methods.fedavg]
[methods.genfed]
supplement = true
[methods.genfed-constant]
method = "genfed"
schedule = "constant"
supplement = true
"""


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """The words of a study in this folder."""
    study = tmp_path / "study.toml"
    study.write_text(STUDY)
    return [str(study), "--seeds", "0,1", "--device", "cpu"]


def cells_of(words: list[str], out: Path) -> list[Cell]:
    options = paper.parse_arguments([*words, "--out", str(out)])
    return paper.plan(paper.read_study(options.study), options)


def names_in_order(cells: list[Cell]) -> list[str]:
    return ["/".join(cell.names[1:]) for cell in cells]


def test_cells_that_differ_in_share_or_schedule_are_stacked(
    words: list[str], tmp_path: Path
) -> None:
    cells = cells_of(words, tmp_path / "out")

    def names(most: int) -> list[list[str]]:
        return [names_in_order(list(stack)) for stack in stacks(cells, most)]

    genfed = [
        "small/genfed",
        "small/genfed-constant",
        "large/genfed",
        "large/genfed-constant",
    ]
    fedavg = ["small/fedavg", "large/fedavg"]
    assert names(8) == [fedavg, genfed]
    # Two cells of two seeds each are four runs.
    assert names(5) == [fedavg, genfed[:2], genfed[2:]]
    assert names(3) == [[cell] for cell in names_in_order(cells)]
    assert names(1) == names(3)


def test_a_stack_is_the_same_cells_and_goes_on_where_it_was_stopped(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Two cells, which differ in both.
    words += ["--only", "*/small/genfed", "--only", "*/large/genfed-constant"]
    together = [*words, "--out", str(tmp_path / "together"), "--stack", "8"]
    with monkeypatch.context() as stopping:
        stopping.setattr(Stop, "after", lambda _, round: round == 0)
        assert paper.main(together) == STOPPED
    said = capsys.readouterr().out
    assert said.count("stopped after round 1 of 3") == 2
    assert paper.main(together) == 0
    assert capsys.readouterr().out.count(" s for 2 cells together") == 2
    assert paper.main([*words, "--out", str(tmp_path / "alone")]) == 0
    alone = cells_of(words, tmp_path / "alone")
    for one, other in zip(cells_of(words, tmp_path / "together"), alone, strict=True):
        for run in read_seeds(one.folder):
            assert run.stacked_seeds == 4
            expected = other.folder / run.folder.name
            assert_same_run(run.folder, expected, tolerance=1e-12)
