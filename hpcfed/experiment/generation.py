"""What a language model says at the end of a run, as something to look at: prompts of
the test set, continued by the likeliest token, again and again.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcfed.clients.job import RowEngine
from hpcfed.clients.objective import LIKELIEST
from hpcfed.data import brought
from hpcfed.data.array_checks import NO_TARGET
from hpcfed.data.arrays import InMemory
from hpcfed.data.lessons import PROMPTS
from hpcfed.data.shards import Shard
from hpcfed.errors import UserError
from hpcfed.experiment.assemble import Setup
from hpcfed.experiment.evaluate import in_groups
from hpcfed.experiment.recording import fingerprints
from hpcfed.results.checkpoints import Checkpoint
from hpcfed.results.folder import GENERATED, RECORD
from hpcfed.results.format import check_same
from hpcfed.results.publish import publish
from hpcfed.results.stored import is_complete, read_run
from hpcfed.runtime.timer import Timer

MOST_TOKENS = 64
"""The most tokens that are said after a prompt."""
GLOBAL = "global"
"""Stands for the global model where others are named by their client."""
SHOWN = 60
"""The most letters of a text that are shown on the terminal."""


class _Task(NamedTuple):
    """A prompt of the test set, and the response that belongs to it."""

    model: str
    """Whose model continues it."""
    prompt: list[int]
    response: list[int]
    client: str
    """Whose sample it is; empty if the data does not say."""


def is_only_asked(setup: Setup, folder: Path, found: Checkpoint | None) -> bool:
    """Tell whether a complete run is resumed for what its model says."""
    config = setup.settings.config
    if config.resume is None or not config.generate:
        return False
    rounds = -1
    if setup.world.is_root and is_complete(folder, config.rounds):
        rounds = read_run(folder).rounds_done
    rounds = setup.federation.agreed(rounds)
    if rounds < 0:
        return False
    # A damaged checkpoint was passed over for an older one.
    if found is None or found.rounds != rounds:
        raise UserError(
            f"--resume {folder} --generate {config.generate}: its checkpoint of the last "
            "round is damaged, so there is no model to continue prompts"
        )
    if setup.world.is_root:
        # A prompt may have been a sample of training otherwise.
        check_same(folder / RECORD, read_run(folder).facts, fingerprints(setup))
    return True


def generate(
    setup: Setup, folder: Path, state: Any, say: Callable[[str], None]
) -> None:
    """Write what the global model says to the run's folder, and show the first; without
    a global model, what clients' own models say. The same call on every rank.
    """
    config = setup.settings.config
    row = setup.method.global_row(state)
    if not config.generate or (row is not None and not setup.world.is_root):
        return
    texts = brought.texts(config.dataset, root=config.root, reading=config.reading)
    if row is None:
        lines = _by_clients(setup, state, texts)
    else:
        samples = len(texts.arrays["test_inputs"])
        # Spread over the test set, and so over clients.
        chosen = np.linspace(0, samples - 1, min(config.generate, samples)).astype(int)
        tasks = [_task(texts, at, GLOBAL) for at in chosen.tolist()]
        lines = _lines(setup, texts, tasks, row.expand(len(tasks), -1))
    if not setup.world.is_root:
        return
    if not lines:
        say("--generate: no client has test data")
        return
    path = folder / GENERATED
    written = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)
    publish(written.encode("utf-8", "replace"), path)
    first = {name: _short(text) for name, text in lines[0].items()}
    model = "the model" if row is not None else f"the model of {first['model']}"
    say(
        f"after '{first['prompt']}' {model} says '{first['generated']}', the data "
        f"'{first['response']}'; more in {path}"
    )


def _short(text: str) -> str:
    """Return the first letters: not every language has blanks between words."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else f"{line[: SHOWN - 2].rstrip()} …"


def _by_clients(setup: Setup, state: Any, texts: InMemory) -> list[dict[str, str]]:
    """Return what the models of the first clients with test data say, each after a
    prompt of its client; on the root, for clients of all ranks.
    """
    fed, of_test = setup.federation, setup.dealt.partition.test
    config = setup.settings.config
    ids = [id for id in range(config.clients) if len(of_test[id])][: config.generate]
    said: dict[int, dict[str, str]] = {}
    for members in in_groups(setup, np.flatnonzero(np.isin(fed.clients, ids))):
        tasks = []
        for id in fed.clients[members].tolist():
            tasks.append(_task(texts, int(of_test[id][0]), f"client {id}"))
        rows = setup.method.personal(fed, state, members)
        lines = _lines(setup, texts, tasks, rows)
        said |= dict(zip(fed.clients[members].tolist(), lines, strict=True))
    everyones: dict[int, dict[str, str]] = {}
    for of_rank in setup.collectives.gather(said) or []:
        everyones |= of_rank
    return [everyones[id] for id in sorted(everyones)]


