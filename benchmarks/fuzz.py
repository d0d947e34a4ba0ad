"""What damaged and hostile files do to whoever reads them: one line and exit 2, or
figures; nothing else.

Real HDF5 files (a run's, its snapshots', its server's, a study's) are changed in many
ways, byte by byte and through h5py, and handed to all that reads them: show, report and
its exports, resume. Other cases are about everything else that is handed in: JSON,
TOML, npz, names, texts with control characters, and what is no plain file (a terabyte
of nothing, FIFOs, devices, links); commands get them as the program itself would start
them. See benchmarks/cases.py.

A process of its own reads, so that a crash of libhdf5 is one more row of the table. It
may take 2 GiB of memory, and 20 seconds for a file; more is a traceback or a hang.
Files outside the case's own folder must stay as they are.

example:
  python benchmarks/fuzz.py --files 5000
"""

import argparse
import io
import json
import os
import random
import resource
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import canaries
import cases
import h5py
import numpy as np
from cases import CASES

from hpcfed.errors import UserError, printable

FILES = ("run", "study", "params", "server")
OUTCOMES = (
    "read fine", "refused in one line", "tracebacks", "crashes", "hangs", "many lines", "raw escapes",
    "touched outside",
)  # fmt: skip
"""The first two are as they should be."""
PATIENCE = 20.0
"""Seconds."""
COMMANDS = "commands"
"""What the reader gets in place of a kind of file where it is to start commands."""
MEMORY = 2 * 2**30
"""Bytes that a reader may have beyond what it has at the start."""
SIZE = ["--clients", "4", "--model", "mlp", "--epochs", "1", "--rounds", "3"]
SERVER = [
    "--method", "pfedgpa", "--server-width", "8", "--server-latent", "4", "--server-depth", "1", "--bank-rounds", "2",
    "--diffusion-steps", "10", "--inversion-depth", "5",
    "--server-engine", "torch", "--autoencoder-samples", "40", "--denoiser-samples", "40", "--server-batch", "20",
]  # fmt: skip
STUDY = """title = "two points"
[common]
model = "mlp"
rounds = 3
epochs = 1
target_accuracy = 50
[sweep]
clients = [3, 4]
"""


def make_originals(folder: Path) -> None:
    """One file of each kind, by real runs in this process."""
    from hpcfed import cli
    from hpcfed.study.gather import Outcome, write_outcome, write_study
    from hpcfed.study.plan import points, read_study, trials

    out = sys.stdout
    try:
        sys.stdout = io.StringIO()
        new = [
            "--new-clients",
            "2",
            "--guided-start",
            "5",
            "--snapshot-every",
            "1",
            "--target-accuracy",
            "50",
        ]
        cli.main(["run", *SERVER, *SIZE, *new, "--out", str(folder / "made")])
        (folder / "study.toml").write_text(STUDY)
        study = read_study(folder / "study.toml")
        every = trials(study, points(study, folder / "study.toml"), folder)
        for trial in every:
            cli.main(trial.words)
            write_outcome(
                trial, Outcome("complete", "", 1.0, "hpcfed " + " ".join(trial.words))
            )
        write_study(folder / "study.h5", study, STUDY, every)
        cases.make_originals(folder)
    finally:
        sys.stdout = out
    for kind, name in {
        "run": "run.h5",
        "params": "params-0.h5",
        "server": "server.h5",
    }.items():
        shutil.copy(folder / "made" / name, folder / f"{kind}.h5")


# What is done to a file.


def flip(content: bytearray, random: random.Random) -> None:
    for _ in range(random.choice((1, 1, 2, 8, 64))):
        content[_place(content, random)] ^= 1 << random.randrange(8)


def overwrite(content: bytearray, random: random.Random) -> None:
    for _ in range(random.choice((1, 2, 4))):
        at = _place(content, random)
        value = random.choice(
            (
                b"\xff" * 8,
                b"\0" * 8,
                b"\x7f" * 4,
                random.randbytes(8),
                bytes([random.randrange(256)]),
            )
        )
        content[at : at + len(value)] = value


def truncate(content: bytearray, random: random.Random) -> None:
    del content[random.randrange(len(content)) :]


def swap(content: bytearray, random: random.Random) -> None:
    size = random.choice((8, 64, 512, 4096))
    one, other = (
        random.randrange(max(1, len(content) - size)) // 8 * 8 for _ in range(2)
    )
    content[one : one + size], content[other : other + size] = (
        content[other : other + size],
        content[one : one + size],
    )


