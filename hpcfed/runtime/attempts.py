"""Work that may fail or hang: either becomes an answer, and the process goes on."""

from collections.abc import Callable
from dataclasses import dataclass
from threading import Thread
from typing import TypeVar

import torch

from hpcfed.errors import one_line
from hpcfed.runtime import accelerator

T = TypeVar("T")


@dataclass(frozen=True)
class NoAnswer:
    """Why a piece of work has no result."""

    reason: str
    hangs: bool = False
    """Whether it still runs, in a thread that nobody can end."""


def attempt(
    work: Callable[[], T], seconds: float, device: torch.device | None = None
) -> T | NoAnswer:
    """Do the work in a thread, and return its result; or why there is none after so many
    seconds. The device becomes the thread's current one.
    """
    found: list[T | NoAnswer] = []

    def working() -> None:
        try:
            # A GPU is the current one of a thread, not of the process.
            if device is not None and accelerator.is_gpu(device):
                accelerator.use(device)
            found.append(work())
        except BaseException as error:
            # Libraries may also exit: the process must not, before it has reported.
            found.append(NoAnswer(one_line(error)))

    thread = Thread(target=working, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else NoAnswer(f"no answer within {seconds:g} s", True)
