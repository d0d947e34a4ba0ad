"""Ranks that share their memory: processes forked from one that has loaded torch.

An import of torch leaves about 300 MiB that no two processes share, and takes seconds of
a core. So 128 ranks fit into no small machine. Here the launcher starts small proxies;
each has a server fork a rank that takes over its words, its variables and its output,
passes signals on to it, and ends with its exit code. For tests of the harness alone.

    python -m benchmarks.harness.forked serve SOCKET
    mpirun -n 128 python -m benchmarks.harness.forked SOCKET run --simulate-training 20ms …
"""

import json
import os
import signal
import socket
import struct
import sys
import traceback
from types import FrameType

HEADER = struct.Struct("!I")
"""A length, a process's number, or an exit code."""


def serve(path: str) -> None:
    """Fork a rank for every proxy that connects."""
    # All that a rank loads before its first round; MPI starts in the rank itself.
    import h5py  # noqa: F401
    import mpi4py  # noqa: F401

    import hpcfed.cli.commands
    import hpcfed.experiment.run  # noqa: F401

    # The kernel removes ended children; this process does not wait for them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen(1024)
    while True:
        connection, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            _become_rank(connection)
        connection.close()


def _become_rank(connection: socket.socket) -> None:
    """Run hpcfed in place of the proxy at the other end; never return."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, fds, _, _ = socket.recv_fds(connection, HEADER.size, 2)
    (length,) = HEADER.unpack(head)
    content = b""
    while len(content) < length:
        content += connection.recv(length - len(content))
    asked = json.loads(content)
    for target, fd in zip((1, 2), fds, strict=True):
        os.dup2(fd, target)
        os.close(fd)
    # Python's own streams remember the files that these were.
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    sys.argv = ["hpcfed", *asked["words"]]
    connection.sendall(HEADER.pack(os.getpid()))
    from hpcfed.cli.commands import main

    code = 0
    try:
        main()
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    connection.sendall(HEADER.pack(code))
    # The proxy waits for the end of the process, by which MPI has been left: from here
    # on nothing else closes the connection.
    connection.detach()
    sys.exit(code)


def be_proxy(path: str, words: list[str]) -> int:
    """Have a rank forked, and wait for its end; return its exit code."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    asked = {"words": words, "environment": dict(os.environ), "folder": os.getcwd()}
    content = json.dumps(asked).encode()
    socket.send_fds(connection, [HEADER.pack(len(content))], [1, 2])
    connection.sendall(content)
    pid = _number(connection)
    assert pid is not None, "the server has gone"

    def pass_on(number: int, frame: FrameType | None) -> None:
        os.kill(pid, number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, pass_on)
    code = _number(connection)
    while code is not None and connection.recv(1):
        pass
    return 1 if code is None else code


def _number(connection: socket.socket) -> int | None:
    """Receive a number; None where the other end has gone."""
    head = b""
    while len(head) < HEADER.size:
        more = connection.recv(HEADER.size - len(head))
        if not more:
            return None
        head += more
    found: int = HEADER.unpack(head)[0]
    return found


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        sys.exit(be_proxy(sys.argv[1], sys.argv[2:]))
