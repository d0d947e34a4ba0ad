"""The work that hpcfed and other simulators do on a CPU, and how they take turns.

Imports neither torch nor JAX: each simulator may live in an environment of its own.
"""

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

CLASSES, SEED = 10, 0
LR, MOMENTUM, WEIGHT_DECAY = 0.02, 0.5, 5e-4
"""SGD's constants, the same for all."""


@dataclass(frozen=True)
class Work:
    """One piece of work: all clients train one epoch in every round."""

    model: str
    shape: tuple[int, int, int]
    """Channels, height and width of an image."""
    clients: int
    images: int
    """Images of each client."""
    batch: int

    @property
    def samples(self) -> int:
        """Samples that a round trains on."""
        return self.clients * self.images

    def __str__(self) -> str:
        sizes = f"{self.clients} clients × {self.images} images"
        return f"{self.model}, {sizes}, batch {self.batch}"


WORKS = {
    "cnn-digits": Work("cnn-digits", (1, 8, 8), clients=20, images=72, batch=16),
    "cnn-cifar": Work("cnn-cifar", (3, 32, 32), clients=10, images=100, batch=50),
    "cnn-pfl": Work("cnn-pfl", (3, 32, 32), clients=10, images=50, batch=10),
}


def data_of(work: Work) -> tuple[np.ndarray, np.ndarray]:
    """Return images [clients, images, *shape] and labels [clients, images]."""
    random = np.random.default_rng(SEED)
    sizes = (work.clients, work.images)
    images = random.standard_normal((*sizes, *work.shape), dtype=np.float32)
    return images, random.integers(CLASSES, size=sizes)


class Turns:
    """Does a round whenever benchmarks/rivals/cpu asks for one, and answers its seconds.

    Others wait meanwhile, so that all simulators share good and bad minutes of the
    machine.
    """

    def __init__(self) -> None:
        self._begin = 0.0
        # What a simulator prints goes to stderr: stdout is for answers.
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def begin(self) -> bool:
        """Wait for the next round; return whether there is one."""
        asked = bool(sys.stdin.readline())
        self._begin = time.monotonic()
        return asked

    def end(self) -> None:
        """Answer how long the round took."""
        self.tell(seconds=time.monotonic() - self._begin)

    def tell(self, **values: Any) -> None:
        print(json.dumps(values), file=self._answers, flush=True)


@dataclass(frozen=True)
class Part:
    """What one process of a simulator is to do."""

    work: Work
    rounds: int
    processes: int
    """Processes or workers that share the clients."""
    threads: int
    """Threads of each."""
    rank: int


def part_of(words: list[str]) -> Part:
    """Read what benchmarks/rivals/cpu passes to a simulator's program."""
    parser = argparse.ArgumentParser(description="Started by benchmarks/rivals/cpu.")
    parser.add_argument("work", choices=WORKS)
    for name in ("rounds", "processes", "threads", "rank"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = vars(parser.parse_args(words))
    return Part(WORKS[options.pop("work")], **options)
