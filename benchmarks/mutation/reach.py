"""Which tests reach which statements, as it was found and is kept."""

import ast
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

OWN = ("benchmarks/mutation/planting.py", "benchmarks/mutation/tracing.py")
"""What makes a map; another text of it makes another one."""


@dataclass
class Reach:
    """What a test takes, and which lines of which modules it reaches."""

    name: str
    seconds: float
    lines: dict[str, list[int]]


@dataclass
class Map:
    """What was found for all tests, and of which texts."""

    texts: dict[str, str] = field(default_factory=dict)
    """A checksum of every module, and of all but the tests of every file of tests."""
    functions: dict[str, dict[str, str]] = field(default_factory=dict)
    """A checksum of every test, by file."""
    tests: dict[str, list[Reach]] = field(default_factory=dict)
    """By file of tests."""
    failed: list[str] = field(default_factory=list)
    """Tests that failed without any change, or took too long."""
    at_import: dict[str, list[int]] = field(default_factory=dict)
    """Lines that are reached before any test."""

    @property
    def modules(self) -> list[str]:
        """The modules for which tests were looked at."""
        return [
            name for name in self.texts if name not in self.tests and name not in OWN
        ]

    @classmethod
    def read(cls, file: Path) -> "Map":
        if not file.exists():
            return cls()
        found = json.loads(file.read_text())
        tests = {
            path: [Reach(**test) for test in each]
            for path, each in found["tests"].items()
        }
        return cls(**found | {"tests": tests})

    def write(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        tests = {path: [vars(t) for t in each] for path, each in self.tests.items()}
        content = vars(self) | {"tests": tests}
        beside = file.with_suffix(".part")
        beside.write_text(json.dumps(content))
        beside.replace(file)

    def forget_what_changed(
        self, root: Path, modules: Sequence[str], files: Sequence[str]
    ) -> dict[str, set[str]]:
        """Forget what another text was found for; return the tests that have to run, by
        file.
        """
        looked_at = (*modules, *OWN)
        texts = {name: checksum((root / name).read_bytes()) for name in looked_at}
        if any(self.texts.get(name) != text for name, text in texts.items()):
            self.texts, self.functions, self.tests, self.failed = texts, {}, {}, []
        new = {}
        for file in files:
            rest, functions = parts_of((root / file).read_text())
            known = self.functions.get(file, {}) if self.texts.get(file) == rest else {}
            same = {name for name, text in functions.items() if known.get(name) == text}
            new[file] = functions.keys() - same
            tests = self.tests.get(file, [])
            self.tests[file] = [t for t in tests if function_of(t.name)[1] in same]
            self.failed = [
                name
                for name in self.failed
                if function_of(name)[0] != file or function_of(name)[1] in same
            ]
            self.texts[file] = rest
            self.functions[file] = {name: functions[name] for name in same}
        return {file: functions for file, functions in new.items() if functions}

    def keep(self, root: Path, file: str) -> None:
        """Note that all tests of a file have run."""
        self.texts[file], self.functions[file] = parts_of((root / file).read_text())

    def reaching(
        self, module: str, lines: Iterable[int] | None, files: Sequence[str]
    ) -> list[Reach]:
        """Return the tests in these files that reach one of these lines, or any line,
        quick ones first; of a test with many parameters, one comes before all others'
        second.
        """
        wanted = None if lines is None else set(lines)
        found = []
        for file in files:
            for test in self.tests.get(file, ()):
                reached = test.lines.get(module, ())
                if reached if wanted is None else wanted.intersection(reached):
                    found.append(test)
        found.sort(key=lambda test: test.seconds)
        seen: dict[tuple[str, str], int] = defaultdict(int)
        places = {}
        for test in found:
            function = function_of(test.name)
            places[test.name] = seen[function]
            seen[function] += 1
        return sorted(found, key=lambda test: (places[test.name], test.seconds))

    def beside(self, tests: Sequence[Reach]) -> list[Reach]:
        """Return the other tests of these tests' files, quick ones first: what acts at
        import may be met by tests that reach no statement, as a bound of an option.
        """
        names = {test.name for test in tests}
        files = {function_of(test.name)[0] for test in tests}
        others = [t for file in files for t in self.tests[file] if t.name not in names]
        return sorted(others, key=lambda test: (test.seconds, test.name))


def checksum(text: bytes) -> str:
    """Return what tells a text from all others."""
    return hashlib.sha256(text).hexdigest()


def function_of(name: str) -> tuple[str, str]:
    """Return file and function of a test's name: `tests/test_a.py::test_b[parameters]`."""
    file, _, rest = name.partition("::")
    return file, rest.partition("[")[0]


def parts_of(text: str) -> tuple[str, dict[str, str]]:
    """Return a checksum of what acts on all tests of a file, and one of each test: of it
    and of what it uses of the file. Imports do not count.
    """
    everywhere, named = [], defaultdict(list)
    for node in ast.parse(text).body:
        written = ast.dump(node)
        names = _defined(node)
        if "pytestmark" in names or "autouse" in written or not names:
            everywhere.append(written)
        for name in names:
            named[name].append((written, _used(node)))
    tests = {}
    for name in named:
        if name.startswith("test_"):
            used, new = set(), {name}
            while new:
                used |= new
                parts = [part for each in new for part in named[each]]
                new = {n for _, names in parts for n in names & named.keys()} - used
            whole = [part for each in sorted(used) for part, _ in named[each]]
            tests[name] = checksum("\n".join(whole).encode())
    return checksum("\n".join(everywhere).encode()), tests


def _defined(node: ast.stmt) -> set[str]:
    """Return the names that a statement of a file defines."""
    match node:
        case ast.FunctionDef() | ast.ClassDef():
            return {node.name}
        case ast.Import() | ast.ImportFrom():
            return {""}
        case _:
            names = (n for n in ast.walk(node) if isinstance(n, ast.Name))
            return {n.id for n in names if isinstance(n.ctx, ast.Store)}


def _used(node: ast.stmt) -> set[str]:
    """Return all names that stand in a statement, arguments of functions included: they
    may be fixtures.
    """
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    texts = (n.value for n in ast.walk(node) if isinstance(n, ast.Constant))
    names |= {text for text in texts if isinstance(text, str)}  # usefixtures("…")
    return names | {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}
