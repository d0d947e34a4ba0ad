"""What a user sees: help, lists, and one clear line for every mistake."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import h5py
import numpy as np
import pytest
import torch

from hpcfed import cli, methods
from hpcfed.cli.commands import COMMANDS
from hpcfed.cli.settings import all_method_fields
from hpcfed.doctor.command import _report
from hpcfed.doctor.finding import Finding, Level
from hpcfed.doctor.report import Diagnosis
from hpcfed.errors import remark, say
from hpcfed.options import RunConfig
from hpcfed.options.aggregation import RULES, Rule
from hpcfed.options.compression import COMPRESSORS, Compressing
from hpcfed.options.declare import synonyms
from hpcfed.options.metrics import METRICS
from hpcfed.options.runconfig import suggest_option
from hpcfed.results.claim import claimed
from hpcfed.studies.start import StudyOrder
from tests.conftest import start
from tests.runs import ending, mistake, without_reader

KNOWN = [*RunConfig.model_fields, *all_method_fields()]
QUICK = ["run", "--model", "mlp", "--rounds", "2", "--clients", "4"]
QUICK += ["--batch-size", "64"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("run --metod fedavg", "--method"),
        ("run --roundz 3", "--rounds"),
        ("run --method fedagv", "did you mean 'fedavg'?"),
        ("run --method", "expected one argument"),
        ("run --epochs 99999999999999", "must be less than or equal to 100000"),
        ("run --batch-size 99999999999999999999", "must be less than 2147483648"),
        ("attack idlg --seed 99999999999999999999999", "--seed must be below 2^63"),
        ("attack idlg --noise nan", "--noise must be 0 or more"),
        ("run --dataset digts", "did you mean 'digits'?"),
        ("run --model cnn-cifr", "did you mean 'cnn-cifar'?"),
        ("run --partition dirichle", "did you mean 'dirichlet'?"),
        ("run --participation 0", "--participation 0: must be greater than 0"),
        ("run --participation 1.5", "less than or equal to 1"),
        ("run --rounds 0", "--rounds 0: must be greater than or equal to 1"),
        (
            "run --rounds 1000000000000",
            "--rounds 1000000000000 of --clients 20 would make",
        ),
        ("run --rounds many", "--rounds many: must be a whole number\n"),
        ("run --lr fast", "--lr fast: must be a number\n"),
        ("show runs --jsn", "unknown option --jsn; did you mean '--json'?"),
        ("show one two", "unexpected argument 'two'"),
        ("run --alpha nan", "--alpha nan"),
        ("run --lr -1", "--lr"),
        ("run --engine turbo", "'auto', 'batched', 'vmap' or 'loop'"),
        (
            "run --model cnn-cifar",
            "needs images of at least 20 pixels a side, digits has 1x8x8",
        ),
        ("run --partition sharding --classes-per-client 11", "digits has 10 classes"),
        ("run --validation 5", "cannot hold all 10 classes"),
        (
            "run --finetune head",
            "--finetune is an option of method fedavg-ft, fedbabu; add --method fedavg-ft",
        ),
        ("run --dataset cifar10 --data-root /nowhere/at/all", "/nowhere/at/all"),
        ("run --dataset file:/nowhere/my.npz", "/nowhere/my.npz"),
        (
            "run --rounds 3 --snapshot-every 9",
            "--snapshot-every 9, but the run has only 3 rounds",
        ),
        (
            "run --synthetic-shape 3x32",
            "--synthetic-shape 3x32: must look like 3x32x32",
        ),
        ("attack idlg --out stolen.foo", "name a file that ends in .png"),
        ("attack idlg --out a.toml/stolen.png", "a.toml cannot be written to"),
        ("profile --profile-rounds 0", "must be a whole number from 1 on, got '0'"),
        ("study a.toml --points x", "must be numbers of points, as in 0,3, got 'x'"),
        ("run nowhere.toml", "cannot read nowhere.toml"),
        ("run a.toml b.toml", "unexpected argument 'b.toml'"),
        ("runn", "did you mean 'run'?"),
        ("show /dev/null", "/dev/null is a file; name the folder of a run"),
        ("show /nowhere/at/all", "no such folder: /nowhere/at/all"),
        ("show", "show needs DIR, as in: hpcfed show runs/first"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(
    words: str,
    expected: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_text("rounds = 1\n")
    assert expected in mistake(capsys, *words.split())
    assert list(tmp_path.iterdir()) == [tmp_path / "a.toml"], (
        "a mistake must leave nothing behind"
    )


@pytest.mark.parametrize(
    ("strange", "meant"),
    [
        ("learning-rate", "lr"), ("C", "participation"), ("partiton", "partition"), ("server-size", "server"),
        ("verbose", None), ("x", None),
    ],
)  # fmt: skip
def test_an_unknown_option_is_guessed_by_its_meaning_or_not_at_all(
    strange: str, meant: str | None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flag = f"-{strange}" if len(strange) == 1 else f"--{strange}"
    line = mistake(capsys, "run", "--method", "pfedgpa", flag, "1")
    assert line == f"hpcfed: unknown option {flag}" + (
        f"; did you mean '--{meant}'?\n" if meant else "\n"
    )
    path = tmp_path / "my.toml"
    name = strange.replace("-", "_")
    path.write_text(f"method = 'pfedgpa'\n{name} = 1")
    guess = f"; did you mean '{meant.replace('-', '_')}'?" if meant else ""
    assert (
        mistake(capsys, "run", path)
        == f"hpcfed: {path}: {name}: unknown option{guess}\n"
    )


OTHER_TOOLS = """
Flower      num-server-rounds=rounds num-rounds=rounds server-rounds=rounds fraction-fit=participation
Flower      fraction-train=participation fraction-evaluate=evaluate-clients min-fit-clients=cohort
Flower      min-available-clients=clients num-supernodes=clients local-epochs=epochs strategy=method proximal-mu=prox-mu
FedML       client_num_in_total=clients client_num_per_round=cohort comm_round=rounds federated_optimizer=method
FedML       client_optimizer=optimiser partition_method=partition partition_alpha=alpha random_seed=seed
FedML       frequency_of_the_test=evaluate-every data_cache_dir=data-root learning_rate=lr using_gpu= gpu_id=device
pfl         central_num_iterations=rounds cohort_size=cohort local_num_epochs=epochs local_batch_size=batch-size
pfl         local_learning_rate=lr evaluation_frequency=evaluate-every val_cohort_size=evaluate-clients central_lr=server-lr
LEAF        clients-per-round=cohort eval-every=evaluate-every num-epochs=epochs minibatch=batch-size
FedScale    num_participants=cohort data_set=dataset data_dir=data-root eval_interval=evaluate-every log_path=out
FedScale    gradient_policy=method proxy_mu=prox-mu
PFLlib      global_rounds=rounds join_ratio=participation local_learning_rate=lr learning_rate_decay=lr-decay
PFLlib      algorithm=method device_id=device eval_gap=evaluate-every times=seeds num_clients=clients
PFLlib      num_classes= server_learning_rate=server-lr
others      num_users=clients frac=participation local_ep=epochs local_bs=batch-size bs=batch-size iid=partition
others      client-fraction=participation client-frac=participation dirichlet-alpha=alpha concentration=alpha shards-per-client=classes-per-client
torch       batch=batch-size gpu=device gpus=device no-cuda=device cuda=device num-workers= test-batch-size= optimizer=optimiser
torch       output-dir=out save=out results-dir=out dataset-path=data-root data=dataset data-path=data-root arch=model
torch       network=model model-name=model max-grad-norm=clip clip-value=clip wd=weight-decay amp=precision
torch       mixed-precision=precision dtype=precision resume-from=resume patience=early-stop workers= dropout= temperature=
papers      eta=lr E=epochs n=clients K=clients T=rounds beta=alpha mu=prox-mu LR=lr heterogeneity=alpha algo=method
typos       modle=model roundz=rounds
"""


def test_names_of_other_tools_lead_to_ours() -> None:
    """Each to the option of the same meaning, or to none: no guess misleads."""
    known = [f"--{name.replace('_', '-')}" for name in KNOWN]
    wrong = []
    for line in OTHER_TOOLS.split("\n")[1:-1]:
        tool, *pairs = line.split()
        for pair in pairs:
            word, _, meant = pair.partition("=")
            expected = f"; did you mean '--{meant}'?" if meant else ""
            if suggest_option(f"--{word}", known) != expected:
                wrong.append((tool, pair, suggest_option(f"--{word}", known)))
    assert not wrong


def test_every_guess_is_an_option() -> None:
    others = [word for words in synonyms().values() for word in words]
    assert "learning_rate" in others
    assert len(set(others)) == len(others), "a name must not mean two options"
    assert not set(others) & set(KNOWN)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("metod = 'fedavg'", "metod: unknown option; did you mean 'method'?"),
        ("rounds = 'x'", "rounds: must be a whole number"),
        ("method = 'fedagv'", "did you mean 'fedavg'?"),
        ("[run]\nrounds = 3", "'run' is a table"),
        ("[sweep]\nlr = [1]", "run a study by: hpcfed study "),
        ("rounds = ", "not valid TOML"),
        ("rounds = 2.5", "rounds"),
        ("clip = inf", "clip"),
        (
            "finetune = 'head'",
            "finetune is an option of method fedavg-ft, fedbabu, and the method is fedavg",
        ),
        ("lr = true", "lr: must have a value, got true"),
        ("out = ''", "out: must be a path, got nothing"),
        ("batch-size = 1\nbatch_size = 2", "batch_size is there twice"),
        ("resume = 'runs/first'\nlr = 0.5", "give resume only on the command line"),
        ('out = "a\\u0000b"', "out: must be without a null character"),
    ],
)
def test_a_mistake_in_the_file_names_the_file(
    text: str, expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "my.toml"
    path.write_text(text)
    line = mistake(capsys, "run", path)
    assert expected in line
    if "fedagv" not in text:
        assert "my.toml" in line


def test_mistakes_are_found_before_torch_or_mpi_are_loaded() -> None:
    program = (
        "import sys\nfrom hpcfed import cli\n"
        "try: cli.main(['run', '--model', 'cnn-cifar'])\nexcept SystemExit as end: "
        "assert end.code == 2\n"
        "cli.main(['list'])\n"
        "assert not {'torch', 'mpi4py.MPI', 'torchvision', 'sklearn'} & "
        "set(sys.modules), 'heavy import'\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


def summary_of(capsys: pytest.CaptureFixture[str], folder: Path) -> dict[str, Any]:
    capsys.readouterr()
    cli.main(["show", str(folder), "--json"])
    summary: dict[str, Any] = json.loads(capsys.readouterr().out)
    return summary


def test_an_existing_out_is_refused_unless_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    cli.main([*QUICK, "--out", str(out)])
    capsys.readouterr()
    before = (out / "run.h5").read_bytes()
    assert "already holds a run; add --overwrite" in mistake(
        capsys, *QUICK, "--out", out
    )
    assert (out / "run.h5").read_bytes() == before
    (out / "notes.txt").write_text("mine")
    cli.main([*QUICK, "--seed", "1", "--out", str(out), "--overwrite"])
    assert summary_of(capsys, out)["seed"] == 1
    assert (out / "notes.txt").read_text() == "mine", (
        "--overwrite may only remove what a run wrote"
    )
    (out / "run.h5").unlink()
    (out / "model.npz").unlink()
    shutil.rmtree(out / "checkpoints")
    assert "not empty and holds no run" in mistake(
        capsys, *QUICK, "--out", out, "--overwrite"
    )
    assert "is a file" in mistake(capsys, *QUICK, "--out", out / "notes.txt")


def test_what_a_run_left_that_was_killed_early_may_be_overwritten(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    left = tmp_path / "left"
    (left / "seed-3").mkdir(parents=True)
    (left / "params-0.h5").write_text("")
    (left / "seed-3/error-0.txt").write_text("")
    (left / "seed-3/mine.txt").write_text("")
    assert "not empty and holds no run" in mistake(capsys, *QUICK, "--out", left)
    cli.main([*QUICK, "--out", str(left), "--overwrite"])
    capsys.readouterr()
    assert summary_of(capsys, left)["status"] == "complete"
    assert [path.name for path in (left / "seed-3").iterdir()] == ["mine.txt"]


def test_flags_win_over_the_file_and_both_are_stored(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "my.toml").write_text(
        'method = "fedavg-ft"\nrounds = 5\nfinetune-epochs = 3\nmodel = "mlp"\nlr = 0.2\n'
    )
    cli.main(
        [
            "run",
            str(tmp_path / "my.toml"),
            "--rounds",
            "2",
            "--clients",
            "4",
            "--out",
            str(tmp_path / "run"),
        ]
    )
    summary = summary_of(capsys, tmp_path / "run")
    expected = {
        "method": "fedavg-ft",
        "rounds": 2,
        "finetune_epochs": 3,
        "lr": 0.2,
        "clients": 4,
        "finetune": "all",
    }
    assert {name: summary["config"][name] for name in expected} == expected
    assert set(RunConfig.model_fields) <= set(summary["config"])


def test_the_help_explains_every_option(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "500")  # no wrapping inside of words
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "--method", "fedavg-ft", "--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, field in RunConfig.model_fields.items():
        assert f"--{name.replace('_', '-')}" in text
        assert field.description in text
        if field.default not in (None, False):
            assert f"(default: {field.default})" in text
    assert "--finetune-epochs" in text
    assert "examples:" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_examples_and_those_of_run_are_understood(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    _, _, examples = capsys.readouterr().out.partition("examples:\n")
    lines = [line.strip().partition("   ")[0] for line in examples.splitlines()]
    assert lines and all(f"hpcfed {command}" in line for line in lines)
    if command == "run":
        for line in lines:
            words = (
                line.partition("hpcfed run ")[2]
                .partition("  ")[0]
                .replace("my.toml", "")
                .split()
            )
            cli.parse_run(words)


def test_list_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["list"])
    text = capsys.readouterr().out
    for name in (
        "fedavg-ft",
        "local",
        "digits",
        "fashion-mnist",
        "resnet18",
        "cnn-cifar",
        "dirichlet",
        "dominant",
        *METRICS,
        *RULES,
        *COMPRESSORS,
    ):
        assert f"\n  {name} " in text
    assert set(RULES) == set(get_args(Rule))
    assert set(COMPRESSORS) == set(get_args(Compressing))
    assert "and two that wait for no client\n" in text, "a sentence may fill two lines"


def test_show_reads_a_run_back(
    tmp_path: Path, hpcfed: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    done = hpcfed(
        *QUICK, "--evaluate-every", 2, "--rounds", 3, "--out", tmp_path / "run"
    )
    assert done.returncode == 0, done.stderr
    assert "round 1/3" in done.stderr and "round 3/3" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr, "no terminal, no colours"
    shown = hpcfed("show", tmp_path / "run")
    assert shown.returncode == 0
    assert shown.stdout == done.stdout, "the summary at the end is what show shows"
    cli.main(["show", str(tmp_path / "run"), "--json"])
    summary = json.loads(capsys.readouterr().out)
    assert summary["status"] == "complete"
    assert (
        summary["rounds_done"],
        summary["clients"],
        summary["ranks"],
        summary["seed"],
    ) == (3, 4, 1, 0)
    assert (summary["method"], summary["dataset"]) == ("fedavg", "digits")
    assert summary["accuracy"][0] is None, "round 1 was not evaluated"
    assert all(0 <= value <= 1 for value in summary["accuracy"][1:]), (
        "round 2 is due, round 3 the last"
    )
    assert (
        len(summary["seconds_per_round"]) == 3 and min(summary["seconds_per_round"]) > 0
    )
    assert summary["seconds_per_phase"]["train"] > 0
    assert (
        summary["bytes_up"] == summary["bytes_down"] == [4 * 4 * summary["columns"]] * 3
    )


def test_a_users_own_data(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(3, size=90)
    images = (rng.integers(60, size=(90, 6, 6)) + 60 * labels[:, None, None]).astype(
        np.uint8
    )
    np.savez(
        tmp_path / "own.npz",
        train_images=images[:60],
        train_labels=labels[:60],
        test_images=images[60:],
        test_labels=labels[60:],
    )
    options = [
        "--dataset",
        f"file:{tmp_path}/own.npz",
        "--clients",
        "3",
        "--rounds",
        "5",
        "--partition",
        "iid",
    ]
    cli.main(["run", *options, "--out", str(tmp_path / "run")])
    assert summary_of(capsys, tmp_path / "run")["global_accuracy"][-1] > 0.9


def test_show_of_something_else_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "holds no run" in mistake(capsys, "show", tmp_path)
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "run.h5").touch()
    said = mistake(capsys, "show", tmp_path)
    assert f"(one); name one, as in {tmp_path}/one, or look at all" in said
    (tmp_path / "run.h5").write_bytes(b"not HDF5 at all")
    assert "cannot be read as a run" in mistake(capsys, "show", tmp_path)
    with h5py.File(tmp_path / "run.h5", "w") as file:
        file["x"] = 1
    assert "not written by hpcfed" in mistake(capsys, "show", tmp_path)


def test_an_unwritable_out_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file") in mistake(
        capsys, *QUICK, "--out", tmp_path / "file" / "run"
    )


@pytest.mark.parametrize("flag", ["--out", "--resume", "--data-root"])
def test_a_path_of_nothing_is_not_this_folder(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "must be a path, got nothing" in mistake(capsys, *QUICK[:1], flag, "")


@pytest.mark.parametrize("flag", ["--out", "--resume", "--data-root", "--dataset", ""])
@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a\udcffb", "must be UTF-8"),
        ("a\nb", "must be without control"),
        ("a\x1bb", "must be without control"),
    ],
)
def test_a_path_that_no_record_can_hold_is_refused_at_the_start(
    flag: str,
    path: str,
    expected: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Bytes of a command line that are no UTF-8 reach Python as surrogates."""
    line = mistake(capsys, "run", *([flag] if flag else []), tmp_path / path)
    assert expected in line and (flag or "CONFIG.toml") in line
    assert list(tmp_path.iterdir()) == []
    assert expected in mistake(capsys, "study", "a.toml", "--out", path)


