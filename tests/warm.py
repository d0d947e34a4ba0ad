"""Not a test: starts programs of Python that find torch and hpcfed imported.

Importing them takes three quarters of a short run. One process imports them, and is then
forked for every program, which so has all that a process has: its own rank, folder,
environment, output, exit code and death. `python warm.py ADDRESS WORDS` takes the place
of `python WORDS`: it asks for the fork, hands signals on and ends as the program ends.
"""

import json
import os
import select
import signal
import socket
import sys
from importlib import import_module
from pathlib import Path

HANDED_ON = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
LENGTH = 4
IMPORTED = ("hpcfed.cli", "hpcfed.experiment.run", "torch._dynamo")
"""Its compiler is what torch loads with the first optimiser."""


def ask(address: str, words: list[str]) -> None:
    """Have a program started, wait for its end, and end in the same way."""
    server = socket.socket(socket.AF_UNIX)
    server.connect(address)
    wish = json.dumps([words, os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [len(wish).to_bytes(LENGTH)], [0, 1, 2])
    server.sendall(wish)
    for number in HANDED_ON:
        signal.signal(number, lambda number, _: server.send(bytes([number])))
    code = int.from_bytes(server.recv(LENGTH), signed=True)
    if code < 0:
        if -code in HANDED_ON:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def serve(address: str) -> list[str]:
    """Fork for every wish until standard input ends. Return only in forks, the words of
    their program.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks for those who attend
    while listener in select.select([listener, 0], [], [])[0]:
        wish, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return attend(wish)
        wish.close()
    os._exit(0)


def attend(wish: socket.socket) -> list[str]:
    """Fork once more: return the program's words there, and here wait for its end."""
    size, outputs, _, _ = socket.recv_fds(wish, LENGTH, 3)
    told = wish.recv(int.from_bytes(size), socket.MSG_WAITALL)
    words, folder, variables = json.loads(told)
    program = os.fork()
    if program == 0:
        wish.close()
        for number, output in enumerate(outputs):
            os.dup2(output, number)
            os.close(output)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(variables)
        return words
    for open_one in (0, 1, 2, *outputs):  # pipes end when the program ends
        os.close(open_one)
    ended = os.pidfd_open(program)
    while ended not in (ready := select.select([ended, wish], [], [])[0]):
        for number in ready and (wish.recv(1) or [signal.SIGKILL]):
            os.kill(program, number)
    code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    wish.sendall(code.to_bytes(LENGTH, signed=True))
    os._exit(0)


def perform(words: list[str]) -> None:
    """Be the program that `python WORDS` would be."""
    import runpy

    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[0] = str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] != "--serve":
        ask(sys.argv[1], sys.argv[2:])
    sys.path[0] = str(Path(__file__).parents[1])
    from hpcfed.runtime.imports import without_collecting

    # Without triton, Python need not look through all that was imported at every exit.
    sys.modules["triton"] = None  # type: ignore[assignment]
    with without_collecting():
        for module in IMPORTED:
            import_module(module)
        del sys.modules["triton"]
    perform(serve(sys.argv[2]))
