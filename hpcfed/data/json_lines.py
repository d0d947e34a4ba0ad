"""JSON lines for instruction tuning, `PATH.jsonl`: every line is an object with a prompt
and a response, or with the messages of a chat; it may name a client and a split.

Tokens of the prompt are inputs alone. Those of the response, and the token that ends it,
are also predicted. `--dataset-options` names the fields: prompt (or a text with
{fields} in it), response, messages, client and split.

What a field holds is text. If it contains a control token of the tokeniser, such as
</s>, that is read letter by letter. Only chat templates and the text of
`--dataset-options` write such tokens.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from hpcfed import plugins
from hpcfed.data import TextPlan
from hpcfed.data.arrays import InMemory, find, read_text
from hpcfed.data.lessons import Lesson, Lessons, Piece
from hpcfed.data.table import USUAL
from hpcfed.data.tokeniser import CUT, TODAY, Tokeniser, Turn, load_tokeniser
from hpcfed.errors import UserError, count, did_you_mean

ENDING = ".jsonl"
FIELDS: dict[str, tuple[str, ...]] = {
    "prompt": ("prompt", "question", "instruction"),
    "response": ("response", "completion", "answer", "output"),
    "messages": ("messages",),
    "client": USUAL["client"],
    "split": USUAL["split"],
}
"""Usual names of fields, by their role."""
TEMPLATE = re.compile(r"\{([^{}]+)\}")
"""A field's name in the text of a prompt."""
LONGEST_NAME = 200
"""The most letters of a client's name."""
MORE = "input"
"""A field that follows an `instruction`, as in Alpaca's files."""
SPLITS = ("train", "test")
BYTES_PER_BYTE = 30
"""The most host memory per byte of the file while it is read."""


def is_lines(name: str) -> bool:
    """Tell whether a data set's name refers to JSON lines."""
    return name.lower().endswith(ENDING)


def find_lines(name: str, *, root: Path | None) -> Path:
    """Return the file of `PATH.jsonl`, perhaps after `file:`, as given or below the
    root.
    """
    wanted = "the path of a file with an object in each line"
    return find(name, f"file:chats{ENDING}", root=root, wanted=wanted)


# Few: a file that is written again and again must not stay in memory as often.
@lru_cache(maxsize=4)
def loaded(
    path: Path, options: str, plan: TextPlan, version: tuple[int, ...] = ()
) -> InMemory:
    """Return the arrays of a file; `options` is JSON with the names of its fields, and
    another `version` reads the file again.
    """
    lines = _read(path)
    names = _names(path, lines, json.loads(options))
    if plan.tokeniser is None:
        raise UserError(
            f"{path} needs a tokeniser; give --model hf:DIR of a folder with one, or "
            "--tokeniser DIR"
        )
    tokeniser = load_tokeniser(plan.tokeniser)
    writer = _Writer(path, names, tokeniser)
    written = [lesson for lesson in map(writer.lesson, lines) if lesson is not None]
    if not written:
        raise UserError(
            f"{path}: every response is empty, so there is nothing to learn"
        )
    lessons = Lessons(str(path), plan, tokeniser)
    lessons.add(written)
    return lessons.source(writer.notes(len(lines)))


@dataclass(frozen=True)
class _Line:
    number: int
    """Counted from 1, as editors do."""
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class _Names:
    """Which field has which role."""

    prompt: tuple[str, ...]
    """Fields that make up the prompt, one below the other."""
    template: str
    """The prompt as a text with {fields} in it, if it is given so."""
    response: str
    messages: str
    client: str
    """Empty if no line names a client."""
    split: str
    """Empty if no line names a split."""


def _read(path: Path) -> list[_Line]:
    text = read_text(path, memory=BYTES_PER_BYTE)
    lines = []
    # Not splitlines: JSON may hold other characters that it takes for line ends.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            lines.append(_Line(number, _parsed(path, number, line)))
    if not lines:
        raise UserError(f"{path} is empty; give an object in each line")
    return lines


def _parsed(path: Path, number: int, line: str) -> Mapping[str, Any]:
    try:
        found = json.loads(line)
    # RecursionError: thousands of brackets, which a damaged file may hold.
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: line {number} is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise UserError(
            f"{path}: line {number} is not an object such as "
            '{"prompt": "…", "response": "…"}'
        )
    return found


