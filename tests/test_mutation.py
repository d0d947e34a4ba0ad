"""The program that changes modules: what it changes, whom it asks, and what it counts."""

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.mutation import children
from benchmarks.mutation.judged import FILE, Judged
from benchmarks.mutation.mutants import (
    Mutant,
    drawn,
    is_another_program,
    mutant_of,
    points_of,
)
from benchmarks.mutation.planting import change, functions_of, with_change, with_probes
from benchmarks.mutation.reach import OWN, Map, Reach
from benchmarks.mutation.trial import affordable

ROOT = Path(__file__).parents[1]
NAME = "own_module_of_the_mutation_test"
TEXT = b'''"""One module: 1 < 2."""
from math import floor
LIMIT: int = 3


class Box:
    size: int = 4

    def half(self, by: float = 2.0) -> tuple[int, bool]:
        """Half of it, and not more than 5."""
        if self.size < LIMIT:
            raise ValueError(f"{self.size + 1} is small")
        assert by > 0, "a message"
        inner = [n for n in range(9) if n][1 : floor(by)]
        inner.append(7)
        print("a word", 8)
        return (
            floor(self.size / by),
            len(inner) > 0,
        )
'''


def changes(text: bytes) -> list[tuple[int, str, str]]:
    found = [mutant_of(f"{NAME}.py", text, point) for point in points_of(text)]
    assert all(is_another_program(text, mutant) for mutant in found)
    assert all(m.text.count(b"\n") == text.count(b"\n") for m in found)
    return [(mutant.line, mutant.old, mutant.new) for mutant in found]


def test_what_is_changed() -> None:
    """No docstring, annotation, assert, message or text of an error."""
    found = changes(TEXT)
    lines = {line for line, *_ in found}
    assert lines == {3, 7, 9, 11, 12, 14, 15, 18, 19}
    size = "floor(self.size / by),"
    for line, old, new in (
        (3, "LIMIT: int = 3", "LIMIT: int = 4"),
        (7, "size: int = 4", "size: int = 3"),
        (9, "def half(self, by: float = 2.0)", "def half(self, by: float = 3.0)"),
        (11, "if self.size < LIMIT:", "if self.size <= LIMIT:"),
        (11, "if self.size < LIMIT:", "if self.size > LIMIT:"),
        (12, 'raise ValueError(f"{self.size + 1} is small")', "pass"),
        (14, "if n]", "if not (n)]"),
        (14, "[1 : floor(by)]", "[1 : floor(by) + 1]"),
        (14, "[1 : floor(by)]", "[1 : ceil(by)]"),
        (15, "inner.append(7)", "pass"),
        (18, size, "floor(self.size * by),"),
        (19, "len(inner) > 0,", "len(inner) >= 0,"),
    ):
        assert any(
            at == line and old in before and new in after for at, before, after in found
        ), (line, new)
    swapped = (
        "floor(self.size / by), len(inner) > 0",
        "len(inner) > 0, floor(self.size / by)",
    )
    assert (18, *swapped) in found


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("a is not b", "a is b"),
        ("a in b", "a not in b"),
        ("a and b or c", "a or b or c"),
        ("not a", "a"),
        ("-a", "a"),
        ("a if b else c", "a if not (b) else c"),
        ("True", "False"),
        ("a // b", "a * b"),
        ("a.min(b)", "a.max(b)"),
    ],
)
def test_operators(old: str, new: str) -> None:
    assert (1, f"x = {old}", f"x = {new}") in changes(f"x = {old}\n".encode())


def test_a_sign_in_a_comment_is_none() -> None:
    text = b"x = (\n    a  # - and +\n    + b\n)\n"
    assert changes(text) == [(3, "+ b", "- b")]


