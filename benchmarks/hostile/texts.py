"""JSON, TOML, texts and names that somebody else has written."""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py

from benchmarks.hostile.commands import Commands, commands
from hpcfed.results.checkpoints import MARKER
from hpcfed.results.folder import CHECKPOINTS

Change = Callable[[Path, random.Random], Commands]
"""What is done to the copies in a folder, and which commands get them then."""
ESCAPE = "\x1b[2J\x1b]0;owned\x07\x9b31m"
"""What would clear a terminal, rename its window and colour its text."""


def break_json(case: Path, chance: random.Random) -> Commands:
    """Replace JSON by what is none, is cut short, or never ends."""
    what, path, name = chance.choice(json_texts(case))
    text = read_json(path, name)
    at = chance.randrange(len(text))
    texts = [
        "", "{", "null", "[" * 100_000, '{"a":' * 100_000, text[:at], text[:at] + "\x00" + text[at:], "\ufeff" + text,
        text + text, "NaN", "1e999", '{"a": 1, "a": 2}', "9" * 5000, '"\\ud800"', text[:at] + "\x1b" + text[at + 1 :],
    ]  # fmt: skip
    write_json(path, name, chance.choice(texts))
    return commands(case, what, chance)


def retype_json(case: Path, chance: random.Random) -> Commands:
    """Put values that cannot be into JSON."""
    what, path, name = chance.choice(json_texts(case))
    content = json.loads(read_json(path, name))
    holder, key = chance.choice(list(places(content)))
    # Deeper than a recursive reader can go.
    deep: list[Any] = []
    for _ in range(500):
        deep = [deep]
    holder[key] = chance.choice(
        [None, float("nan"), float("inf"), -float("inf"), "", "x", -1, 0, 10**30, 10**400, 1e308, True, [], {}, [[1]],
         deep, ESCAPE, "x" * 10**5, "../../outside/file", "/etc/passwd", "a\x00b", "\ud800", 0.5]
    )  # fmt: skip
    write_json(path, name, json.dumps(content))
    return commands(case, what, chance)


