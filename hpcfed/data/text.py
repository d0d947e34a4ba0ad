"""A folder of text files for language modelling, `text:DIR`. Each file is a client, or
several files are one, and every token is predicted from those before it.

Files are cut into windows of equal length. A window's last token is the first one of
the next window, so that every token except a file's first is predicted once. The last
window of a file is padded with tokens that have no next token.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from hpcfed.data import TextPlan
from hpcfed.data.array_checks import NO_TARGET
from hpcfed.data.arrays import InMemory, find
from hpcfed.data.tokeniser import (
    Bytes,
    Characters,
    Language,
    Tokeniser,
    load_tokeniser,
)
from hpcfed.errors import UserError
from hpcfed.runtime import machine

PREFIX = "text:"
UNKNOWN = 0
"""The token of characters that do not occur in training text."""
MOST_PADDING = 1024
"""Up to this many tokens, a sample may be longer than all texts."""
BYTES_PER_TOKEN = 32
"""The most host memory per token: inputs, targets, and copies of them."""


def is_text(name: str) -> bool:
    """Tell whether a data set's name refers to a folder of texts."""
    return name.startswith(PREFIX)


def find_texts(name: str, *, root: Path | None) -> Path:
    """Return the folder of `text:DIR`: as given, or else below the root."""
    return find(name, "text:novels", root=root, wanted="one with .txt files")


@dataclass(frozen=True)
class _File:
    client: str
    tokens: np.ndarray
    """Bytes, code points of characters, or tokens of the tokeniser."""
    num_train: int
    """How many of the first tokens are for training."""


@cache
def loaded(folder: Path, plan: TextPlan) -> InMemory:
    """Return the arrays of a folder: windows, next tokens, and their authors."""
    files = _read(folder, plan)
    longest = max(len(file.tokens) for file in files)
    # Short texts are padded, but padding to any length would take forever.
    if plan.length > max(longest, MOST_PADDING):
        raise UserError(
            f"--text-length {plan.length}, but the longest file of {folder} has "
            f"{longest:,} {_unit(plan)}"
        )
    language: Language = Bytes()
    if plan.tokens == "chars":
        files, language = _numbered(files)
    elif plan.tokens == "tokeniser":
        language = _tokeniser(folder, plan)
    arrays: dict[str, np.ndarray] = {"vocabulary": np.array(language.size)}
    for split in ("train", "test"):
        inputs, targets, clients = [], [], []
        for file in files:
            part = slice(0, file.num_train)
            if split == "test":
                part = slice(file.num_train, None)
            some_inputs, some_targets = windows(file.tokens[part], plan.length)
            inputs.append(some_inputs)
            targets.append(some_targets)
            clients += [file.client] * len(some_inputs)
        arrays[f"{split}_inputs"] = np.concatenate(inputs)
        arrays[f"{split}_targets"] = np.concatenate(targets)
        arrays[f"{split}_clients"] = np.array(clients, dtype=str)
    if not len(arrays["test_inputs"]):
        raise UserError(
            f"{folder}: --text-test {plan.test} leaves no text for testing; use a larger "
            "share"
        )
    return InMemory(str(folder), arrays, whole="the folder", language=language)


def windows(tokens: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut tokens into inputs and next tokens, both [windows, length]."""
    predicted = max(0, len(tokens) - 1)
    rows = -(-predicted // length)
    # Padding is token 0, like any other input: only its target says that it does not
    # count.
    inputs = np.zeros(rows * length, np.int32)
    targets = np.full(rows * length, NO_TARGET, np.int32)
    inputs[:predicted] = tokens[:predicted]
    targets[:predicted] = tokens[1 : predicted + 1]
    return inputs.reshape(rows, length), targets.reshape(rows, length)


def _read(folder: Path, plan: TextPlan) -> list[_File]:
    """Read all .txt files of a folder, by name."""
    paths = []
    for path in sorted(folder.glob("*.txt")):
        if path.is_file():
            paths.append(path)
    if not paths:
        raise UserError(f"{folder}: no .txt file there; each holds a client's text")
    size = sum(path.stat().st_size for path in paths)
    if BYTES_PER_TOKEN * size > machine.usable():
        raise UserError(
            f"{folder}: its texts have {size / 2**30:,.0f} GiB, which takes more than "
            "this machine's memory"
        )
    pattern = _pattern(plan.clients)
    files = []
    for path, tokens in zip(paths, _tokens(paths, plan), strict=True):
        if len(tokens) < 2:
            raise UserError(
                f"{path} has fewer than two {_unit(plan)}, so there is no next one to "
                "predict; remove it"
            )
        # At least two tokens are for training.
        num_train = max(2, len(tokens) - round(plan.test * len(tokens)))
        client = _client(path, plan.clients, pattern)
        files.append(_File(client, tokens, num_train))
    return files


def _unit(plan: TextPlan) -> str:
    return "tokens" if plan.tokens == "tokeniser" else plan.tokens


def _tokeniser(folder: Path, plan: TextPlan) -> Tokeniser:
    if plan.tokeniser is None:
        raise UserError(
            f"{folder}: --text-tokens tokeniser needs one; give --model hf:DIR of a "
            "folder with a tokeniser, or --tokeniser DIR"
        )
    return load_tokeniser(plan.tokeniser)


def _tokens(paths: Sequence[Path], plan: TextPlan) -> list[np.ndarray]:
    """Return the tokens of every file; characters are not numbered yet."""
    if plan.tokens == "bytes":
        found = []
        for path in paths:
            with _readable(path):
                found.append(np.frombuffer(path.read_bytes(), np.uint8))
        return found
    texts = []
    for path in paths:
        with _readable(path):
            texts.append(path.read_text(encoding="utf-8"))
    if plan.tokens == "tokeniser":
        # In one call, in which the tokeniser uses all cores.
        tokeniser = _tokeniser(paths[0].parent, plan)
        encoded = tokeniser.encode([tokeniser.as_text(text) for text in texts])
        return [np.array(tokens, np.int32) for tokens in encoded]
    # Four bytes for every character, so that the array has one number each.
    return [np.frombuffer(text.encode("utf-32-le"), np.uint32) for text in texts]


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Say in one line why a file cannot be read."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(
            f"{path} is not UTF-8; convert it, or use --text-tokens bytes"
        ) from None


def _numbered(files: list[_File]) -> tuple[list[_File], Characters]:
    """Number the characters of all training text from 1, by their code points."""
    seen = [np.unique(file.tokens[: file.num_train]) for file in files]
    known = np.unique(np.concatenate(seen))
    numbered = []
    for file in files:
        # Clipped, because a character after the last known one would be out of range.
        at = np.searchsorted(known, file.tokens).clip(max=len(known) - 1)
        tokens = np.where(known[at] == file.tokens, at + 1, UNKNOWN)
        numbered.append(_File(file.client, tokens, file.num_train))
    return numbered, Characters(known)


def _pattern(text: str) -> re.Pattern[str] | None:
    if text == "file":
        return None
    try:
        return re.compile(text)
    except re.error as error:
        raise UserError(
            f"--text-clients {text}: not a regular expression ({error}); for one "
            "client per file use --text-clients file"
        ) from None


def _client(path: Path, text: str, pattern: re.Pattern[str] | None) -> str:
    """Return the client of a file: its name, or what the pattern finds in it."""
    if pattern is None:
        return path.stem
    found = pattern.search(path.name)
    # The first group if there is one, else the whole match.
    client = found and found.group(1 if pattern.groups else 0)
    if not client:
        raise UserError(
            f"--text-clients {text} finds no client in {path.name}; it must match "
            "every file's name, and its first group is the client"
        )
    return client
