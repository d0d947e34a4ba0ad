"""The results of a calibration, as a small JSON file.

The file holds measured points. Derived values, such as seconds per step, are fitted
when a plan is made, so that intervals can also be derived from the points.
"""

import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hpcfed.errors import UserError
from hpcfed.results.folder import check_export
from hpcfed.results.publish import export

MOST_BYTES = 2**20
"""Largest file of constants to read, in bytes."""
DEFAULT = Path("hpcfed-plan.json")
"""Where a calibration is written and read, unless --constants names another file."""


class _Part(BaseModel):
    # The file may be untrusted: refuse what is unknown, not finite or not a number.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Spread(_Part):
    """The time of several rounds, in seconds."""

    low: float = Field(ge=0)
    """10 % of the rounds took less."""
    middle: float = Field(ge=0)
    high: float = Field(ge=0)
    """10 % of the rounds took more."""

    @classmethod
    def exactly(cls, seconds: float) -> "Spread":
        """Return the spread of rounds that all took the same time."""
        return cls(low=seconds, middle=seconds, high=seconds)


class RoundPoint(_Part):
    """Rounds with a given number of clients on a given number of ranks."""

    ranks: int = Field(ge=1)
    clients: int = Field(ge=1)
    """Clients of a round trained on the busiest rank."""
    hosted: int = Field(ge=1)
    """Clients that live on the busiest rank, sampled or not."""
    longest: float = Field(ge=0)
    """Local steps of the rank's longest client."""
    steps: float = Field(ge=0)
    """Local steps of all clients of the rank."""
    train: Spread
    """Local training on the slowest rank."""
    rest: Spread
    """The rest of a round, without evaluation."""
    evaluate: float = Field(ge=0)
    """Seconds of an evaluation."""
    memory: float = Field(ge=0)
    """Peak bytes of a rank."""


class ServerPoint(_Part):
    """Steps of one of the server's networks on one rank."""

    network: Literal["autoencoder", "denoiser"]
    zero_stage: int = Field(ge=0, le=3)
    batch: int = Field(ge=1)
    flops: float = Field(gt=0)
    """FLOPs of a step, forward and backward."""
    activations: float = Field(gt=0)
    """Numbers that all stages output in a step."""
    stages: int = Field(ge=1)
    parameters: int = Field(ge=1)
    seconds: float = Field(gt=0)
    """Seconds of a step in steady state."""
    first: float = Field(ge=0)
    """Extra seconds of the first steps: graphs are captured, kernels chosen."""
    memory: float = Field(ge=0)
    """Peak bytes of the rank so far."""


class Preparation(_Part):
    """The cost of a learning besides its steps."""

    parameters: int = Field(ge=1)
    """Parameters of both networks."""
    seconds: float = Field(ge=0)
    """Seconds to build networks and engines in a process that has done it before."""
    invert: float = Field(ge=0)
    """Seconds to generate a few clients' rows."""
    first: float = Field(ge=0)
    """Extra seconds of the first generation."""
    launches: int = Field(ge=1)
    """Stages of all passes of the generation."""
    flops: float = Field(gt=0)
    """FLOPs of all passes of the generation."""


class BankPoint(_Part):
    """A pass of --server-model span through a bank on one rank; `BankWork` says what
    the counts mean.
    """

    numbers: float = Field(gt=0)
    flops: float = Field(ge=0)
    cubes: float = Field(ge=0)
    seconds: float = Field(gt=0)


class ZeroPreparation(_Part):
    """What a ZeRO stage adds to building networks, optimisers and engines."""

    stage: int = Field(ge=1, le=3)
    seconds: float = Field(ge=0)
    """Seconds in a process that has done so before."""
    first: float = Field(ge=0)
    """Extra seconds of the first time."""


class LinkPoint(_Part):
    """An all-reduce of a number of bytes between ranks of this machine."""

    ranks: int = Field(ge=2)
    bytes: float = Field(gt=0)
    seconds: float = Field(gt=0)


Kind = Literal["cpu", "cuda"]
"""A CPU, or a GPU of any make, by the names that calibrations have for them."""


def kind_of(device: str) -> Kind:
    """Return the kind of a device, given by torch's name for its type."""
    return "cpu" if device == "cpu" else "cuda"


class MeasuredMachine(_Part):
    """The machine that was measured."""

    device: str
    kind: Kind
    units: int = Field(ge=1)
    """GPUs of the machine, or cores that ranks may use."""
    memory: float = Field(ge=0)
    """Bytes of a GPU; of the whole machine if it has no GPU."""
    flops: float = Field(gt=0)
    """FLOP/s of a large matrix product in the server's precision."""
    bytes_per_second: float = Field(gt=0)
    """Speed of a large copy, counting reads and writes."""
    torch: str


class MeasuredWork(_Part):
    """What was trained, because other work has other costs."""

    network: str
    columns: int = Field(ge=1)
    batch_size: int = Field(ge=1)
    training: float = Field(gt=0)
    """Multiply-adds of one sample's training step."""
    activations: float = Field(gt=0)
    """Numbers that layers output for one sample."""
    client_bytes: float = Field(ge=0)
    """Bytes of a client's samples on its device."""
    method: str
    precision: str
    kernels: str = "auto"
    """--kernels; files that lack it were measured before that option was there."""


class Calibration(_Part):
    """A calibration."""

    version: Literal[1] = 1
    made: str
    machine: MeasuredMachine
    work: MeasuredWork
    rounds: tuple[RoundPoint, ...] = Field(min_length=2)
    links: tuple[LinkPoint, ...] = ()
    server_model: str = "p-diff"
    """The model of rows whose steps were measured."""
    server: tuple[ServerPoint, ...] = ()
    bank: tuple[BankPoint, ...] = ()
    preparations: tuple[Preparation, ...] = ()
    zero_preparations: tuple[ZeroPreparation, ...] = ()
    server_start: float = Field(default=0.0, ge=0)
    """Extra seconds of a process's first learning: libraries load, kernels compile."""


def read_constants(path: Path) -> Calibration:
    """Read a calibration; anything else is a one-line error."""
    again = "make it again with --calibrate"
    try:
        if not path.is_file():
            raise UserError(f"--constants {path}: no such file; {again}")
        if path.stat().st_size > MOST_BYTES:
            raise UserError(f"--constants {path}: too large for a calibration; {again}")
        return Calibration.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except ValidationError as failure:
        first = failure.errors()[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise UserError(
            f"--constants {path}: not a calibration of this version ({where}: "
            f"{first['msg']}); {again}"
        ) from None


def check_writable(path: Path) -> None:
    """Refuse a path that a calibration cannot be written to, before measuring."""
    check_export("--constants", path)
    if not path.parent.is_dir():
        raise UserError(f"--constants {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"--constants {path}: the folder is not yours to write to")


def write_constants(path: Path, constants: Calibration) -> None:
    """Write a calibration atomically."""
    export(f"{constants.model_dump_json(indent=1)}\n".encode(), path)
