"""What computing centres install hpcfed by: locked versions, container recipes, a Spack
package, a Ramble application and a modulefile.
"""

import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hpcfed.benchmark.definition import names
from hpcfed.benchmark.result import BenchmarkResult, FigureOfMerit, TimedRun

ROOT = Path(__file__).parents[1]
LAUNCH = ROOT / "launch"
CONTAINER = LAUNCH / "container"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NEEDED = [Requirement(line) for line in PROJECT["dependencies"]]
EXTRAS = {
    name: [Requirement(line) for line in lines]
    for name, lines in PROJECT["optional-dependencies"].items()
}
Calls = list[tuple[tuple[Any, ...], dict[str, Any]]]


def locked() -> dict[str, str]:
    """Return the versions of the lock file by package."""
    lines = (LAUNCH / "environment.lock").read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    found = {}
    for pin in pins:
        (bound,) = pin.specifier
        assert bound.operator == "==" and "*" not in bound.version, pin
        assert pin.name not in found, pin
        found[canonicalize_name(pin.name)] = bound.version
    return found


@pytest.mark.parametrize("needed", NEEDED + EXTRAS["mpi"] + EXTRAS["hf"], ids=str)
def test_every_requirement_is_locked_within_its_bounds(needed: Requirement) -> None:
    assert needed.specifier.contains(locked()[canonicalize_name(needed.name)])


def test_the_lock_has_what_builds_hpcfed() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]
    for line in build["requires"]:
        needed = Requirement(line)
        assert needed.specifier.contains(locked()[needed.name])


# Containers


def test_both_recipes_copy_what_a_wheel_is_made_of() -> None:
    containerfile = (CONTAINER / "Containerfile").read_text()
    copied = set()
    for line in re.findall("^COPY (.+)", containerfile, re.MULTILINE):
        copied |= set(line.split()[:-1])
    definition = (CONTAINER / "hpcfed.def").read_text()
    files = definition.partition("%files\n")[2].partition("\n\n")[0]
    assert {line.split()[0] for line in files.splitlines()} == copied
    assert all((ROOT / name).exists() for name in copied)
    shipped = runpy.run_path(str(ROOT / "hpcfed/shipped.py"))
    for name in ("pyproject.toml", "README.md", "hpcfed", *shipped["FOLDERS"]):
        assert name in copied or name.split("/")[0] in copied


def test_both_recipes_have_one_base_and_one_environment() -> None:
    containerfile = (CONTAINER / "Containerfile").read_text()
    definition = (CONTAINER / "hpcfed.def").read_text()
    for fact in (r"(?:ARG BASE|    base)=(\S+)", r"(?:ENV|export) (PATH=.+)"):
        ours, theirs = (re.findall(fact, text) for text in (containerfile, definition))
        assert ours == theirs and len(ours) == 1


def test_the_installer_is_a_script_that_the_shell_understands() -> None:
    subprocess.run(["sh", "-n", CONTAINER / "install"], check=True)
    said = subprocess.run([CONTAINER / "install", "pakages"], capture_output=True)
    assert said.returncode == 2


# Spack and Ramble: their files run with directives that only take note of their arguments


def executed(
    path: Path, module: str, monkeypatch: pytest.MonkeyPatch, *, without: str = ""
) -> dict[str, Calls]:
    """Run a recipe, and return the calls of each directive that it imports. The module
    has no class `without`.
    """
    calls: dict[str, Calls] = {}

    class Directives(ModuleType):
        def __getattr__(self, name: str) -> type | Callable[..., None]:
            if name.startswith("__") or name == without:
                raise AttributeError(name)
            if name[0].isupper():
                return type(name, (), {})
            noted = calls.setdefault(name, [])
            return lambda *args, **more: noted.append((args, more))

    package = module.partition(".")[0]
    monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setitem(sys.modules, module, Directives(module))
    runpy.run_path(str(path))
    return calls


