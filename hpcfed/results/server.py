"""The group `server` of run.h5: an entry for each training of the server's model."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import h5py
import numpy as np

from hpcfed.results.format import Declared, create, create_names

# As everywhere in the file, names and units are the format and never change.

GROUP = "server"
SERVER_PHASES = (
    "collect", "prepare", "autoencoder", "encode", "denoiser", "invert", "return",
)  # fmt: skip
"""`prepare`: building networks, optimisers and DeepSpeed's engines, and saving how far
they are.
"""
OF_NETWORKS = {
    "samples_per_second": (
        "1/s",
        "samples that a network saw in a second of its learning",
    ),
    "parameters": ("1", "parameters of a network"),
    "flops": ("1", "floating-point operations of all its steps, forward and backward"),
    "utilisation": (
        "fraction",
        "model FLOPs by the peak of the server ranks' devices; NaN: peak not known",
    ),
}
"""Figures of each network: unit and meaning."""
PROMISED = ("parameters", "gradients", "optimizer", "buffers")
"""Parts of the memory that a ZeRO stage promises."""
OF_MEMORY = {
    **{
        f"promised_{part}": ("bytes", f"{part} on a server rank, by its ZeRO stage")
        for part in PROMISED
    },
    "training_memory": (
        "bytes",
        "the most that training took on a server rank, from its engine's start to the "
        "last step, beside what it held before; NaN: not on a GPU",
    ),
}
"""Figures of each network's memory, which older files lack: unit and meaning."""
OF_TRAININGS = {
    "round": ("round", "the round, from 0, after which it learnt"),
    "rows": ("rows", "uploads that it learnt from"),
    "own": (
        "fraction",
        "clients whose generated update (their row less the round's start) has their own "
        "direction: of all clients' mean directions, theirs has the smallest angle to it",
    ),
    "own_uploads": (
        "fraction",
        "the same share of the uploads that these updates were generated from",
    ),
}
"""Figures of each training: unit and meaning."""
EARLIER = (
    "seconds of its steps that a run before made, which was stopped: part of `seconds`, "
    "but not of the round's"
)
BANK_BYTES = "bytes of the uploads that it learnt from, on a server rank"
OF_OVERLAPS = {
    "used": (
        "round",
        "the round, from 0, that first starts from its rows; of the last learning, the "
        "number of rounds",
    ),
    "waited": ("s", "seconds that clients waited for its rows"),
}
"""Figures of each training that clients do not wait for."""
LATENTS = "places of uploads' latents on two principal axes"
LATENT_CLIENTS = "whose upload each of the latents is of"
LATENT_SHARES = "share of the latents' variance on each of the two axes"


class ServerSize(NamedTuple):
    """How often, on how many ranks and in how many steps a server's model learns."""

    times: int
    ranks: int
    steps: dict[str, int]
    """By network, in the order of recording."""
    overlaps: bool = False
    """Whether clients go on while it learns."""


class RowsUse(NamedTuple):
    """The use of rows of a learning during which clients went on."""

    waited: float
    """Seconds of waiting for them that are not recorded yet."""
    first: int | None = None
    """The round, from 0, that first starts from them; None: they have only arrived."""


MOST_MAPPED = 400
"""The largest number of uploads in a map of latents."""


class LatentMap(NamedTuple):
    """The positions of some uploads' latents on their two principal axes."""

    clients: np.ndarray
    """The client of each upload."""
    places: np.ndarray
    """[uploads, 2]."""
    shares: np.ndarray
    """Shares of the variance along each of the two axes."""


class Learning(Protocol):
    """What the server reports about one training of its model."""

    rows: int
    losses: dict[str, np.ndarray]
    seconds: dict[str, float]
    samples: dict[str, int]
    parameters: dict[str, int]
    flops: dict[str, float]
    peak_memory: list[float]
    promised: dict[str, dict[str, float]]
    training_memory: dict[str, float]
    recognised: float
    recognised_uploads: float
    earlier: float
    latents: LatentMap | None
    bank_bytes: list[float]

    def utilisation(self, network: str) -> float: ...