def zero(content: bytearray, random: random.Random) -> None:
    size, at = random.choice((8, 64, 512, 4096)), _place(content, random)
    content[at : at + size] = bytes(len(content[at : at + size]))


def _place(content: bytearray, random: random.Random) -> int:
    """Half of them where a file says what it holds."""
    return random.randrange(
        len(content) if random.random() < 0.5 else min(len(content), 8192)
    )


def _items(file: h5py.File, kind: type = object) -> list[str]:
    names: list[str] = []
    file.visititems(
        lambda name, item: names.append(name) if isinstance(item, kind) else None
    )
    return names


def delete(file: h5py.File, random: random.Random) -> None:
    del file[random.choice(_items(file))]


def rename(file: h5py.File, random: random.Random) -> None:
    one, other = random.sample(_items(file), 2)
    if random.random() < 0.5:
        file.move(one, one + random.choice(("x", " ", "\n", "é", "<script>")))
    elif not other.startswith(one) and not one.startswith(other):
        del file[other]
        file.move(one, other)


def retype(file: h5py.File, random: random.Random) -> None:
    name = random.choice(_items(file, h5py.Dataset))
    shape = file[name].shape
    del file[name]
    kinds: list[Any] = [
        "i1",
        "u8",
        ">f4",
        "f2",
        "c16",
        "S5",
        "?",
        "O",
        [("a", "f8"), ("b", "i4")],
        h5py.ref_dtype,
    ]
    kinds += [
        h5py.vlen_dtype("f8"),
        h5py.enum_dtype({"A": 1, "B": 2}),
        h5py.opaque_dtype(np.dtype("M8[s]")),
        "g",
    ]
    kind = random.choice(kinds)
    if random.random() < 0.2:
        file[name] = h5py.Empty("f8")
    elif random.random() < 0.2:
        file.create_group(name)
    else:
        file.create_dataset(name, shape, h5py.string_dtype() if kind == "O" else kind)


def reshape(file: h5py.File, random: random.Random) -> None:
    name = random.choice(_items(file, h5py.Dataset))
    data = file[name]
    dtype, shape = data.dtype, list(data.shape)
    del file[name]
    change = random.randrange(5)
    if change == 0 or not shape:
        shape.append(random.choice((0, 1, 3)))
    elif change == 1:
        shape.pop()
    else:
        shape[random.randrange(len(shape))] = random.choice((0, 1, 2, 7, 2**20))
    file.create_dataset(
        name,
        shape,
        dtype,
        chunks=tuple(min(n, 8) for n in shape) if all(shape) and shape else None,
    )


def huge(file: h5py.File, random: random.Random) -> None:
    """Shapes that the file declares and does not hold; and a run that says it has so
    many rounds.
    """
    name = random.choice(_items(file, h5py.Dataset))
    dtype, dimensions = file[name].dtype, max(1, len(file[name].shape))
    del file[name]
    length = random.choice((2**31, 2**40, 2**50))
    file.create_dataset(
        name,
        (length, *[4] * (dimensions - 1)),
        dtype,
        chunks=(1024, *[1] * (dimensions - 1)),
    )
    for attribute in ("rounds_done", "clients", "ranks", "columns"):
        if attribute in file.attrs and random.random() < 0.3:
            file.attrs[attribute] = length
    if "config" in file and random.random() < 0.5 and file["config"].shape == ():
        config = json.loads(file["config"].asstr()[()])
        _replace(file, "config", json.dumps(config | {"rounds": length}))


def attribute(file: h5py.File, random: random.Random) -> None:
    attributes = random.choice([file, *(file[name] for name in _items(file))]).attrs
    name = random.choice([*attributes, "more"])
    match random.randrange(4):
        case 0:
            attributes.pop(name, None)
        case 1:
            attributes[name] = random.choice(
                ("x" * 60000, "\ud800".encode("utf-8", "surrogatepass"), b"\xff\xfe")
            )
        case 2:
            attributes[name] = random.choice(
                (
                    -1,
                    2**62,
                    1.5,
                    float("nan"),
                    True,
                    [1, 2],
                    np.zeros(5000),
                    "",
                    "<b>'\"",
                )
            )
        case _:
            for number in range(random.choice((20, 1200))):
                attributes[f"more {number}"] = number


