"""The tests' own hooks: failures told at once, and arithmetic that no test leaves
behind.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import conftest

PLANTED = """
import torch

def test_of_a_run():
    torch.backends.cudnn.allow_tf32 = False
    torch.set_deterministic_debug_mode("error")
    assert False, "planted"

def test_of_what_comes_after():
    assert torch.backends.cudnn.allow_tf32
    assert torch.get_deterministic_debug_mode() == 0
"""


def test_failures_are_told_at_once_and_leave_no_arithmetic(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "test_planted.py"
    file.write_text(PLANTED)
    told = tmp_path / "new" / "failures.txt"
    hooks = SimpleNamespace(
        pytest_addoption=conftest.pytest_addoption,
        pytest_configure=conftest.pytest_configure,
        pytest_runtest_protocol=conftest.pytest_runtest_protocol,
    )
    words = ["-p", "no:timeout", "-p", "no:cacheprovider", "--rootdir", tmp_path]
    words += ["-q", "--tb", "no", "--failures", told, file]
    code = pytest.main(list(map(str, words)), plugins=[hooks])
    assert code == pytest.ExitCode.TESTS_FAILED
    printed = capsys.readouterr().out
    letter, _, rest = printed.partition("\nFAILED ")
    name, _, after = rest.partition("\n")
    assert letter.endswith("F") and name.endswith("test_planted.py::test_of_a_run")
    # At once: before the letter of the test that passed.
    assert after.startswith(".") and "1 failed, 1 passed" in after
    first, *traceback = told.read_text().splitlines()
    assert first == f"FAILED {name}"
    assert any("planted" in line for line in traceback)
