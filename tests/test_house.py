"""The rules of the house, held for every file of the package."""

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import TypeGuard

import pytest

ROOT = Path(__file__).parents[1]
FILES = {path: path.read_text() for path in sorted((ROOT / "hpcfed").rglob("*.py"))}
LONGEST = 400
"""Lines of a module that a reader still takes in at once."""
INTERFACE = {"Options", "State"}
"""Classes that every method's module has under the same name."""


@cache
def trees() -> dict[Path, ast.Module]:
    """Parse all files, once."""
    return {path: ast.parse(text) for path, text in FILES.items()}


def test_no_name_of_a_class_is_used_twice() -> None:
    places = defaultdict(list)
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name not in INTERFACE:
                places[node.name].append(str(path.relative_to(ROOT)))
    twice = {name: own for name, own in places.items() if len(own) > 1}
    assert not twice


def test_modules_are_short() -> None:
    lines = {
        str(path.relative_to(ROOT)): text.count("\n") for path, text in FILES.items()
    }
    assert len(lines) > 100
    assert not {path: count for path, count in lines.items() if count > LONGEST}


def test_only_two_folders_know_makes_of_gpus() -> None:
    """All others ask `runtime/accelerator.py` and `runtime/graphs.py`."""
    known, others = set(), []
    for path, tree in trees().items():
        folder, *_ = path.relative_to(ROOT / "hpcfed").parts
        for node in ast.walk(tree):
            if not _names_a_make(node):
                continue
            if folder in ("runtime", "kernels"):
                known.add(folder)
            else:
                others.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert known == {"runtime", "kernels"}
    assert not others


def _names_a_make(node: ast.AST) -> TypeGuard[ast.expr | ast.stmt]:
    """Tell whether it is torch's module for GPUs of one make, or imports it."""
    modules = {"torch.cuda", "torch.xpu"}
    if isinstance(node, ast.Attribute):
        return ast.unparse(node) in modules
    if isinstance(node, ast.ImportFrom):
        begin = ".".join((node.module or "").split(".")[:2])
        return begin in modules or bool(
            modules & {f"{node.module}.{name.name}" for name in node.names}
        )
    if isinstance(node, ast.Import):
        return bool(modules & {".".join(n.name.split(".")[:2]) for n in node.names})
    return False


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("torch.cuda.synchronize()", True),
        ("import torch.xpu.memory", True),
        ("from torch.cuda import Stream", True),
        ("from torch import nn, xpu", True),
        ("torch.accelerator.synchronize()", False),
        ("from torch import nn", False),
    ],
)
def test_names_of_makes_are_found(text: str, is_one: bool) -> None:
    assert any(map(_names_a_make, ast.walk(ast.parse(text)))) == is_one


def test_only_the_command_line_knows_argparses_results() -> None:
    """Commands take typed arguments, so that a reader sees what each of them needs."""
    for path, text in FILES.items():
        if "cli" not in path.relative_to(ROOT / "hpcfed").parts:
            assert "argparse.Namespace" not in text, path
