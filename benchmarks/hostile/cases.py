"""Folders, files, texts and names that somebody else has made, and the commands that
get them.

A case is a copy of real files (a run that was stopped, a study, a config, a data set)
in which one thing is changed. All commands that would meet it are started in the
reader's process, as the program itself would start them.
"""

import random
import shutil
from pathlib import Path

import h5py
import numpy as np

from benchmarks.faults import canaries
from benchmarks.hostile.commands import Commands
from benchmarks.hostile.files import device, fifo, link, npz, plain_arrays, sparse
from benchmarks.hostile.texts import (
    Change,
    break_json,
    escape,
    newest_checkpoint,
    rename,
    retype_json,
    toml,
)

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
    """Add what cases begin with to the originals of benchmarks/hostile/fuzz.py, by real runs in
    this process.
    """
    from hpcfed import cli

    folder = folder / "cases"
    run = folder / "run"
    cli.main([*STOPPED, "--out", str(run)])
    with h5py.File(run / "run.h5", "r+") as file:
        # A run that can be resumed, without waiting for a signal.
        file.attrs["status"] = "stopped"
    shutil.rmtree(newest_checkpoint(run))  # the last round is left to do
    (folder / "config.toml").write_text(CONFIG)
    shutil.copy(folder.parent / "study.toml", folder)
    (folder / "study").mkdir()
    shutil.copy(folder.parent / "study.h5", folder / "study")
    shutil.copytree(folder.parent / "points", folder / "study/points")
    np.savez(folder / "data.npz", **plain_arrays())


CASES: dict[str, Change] = {
    "JSON broken": break_json, "JSON retyped": retype_json, "sparse files": sparse, "FIFOs": fifo, "devices": device,
    "links": link, "npz members": npz, "TOML": toml, "escapes": escape, "names": rename,
}  # fmt: skip


def prepare(originals: Path, case: Path, kind: str, chance: random.Random) -> Commands:
    """Copy the originals, change them, and return the commands that get them."""
    shutil.rmtree(case, ignore_errors=True)
    shutil.copytree(originals / "cases", case)
    # What links lead to: no command may touch it.
    canaries.build(case / "outside")
    return CASES[kind](case, chance)
