"""Which tests reach which statements, found once and kept."""

import builtins
import hashlib
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from benchmarks.mutation import children
from benchmarks.mutation.planting import PROBE, plant, with_probes

COSTLY = {"mpirun", "hpcfed", "warm", "browser"}
"""Fixtures that start programs, which do not see what is changed in this process."""
OWN = ("benchmarks/mutation/planting.py", "benchmarks/mutation/reach.py")
"""What makes a map; another text of it makes another one."""
PER_MODULE = 100_000
"""Numbers of probes that a module has to itself: its lines."""


@dataclass
class Test:
    """What a test takes, and which lines of which modules it reaches."""

    name: str
    seconds: float
    lines: dict[str, list[int]]


@dataclass
class Map:
    """What was found for all tests, and of which texts."""

    texts: dict[str, str] = field(default_factory=dict)
    """A checksum of every module, and of every file of tests."""
    tests: dict[str, list[Test]] = field(default_factory=dict)
    """By file of tests."""
    failed: list[str] = field(default_factory=list)
    """Tests that failed without any change, or took too long."""
    at_import: dict[str, list[int]] = field(default_factory=dict)
    """Lines that are reached before any test."""

    @classmethod
    def read(cls, file: Path) -> "Map":
        if not file.exists():
            return cls()
        found = json.loads(file.read_text())
        tests = {
            path: [Test(**test) for test in each]
            for path, each in found["tests"].items()
        }
        return cls(found["texts"], tests, found["failed"], found["at_import"])

    def write(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        tests = {path: [vars(t) for t in each] for path, each in self.tests.items()}
        content = vars(self) | {"tests": tests}
        beside = file.with_suffix(".part")
        beside.write_text(json.dumps(content))
        beside.replace(file)

    def forget_what_changed(
        self, root: Path, modules: Sequence[str], files: Sequence[str]
    ) -> list[str]:
        """Forget what another text was found for; return those of these files of tests
        that have to be looked at.
        """
        looked_at = (*modules, *OWN)
        texts = {name: checksum(root / name) for name in looked_at}
        known = all(self.texts.get(module) == text for module, text in texts.items())
        if not known:
            self.texts, self.tests, self.failed = texts, {}, []
        new = [f for f in files if self.texts.get(f) != checksum(root / f)]
        gone = [file for file in self.tests if not (root / file).exists()]
        for file in {*new, *gone}:
            self.tests.pop(file, None)
            self.failed = [name for name in self.failed if not name.startswith(file)]
        return sorted(new)

    def reaching(
        self, module: str, lines: Iterable[int] | None, files: Sequence[str]
    ) -> list[Test]:
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
        seen: dict[str, int] = defaultdict(int)
        places = {}
        for test in found:
            function, _, _ = test.name.partition("[")
            places[test.name] = seen[function]
            seen[function] += 1
        return sorted(found, key=lambda test: (places[test.name], test.seconds))


def checksum(path: Path) -> str:
    """Return what tells a file's text from all others."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def plant_probes(root: Path, modules: Sequence[str], reached: set[int]) -> None:
    """Have these modules tell what is reached, from their import on."""
    setattr(builtins, PROBE, reached.add)
    codes = {}
    for number, module in enumerate(modules):
        path = root / module
        codes[path] = with_probes(path.read_bytes(), PER_MODULE * number)
    plant(codes)


class Tracing:
    """In pytest's place: runs every test once, in forks, and notes what it reaches."""

    def __init__(
        self,
        modules: Sequence[str],
        reached: set[int],
        scratch: Path,
        found: Map,
        keep: Callable[[str], None],
    ) -> None:
        """`keep` is told each file of tests that is done."""
        self._modules, self._reached, self._keep = modules, reached, keep
        self._scratch, self._found = scratch, found
        self._of_fixture: dict[str, tuple[set[int], float]] = {}
        self._tell: Callable[[str], None]

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._found.at_import = self._by_module(self._reached)
        by_file: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in session.items:
            fixtures = set(getattr(item, "fixturenames", ()))
            if not fixtures & COSTLY:
                by_file[item.nodeid.partition("::")[0]].append(item)
        begin = time.monotonic()
        for place, (file, items) in enumerate(by_file.items()):
            done = sum(map(len, self._found.tests.values()))
            print(
                f"{time.monotonic() - begin:5.0f} s, file {place + 1} of {len(by_file)}, "
                f"{done} tests so far: {file}",
                file=sys.stderr,
                flush=True,
            )
            self._found.tests[file] = self._trace(items)
            self._keep(file)
        return True

    def _trace(self, items: list[pytest.Item]) -> list[Test]:
        """Run a file's tests; a test that ends the process is left out."""
        tests = []
        while items:
            end = children.in_fork(partial(self._run, items), self._scratch)
            begun = 0
            for line in end.told:
                _, _, rest = line.partition(" ")
                if rest.startswith("{"):
                    tests.append(Test(**json.loads(rest)))
                elif rest.startswith("failed "):
                    self._found.failed.append(rest.removeprefix("failed "))
                else:
                    begun += 1
            if end.code == 0:
                break
            if not begun:
                raise RuntimeError(f"no test of {items[0].nodeid} could begin")
            self._found.failed.append(items[begun - 1].nodeid)
            items = items[begun:]
        return tests

    def _run(self, items: list[pytest.Item], tell: Callable[[str], None]) -> None:
        self._tell = tell
        children.run(items)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item
    ) -> Generator[None, object, object]:
        self._tell("0 " + item.nodeid)
        children.limit(30)
        self._passed = False
        self._reached.clear()
        self._within_fixtures = 0.0
        begin = children.cpu_seconds()
        try:
            return (yield)
        finally:
            seconds = children.cpu_seconds() - begin - self._within_fixtures
            lines = set(self._reached)
            for name in getattr(item, "fixturenames", ()):
                of_fixture, its_seconds = self._of_fixture.get(name, (set(), 0.0))
                lines |= of_fixture
                seconds += its_seconds
            if self._passed:
                found = Test(item.nodeid, round(seconds, 3), self._by_module(lines))
                self._tell("0 " + json.dumps(vars(found)))

    def _by_module(self, lines: Iterable[int]) -> dict[str, list[int]]:
        found = defaultdict(list)
        for number in sorted(lines):
            module, line = divmod(number, PER_MODULE)
            found[self._modules[module]].append(line)
        return dict(found)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._passed = False
            self._tell("0 failed " + report.nodeid)
        elif report.when == "call" and report.passed:
            self._passed = True

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[object]
    ) -> Generator[None, object, object]:
        """What a fixture does that several tests share is done by each of them."""
        if fixturedef.scope == "function":
            return (yield)
        before, outer = set(self._reached), self._within_fixtures
        self._reached.clear()
        self._within_fixtures = 0.0
        begin = children.cpu_seconds()
        try:
            return (yield)
        finally:
            seconds = children.cpu_seconds() - begin
            lines, its = self._of_fixture.get(fixturedef.argname, (set(), 0.0))
            own = seconds - self._within_fixtures
            self._of_fixture[fixturedef.argname] = lines | self._reached, max(its, own)
            self._within_fixtures = outer + seconds
            self._reached.clear()
            self._reached |= before
