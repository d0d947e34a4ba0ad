"""Folders, files, texts and names that somebody else has made, and the commands that
get them; for benchmarks/fuzz.py.

A case is a copy of real files (a run that was stopped, a study, a config, a data set)
in which one thing is changed. All commands that would meet it are started in the
reader's process, as the program itself would start them.
"""

import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import struct
import traceback
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import canaries
import h5py
import numpy as np

from hpcfed.record.checkpoints import CHECKPOINTS, MARKER

Commands = list[list[str]]
"""The words of each."""
Change = Callable[[Path, random.Random], Commands]
"""What is done to the copies in a folder, and which commands get them then."""
ESCAPE = "\x1b[2J\x1b]0;owned\x07\x9b31m"
"""What would clear a terminal, rename its window and colour its text."""
QUICK = [
    "--rounds",
    "1",
    "--clients",
    "2",
    "--model",
    "mlp",
    "--epochs",
    "1",
    "--device",
    "cpu",
]
STOPPED = [
    "run", "--method", "fedper", "--model", "mlp", "--clients", "2", "--epochs", "1", "--rounds", "4",
    "--checkpoint-every", "1", "--snapshot-every", "1", "--device", "cpu",
]  # fmt: skip
CONFIG = """method = "fedper"
model = "mlp"
clients = 4
rounds = 2
"""


def make_originals(folder: Path) -> None:
    """Add what cases begin with to the originals of benchmarks/fuzz.py, by real runs in
    this process.
    """
    from hpcfed import cli

    folder = folder / "cases"
    run = folder / "run"
    cli.main([*STOPPED, "--out", str(run)])
    with h5py.File(run / "run.h5", "r+") as file:
        file.attrs["status"] = "stopped"
    shutil.rmtree(_newest(run))  # the last round is left to do
    (folder / "config.toml").write_text(CONFIG)
    shutil.copy(folder.parent / "study.toml", folder)
    (folder / "study").mkdir()
    shutil.copy(folder.parent / "study.h5", folder / "study")
    shutil.copytree(folder.parent / "points", folder / "study/points")
    np.savez(folder / "data.npz", **_arrays())


def _arrays() -> dict[str, Any]:
    images = np.arange(24 * 64, dtype=np.uint8).reshape(24, 8, 8)
    labels = np.arange(24) % 3
    return {
        "train_images": images,
        "train_labels": labels,
        "test_images": images[:9],
        "test_labels": labels[:9],
    }


def commands(case: Path, what: str, chance: random.Random | None = None) -> Commands:
    """The commands that get one of the copies: all of them, or two by chance."""
    page = ["--out", str(case / "page.html")]
    run, study, out = (
        str(case / "run"),
        str(case / "study"),
        ["--out", str(case / "out")],
    )
    every = {
        "run": [
            ["show", run],
            ["show", run, "--json"],
            ["report", run, "--unfinished", *page],
            ["run", "--resume", run],
        ],
        "study": [
            ["report", study, *page],
            ["report", f"{study}/points", *page],
            ["study", str(case / "study.toml"), "--out", study, "--gather"],
        ],
        "config.toml": [["run", str(case / "config.toml"), *out]],
        "study.toml": [["study", str(case / "study.toml"), *out, "--dry-run"]],
        "data.npz": [["run", "--dataset", f"file:{case / 'data.npz'}", *QUICK, *out]],
    }[what]
    return every if chance is None or len(every) < 3 else chance.sample(every, 2)


# JSON.


def break_json(case: Path, chance: random.Random) -> Commands:
    """JSON that is none, that is cut short, or that never ends."""
    what, path, name = chance.choice(_json_texts(case))
    text = _read_json(path, name)
    at = chance.randrange(len(text))
    texts = [
        "", "{", "null", "[" * 100_000, '{"a":' * 100_000, text[:at], text[:at] + "\x00" + text[at:], "\ufeff" + text,
        text + text, "NaN", "1e999", '{"a": 1, "a": 2}', "9" * 5000, '"\\ud800"', text[:at] + "\x1b" + text[at + 1 :],
    ]  # fmt: skip
    _write_json(path, name, chance.choice(texts))
    return commands(case, what, chance)