def numbers(file: h5py.File, random: random.Random) -> None:
    """Numbers that cannot be."""
    names = [
        name
        for name in _items(file, h5py.Dataset)
        if file[name].dtype.kind in "fiu" and file[name].size
    ]
    data = file[random.choice(names)]
    values = data[()].reshape(-1) if data.shape else np.array([data[()]])
    bad = (
        [0, -1, 1e-300, 1e300, float("inf"), float("nan"), 2**53]
        if data.dtype.kind == "f"
        else [0, -1, 2**30]
    )
    many = random.choice((1, len(values)))
    for _ in range(many):
        with np.errstate(over="ignore"):
            values[random.randrange(len(values))] = np.array(random.choice(bad)).astype(
                values.dtype
            )
    data[...] = values.reshape(data.shape)


def words(file: h5py.File, random: random.Random) -> None:
    """Text and JSON that say something else."""
    names = [
        name
        for name in _items(file, h5py.Dataset)
        if h5py.check_string_dtype(file[name].dtype)
    ]
    name = random.choice(names)
    strange = [
        "",
        "{}",
        "[]",
        "null",
        "[" * 50000,
        '{"a": ' * 5000,
        "\x1b[2J\n",
        "<script>alert(1)</script>",
        "x" * 10**6,
    ]
    if file[name].shape:
        values = file[name].asstr()[()]
        values[random.randrange(len(values))] = random.choice(strange)
        _replace(file, name, values)
    elif name.endswith(("config", "environment", "options")) and random.random() < 0.8:
        content = json.loads(file[name].asstr()[()])
        key = random.choice(list(content))
        wrong: list[Any] = [
            None,
            -1,
            10**30,
            1e308,
            "../../x",
            "/etc",
            "\ud800",
            [],
            {},
            [[1]],
            True,
            "<i>\"'",
            "1",
            0.5,
        ]
        content[key] = random.choice(wrong)
        if random.random() < 0.3:
            del content[key]
        _replace(file, name, json.dumps(content))
    else:
        _replace(file, name, random.choice(strange))


def _replace(file: h5py.File, name: str, value: Any) -> None:
    del file[name]
    file[name] = (
        value if isinstance(value, str) else np.array(value, dtype=h5py.string_dtype())
    )


def link(file: h5py.File, random: random.Random) -> None:
    """To other files, to nowhere, and in circles."""
    name = random.choice(_items(file))
    secret = str(Path(file.filename).with_name("secret.h5"))
    shape = getattr(file[name], "shape", None) or (4,)
    place = name if random.random() < 0.7 else name + " more"
    if place == name:
        del file[name]
    match random.randrange(6):
        case 0:
            file[place] = h5py.ExternalLink(secret, "/" + name)
        case 1:
            file[place] = h5py.SoftLink(
                random.choice(("/nowhere", "/" + place, "/", "../x"))
            )
        case 2:
            file[place] = file["/"]
        case 3:
            layout = h5py.VirtualLayout(shape, "f8")
            layout[...] = h5py.VirtualSource(secret, "data", shape)
            file.create_virtual_dataset(place, layout)
        case 4:
            file.create_dataset(
                place, shape, "f8", external=[("/etc/passwd", 0, h5py.h5f.UNLIMITED)]
            )
        case _:
            file.create_dataset(
                place,
                (2**16,),
                "f8",
                data=np.zeros(2**16),
                compression="gzip",
                compression_opts=9,
            )


BYTES: dict[str, Callable[[bytearray, random.Random], None]] = {
    "bits flipped": flip, "bytes overwritten": overwrite, "truncated": truncate, "blocks swapped": swap,
    "blocks zeroed": zero,
}  # fmt: skip
OBJECTS: dict[str, Callable[[h5py.File, random.Random], None]] = {
    "deleted": delete, "renamed": rename, "retyped": retype, "reshaped": reshape, "huge shapes": huge,
    "attributes": attribute, "numbers": numbers, "texts": words, "links and filters": link,
}  # fmt: skip
KINDS = (*BYTES, *OBJECTS)
"""Changes to HDF5 files."""
ALL = (*KINDS, *CASES)