def places(content: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every value in JSON: what holds it, and under which key or number."""
    keys = content.keys() if isinstance(content, dict) else range(len(content))
    for key in list(keys):
        yield content, key
        if isinstance(content[key], dict | list):
            yield from places(content[key])


def json_texts(case: Path) -> list[tuple[str, Path, str]]:
    """Return all JSON of a case: whose commands read it, its file and, within HDF5, its
    name.
    """
    checkpoint = newest_checkpoint(case / "run")
    outcome = sorted(case.glob("study/points/*/*.json"))[0]
    texts = [
        ("run", checkpoint / MARKER, ""),
        ("run", checkpoint / MARKER, ""),
        ("study", outcome, ""),
    ]
    for name in ("config", "environment"):
        texts += [
            ("run", case / "run/run.h5", name),
            ("run", checkpoint / "run.h5", name),
        ]
    return texts


def read_json(path: Path, name: str) -> str:
    """Return JSON from a file of its own, or from HDF5 by its name."""
    if not name:
        return path.read_text()
    with h5py.File(path) as file:
        return str(file[name].asstr()[()])


def write_json(path: Path, name: str, text: str) -> None:
    """Write JSON, and make a checkpoint's marker agree with its changed file."""
    if not name:
        path.write_bytes(text.encode(errors="surrogatepass"))
        return
    with h5py.File(path, "r+") as file:
        del file[name]
        file[name] = text.replace("\0", "0").encode(errors="surrogatepass")
    sign(path)


def sign(path: Path) -> None:
    """Have a checkpoint's marker agree with a file that was changed."""
    marker = path.parent / MARKER
    if marker.exists():
        # Otherwise the checksum would give the change away before the text is read.
        content = json.loads(marker.read_text())
        for part in content["parts"]:
            if part["name"] == path.name:
                part |= {
                    "size": path.stat().st_size,
                    "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
                }
        marker.write_text(json.dumps(content))


def newest_checkpoint(run: Path) -> Path:
    return sorted((run / CHECKPOINTS).iterdir())[-1]


def toml(case: Path, chance: random.Random) -> Commands:
    """Put numbers, texts and tables that cannot be into options or a study."""
    what = chance.choice(("config.toml", "study.toml"))
    path = case / what
    values = [
        "1e400", "-1e400", "1e-400", "inf", "-inf", "nan", "1" + "0" * 30, "-1" + "0" * 30, "9" * 5000,
        "0x" + "f" * 3000, "-1", "0", "0.5", "2147483648", "9223372036854775807", "9223372036854775808",
        "1979-05-27T07:32:00Z", "07:32:00", "true", '""', '"x"', '"1e400"', '"nan"', '"-0"', '"\\u001b[2J"',
        '"a\\u0000b"', '"\\n\\r"', json.dumps("x" * 10**6), "[]", "{}", "[[]]", "[" * 100_000,
        "[" + "1," * 10**5 + "]", "{a = " * 2000 + "1" + "}" * 2000,
    ]  # fmt: skip
    options = [
        "rounds", "clients", "epochs", "batch_size", "lr", "seed", "seeds", "model", "dataset", "method",
        "participation", "data_root", "resume", "attack", "attackers", "evaluate_every", "checkpoint_every",
        "stall_timeout", "device", "target_accuracy", "new_clients", "partition", "alpha", "out", "backend",
        '"a\\u001b[2Jb"', '"a\\nb"', '""', "é",
    ]  # fmt: skip
    tables = [
        "", "title", "repeats", "warmup", "limit", "[common]", "[sweep]", "[variants.a]",
        "[[sweep]]",
    ]  # fmt: skip
    lines = path.read_text().splitlines()
    line = f"{chance.choice(options)} = {chance.choice(values)}"
    if what == "study.toml" and chance.random() < 0.7:
        table = chance.choice(tables)
        key = table.isalpha()  # of the top level, and not the heading of a table
        line = f"{table} = {chance.choice(values)}" if key else f"{table}\n{line}"
        lines = [other for other in lines if other.partition(" ")[0] != table]
    at = chance.randrange(len(lines) + 1)
    lines.insert(at, line)
    content = "\n".join(lines).encode()
    if chance.random() < 0.1:
        content += chance.choice(
            (b"\xff\xfe", b"\x1b[2J", b"\x00", b"a = '\x1b'", b"a = 1\ra = 2")
        )
    path.write_bytes(content)
    return commands(case, what)


def escape(case: Path, chance: random.Random) -> Commands:
    """Put control characters wherever a text or a name is shown."""
    places: list[Change] = [
        _escape_name, _escape_attribute, _escape_config, _escape_error, _escape_study, _escape_outcome, _escape_toml,
    ]  # fmt: skip
    return chance.choice(places)(case, chance)


def _escape_name(case: Path, chance: random.Random) -> Commands:
    """Put control characters into the name of a folder."""
    what = chance.choice(("run", "study", "config.toml", "study.toml", "data.npz"))
    return renamed(case, what, f"a{ESCAPE}\nb", chance)


def renamed(case: Path, what: str, name: str, chance: random.Random) -> Commands:
    """Move a file or folder into a folder of this name, and return its commands; some
    are refused, by their name.
    """
    (case / name).mkdir()
    shutil.move(case / what, case / name / what)
    if what not in ("run", "study") and chance.random() < 0.5:
        (case / name / what).write_bytes(b"no such thing")
    return commands(case / name, what)


def _escape_attribute(case: Path, chance: random.Random) -> Commands:
    """Put control characters into an attribute of a run's file."""
    for path in (case / "run/run.h5", newest_checkpoint(case / "run") / "run.h5"):
        with h5py.File(path, "r+") as file:
            texts = sorted(
                name for name, value in file.attrs.items() if isinstance(value, str)
            )
            file.attrs[chance.choice([*texts, "error"])] = f"a{ESCAPE}\nb"
        sign(path)
    return commands(case, "run")


def _escape_config(case: Path, chance: random.Random) -> Commands:
    """Put control characters into an option or into what is known of the machine."""
    name = chance.choice(("config", "environment"))
    path = chance.choice(
        (case / "run/run.h5", newest_checkpoint(case / "run") / "run.h5")
    )
    content = json.loads(read_json(path, name))
    texts = []
    for holder, key in places(content):
        if isinstance(holder[key], str):
            texts.append((holder, key))
    holder, key = chance.choice(texts)
    holder[key] = f"a{ESCAPE}\nb"
    write_json(path, name, json.dumps(content))
    return commands(case, "run")


def _escape_error(case: Path, chance: random.Random) -> Commands:
    """Put control characters into the error of a rank."""
    (case / "run/error-0.txt").write_text(f"rank 0 failed {ESCAPE}\r\n\nmore")
    return commands(case, "run")


def _escape_study(case: Path, chance: random.Random) -> Commands:
    """Put control characters into a text of a study's file."""
    with h5py.File(case / "study/study.h5", "r+") as file:
        name = chance.choice(("title", "name", "status", "error", "command", "study"))
        if name == "title":
            file.attrs["title"] = f"a{ESCAPE}\nb"
        elif name == "study":
            del file["study"]
            file["study"] = f"title = '{ESCAPE}'"
        else:
            texts = file[f"trials/{name}"].asstr()[()]
            texts[0] = f"a{ESCAPE}\nb"
            file[f"trials/{name}"][...] = texts
    return commands(case, "study")


def _escape_outcome(case: Path, chance: random.Random) -> Commands:
    """Put control characters into the outcome of a trial."""
    outcome = sorted(case.glob("study/points/*/*.json"))[0]
    content = json.loads(outcome.read_text())
    content[chance.choice(("status", "error", "command"))] = f"a{ESCAPE}\nb"
    outcome.write_text(json.dumps(content))
    return commands(case, "study")


def _escape_toml(case: Path, chance: random.Random) -> Commands:
    """Put control characters into TOML."""
    what = chance.choice(("config.toml", "study.toml"))
    text = json.dumps(f"a{ESCAPE}\nb")
    lines = [
        f"title = {text}",
        f"[variants.{text}]\nlr = 0.1",
        f"[common]\n{text} = 1",
        f"[sweep]\nmodel = [{text}]",
    ]
    if what == "config.toml":
        lines = [
            f"{text} = 1",
            f"dataset = {text}",
            f"seeds = {text}",
            f"method = {text}",
            f"partition = {text}",
        ]
    (case / what).write_text(chance.choice(lines))
    return commands(case, what)


def rename(case: Path, chance: random.Random) -> Commands:
    """Use names that are not UTF-8, or as long as names may be."""
    what = chance.choice(("run", "study", "config.toml", "study.toml", "data.npz"))
    names = [b"a\xff\xfeb", b"\xc3", b"a" * 255, b"a b\\'\"$`;*", b"-"]
    names.append("é\u202e".encode())
    strange = os.fsdecode(chance.choice(names))
    if chance.random() < 0.3:  # a user's file in the folder
        (case / "run" / strange).write_text("my own")
        return commands(case, "run")
    return renamed(case, what, strange, chance)
