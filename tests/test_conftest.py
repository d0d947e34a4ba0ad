"""The tests' own hooks: failures told at once, arithmetic that no test leaves behind, and
processes that begin with torch imported.
"""

import gc
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import conftest
from tests.conftest import Command

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


def test_what_was_imported_is_no_garbage() -> None:
    """Not to be looked through again and again: torch alone brings 100,000 objects."""
    collection = conftest.pytest_collection()
    next(collection)
    assert not gc.isenabled()
    with pytest.raises(StopIteration):
        next(collection)
    assert gc.isenabled() and gc.get_freeze_count() > 100_000


def test_a_warm_process_ends_as_its_program_does(tmp_path: Path, warm: Command) -> None:
    """It has words, folder and variables of its own, and ends with its exit code."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, torch\n"
        "print(sys.argv[1:], os.getcwd(), os.environ['NAME'], __name__)\n"
        "sys.exit('told')"
    )
    command = warm(program, "one", "two")
    done = subprocess.run(
        command, env={"NAME": "value"}, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout == f"['one', 'two'] {tmp_path} value __main__\n"
    assert (done.returncode, done.stderr) == (1, "told\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_reaches_the_program_of_a_warm_process(
    number: signal.Signals, tmp_path: Path, warm: Command
) -> None:
    program = tmp_path / "program.py"
    program.write_text("import time\nprint('begun', flush=True)\ntime.sleep(60)")
    command = warm(program)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None and job.stdout.readline() == "begun\n"
        job.send_signal(number)
        # The pipe ends when the program is gone, and not only the one who asked for it.
        assert job.stdout.read() == ""
    assert job.returncode == -number
