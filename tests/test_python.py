"""hpcfed from Python: runs inside of a program, which goes on as it was; what they
return; studies; the notebook.
"""

import datetime
import functools
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import hpcfed
from hpcfed import plugins
from hpcfed.api import sweep
from hpcfed.experiment import loop
from hpcfed.methods import fedavg, fedavg_ft
from hpcfed.results.stored import read_run
from hpcfed.studies.plan import StudyOrder
from tests.runs import recorded, rows

SMALL: dict[str, Any] = {
    "model": "mlp",
    "device": "cpu",
    "clients": 3,
    "rounds": 2,
    "epochs": 1,
    "progress": False,
}
ROOT = Path(__file__).parents[1]


def test_one_seed_of_a_list_has_a_model(tmp_path: Path) -> None:
    one = hpcfed.run(**SMALL, seeds=[3], out=tmp_path / "one")
    plain = hpcfed.run(**SMALL, seed=3, out=tmp_path / "plain")
    assert one.model.keys() == plain.model.keys()
    for name, array in plain.model.items():
        np.testing.assert_array_equal(one.model[name], array)
    (tmp_path / "one/seed-3/model.npz").unlink()
    with pytest.raises(
        hpcfed.UserError, match=r"seed-3 has no model\.npz\. A run writes"
    ):
        _ = one.model


def test_folders_are_named_without_colons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def my_data() -> dict[str, np.ndarray]:
        inputs = np.arange(40.0).reshape(20, 2)
        owners = np.arange(20) % 3
        return {
            "train_inputs": inputs,
            "train_labels": np.arange(20) % 2,
            "train_clients": owners,
        }

    run = hpcfed.run(**SMALL, dataset=my_data)
    assert run.folder.parent == Path("runs")
    assert run.folder.name.startswith("fedavg-my_data-")


def test_importing_loads_nothing_heavy() -> None:
    code = "import sys, hpcfed; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"torch", "numpy", "h5py", "pydantic"} & set(loaded)


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        ("open", "a folder or a run"),
        ("compare", "a folder or a run"),
        ("run", r"a TOML file, and options as keywords, as in .*\(model=MyNet\)"),
        ("study", "a TOML file, the name of a ready study, or a dict"),
    ],
)
def test_what_is_no_path_is_one_line(call: str, wanted: str) -> None:
    given = (3, 4) if call == "compare" else (3,)
    message = rf"^hpcfed.{call} takes {wanted}, got 3 \(int\)$"
    with pytest.raises(hpcfed.UserError, match=message):
        getattr(hpcfed, call)(*given)