def retype_json(case: Path, chance: random.Random) -> Commands:
    """JSON with values that cannot be."""
    what, path, name = chance.choice(_json_texts(case))
    content = json.loads(_read_json(path, name))
    holder, key = chance.choice(list(_places(content)))
    deep: list[Any] = []
    for _ in range(500):
        deep = [deep]
    holder[key] = chance.choice(
        [None, float("nan"), float("inf"), -float("inf"), "", "x", -1, 0, 10**30, 10**400, 1e308, True, [], {}, [[1]],
         deep, ESCAPE, "x" * 10**5, "../../outside/file", "/etc/passwd", "a\x00b", "\ud800", 0.5]
    )  # fmt: skip
    _write_json(path, name, json.dumps(content))
    return commands(case, what, chance)


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    """All places of a value in JSON: what holds it, and under which key or number."""
    keys = content.keys() if isinstance(content, dict) else range(len(content))
    for key in list(keys):
        yield content, key
        if isinstance(content[key], dict | list):
            yield from _places(content[key])


def _json_texts(case: Path) -> list[tuple[str, Path, str]]:
    """All JSON of a case: whose commands read it, its file and, within HDF5, its name."""
    newest = _newest(case / "run")
    outcome = sorted(case.glob("study/points/*/*.json"))[0]
    texts = [
        ("run", newest / MARKER, ""),
        ("run", newest / MARKER, ""),
        ("study", outcome, ""),
    ]
    for name in ("config", "environment"):
        texts += [
            ("run", case / "run/run.h5", name),
            ("run", newest / "run.h5", name),
        ]
    return texts


def _read_json(path: Path, name: str) -> str:
    if not name:
        return path.read_text()
    with h5py.File(path) as file:
        return str(file[name].asstr()[()])


def _write_json(path: Path, name: str, text: str) -> None:
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
        content = json.loads(marker.read_text())
        for part in content["parts"]:
            if part["name"] == path.name:
                part |= {
                    "size": path.stat().st_size,
                    "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
                }
        marker.write_text(json.dumps(content))


def _newest(run: Path) -> Path:
    return sorted((run / CHECKPOINTS).iterdir())[-1]


# What is no plain file.


def sparse(case: Path, chance: random.Random) -> Commands:
    """A file that says that it has a terabyte, of nothing."""
    what, path = _victim(case, chance, folders=False)
    path.touch()
    os.truncate(path, 2**40)
    return commands(case, what)


def fifo(case: Path, chance: random.Random) -> Commands:
    what, path = _victim(case, chance)
    canaries.remove(path)
    os.mkfifo(path)
    return commands(case, what)


def device(case: Path, chance: random.Random) -> Commands:
    """A device that never ends, holds nothing or takes nothing, or a link to it."""
    name, number = chance.choice((("zero", 5), ("null", 3), ("full", 7), ("random", 8)))
    if (
        chance.random() < 0.2
    ):  # results that are written to one, as to /dev/null, must not take its place
        with contextlib.suppress(PermissionError):  # root alone may make them
            os.mknod(case / "outside/null", 0o20666, os.makedev(1, 3))
            out = [
                "--unfinished",
                chance.choice(("--out", "--csv", "--json")),
                str(case / "outside/null"),
            ]
            return [
                ["report", str(case / "run"), "--out", str(case / "page.html"), *out]
            ]
    what, path = _victim(case, chance)
    canaries.remove(path)
    try:
        if chance.random() < 0.5:
            raise PermissionError
        os.mknod(path, 0o20666, os.makedev(1, number))
    except PermissionError:
        path.symlink_to(f"/dev/{name}")
    return commands(case, what)


def link(case: Path, chance: random.Random) -> Commands:
    """A link to a file, a folder or nothing outside, to the file itself that was moved
    away, or to itself.
    """
    what, path = _victim(case, chance)
    outside = case / "outside"
    targets = [
        outside / "file",
        outside / "tree",
        outside / "empty/nothing",
        path,
        path.parent,
    ]
    named = (
        path.parent == case and path.is_dir()
    )  # by the user: such a link may well be followed
    if path.exists() and not named and chance.random() < 0.4:
        targets = [outside / "moved"]
        shutil.move(path, targets[0])
    canaries.remove(path)
    path.symlink_to(
        chance.choice(
            [target for target in targets if not named or target != outside / "tree"]
        )
    )
    return commands(case, what)


