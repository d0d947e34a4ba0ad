"""Texts with responses that are learnt, as rows of tokens: cut to a length, and perhaps
several texts in a row.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hpcfed.data import TextPlan
from hpcfed.data.array_checks import NO_TARGET
from hpcfed.data.arrays import InMemory, held_out
from hpcfed.data.tokeniser import Tokeniser
from hpcfed.errors import UserError
from hpcfed.runtime import machine

BYTES_PER_TOKEN = 32
"""The most host memory per token: inputs, targets, and copies of them."""
PROMPTS = "test_prompts"
"""The array that says how many tokens of a test sample are its prompt."""


class Piece(NamedTuple):
    """A part of a text."""

    text: str
    is_response: bool


@dataclass(frozen=True)
class Lesson:
    """One text."""

    pieces: Sequence[Piece]
    client: str
    """Empty if no client is named."""
    split: str
    """`train` or `test`; empty if the file does not say."""
    framed: bool
    """Whether the tokeniser's tokens for begin and end are put around it."""


class _Tokens(NamedTuple):
    """The tokens of a text, and which are predicted: -100 where none is."""

    inputs: np.ndarray
    targets: np.ndarray
    prompt: int
    """How many come before the first response."""


class Lessons:
    """Collects texts, and counts what happens to them."""

    def __init__(self, where: str, plan: TextPlan, tokeniser: Tokeniser) -> None:
        self._where = where
        self._plan = plan
        self._tokeniser = tokeniser
        self._begin, self._end = tokeniser.begin, tokeniser.end
        self._taken: list[_Tokens] = []
        self._clients: list[str] = []
        self._splits: list[str] = []
        self._cut = self._crowded = self._endless = 0

    def add(self, lessons: Sequence[Lesson]) -> None:
        """Add texts; leave out those of which nothing to learn is left."""
        texts = [piece.text for lesson in lessons for piece in lesson.pieces]
        # All in one call, in which the tokeniser uses all cores.
        encoded = iter(self._tokeniser.encode(texts))
        for lesson in lessons:
            tokens = self._tokens(lesson, [next(encoded) for _ in lesson.pieces])
            if tokens is None:
                self._crowded += 1
                continue
            self._taken.append(tokens)
            self._clients.append(lesson.client)
            self._splits.append(lesson.split)
        if not self._taken:
            raise UserError(
                f"{self._where}: no prompt leaves anything of its response within "
                f"--text-length {self._plan.length}; give a larger one"
            )

    def _tokens(
        self, lesson: Lesson, encoded: Sequence[Sequence[int]]
    ) -> _Tokens | None:
        """Return the tokens of a text, cut; None if nothing to learn is left."""
        tokens: list[int] = []
        learnt: list[bool] = []
        if lesson.framed and self._begin is not None:
            tokens, learnt = [self._begin], [False]
        for piece, some in zip(lesson.pieces, encoded, strict=True):
            tokens += some
            learnt += [piece.is_response] * len(some)
        prompt = learnt.index(True) if True in learnt else len(learnt)
        if lesson.framed and self._end is not None:
            tokens.append(self._end)
            learnt.append(True)
        self._endless += lesson.framed and self._end is None
        if self._plan.loss == "all":
            learnt = [True] * len(learnt)
        length = self._plan.length
        # Each token's target is the next one, which the last does not have.
        following = np.array([*tokens[1:], NO_TARGET], np.int32)
        targets = np.where([*learnt[1:], False], following, NO_TARGET)[:length]
        if (targets == NO_TARGET).all():
            return None
        # One more than fits is no cut: the last token is only predicted.
        self._cut += len(tokens) > length + 1
        inputs = np.array(tokens[:length], np.int32)
        return _Tokens(inputs, targets, min(prompt, length))

    def source(self, notes: Iterable[str]) -> InMemory:
        """Return the arrays of all texts. Notes say what happened before."""
        clients = np.array(self._clients)
        is_test = self._for_testing(clients)
        train, test = np.flatnonzero(~is_test), np.flatnonzero(is_test)
        packs = {"train": _alone(train), "test": _alone(test)}
        if self._plan.pack:
            packs["train"] = self._packed(train, clients)
        rows = [*packs["train"], *packs["test"]]
        # Shorter rows cost less, and padding would change no figure.
        length = max(map(self._size, rows))
        self._check_memory(len(rows), length)
        arrays: dict[str, np.ndarray] = {"vocabulary": np.array(self._tokeniser.size)}
        for split, some in packs.items():
            inputs, targets = self._rows(some, length)
            arrays |= {f"{split}_inputs": inputs, f"{split}_targets": targets}
            if any(self._clients):
                arrays[f"{split}_clients"] = clients[[pack[0] for pack in some]]
        arrays[PROMPTS] = np.array([self._taken[at].prompt for at in test.tolist()])
        told = (*notes, *self._notes(packs["train"], len(train), len(test), length))
        apart = self._plan.pack and self._plan.apart
        return InMemory(self._where, arrays, "the file", told, self._tokeniser, apart)

    def _size(self, pack: Sequence[int]) -> int:
        """Return how many tokens the texts of a row have."""
        return sum(len(self._taken[at].inputs) for at in pack)

    def _for_testing(self, clients: np.ndarray) -> np.ndarray:
        """Tell which texts are for testing: as the file says, or every tenth of each
        client.
        """
        is_test = np.array(self._splits) == "test"
        if not any(self._splits):
            is_test = held_out(np.unique(clients, return_inverse=True)[1])
        for wanted, there in (("training", ~is_test), ("testing", is_test)):
            if not there.any():
                raise UserError(f"{self._where}: no sample is left for {wanted}")
        return is_test

    def _packed(self, texts: np.ndarray, clients: np.ndarray) -> list[list[int]]:
        """Put texts of a client into one row as long as they fit."""
        of_client = defaultdict(list)
        for at in texts.tolist():
            of_client[clients[at]].append(at)
        found = []
        for own in of_client.values():
            sizes = [self._size([at]) for at in own]
            for pack in packed(sizes, self._plan.length):
                found.append([own[at] for at in pack])
        return found

    def _rows(
        self, packs: Sequence[Sequence[int]], length: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and targets [rows, length]; the end of a row is padded."""
        inputs = np.zeros((len(packs), length), np.int32)
        targets = np.full((len(packs), length), NO_TARGET, np.int32)
        for row, pack in enumerate(packs):
            start = 0
            for at in pack:
                tokens = self._taken[at]
                end = start + len(tokens.inputs)
                inputs[row, start:end] = tokens.inputs
                if start and self._plan.apart:
                    inputs[row, start] = ~inputs[row, start]
                targets[row, start:end] = tokens.targets
                start = end
        return inputs, targets

    def _check_memory(self, rows: int, length: int) -> None:
        needed = BYTES_PER_TOKEN * rows * length
        if needed > machine.usable():
            raise UserError(
                f"{self._where}: {rows:,} samples of {length} tokens take "
                f"{needed / 2**30:,.0f} GiB, more than this machine's memory; use a "
                "smaller --text-length, or --text-pack"
            )

    def _notes(
        self, packs: Sequence[Sequence[int]], train: int, test: int, length: int
    ) -> Iterator[str]:
        """Say what was cut, left out and packed."""
        samples = len(self._taken)
        every = samples + self._crowded
        if self._crowded:
            yield (
                f"{self._crowded:,} of {every:,} samples left out: nothing of the "
                f"response is left within {self._plan.length} tokens"
            )
        if self._cut:
            yield (
                f"{self._cut:,} of {samples:,} samples cut at {self._plan.length} "
                "tokens; --text-length takes more"
            )
        if self._endless:
            yield "the tokeniser has no end token: responses do not learn where to end"
        tokens = self._size(range(samples))
        learnt = sum(int((one.targets != NO_TARGET).sum()) for one in self._taken)
        yield (
            f"{train:,} samples for training and {test:,} for testing; "
            f"{learnt:,} of {tokens:,} tokens are learnt (--text-loss {self._plan.loss})"
        )
        full = sum(map(self._size, packs)) / (len(packs) * length)
        if self._plan.pack:
            sees = "no sample sees another"
            if not self._plan.apart:
                sees = "a sample sees those before it in its row"
            yield (
                f"{train:,} samples packed into {len(packs):,} of {length} tokens, "
                f"{full:.0%} full; {sees}"
            )
        elif full < 1:
            yield (
                f"{1 - full:.0%} of the training samples' {length} positions are padding; "
                "steps leave out what none of their samples needs (--text-lengths), and "
                "--text-pack fills rows with several samples"
            )


def _alone(texts: np.ndarray) -> list[list[int]]:
    """Return rows of one text each."""
    return [[at] for at in texts.tolist()]


def packed(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Distribute items over bins, largest first, each to the fullest bin that has room;
    return the items of every bin. No size exceeds the capacity.
    """
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []
    """What is left in every bin, ascending."""
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        at = bisect_left(room, (sizes[item], 0))
        if at == len(room):
            left, number = capacity, len(bins)
            bins.append([])
        else:
            left, number = room.pop(at)
        bins[number].append(item)
        insort(room, (left - sizes[item], number))
    return bins
