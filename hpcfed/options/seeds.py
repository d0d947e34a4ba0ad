"""Seeds as a user writes them: `0..4`, `0,3,7`, or a list in a TOML file."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

MOST_SEEDS = 256
"""The most seeds that one run advances together; each has its own thread."""

MOST_DIGITS = 100
"""The most digits of a seed that we parse: Python is slow on very long numbers."""


def read_seeds(text: Any) -> Any:
    """Parse a range or a list of seeds.

    Leave anything but a string, such as a list from a TOML file, to the field's type.
    """
    if not isinstance(text, str):
        return text
    # A range includes both ends: 0..4 has five seeds.
    is_range = ".." in text
    words = text.split(".." if is_range else ",")
    numeric = all(word.strip().isdecimal() for word in words)
    if not numeric or (is_range and len(words) != 2):
        raise ValueError("must be a range such as 0..4 or a list such as 0,3,7")
    if max(map(len, words)) > MOST_DIGITS:
        raise ValueError("must be seeds below 2^63")
    numbers = [int(word) for word in words]
    return _range(*numbers) if is_range else numbers


def _range(first: int, last: int) -> list[int]:
    if first > last:
        raise ValueError(f"must count upwards, as in {last}..{first}")
    # Do not build a huge range: `check_seeds` refuses even one seed too many.
    last = min(last, first + MOST_SEEDS)
    return list(range(first, last + 1))


def check_seeds(seeds: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Refuse an empty list, too many seeds, and a repeated seed."""
    if seeds is None:
        return None
    if not 0 < len(seeds) <= MOST_SEEDS:
        raise ValueError(f"must be 1 to {MOST_SEEDS} seeds")
    if len(set(seeds)) < len(seeds):
        raise ValueError("must name every seed once")
    return seeds


Seed = Annotated[int, Field(ge=0, lt=2**63)]
Seeds = Annotated[
    tuple[Seed, ...] | None, BeforeValidator(read_seeds), AfterValidator(check_seeds)
]


def seed_folder(folder: Path, seed: int) -> Path:
    """Return the folder of one of several seeds."""
    return folder / f"seed-{seed}"