def _names(path: Path, lines: Sequence[_Line], options: Mapping[str, Any]) -> _Names:
    """Return the names of the fields: as chosen, or the usual ones."""
    for word in options:
        if word not in FIELDS:
            raise UserError(
                f"{path}: --dataset-options has no {word}{did_you_mean(word, FIELDS)}"
            )
    there = {name for line in lines for name in line.fields}
    chosen = {role: str(name) for role, name in options.items()}
    template = ""
    if "{" in chosen.get("prompt", ""):
        template = chosen.pop("prompt")
    used = {*chosen.values(), *TEMPLATE.findall(template)}
    found = {}
    for role in FIELDS:
        # What a field is chosen for it is not guessed to be something else, too.
        free = there if role in chosen else there - used
        found[role] = _name(path, role, chosen, free)
        used.add(found[role])
    prompt = [found["prompt"] or "prompt"]
    if prompt == ["instruction"] and "prompt" not in options:
        prompt.append(MORE)
    return _Names(
        prompt=tuple(prompt),
        template=template,
        response=found["response"] or "response",
        messages=found["messages"],
        client=found["client"],
        split=found["split"],
    )


def _name(
    path: Path, role: str, chosen: Mapping[str, str], there: Collection[str]
) -> str:
    """Return the name of a field; empty if no line has one of the usual names."""
    if role not in chosen:
        return next((name for name in FIELDS[role] if name in there), "")
    name = chosen[role]
    if name not in there:
        raise UserError(
            f"{path}: no line has a field {name}{did_you_mean(name, there)}"
        )
    return name


def _sound(text: str) -> str:
    """Replace halves of letters, which JSON may hold but no tokeniser takes."""
    return text.encode("utf-8", "replace").decode()


