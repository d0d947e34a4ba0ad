"""Read damaged files as every command would, in a process of its own."""

import json
import os
import resource
import select
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterable
from pathlib import Path

import h5py
import numpy as np

from benchmarks import launching
from benchmarks.hostile import cases
from benchmarks.hostile import commands as case_commands
from hpcfed.errors import UserError, printable

FILES = ("run", "study", "params", "server")
PATIENCE = 20.0
"""Seconds that a reader may take for a file."""
COMMANDS = "commands"
"""What the reader gets in place of a kind of file where it is to start commands."""
MEMORY = 2 * 2**30
"""Bytes that a reader may have beyond what it has at the start."""


class Readers:
    """All that reads a kind of file, with what it needs."""

    def __init__(self, originals: Path) -> None:
        from hpcfed.analysis import collect
        from hpcfed.results import sandbox
        from hpcfed.results.stored import read_run

        self._tried: set[int] = set()
        self._try_out = sandbox.try_out
        # Every command tries its files out in a fork. Once is enough here.
        sandbox.try_out = collect.try_out = self.try_once
        self._made = read_run(originals / "made")
        with h5py.File(originals / "params.h5") as file:
            self._rows = {name: file[name][()] for name in ("client", "round", "rows")}
        with h5py.File(originals / "server.h5") as file:
            self._widths = [int(width) for width in file.attrs["widths"]]

    def try_once(self, paths: Iterable[Path]) -> None:
        """Try a file out in a process of its own, as every command does, but only once."""
        for path in paths:
            if path.stat().st_mtime_ns not in self._tried:
                self._try_out([path])
                self._tried.add(path.stat().st_mtime_ns)

    def __call__(self, kind: str, path: Path) -> None:
        """Read a file as every command would that gets it; raise the first refusal."""
        from hpcfed.results.sandbox import try_out

        ways = {
            "run": (self.show, self.report, self.resume, self.restore),
            "study": (self.report,),
            "params": (self.go_on,),
            "server": (self.load,),
        }
        refusals = []
        # As --resume does with all files of a folder.
        if kind in ("params", "server"):
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
        """Read a run as `hpcfed show` does."""
        from rich.console import Console

        from hpcfed.analysis.render.show import show
        from hpcfed.results.as_json import run_summary
        from hpcfed.results.sandbox import try_out
        from hpcfed.results.stored import read_run

        try_out([path])
        record = read_run(path.parent)
        with open(os.devnull, "w") as nowhere:
            show(record, Console(file=nowhere, width=120))
        json.dumps(run_summary(record))

    def report(self, path: Path) -> None:
        """Read a run or a study as `hpcfed report` does, exports included."""
        from hpcfed.analysis.collect import find
        from hpcfed.analysis.command import content_of
        from hpcfed.analysis.groups import groups
        from hpcfed.analysis.render.exports import (
            csv_text,
            extrap_text,
            json_text,
            ranks_csv_text,
            telemetry_csv_text,
        )
        from hpcfed.analysis.render.page import page

        found = find([path])
        if found.unread:
            raise UserError(found.unread[0])
        if found.processes:
            every = groups(found.processes)
            tables = csv_text(every), ranks_csv_text(every), telemetry_csv_text(every)
            for text in (
                page(content_of(every, found)),
                *tables,
                json_text(every),
                extrap_text(every),
            ):
                text.encode()

    def resume(self, path: Path) -> None:
        """Read a run as `hpcfed run --resume` does before anything starts."""
        from hpcfed import cli
        from hpcfed.options import check
        from hpcfed.runtime.launcher import Launch

        check(cli.parse_run(["--resume", str(path.parent)]), Launch("none", 0, 1))

    def restore(self, path: Path) -> None:
        """Restore a run's results from its file, as a resumed run does."""
        from hpcfed.results.results import ResultsWriter

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
        """Continue snapshots in a damaged file, as a resumed run does."""
        from hpcfed.models.layout import Entry, Layout
        from hpcfed.results.snapshots import SnapshotWriter

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
        """Load the server's model, and sample from it."""
        import torch

        from hpcfed.server.latent_diffusion import LatentDiffusion
        from hpcfed.server.options import ServerOptions
        from hpcfed.server.training_plan import RankSlot

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
    """Answer for ever: a file's kind and path come in on a line, and what became of it
    goes out.
    """
    readers = Readers(originals)
    for kind in kinds:
        warm_up(readers, kind, originals)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    # What commands print must not mix with the answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        kind, what = json.loads(line)
        if kind == COMMANDS:
            answer = case_commands.start_all(what)
        else:
            answer = outcome_of(readers, kind, Path(what))
        print(json.dumps(answer), file=answers, flush=True)


def warm_up(readers: Readers, kind: str, originals: Path) -> None:
    """Import all that reading needs, before memory is counted."""
    if kind != COMMANDS:
        outcome_of(
            readers,
            kind,
            originals / f"{kind}.h5" if kind != "run" else originals / "made/run.h5",
        )
        return
    case_commands.limit_runs(originals)
    with tempfile.TemporaryDirectory() as folder:
        case = Path(folder) / "case"
        shutil.copytree(originals / "cases", case)
        for what in ("run", "study", "config.toml", "study.toml", "data.npz"):
            case_commands.start_all(case_commands.commands(case, what))


def outcome_of(readers: Readers, kind: str, path: Path) -> tuple[str, str]:
    """Read a file, and return the outcome and what was said."""
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
        """Have a file read, or commands started; return the outcome and what was said."""
        if self._process is None:
            words = [sys.executable, "-m", "benchmarks.hostile.readers"]
            words += [str(self._originals), *self._kinds]
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=launching.environment(),
            )
            self._answer(120)
        assert self._process.stdin is not None
        print(json.dumps((kind, what)), file=self._process.stdin, flush=True)
        told = self._answer(PATIENCE)
        if told:
            outcome, why = json.loads(told)
            return outcome, why
        # No answer in time is a hang; an empty one means that the process has died.
        hung = self._process.poll() is None and told is None
        self.end()
        return ("hangs", "") if hung else ("crashes", "")

    def _answer(self, patience: float) -> str | None:
        """Return a line; an empty one when the process has gone, None when it takes too
        long.
        """
        assert self._process is not None and self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], patience)
        return self._process.stdout.readline() if ready else None

    def end(self) -> None:
        """Kill the reader."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


if __name__ == "__main__":
    read(Path(sys.argv[1]), sys.argv[2:])
