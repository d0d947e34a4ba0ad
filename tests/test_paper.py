"""benchmarks/paper: cells, their order and folders, going on after a stop, failures,
mistakes, tables.
"""

import gc
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.paper import __main__ as paper
from benchmarks.paper.measures import MEASURES
from hpcfed import cli
from hpcfed.clients.engine import Engine
from hpcfed.data import DATASETS
from hpcfed.errors import UserError
from hpcfed.experiment import data
from hpcfed.experiment import run as runs
from hpcfed.experiment.run import run
from hpcfed.methods import fedavg_ft, load, pfedgpa
from hpcfed.options import Settings
from hpcfed.options.checks import check_switches
from hpcfed.options.malicious import check_malicious
from hpcfed.options.partition import check_classes
from hpcfed.results.stored import read_seeds
from hpcfed.results.target import Reached, stays_from
from hpcfed.runtime.signals import STOPPED, Stop
from hpcfed.runtime.timer import PHASES
from tests.conftest import Command, start

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
COMMON = """
[common]
partition = "dominant"
model = "mlp"
rounds = 2
evaluate_every = 2
train_per_client = 30
test_per_client = 20
"""
STUDY = f"""
ours = "fedavg-ft"
rival = "fedavg"
optional = ["emnist"]
{COMMON}
[datasets.digits]
[datasets.emnist]
[clients.4]
participation = 0.5
[methods.fedavg]
[methods.fedavg-ft]
finetune_epochs = 3
[figures.digits]
fedavg = {{ 4 = 50 }}
"""
PFEDGPA = f"""
{COMMON}
[datasets.digits]
[clients.3]
[clients.4]
[methods.pfedgpa]
server = "small"
bank_rounds = 2
autoencoder_samples = 50
denoiser_samples = 50
diffusion_steps = 20
inversion_depth = 5
direct = true
server_save = false
[rows]
pfedgpa = ["pFedGPA", "pFedGPA-FT"]
[ablation]
method = "pfedgpa"
clients = "4"
finals = ["direct", "pFedGPA-FT"]
[ablation.figures]
digits = {{ direct = 12.5 }}
"""


CELLS = """
measures = ["best", "rounds"]
ours = ["genfed", "genfed-both"]
rival = "fedavg"
cells = ["*/plain/*", "*/ipm/fedavg"]
[common]
model = "mlp"
rounds = 3
clients = 6
participation = 0.5
validation = 100
target_accuracy = 25
[datasets.digits]
[columns.plain]
[columns.ipm]
clients = 8
attack = "ipm"
attackers = 6
attack_strength = 50
[methods.fedavg]
[methods.genfed]
schedule = "constant"
rho_max = 2
[methods.genfed-both]
method = "genfed"
supplement = true
[figures.digits]
genfed-both = { plain = 91.217 }
[further_figures.rounds.digits]
fedavg = { plain = 1070, ipm = 7 }
"""


