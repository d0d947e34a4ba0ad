"""Programs that are forked from a server which has loaded torch."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import start

LAST = """
import atexit, threading, time
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
print("main", end="")
"""


@pytest.mark.parametrize(
    ("program", "code", "out", "err"),
    [
        ("print('done')", 0, "done\n", ""),
        (LAST, 0, "mainthread\nat exit\n", ""),
        (f"{LAST}raise SystemExit(3)", 3, "mainthread\nat exit\n", ""),
        ("raise SystemExit", 0, "", ""),
        ("import sys; sys.exit('it was refused')", 1, "", "it was refused\n"),
        ("import os; os._exit(7)", 7, "", ""),
        ("import ctypes; ctypes.CDLL(None).puts(b'library')", 0, "library\n", ""),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
            -signal.SIGTERM,
            "",
            "",
        ),
    ],
)
def test_they_end_as_python_would(
    warm: Callable[..., list[str]],
    tmp_path: Path,
    program: str,
    code: int,
    out: str,
    err: str,
) -> None:
    file = tmp_path / "program.py"
    file.write_text(program)
    ended = start(warm(file))
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, out, err)


def test_an_exception_is_told(warm: Callable[..., list[str]], tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text("import atexit\natexit.register(print, 'at exit')\n1 / 0\n")
    ended = start(warm(file))
    assert (ended.returncode, ended.stdout) == (1, "at exit\n")
    assert ended.stderr.startswith("Traceback (most recent call last):\n")
    assert ended.stderr.endswith("ZeroDivisionError: division by zero\n")