def _victim(
    case: Path, chance: random.Random, *, folders: bool = True
) -> tuple[str, Path]:
    """One of the files, or folders, that commands come across, and whose commands those
    are.
    """
    newest = _newest(case / "run")
    inside = ["run.h5", "error-0.txt", "server.h5", "params-0.h5", ".claim"]
    files = [("run", case / "run" / name) for name in inside]
    files += [
        ("run", newest / name)
        for name in (MARKER, MARKER, "run.h5", "common.shared.npy", "worker-0.own.npy")
    ]
    files += [
        ("study", path)
        for path in (
            case / "study/study.h5",
            *sorted(case.glob("study/points/*/*.json")),
        )
    ]
    files += [("study", sorted(case.glob("study/points/*/*/run.h5"))[0])]
    files += [(name, case / name) for name in ("config.toml", "study.toml", "data.npz")]
    if folders:
        files += [
            ("run", path)
            for path in (case / "run", newest.parent, newest, case / "run/seed-3")
        ]
        files += [("study", case / "study"), ("study", case / "study/points")]
    return chance.choice(files)


# Data sets.


def npz(case: Path, chance: random.Random) -> Commands:
    """A user's data set with members that are not what they should be."""
    path, arrays = case / "data.npz", _arrays()
    name = chance.choice(list(arrays))
    shape, dtype = arrays[name].shape, arrays[name].dtype
    odd: list[Any] = [
        np.array([{"a": 1}] * 24, dtype=object), np.zeros(shape, [("a", "f4")]), np.zeros((0, 8, 8)), np.zeros(()),
        np.zeros((*shape, 1, 1)), np.asfortranarray(np.zeros(shape)), np.full(shape, 2**63, "u8"),
        *(np.zeros(shape, kind) for kind in ("c16", "M8[s]", "S3", ">f4", "f2", "?")),
        *(np.full(shape, value) for value in (np.nan, np.inf, -1, 2**62, 1e308)),
    ]  # fmt: skip
    members = {f"{key}.npy": _npy(value) for key, value in arrays.items()}
    file = f"{name}.npy"
    header = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': "
    match chance.randrange(8):
        case 0 | 1:
            members[file] = _npy(chance.choice(odd))
        case 2:
            huge = chance.choice(
                (
                    "(1000000000000,)",
                    "(-1,)",
                    "(2,) * 9",
                    "(" * 5000,
                    "(4611686018427387904, 8)",
                    "5",
                )
            )
            members[file] = _with_header(header + huge + "}")
        case 3:
            texts = (
                "",
                "{}",
                "[]",
                "__import__('os')",
                "{'descr': " + "[" * 3000,
                "\x00",
                "{" + "'a': 1, " * 9000,
            )
            members[file] = _with_header(chance.choice(texts))
        case 4:
            members[file] = members[file][: chance.randrange(len(members[file]))]
        case 5:
            del members[file]
        case 6:
            strange = (
                "../../outside/file",
                "/outside/new",
                "a\x1b[2Jb.npy",
                "x" * 5000,
                "é.npy",
                "train_images",
                "",
            )
            members |= {chance.choice(strange): b"more"}
        case _:  # a gigabyte of zeros, packed to one thousandth
            zeros = bytes(2**24)
            members[file] = (
                _with_header(header + f"({64 * len(zeros) // dtype.itemsize},)}}")
                + zeros
            )
    _zip(path, members, chance)
    return commands(case, "data.npz")


def _npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def _with_header(header: str) -> bytes:
    content = header.encode()
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", len(content)) + content