def mutate(original: Path, path: Path, kind: str, random: random.Random) -> None:
    """The original, changed, under another name."""
    path.unlink(missing_ok=True)
    if kind in BYTES:
        content = bytearray(original.read_bytes())
        BYTES[kind](content, random)
        path.write_bytes(content)
        return
    shutil.copy(original, path)
    with h5py.File(path, "r+") as file:
        for number in range(random.choice((1, 1, 1, 2, 5))):
            with suppress(
                *(
                    (LookupError, ValueError, OSError, TypeError, RuntimeError)
                    if number
                    else ()
                )
            ):  # of what is changed already
                OBJECTS[kind](file, random)


# Who reads it.


class Readers:
    """All that reads a kind of file, with what it needs."""

    def __init__(self, originals: Path) -> None:
        from hpcfed.record import safe
        from hpcfed.record.reading import read_run
        from hpcfed.report import collect

        self._tried: set[int] = set()
        self._try_out = safe.try_out
        safe.try_out = collect.try_out = (
            self.try_once
        )  # every command does it, and once is enough here
        self._made = read_run(originals / "made")
        with h5py.File(originals / "params.h5") as file:
            self._rows = {name: file[name][()] for name in ("client", "round", "rows")}
        with h5py.File(originals / "server.h5") as file:
            self._widths = [int(width) for width in file.attrs["widths"]]

    def try_once(self, paths: Iterable[Path]) -> None:
        for path in paths:
            if path.stat().st_mtime_ns not in self._tried:
                self._try_out([path])
                self._tried.add(path.stat().st_mtime_ns)

    def __call__(self, kind: str, path: Path) -> None:
        """Reads a file as every command would that gets it; the first refusal is
        raised.
        """
        from hpcfed.record.safe import try_out

        ways = {
            "run": (self.show, self.report, self.resume, self.restore),
            "study": (self.report,),
            "params": (self.go_on,),
            "server": (self.load,),
        }
        refusals = []
        if kind in ("params", "server"):  # as --resume does with all files of a folder
            try_out([path])
        for read in ways[kind]:
            try:
                read(path)
            except UserError as error:
                refusals.append(error)
                if read == self.resume:  # nothing is restored then
                    break
        if refusals:
            raise refusals[0]

    def show(self, path: Path) -> None:
        from rich.console import Console

        from hpcfed.record.reading import read_run
        from hpcfed.record.safe import try_out
        from hpcfed.report.console import show

        try_out([path])
        record = read_run(path.parent)
        with open(os.devnull, "w") as nowhere:
            show(record, Console(file=nowhere, width=120))
        json.dumps(record.summary())

    def report(self, path: Path) -> None:
        from hpcfed.report.collect import find, groups
        from hpcfed.report.command import page
        from hpcfed.report.exports import (
            csv_text,
            extrap_text,
            json_text,
            ranks_csv_text,
        )

        found = find([path])
        if found.unread:
            raise UserError(found.unread[0])
        if found.samples:
            every = groups(found.samples)
            tables = csv_text(every), ranks_csv_text(every)
            for text in (
                page(every, found),
                *tables,
                json_text(every),
                extrap_text(every),
            ):
                text.encode()

    def resume(self, path: Path) -> None:
        from hpcfed import cli
        from hpcfed.config import check
        from hpcfed.runtime.launcher import Launch

        check(cli.parse_run(["--resume", str(path.parent)]), Launch("none", 0, 1))

    def restore(self, path: Path) -> None:
        from hpcfed.record.results import ResultsWriter

        made, clients = self._made, {"rank": np.zeros(4, int)}
        results = ResultsWriter(
            path.parent,
            settings=made.config,
            environment={"command": ["hpcfed"]},
            clients=clients,
            ranks=1,
            facts={"columns": 3, "data": made.facts["data"]},
            resumed=True,
        )
        try:
            results.restore(path, 2)
        finally:
            results._file.close()

    def go_on(self, path: Path) -> None:
        from hpcfed.models.layout import Entry, Layout
        from hpcfed.record.snapshots import SnapshotWriter

        clients, rounds, rows = (
            self._rows["client"],
            self._rows["round"],
            self._rows["rows"][0],
        )
        layout = Layout(
            (Entry("fc.weight", rows.shape[1:], 0, rows.shape[1], True),), "fc"
        )
        folder = path.parent / "resumed"
        folder.mkdir(exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        shutil.copy(path, folder / "params-0.h5")
        writer = SnapshotWriter(
            folder,
            0,
            clients=clients,
            layout=layout,
            rounds=rounds,
            dtype=rows.dtype,
            root=True,
        )
        try:
            writer.begin(int(rounds[-1]), lambda: None)
            writer.write_rows(int(rounds[-1]), np.arange(len(rows)), rows)
            writer.close_round(int(rounds[-1]), rows[0])
        finally:
            writer.close()

    def load(self, path: Path) -> None:
        import torch

        from hpcfed.server.latent_diffusion import LatentDiffusion
        from hpcfed.server.options import ServerOptions
        from hpcfed.server.slot import RankSlot

        own = {
            name: value
            for name, value in self._made.config.items()
            if name in ServerOptions.model_fields
        }
        model = LatentDiffusion(
            self._widths, ServerOptions(**own), RankSlot(torch.device("cpu")), seed=0
        )
        model.load(path)
        model.sample(2)


def read(originals: Path, kinds: Iterable[str]) -> None:
    """In a process of its own: on every line a file's kind and path come in, and what
    became of it goes out.
    """
    readers = Readers(originals)
    for kind in kinds:
        _warm_up(readers, kind, originals)
    here = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf(
        "SC_PAGE_SIZE"
    )
    resource.setrlimit(resource.RLIMIT_AS, (here + MEMORY, resource.RLIM_INFINITY))
    answers, sys.stdout = sys.stdout, sys.stderr
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        kind, what = json.loads(line)
        told = (
            cases.start_all(what)
            if kind == COMMANDS
            else _told(readers, kind, Path(what))
        )
        print(json.dumps(told), file=answers, flush=True)


def _warm_up(readers: Readers, kind: str, originals: Path) -> None:
    """Import all that reading needs, before memory is counted."""
    if kind != COMMANDS:
        _told(
            readers,
            kind,
            originals / f"{kind}.h5" if kind != "run" else originals / "made/run.h5",
        )
        return
    cases.limit_runs(originals)
    with tempfile.TemporaryDirectory() as folder:
        case = Path(folder) / "case"
        shutil.copytree(originals / "cases", case)
        for what in ("run", "study", "config.toml", "study.toml", "data.npz"):
            cases.start_all(cases.commands(case, what))


def _told(readers: Readers, kind: str, path: Path) -> tuple[str, str]:
    try:
        readers(kind, path)
    except UserError as error:
        return "refused in one line", printable(str(error))
    except Exception:
        return "tracebacks", traceback.format_exc()
    return "read fine", ""


class Process:
    """A reader that is started anew when it has gone."""

    def __init__(self, originals: Path, kinds: tuple[str, ...]) -> None:
        self._originals, self._kinds = originals, kinds
        self._process: subprocess.Popen[str] | None = None

    def __call__(self, kind: str, what: str | cases.Commands) -> tuple[str, str]:
        if self._process is None:
            words = [
                sys.executable,
                __file__,
                "--reader",
                str(self._originals),
                ",".join(self._kinds),
            ]
            self._process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            self._answer(120)
        assert self._process.stdin is not None
        print(json.dumps((kind, what)), file=self._process.stdin, flush=True)
        told = self._answer(PATIENCE)
        if told:
            outcome, why = json.loads(told)
            return outcome, why
        hung = self._process.poll() is None and told is None
        self.end()
        return ("hangs", "") if hung else ("crashes", "")

    def _answer(self, patience: float) -> str | None:
        """A line; none when the process has gone, None when it takes too long."""
        assert self._process is not None and self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], patience)
        return self._process.stdout.readline() if ready else None

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Campaign:
    """Changed files of all kinds in turn, and what became of each."""

    def __init__(
        self,
        originals: Path,
        folder: Path,
        kinds: Sequence[str],
        seed: int,
        keep: Path | None,
    ) -> None:
        self._originals, self._folder, self._kinds, self._seed, self._keep = (
            originals,
            folder,
            kinds,
            seed,
            keep,
        )
        self._light = Process(originals, FILES[:2])  # torch makes forks slow
        self._heavy = Process(originals, FILES[2:])
        self._commands = Process(originals, (COMMANDS,))
        self.table: dict[str, Counter[str]] = defaultdict(Counter)

    def one(self, number: int) -> None:
        """Change a file and have it read."""
        kind, chance = (
            self._kinds[number % len(self._kinds)],
            random.Random(f"{self._seed} {number}"),
        )
        what = (
            "case" if kind in CASES else FILES[number // len(self._kinds) % len(FILES)]
        )
        outcome, why = (
            self._case(kind, chance)
            if kind in CASES
            else self._file(kind, what, chance)
        )
        self.table[kind][outcome] += 1
        if outcome not in OUTCOMES[:2]:
            print(
                f"{what}, {kind}, number {number}: {outcome}\n{why}",
                file=sys.stderr,
                flush=True,
            )
            if self._keep is not None:
                self._keep_file(f"{number}-{what}")

    def _file(self, kind: str, what: str, chance: random.Random) -> tuple[str, str]:
        path = self._path(what)
        mutate(self._originals / f"{what}.h5", path, kind, chance)
        return (self._light if what in FILES[:2] else self._heavy)(what, str(path))

    def _path(self, what: str) -> Path:
        return self._folder / ("study.h5" if what == "study" else "run.h5")

    def _case(self, kind: str, chance: random.Random) -> tuple[str, str]:
        case = self._folder / "case"
        asked = cases.prepare(self._originals, case, kind, chance)
        before = canaries.snapshot(case / "outside")
        outcome, why = self._commands(COMMANDS, asked)
        if outcome in ("hangs", "crashes"):
            why = "; ".join(f"hpcfed {' '.join(words)!r}" for words in asked)
        if names := canaries.touched(before, canaries.snapshot(case / "outside")):
            return "touched outside", f"{', '.join(names)}; {why}"
        return outcome, why

    def _keep_file(self, name: str) -> None:
        """Keep what was not read as it should; of a case only how to make it again,
        since it may be endless.
        """
        assert self._keep is not None
        self._keep.mkdir(parents=True, exist_ok=True)
        what = name.partition("-")[2]
        if what in FILES:
            shutil.copy(self._path(what), self._keep / f"{name}.h5")

    def end(self) -> None:
        """End the readers."""
        for process in (self._light, self._heavy, self._commands):
            process.end()


def campaign(
    originals: Path,
    files: int,
    seed: int,
    keep: Path | None = None,
    kinds: Sequence[str] = ALL,
    jobs: int = 1,
) -> dict[str, Counter[str]]:
    """How many files of every kind of change had which outcome; what is kept are those
    that are nobody's wish.
    """
    table: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    over = threading.Event()

    def share(first: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            own = Campaign(originals, Path(folder), kinds, seed, keep)
            try:
                for number in range(first, files, jobs):
                    if over.is_set():
                        break
                    own.one(number)
            finally:
                own.end()
                for kind, outcomes in own.table.items():
                    table[kind].update(outcomes)

    with ThreadPoolExecutor(jobs) as pool:
        shares = [pool.submit(share, first) for first in range(jobs)]
        try:
            for one in shares:
                one.result()
        except KeyboardInterrupt:
            over.set()
            print("interrupted; so far:", file=sys.stderr)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--files",
        type=int,
        default=5000,
        metavar="N",
        help="changed files (default: 5000)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--kinds", metavar="A,B", help="only these, of " + ", ".join(ALL)
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=2,
        metavar="N",
        help="readers at a time (default: 2)",
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help="where to put files that were not read as they should",
    )
    parser.add_argument("--reader", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.reader is not None:
        read(Path(options.reader[0]), options.reader[1].split(","))
        return
    kinds = options.kinds.split(",") if options.kinds else ALL
    if strange := set(kinds) - set(ALL):
        parser.error(f"unknown kind {sorted(strange)[0]}; there are {', '.join(ALL)}")
    with tempfile.TemporaryDirectory() as folder:
        make_originals(Path(folder))
        table = campaign(
            Path(folder), options.files, options.seed, options.keep, kinds, options.jobs
        )
    print(
        f"{'change':20}{'files':>7}" + "".join(f"  {outcome}" for outcome in OUTCOMES)
    )
    for kind, outcomes in (*table.items(), ("all", sum(table.values(), Counter()))):
        counts = "".join(
            f"  {outcomes[outcome]:{len(outcome)}}" for outcome in OUTCOMES
        )
        print(f"{kind:20}{outcomes.total():7}{counts}")
    if any(
        outcomes[outcome] for outcomes in table.values() for outcome in OUTCOMES[2:]
    ):
        sys.exit(1)


if __name__ == "__main__":
    main()
