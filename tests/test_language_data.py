"""Prompts and responses, chats and texts in the tokens of a model's own folder, and what
a model says at the end of a run.
"""

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hpcfed import cli
from hpcfed.clients.engine import Engine
from hpcfed.data import Reading, TextPlan, brought, json_lines
from hpcfed.data.arrays import InMemory, held_out
from hpcfed.data.lessons import PROMPTS, packed
from hpcfed.data.text import loaded as loaded_texts
from hpcfed.data.tokeniser import Bytes, Characters, load_tokeniser
from hpcfed.errors import UserError
from hpcfed.experiment.generation import MOST_TOKENS, continued
from hpcfed.experiment.run import run
from hpcfed.models.layout import Layout
from hpcfed.models.own import Sample
from hpcfed.results.stored import is_silent
from hpcfed.runtime.timer import Timer
from tests.conftest import Finished
from tests.runs import assert_same_run, flags, mistake, recorded, same, started
from tests.stopped_run import StopAfter

transformers = pytest.importorskip("transformers", reason="pip install 'hpcfed[hf]'")
tokenizers = pytest.importorskip("tokenizers")

WORDS = ["<unk>", "<s>", "</s>", "user", "assistant", ":", *"abcdefgh"]
UNKNOWN, BEGIN, END, USER, ASSISTANT, COLON, A, B, C, D, E, F, G, H = range(14)
NONE = -100
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} </s> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def save_tokeniser(folder: Path, *, begins: bool = False, **keywords: Any) -> Path:
    """Save a tokeniser whose tokens are the words above, and a network's config."""
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(
            {word: at for at, word in enumerate(WORDS)}, unk_token="<unk>"
        )
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    if begins:
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BEGIN)]
        )
    keywords = {"bos_token": "<s>", "eos_token": "</s>", **keywords}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", **keywords
    ).save_pretrained(folder)
    return save_network(folder)