def create_group(file: h5py.File, size: ServerSize) -> None:
    """Create the group's datasets, with NaN for future trainings."""
    networks = list(size.steps)
    # Readers take the names from the file, which may be of a version with other phases.
    create_names(file, f"{GROUP}/phase_names", SERVER_PHASES)
    create_names(file, f"{GROUP}/network_names", networks)
    phases = f"seconds of each phase: {', '.join(SERVER_PHASES)}"
    memory = "largest memory so far of a server rank"
    # By training: name, unit, meaning, and the second dimension with its length.
    of_times = OF_TRAININGS | (OF_OVERLAPS if size.overlaps else {})
    by_time: list[tuple[str, str, str, dict[str, int]]] = [
        *((name, *of_time, {}) for name, of_time in of_times.items()),
        ("seconds", "s", phases, {"phase": len(SERVER_PHASES)}),
        ("peak_memory", "bytes", memory, {"server rank": size.ranks}),
        ("earlier", "s", EARLIER, {}),
        ("bank_bytes", "bytes", BANK_BYTES, {"server rank": size.ranks}),
    ]
    for name, (unit, meaning) in (OF_NETWORKS | OF_MEMORY).items():
        by_time.append((name, unit, meaning, {"network": len(networks)}))
    for network, steps in size.steps.items():
        meaning = f"mean loss of each of the {network}'s steps"
        by_time.append((f"{network}_loss", "1", meaning, {"step": steps}))
    for name, unit, meaning, more in by_time:
        shape, dimensions = (size.times, *more.values()), ("time", *more)
        create(file, Declared(f"{GROUP}/{name}", shape, dimensions, unit, meaning))
    # The map of latents describes only the last training.
    for name, shape, unit, meaning in (
        ("latents", (MOST_MAPPED, 2), "1", LATENTS),
        ("latent_clients", (MOST_MAPPED,), "client", LATENT_CLIENTS),
        ("latent_shares", (2,), "fraction", LATENT_SHARES),
    ):
        dimensions = ("axis",) if shape == (2,) else ("upload", "axis")[: len(shape)]
        create(file, Declared(f"{GROUP}/{name}", shape, dimensions, unit, meaning))


def write_entry(
    file: h5py.File, entry: int, round: int, learning: Learning, networks: Sequence[str]
) -> None:
    """Write the entry of a training; the next rounds bring it to disk."""
    group = file[GROUP]
    group["round"][entry] = round
    group["rows"][entry] = learning.rows
    # A run that an older version has begun goes on in its file.
    if "own" in group:
        group["own"][entry] = learning.recognised
        group["own_uploads"][entry] = learning.recognised_uploads
    if "bank_bytes" in group:
        group["bank_bytes"][entry] = learning.bank_bytes
    if "earlier" in group:
        group["earlier"][entry] = learning.earlier
    if "waited" in group:
        group["waited"][entry] = 0.0
    # NaN marks phases that this model does not have.
    group["seconds"][entry] = [
        learning.seconds.get(phase, np.nan) for phase in SERVER_PHASES
    ]
    group["peak_memory"][entry] = learning.peak_memory
    for number, network in enumerate(networks):
        # Seconds of the training only, without building or encoding.
        speed = learning.samples[network] / learning.seconds[network]
        group["samples_per_second"][entry, number] = speed
        group["parameters"][entry, number] = learning.parameters[network]
        group["flops"][entry, number] = learning.flops[network]
        group["utilisation"][entry, number] = learning.utilisation(network)
        group[f"{network}_loss"][entry] = learning.losses[network]
        if "training_memory" in group:
            group["training_memory"][entry, number] = learning.training_memory[network]
            for part in PROMISED:
                promised = learning.promised[network][part]
                group[f"promised_{part}"][entry, number] = promised
    if learning.latents is not None:
        count = len(learning.latents.clients)
        # If the bank has shrunk, clear the remaining places of the previous training.
        group["latents"][count:] = np.nan
        group["latent_clients"][count:] = np.nan
        group["latents"][:count] = learning.latents.places
        group["latent_clients"][:count] = learning.latents.clients
        group["latent_shares"][...] = learning.latents.shares


def write_use(file: h5py.File, entry: int, use: RowsUse) -> None:
    """Write when the rows of a training were used, and add the wait for them."""
    group = file[GROUP]
    group["waited"][entry] += use.waited
    if use.first is not None:
        group["used"][entry] = use.first