class _Writer:
    """Writes each line as one text, in pieces that are learnt or not."""

    def __init__(self, path: Path, names: _Names, tokeniser: Tokeniser) -> None:
        self._path = path
        self._names = names
        self._tokeniser = tokeniser
        self._empty = self._rewritten = self._plain = self._steering = 0
        self._by_template = 0

    def lesson(self, line: _Line) -> Lesson | None:
        """Return the text of a line; None if its response is empty."""
        names = self._names
        chat = names.messages in line.fields
        pieces = self._of_chat(line) if chat else self._of_pair(line)
        if not any(text.strip() for text, is_response in pieces if is_response):
            self._empty += 1
            return None
        # A template writes these tokens itself.
        framed = not (chat and self._tokeniser.has_template)
        self._plain += chat and framed
        self._steering += any(CUT in text for text, _ in pieces)
        client = self._text(line, names.client) if names.client else ""
        if names.client and not 1 <= len(client) <= LONGEST_NAME:
            raise UserError(
                f"{self._path}: line {line.number}: {names.client} has {len(client):,} "
                f"letters; a client's name has 1 to {LONGEST_NAME}"
            )
        split = self._split(line) if names.split else ""
        return Lesson(pieces, client=client, split=split, framed=framed)

    def notes(self, lines: int) -> Iterable[str]:
        """Say what was left out or chosen."""
        if self._empty:
            yield (
                f"{self._empty:,} of {lines:,} samples left out: their response is empty"
            )
        if self._plain:
            yield (
                f"{count(self._plain, 'chat')} written as 'user: …' and 'assistant: …': "
                "the tokeniser has no chat template"
            )
        if self._rewritten:
            yield (
                f"{count(self._rewritten, 'chat')} learnt from the last response on: "
                "the chat template rewrites earlier ones"
            )

        if self._steering:
            yield (
                f"{count(self._steering, 'sample')} with the letters of a control token, "
                "such as </s>, in a field: they are read as text"
            )
        if self._by_template and self._tokeniser.asks_for_date:
            yield (
                "the chat template asks for today's date: it gets "
                f"{TODAY:%d %B %Y} in every run"
            )

    def _of_pair(self, line: _Line) -> list[Piece]:
        """Return prompt and response, on lines of their own."""
        prompt = self._prompt(line)
        response = self._written(line, self._names.response)
        # A word at the end of the prompt must not grow together with the response.
        apart = not prompt or prompt[-1:].isspace() or response[:1].isspace()
        return [Piece(prompt if apart else f"{prompt}\n", False), Piece(response, True)]

    def _prompt(self, line: _Line) -> str:
        names = self._names
        if names.template:
            return TEMPLATE.sub(
                lambda found: self._written(line, found[1]), names.template
            )
        first, *others = names.prompt
        parts = [self._written(line, first)]
        parts += [self._written(line, name) for name in others if name in line.fields]
        return "\n".join(filter(None, parts))

    def _of_chat(self, line: _Line) -> list[Piece]:
        messages = self._messages(line)
        if not self._tokeniser.has_template:
            return _plainly(messages)
        self._by_template += 1
        where = f"{self._path}: line {line.number}: the chat template fails"
        with plugins.one_line_of(where):
            pieces, rewritten = _by_template(messages, self._tokeniser)
        self._rewritten += rewritten
        return pieces

    def _messages(self, line: _Line) -> list[Turn]:
        """Return the turns of a chat up to its last response."""
        messages = line.fields[self._names.messages]
        where = f"{self._path}: line {line.number}: {self._names.messages}"
        if not isinstance(messages, list):
            raise UserError(f"{where} is not a list of messages")
        turns: list[Turn] = []
        last = 0
        for number, message in enumerate(messages, start=1):
            turn = self._turn(message)
            if turn is None:
                raise UserError(
                    f'{where}: message {number} is not {{"role": "…", "content": "…"}}'
                )
            turns.append(turn)
            if turn["role"] == "assistant" and turn["content"].strip():
                last = number
        return turns[:last]

    def _split(self, line: _Line) -> str:
        split = self._text(line, self._names.split).lower()
        if split not in SPLITS:
            raise UserError(
                f"{self._path}: line {line.number}: {self._names.split} must be train or "
                f"test, not {split}"
            )
        return split

    def _text(self, line: _Line, name: str) -> str:
        """Return a field that every line must have."""
        where = f"{self._path}: line {line.number}"
        if name not in line.fields:
            guess = did_you_mean(name, line.fields)
            raise UserError(f"{where} has no {name}{guess}")
        value = line.fields[name]
        # Clients may be numbered.
        if isinstance(value, int) and name == self._names.client:
            return str(value)
        if not isinstance(value, str):
            raise UserError(f"{where}: {name} is not a text")
        return _sound(value)

    def _written(self, line: _Line, name: str) -> str:
        """Return a field that is learnt or prompts."""
        return self._tokeniser.as_text(self._text(line, name))

    def _turn(self, message: Any) -> Turn | None:
        """Return who says what in a message; None if it is not one."""
        if not isinstance(message, dict):
            return None
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            return None
        as_text = self._tokeniser.as_text
        return {"role": as_text(_sound(role)), "content": as_text(_sound(content))}


def _plainly(messages: Sequence[Turn]) -> list[Piece]:
    """Return a chat with each speaker's name before what it says."""
    pieces: list[Piece] = []
    for message in messages:
        role, content = message["role"], message["content"]
        if pieces:
            pieces.append(Piece("\n", False))
        pieces.append(Piece(f"{role}: ", False))
        pieces.append(Piece(content, role == "assistant"))
    return pieces


def _by_template(
    messages: Sequence[Turn], tokeniser: Tokeniser
) -> tuple[list[Piece], bool]:
    """Return a chat as the template writes it, and whether it rewrites earlier turns as
    the chat goes on: then only the last response is learnt.
    """
    pieces: list[Piece] = []
    done, rewritten = "", False
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        # What the network is asked with is what it will be asked with after training.
        prompt = tokeniser.chat(messages[:number], prompts=True)
        whole = tokeniser.chat(messages[: number + 1], prompts=False)
        if not whole.startswith(prompt):
            raise UserError(
                f"the chat template of {tokeniser.folder} does not begin a response as "
                "it asks for one, so responses cannot be told from prompts; give prompt "
                "and response instead of messages"
            )
        if not prompt.startswith(done):
            pieces, done, rewritten = [], "", True
        pieces.append(Piece(prompt.removeprefix(done), False))
        pieces.append(Piece(whole.removeprefix(prompt), True))
        done = whole
    return pieces, rewritten
