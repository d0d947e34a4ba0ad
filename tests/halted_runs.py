"""Runs whose server is stopped again and again while it learns.

Also a script: DeepSpeed decides once in a process on which device it is. Arguments are a
folder, a device, and ways of learning; the runs of each are `whole` and `cut` in a folder
of its name, and `seen.json` says where the latter was stopped.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpcfed.cli import parse_run
from hpcfed.experiment.run import run
from hpcfed.results import checkpoints
from hpcfed.results.folder import HALF_LEARNT, LEARNING
from hpcfed.results.stored import read_run
from hpcfed.runtime.signals import STOPPED, Stop
from tests.runs import flags
from tests.small_runs import OWN, SMALL

RUN: dict[str, Any] = {
    **SMALL,
    **OWN["pfedgpa"],
    "method": "pfedgpa",
    "clients": 3,
    "participation": 1.0,
    "rounds": 2,
    "bank_rounds": 2,
    "server_every": 1,
    "inversion_depth": 2,
    "diffusion_steps": 10,
    "deterministic": True,
    "telemetry": 0,
}
"""Learns after both rounds, in 5 steps of each network."""
LAST = {"server_every": 0}
"""Learns only after the last round, which takes half of the time."""
SPAN = {"server_model": "span"}
TOKENS = {**LAST, "server_model": "tokens", "server": "tiny", "server_latent": 16}
PLAIN: dict[str, dict[str, Any]] = {"p-diff": {}, "span": SPAN, "tokens": TOKENS}
BY_DEEPSPEED: dict[str, dict[str, Any]] = {
    "p-diff, ZeRO 3": {**LAST, "zero_stage": 3},
    "span, ZeRO 2, bf16": {
        **LAST,
        **SPAN,
        "zero_stage": 2,
        "server_precision": "bf16",
    },
    "tokens, ZeRO 1": {**TOKENS, "zero_stage": 1},
}


def options_of(**changed: Any) -> dict[str, Any]:
    options = {**RUN, **changed}
    if "server_model" in changed:
        del options["autoencoder_samples"]
    return options


def options_of_way(way: str) -> dict[str, Any]:
    if way in PLAIN:
        return options_of(**PLAIN[way])
    return options_of(**BY_DEEPSPEED[way], server_engine="deepspeed")


class StopWhileLearning(Stop):
    """Is asked to stop when the server, which learns, looks at it for the second time."""

    def __init__(self, folder: Path) -> None:
        self._sign, self._looks = folder / LEARNING, 0
        super().__init__()

    @property
    def asked(self) -> bool:
        # A sign is there while the server learns, and nothing else happens then.
        self._looks += self._sign.exists()
        return self._looks > 1

    @asked.setter
    def asked(self, value: bool) -> None: ...

    def after(self, round: int) -> bool:
        return False


def run_to(folder: Path, options: dict[str, Any], stop: Stop | None = None) -> bool:
    """Begin a run, or go on with it; return whether it was stopped."""
    words = ["--resume"] if folder.exists() else [*flags(**options), "--out"]
    try:
        run(parse_run([*words, str(folder)]), stop, quiet=True)
    except SystemExit as left:
        assert left.code == STOPPED
        return True
    return False


def stops(folder: Path, options: dict[str, Any]) -> Iterator[int]:
    """Stop and resume a run in one learning after another, until it is complete; yield
    the rounds before each.
    """
    while run_to(folder, options, StopWhileLearning(folder)):
        record = read_run(folder)
        assert record.status == "stopped" and (folder / HALF_LEARNT).is_file()
        # The last checkpoint is of the round before.
        newest = checkpoints.newest_rounds(folder)
        assert record.rounds_done == newest
        yield newest


def both(folder: Path, options: dict[str, Any]) -> list[int]:
    """Make a whole run, and one that is stopped; return where."""
    folder.mkdir()
    run_to(folder / "whole", options)
    return list(stops(folder / "cut", options))


if __name__ == "__main__":
    for way in sys.argv[3:]:
        there = Path(sys.argv[1], way)
        seen = both(there, {**options_of_way(way), "device": sys.argv[2]})
        (there / "seen.json").write_text(json.dumps(seen))