def test_a_file_of_options_is_a_file_of_sane_size(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "large.toml").open("wb") as file:
        file.truncate(2**40)
    for path in ("/dev/zero", "/dev/stdin", tmp_path / "pipe"):
        assert f"{path} is not a regular file" in mistake(capsys, "run", path)
    assert "has 1,099,511,627,776 bytes" in mistake(
        capsys, "run", tmp_path / "large.toml"
    )
    assert "Is a directory" in mistake(capsys, "run", tmp_path)
    assert "is not a regular file" in mistake(capsys, "study", "/dev/zero")


HUGE = "9" * 5000


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--rounds 1e400", "--rounds 1e400: must be a whole number"),
        (f"--rounds {HUGE}", "--rounds 9999999999…: "),
        (f"--seeds 0..{HUGE}", "must be seeds below 2^63"),
        (f"--lr {HUGE}", "--lr 9999999999…: "),
        ("--lr 1e39", "--lr 1e39: must be 0 or between 1.2e-38 and 3.4e+38"),
        ("--lr 1e-60", "--lr 1e-60: must be 0 or between"),
        ("--weight-decay 1e39", "--weight-decay 1e39: must be 0 or between"),
        ("--method pfedhn --inner-lr 1e39", "--inner-lr 1e39: must be 0 or between"),
        (
            "--dataset synthetic --train-per-client 99999999999999999999",
            "must be at most 1,000,000,000,000",
        ),
        (
            "--dataset synthetic --synthetic-classes 99999999999999999999",
            "must be at most 1,000,000,000,000",
        ),
        (
            "--method fedau --participation 0.5 --au-cutoff 99999999999999999999",
            "must be at most",
        ),
        (
            "--method fedavg-ft --finetune-epochs 99999999999999999999",
            "less than or equal to 100000",
        ),
        ("--method genefl --basis 99999999999999999999", "less than or equal to 10000"),
    ],
)
def test_a_number_that_no_run_can_compute_with_is_refused(
    words: str, expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    line = mistake(capsys, "run", *words.split())
    assert expected in line and len(line) < 250
    *_, name, value = words.split()
    path = tmp_path / "my.toml"
    method = f"method = '{words.split()[1]}'\n" if words.startswith("--method") else ""
    path.write_text(
        f"{method}{name.removeprefix('--')} = {value if '..' not in value else repr(value)}"
    )
    assert len(mistake(capsys, "run", path)) < 400


def test_a_folder_is_one_runs_at_a_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with claimed(tmp_path):
        for words in (
            [*QUICK, "--out", tmp_path],
            [*QUICK, "--out", tmp_path, "--overwrite"],
        ):
            assert "another run is writing to" in mistake(capsys, *words)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".claim").touch()  # as a run that was killed leaves it
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda *_: "NOW")
    for _ in range(2):  # begun in the same second, as those of a job array
        cli.main([*QUICK, "--rounds", "1"])
    assert sorted(path.name for path in Path("runs").iterdir()) == [
        "fedavg-digits-NOW",
        "fedavg-digits-NOW-2",
    ]
    cli.main([*QUICK, "--rounds", "1", "--out", str(tmp_path / "runs" / "new")])
    made = {path.name for path in (tmp_path / "runs" / "new").iterdir()}
    assert made == {"run.h5", "model.npz", "checkpoints"}