def spack_name(needed: Requirement) -> str:
    """Return a requirement as Spack writes it."""
    bounds = [f"@{bound.version}:" for bound in needed.specifier]
    assert all(bound.operator == ">=" for bound in needed.specifier)
    return f"py-{canonicalize_name(needed.name)}{''.join(bounds)}"


def test_spack_knows_every_requirement(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = executed(LAUNCH / "spack/package.py", "spack.package", monkeypatch)
    always, with_hf = set(), set()
    for (spec,), more in calls["depends_on"]:
        specs = with_hf if more.get("when") == "+hf" else always
        specs.add(spec.partition("+")[0])
    python = PROJECT["requires-python"].removeprefix(">=")
    assert always - {"py-setuptools@77:", f"python@{python}:"} == {
        spack_name(needed) for needed in NEEDED
    }
    assert with_hf == {spack_name(needed) for needed in EXTRAS["hf"]}


def test_newer_spacks_have_the_class_of_packages_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From 1.0 on `spack.package` has directives, but no build systems."""
    parts = ["spack_repo", "builtin", "build_systems", "python"]
    for number in range(1, len(parts) + 1):
        name = ".".join(parts[:number])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[".".join(parts)].PythonPackage = type("PythonPackage", (), {})
    path = LAUNCH / "spack/package.py"
    calls = executed(path, "spack.package", monkeypatch, without="PythonPackage")
    assert calls["version"] and calls["depends_on"]


def test_ramble_reads_the_figure_of_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = executed(LAUNCH / "ramble/application.py", "ramble.appkit", monkeypatch)
    assert {args[0] for args, _ in calls["workload"]} == set(names())
    run = TimedRun(
        seed=0,
        seconds=3.0,
        rounds=1,
        all_seconds=4.0,
        quality=0.5,
        samples=1.0,
        energy_wh=9.0,
    )
    figure = FigureOfMerit(
        meaning="", seconds=2.5, low=2.0, high=3.0, interval="", dropped=0
    )
    # A result has more; model_construct leaves that out.
    result = BenchmarkResult.model_construct(
        verdict="PASSED", figure=figure, energy_wh=0.25, runs=[run]
    )
    lines = result.model_dump_json(indent=1).splitlines()
    read = {}
    for (name,), more in calls["figure_of_merit"]:
        # As Ramble does: line by line, from its beginning.
        matches = [re.match(more["fom_regex"], line) for line in lines]
        read[name] = [m[more["group_name"]] for m in matches if m is not None]
    assert read == {"figure": ["2.5"], "energy": ["0.25"]}
    ((_, criterion),) = calls["success_criteria"]
    assert any(re.match(criterion["match"], line) for line in lines)


# The modulefile

MODULES = """
foreach name {conflict prereq prepend-path setenv module-whatis} {
    proc $name {args} "puts \\"$name \\$args\\""
}
"""


def test_the_modulefile_sets_what_scripts_need() -> None:
    if shutil.which("tclsh") is None:
        pytest.skip("no tclsh")
    script = f"{MODULES}\nsource {LAUNCH / 'modulefile'}\n"
    said = subprocess.run(
        ["tclsh"], input=script, capture_output=True, text=True, check=True
    )
    assert said.stderr == ""
    assert "prepend-path PATH /opt/hpcfed/bin" in said.stdout
    assert "setenv HPCFED_ENVIRONMENT current" in said.stdout


# Two simulated nodes


def test_two_nodes_take_the_python_that_is_there_and_say_what_it_lacks(
    tmp_path: Path,
) -> None:
    python = tmp_path / "python3"
    python.symlink_to(sys.executable)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for more, named in (
        ({"HPCFED_ENVIRONMENT": "current"}, python),
        ({"PYTHON": str(tmp_path / "none")}, tmp_path / "none"),
    ):
        said = subprocess.run(
            [LAUNCH / "two-nodes", "run"],
            env=variables | more,
            capture_output=True,
            text=True,
        )
        assert said.returncode == 2
        assert said.stderr.startswith(f"two-nodes: no mpirun beside {named}; ")
        assert said.stderr.count("\n") == 1
