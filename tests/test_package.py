"""What is installed: a wheel has all files that commands need, and `hpcfed examples`
hands out copies of those that users start from.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest

from hpcfed import cli, shipped
from hpcfed.errors import UserError
from hpcfed.studies.plan import find_study
from hpcfed.version import __version__
from tests.runs import mistake

ROOT = Path(__file__).parents[1]
BUILD = "import setuptools.build_meta as b, sys; print(b.build_wheel(sys.argv[1]))"
SUBMIT = """
from hpcfed import cli, version
print(version.source())
cli.main(["study", "quick", "--submit", "--dry-run"])
"""


def test_a_wheel_has_what_its_commands_need(tmp_path: Path) -> None:
    """Installed without the repository, a ready study is found and submitted by the
    wheel's own script.
    """
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns("__pycache__")
    for folder in ("hpcfed", *shipped.FOLDERS):
        shutil.copytree(ROOT / folder, source / folder, ignore=ignored)
    (source / "launch").mkdir()
    for name in ("pyproject.toml", "launch/wheel.py", "README.md"):
        shutil.copy(ROOT / name, source / name)
    words = [sys.executable, "-c", BUILD, str(tmp_path)]
    made = subprocess.run(
        words, cwd=source, capture_output=True, text=True, timeout=120
    )
    assert made.returncode == 0, made.stderr
    installed = tmp_path / "installed"
    with zipfile.ZipFile(tmp_path / made.stdout.split()[-1]) as wheel:
        wheel.extractall(installed)
    pages = "README.md"  # of rooms: for who reads the code
    for path in (ROOT / "hpcfed").rglob("*.*"):
        if path.is_file() and path.name != pages and "__pycache__" not in path.parts:
            name = path.relative_to(ROOT)
            assert (installed / name).read_bytes() == path.read_bytes(), name
    copies = installed / "hpcfed" / shipped.COPIES
    assert shipped.files_below(copies) == shipped.files_below(ROOT)

    words = [sys.executable, "-c", SUBMIT]
    environment = os.environ | {"PYTHONPATH": str(installed)}
    said = subprocess.run(
        words,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert said.returncode == 0, said.stderr
    version, *arrays, gather = said.stdout.splitlines()
    assert version == f"{__version__} (wheel)"
    study = (copies / "benchmarks/studies/quick.toml").read_bytes()
    copy = tmp_path / f"runs/quick/slurm-{sha256(study).hexdigest()[:8]}.toml"
    for line in (*arrays, gather):
        assert f"{copies / 'slurm/study.sbatch'} {copy} --out" in line
    script = (copies / "slurm/study.sbatch").read_text()
    assert script == (ROOT / "slurm/study.sbatch").read_text()


def test_every_shipped_file_says_what_it_is() -> None:
    """In one line, of which a list is made; Slurm scripts and studies are among them."""
    names = set()
    for path in shipped.files_below(shipped.top()):
        said = shipped.summary(ROOT / path)
        assert said and "\n" not in said and not said.startswith("#"), path
        names.add(str(path))
    assert {"slurm/run.sbatch", "slurm/study.sbatch", "slurm/profile.sbatch"} <= names
    assert "benchmarks/studies/quick.toml" in names
    assert shipped.summary(ROOT / "slurm/run.sbatch") == (
        "Makes one run on a Slurm cluster, with one MPI rank per GPU"
    )


def test_copies_of_examples_never_replace_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "benchmarks/examples/gru.py"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    cli.main(["examples", str(tmp_path)])
    number = len(shipped.files_below(ROOT)) - 1
    said = capsys.readouterr().out
    assert said == (
        f"{number} files copied to {tmp_path}; kept what was there: {mine}\n"
    )
    assert mine.read_text() == "mine"
    original = (ROOT / "slurm/run.sbatch").read_bytes()
    assert (tmp_path / "slurm/run.sbatch").read_bytes() == original
    assert f"{mine} is a file; name a folder" in mistake(capsys, "examples", mine)


def test_a_ready_study_is_found_by_its_name_unless_there_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ready = ROOT / "benchmarks/studies/quick.toml"
    assert find_study(Path("quick")) == ready
    Path("quick").mkdir()
    assert find_study(Path("quick")) == ready, "a folder is no study"
    Path("quick").rmdir()
    Path("quick").write_text("")
    assert find_study(Path("quick")) == Path("quick")
    for file in (Path("none.toml"), Path("/dev/zero")):  # which are refused when read
        assert find_study(file) == file
    with pytest.raises(UserError, match="no study file quik; did you mean 'quick'"):
        find_study(Path("quik"))
    with pytest.raises(
        UserError, match=r"ready ones: clients, .*cores, .*quick, .*server"
    ):
        find_study(Path("else"))


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ("# One, and\n# two. Three.\n", "One, and two"),
        ("# SCAFFOLD (Ka et al. 2020), short.\n", "SCAFFOLD (Ka et al. 2020), short"),
        ("# A run\n#   hpcfed run\n", "A run"),
        ("# Words without an end\n\nkey = 1\n", "Words without an end"),
    ],
)
def test_a_file_is_summed_up_by_its_first_sentence(
    said: str, sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "some.toml"
    path.write_text(said)
    assert shipped.summary(path) == sentence
