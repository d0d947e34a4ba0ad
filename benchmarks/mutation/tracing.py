"""Runs every test once, and notes which statements it reaches."""

import builtins
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from pathlib import Path

import pytest

from benchmarks.mutation import children
from benchmarks.mutation.planting import PROBE, plant, with_probes
from benchmarks.mutation.reach import Map, Reach, function_of

COSTLY = {"mpirun", "hpcfed", "warm", "browser"}
"""Fixtures that start programs, which do not see what is changed in this process."""
PER_MODULE = 100_000
"""Numbers of probes that a module has to itself: its lines."""


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
        new: dict[str, set[str]],
        keep: Callable[[str], None],
    ) -> None:
        """`new` has the tests to run, by file; `keep` is told each file that is done."""
        self._modules, self._reached = modules, reached
        self._new, self._keep = new, keep
        self._scratch, self._found = scratch, found
        self._of_fixture: dict[str, tuple[set[int], float]] = {}
        self._tell: Callable[[str], None]

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._found.at_import = self._by_module(self._reached)
        by_file: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in session.items:
            fixtures = set(getattr(item, "fixturenames", ()))
            file, function = function_of(item.nodeid)
            if not fixtures & COSTLY and function in self._new[file]:
                by_file[file].append(item)
        begin = time.monotonic()
        for place, (file, items) in enumerate(by_file.items()):
            done = sum(map(len, self._found.tests.values()))
            print(
                f"{time.monotonic() - begin:5.0f} s, file {place + 1} of {len(by_file)}, "
                f"{done} tests so far: {file}",
                file=sys.stderr,
                flush=True,
            )
            self._found.tests.setdefault(file, []).extend(self._trace(items))
            self._keep(file)
        return True

    def _trace(self, items: list[pytest.Item]) -> list[Reach]:
        """Run a file's tests; a test that ends the process is left out."""
        tests = []
        while items:
            end = children.in_fork(partial(self._run, items), self._scratch)
            begun = 0
            for line in end.told:
                _, _, rest = line.partition(" ")
                if rest.startswith("{"):
                    tests.append(Reach(**json.loads(rest)))
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
                found = Reach(item.nodeid, round(seconds, 3), self._by_module(lines))
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
