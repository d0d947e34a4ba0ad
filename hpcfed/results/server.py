"""The group `server` of run.h5: an entry for each training of the server's model."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import h5py
import numpy as np

from hpcfed.results.format import Declared, create, create_names

# As everywhere in the file, names and units are the format and never change.

GROUP = "server"
SERVER_PHASES = (
    "collect",
    "prepare",
    "autoencoder",
    "encode",
    "denoiser",
    "invert",
    "return",
)
"""`prepare`: building networks, optimisers and DeepSpeed's engines."""
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


class ServerSize(NamedTuple):
    """How often the server's model is trained, on how many ranks, and with how many
    steps of each network.
    """

    times: int
    ranks: int
    steps: dict[str, int]
    """By network, in the order of recording."""


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
    recognised: float
    latents: LatentMap | None

    def utilisation(self, network: str) -> float: ...


def create_group(file: h5py.File, size: ServerSize) -> None:
    """Create the group's datasets, with NaN for future trainings."""
    times = size.times
    networks = list(size.steps)

    def make(
        name: str, more: tuple[int, ...], *dimensions: str, unit: str, meaning: str
    ) -> None:
        shape = (times, *more)
        where = f"{GROUP}/{name}"
        create(file, Declared(where, shape, ("time", *dimensions), unit, meaning))

    # Readers take the names from the file, which may be of a version with other phases.
    create_names(file, f"{GROUP}/phase_names", SERVER_PHASES)
    create_names(file, f"{GROUP}/network_names", networks)
    make("round", (), unit="round", meaning="the round, from 0, after which it learnt")
    make("rows", (), unit="rows", meaning="uploads that it learnt from")
    make(
        "kept",
        (),
        unit="fraction",
        meaning="clients whose generated update (their row less the round's start) is "
        "nearest to the mean of their own updates",
    )
    make(
        "seconds",
        (len(SERVER_PHASES),),
        "phase",
        unit="s",
        meaning=f"seconds of each phase: {', '.join(SERVER_PHASES)}",
    )
    for name, (unit, meaning) in OF_NETWORKS.items():
        make(name, (len(networks),), "network", unit=unit, meaning=meaning)
    make(
        "peak_memory",
        (size.ranks,),
        "server rank",
        unit="bytes",
        meaning="largest memory so far of a server rank",
    )
    for network, steps in size.steps.items():
        meaning = f"mean loss of each of the {network}'s steps"
        make(f"{network}_loss", (steps,), "step", unit="1", meaning=meaning)
    _create_latents(file)


def _create_latents(file: h5py.File) -> None:
    """Create the map of latents; it describes only the last training."""
    for name, more, unit, meaning in (
        ("latents", (2,), "1", "places of uploads' latents on two principal axes"),
        ("latent_clients", (), "client", "whose upload each of the latents is of"),
    ):
        where = f"{GROUP}/{name}"
        dimensions = ("upload", "axis")[: 1 + len(more)]
        shape = (MOST_MAPPED, *more)
        create(file, Declared(where, shape, dimensions, unit, meaning))
    meaning = "share of the latents' variance on each of the two axes"
    where = f"{GROUP}/latent_shares"
    create(file, Declared(where, (2,), ("axis",), "fraction", meaning))


def write_entry(
    file: h5py.File,
    entry: int,
    round: int,
    learning: Learning,
    networks: Sequence[str],
) -> None:
    """Write the entry of a training after this round; it reaches the disk with the next
    rounds.
    """
    group = file[GROUP]
    group["round"][entry] = round
    group["rows"][entry] = learning.rows
    group["kept"][entry] = learning.recognised
    # A phase that this training skipped took no time.
    group["seconds"][entry] = [
        learning.seconds.get(phase, 0.0) for phase in SERVER_PHASES
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
    if learning.latents is not None:
        count = len(learning.latents.clients)
        # If the bank has shrunk, clear the remaining places of the previous training.
        group["latents"][count:] = np.nan
        group["latent_clients"][count:] = np.nan
        group["latents"][:count] = learning.latents.places
        group["latent_clients"][:count] = learning.latents.clients
        group["latent_shares"][...] = learning.latents.shares