def test_a_run_comes_back_as_tables(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run = hpcfed.run(**SMALL, method="fedavg", snapshot_every=1, out=out)
    again = hpcfed.open(out)
    assert run.status == again.status == "complete" and not run.error
    assert run.folder == out
    assert run.config["clients"] == 3 and run.environment["python"]
    record = read_run(out)
    np.testing.assert_array_equal(run.rounds["round"], [1, 2])
    np.testing.assert_array_equal(run.rounds["accuracy"], record.rounds["accuracy"])
    clients = run.clients
    assert len(clients) == 2 * 3
    last = clients[clients["round"] == 2]
    np.testing.assert_array_equal(last["accuracy"], record.last_client_accuracy)
    np.testing.assert_array_equal(last["train_samples"], record.train_samples)
    assert last["train_samples"].sum() + last["test_samples"].sum() == 1797
    timing = again.timing
    phases = timing[["train", "evaluate", "record", "sample", "aggregate"]].sum(axis=1)
    assert (phases <= timing["wall"]).all()
    parameters = run.parameters()
    expected = rows(out)
    assert parameters.round == 2
    for client in range(3):
        np.testing.assert_array_equal(parameters.rows[client], expected[client][1])
    assert parameters["fc1.weight"].shape == (3, 64 * 64)
    assert parameters.global_row is not None
    with pytest.raises(hpcfed.UserError, match="no rows of round 9; it has 1, 2"):
        run.parameters(9)
    # A run can stand wherever its folder can.
    assert hpcfed.open(run).folder == out
    more = hpcfed.run(**{**SMALL, "rounds": 1}, init=run, out=tmp_path / "more")
    assert more.config["init"] == str(out)
    assert hpcfed.compare(run, again).verdicts
    assert run.summary()["rounds_done"] == 2
    assert "fedavg on digits" in run._repr_html_() and "complete" in repr(run)
    # The recorded command makes the same run.
    words = run.environment["command"]
    assert words[:2] == ["hpcfed", "run"] and "--snapshot-every" in words


def test_without_pandas_tables_are_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = hpcfed.run(**SMALL, seeds=range(2), out=tmp_path / "run")
    with_pandas = run.rounds
    monkeypatch.setattr("hpcfed.api.opened.find_spec", lambda name: None)
    plain = run.rounds
    assert isinstance(plain, np.ndarray)
    assert plain.dtype.names == tuple(with_pandas.columns)
    np.testing.assert_array_equal(plain["seed"], [0, 0, 1, 1])
    np.testing.assert_array_equal(plain["accuracy"], with_pandas["accuracy"])
    assert [one.config["seed"] for one in run.seeds] == [0, 1]
    with pytest.raises(hpcfed.UserError, match="several seeds"):
        run.parameters()


def test_the_process_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its signals, variables, threads and arithmetic; and the second run, of a module,
    in a thread of its own, equals the first.
    """
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    torch.set_num_threads(1)

    def process() -> tuple[Any, ...]:
        handlers = [signal.getsignal(number) for number in range(1, 32)]
        return (
            handlers,
            dict(os.environ),
            torch.get_num_threads(),
            torch.get_float32_matmul_precision(),
            torch.get_deterministic_debug_mode(),
        )

    before = process()
    one, two = tmp_path / "one", tmp_path / "two"
    hpcfed.run(**SMALL, deterministic=True, precision="tf32", out=one)
    assert process() == before
    options = {**SMALL, "deterministic": True, "method": fedavg, "out": two}
    thread = threading.Thread(target=hpcfed.run, kwargs=options)
    thread.start()
    thread.join()
    assert process() == before
    np.testing.assert_equal(recorded(two), recorded(one))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"clints": 3}, "clints=3: unknown option; did you mean 'clients'"),
        ({"clients": "many"}, "clients='many': must be a whole number"),
        ({"rounds": True}, "must have a value, got true"),
        ({"method": "fedagv"}, "unknown method 'fedagv'; did you mean 'fedavg'"),
        ({"method": "nowhere.py"}, "nowhere.py: no such file"),
        ({"resume": "nowhere"}, "there is no run"),
        ({"resume": "nowhere", "lr": 1}, "you may only add"),
        ({"out": "taken"}, "is a file; name a folder"),
        ({"lr": 1e30, "on_bad_update": "stop"}, None),
    ],
)
def test_mistakes_are_exceptions(
    options: dict[str, Any],
    expected: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").touch()
    if expected is None:
        # A run that fails raises what has failed, instead of ending the process.
        with pytest.raises(ArithmeticError):
            hpcfed.run(**{**SMALL, "out": "run", **options})
        assert hpcfed.open("run").status == "failed"
        return
    with pytest.raises(hpcfed.UserError) as raised:
        hpcfed.run(**{**SMALL, **options} if "resume" not in options else options)
    assert expected in str(raised.value)


def test_objects_are_handed_in(tmp_path: Path) -> None:
    """A method that only this program has is recorded by name with its source's hash,
    and resumed where it is handed in again.
    """
    ours = hpcfed.run(**SMALL, method=fedavg_ft, out=tmp_path / "ours")
    assert ours.config["method"] == "fedavg-ft"
    mine = ModuleType("mine")
    mine.EXTENDS = fedavg  # type: ignore[attr-defined]
    options = {**SMALL, "rounds": 4, "checkpoint_every": 2}
    out = tmp_path / "mine"
    run = hpcfed.run(**options, method=mine, out=out)
    assert run.config["method"] == "notebook:mine"
    assert list(run.environment["files"]) == ["notebook:mine"]
    plain = hpcfed.run(**options, out=tmp_path / "plain")
    np.testing.assert_array_equal(run.rounds["accuracy"], plain.rounds["accuracy"])
    for nameless in (lambda: None, functools.partial(len)):
        with pytest.raises(hpcfed.UserError, match="has no name to record"):
            hpcfed.run(**{**SMALL, "model": nameless})
    with pytest.raises(hpcfed.UserError, match=r"model notebook:len"):
        hpcfed.run(**{**SMALL, "model": len})
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    with pytest.raises(hpcfed.UserError, match="object of class Sequential") as told:
        hpcfed.run(**{**SMALL, "model": network})
    assert "\n" not in str(told.value)
    # As if it had been killed after the second round.
    shutil.rmtree(out / "checkpoints/00000004")
    shutil.copy(out / "checkpoints/00000002/run.h5", out / "run.h5")
    plugins._given.clear()
    with pytest.raises(hpcfed.UserError, match="hand it in again"):
        hpcfed.run(resume=out)
    resumed = hpcfed.run(resume=out, method=mine, progress=False)
    np.testing.assert_array_equal(resumed.rounds["accuracy"], plain.rounds["accuracy"])


NET = """import logging

import torch
from torch import nn

LOG = logging.getLogger(__name__)
MADE = []
NAME = __name__
SCALE = 0.5


def scaled(x):
    LOG.debug(NAME)
    return SCALE * x


class Net(nn.Module):
    def __init__(self, shape=(1, 8, 8), classes=10):
        super().__init__()
        self.a = nn.Linear(64, classes)
        MADE.append(type(self))

    def forward(self, x):
        return scaled(self.a(x.flatten(1)))
"""
OWN_DATA = """import numpy as np

SAMPLES = 40
SOURCE = "handed_data.csv"


class Kind:
    pass


def data(kind=Kind, source=SOURCE):
    inputs, labels = np.arange(2.0 * SAMPLES).reshape(-1, 2), np.arange(SAMPLES) % 2
    test = {"test_inputs": inputs[:9], "test_labels": labels[:9]}
    return {"train_inputs": inputs, "train_labels": labels, **test}
"""
OWN_METHOD = """from hpcfed import methods
from hpcfed.methods import fedavg, option

EXTENDS = fedavg


class Options(methods.Options):
    my_share: float = option(0.5, "a share")


def global_row(state):
    return state.w
"""


@pytest.fixture
def imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., ModuleType]]:
    """Write a file and import it, as a program would."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names = []

    def write(name: str, text: str) -> ModuleType:
        (tmp_path / f"{name}.py").write_text(text)
        names.append(name)
        return importlib.import_module(name)

    yield write
    for name in names:
        sys.modules.pop(name, None)


def test_the_network_that_was_handed_in_runs(
    imported: Callable[..., ModuleType],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Under its file's name, if that says the same; else under a name of its own, and
    this is told. No run goes on with another network than it began with.
    """
    net = imported("handed_net", NET)
    few = {**SMALL, "rounds": 1, "model": net.Net}
    run = hpcfed.run(**few, out=tmp_path / "same")
    assert run.config["model"] == f"{tmp_path / 'handed_net.py'}:Net"
    assert set(net.MADE) == {net.Net}
    assert capsys.readouterr().err == ""
    net.SCALE = 2.0
    run = hpcfed.run(**few, out=tmp_path / "other")
    assert run.config["model"] == "notebook:Net"
    said = capsys.readouterr().err
    assert "the model that was handed in is not what" in said and said.count("\n") == 1
    with pytest.raises(hpcfed.UserError, match=r"is not what .* says now; leave"):
        hpcfed.run(resume=tmp_path / "same", rounds=2, model=net.Net, progress=False)
    options = {"rounds": 2, "model": net.Net, "progress": False}
    assert len(hpcfed.run(resume=tmp_path / "other", **options).rounds) == 2
    net.SCALE = 3.0
    with pytest.raises(hpcfed.UserError, match="has changed since the run began"):
        hpcfed.run(resume=tmp_path / "other", **{**options, "rounds": 3})
    net.SCALE = 0.5
    options = {"rounds": 2, "model": net.Net, "progress": False}
    assert len(hpcfed.run(resume=tmp_path / "same", **options).rounds) == 2


def test_data_and_methods_that_were_handed_in_run(
    imported: Callable[..., ModuleType], tmp_path: Path
) -> None:
    """And not what their files say after an edit. A comment is none."""
    data = imported("handed_data", OWN_DATA)
    method = imported("handed_method", OWN_METHOD)
    few = {**SMALL, "rounds": 1, "dataset": data.data, "method": method}

    def ran(name: str) -> tuple[str, str, float, float]:
        run = hpcfed.run(**few, out=tmp_path / name)
        trained = float(run.rounds["trained_samples"].iloc[0])
        named = [str(run.config[option]) for option in ("dataset", "method")]
        return named[0], named[1], trained, run.config["my_share"]

    files = tmp_path / "handed_data.py", tmp_path / "handed_method.py"
    names = f"{files[0]}:data", f"{files[1]}"
    first = ran("first")
    assert first[:2] == names and first[3] == 0.5
    for file, text in zip(files, (OWN_DATA, OWN_METHOD), strict=True):
        file.write_text(f"# an edit\n\n{text}")
    assert ran("commented") == first
    files[0].write_text(OWN_DATA.replace("40", "80"))
    files[1].write_text(OWN_METHOD.replace("0.5", "0.7"))
    assert ran("edited") == ("notebook:data", "notebook:handed_method", *first[2:])


@pytest.mark.parametrize("option", ["dataset", "alpha", "dataset_options"])
def test_arrays_are_told_by_their_shapes(option: str) -> None:
    arrays = {"train_inputs": np.zeros((40, 4)), "train_labels": torch.zeros(40)}
    with pytest.raises(hpcfed.UserError) as told:
        hpcfed.run(**SMALL, **{option: arrays})
    line = str(told.value)
    assert "ndarray of shape [40, 4], 'train_labels': Tensor of shape [40]}" in line
    assert "\n" not in line and "0., 0." not in line
    assert ("has no name to record; give" in line) == (option == "dataset")


def test_data_that_changed_is_read_again(tmp_path: Path) -> None:
    """A function whose surroundings changed is called again, and a table read again. A
    network may have the name of the data.
    """
    samples = [40]

    def mine() -> dict[str, np.ndarray]:
        inputs = np.arange(2.0 * samples[0]).reshape(-1, 2)
        labels = np.arange(samples[0]) % 2
        test = {"test_inputs": inputs[:9], "test_labels": labels[:9]}
        return {"train_inputs": inputs, "train_labels": labels, **test}

    def network() -> torch.nn.Module:
        return torch.nn.Linear(2, 2)

    network.__name__ = "mine"
    table = tmp_path / "mine.csv"
    for number in (40, 20):
        samples[0] = number
        lines = [f"{n},{n % 2}" for n in range(number)]
        table.write_text("\n".join(["a,y", *lines]))
        given = {**SMALL, "model": network, "dataset": mine}
        of_function = hpcfed.run(**given, out=tmp_path / f"function-{number}")
        own = {**SMALL, "dataset": str(table)}
        of_file = hpcfed.run(**own, out=tmp_path / f"file-{number}")
        for run in (of_function, of_file):
            trained = float(run.rounds["trained_samples"].iloc[0])
            assert 0.7 * number < trained <= number


def test_a_file_that_draws_when_it_is_loaded_changes_no_weights(tmp_path: Path) -> None:
    """A forgotten line at its end must not give the first seed other weights."""
    file = tmp_path / "net.py"
    lines = [
        "import torch",
        "def net():",
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))",
    ]
    file.write_text("\n".join([*lines, "print(net()(torch.randn(2, 64)).shape)"]))
    losses = []
    for name in ("first", "again"):
        options = {**SMALL, "model": f"{file}:net", "out": tmp_path / name}
        losses.append(hpcfed.run(**options).rounds["train_loss"].tolist())
    assert losses[0] == losses[1]


def test_ctrl_c_stops_after_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = loop.Recorder.record

    def interrupted(self: Any, round: int, *rest: Any) -> Any:
        if round == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return record(self, round, *rest)

    monkeypatch.setattr(loop.Recorder, "record", interrupted)
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt, match="goes on"):
        hpcfed.run(**{**SMALL, "rounds": 4}, out=out)
    assert hpcfed.open(out).status == "stopped"
    monkeypatch.undo()
    whole = hpcfed.run(**{**SMALL, "rounds": 4}, out=tmp_path / "whole")
    resumed = hpcfed.run(resume=out, progress=False)
    np.testing.assert_array_equal(resumed.rounds["accuracy"], whole.rounds["accuracy"])


def test_a_study_of_a_dict(tmp_path: Path) -> None:
    common = {**SMALL, "rounds": 1}
    del common["progress"]
    sweep = hpcfed.study(
        {"common": common, "sweep": {"method": ["fedavg"], "lr": [0.05]}},
        out=tmp_path / "study",
    )
    assert repr(sweep) == f"<study in {tmp_path / 'study'}, trials: 1>"
    assert len(sweep) == 1 and (tmp_path / "study/study.h5").exists()
    assert list(sweep.table["status"]) == ["complete"]
    (run,) = sweep
    assert run.config["lr"] == 0.05
    with pytest.raises(hpcfed.UserError, match="put this into a file"):
        hpcfed.study({"sweep": {"method": [fedavg]}}, out=tmp_path / "other")
    with pytest.raises(hpcfed.UserError, match="needs a folder"):
        hpcfed.study({"sweep": {"method": ["fedavg"]}})


def test_a_study_takes_values_as_a_run_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its text and its points hold what a file would."""
    orders: list[StudyOrder] = []
    monkeypatch.setattr(sweep, "run_study", orders.append)
    common = {"model": Path("mlp"), "rounds": np.int64(1), "seeds": range(2)}
    swept = {"lr": np.array([0.05, 0.1]), "epochs": range(1, 3), "alpha": (0.5,)}
    asked = {"common": common, "sweep": swept, "repeats": np.int64(2)}
    hpcfed.study(asked, out=tmp_path / "study")
    (order,) = orders
    assert json.loads(order.text) == {
        "common": {"model": "mlp", "rounds": 1, "seeds": [0, 1]},
        "sweep": {"lr": [0.05, 0.1], "epochs": [1, 2], "alpha": [0.5]},
        "repeats": 2,
    }
    first = order.every[0]
    assert first.name == "lr=0.05,epochs=1,alpha=0.5"
    assert first.given["seeds"] == [0, 1] and first.settings.config.lr == 0.05


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (datetime.date(2026, 1, 2), r"sweep\.lr: .* of type date"),
        (np.zeros((2, 2)), r"sweep\.lr: .*ndarray of shape \[2, 2\]"),
        (b"0.1", r"sweep\.lr: .* of type bytes"),
    ],
)
def test_a_study_refuses_what_no_file_can_hold(
    tmp_path: Path, value: object, named: str
) -> None:
    with pytest.raises(hpcfed.UserError, match=named):
        hpcfed.study({"sweep": {"lr": [value]}}, out=tmp_path / "study")


