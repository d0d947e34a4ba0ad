"""Tries mutants: runs the tests that reach a change until one fails."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.mutation import children
from benchmarks.mutation.mutants import Mutant
from benchmarks.mutation.planting import change, functions_of, plant, with_change
from benchmarks.mutation.reach import Reach

NOT_IN_PLACE = 3
"""The exit code of a fork in which no function could be changed."""


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant."""

    mutant: Mutant
    noticed: bool
    by: str
    """The test that failed; where none did, why."""
    tests: int
    """How many tests reach it and were to run."""
    seconds: float
    """CPU seconds."""


def affordable(tests: Sequence[Reach], seconds: float) -> list[Reach]:
    """Return the first tests, up to so many CPU seconds together; at least one."""
    chosen: list[Reach] = []
    for test in tests:
        if chosen and test.seconds > seconds:
            continue
        seconds -= test.seconds
        chosen.append(test)
    return chosen


class Trials:
    """In pytest's place: tries mutants, each in a fork."""

    def __init__(
        self,
        root: Path,
        mutants: Sequence[Mutant],
        tests: dict[Mutant, list[Reach]],
        scratch: Path,
        tell: Callable[[Outcome], None],
    ) -> None:
        self._root, self._mutants, self._tests = root, mutants, tests
        self._scratch, self._tell = scratch, tell
        self.left: list[Mutant] = []
        """Those that need a process that has not imported their module yet."""

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        session.config.pluginmanager.register(children.Failing())
        functions = functions_of(self._root, {m.module for m in self._mutants})
        for mutant in self._mutants:
            tests = self._tests[mutant]

            def work(
                tell: Callable[[str], None],
                mutant: Mutant = mutant,
                tests: list[Reach] = tests,
            ) -> None:
                if not change(mutant, self._root, functions):
                    os._exit(NOT_IN_PLACE)
                run(tests, items, tell)

            begin = children.cpu_seconds()
            end = children.in_fork(work, self._scratch)
            if end.code == NOT_IN_PLACE:
                self.left.append(mutant)
                continue
            taken = children.cpu_seconds() - begin
            self._tell(outcome_of(mutant, tests, end, taken))
        return True


def run(
    tests: Sequence[Reach], items: dict[str, pytest.Item], tell: Callable[[str], None]
) -> None:
    """Run tests, each with its limit, and tell which one begins."""
    for test, following in zip(tests, [*tests[1:], None], strict=True):
        tell(f"{test.seconds} {test.name}")
        children.limit(test.seconds)
        item = items[test.name]
        after = items[following.name] if following is not None else None
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)


def outcome_of(
    mutant: Mutant, tests: Sequence[Reach], end: children.End, seconds: float
) -> Outcome:
    """Say what became of a mutant."""
    _, _, last = end.told[-1].partition(" ") if end.told else ("", "", "")
    if end.code == 0:
        by = "all tests pass"
    elif end.went_on_forever:
        by = f"no end: {last}"
    else:
        by = last or "it cannot be imported"
    return Outcome(mutant, end.code != 0, by, len(tests), seconds)


class OfOne:
    """In pytest's place, in a fork that has imported the changed module: runs the tests
    of its mutant.
    """

    def __init__(self, tests: Sequence[Reach], tell: Callable[[str], None]) -> None:
        self._tests, self._tell = tests, tell

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:  # a file of tests that cannot be imported
            os._exit(children.FAILED)
        session.config.pluginmanager.register(children.Failing())
        items = {item.nodeid: item for item in session.items}
        # Parameters may be other ones now.
        run([test for test in self._tests if test.name in items], items, self._tell)
        return True


def try_imported(
    root: Path, mutant: Mutant, tests: Sequence[Reach], scratch: Path
) -> Outcome:
    """Try a change that acts when the module is imported, in a fork that imports it."""

    def work(tell: Callable[[str], None]) -> None:
        plant({root / mutant.module: with_change(mutant)})
        if pytest_of(root, tests, scratch, OfOne(tests, tell)):
            os._exit(children.FAILED)

    begin = children.cpu_seconds()
    end = children.in_fork(work, scratch)
    return outcome_of(mutant, tests, end, children.cpu_seconds() - begin)


def pytest_of(
    root: Path, tests: Sequence[Reach] | Sequence[str], scratch: Path, plugin: object
) -> int:
    """Collect tests, by name or by file, and have the plugin run them."""
    names = dict.fromkeys(t if isinstance(t, str) else t.name for t in tests)
    # By file: one node after the other is matched slowly.
    files = dict.fromkeys(name.partition("::")[0] for name in names)
    options = ["-s", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout=0"]
    options += [f"--basetemp={scratch}", f"--rootdir={root}"]
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing):
        return int(pytest.main([*options, *files], plugins=[plugin]))


def by_module(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, list[Outcome]]]:
    """Return outcomes by module, in the order of the modules."""
    for module in dict.fromkeys(each.mutant.module for each in outcomes):
        yield module, [each for each in outcomes if each.mutant.module == module]