def save_network(folder: Path) -> Path:
    """Save the config of a small GPT-2, which then starts from random weights."""
    transformers.GPT2Config(
        vocab_size=16, n_embd=8, n_layer=1, n_head=2, n_positions=32,
        bos_token_id=BEGIN, eos_token_id=END,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ).save_pretrained(folder)  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokeniser(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokeniser(tmp_path_factory.mktemp("chatty"), chat_template=TEMPLATE)


Line = Mapping[str, Any]
Written = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Written:
    def write(*lines: Line | str) -> Path:
        path = tmp_path / "lines.jsonl"
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("\n".join(texts))
        json_lines.loaded.cache_clear()
        return path

    return write


def pair(prompt: str, response: str, **more: Any) -> Line:
    return {"prompt": prompt, "response": response, **more}


def said(role: str, content: str) -> Line:
    return {"role": role, "content": content}


LAST = pair("h", "h", split="test")
"""A line for testing, so that all others of a file are for training."""


def read(
    path: Path, tokeniser: Path | None, options: str = "{}", **plan: Any
) -> InMemory:
    plan = {"length": 8, **plan}
    return json_lines.loaded(path, options, TextPlan(tokeniser=tokeniser, **plan))


def rows(source: InMemory, split: str = "train") -> list[tuple[list[int], list[int]]]:
    """Return inputs and targets of every row, without the padding at its end."""
    found = []
    for inputs, targets in zip(
        source.arrays[f"{split}_inputs"], source.arrays[f"{split}_targets"], strict=True
    ):
        size = int(np.flatnonzero((inputs != 0) | (targets != NONE))[-1]) + 1
        found.append((inputs[:size].tolist(), targets[:size].tolist()))
    return found


# What is learnt of a line


def test_only_responses_and_their_end_are_learnt(plain: Path, write: Written) -> None:
    path = write(pair("a b", "c d", split="train"), LAST)
    source = read(path, plain)
    assert rows(source) == [([A, B, C, D, END], [NONE, C, D, END, NONE])]
    assert source.arrays["vocabulary"] == len(WORDS)
    assert source.arrays[PROMPTS].tolist() == [1]
    whole = read(path, plain, loss="all")
    assert rows(whole) == [([A, B, C, D, END], [B, C, D, END, NONE])]
    assert whole.arrays[PROMPTS].tolist() == [1]


def test_a_text_begins_as_the_tokeniser_begins_it(
    tmp_path: Path, write: Written
) -> None:
    folder = save_tokeniser(tmp_path / "begins", begins=True)
    source = read(write(pair("a", "b", split="train"), LAST), folder)
    assert rows(source) == [([BEGIN, A, B, END], [NONE, B, END, NONE])]
    assert source.arrays[PROMPTS].tolist() == [2]


def test_without_an_end_token_a_response_has_no_end(
    tmp_path: Path, write: Written
) -> None:
    folder = save_tokeniser(tmp_path / "endless", eos_token=None)
    source = read(write(pair("a", "b c", split="train"), LAST), folder)
    assert rows(source) == [([A, B, C], [B, C, NONE])]
    assert "responses do not learn where to end" in " ".join(source.notes)


def test_samples_are_cut_and_counted(plain: Path, write: Written) -> None:
    path = write(
        pair("a b", "c", split="train"),
        pair("a b", "c d", split="train"),
        pair("a b c", "d", split="train"),
        pair("a b c d", "e", split="train"),
        pair("a", " ", split="train"),
        LAST,
    )
    source = read(path, plain, length=3)
    # The end of the first one is still predicted, that of the second is not.
    assert rows(source) == [
        ([A, B, C], [NONE, C, END]),
        ([A, B, C], [NONE, C, D]),
        ([A, B, C], [NONE, NONE, D]),
    ]
    assert source.notes[:3] == (
        "1 of 6 samples left out: their response is empty",
        "1 of 5 samples left out: nothing of the response is left within 3 tokens",
        "2 of 4 samples cut at 3 tokens; --text-length takes more",
    )
    # Of the test sample, its response and its end are learnt.
    assert "3 samples for training and 1 for testing; 7 of 12 tokens" in source.notes[3]


def test_a_prompt_does_not_grow_together_with_its_response(
    tmp_path: Path, write: Written
) -> None:
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=256, initial_alphabet=alphabet)
    made.train_from_iterator([], trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(
        tmp_path / "bytes"
    )
    lines = [pair("1+1?", "2"), pair("1+1? ", "2"), pair("1+1?", " 2"), pair("", "ü")]
    marked = [{**line, "split": "train"} for line in lines]
    source = read(write(*marked, LAST), tmp_path / "bytes", length=20)
    texts = [source.language.decode(inputs) for inputs, _ in rows(source)]  # type: ignore[union-attr]
    assert texts == ["1+1?\n2", "1+1? 2", "1+1? 2", "ü"]


# Chats


CHAT = [said("user", "a"), said("assistant", "b"), said("user", "c"), said("assistant", "d e")]  # fmt: skip


def test_every_response_of_a_chat_is_learnt(chatty: Path, write: Written) -> None:
    path = write({"messages": CHAT, "split": "train"}, {**LAST})
    source = read(path, chatty, length=20)
    # The template ends a text itself: no other end is added.
    inputs = [USER, A, END, ASSISTANT, B, END, USER, C, END, ASSISTANT, D, E, END]
    targets = [NONE] * 3 + [B, END] + [NONE] * 4 + [D, E, END, NONE]
    assert rows(source) == [(inputs, targets)]


def test_what_follows_the_last_response_is_left_out(
    chatty: Path, write: Written
) -> None:
    longer = [*CHAT, said("user", "f"), said("assistant", " ")]
    path = write(
        {"messages": longer, "split": "train"},
        {"messages": CHAT, "split": "train"},
        {"messages": [said("user", "a")], "split": "train"},
        LAST,
    )
    source = read(path, chatty, length=20)
    first, second = rows(source)
    assert first == second
    assert "1 of 4 samples left out: their response is empty" in source.notes


def test_a_tokeniser_without_a_template(plain: Path, write: Written) -> None:
    path = write({"messages": CHAT[:2], "split": "train"}, LAST)
    source = read(path, plain, length=20)
    inputs = [USER, COLON, A, ASSISTANT, COLON, B, END]
    assert rows(source) == [(inputs, [NONE] * 4 + [B, END, NONE])]
    assert "1 chat written as 'user: …' and 'assistant: …'" in source.notes[0]


def test_a_template_that_rewrites_what_was_said(tmp_path: Path, write: Written) -> None:
    # Only the last message is written out, as some templates do with thoughts.
    template = (
        "{% for m in messages %}{{ m.role }} {% if loop.last or m.role == 'user' %}"
        "{{ m.content }} {% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    folder = save_tokeniser(tmp_path / "rewrites", chat_template=template)
    source = read(write({"messages": CHAT, "split": "train"}, LAST), folder)
    inputs = [USER, A, ASSISTANT, USER, C, ASSISTANT, D, E]
    assert rows(source) == [(inputs, [NONE] * 5 + [D, E, NONE])]
    assert "1 chat learnt from the last response on" in source.notes[0]


def test_templates_that_cannot_be_used(tmp_path: Path, write: Written) -> None:
    path = write(LAST, {"messages": CHAT, "split": "train"})
    other = "{% if add_generation_prompt %}a{% else %}b{% endif %}"
    folder = save_tokeniser(tmp_path / "other", chat_template=other)
    with pytest.raises(UserError, match="does not begin a response as it asks for one"):
        read(path, folder)
    folder = save_tokeniser(
        tmp_path / "angry", chat_template="{{ raise_exception('no') }}"
    )
    with pytest.raises(UserError, match=r"line 2: the chat template fails: .*no"):
        read(path, folder)


def test_a_template_that_writes_the_date_always_writes_the_same(
    tmp_path: Path, write: Written
) -> None:
    # One that knows a word for 26 July 2024, and none for any other day.
    template = (
        "{{ strftime_now('%d %b %Y').replace('26 Jul 2024', 'h') }} "
        "{% for m in messages %}{{ m.content }} {% endfor %}"
    )
    folder = save_tokeniser(tmp_path / "dated", chat_template=template)
    path = write({"messages": CHAT[:2], "split": "train"}, LAST)
    source = read(path, folder)
    assert rows(source) == [([H, A, B], [NONE, B, NONE])]
    assert "today's date: it gets 26 July 2024 in every run" in source.notes[0]
    pairs = read(write(pair("a", "b", split="train"), LAST), folder)
    assert not any("date" in note for note in pairs.notes), "no chat, no date"
    folder = save_tokeniser(
        tmp_path / "computed", chat_template="{{ strftime_now('%d' ~ '%b') }}"
    )
    with pytest.raises(UserError, match="so that runs of different days would differ"):
        read(write({"messages": CHAT[:2]}, LAST), folder)


# Control tokens


def test_what_a_field_holds_is_text(chatty: Path, write: Written) -> None:
    """Only the tokeniser, its template and --dataset-options end a text."""
    chat = [said("user", "a</s>"), said("assistant", "</s> b")]
    path = write(
        pair("</s>a", "<s> b", split="train"),
        {"messages": chat, "split": "train"},
        LAST,
    )
    source = read(path, chatty, length=20)
    first, second = rows(source)
    # "<" and "/s>" are unknown to this tokeniser; the latter is three unknown words.
    letters = [UNKNOWN] * 4
    assert first[0] == [*letters, A, *letters[:3], B, END]
    assert second[0] == [USER, A, *letters, END, ASSISTANT, *letters, B, END]
    note = "2 samples with the letters of a control token, such as </s>, in a field"
    assert any(note in told for told in source.notes)


def test_a_prompt_of_the_options_may_hold_control_tokens(
    plain: Path, write: Written
) -> None:
    path = write(pair("a", "b", split="train"), LAST)
    source = read(path, plain, '{"prompt": "<s> user {prompt} </s>"}')
    assert rows(source)[0][0] == [BEGIN, USER, A, END, B, END]
    assert not any("control" in told for told in source.notes)


def test_names_of_clients_and_files_of_text(plain: Path, tmp_path: Path) -> None:
    lines = [pair("a", "b", client="</s>") for _ in range(3)]
    path = tmp_path / "names.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    assert set(read(path, plain).arrays["train_clients"]) == {"</s>"}
    (tmp_path / "x.txt").write_text("a b c</s>d " * 4)
    plan = TextPlan(tokens="tokeniser", length=8, test=0.3, tokeniser=plain)
    first, *_ = loaded_texts(tmp_path, plan).arrays["train_inputs"].tolist()
    assert first == [A, B, C, *[UNKNOWN] * 4, D]


def test_a_file_that_has_changed_is_read_again(plain: Path, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    reading = Reading(text=TextPlan(tokeniser=plain, length=8))
    found = []
    for word in ("a", "b"):
        path.write_text("\n".join(json.dumps(pair(word, "c")) for _ in range(3)))
        # As a clock with coarse steps would have it, both are of the same second.
        os.utime(path, ns=(0, ord(word)))
        texts = brought.texts(str(path), root=None, reading=reading)
        found.append(int(texts.arrays["train_inputs"][0, 0]))
    assert found == [A, B]


# Fields


def test_half_a_letter_is_replaced(chatty: Path, write: Written) -> None:
    # As programs leave it that cut texts within an emoji.
    odd = "b \ud83d"
    chat = [said("user", odd), said("assistant", odd)]
    source = read(
        write(
            pair(odd, odd, split="train"), {"messages": chat, "split": "train"}, LAST
        ),
        chatty,
    )
    first, second = rows(source)
    assert first[0] == [B, UNKNOWN, B, UNKNOWN, END]
    assert second[0] == [USER, B, UNKNOWN, END, ASSISTANT, B, UNKNOWN, END]


def test_fields_of_other_names(plain: Path, write: Written) -> None:
    alpaca = {"instruction": "a", "input": "b", "output": "c", "split": "train"}
    last = {"instruction": "h", "input": "", "output": "h", "split": "test"}
    path = write(alpaca, last)
    source = read(path, plain)
    assert rows(source) == [([A, B, C, END], [NONE, C, END, NONE])]
    assert rows(source, "test") == [([H, H, END], [H, END, NONE])]
    options = '{"prompt": "user : {instruction} {input} assistant :"}'
    ((inputs, _),) = rows(read(path, plain, options))
    assert inputs == [USER, COLON, A, B, ASSISTANT, COLON, C, END]
    options = '{"prompt": "output", "response": "instruction"}'
    ((inputs, _),) = rows(read(path, plain, options))
    assert inputs == [C, A, END]


def test_a_field_has_one_role(plain: Path, write: Written) -> None:
    """`user` is a usual name of clients, but here it is the prompt."""
    lines: list[Line] = [
        {"user": word, "say-so": "c", "assistant": word} for word in ("a", "b", "d")
    ]
    path = write(*lines)
    for prompt in ("user", "{user}", "{user} {say-so}"):
        options = json.dumps({"prompt": prompt, "response": "assistant"})
        source = read(path, plain, options)
        assert "train_clients" not in source.arrays
    (inputs, _), *_ = rows(source)
    assert inputs == [A, C, A, END]


def many(**more: Any) -> list[Line]:
    """Return samples of three clients, of which one has a single sample."""
    clients = ["bob"] * 12 + ["ann"] * 3 + ["carl"]
    words = np.random.default_rng(0).choice(WORDS[6:], (16, 3)).tolist()
    sizes = [1 + at % 3 for at in range(16)]
    return [
        pair(" ".join(some[:size]), some[-1], client=client, **more)
        for client, some, size in zip(clients, words, sizes, strict=True)
    ]


def test_clients_are_natural_and_every_tenth_sample_is_held_out(
    plain: Path, write: Written
) -> None:
    lines = many()
    source = read(write(*lines), plain)
    clients = np.array([line["client"] for line in lines])
    is_test = held_out(np.unique(clients, return_inverse=True)[1])
    assert source.arrays["train_clients"].tolist() == clients[~is_test].tolist()
    assert source.arrays["test_clients"].tolist() == clients[is_test].tolist()
    assert is_test.sum() == 2, "bob's tenth, and ann's last"
    numbered = [{**line, "client": len(line["client"])} for line in lines]
    assert set(read(write(*numbered), plain).arrays["test_clients"]) == {"3"}


def test_without_clients_every_tenth_sample_is_held_out(
    plain: Path, write: Written
) -> None:
    lines = [pair(line["prompt"], line["response"]) for line in many()]
    source = read(write(*lines), plain)
    assert "train_clients" not in source.arrays
    assert len(source.arrays["test_inputs"]) == 1
    (alone,) = rows(read(write(*[{**lines[9], "split": "train"}, LAST]), plain))
    assert rows(source, "test") == [alone]


# Packing


@given(st.lists(st.integers(1, 10)), st.integers(10, 30))
def test_packing_loses_nothing_and_fills_bins(sizes: list[int], capacity: int) -> None:
    bins = packed(sizes, capacity)
    assert sorted(item for own in bins for item in own) == list(range(len(sizes)))
    filled = [sum(sizes[item] for item in own) for own in bins]
    assert all(0 < size <= capacity for size in filled)
    # No two bins are half empty: the later one's items would have gone to the other.
    assert sum(2 * size <= capacity for size in filled) <= 1


def test_packed_samples_are_those_that_were_there(plain: Path, write: Written) -> None:
    lines = many()
    path = write(*lines)
    apart, together = read(path, plain), read(path, plain, pack=True)

    def learnt(source: InMemory) -> Counter[tuple[str, int, int]]:
        found: Counter[tuple[str, int, int]] = Counter()
        names = source.arrays["train_clients"].tolist()
        for name, (inputs, targets) in zip(names, rows(source), strict=True):
            found.update(zip([name] * len(inputs), inputs, targets, strict=True))
        return found

    assert learnt(together) == learnt(apart)
    assert len(rows(together)) < len(rows(apart))
    assert rows(together, "test") == rows(apart, "test"), "test samples stay alone"
    tokens = sum(len(inputs) for inputs, _ in rows(apart))
    share = tokens / together.arrays["train_inputs"].size
    packs = len(rows(together))
    note = f"14 samples packed into {packs} of 8 tokens, {share:.0%} full"
    assert note in together.notes[-1]


# Mistakes


GOOD = pair("a", "b")
MISTAKES: dict[str, tuple[Sequence[Line | str], str]] = {
    "empty": ([""], "is empty; give an object in each line"),
    "broken": ([GOOD, "", '{"prompt": '], "line 3 is not JSON"),
    "deep": ([GOOD, "[" * 100_000], "line 2 is not JSON"),
    "a list": ([GOOD, "[1]"], "line 2 is not an object such as"),
    "no response": ([GOOD, {"prompt": "a"}], "line 2 has no response"),
    "misspelt": ([GOOD, {"prompt": "a", "reponse": "b"}], "did you mean 'reponse'?"),
    "no prompt": ([{"response": "a"}], "line 1 has no prompt"),
    "a number": ([GOOD, pair("a", 3)], "line 2: response is not a text"),  # type: ignore[arg-type]
    "null": ([{"prompt": None, "response": "b"}], "line 1: prompt is not a text"),
    "empty responses": ([pair("a", ""), pair("b", " ")], "every response is empty"),
    "long prompts": ([pair("a " * 9, "b")] * 2, "no prompt leaves anything of its"),
    "one sample": ([GOOD], "no sample is left for testing"),
    "one client": ([pair("a", "b", client="x"), GOOD], "line 2 has no client"),
    "long name": ([pair("a", "b", client="x" * 201)], "client has 201 letters"),
    "no name": ([pair("a", "b", client="x"), pair("a", "b", client="")], "line 2: client has 0 letters"),
    "half a name": ([pair("a", "b", client=1.5)], "line 1: client is not a text"),
    "odd split": ([pair("a", "b", split="dev")], "must be train or test, not dev"),
    "no messages": ([{"messages": "hello"}], "messages is not a list of messages"),
    "half a message": ([{"messages": [{"role": "user"}]}], "message 1 is not"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_lines_that_cannot_be_read(name: str, plain: Path, write: Written) -> None:
    lines, part = MISTAKES[name]
    path = write(*lines)
    with pytest.raises(UserError) as caught:
        read(path, plain)
    assert part in str(caught.value) and "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_utf_8(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes('{"prompt": "ü", "response": "b"}'.encode("latin-1"))
    words = ("run", "--dataset", path, "--model", f"hf:{plain}")
    assert "latin.jsonl is not UTF-8; convert it" in mistake(capsys, *words)


def test_mistakes_in_options_and_folders(
    plain: Path, write: Written, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(GOOD, GOOD)

    def line(*words: object) -> str:
        return mistake(capsys, "run", "--dataset", path, *words)

    assert "needs a tokeniser; give --model hf:DIR" in line("--model", "gpt.py:GPT")
    assert "needs a tokeniser" in line()
    bare = save_network(tmp_path / "bare")
    assert "has no tokeniser (tokenizer.json)" in line("--model", f"hf:{bare}")
    assert "has no config.json" in line("--model", f"hf:{tmp_path}")
    (bare / "tokenizer.json").write_text("{")
    assert "cannot be loaded: JSONDecodeError" in line("--tokeniser", bare)
    known = ["--model", f"hf:{plain}", "--dataset-options"]
    assert "has no prompts; did you mean 'prompt'?" in line(*known, '{"prompts": "a"}')
    assert "no line has a field promt; did you mean 'prompt'?" in line(
        *known, '{"prompt": "promt"}'
    )
    assert "no line has a field ['a']" in line(*known, '{"client": ["a"]}')
    assert "line 1 has no word" in line(*known, '{"prompt": "{word}"}')
    assert "no file" in mistake(capsys, "run", "--dataset", "nowhere.jsonl")
    unused = ("run", "--tokeniser", plain, "--text-pack", "--generate", "2")
    assert "changes nothing without --dataset PATH.jsonl" in mistake(capsys, *unused)
    assert "--generate changes nothing without" in mistake(
        capsys, "run", "--generate", "2"
    )


def test_a_tokeniser_that_knows_more_than_the_network(
    tmp_path: Path, write: Written, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_tokeniser(tmp_path / "small")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 10}))
    words = ("run", "--dataset", write(GOOD, GOOD), "--model", f"hf:{folder}")
    assert "fails on tokens below 14" in mistake(
        capsys, *words, "--out", tmp_path / "r"
    )


def test_transformers_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.json").touch()
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(UserError, match=r"pip install 'hpcfed\[hf\]'"):
        load_tokeniser(tmp_path)


# Folders of texts


def test_texts_in_the_tokens_of_a_folder(plain: Path, tmp_path: Path) -> None:
    for name, text in (("x", "a b c d e f g"), ("y", "h a b c\n\nd q")):
        (tmp_path / f"{name}.txt").write_text(text)
    plan = TextPlan(tokens="tokeniser", length=4, test=0.3, tokeniser=plain)
    source = loaded_texts(tmp_path, plan)
    assert rows(source) == [
        ([A, B, C, D], [B, C, D, E]),
        ([H, A, B], [A, B, C]),
    ]
    assert rows(source, "test") == [([F], [G]), ([D], [UNKNOWN])]
    assert source.arrays["vocabulary"] == len(WORDS)
    with pytest.raises(UserError, match="--text-tokens tokeniser needs one"):
        loaded_texts(tmp_path, TextPlan(tokens="tokeniser"))


def test_languages_write_their_tokens_as_text(plain: Path) -> None:
    assert Bytes().decode([*"aü".encode(), 256, 300]) == "aü"
    letters = Characters(np.array([ord("a"), ord("ü")]))
    assert letters.decode([1, 2, 0, 3, 2]) == "aüü"
    assert letters.size == 3
    tokeniser = load_tokeniser(plain)
    assert tokeniser.decode([A, END, B, 15, 16_000]) == "a b"


# What a model says


class Says(nn.Module):
    """Answers by tables of the last two tokens, so that answers depend on a prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Embedding(16, 16)
        self.before = nn.Embedding(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = torch.nn.functional.pad(x, (1, 0))[:, :-1]
        found: torch.Tensor = self.last(x) + self.before(before)
        return found


def greedy(network: nn.Module, prompt: Sequence[int], length: int) -> list[int]:
    """Continue one prompt as anybody would."""
    text, said = list(prompt), []
    with torch.no_grad():
        while len(said) < MOST_TOKENS:
            y = network(torch.tensor([text]))
            token = int(getattr(y, "logits", y)[0, -1].argmax())
            if token == END:
                break
            said.append(token)
            if len(text) == length:
                break
            text.append(token)
    return said


@pytest.mark.parametrize("of_clients", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_prompts_are_continued_token_by_token(of_clients: bool, device: str) -> None:
    torch.manual_seed(1)
    networks = [Says() for _ in range(4)] if of_clients else [Says()] * 4
    layout = Layout.of(networks[0])
    sample = Sample((12,), (12, 16), vocabulary=16)
    on = torch.device(device)
    engine = Engine(networks[0], layout, shape=(12,), trial=sample, device=on)
    made = [layout.row(network, dtype=torch.float32) for network in networks]
    own = torch.stack(made).to(on) if of_clients else made[0].to(on).expand(4, -1)
    prompts = [[A, B], [C], [D, E, F, G], [A] * 12]
    timer = Timer(on)
    timer.start()
    found = continued(engine, own, prompts, length=12, end=END, timer=timer)
    wanted = [greedy(n, p, 12) for n, p in zip(networks, prompts, strict=True)]
    assert found == wanted
    assert len({len(tokens) for tokens in wanted}) > 1, "some end early"


def run_words(path: Path, folder: Path, **more: Any) -> list[str]:
    return flags(
        dataset=path, model=f"hf:{folder}", rounds=2, lr=0.5, text_length=12, **more
    )


def test_a_run_learns_responses_and_says_what_it_has_learnt(
    chatty: Path, write: Written, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(*many(), {**many()[0], "prompt": "a " * 20})
    words = run_words(path, chatty, generate=2, out=tmp_path / "run", precision="fp64")
    cli.main(["run", *words])
    told = "".join(capsys.readouterr())
    assert "1 of 17 samples left out: nothing of the response is left within 12" in told
    assert "--text-length is" not in told
    network = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(chatty)
    ).double()
    with np.load(tmp_path / "run/model.npz") as model:
        tensors = {name: torch.from_numpy(model[name]) for name in model.files}
    network.load_state_dict(tensors, strict=False)
    # The loss over responses and their ends, sample by sample.
    source = read(path, chatty, length=12)
    losses, right = [], []
    for inputs, targets in rows(source, "test"):
        with torch.no_grad():
            logits = network(torch.tensor([inputs])).logits[0]
        for at, target in enumerate(targets):
            if target != NONE:
                losses.append(float(-logits[at].log_softmax(-1)[target]))
                right.append(int(logits[at].argmax()) == target)
    with h5py.File(tmp_path / "run/run.h5") as file:
        assert file["rounds/global_loss"][-1] == pytest.approx(
            np.mean(losses), rel=1e-9
        )
        perplexity = file["rounds/global_perplexity"][-1]
        assert perplexity == pytest.approx(np.exp(np.mean(losses)), rel=1e-9)
        accuracy = file["rounds/global_accuracy"][-1]
        assert accuracy == pytest.approx(np.mean(right), rel=1e-12)
        assert file["clients/owner"].asstr()[()].tolist() == ["ann", "bob", "carl"]
    lines = (tmp_path / "run/generated.jsonl").read_text().splitlines()
    tests = [many()[9], many()[14]]
    language = load_tokeniser(chatty)
    for line, test in zip(map(json.loads, lines), tests, strict=True):
        assert {name: line[name] for name in ("client", "prompt", "response")} == test
        tokens = [WORDS.index(word) for word in test["prompt"].split()]
        length = source.arrays["test_inputs"].shape[1]
        assert line["generated"] == language.decode(greedy(network, tokens, length))
    assert f"the model says '{json.loads(lines[0])['generated']}'" in told


def test_ranks_seeds_and_resumed_runs_say_the_same(
    plain: Path, write: Written, tmp_path: Path, mpirun: Callable[..., Finished]
) -> None:
    words = run_words(
        write(*many()), plain, generate=2, precision="fp64", deterministic=True,
        checkpoint_every=1,
    )  # fmt: skip
    alone = started(*words, "--out", tmp_path / "alone")
    # Of clients that are on different ranks, too.
    own = [*words, "--method", "local"]
    started(*own, "--out", tmp_path / "own")
    job = [*words, "--out", tmp_path / "both", "+", *own, "--out", tmp_path / "own-2"]
    done = mpirun(2, "-m", "mpi4py", Path(__file__).parent / "several_runs.py", *job)
    assert done.returncode == 0, done.stderr
    said = [tmp_path / name / "generated.jsonl" for name in ("own", "own-2")]
    assert said[0].read_text() == said[1].read_text()
    assert_same_run(tmp_path / "both", alone, tolerance=1e-12)
    with pytest.raises(SystemExit):
        run(cli.parse_run([*words, "--out", str(tmp_path / "cut")]), StopAfter(1))
    assert not (tmp_path / "cut/generated.jsonl").exists()
    same(started("--resume", tmp_path / "cut"), alone)
    started(*words, "--seeds", "0,1", "--out", tmp_path / "seeds")
    lines = (alone / "generated.jsonl").read_text()
    for other in ("both", "cut", "seeds/seed-0"):
        assert (tmp_path / other / "generated.jsonl").read_text() == lines


def test_clients_without_a_common_model_say_what_each_has_learnt(
    plain: Path, write: Written, tmp_path: Path
) -> None:
    words = run_words(write(*many()), plain, method="local", generate=5)
    out = started(*words, "--out", tmp_path / "run")
    lines = (out / "generated.jsonl").read_text().splitlines()
    assert [json.loads(line)["client"] for line in lines] == ["ann", "bob"]
    dealt = ("--partition", "iid", "--clients", 2, "--generate", 2)
    out = started(*words, *dealt, "--out", tmp_path / "dealt")
    lines = (out / "generated.jsonl").read_text().splitlines()
    # All that it can say is said.
    assert not is_silent(tmp_path / "run", 5) and is_silent(tmp_path / "run", 6)
    # Whose model it is, not whose sample.
    assert [json.loads(line)["model"] for line in lines] == ["client 0", "client 1"]


def test_a_complete_run_is_asked_later(
    plain: Path,
    write: Written,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = run_words(write(*many()), plain, generate=2)
    asked = started(*words, "--out", tmp_path / "asked") / "generated.jsonl"
    out = started(*words, "--generate", 0, "--seeds", "0,1", "--out", tmp_path / "run")
    before = recorded(out / "seed-0")
    said = out / "seed-0/generated.jsonl"
    assert not said.exists()
    again = ["run", "--resume", str(out), "--generate", "2"]
    cli.main(again)
    assert said.read_text() == asked.read_text()
    assert (out / "seed-1/generated.jsonl").exists()
    after = recorded(out / "seed-0")
    for name, values in before.items():
        np.testing.assert_array_equal(after[name], values, err_msg=name)
    capsys.readouterr()
    cli.main(again)
    assert "there is nothing to go on with" in capsys.readouterr().err
    # Without the state after the last round, or with a damaged one.
    last = out / "seed-0/checkpoints/00000002"
    (last / "common.w.npy").write_bytes(b"")
    said.unlink()
    with pytest.raises(SystemExit):
        cli.main(again)
    assert capsys.readouterr().err.count("checkpoint") >= 1
    shutil.rmtree(last)
    with pytest.raises(SystemExit, match="2"):
        cli.main(again)
    assert "has no checkpoint of its last round" in capsys.readouterr().err


def test_a_text_is_continued_from_the_middle_of_a_sample(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for name in "ab":
        (tmp_path / "texts" / f"{name}.txt").write_text("abcdefgh" * 20)
    example = Path(__file__).parent.parent / "benchmarks/examples/gpt.py"
    words = flags(
        dataset=f"text:{tmp_path / 'texts'}",
        model=f"{example}:GPT",
        model_options='{"width": 8, "depth": 1, "heads": 2}',
        text_length=8,
        rounds=1,
        generate=1,
    )
    out = started(*words, "--out", tmp_path / "run")
    line = json.loads((out / "generated.jsonl").read_text())
    assert (line["client"], line["prompt"], line["response"]) == ("a", "abcd", "efgha")
    assert set(line["generated"]) <= set("abcdefgh") and len(line["generated"]) == 5


def test_a_run_says_that_a_network_has_a_tokeniser(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("a b c d e f g h" * 3)
    words = ["--dataset", f"text:{tmp_path}", "--model", f"hf:{plain}"]
    for more, part in (
        ([], "--text-tokens chars, though"),
        (["--text-tokens", "tokeniser"], ""),
    ):
        command = [*words, *more, "--text-length", "4", "--rounds", "1"]
        cli.main(["run", *command, "--out", str(tmp_path / f"run{len(more)}")])
        told = "".join(capsys.readouterr())
        assert part in told and ("though" in told) == bool(part)


def test_a_sample_has_512_tokens_unless_another_number_is_given(
    plain: Path, write: Written
) -> None:
    words = ["--dataset", str(write(*many())), "--model", f"hf:{plain}"]
    settings = cli.parse_run(words)
    assert settings.config.text_length == 512
    assert any(choice.option == "text_length" for choice in settings.choices)
    assert cli.parse_run([*words, "--text-length", "9"]).config.text_length == 9
