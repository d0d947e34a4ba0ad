"""The rules of the house, held for every file of the package."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = {path: path.read_text() for path in sorted((ROOT / "hpcfed").rglob("*.py"))}
LONGEST = 400
"""Lines of a module that a reader still takes in at once."""
INTERFACE = {"Options", "State"}
"""Classes that every method's module has under the same name."""


def test_no_name_of_a_class_is_used_twice() -> None:
    places = defaultdict(list)
    for path, text in FILES.items():
        for node in ast.walk(ast.parse(text)):
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


def test_only_the_command_line_knows_argparses_results() -> None:
    """Commands take typed arguments, so that a reader sees what each of them needs."""
    for path, text in FILES.items():
        if "cli" not in path.relative_to(ROOT / "hpcfed").parts:
            assert "argparse.Namespace" not in text, path