def test_a_run_outlives_its_terminal_and_its_log(tmp_path: Path) -> None:
    """Output that cannot be written must not cost what was computed."""
    words = [sys.executable, "-m", "hpcfed", *QUICK, "--out"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [*words, str(tmp_path / "full")],
            stdout=subprocess.PIPE,
            stderr=full,
            text=True,
        )
    assert ended.returncode == 0
    assert "status: complete" in ended.stdout
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [*words, str(tmp_path / "mute")],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert ended.returncode == 0, ended.stderr
    assert (
        "cannot write to stdout: No space left on device; the run is complete"
        in ended.stderr
    )
    assert "Traceback" not in ended.stderr and "Exception" not in ended.stderr
    ended = subprocess.run(
        ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *words, str(tmp_path / "closed")]
    )
    assert ended.returncode == 0
    assert (tmp_path / "closed" / "run.h5").exists()


def test_no_number_is_cut_to_a_narrow_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    cli.main([*QUICK, "--out", str(tmp_path / "run")])
    assert "…" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "from hpcfed.methods.fedavg import init, round, personal, global_row, welcome",
            None,
        ),
        (
            "from hpcfed.methods.fedavg import init, round, personal",
            "lacks global_row, welcome",
        ),
        ("def round(", "cannot be imported: SyntaxError"),
        (
            "from hpcfed.options import Options\nfrom hpcfed.methods.fedavg import *\n"
            "class Options(Options): lr: float = 1.0",
            "every run already has an option lr",
        ),
        (
            "from hpcfed.options import Options\nfrom hpcfed.methods.fedavg import *\n"
            "class Options(Options): mu: float = 1.0",
            "make its option mu by",
        ),
    ],
)
def test_a_method_of_ones_own(
    text: str,
    expected: str | None,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It needs no options; what it lacks is told in one line, and other methods do not
    suffer from it.
    """
    (tmp_path / "my_own.py").write_text(text)
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "hpcfed.methods.my_own", raising=False)
    importlib.invalidate_caches()
    if expected is None:
        assert cli.parse_run(["--method", "my-own"]).config.method == "my-own"
    else:
        assert expected in mistake(capsys, "run", "--method", "my-own")
    assert (
        cli.parse_run(["--method", "fedavg-ft", "--finetune", "head"]).config.method
        == "fedavg-ft"
    )
    monkeypatch.delitem(sys.modules, "hpcfed.methods.my_own", raising=False)


def test_letters_that_the_locale_lacks_are_replaced(hpcfed: Callable[..., Any]) -> None:
    listed = hpcfed("list", PYTHONIOENCODING="ascii")
    assert listed.returncode == 0, listed.stderr
    assert "w ? w" in listed.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_without_a_gpu_is_one_line(hpcfed: Callable, tmp_path: Path) -> None:
    refused = hpcfed("run", "--backend", "nccl", "--out", tmp_path / "run")
    assert refused.returncode == 2
    assert (
        refused.stderr.count("\n") == 1
        and "--backend nccl, but torch finds no CUDA device" in refused.stderr
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_gpu_tests_without_a_gpu_are_one_line() -> None:
    """In this process's own Python, so that nothing is installed."""
    program = Path(__file__).parents[1] / "launch/test"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    refused = start([str(program), "--gpu"], HPCFED_ENVIRONMENT="current", PATH=path)
    assert refused.returncode == 2
    assert (
        refused.stderr.count("\n") == 1
        and "torch finds no CUDA device here" in refused.stderr
    )
    wrong = start([str(program), "--gpu"], HPCFED_ENVIRONMENT="mine", PATH=path)
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1


def test_a_line_is_written_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else mpirun may put another rank's words between a line and its end."""
    pieces: list[str] = []
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=pieces.append, flush=list))
    remark("hpcfed: one\ntwo")
    assert [piece for piece in pieces if piece] == ["hpcfed: one\ntwo\n"]