def _lines(
    setup: Setup, texts: InMemory, tasks: Sequence[_Task], rows: Tensor
) -> list[dict[str, str]]:
    """Return tasks as text, and what `rows[i]` says after the i-th prompt."""
    language = texts.language
    assert language is not None
    said = continued(
        setup.engine,
        rows,
        [task.prompt for task in tasks],
        length=texts.arrays["test_inputs"].shape[1],
        end=language.end,
        timer=setup.timer,
    )
    lines = []
    for task, tokens in zip(tasks, said, strict=True):
        line = {"model": task.model}
        if task.client:
            line["client"] = task.client
        line["prompt"] = language.decode(task.prompt)
        line["response"] = language.decode(task.response)
        line["generated"] = language.decode(tokens)
        lines.append(line)
    return lines


def _task(texts: InMemory, at: int, model: str) -> _Task:
    """Return the prompt and the response of a test sample."""
    inputs, targets = (
        texts.arrays[f"test_{kind}"][at] for kind in ("inputs", "targets")
    )
    if PROMPTS in texts.arrays:
        size = int(texts.arrays[PROMPTS][at])
    else:
        # A window of a text: its first half is the prompt.
        size = int((targets != NO_TARGET).sum()) // 2
    size = max(1, size)
    # The target of the prompt's last token is the response's first one.
    after = targets[size - 1 :]
    none = np.flatnonzero(after == NO_TARGET)
    response = after[: none[0]] if len(none) else after
    client = ""
    if "test_clients" in texts.arrays:
        client = str(texts.arrays["test_clients"][at])
    return _Task(model, inputs[:size].tolist(), response.tolist(), client)


def continued(
    engine: RowEngine,
    rows: Tensor,
    prompts: Sequence[Sequence[int]],
    *,
    length: int,
    end: int | None,
    timer: Timer,
) -> list[list[int]]:
    """Return the tokens that `rows[i]` says after `prompts[i]`, until it ends the text,
    or until prompt and answer have this length.

    The whole text is read again for each token: that suits any network, and a few
    prompts.
    """
    number = len(prompts)
    inputs = torch.zeros(number, length, dtype=torch.int64)
    for row, prompt in zip(inputs, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    said: list[list[int]] = [[] for _ in prompts]
    open_ones = set(range(number))
    for _ in range(MOST_TOKENS):
        # In a phase of its own each time, as a sign of life.
        with timer.phase("evaluate"):
            ends = [
                len(prompt) + len(more)
                for prompt, more in zip(prompts, said, strict=True)
            ]
            likeliest = _likeliest(engine, rows, inputs, ends)
        for at in sorted(open_ones):
            token = likeliest[at]
            if token != end:
                said[at].append(token)
            if token == end or ends[at] == length:
                open_ones.remove(at)
            else:
                inputs[at, ends[at]] = token
        if not open_ones:
            break
    return said


def _likeliest(
    engine: RowEngine, rows: Tensor, inputs: Tensor, ends: Sequence[int]
) -> list[int]:
    """Return the likeliest token after the first `ends[i]` tokens of each text."""
    number, length = inputs.shape
    last = torch.tensor(ends).clamp(max=length) - 1
    # Padding follows the text, and a network sees only what comes before.
    targets = torch.full_like(inputs, NO_TARGET)
    targets[torch.arange(number), last] = 0
    # The engine sums over a client's samples: with one each, a sum is one answer.
    alone = Shard(
        inputs=inputs.to(rows.device, copy=True),
        targets=targets.to(rows.device),
        index=torch.arange(number, device=rows.device)[:, None],
        sizes=(1,) * number,
        clients=np.arange(number),
        task="next-token",
    )
    score = engine.evaluate(rows, alone, np.arange(number), {LIKELIEST: ()})
    return [int(token) for token in score.sums[LIKELIEST].tolist()]
