"""Methods from files of the user's and from plugins: their options, their record, how
they resume, and what is said of those that lack something.
"""

import hashlib
import os
import random
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import mtrand

from hpcfed import cli, methods, plugins
from hpcfed.errors import UserError
from hpcfed.experiment.assemble import Setup
from hpcfed.experiment.failures import Failed
from hpcfed.experiment.own_method import load_method
from hpcfed.results.stored import read_run
from tests.federations import assembled
from tests.runs import assert_same_run, flags, mistake, recorded, rows, started

HALF = '''"""A server that goes half of the way: w ← w + η (mean − w)."""

from hpcfed import methods
from hpcfed.methods import Cohort, Federation, fedavg, option
from rates import USUAL

EXTENDS = fedavg


class Options(methods.Options):
    half_step: float = option(USUAL, "η of the server", gt=0)


def round(fed, state, cohort):
    after = fedavg.round(fed, state, cohort)
    return fedavg.State(state.w + fed.options.half_step * (after.w - state.w))
'''
PERSONAL = '''"""Every client keeps its own row."""

from dataclasses import dataclass, field

from hpcfed.methods import OWNED, Tensor, fedavg

EXTENDS = fedavg


@dataclass(frozen=True)
class State:
    w: Tensor
    rows: Tensor = field(metadata=OWNED)


def init(fed):
    w = fed.initial_row()
    return State(w, w.repeat(len(fed.clients), 1))


def round(fed, state, cohort):
    rows = fed.train(state.rows[cohort.here], cohort)
    return State(fed.mean(fed.upload(rows, cohort), cohort), state.rows.index_copy(0, here(fed, cohort), rows))


def here(fed, cohort):
    import torch

    return torch.from_numpy(cohort.here).to(fed.device)


def personal(fed, state, clients):
    return state.rows[clients]
'''


DRAWING = '''"""Draws from every generator that Python has at hand."""

import random

import numpy as np
from hpcfed.methods import fedavg

EXTENDS = fedavg


def noisy(rows):
    import torch

    return rows + 0.01 * (torch.rand_like(rows) + np.random.randn() + random.random())


def init(fed):
    return fedavg.State(noisy(fed.initial_row()))


def round(fed, state, cohort):
    start = fed.download(noisy(state.w), cohort)
    rows = noisy(fed.train(start, cohort))
    return fedavg.State(noisy(fed.mean(fed.upload(rows, cohort), cohort)))


def personal(fed, state, clients):
    return noisy(fedavg.personal(fed, state, clients))
'''


@pytest.fixture
def half(tmp_path: Path) -> Path:
    """The file of a method that imports another one beside it."""
    (tmp_path / "rates.py").write_text("USUAL = 0.5\n")
    path = tmp_path / "half_way.py"
    path.write_text(HALF)
    return path