@pytest.fixture
def study(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs a study in this process: exit code, output, errors."""

    def call(*words: object, text: str = STUDY) -> tuple[int, str, str]:
        path = tmp_path / "study.toml"
        path.write_text(text)
        common = ["--out", tmp_path / "out", "--data-root", tmp_path, "--device", "cpu"]
        code = paper.main([str(word) for word in (path, *common, *words)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def table_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


def test_a_study_runs_every_cell_once_and_tells_its_table_again(
    study: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = []
    load = data.load

    def counted(name: str, **how: Any) -> Any:
        loaded.append(name)
        return load(name, **how)

    monkeypatch.setattr(data, "load", counted)
    code, out, _ = study()
    assert code == 0
    assert loaded == ["digits"]
    assert data.load is counted
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing) is Engine], (
        "an engine outlived its cell"
    )
    lines = out.splitlines()
    assert lines[0].startswith("emnist is left out: emnist: no emnist-byclass")
    assert (
        lines[1].startswith("digits/4/fedavg ")
        and "± " in lines[1]
        and "(paper 50.00, " in lines[1]
    )
    assert lines[2].startswith("digits/4/fedavg-ft ") and lines[2].endswith(" s")
    table = table_of(out)
    assert table[0] == "| method | digits, 4 |"
    assert table[2].startswith("| fedavg | ") and table[2].endswith(" (50.00) |")
    assert "baselines within 2 points of the paper: " in out
    assert "fedavg-ft above fedavg: in " in out

    words = "--method fedavg-ft --clients 4 --participation 0.5 --seeds 0..2 --finetune-epochs 3 --device cpu"
    words += " --partition dominant --model mlp --rounds 2 --evaluate-every 2 --train-per-client 30"
    alone = run(
        cli.parse_run(
            [
                *words.split(),
                "--test-per-client",
                "20",
                "--out",
                str(tmp_path / "alone"),
            ]
        )
    )
    assert alone is not None
    for one, other in zip(
        read_seeds(alone), read_seeds(tmp_path / "out/digits/4/fedavg-ft"), strict=True
    ):
        assert one.last("accuracy") == other.last("accuracy")

    code, again, _ = study()
    assert code == 0
    assert again.count("there already") == 2
    assert loaded == ["digits", "digits"], (
        "a finished cell was run again"
    )  # the second is the run alone
    assert table_of(again) == table
    code, told, _ = study("--table")
    assert code == 0
    assert table_of(told) == table
    assert "there already" not in told

    code, _, error = study("--set", "rounds=3")
    assert (code, "was run with rounds 2, not 3; name another --out" in error) == (
        2,
        True,
    )
    code, _, error = study("--seeds", "1,7")
    assert (code, "holds seed 0, which a run would remove" in error) == (2, True)
    code, fewer, _ = study("--seeds", "1")
    assert code == 0
    assert "±" not in fewer


def test_a_failed_cell_is_told_and_only_it_is_run_again(
    study: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = STUDY.replace(
        "[methods.fedavg]",
        "[methods.pfedgpa]\nserver_latent = 99999\nbank_rounds = 2\n[methods.fedavg]",
    )
    with monkeypatch.context() as broken:

        def round(*_: object) -> None:
            raise RuntimeError("no room")

        # The round is FedAvg's, until the file has one of its own.
        broken.setattr(fedavg_ft, "round", round, raising=False)
        code, out, _ = study("--seeds", "0..1", text=text)
    assert code == 1
    refused, done, crashed = out.splitlines()[1:4]
    assert "failed: a latent of 99999 is larger than" in refused
    assert done.startswith("digits/4/fedavg ") and "failed" not in done
    assert "failed: RuntimeError: no room (in seed 0)" in crashed
    assert "| fedavg-ft | – |" in out
    assert out.endswith("failed: 2 cells\n")
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing) is Engine], (
        "an engine outlived its failed cell"
    )
    code, out, _ = study("--seeds", "0..1", "--methods", "fedavg,fedavg-ft", text=text)
    assert code == 0
    assert [("there already" in line) for line in out.splitlines()[1:3]] == [
        True,
        False,
    ]
    assert not list(tmp_path.glob("out/digits/4/fedavg-ft/seed-*/error-*.txt"))


def test_cells_at_once_are_the_same_cells(
    study: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    warm_python: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", warm_python)
    text = STUDY.replace(
        "[methods.fedavg]",
        "[methods.pfedgpa]\nserver_latent = 99999\nbank_rounds = 2\n[methods.fedavg]",
    )
    words = [
        "--seeds",
        "0..1",
        "--set",
        "finetune_epochs=1",
    ]  # which FedAvg does not have
    code, out, _ = study(*words, "--jobs", 2, text=text)
    assert code == 1 and out.endswith("failed: 1 cell\n")
    assert "pfedgpa" in out and "failed: a latent of 99999 is larger than" in out
    parallel = table_of(out)
    shutil.rmtree(tmp_path / "out")
    code, out, _ = study(*words, text=text)
    assert code == 1 and table_of(out) == parallel and len(parallel) > 2


def test_a_signal_stops_all_cells_at_work(
    tmp_path: Path, warm: Command, warm_python: str
) -> None:
    path, out = tmp_path / "study.toml", tmp_path / "out"
    path.write_text(STUDY)
    words = [
        path,
        "--out",
        out,
        "--data-root",
        tmp_path,
        "--device",
        "cpu",
        "--seeds",
        "0..1",
        "--jobs",
        2,
    ]
    words += ["--set", "rounds=5000"]  # no cell may end before the other has begun
    cells = [out / "digits/4" / name for name in ("fedavg", "fedavg-ft")]
    program = tmp_path / "program.py"
    program.write_text(
        f"import runpy, sys\nsys.executable = {warm_python!r}\n"
        'runpy.run_module("benchmarks.paper", run_name="__main__", alter_sys=True)\n'
    )
    command = warm(program, *words)
    environment = os.environ | {
        "PYTHONPATH": str(BENCHMARKS.parent),
        "OMP_NUM_THREADS": "1",
    }
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and not all(_rounds(cell) for cell in cells):
        time.sleep(0.1)
    child.terminate()
    _, err = child.communicate(timeout=60)
    assert (
        child.returncode == STOPPED and "paper: stopped; start it again to go on" in err
    )
    records = [record for cell in cells for record in read_seeds(cell)]
    assert len(records) == 4 and all(
        record.status == "stopped" and record.rounds_done for record in records
    )


def _rounds(cell: Path) -> int:
    """That are recorded, as far as one can read while they are written."""
    try:
        return min((record.rounds_done for record in read_seeds(cell)), default=0)
    except UserError:
        return 0


def test_a_signal_in_a_cells_last_round_ends_the_study(
    study: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = runs.run_stacked

    def asked_late(points: Sequence[Settings], stop: Stop) -> list[Path]:
        folders = whole(points, stop)
        stop.asked = True
        return folders

    monkeypatch.setattr(runs, "run_stacked", asked_late)
    code, said, _ = study(text=CELLS)
    assert code == STOPPED and said.count("digits/") == 1
    code, said, _ = study("--only", "digits/plain/fedavg", text=CELLS)
    assert code == 0, "all that was asked for is there"


def test_filters_and_budget(
    study: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    text = STUDY.replace("[methods.fedavg]", "[clients.5]\n[methods.fedavg]")
    code, out, _ = study("--budget", 0, text=text)
    assert code == 0
    assert "--budget 0 is spent; cells left: 4" in out
    assert out.endswith("no cell is finished\n")
    words = ["--seeds", 0, "--set", "rounds=1", "finetune_epochs=1"]
    code, out, _ = study("--only", "*/5/*", "--methods", "fedavg-ft", *words, text=text)
    assert code == 0
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.glob("out/*/*/*")] == [
        "out/digits/5/fedavg-ft"
    ]
    assert table_of(out)[0] == "| method | digits, 5 |"
    assert len(table_of(out)) == 3
    (record,) = read_seeds(tmp_path / "out/digits/5/fedavg-ft")
    assert (record.config["rounds"], record.config["finetune_epochs"]) == (1, 1)


def test_a_part_can_stand_for_a_data_set(
    study: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    images, labels = np.zeros((400, 28, 28, 1), np.uint8), np.arange(400) % 10
    np.savez(
        tmp_path / "part.npz",
        train_images=images,
        train_labels=labels,
        test_images=images,
        test_labels=labels,
    )
    words = [
        "--only",
        "emnist/*",
        "--methods",
        "fedavg",
        "--seeds",
        0,
        "--set",
        "rounds=1",
        "evaluate_every=1",
    ]
    code, out, _ = study(*words, "--data", "emnist=file:part.npz", "--jobs", 2)
    assert code == 0
    assert table_of(out)[0] == "| method | emnist, 4 |"
    (record,) = read_seeds(tmp_path / "out/emnist/4/fedavg")
    assert record.config["dataset"] == "file:part.npz"


@pytest.mark.parametrize(
    ("change", "words", "expected"),
    [
        (("rival =", "rivals ="), "", "rivals: unknown key; did you mean 'rival'?"),
        (
            ("rounds = 2", "roundz = 2"),
            "",
            "common.roundz: unknown option; did you mean 'rounds'?",
        ),
        (
            ("finetune_epochs = 3", 'finetune = "tail"'),
            "",
            "methods.fedavg-ft.finetune: must be 'all' or 'head'",
        ),
        (
            ("participation = 0.5", "clients = 7"),
            "",
            "clients.4.clients: the study gives it to every cell itself",
        ),
        (
            ("fedavg = {", "fedagv = {"),
            "",
            "unknown method 'fedagv'; did you mean 'fedavg'?",
        ),
        (("{ 4 = 50 }", "{ 40 = 50 }"), "", "unknown number of clients '40'"),
        (
            ("{ 4 = 50 }", "{ 4 = 'many' }"),
            "",
            "figures.digits.fedavg.4: must be a number, or [number, error]",
        ),
        (
            ("[methods.fedavg]", "[methods.fedagv]\n[methods.fedavg]"),
            "",
            "unknown method 'fedagv'",
        ),
        (
            ("[clients.4]", "[clients.four]"),
            "--methods fedavg",
            "number of clients '4'",
        ),
        (('["emnist"]', "[]"), "", "emnist: no emnist-byclass-train-images"),
        (("[common]", "[common"), "", "is not valid TOML"),
        (
            ("", ""),
            "--set roundz=3",
            "--set roundz: unknown option; did you mean 'rounds'?",
        ),
        (("", ""), "--set rounds", "--set rounds: needs a value"),
        (
            ("", ""),
            "--set rounds=0",
            "--set rounds=0: must be greater than or equal to 1",
        ),
        (("", ""), "--set seed=1", "--set seed=1: the study gives it"),
        (
            ("", ""),
            "--set snapshot_every=9",
            "digits/4/fedavg: --snapshot-every 9, but the run has only 2 rounds",
        ),
        (
            ("", ""),
            "--data emnist",
            "--data emnist: needs a value, as in --data svhn=file:svhn.npz",
        ),
        (
            ("", ""),
            "--data mnist=digits",
            "--data: unknown data set 'mnist'; did you mean 'emnist'?",
        ),
        (("", ""), "--data emnist=file:part.npz", "file:part.npz: no file part.npz"),
        (
            ("", ""),
            "--data emnist=digitz",
            "unknown data set 'digitz'; did you mean 'digits'?",
        ),
        (("", ""), "--seeds 3..1", "--seeds 3..1: must count upwards"),
        (
            ("", ""),
            "--methods fedavg,fedagv",
            "unknown method 'fedagv'; did you mean 'fedavg'?",
        ),
        (
            ("", ""),
            "--only cifar*",
            "--only cifar* leaves no cell; they have names such as digits/4/fedavg",
        ),
        (
            ("rival =", "measures = ['beste']\nrival ="),
            "",
            "measures.0: unknown measure 'beste'; did you mean 'best'?",
        ),
        (
            ('rival = "fedavg"', "measures = ['relative-seconds']"),
            "",
            "relative-seconds needs a rival",
        ),
        (
            ("[common]", "[[tables]]\nmeasure = 'best'\ncolumns = ['5']\n[common]"),
            "",
            "unknown number of clients '5'",
        ),
        (("", ""), "--plan p.txt", "name a study's file, or a --plan"),
        (("", ""), "--budget soon", "argument --budget: invalid float value"),
        (
            ("", ""),
            "--jobs 0",
            "argument --jobs: must be a whole number from 1 on, got",
        ),
        (("", ""), "--tables", "unrecognized arguments: --tables"),
    ],
)
def test_a_mistake_is_one_line(
    study: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    change: tuple[str, str],
    words: str,
    expected: str,
) -> None:
    code, out, error = study(
        *words.split(), text=STUDY.replace(*change) if change[0] else STUDY
    )
    assert (code, out) == (2, "")
    assert error.startswith("paper: ") and error.count("\n") == 1
    assert expected in error
    assert not (tmp_path / "out").exists()


def test_a_server_learns_in_one_cell_after_the_other(
    tmp_path: Path, warm: Command
) -> None:
    """In a process of its own: DeepSpeed keeps what it knows of process groups as long
    as a process lives.
    """
    path = tmp_path / "study.toml"
    path.write_text(PFEDGPA)
    words = [path, "--out", tmp_path / "out", "--device", "cpu", "--seeds", "0"]
    done = start(
        warm("-m", "benchmarks.paper", *words), PYTHONPATH=str(BENCHMARKS.parent)
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("pFedGPA-FT ") >= 2
    lines = table_of(done.stdout)
    assert lines[0] == "| method | digits, 3 | digits, 4 |"
    assert [line.split(" |")[0] for line in lines[2:4]] == ["| pFedGPA", "| pFedGPA-FT"]
    assert lines[4] == "| pfedgpa, 4 clients | direct | pFedGPA-FT |"
    assert "(12.50) |" in lines[6]


def test_the_study_of_pfedgpa_is_whole() -> None:
    options = paper.parse_arguments(
        [str(BENCHMARKS / "paper/pfedgpa.toml"), "--out", "out", "--seeds", "0..2"]
    )
    study = paper.read_study(options.study)
    cells = paper.plan(study, options)
    # The paper's nine rows and three readings everywhere; own bodies where not all is
    # generated; the server after every round, of both kinds; three rows of new clients;
    # of two data sets one row of depths, three of sizes, and three with more clients; of
    # a part of EMNIST eleven rows.
    usual = 3 * 3 * 12 + 2 * 3 + 2 + 3 * 3
    assert len(cells) == usual + 2 * (1 + 3 + 3 * 3) + 2 * 11
    printed = [cell for cell in cells if study.figure(*cell.names) is not None]
    assert len(printed) == 3 * 3 * 9
    assert {cell.names[2] for cell in printed} == set(study.tables[0].methods)
    for cell in cells:
        config = cell.settings.config
        cell.settings.options.check(config)
        assert (
            config.evaluate_every
            == config.rounds
            == (300 if config.dataset == "cifar10" else 200)
        )
        chosen = (
            config.clients > 20 and config.method != "local"
        )  # which sends nothing and waits for nobody
        assert config.participation == (0.3 if chosen else 1.0)
    assert all(
        figures.keys() == set(study.ablation.finals[:4])
        for figures in study.ablation.figures.values()
    )
    assert set(study.ablation.finals) <= set(pfedgpa.FINALS)
    for method, finals in study.rows.items():
        assert set(finals) <= set(load(method).FINALS)


def test_columns_of_any_kind_and_rows_that_are_variants(
    study: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    code, out, error = study("--seeds", "0..1", text=CELLS)
    assert code == 0, error
    folders = sorted(
        str(path.relative_to(tmp_path / "out")) for path in tmp_path.glob("out/*/*/*")
    )
    assert folders == [
        f"digits/{name}"
        for name in ("ipm/fedavg", "plain/fedavg", "plain/genfed", "plain/genfed-both")
    ]
    best, rounds = table_of(out)[:5], table_of(out)[5:]
    assert best[0] == "| best accuracy, % | digits, plain | digits, ipm |"
    assert (
        rounds[0] == "| rounds to the target accuracy | digits, plain | digits, ipm |"
    )
    assert best[4].startswith("| genfed-both | ") and best[4].endswith(" (91.22) | – |")
    runs = {
        row: read_seeds(tmp_path / "out/digits" / row)
        for row in ("plain/fedavg", "plain/genfed-both", "ipm/fedavg")
    }
    assert [run.config["supplement"] for run in runs["plain/genfed-both"]] == [
        True,
        True,
    ]
    assert [
        (run.config["clients"], run.config["attack"]) for run in runs["ipm/fedavg"]
    ] == [(8, "ipm")] * 2
    mean = (
        sum(
            100 * run.rounds["global_accuracy"].max()
            for run in runs["plain/genfed-both"]
        )
        / 2
    )
    assert f"| genfed-both | {mean:.2f} ± " in best[4]
    reached = [
        int((run.rounds["global_accuracy"] >= 0.25).argmax()) + 1
        for run in runs["plain/fedavg"]
    ]
    assert (
        f"| fedavg | {sum(reached) / 2:.0f} ± " in rounds[2]
        and "(1070) | never (7) |" in rounds[2]
    )
    assert "genfed-both above fedavg: in " in out and "genfed above fedavg: in " in out
    code, _, error = study(
        "--table", text=CELLS.replace("[columns.ipm]", "[clients.8]\n[columns.ipm]")
    )
    assert (code, "tables [clients.N], or [columns.NAME], and not both" in error) == (
        2,
        True,
    )
    code, _, error = study("--table", text=CELLS.replace("ipm = 7", "imp = 7"))
    assert (code, "unknown column 'imp'; did you mean 'ipm'?" in error) == (2, True)


SHARES = {"share-0.05": 0.05, "share-0.02": 0.02}


def test_the_study_of_genfed_is_whole() -> None:
    options = paper.parse_arguments(
        [str(BENCHMARKS / "paper/genfed.toml"), "--out", "out", "--seeds", "0..4"]
    )
    study = paper.read_study(options.study)
    cells = paper.plan(study, options)
    # Table 2; the small reading; 18 further columns of CIFAR-10 for FedAvg and GenFed;
    # two shares for the 18 rows with a supplement; equal weights without FedAU's rows;
    # two ρ_max for five schedules and two c for those three that have one; ties by loss
    # for 18 rows with selection; two ceilings.
    usual = 4 * 24 + 24 + 18 * 8 + 4 * 2 * 18 + 4 * 16 + 2 * 5 + 2 * 3
    assert len(cells) == usual + 4 * 18 + 2
    printed = {measure: 0 for measure in study.all_measures}
    for cell in cells:
        config = cell.settings.config
        check_switches(cell.settings)
        check_malicious(cell.settings.config, cell.settings.options)
        ceiling = cell.names[1] == "ceiling"
        assert config.cohort_size == (1 if ceiling else 10)
        assert (config.clients == 1 and config.partition == "iid") == ceiling
        by_loss = getattr(cell.settings.options, "ties", "id") == "loss"
        assert by_loss == (cell.names[1] == "ties")
        reading = (config.validation, config.supplement_share, config.batch_size)
        if cell.names[1] == "small":
            assert reading == (1000, 0.01, 32) and config.supplement_below is None
        else:
            share = SHARES.get(cell.names[1], 0.1)
            assert reading == (10_000, share, 10) and config.supplement_below == "mean"
        assert (config.weights == "uniform") == (cell.names[1] == "equal")
        assert (
            "supplement" in cell.names[2] or cell.names[2] in study.ours
        ) == config.supplement
        for measure in printed:
            if study.figure(*cell.names, measure=measure) is not None:
                printed[measure] += 1
                assert config.supplement == (cell.names[2] in study.ours), (
                    "the paper's methods have both parts"
                )
    # Table 2 has 18 rows for 4 data sets, Table 3 six; Tables 4 to 6 have six rows, and
    # three, eight and four columns that Table 2 has not. Of Table 2, two shares and ties
    # by loss repeat the 15 rows of the paper's methods, equal weights the 12 without
    # FedAU, and one data set has 16 for ρ_max and c.
    rounds = 4 * (18 + 3 * 15 + 12) + 2 * 5 + 2 * 3
    compared = {
        "accuracy": rounds + (3 + 8 + 4) * 6,
        "rounds-stays": rounds,
        "rounds-one-seed-stays": rounds,
        "rounds-mean-curve-stays": rounds,
        "relative-seconds-stays": 4 * (6 + 3 * 3 + 4) + 4,
    }
    assert printed == {name: compared.get(name, 0) for name in study.all_measures}
    assert {"rounds", "rounds-one-seed", "rounds-mean-curve", "best"} <= set(printed)


def test_seconds_to_the_target_leave_evaluations_out() -> None:
    """Two ranks, and the target after the second of three rounds: 10 + 20 s, of which
    the slower rank has evaluated for 1 + 4; two seeds share what remains.
    """
    phases = np.zeros((3, 2, len(PHASES)))
    evaluating = np.array([[1, 0.5], [3, 4], [9, 9]])
    phases[..., PHASES.index("evaluate")] = evaluating
    reached = Reached(rounds=2, seconds=30.0, bytes=0.0)
    kept = Reached(rounds=3, seconds=50.0, bytes=0.0)
    record = SimpleNamespace(
        phases=phases,
        rounds={"seconds": np.array([10.0, 20.0, 20.0])},
        stacks=np.full(3, 2),
        reached=lambda: reached,
        stays=lambda: kept,
        rounds_done=4,
    )
    measure = MEASURES["relative-seconds"]
    assert measure.of(record) == (30 - 1 - 4) / 2
    assert MEASURES["relative-seconds-stays"].of(record) == (50 - 1 - 4 - 9) / 2
    record.stacks[1:] = 1  # resumed alone after the first round
    assert measure.of(record) == (10 - 1) / 2 + (20 - 4)
    never = SimpleNamespace(reached=lambda: None)
    assert math.isnan(measure.of(never))


def test_a_target_held_at_the_very_end_is_not_held() -> None:
    """A curve that falls below its target every fifth round would hold it from wherever
    it is cut.
    """
    swings = np.tile([0.81, 0.79, 0.81, 0.82, 0.81], 20)
    settles = np.concatenate([swings[:50], np.full(50, 0.81)])
    for curve, held_from in ((swings, None), (settles, 48)):
        record = SimpleNamespace(
            target=80.0,
            judged=lambda curve=curve: curve,
            rounds_done=len(curve),
            stays=lambda curve=curve: Reached(stays_from(curve, 80), 0.0, 0.0),
        )
        for name in ("rounds-stays", "rounds-one-seed-stays"):
            measured = MEASURES[name]
            value = (
                measured.pooled([record]) if measured.pooled else measured.of(record)
            )
            assert value == held_from or (held_from is None and math.isnan(value))
        pooled = MEASURES["rounds-mean-curve-stays"].pooled
        assert pooled is not None
        value = pooled([record, record])
        assert value == held_from or (held_from is None and math.isnan(value))


def test_the_study_of_genefl_is_whole() -> None:
    options = paper.parse_arguments(
        [str(BENCHMARKS / "paper/genefl.toml"), "--out", "out", "--seeds", "0..2"]
    )
    study = paper.read_study(options.study)
    cells = paper.plan(study, options)
    more = ("genefl-", "other-", "one-")
    eight = {cell.names for cell in cells if not cell.names[2].startswith(more)}
    # Four columns of each data set, and six of CIFAR-10 with other readings, of which two
    # have an ablation.
    assert len(eight) == (3 * 4 + 6) * 8
    ablations, readings, one_cluster = 10 + 2 * 2 + 2, 2 * (7 + 3), 6
    assert len(cells) == len(eight) + ablations + readings + one_cluster
    by_name = {cell.names[2]: cell.settings.options for cell in cells}
    for name, options in by_name.items():
        # Table VI prints a row of one λ without the other.
        if "lambda1" in name:
            assert options.lambda2 == 0 < options.lambda1
        if "lambda2" in name:
            assert options.lambda1 == 0 < options.lambda2
    for cell in cells:
        config = cell.settings.config
        cell.settings.options.check(config)
        check_classes(config, DATASETS[config.dataset])
        assert (
            config.cohort_size == 10
            and config.new_clients == 50
            and config.new_rounds == 50
        )
        column = cell.names[1]
        pooled = config.network() == "resnet18-pool"
        assert pooled == column.endswith("-pool")
        assert pooled or config.network() == "resnet18"
        assert cell.settings.options.cluster_turns == column.endswith("-turns")
        if cell.names in eight:
            assert study.figure(*cell.names) is not None
            assert study.figure(*cell.names, measure="comm") is not None
            known = study.figure(*cell.names, measure="joined") is not None
            assert known == (cell.names[2] != "clustered-fedavg")
            other_reading = study.figure(*cell.names, measure="joined-trained")
            assert other_reading == study.figure(*cell.names, measure="joined")