def test_mutants_are_drawn_by_seed_and_equally_over_modules() -> None:
    texts = {"a.py": TEXT, "b.py": TEXT, "few.py": b"x = 1\n"}
    mutants, counts = drawn(texts, 20, 5)
    assert mutants == drawn(texts, 20, 5)[0] != drawn(texts, 20, 6)[0]
    assert len(set(mutants)) == 20
    of = [mutant.module for mutant in mutants]
    assert {module: of.count(module) for module in texts} == {
        "a.py": 9,
        "b.py": 9,
        "few.py": 2,
    }
    assert counts["few.py"] == 2 and counts["a.py"] == counts["b.py"] > 20


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module above, imported from a file."""
    (tmp_path / f"{NAME}.py").write_bytes(TEXT)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module(NAME)
    del sys.modules[NAME]


def mutant(line: int, new: str) -> Mutant:
    every = (mutant_of(f"{NAME}.py", TEXT, point) for point in points_of(TEXT))
    return next(each for each in every if each.line == line and new in each.new)


def test_a_function_is_changed_wherever_it_is_referred_to(
    box: ModuleType, tmp_path: Path
) -> None:
    half, own = box.Box.half, box.Box()
    assert own.half() == (2, True)
    functions = functions_of(tmp_path, [f"{NAME}.py"])
    assert not change(mutant(7, "size: int = 5"), tmp_path, functions)
    assert own.half() == (2, True), "what acts at import does not act later"
    assert change(mutant(18, "floor(self.size * by)"), tmp_path, functions)
    assert own.half() == half(own) == (8, True)


def test_changes_and_probes_act_at_import(tmp_path: Path) -> None:
    names: dict[str, object] = {"__name__": NAME}
    exec(with_change(mutant(7, "size: int = 5"))("file"), names)
    assert names["Box"].size == 5  # type: ignore[attr-defined]
    reached: list[int] = []
    names = {"__name__": NAME, "__reached__": reached.append}
    exec(with_probes(TEXT, 1000)("file"), names)
    assert names["__doc__"] == "One module: 1 < 2."
    assert reached == [1002, 1003, 1006, 1007, 1009]
    reached.clear()
    names["Box"]().half()  # type: ignore[operator]
    assert reached == [1011, 1013, 1014, 1015, 1016, 1017]


def test_who_meets_a_change() -> None:
    """The statement around it; of what acts at import, the statements that use it."""
    lines = {mutant(11, "<=").point.lines, mutant(3, "4").point.lines}
    assert lines == {(11,)}
    assert mutant(12, "pass").point.lines == (12,)
    assert mutant(18, "*").point.lines == (17,)
    whole = {7, 9, 11, 12, 13, 14, 15, 16, 17}
    assert whole <= set(mutant(7, "5").point.lines)
    found = Map(
        tests={
            "f": [
                Reach("f::a[1]", 2.0, {"m": [1, 2]}),
                Reach("f::a[2]", 3.0, {"m": [1]}),
                Reach("f::b", 9.0, {"m": [2, 3]}),
                Reach("f::c", 0.1, {}),
            ]
        }
    )
    order = [test.name for test in found.reaching("m", [1, 3], ["f"])]
    assert order == ["f::a[1]", "f::b", "f::a[2]"]
    tests = found.reaching("m", None, ["f", "g"])
    assert [test.name for test in affordable(tests, 5.0)] == ["f::a[1]", "f::a[2]"]
    assert [test.name for test in affordable(tests, 1.0)] == ["f::a[1]"]
    assert [test.name for test in found.beside(tests)] == ["f::c"]


def test_only_what_has_changed_is_looked_at_again(tmp_path: Path) -> None:
    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    file, other = "tests/test_a.py", "tests/test_b.py"
    for name in ("m.py", *OWN):
        write(name, "")
    begin = (
        "import os\nx = 1\n'a docstring'\ndef y(): return x\ndef test_one(y): pass\n"
    )
    write(file, begin)
    write(other, begin)
    found = Map()

    def new() -> dict[str, set[str]]:
        return found.forget_what_changed(tmp_path, ["m.py"], [file, other])

    def look() -> None:
        for each in new():
            found.tests[each] = [Reach(f"{each}::test_one[1]", 1.0, {"m.py": [1]})]
            found.keep(tmp_path, each)

    assert new() == {file: {"test_one"}, other: {"test_one"}}
    look()
    assert new() == {} and len(found.tests[file]) == 1
    assert found.modules == ["m.py"]
    write(file, "import sys\nz = 5\n" + begin + "def test_two(): z\n")
    assert new() == {file: {"test_two"}} and len(found.tests[file]) == 1
    look()
    write(file, begin.replace("pass", "assert y"))
    assert new() == {file: {"test_one"}} and not found.tests[file]
    look()
    write(file, begin.replace("x = 1", "x = 2"))
    found.failed = [f"{file}::test_one", f"{other}::test_one"]
    assert new() == {file: {"test_one"}} and found.failed == [f"{other}::test_one"]
    look()
    found.write(tmp_path / "kept" / "map")
    assert Map.read(tmp_path / "kept" / "map") == found
    for name in ("m.py", OWN[0]):
        write(name, f"y = {name!r}")
        assert new() == {file: {"test_one"}, other: {"test_one"}}
        look()


@pytest.mark.parametrize(
    ("work", "code"), [("pass", 0), ("raise", 1), ("leave", 1), ("kill", -9)]
)
def test_a_fork_tells_how_it_ended(work: str, code: int, tmp_path: Path) -> None:
    def go(tell: object) -> None:
        assert callable(tell)
        tell("1.5 begun")
        if work == "raise":
            raise ValueError
        if work == "leave":
            sys.exit(0)
        if work == "kill":
            os.kill(os.getpid(), signal.SIGKILL)

    end = children.in_fork(go, tmp_path / "none")
    assert (end.code, end.told, end.went_on_forever) == (code, ["1.5 begun"], False)


def test_what_goes_on_forever_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "GRACE", 0.0)
    monkeypatch.setattr(children, "PATIENCE", 0.2)

    def compute(tell: object) -> None:
        assert callable(tell)
        tell("1 begun")
        children.limit(0)
        while True:
            pass

    def sleep(tell: object) -> None:
        assert callable(tell)
        tell("0 begun")
        time.sleep(60)

    for work in (compute, sleep):
        end = children.in_fork(work, tmp_path / "none")
        assert end.went_on_forever and end.code != 0 and end.told


def test_what_was_judged_fits_a_mutant_of_today() -> None:
    judged = Judged.read()
    assert all(len(reason) > 20 for reason in judged.reasons.values())
    texts = {module: (ROOT / module).read_bytes() for module in judged.modules}
    assert list(judged.stale(texts)) == [], f"see {FILE}"


def test_what_fits_no_mutant_is_told() -> None:
    one = mutant(11, "<=")
    judged = Judged({one.key: "as good", ("m.py", "f", "a < b", "a <= b"): "gone"})
    assert judged.reason(one) == "as good" and judged.reason(mutant(3, "4")) is None
    remarks = list(judged.stale({one.module: TEXT, "m.py": b""}))
    assert remarks == ["equivalent.toml: m.py has no such line in f: a < b"]


def test_what_is_to_be_changed_is_not_imported_yet() -> None:
    program = (
        "import sys, benchmarks.mutation.__main__; sys.exit('hpcfed' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
