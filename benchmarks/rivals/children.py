"""Call functions in fresh processes, and get their answers."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from typing import Any
from unittest.mock import patch

from benchmarks.rivals import mps
from hpcfed.errors import one_line


class Failed(Exception):
    """A child process could not do its work."""


def in_children(
    function: Callable[..., Any],
    arguments: Sequence[tuple[Any, ...]],
    variables: mps.Variables | None = None,
) -> list[Any]:
    """Call the function in one fresh process for each tuple of arguments; return the
    answers.

    The first that fails ends the others. `variables` are set in the environment of all.
    """
    context = multiprocessing.get_context("spawn")
    processes: list[SpawnProcess] = []
    ends: list[Any] = []
    try:
        # A process must find the variables at its start: libraries read them when they
        # are loaded.
        with patch.dict(os.environ, variables or {}):
            for own in arguments:
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=answer, args=(function, own, sender))
                process.start()
                sender.close()  # so that the end of the process is the end of the pipe
                processes.append(process)
                ends.append(receiver)
        answers: dict[Any, Any] = {}
        while len(answers) < len(ends):
            for end in connection.wait([end for end in ends if end not in answers]):
                answers[end] = receive(end)
        for process in processes:
            process.join()
        return [answers[end] for end in ends]
    finally:
        for process in processes:
            process.terminate()
            process.join()


def answer(
    function: Callable[..., Any], arguments: tuple[Any, ...], sender: Any
) -> None:
    """Send what the function returns, or its exception in one line."""
    try:
        sender.send(function(*arguments))
    except Exception as error:
        sender.send(Failed(one_line(error)))


def receive(end: Any) -> Any:
    """Return what a process has sent; raise what it failed with."""
    try:
        found = end.recv()
    except EOFError:
        raise Failed(
            "a process ended without an answer; it may have been killed"
        ) from None
    if isinstance(found, Failed):
        raise found
    return found