def _zip(path: Path, members: dict[str, bytes], chance: random.Random) -> None:
    """Pack them, now and then with a method, a size or a flag that is not theirs."""
    packed = chance.choice(
        (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
    )
    with zipfile.ZipFile(path, "w", packed) as archive:
        for name, content in members.items():
            with archive.open(name, "w") as file:
                file.write(content)
                if len(content) > 2**24:
                    for _ in range(63):
                        file.write(content[-(2**24) :])
    if chance.random() < 0.2:
        whole = bytearray(path.read_bytes())
        start = whole.rfind(b"PK\x01\x02")
        whole[start + chance.choice((8, 10, 20, 24, 42))] ^= chance.choice((1, 0xFF))
        path.write_bytes(whole)


# TOML.


def toml(case: Path, chance: random.Random) -> Commands:
    """Options and studies with numbers, texts and tables that cannot be."""
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
        "",
        "title",
        "repeats",
        "warmup",
        "limit",
        "[common]",
        "[sweep]",
        "[variants.a]",
        "[[sweep]]",
    ]
    lines = path.read_text().splitlines()
    line = f"{chance.choice(options)} = {chance.choice(values)}"
    if what == "study.toml" and chance.random() < 0.7:
        table = chance.choice(tables)
        line = (
            f"{table} = {chance.choice(values)}"
            if table.isalpha()
            else f"{table}\n{line}"
        )
        lines = [kept for kept in lines if kept.partition(" ")[0] != table]
    at = chance.randrange(len(lines) + 1)
    lines.insert(at, line)
    content = "\n".join(lines).encode()
    if chance.random() < 0.1:
        content += chance.choice(
            (b"\xff\xfe", b"\x1b[2J", b"\x00", b"a = '\x1b'", b"a = 1\ra = 2")
        )
    path.write_bytes(content)
    return commands(case, what)


# Texts and names.


def escape(case: Path, chance: random.Random) -> Commands:
    """Control characters wherever a text or a name is shown."""
    places: list[Change] = [
        _escape_name, _escape_attribute, _escape_config, _escape_error, _escape_study, _escape_outcome, _escape_toml,
    ]  # fmt: skip
    return chance.choice(places)(case, chance)


def _escape_name(case: Path, chance: random.Random) -> Commands:
    what = chance.choice(("run", "study", "config.toml", "study.toml", "data.npz"))
    return _renamed(case, what, f"a{ESCAPE}\nb", chance)


def _renamed(case: Path, what: str, name: str, chance: random.Random) -> Commands:
    """The commands of a file or folder that is in a folder of this name now; some are
    refused, by their name.
    """
    (case / name).mkdir()
    shutil.move(case / what, case / name / what)
    if what not in ("run", "study") and chance.random() < 0.5:
        (case / name / what).write_bytes(b"no such thing")
    return commands(case / name, what)


def _escape_attribute(case: Path, chance: random.Random) -> Commands:
    for path in (case / "run/run.h5", _newest(case / "run") / "run.h5"):
        with h5py.File(path, "r+") as file:
            texts = sorted(
                name for name, value in file.attrs.items() if isinstance(value, str)
            )
            file.attrs[chance.choice([*texts, "error"])] = f"a{ESCAPE}\nb"
        sign(path)
    return commands(case, "run")


def _escape_config(case: Path, chance: random.Random) -> Commands:
    """In an option or in what is known of the machine."""
    name = chance.choice(("config", "environment"))
    path = chance.choice((case / "run/run.h5", _newest(case / "run") / "run.h5"))
    content = json.loads(_read_json(path, name))
    texts = [
        (holder, key)
        for holder, key in _places(content)
        if isinstance(holder[key], str)
    ]
    holder, key = chance.choice(texts)
    holder[key] = f"a{ESCAPE}\nb"
    _write_json(path, name, json.dumps(content))
    return commands(case, "run")


def _escape_error(case: Path, chance: random.Random) -> Commands:
    (case / "run/error-0.txt").write_text(f"rank 0 failed {ESCAPE}\r\n\nmore")
    return commands(case, "run")


def _escape_study(case: Path, chance: random.Random) -> Commands:
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
    outcome = sorted(case.glob("study/points/*/*.json"))[0]
    content = json.loads(outcome.read_text())
    content[chance.choice(("status", "error", "command"))] = f"a{ESCAPE}\nb"
    outcome.write_text(json.dumps(content))
    return commands(case, "study")


