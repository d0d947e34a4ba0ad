"""Programs forked from a process that has loaded torch.

An import of torch takes seconds of a core, and leaves about 300 MiB that no two processes
share. So 128 ranks fit into no small machine, and starting a rank takes longer than a
test's run. Here `forked.py SOCKET WORDS` takes the place of `python WORDS`: a proxy that
has a server fork the program. The fork takes over words, folder, variables, input and
output; signals and death are passed on to it, and the proxy ends as it ends.

    python benchmarks/harness/forked.py serve SOCKET [MODULE …]    until its input ends
    mpirun -n 128 python benchmarks/harness/forked.py SOCKET -m hpcfed run …
"""

import marshal
import os
import signal
import socket
import sys

# Nothing else: hundreds of proxies start, and what the server alone needs takes longer
# to import than Python to begin.
PASSED_ON = (
    signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip
IMPORTED = ("h5py", "mpi4py", "hpcfed.cli.commands", "hpcfed.experiment.run")
"""All that a rank loads before its first round; MPI starts in the rank itself."""
LENGTH = 4
"""Bytes of a number that is sent."""


def be_proxy(path: str, words: list[str]) -> None:
    """Have a program forked, wait for its end, and end in the same way."""
    server = socket.socket(socket.AF_UNIX)
    server.connect(path)
    asked = marshal.dumps((words, os.getcwd(), dict(os.environ)))
    socket.send_fds(server, [len(asked).to_bytes(LENGTH, "big")], [0, 1, 2])
    server.sendall(asked)
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: server.sendall(bytes([number])))
    told = server.recv(LENGTH)  # nothing where the server has gone
    code = int.from_bytes(told, "big", signed=True) if told else 1
    if code < 0:
        if -code in PASSED_ON:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


class Program:
    """A fork, and the proxy that has asked for it."""

    def __init__(self, pid: int, proxy: socket.socket) -> None:
        self.pid, self.proxy = pid, proxy
        self.ended = os.pidfd_open(pid)
        """A file that is readable once the program has ended."""

    def tell_end(self) -> None:
        """Tell the proxy how the program has ended."""
        from contextlib import suppress

        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        with suppress(OSError):  # it may have been killed
            self.proxy.sendall(code.to_bytes(LENGTH, "big", signed=True))
        self.close()

    def pass_on(self) -> None:
        """Pass on the proxy's signal, or its death."""
        sent = self.proxy.recv(1) or bytes([signal.SIGKILL])
        os.kill(self.pid, sent[0])

    def close(self) -> None:
        os.close(self.ended)
        self.proxy.close()


def serve(path: str) -> list[str]:
    """Fork a program for every proxy that connects, until standard input ends. Return
    only in forks: the words of their program.
    """
    import select

    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen(1024)
    programs: list[Program] = []
    while True:
        of_programs = [file for each in programs for file in (each.ended, each.proxy)]
        ready, _, _ = select.select([0, listening, *of_programs], [], [])
        if 0 in ready:  # who started the server has gone, and would end programs
            for program in programs:
                os.kill(program.pid, signal.SIGKILL)
            os._exit(0)
        for program in list(programs):
            if program.ended in ready:
                program.tell_end()
                programs.remove(program)
            elif program.proxy in ready:
                program.pass_on()
        if listening in ready:
            proxy, _ = listening.accept()
            size, files, _, _ = socket.recv_fds(proxy, LENGTH, 3)
            asked = proxy.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
            pid = os.fork()
            if pid == 0:
                for other in programs:
                    other.close()
                listening.close()
                proxy.close()
                return _taken_over(files, *marshal.loads(asked))
            for fd in files:
                os.close(fd)
            programs.append(Program(pid, proxy))


def _taken_over(
    files: list[int], words: list[str], folder: str, variables: dict[str, str]
) -> list[str]:
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    return words


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
        sys.path[0] = os.path.dirname(words[0])
        runpy.run_path(words[0], run_name="__main__")


def perform_to_end(words: list[str]) -> None:
    """Be the program, and end as Python would, but without taking itself apart: that
    writes to all memory that is shared with the server, for half a second of a core.
    """
    import atexit
    import ctypes
    import threading
    from contextlib import suppress

    code = 0
    try:
        perform(words)
    except SystemExit as ending:
        code = _code_of(ending)
    except KeyboardInterrupt:
        raise  # by which Python ends itself with a signal
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    # What libraries have printed.
    ctypes.CDLL(None).fflush(None)
    os._exit(code)


def _code_of(ending: SystemExit) -> int:
    """Return the exit code; a text is printed, as Python does."""
    if ending.code is None:
        return 0
    if isinstance(ending.code, int):
        return ending.code & 0xFF
    print(ending.code, file=sys.stderr)
    return 1


if __name__ == "__main__":
    if sys.argv[1] != "serve":
        be_proxy(sys.argv[1], sys.argv[2:])
    from importlib import import_module
    from pathlib import Path

    sys.path[0] = str(Path(__file__).parents[2])
    from hpcfed.runtime import environment
    from hpcfed.runtime.imports import without_collecting

    # Without triton, Python need not look through all that was imported at every exit.
    sys.modules["triton"] = None  # type: ignore[assignment]
    with without_collecting():
        for module in (*IMPORTED, *sys.argv[3:]):
            import_module(module)
        del sys.modules["triton"]
        # Every run records it.
        environment.own_source()
    perform_to_end(serve(sys.argv[2]))
