"""Several clients train concurrently, each in its own lane.

One client's batch of a large network does not fill a GPU: its last layers are small,
and normalisation waits for memory while convolutions wait for tensor cores. A lane is a
stream of the GPU with its own memory and captured steps. So the device can choose among
the steps of several clients.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch

from hpcfed.runtime import accelerator

T = TypeVar("T")
Task = Callable[[int], Iterator[None]]
"""Takes the number of its lane; yields whenever others may launch work."""
Lane = Callable[[], AbstractContextManager[object]]
"""Work that is launched inside its context goes to the lane."""


def take_turns(tasks: Sequence[Task], lanes: Sequence[Lane]) -> None:
    """Run all tasks in their order; a lane that has finished one takes the next.

    Lanes launch one piece each in turn. Launching all work of one client at once would
    fill its queue on the device, and the host would block before it serves the others.
    """
    waiting = deque(tasks)
    at_work: dict[int, Iterator[None]] = {}
    while waiting or at_work:
        for number, lane in enumerate(lanes):
            # Each piece is launched to its own stream; the device decides what runs
            # when.
            with lane():
                if number not in at_work:
                    if not waiting:
                        continue
                    at_work[number] = waiting.popleft()(number)
                if _has_ended(at_work[number]):
                    del at_work[number]


def launch_all(steps: Generator[None, None, T]) -> T:
    """Launch all pieces, one after the other; return what they end with."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


def _has_ended(steps: Iterator[None]) -> bool:
    """Launch the next piece; tell whether none was left."""
    for _ in steps:
        return False
    return True


class Lanes:
    """The lanes of a device; on a CPU tasks just take turns."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: list[Any] = []

    @contextmanager
    def open(self, count: int) -> Iterator[list[Lane]]:
        """Open lanes. They begin after all work that was launched before; work that is
        launched afterwards waits for them.
        """
        if not accelerator.is_gpu(self._device):
            yield [nullcontext] * count
            return
        while len(self._streams) < count:
            self._streams.append(accelerator.new_stream(self._device))
        streams = self._streams[:count]
        here = accelerator.current_stream(self._device)
        for stream in streams:
            stream.wait_stream(here)
        try:
            yield [accelerator.entering(stream) for stream in streams]
        finally:
            # Also after a failure: memory in use must not be reused.
            for stream in streams:
                here.wait_stream(stream)

    def settle(self) -> None:
        """Wait until the device has nothing left to do."""
        accelerator.synchronize(self._device)