def _escape_toml(case: Path, chance: random.Random) -> Commands:
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
    """Names that are no UTF-8, or as long as names may be."""
    what = chance.choice(("run", "study", "config.toml", "study.toml", "data.npz"))
    strange = os.fsdecode(
        chance.choice(
            (
                b"a\xff\xfeb",
                b"\xc3",
                b"a" * 255,
                "é\u202e".encode(),
                b"a b\\'\"$`;*",
                b"-",
            )
        )
    )
    if chance.random() < 0.3:  # a user's file in the folder
        (case / "run" / strange).write_text("my own")
        return commands(case, "run")
    return _renamed(case, what, strange, chance)


CASES: dict[str, Change] = {
    "JSON broken": break_json, "JSON retyped": retype_json, "sparse files": sparse, "FIFOs": fifo, "devices": device,
    "links": link, "npz members": npz, "TOML": toml, "escapes": escape, "names": rename,
}  # fmt: skip


def prepare(originals: Path, case: Path, kind: str, chance: random.Random) -> Commands:
    """Copy the originals, change them, and return the commands that get them."""
    shutil.rmtree(case, ignore_errors=True)
    shutil.copytree(originals / "cases", case)
    canaries.build(case / "outside")
    return CASES[kind](case, chance)


# Who gets it.


def limit_runs(originals: Path) -> None:
    """Have only those runs go on, or begin, whose options are the originals': others
    may be of any length.
    """
    from hpcfed import cli
    from hpcfed.config import Settings
    from hpcfed.experiment import loop

    begin = loop.run
    known = cli.parse_run(["--resume", str(originals / "cases/run")]).flat()
    quick = cli.parse_run(["--dataset", "digits", *QUICK]).flat()

    def limited(settings: Settings, *words: Any) -> Path | None:
        free = ("out", "resume", "overwrite", "dataset")
        asked = {
            name: value for name, value in settings.flat().items() if name not in free
        }
        same = any(
            asked == {name: like[name] for name in asked if name in like}
            for like in (known, quick)
        )
        return begin(settings, *words) if same else None

    loop.run = limited  # type: ignore[assignment]


def start(words: list[str]) -> tuple[str, str]:
    """Start a command in this process; the outcome, and what it has said."""
    from hpcfed import cli

    raw = io.BytesIO(), io.BytesIO()
    streams = [
        io.TextIOWrapper(file, "utf-8", errors="backslashreplace") for file in raw
    ]
    code: Any = 0
    try:
        with (
            contextlib.redirect_stdout(streams[0]),
            contextlib.redirect_stderr(streams[1]),
        ):
            cli.main(words)
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        return "tracebacks", traceback.format_exc()
    for stream in streams:
        stream.flush()
    return judge(code, *(file.getvalue().decode(errors="replace") for file in raw))


def judge(code: Any, out: str, err: str) -> tuple[str, str]:
    """What a command's exit code and words amount to."""
    if "Traceback (most" in err or code not in (0, 1, 2):
        return "tracebacks", err[-2000:]
    if any(
        not (letter in "\n\t" or letter.isprintable() or letter > "\x9f")
        for letter in out + err
    ):
        return "raw escapes", repr((out + err)[-2000:])
    # A report names every file that it leaves out; a run may have begun to speak before
    # it is refused.
    lines = [
        line for line in err.splitlines() if not line.startswith("hpcfed: left out: ")
    ]
    refusals = [line for line in lines if line.startswith("hpcfed: ")]
    if code == 2 and (out or len(refusals) != 1 or refusals != lines[-1:]):
        return "many lines", err[-2000:]
    return ("refused in one line", err) if code == 2 else ("read fine", "")


def start_all(asked: Commands) -> tuple[str, str]:
    """Start commands one after the other; the worst outcome."""
    found = [start(words) for words in asked]
    order = (
        "tracebacks",
        "raw escapes",
        "many lines",
        "refused in one line",
        "read fine",
    )
    worst = min(found, key=lambda one: order.index(one[0]))
    words = asked[found.index(worst)]
    return worst[0], f"hpcfed {' '.join(words)!r}: {worst[1]}"
