"""Runs that tests make in this process, what they recorded, and what is equal in two
of them.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hpcfed import cli
from hpcfed.experiment import loop
from hpcfed.experiment.assemble import Setup, assemble
from hpcfed.experiment.evaluate import Evaluation
from hpcfed.experiment.run import run, run_setup
from hpcfed.results.stored import read_run
from hpcfed.runtime import world as worlds
from hpcfed.runtime.telemetry import Sampler, sampling
from hpcfed.runtime.timer import Timer
from hpcfed.runtime.world import World

SERVER: dict[str, Any] = {
    "server": "small",
    "server_latent": 8,
    "autoencoder_samples": 100,
    "denoiser_samples": 100,
    "server_batch": 20,
    "diffusion_steps": 50,
    "inversion_depth": 10,
    "server_engine": "torch",
}

UNEVEN = [
    "--clients",
    "7",
    "--participation",
    "0.6",
    "--alpha",
    "0.3",
    "--precision",
    "fp64",
    "--snapshot-every",
    "1",
    "--rounds",
    "2",
    "--batch-size",
    "40",
    "--device",
    "cpu",
]
"""A cohort of some clients, which have different numbers of samples."""
TWELVE_CLIENTS = [
    "--model",
    "mlp",
    "--clients",
    "12",
    "--alpha",
    "0.3",
    "--rounds",
    "9",
    "--epochs",
    "1",
]
"""Enough rounds for clients to change ranks."""


SHORT: dict[str, Any] = {"epochs": 1, "batch_size": 64}
"""Local training of a twelfth of the usual steps, for runs in which it only matters that
clients train: the files that they leave then take most of the time.
"""


def flags(**values: Any) -> list[str]:
    """Return options as they stand on a command line; True is a flag without value."""
    words = []
    for name, value in {"model": "mlp", "device": "cpu", **SHORT, **values}.items():
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(str(value))
    return words


LONG = flags(
    clients=4,
    rounds=4000,
    epochs=2,
    batch_size=16,
    checkpoint_every=5,
    method="fedper",
    evaluate_every=50,
)
"""A run that only ends when it is stopped."""


def mistake(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Run the command in this process, check that it ends with 2 and a single line, and
    return that line.
    """
    with pytest.raises(SystemExit) as ended:
        cli.main([str(word) for word in words])
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1, said.err
    assert said.err.startswith("hpcfed: ")
    return said.err


@contextmanager
def without_reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the reader of the output have left within the block, as `head` in `| head -1`."""
    read, write = os.pipe()
    os.close(read)
    closed = open(write, "w")  # noqa: SIM115 closed below
    try:
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", closed)
            patched.setattr(sys, "stderr", StringIO())
            yield
    finally:
        # Closing it writes what is left. Only this may fail.
        with suppress(BrokenPipeError):
            closed.close()


def ending(*words: object) -> object:
    """Return the code that a command exits with."""
    try:
        cli.main([str(word) for word in words])
    except SystemExit as left:
        return left.code
    return 0


def started(*words: object) -> Path:
    """Make a run with these options, and return its folder."""
    folder = run(cli.parse_run([str(word) for word in words]))
    assert folder is not None
    return folder


@contextmanager
def one_reading(world: World, every: float) -> Iterator[Sampler | None]:
    """Sample, with a first reading at once: a short run may be over before another."""
    with sampling(world, every) as sampler:
        assert sampler is not None
        sampler.look()
        yield sampler


def rows(folder: Path) -> dict[int, np.ndarray]:
    """Return every client's rows of all snapshots."""
    found = {}
    for path in folder.glob("params-*.h5"):
        with h5py.File(path) as file:
            assert file["taken"][()].all()
            found |= {
                int(client): file["rows"][:, place]
                for place, client in enumerate(file["client"])
            }
    return found


def assert_same_run(folder: Path, expected: Path, *, tolerance: float = 0.0) -> None:
    """Check that two runs are equal but for time; `tolerance` allows for sums of floats
    in another order.
    """
    one, other = read_run(folder), read_run(expected)
    assert one.status == other.status == "complete"
    exact = ("accuracy", "global_accuracy", "bytes_up", "bytes_down", "cohort")
    for name in (*exact, "virtual_seconds", "arrived"):
        np.testing.assert_array_equal(
            one.rounds[name], other.rounds[name], err_msg=name
        )
    for name in ("train_loss", "global_loss"):
        np.testing.assert_allclose(
            one.rounds[name],
            other.rounds[name],
            rtol=max(tolerance, 1e-13),
            err_msg=name,
        )
    np.testing.assert_array_equal(one.client_accuracy, other.client_accuracy)
    got, wanted = rows(folder), rows(expected)
    assert sorted(got) == sorted(wanted)
    for client, row in wanted.items():
        np.testing.assert_allclose(
            got[client], row, rtol=tolerance, atol=tolerance, err_msg=f"client {client}"
        )


def recorded(folder: Path) -> dict[str, np.ndarray]:
    """Return all numbers of a run that are not times."""
    found: dict[str, np.ndarray] = {}
    with h5py.File(folder / "run.h5") as file:
        assert file.attrs["status"] == "complete"
        for group in (
            "rounds",
            "clients",
            "finals",
            "server",
            "newcomers",
            "new_rounds",
            "clock",
        ):
            if group in file:
                for name, data in file[group].items():
                    if name not in (
                        "seconds",
                        "cpu_seconds",
                        "waited",
                        "earlier",
                        "imbalance",
                        "samples_per_second",
                        "utilisation",
                        "peak_memory",
                        "rank",
                    ):
                        found[f"{group}/{name}"] = data[()]
    return found


def same(one: Path, other: Path) -> None:
    """Check that two runs recorded the same numbers, times apart."""
    expected, found = recorded(one), recorded(other)
    assert expected.keys() == found.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def same_newcomers(folder: Path, expected: Path) -> None:
    """Check that newcomers of two runs have the same accuracies and traffic."""
    one, other = read_run(folder), read_run(expected)
    assert one.newcomers.keys() == other.newcomers.keys()
    for start, accuracy in one.newcomers.items():
        np.testing.assert_array_equal(accuracy, other.newcomers[start])
    np.testing.assert_equal(one.newcomer_bytes, other.newcomer_bytes)
    assert (one.new_rounds is None) == (other.new_rounds is None)
    if one.new_rounds is not None:
        for name, values in vars(one.new_rounds).items():
            np.testing.assert_array_equal(values, getattr(other.new_rounds, name), name)


def rows_of(pattern: Path) -> np.ndarray:
    """Return the rows of twelve clients, which ranks wrote to <pattern>-<rank>.npz."""
    rows = {}
    for path in pattern.parent.glob(f"{pattern.name}-*.npz"):
        with np.load(path) as part:
            rows |= dict(zip(part["clients"].tolist(), part["rows"], strict=True))
    return np.stack([rows[client] for client in range(12)])


def run_alone(
    options: list[object], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> np.ndarray:
    """Make a run in this process, and return every client's row after its last round."""
    rows = np.empty(0)

    def keeping_rows(setup: Setup, state: Any, *judged: Any) -> Evaluation:
        nonlocal rows
        fed = setup.federation
        rows = setup.method.personal(fed, state, fed.clients).numpy().copy()
        return evaluate(setup, state, *judged)

    evaluate = loop.evaluate
    monkeypatch.setattr(loop, "evaluate", keeping_rows)
    world = worlds.enter(device="cpu")
    folder.mkdir()
    run_setup(
        assemble(
            cli.parse_run([str(word) for word in options]), world, Timer(world.device)
        ),
        folder,
        quiet=True,
    )
    return rows
