"""What turns texts into tokens and back: bytes, characters, or the tokeniser that
Hugging Face's `transformers` has saved to a folder.

Nothing is downloaded, and no code of the folder is run.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hpcfed import plugins
from hpcfed.errors import UserError

VOCABULARIES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken"),
    *("spiece.model", "sentencepiece.bpe.model"),
)
"""Files of which a tokeniser's folder has at least one."""

CUT = "\ufdd0"
"""Cuts a text where tokens must not grow together. Unicode promises that no text has this
character.
"""
TODAY = datetime(2024, 7, 26)
"""What chat templates write as today's date: a run's tokens must not depend on the day.
It is the date that Llama's template falls back to.
"""
ASKS_FOR_DATE = re.compile(r"strftime_now\s*\(\s*(['\"])(?P<format>[^'\"]*)\1\s*\)")
"""How a chat template asks for it."""
MENTIONS_DATE = re.compile(r"strftime_now(?!\s+is\s+(not\s+)?defined)")
"""Any other use of today's date."""

Turn = Mapping[str, str]
"""A turn of a chat: its role and its content."""


class Language(Protocol):
    """What tokens mean."""

    @property
    def size(self) -> int:
        """Number of different tokens."""

    @property
    def end(self) -> int | None:
        """The token that ends a text, if there is one."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return tokens as text; leave out those that the language does not know."""


@dataclass(frozen=True)
class Bytes:
    """Each byte is a token."""

    size: int = 256
    end: int | None = None

    def decode(self, tokens: Sequence[int]) -> str:
        known = bytes(token for token in tokens if token < self.size)
        return known.decode("utf-8", "replace")


@dataclass(frozen=True)
class Characters:
    """Each character is a token: token k + 1 is the k-th of these code points, and
    token 0 any other.
    """

    known: np.ndarray
    end: int | None = None

    @property
    def size(self) -> int:
        return len(self.known) + 1

    def decode(self, tokens: Sequence[int]) -> str:
        places = [token - 1 for token in tokens if 0 < token <= len(self.known)]
        return "".join(chr(self.known[place]) for place in places)


@dataclass(frozen=True)
class Tokeniser:
    """The tokeniser of a folder."""

    folder: Path
    made: Any
    """The object of transformers."""

    @property
    def size(self) -> int:
        return len(self.made)

    @property
    def begin(self) -> int | None:
        """The token that it puts before a text, if it puts one there."""
        with self._one_line():
            first = self.made("a")["input_ids"][:1]
        begin: int | None = self.made.bos_token_id
        return begin if first == [begin] else None

    @property
    def end(self) -> int | None:
        token: int | None = self.made.eos_token_id
        return token

    @property
    def has_template(self) -> bool:
        """Whether it knows how a chat is written."""
        return bool(self.made.chat_template)

    @property
    def asks_for_date(self) -> bool:
        """Whether its chat template asks for today's date."""
        return bool(ASKS_FOR_DATE.search(self.made.get_chat_template()))

    @cached_property
    def _template(self) -> str:
        """The chat template, with the same date on every day."""
        template = ASKS_FOR_DATE.sub(
            lambda found: repr(TODAY.strftime(found["format"])),
            self.made.get_chat_template(),
        )
        if MENTIONS_DATE.search(template):
            raise UserError(
                f"the chat template of {self.folder} computes today's date, so that runs "
                "of different days would differ; write a date into the template"
            )
        return template

    @cached_property
    def _control(self) -> re.Pattern[str] | None:
        """Find tokens that steer a network, such as </s>, after their first letter."""
        names = set(self.made.all_special_tokens)
        for token in getattr(self.made, "added_tokens_decoder", {}).values():
            if token.special:
                names.add(str(token))
        # The longest first, because one may begin like another.
        long_ones = sorted((name for name in names if len(name) > 1), key=len)
        if not long_ones:
            return None
        return re.compile("|".join(map(re.escape, reversed(long_ones))))

    def as_text(self, text: str) -> str:
        """Return what somebody wrote, cut so that no part becomes a control token: a
        text must not be able to end itself, or to speak in another's name.
        """
        text = text.replace(CUT, "\ufffd")
        if self._control is None:
            return text
        return self._control.sub(
            lambda found: f"{found[0][0]}{CUT}{found[0][1:]}", text
        )

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of every text, without any before or after it."""
        parts = [text.split(CUT) for text in texts]
        flat = [part for some in parts for part in some]
        if not flat:
            return []
        with self._one_line():
            # In one call, in which it uses all cores.
            encoded = iter(self.made(flat, add_special_tokens=False)["input_ids"])
        found = []
        for some in parts:
            found.append([token for _ in some for token in next(encoded)])
        return found

    def _one_line(self) -> AbstractContextManager[None]:
        return plugins.one_line_of(f"the tokeniser of {self.folder} fails")

    def decode(self, tokens: Sequence[int]) -> str:
        known = [token for token in tokens if token < self.size]
        return str(self.made.decode(known, skip_special_tokens=True))

    def chat(self, messages: Sequence[Turn], *, prompts: bool) -> str:
        """Return a chat as the folder's template writes it; if it `prompts`, up to
        where the next answer begins.
        """
        return str(
            self.made.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=prompts,
                chat_template=self._template,
            )
        )


def has_tokeniser(folder: Path) -> bool:
    """Tell whether a folder holds a tokeniser."""
    return any(found for name in VOCABULARIES for found in folder.glob(name))


@cache
def load_tokeniser(folder: Path) -> Tokeniser:
    """Return the tokeniser of a folder."""
    # Without these files, transformers would make up a tokeniser that knows nothing.
    if not has_tokeniser(folder):
        raise UserError(
            f"{folder} has no tokeniser (tokenizer.json); save it there by "
            "save_pretrained, or name its folder by --tokeniser"
        )
    try:
        import transformers
    except ImportError:
        raise UserError(
            f"the tokeniser of {folder} needs transformers: pip install 'hpcfed[hf]'"
        ) from None
    # It would warn of texts that are longer than the network takes: they are cut later.
    transformers.utils.logging.set_verbosity_error()
    with plugins.one_line_of(f"the tokeniser of {folder} cannot be loaded"):
        made = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    return Tokeniser(folder, made)
