"""One declaration is enough: every fact about an option stands with the option."""

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcfed import methods
from hpcfed.cli.settings import keyword_settings
from hpcfed.options import RunConfig, check
from hpcfed.plan.calibrate import small_run
from hpcfed.runtime.launcher import Launch

PACKAGE = Path(methods.__file__).parents[1]
OTHER_MEANINGS = {
    ("downlink", "uplink"): "columns of a trace, and of the record of devices",
    ("noise_multiplier", "delta"): "numbers of a record's accountant",
    ("dataset", "clients"): "columns of tables that name a problem",
    ("method", "dataset", "clients"): "the first columns of an export",
    ("method", "attack", "attackers", "aggregation", "clients"): "columns of a table",
    ("method", "dataset", "clients", "seed"): "attributes of a record",
    ("method", "dataset", "clients", "seed", "model"): "attributes of a record",
    ("compress", "compress_down"): "the two directions, each with its column",
    ("privacy_population", "noise_cohort"): "what makes an ε hypothetical, in words",
    ("method", "server"): "headings in the help of a method's options",
}
"""Lists of words that are options by chance, or columns of a table: no facts."""


def option_names() -> set[str]:
    names = set(RunConfig.model_fields)
    for declared in methods.options().values():
        names |= set(declared)
    return names


def lists(tree: ast.AST) -> Iterator[tuple[int, list[ast.expr]]]:
    """Yield literal lists, and tables of literals, outside of declarations."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "option":
            continue
        if (
            isinstance(node, ast.Subscript)
            and getattr(node.value, "id", "") == "Literal"
        ):
            continue
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            yield node.lineno, node.elts
        if isinstance(node, ast.Dict):
            plain = (ast.Constant, ast.Tuple, ast.List, ast.Set)
            if all(isinstance(value, plain) for value in node.values):
                yield node.lineno, [key for key in node.keys if key is not None]
        yield from lists(node)


def test_nobody_keeps_a_list_of_options() -> None:
    names = option_names()
    kept = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for line, entries in lists(ast.parse(path.read_text())):
            words = [one.value for one in entries if isinstance(one, ast.Constant)]
            # A list with other words has another meaning: phases, stages, columns.
            listed = len(words) > 1 and names.issuperset(words)
            if listed and tuple(words) not in OTHER_MEANINGS:
                kept.append(f"{path.relative_to(PACKAGE)}:{line} {words}")
    assert not kept, "state the fact in option(...) and ask hpcfed.options.named"


ONE_MORE = """
    appetite: int = option(
        3,
        "how hungry clients are",
        needs=Need("--rounds 2 or more", lambda run: run.rounds > 1),
        stackable=True,
        also="hunger",
    )
"""
USES = """
from pathlib import Path
from hpcfed import cli
from hpcfed.analysis.choices import Combination, defaults_of, distinguish
from hpcfed.errors import UserError
from hpcfed.options import check, named, suggest_option
from hpcfed.runtime.launcher import Launch

Path("my.toml").write_text("appetite = 7")
recorded = cli.parse_run(["my.toml"]).flat()
assert recorded["appetite"] == 7
assert cli.parse_run(["my.toml", "--appetite", "8"]).config.appetite == 8
assert "appetite" in named(stackable=True)
assert "--appetite" in suggest_option("--hunger", ["--appetite", "--rounds"])
try:
    check(cli.parse_run(["--appetite", "8", "--rounds", "1"]), Launch("", 0, 1))
except UserError as error:
    assert "--appetite changes nothing without --rounds 2 or more" in str(error)
else:
    raise AssertionError
usual = defaults_of("fedavg")
keys = distinguish([Combination(usual), Combination(usual | {"appetite": 7})])
assert [key["appetite"] for key in keys] == [3, 7]
cli.main(["run", "--help"])
"""


def test_one_more_option_is_one_declaration(tmp_path: Path) -> None:
    """Flags, TOML, help, records, names of runs, checks and guesses all follow."""
    shutil.copytree(
        PACKAGE, tmp_path / "hpcfed", ignore=shutil.ignore_patterns("__pyc*")
    )
    group = tmp_path / "hpcfed" / "options" / "run.py"
    before, mark, after = group.read_text().partition("    rounds: int = option(")
    group.write_text(f"{before}{ONE_MORE}{mark}{after}")
    words = [sys.executable, "-c", USES]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "how hungry clients are (default: 3)" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    "values",
    [
        {"rounds": 100, "lr_schedule": "step", "lr_step_size": 30},
        {"rounds": 100, "lr_schedule": "warmup-cosine", "lr_warmup": 20},
        {
            "rounds": 100,
            "method": "fedadam",
            "server_lr_schedule": "warmup",
            "server_lr_warmup": 20,
        },
    ],
)
def test_a_calibration_takes_schedules_longer_than_its_short_runs(
    values: dict[str, object],
) -> None:
    small, _ = small_run(keyword_settings(values), values, clients=10)
    check(small, Launch("alone", 0, 1))


def test_the_options_of_all_methods_load_without_torch() -> None:
    """Their types are real even so: values of each can be checked."""
    code = (
        "import sys; from hpcfed import methods; print(len(methods.options()))\n"
        "[methods.load(name).Options() for name in methods.names()]"
    )
    words = [sys.executable, "-c", f"{code}; print('torch' in sys.modules)"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(len(methods.names())), "False"]