@pytest.mark.parametrize(
    "command",
    ["list", "--version", "run --help", "show --help", "benchmark --list", ""],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_of_several_ranks_one_runs_what_is_for_one_process(
    command: str,
    rank: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", str(rank))
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_NUM_APP_CTX", "1")
    monkeypatch.setenv("OMPI_ARGV", f"-m hpcfed {command}".strip())
    with suppress(SystemExit):
        cli.main(command.split())
    said = capsys.readouterr()
    assert bool(said.out + said.err) == (rank == 0)


def test_a_study_goes_on_without_its_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is `head` in `hpcfed study … | head -1`: the third of three lines still fails."""
    file, done = tmp_path / "s.toml", []

    def run_trials(order: StudyOrder) -> int:
        for trial in order.trials:
            say(f"{trial.folder} …")
            done.append(trial.folder.name)
        return 1

    file.write_text("[sweep]\nlr = [0.1, 0.2]\n")
    monkeypatch.setattr("hpcfed.studies.execute.run_trials", run_trials)
    with without_reader(monkeypatch):
        assert ending("study", file, "--out", tmp_path / "out") == 1
    assert len(done) == 2
    with without_reader(monkeypatch):
        words = ["--out", tmp_path / "out", "--submit"]
        monkeypatch.setattr("subprocess.run", partial(_submitted, done))
        assert ending("study", file, *words) == 0
    # How large an array may be, the array, and the job that gathers.
    assert done[2:] == ["scontrol", "sbatch", "sbatch"]


def _submitted(done: list[str], words: list[str], **_: object) -> SimpleNamespace:
    """Take note of a job, as sbatch would."""
    done.append(words[0])
    return SimpleNamespace(returncode=0, stdout="17\n", stderr="")


def test_the_doctors_verdict_and_file_need_no_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = Finding("files", Level.ERROR, "too few", advice="raise the limit")
    diagnosis, file = Diagnosis({"limits": [finding]}, 1.0), tmp_path / "d.json"
    location = SimpleNamespace(host="here")
    with without_reader(monkeypatch):
        world = SimpleNamespace(locations=[location])
        monkeypatch.setattr(
            "hpcfed.doctor.command.write_json", lambda path, *_: path.touch()
        )
        _report(cast(Any, world), diagnosis, file)
    assert file.exists() and diagnosis.exit_code == 1


@pytest.mark.parametrize(("verdict", "code"), [("SLOWER", 1), ("EQUAL", 0)])
def test_a_benchmarks_verdict_needs_no_reader(
    verdict: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take_turns(*taken: Any) -> SimpleNamespace:
        *_, tell = taken
        tell("pair 1 of 2")
        return SimpleNamespace(verdict=verdict, model_dump_json=lambda **_: "{}")

    monkeypatch.setattr("hpcfed.benchmark.turns.take_turns", take_turns)
    monkeypatch.setattr("hpcfed.benchmark.turns.lines", lambda *_: ["told"] * 9)
    words = ["benchmark", "fedavg", "--out", tmp_path / "out", "--by-turns", tmp_path]
    (tmp_path / "out").mkdir()
    with without_reader(monkeypatch):
        assert ending(*words) == code
    assert (tmp_path / "out/turns.json").is_file()
