"""The commands that get a case, started in this process as the program itself would
start them.
"""

import contextlib
import io
import random
import traceback
from pathlib import Path
from typing import Any

Commands = list[list[str]]
"""The words of each command."""
QUICK = [
    "--rounds", "1", "--clients", "2", "--model", "mlp", "--epochs", "1", "--device", "cpu",
]  # fmt: skip


WORST_FIRST = (
    "tracebacks", "raw escapes", "many lines", "refused in one line", "read fine",
)  # fmt: skip
"""Outcomes of a command."""


def commands(case: Path, what: str, chance: random.Random | None = None) -> Commands:
    """Return the commands that get one of the copies: all of them, or two by chance."""
    page = ["--out", str(case / "page.html")]
    run, study = str(case / "run"), str(case / "study")
    out = ["--out", str(case / "out")]
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


def limit_runs(originals: Path) -> None:
    """Let only those runs begin or go on whose options are the originals': others may
    be of any length.
    """
    from hpcfed import cli
    from hpcfed.experiment import run as experiment
    from hpcfed.options import Settings

    begin = experiment.run
    known = cli.parse_run(["--resume", str(originals / "cases/run")]).flat()
    quick = cli.parse_run(["--dataset", "digits", *QUICK]).flat()

    def limited(settings: Settings, *words: Any) -> Path | None:
        free = ("out", "resume", "overwrite", "dataset")
        asked = dict(settings.flat())
        for name in free:
            asked.pop(name, None)
        for like in (known, quick):
            if asked == {name: like[name] for name in asked if name in like}:
                return begin(settings, *words)
        return None

    experiment.run = limited  # type: ignore[assignment]


def start(words: list[str]) -> tuple[str, str]:
    """Start a command in this process; return the outcome, and what it has said."""
    from hpcfed import cli

    raw = io.BytesIO(), io.BytesIO()
    streams = [
        # As a terminal: what cannot be written is escaped.
        io.TextIOWrapper(file, "utf-8", errors="backslashreplace")
        for file in raw
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
    """Return what a command's exit code and words amount to, and the words where they
    are bad.
    """
    if "Traceback (most" in err or code not in (0, 1, 2):
        return "tracebacks", err[-2000:]
    # Control characters are those up to 9f that are not printable.
    letters = set(out + err) - set("\n\t")
    if any(letter <= "\x9f" and not letter.isprintable() for letter in letters):
        return "raw escapes", repr((out + err)[-2000:])
    # A report names every file that it leaves out; a run may have begun to speak before
    # it is refused.
    left_out = "hpcfed: left out: "
    lines = [line for line in err.splitlines() if not line.startswith(left_out)]
    refusals = [line for line in lines if line.startswith("hpcfed: ")]
    if code == 2 and (out or len(refusals) != 1 or refusals != lines[-1:]):
        return "many lines", err[-2000:]
    return ("refused in one line", err) if code == 2 else ("read fine", "")


def start_all(asked: Commands) -> tuple[str, str]:
    """Start commands one after the other, and return the worst outcome."""
    found = [start(words) for words in asked]
    worst = min(found, key=lambda one: WORST_FIRST.index(one[0]))
    words = asked[found.index(worst)]
    outcome, said = worst
    return outcome, f"hpcfed {' '.join(words)!r}: {said}"
