"""Count how densely Python code is written, and how much of it is explained.

Prints a column per folder, so that folders (of this repository, or of others) can be
compared. Files of tests are left out.

  syntax nodes     of Python's syntax tree, per line of code in the bodies of functions
  comprehensions   lists, sets, dictionaries and generators, per 1000 lines of code
  long lines       lines of more than 100 characters, in per cent of all
  comments         comments, per line of code
  docstrings       lines of docstrings, per line of code

A line of code is one that is neither blank, nor a comment, nor within a docstring.

examples:
  python benchmarks/density.py hpcfed benchmarks
  python benchmarks/density.py hpcfed/runtime hpcfed/methods ../fedjax/fedjax
"""

import argparse
import ast
import io
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

LONG = 100
"""Characters; a line with more is long."""
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Counts:
    """What is counted in the files of one folder."""

    file_lengths: list[int] = field(default_factory=list)
    function_lengths: list[int] = field(default_factory=list)
    code: int = 0
    """Lines of code."""
    body: int = 0
    """Lines of code in the bodies of functions."""
    body_nodes: int = 0
    comprehensions: int = 0
    long: int = 0
    comments: int = 0
    docstring_lines: int = 0
    of: int = 0
    """Docstrings that begin with "Of"."""

    def add(self, text: str) -> None:
        """Count one file."""
        lines = text.splitlines()
        tree = ast.parse(text)
        docstrings = set(_docstring_lines(tree))
        comments = list(_comments(text))
        self.file_lengths.append(len(lines))
        self.long += sum(len(line) > LONG for line in lines)
        self.comments += len(comments)
        self.docstring_lines += len(docstrings)
        code = set()
        for number, line in enumerate(lines, start=1):
            explained = number in docstrings or line.lstrip().startswith("#")
            if line.strip() and not explained:
                code.add(number)
        self.code += len(code)
        for node in ast.walk(tree):
            self._add_node(node)
        for function in _outermost(tree):
            self._add_body(function, code)

    def _add_node(self, node: ast.AST) -> None:
        if isinstance(node, COMPREHENSIONS):
            self.comprehensions += 1
        if isinstance(node, FUNCTIONS):
            assert node.end_lineno is not None
            self.function_lengths.append(node.end_lineno - node.lineno + 1)
        if isinstance(node, ast.Expr) and _is_text(node):
            self.of += ast.literal_eval(node.value).split()[:1] == ["Of"]

    def _add_body(self, function: ast.AST, code: set[int]) -> None:
        assert isinstance(function, FUNCTIONS)
        for statement in function.body:
            if _is_text(statement):
                continue
            assert statement.end_lineno is not None
            span = range(statement.lineno, statement.end_lineno + 1)
            self.body += len(code.intersection(span))
            self.body_nodes += sum(1 for _ in ast.walk(statement))

    def rows(self) -> dict[str, str]:
        """Return the figures of the table, by the names of its rows."""
        functions = sorted(self.function_lengths) or [0]
        tenth = functions[int(0.9 * len(functions))]
        lengths = f"{median(functions):.0f} / {tenth} / {functions[-1]}"
        files = self.file_lengths
        return {
            "files": str(len(files)),
            "file, median / largest": f"{median(files):.0f} / {max(files)}",
            "function, median / 90 % / longest": lengths,
            "syntax nodes per body line": f"{self.body_nodes / max(1, self.body):.1f}",
            "comprehensions per 1000": f"{1000 * self.comprehensions / self.code:.0f}",
            "lines over 100 characters": f"{100 * self.long / sum(files):.1f} %",
            "comments per code line": f"{self.comments / self.code:.3f}",
            "docstrings per code line": f"{self.docstring_lines / self.code:.2f}",
            'docstrings that begin with "Of"': str(self.of),
        }


def count(folder: Path) -> Counts:
    """Count all Python files below a folder but tests."""
    counts = Counts()
    for path in sorted(folder.rglob("*.py")):
        is_test = "tests" in path.parts or path.name.startswith("test_")
        text = path.read_text()
        # A file of blank lines, as __init__.py often is, says nothing of the code.
        if text.strip() and not is_test:
            counts.add(text)
    if not counts.code:
        raise SystemExit(f"density: no Python code in {folder}")
    return counts


def _is_text(statement: ast.stmt) -> bool:
    """Return whether a statement is a string by itself: a docstring, or what is written
    below an attribute.
    """
    if not isinstance(statement, ast.Expr):
        return False
    value = statement.value
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _docstring_lines(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and _is_text(node):
            assert node.end_lineno is not None
            yield from range(node.lineno, node.end_lineno + 1)


def _comments(text: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def _outermost(node: ast.AST) -> Iterator[ast.AST]:
    """Yield functions and methods, but none that is within another one."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FUNCTIONS):
            yield child
        else:
            yield from _outermost(child)


def table(folders: Sequence[Path]) -> str:
    """Return the figures of all folders, in Markdown."""
    columns = [count(folder).rows() for folder in folders]
    lines = [["", *map(str, folders)], ["---", *["---:"] * len(folders)]]
    for name in columns[0]:
        lines.append([name, *(column[name] for column in columns)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    print(table(parser.parse_args().folders))


if __name__ == "__main__":
    main()