def test_two_runs_in_a_row_on_two_ranks(
    tmp_path: Path, mpirun: Callable[..., Any]
) -> None:
    """A world is left and entered again; every rank gets the run."""
    program = tmp_path / "program.py"
    program.write_text(
        f"import hpcfed, os\nos.chdir({str(tmp_path)!r})\n"
        f"small = { ({**SMALL, 'precision': 'fp64'})!r}\n"
        "one = hpcfed.run(**small, out='one')\n"
        "two = hpcfed.run(**small, method='fedper', out='two')\n"
        "print('seen', one.status, two.config['method'], flush=True)\n"
    )
    ended = mpirun(2, program)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("seen complete fedper") == 2
    alone = hpcfed.run(**SMALL, precision="fp64", out=tmp_path / "alone")
    np.testing.assert_allclose(
        hpcfed.open(tmp_path / "one").rounds["train_loss"],
        alone.rounds["train_loss"],
        rtol=1e-10,
    )


def test_the_notebook_runs(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(ROOT / "benchmarks/examples/first_steps.ipynb", 4)
    client = nbclient.NotebookClient(
        notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    shown = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            assert output.output_type != "error"
            shown.append(str(output.get("data", "")))
    assert any("fedavg on digits" in text for text in shown)


def test_a_run_whose_rounds_drew_nobody_with_data_can_be_read(tmp_path: Path) -> None:
    """Four samples of ten classes leave some of these clients with none."""
    run = hpcfed.run(
        progress=False,
        out=tmp_path / "run",
        dataset="synthetic",
        synthetic_shape="1x2x2",
        model="mlp",
        partition="sharding",
        classes_per_client=10,
        clients=4,
        cohort=1,
        train_per_client=1,
        test_per_client=1,
        rounds=8,
        evaluate_every=8,
        device="cpu",
    )
    cohorts = list(run.rounds["cohort"])
    assert 0 in cohorts and 1 in cohorts
    sent = np.asarray(run.rounds["bytes_up"])
    assert (sent[np.equal(cohorts, 0)] == 0).all()
    # One client sends in every other round: twice what all have sent.
    assert run.summary()["printed_comm"] == 2 * sent.sum()