def test_a_file_is_a_method(
    half: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its step is FedAvg's times η, its options are flags, and the record has its name,
    its path and the sha256 of all files.
    """
    monkeypatch.chdir(tmp_path)
    common = flags(clients=3, rounds=1, precision="fp64", snapshot_every=1)
    own = started(*common, "--method", "half_way.py", "--half-step", "0.25")
    plain = started(*common, "--out", tmp_path / "plain")
    assert own.name.startswith("half_way-digits-")
    record = read_run(own)
    assert record.facts["method"] == "half_way"
    assert record.config["method"] == str(half)
    assert record.config["half_step"] == 0.25
    wanted = {}
    for path in (half, tmp_path / "rates.py"):
        wanted[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
    assert record.environment["files"] == wanted
    assert read_run(plain).environment["files"] == {}
    first = _global_row(started(*common, "--lr", "1e-30", "--out", tmp_path / "still"))
    whole = _global_row(plain) - first
    np.testing.assert_allclose(_global_row(own) - first, 0.25 * whole, atol=1e-12)


def _global_row(folder: Path) -> np.ndarray:
    import h5py

    with h5py.File(folder / "params-0.h5") as file:
        row: np.ndarray = file["global"][0]
    return row


def test_help_list_and_toml_know_the_file(
    half: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        cli.main(["run", "--method", "half_way.py", "--help"])
    said = capsys.readouterr().out
    assert "options of method half_way" in said and "--half-step" in said
    (tmp_path / "own.toml").write_text('method = "half_way.py"\nhalf_step = 0.3\n')
    settings = cli.parse_run(["own.toml"])
    assert settings.flat()["half_step"] == 0.3
    # The flag's value comes before the file, which alone names the method.
    settings = cli.parse_run(["--half-step", "0.4", "own.toml"])
    assert settings.flat()["half_step"] == 0.4


def test_a_resumed_file_goes_on_bit_for_bit(
    half: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And one that has changed is refused, unless its user wants it."""
    common = flags(clients=3, rounds=4, checkpoint_every=2, method=half)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    started(*common, "--out", whole)
    _cut_after(whole, cut, 2)
    started("--resume", cut)
    np.testing.assert_equal(recorded(cut), recorded(whole))
    _cut_after(whole, cut, 2)
    (tmp_path / "rates.py").write_text("USUAL = 0.25\n")
    capsys.readouterr()
    said = mistake(capsys, "run", "--resume", cut)
    assert f"{tmp_path / 'rates.py'} has changed since the run began" in said
    assert "--accept-changes" in said
    plugins.forget_changed()
    started("--resume", cut, "--accept-changes")
    assert read_run(cut).status == "complete"
    before = read_run(whole).environment["files"]
    assert read_run(cut).environment["files_before"] == [before]
    half.unlink()
    capsys.readouterr()
    assert "no such file" in mistake(capsys, "run", "--resume", cut)


def test_what_a_method_draws_follows_from_its_seed(tmp_path: Path) -> None:
    """Resumed, and with other seeds that take turns; nobody else's numbers change."""
    path = tmp_path / "drawing.py"
    path.write_text(DRAWING)
    common = flags(clients=3, rounds=2, precision="fp64", snapshot_every=1, method=path)
    common += ["--checkpoint-every", "1", "--participation", "0.7"]
    torch.rand(3), random.random()
    before = torch.get_rng_state(), random.getstate(), mtrand.get_bit_generator()
    whole, cut, both = tmp_path / "whole", tmp_path / "cut", tmp_path / "both"
    started(*common, "--seed", 1, "--out", whole)
    after = torch.get_rng_state(), random.getstate(), mtrand.get_bit_generator()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
    _cut_after(whole, cut, 1)
    torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002
    started("--resume", cut)
    assert_same_run(cut, whole)
    started(*common, "--seeds", "0..1", "--out", both)
    assert_same_run(both / "seed-1", whole, tolerance=1e-12)
    other = rows(both / "seed-0")
    assert not np.allclose(other[0], rows(whole)[0])


def _cut_after(whole: Path, cut: Path, rounds: int) -> None:
    """Make a copy of a run that looks as if it had been killed after so many rounds."""
    shutil.rmtree(cut, ignore_errors=True)
    shutil.copytree(whole, cut)
    for checkpoint in (cut / "checkpoints").iterdir():
        if int(checkpoint.name) > rounds:
            shutil.rmtree(checkpoint)
    shutil.copy(cut / f"checkpoints/{rounds:08d}/run.h5", cut / "run.h5")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "lacks init, round, personal, global_row, welcome"),
        ("def round(", "cannot be imported: SyntaxError"),
        ("import nowhere_to_be_found", "ModuleNotFoundError"),
        ("raise SystemExit(3)", "cannot be imported: SystemExit: 3"),
        ("EXTENDS = 'fedavg'", "EXTENDS is 'fedavg', not a module"),
        (
            "from hpcfed.methods import fedavg\nEXTENDS = fedavg\nOptions = dict",
            "its Options are not a class of options",
        ),
        (
            "from hpcfed.methods import fedavg\nEXTENDS = fedavg\n"
            "def round(fed, state): return state",
            "round(fed, state) must take (fed, state, cohort)",
        ),
        (
            "from hpcfed.methods import fedavg\nEXTENDS = fedavg\n"
            "def adapt(row): return row\n"
            "def rond(fed, state, cohort): return adapt(state)",
            "nothing calls its function rond; did you mean 'round'?",
        ),
        (
            "from hpcfed.methods import fedavg\nEXTENDS = fedavg\n"
            "def init(fed): return fed.initial_row()",
            "init returns a tensor [4810] of torch.float32 on cpu; it must return a state, "
            "which is a dataclass of tensors",
        ),
        (
            "from dataclasses import dataclass\nfrom hpcfed.methods import fedavg\n"
            "EXTENDS = fedavg\n"
            "@dataclass\nclass State:\n    w: object\n    rounds: int\n"
            "def init(fed): return State(fed.initial_row(), 0)",
            "init returns State; it must return tensors in every field of a state, and "
            "this one's rounds is int",
        ),
    ],
)
def test_what_a_file_lacks_is_one_line(
    text: str,
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "lacking.py"
    path.write_text(text)
    monkeypatch.setattr("hpcfed.experiment.run.opening_lines", lambda setup: ())
    words = flags(method=path, clients=2, rounds=1, out=tmp_path / "run")
    assert expected in mistake(capsys, "run", *words)


def test_an_option_of_a_broken_file_is_not_called_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "broken.py"
    path.write_text("def round(:")
    words = flags(method=path, my_mu=0.1)
    assert "broken.py cannot be imported: SyntaxError" in mistake(capsys, "run", *words)


def test_plugins_are_methods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that cannot be imported is a line in the list, and disturbs nothing else."""
    about = tmp_path / "my_federations-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Name: my-federations\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[hpcfed.methods]\nhalf-way = my_federations\nbroken = my_broken\n"
        "fedavg = my_broken\nobject = my_federations:Options\n"
        "[hpcfed.models]\nbroken-net = my_broken:Net\n"
    )
    (tmp_path / "rates.py").write_text("USUAL = 0.5\n")
    (tmp_path / "my_federations.py").write_text(HALF)
    (tmp_path / "my_broken.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        cli.main(["list"])
        listed = capsys.readouterr().out
        assert "half-way         A server that goes half of the way" in listed
        assert "cannot be used: plugin broken (my_broken)" in listed
        assert "ZeroDivisionError" in listed
        assert "broken-net" in listed
        settings = cli.parse_run(["--method", "half-way", "--half-step", "0.3"])
        assert settings.flat()["half_step"] == 0.3
        said = mistake(capsys, "run", "--method", "broken")
        assert "plugin broken (my_broken) cannot be imported" in said
        assert "is not a module" in mistake(capsys, "run", "--method", "object")
        said = mistake(capsys, "run", "--half-step", "1")
        assert "--half-step is an option of method half-way" in said
        # Ours come first where both have a name.
        assert methods.load("fedavg").Options.__module__ == "hpcfed.methods.fedavg"
        folder = started(
            *flags(method="half-way", clients=2, rounds=1, out=tmp_path / "run")
        )
        files = read_run(folder).environment["files"]
        assert list(files) == [str(tmp_path / "my_federations.py")]
    finally:
        for name in ("my_federations", "my_broken", "rates"):
            sys.modules.pop(name, None)
        plugins._packaged.clear()


def test_what_a_package_imports_from_its_folder_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installed one is told by its version."""
    files = {
        "own_package/__init__.py": "",
        "own_package/nets.py": "from .deep.layers import Net\n",
        "own_package/deep/__init__.py": "",
        "own_package/deep/layers.py": "from torch.nn import Identity as Net\n",
        "own_package/deep/unused.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        for name in ("own_package.nets:Net", "torch.nn:Linear"):
            plugins.load_object(name, "model")
        found = plugins.checksums(["own_package.nets:Net"])
        used = ("__init__.py", "nets.py", "deep/__init__.py", "deep/layers.py")
        assert set(found) == {str(tmp_path / "own_package" / name) for name in used}
        assert len(plugins.checksums(["torch.nn:Linear"])) == 1
    finally:
        for name in [name for name in sys.modules if name.startswith("own_package")]:
            sys.modules.pop(name)
        plugins._packaged.clear()


def test_two_ranks_make_the_same_numbers_and_find_a_forgotten_mark(
    tmp_path: Path, mpirun: Callable[..., Any]
) -> None:
    (tmp_path / "personal.py").write_text(PERSONAL)
    forgotten = PERSONAL.replace("field(metadata=OWNED)", "field()")
    (tmp_path / "forgotten.py").write_text(forgotten)
    common = flags(clients=5, rounds=2, epochs=1, precision="fp64", snapshot_every=1)
    own = ["--method", tmp_path / "personal.py"]
    alone = started(*common, *own, "--out", tmp_path / "one")
    right = [*common, *own, "--out", tmp_path / "two"]
    wrong = ["--method", tmp_path / "forgotten.py", "--out", tmp_path / "wrong"]
    # One job for both runs: starting ranks takes longer.
    program = Path(__file__).with_name("several_runs.py")
    job = mpirun(2, "-m", "mpi4py", program, *right, "+", *common, *wrong)
    assert_same_run(tmp_path / "two", alone, tolerance=1e-10)
    assert job.returncode == 1
    assert "state field rows of method" in job.stderr
    assert "mark it OWNED" in job.stderr


def test_code_that_has_changed_is_imported_anew(
    half: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a notebook the author edits files between runs; the record must be of the code
    that ran.
    """
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    rates = tmp_path / "rates.py"
    os.utime(rates, (1e9, 1e9))
    assert methods.load(str(half)).Options().model_dump() == {"half_step": 0.5}
    rates.write_text("USUAL = 0.7\n")
    # In the same second, which a compiled file remembers beside the size.
    os.utime(rates, (1e9, 1e9))
    recorded_now = plugins.checksums([str(half)])[str(tmp_path / "rates.py")]
    assert recorded_now == hashlib.sha256(b"USUAL = 0.5\n").hexdigest()
    plugins.forget_changed()
    assert methods.load(str(half)).Options().model_dump() == {"half_step": 0.7}
    changed = plugins.checksums([str(half)])[str(tmp_path / "rates.py")]
    assert changed == hashlib.sha256(b"USUAL = 0.7\n").hexdigest()


def test_a_study_refuses_runs_of_another_file(
    half: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its points hand on whole paths, for jobs that start elsewhere."""
    from hpcfed.studies import execute
    from hpcfed.studies.plan import points, read_study, trials

    monkeypatch.chdir(tmp_path)
    study = tmp_path / "own.toml"
    study.write_text(
        '[common]\nmodel = "mlp"\nclients = 2\nrounds = 1\ndevice = "cpu"\n'
        '[sweep]\nmethod = ["half_way.py"]\n'
    )
    asked = read_study(study)
    made = points(asked, study)
    assert made[0].given["method"] == str(half)
    (trial,) = trials(asked, made, tmp_path / "out")
    started(*trial.words[1:])
    assert execute.check_finished([trial])
    half.write_text(HALF + "\n")
    with pytest.raises(UserError, match="an earlier version of"):
        execute.check_finished([trial])


def test_states_that_do_not_fit_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A state without its own init, and rows of the cohort in place of all clients'."""
    path = tmp_path / "no_init.py"
    path.write_text(PERSONAL.replace("def init(fed)", "def start(fed)"))
    with pytest.raises(UserError, match=r"State of its own, but its init is .*fedavg"):
        methods.load(str(path))
    path = tmp_path / "few_rows.py"
    kept = "state.rows.index_copy(0, here(fed, cohort), rows)"
    path.write_text(PERSONAL.replace(kept, "rows"))
    few = flags(clients=4, rounds=1, participation=0.5, method=path)
    with pytest.raises(Failed):
        started(*few, "--out", tmp_path / "run")
    said = capsys.readouterr().err
    assert "rows of method" in said and "has 2 rows after a round" in said


ROWS = "a tensor [4, 4810] of torch.float64 on cpu"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("def personal(fed, state, clients): pass", f"personal returns None; .*{ROWS}"),
        ("def personal(fed, state, clients): return state.w.expand(3, -1)", "personal returns a tensor [3, 4810] of"),
        ("def personal(fed, state, clients): return state.w.expand(4, -1).float()", "of torch.float32 on cpu; it must return"),
        ("def personal(fed, state, clients): return state.w.expand(4, -1).numpy()", "returns a numpy array [4, 4810]; it must"),
        ("def personal(fed, state, clients): return [state.w] * 4", "personal returns list; it must return a row for each"),
        ("def global_row(state): return state.w[None]", "global_row returns a tensor [1, 4810].* None, or the global"),
        ("def global_row(state): return 0", "global_row returns int; .*row: a tensor [4810] of"),
        ("def welcome(fed, state, cohort): return state.w", "welcome returns a tensor [4810] of .* for each new client"),
        ("def lead(fed, state, update, before, after): pass", "lead returns None; it must return a row"),
        ("def pool(fed, state, round): return [0, 1]", "pool returns list; it must return None, or a numpy"),
        ("def pool(fed, state, round): import numpy; return numpy.array([1, 9])", "pool returns a numpy array [2]; .*ids"),
        ("def round(fed, state, cohort): pass", "round returns None; it must return a state, which is"),
        ("def round(fed, state, cohort): return fedavg.State(None)", "this one's w is None"),
        ("def round(fed, state, cohort): return fedavg.State(state.w[None])", "w as before .* not a tensor [1, 4810]"),
        ("def round(fed, state, cohort): return fedavg.State(state.w.float())", "w as before the round, a tensor [4810] of"),
        ("def round(fed, state, cohort): return Other(state.w)", "a state with the fields w, as before"),
        ("def finals(fed, state, clients): pass", "finals yields None; it must yield"),
        ("def finals(fed, state, clients): yield 'other', state.w", "finals yields tuple; .*one of own, and rows"),
        ("def finals(fed, state, clients): yield 'own', state.w", f"finals yields tuple; .*{ROWS}"),
        ("def figures(fed, state, clients): yield 'sum', state.w", "figures yields tuple; .*: a tensor [4]"),
        ("def depths(fed, state, clients): yield None", "depths yields None; it must yield an AtDepth"),
    ],
)  # fmt: skip
def test_what_a_function_returns_is_one_line(
    text: str, line: str, four: Setup, tmp_path: Path
) -> None:
    """The line says who has returned what, and what is expected."""
    path = tmp_path / "wrong.py"
    path.write_text(f"{WRONG}\n\n{text}\n")
    fed = four.federation
    config = four.settings.config.model_copy(update={"method": str(path)})
    own, state, clients = load_method(config, fed), four.method.init(fed), np.arange(4)
    cohort = fed.sample(0)
    arguments = {
        "fed": fed, "state": state, "cohort": cohort, "clients": clients, "round": 0,
        "update": 0, "before": fed.initial_row(), "after": state.w.expand(4, -1),
    }  # fmt: skip
    (hook,) = (hook for hook in methods.HOOKS if text.startswith(f"def {hook}("))
    given = [arguments[name] for name in methods.HOOKS[hook].split(", ")]
    expected = ".*".join(map(re.escape, line.split(".*")))
    with pytest.raises(UserError, match=f"^method {path}: .*{expected}") as told:
        found = getattr(own, hook)(*given)
        list(found)
    assert "\n" not in str(told.value)


WRONG = """from dataclasses import dataclass
from hpcfed.methods import Tensor, fedavg

EXTENDS = fedavg
FINALS, FIGURES = ("own",), ("sum",)


@dataclass(frozen=True)
class Other:
    v: Tensor
"""


@pytest.fixture(scope="module")
def four() -> Setup:
    """A federation of four clients."""
    return assembled()


@pytest.mark.parametrize("options", [{}, {"seeds": "0..1"}])
def test_a_function_without_a_return_ends_with_2(
    options: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "forgetful.py"
    path.write_text(f"{WRONG}\n\ndef personal(fed, state, clients):\n    state.w\n")
    words = flags(clients=2, rounds=1, method=path, out=tmp_path / "run", **options)
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", *words])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "Traceback" not in said
    assert f"hpcfed: method {path}: personal returns None; it must" in said


ALONE = """from hpcfed.methods import fedavg

EXTENDS = fedavg


def round(fed, state, cohort):
    rows = fed.train(state.w.expand(len(cohort.here), -1), cohort)
    return fedavg.State(rows.mean(0))
"""
SELDOM = """from hpcfed.methods import fedavg

EXTENDS = fedavg


def round(fed, state, cohort):
    return state if fed.round == 0 else fedavg.round(fed, state, cohort)
"""


IN_PLACE = (
    ALONE.replace("return fedavg.State(", "state.w.copy_(") + "    return state\n"
)


@pytest.mark.parametrize("text", [ALONE, IN_PLACE])
@pytest.mark.parametrize(
    ("options", "deed"),
    [
        ({"attack": "sign-flip", "compress": "topk"}, "upload(rows"),
        ({"devices": "lognormal"}, "upload(rows"),
        ({"compress_down": "qsgd"}, "download(row"),
        ({"weights": "uniform", "aggregation": "median"}, "mean(rows"),
        ({"weights": "samples"}, "mean(rows"),
    ],
)
def test_what_a_method_passes_by_is_one_line(
    text: str, options: dict[str, str], deed: str, tmp_path: Path
) -> None:
    """Else the record would say that there was an attack. A method may upload later."""
    path = tmp_path / "alone.py"
    path.write_text(text)
    few = flags(clients=3, rounds=2, method=path, **options)
    said = ", ".join(f"--{n.replace('_', '-')} {v}" for n, v in options.items())
    with pytest.raises(
        UserError, match=rf"^{said}: no effect, .* fed.{re.escape(deed)}, "
    ):
        started(*few, "--out", tmp_path / "run")
    assert read_run(tmp_path / "run").status == "failed"
    path.write_text(SELDOM)
    plugins.forget_changed()
    started(*few, "--out", tmp_path / "seldom")


WEIGHED = """
from hpcfed.methods import fedavg

EXTENDS = fedavg


def round(fed, state, cohort):
    import torch

    rows = fed.train(state.w.expand(len(cohort.here), -1), cohort)
    weights = WEIGHTS
    return fedavg.State(torch.from_numpy(weights / weights.sum()).to(rows) @ rows)
"""


@pytest.mark.parametrize(
    "weights",
    [
        "cohort.weights",
        "fed.weights[cohort.clients]",
        "fed.everyone(fed.round).weights",
        "fed.instead_of(cohort, cohort.clients).weights",
    ],
)
def test_a_method_may_weigh_by_hand(weights: str, tmp_path: Path) -> None:
    path = tmp_path / "weighed.py"
    path.write_text(WEIGHED.replace("WEIGHTS", weights))
    few = flags(clients=3, rounds=1, method=path, weights="uniform")
    started(*few, "--out", tmp_path / "run")
    with pytest.raises(UserError, match=r"^--aggregation median: no effect"):
        started(*few, "--aggregation", "median", "--out", tmp_path / "robust")


PERSONAL_SELDOM = """
from hpcfed.methods import fedavg, local

EXTENDS = local


def round(fed, state, cohort):
    rows = fed.train(state.rows[cohort.here], cohort)
    if cohort.round == 1:
        rows = fed.upload(rows, cohort)
        rows = COMBINED.expand(len(rows), -1)
    state.rows[cohort.here] = rows
    return state
"""


def test_a_method_without_a_global_model_may_average_later(tmp_path: Path) -> None:
    path = tmp_path / "seldom.py"
    options = "\n\nclass Options(fedavg.Options):\n    pass\n"
    path.write_text(PERSONAL_SELDOM.replace("COMBINED", "rows.mean(0)") + options)
    few = flags(clients=3, rounds=2, method=path, aggregation="median")
    with pytest.raises(UserError, match=r"^--aggregation median: no effect"):
        started(*few, "--out", tmp_path / "by-hand")
    assert len(read_run(tmp_path / "by-hand").rounds["accuracy"]) == 1
    path.write_text(
        PERSONAL_SELDOM.replace("COMBINED", "fed.mean(rows, cohort)") + options
    )
    plugins.forget_changed()
    started(*few, "--out", tmp_path / "run")


def test_a_generator_that_no_seed_reaches_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "noisy.py"
    made = "import numpy as np\n\nNOISE = np.random.default_rng(1)\n"
    path.write_text(
        made + ALONE.replace("rows.mean(0)", "rows.mean(0) + NOISE.random()")
    )
    few = flags(clients=3, rounds=1, method=path, out=tmp_path / "run")
    with pytest.raises(UserError, match="round draws from its own generator NOISE, wh"):
        started(*few)


def test_an_upload_that_follows_no_download_is_one_line(tmp_path: Path) -> None:
    """Its update would be the whole row. What has a name of its own is an update."""
    path = tmp_path / "unsent.py"
    sent = ALONE.replace("rows.mean(0)", "fed.mean(fed.upload(rows, cohort), cohort)")
    path.write_text(sent)
    few = flags(clients=3, rounds=1, method=path, compress="topk")
    with pytest.raises(UserError, match=r"unsent.py uploads rows .* fed.download\(row"):
        started(*few, "--out", tmp_path / "run")
    path.write_text(sent.replace("(rows, cohort), c", '(rows, cohort, beside="w"), c'))
    plugins.forget_changed()
    started(*few, "--out", tmp_path / "named")


def test_without_a_channel_a_method_may_send_nothing(tmp_path: Path) -> None:
    path = tmp_path / "alone.py"
    path.write_text(ALONE)
    few = flags(clients=3, rounds=1, method=path, attack="label-flip")
    started(*few, "--out", tmp_path / "run")


def test_a_row_may_be_made_in_inference_mode(tmp_path: Path) -> None:
    """torch does not count writes in place to such a row."""
    path = tmp_path / "inferred.py"
    made = "import torch\n\n\ndef mean(rows):\n    with torch.inference_mode():\n"
    made += "        return rows.mean(0)\n"
    path.write_text(made + ALONE.replace("rows.mean(0)", "mean(rows)"))
    started(*flags(clients=3, rounds=2, method=path), "--out", tmp_path / "run")


@pytest.mark.parametrize("options", [{}, {"seeds": "0..1"}])
def test_an_exit_in_a_round_is_a_failure(
    options: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever its code says: one line that names the file and the line."""
    path = tmp_path / "leaving.py"
    path.write_text(
        "import sys\nfrom hpcfed.methods import fedavg as EXTENDS\n\n"
        "def round(fed, state, cohort):\n    sys.exit(0)\n"
    )
    few = flags(clients=2, rounds=1, method=path, **options)
    with pytest.raises(Failed) as failed:
        started(*few, "--out", tmp_path / "run")
    assert failed.value.code == 1
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert said.count("sys.exit(0) was called") == said.count("hpcfed: ") == 1
    assert said.endswith("(leaving.py, line 5)\n")
    record = next((tmp_path / "run").rglob("run.h5"))
    assert read_run(record.parent).status == "failed"
