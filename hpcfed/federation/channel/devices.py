"""The clients' devices: how fast each computes and communicates, and when it is
available.

Every rank knows this for all clients of the federation. It depends only on the seed and
the client's id: a few numbers per client, no collective.
"""

from dataclasses import dataclass

import numpy as np

from hpcfed.federation.channel.trace import Availability, Trace, read_trace
from hpcfed.options import RunConfig
from hpcfed.options.devices import LEAST, MOST
from hpcfed.runtime import randomness


@dataclass(frozen=True)
class Devices:
    """The device of every client of the federation, as arrays by client id."""

    speed: np.ndarray
    """How fast it computes, relative to a device that takes `step_seconds` a step."""
    downlink: np.ndarray
    """Bytes per second from the server."""
    uplink: np.ndarray
    """Bytes per second to the server."""
    step_seconds: float
    """Duration of a local step on a device of speed 1."""
    availability: Availability | None = None
    """When each client is available; None: always."""

    def seconds(
        self,
        clients: np.ndarray,
        steps: np.ndarray | int,
        down_bytes: np.ndarray | float,
        up_bytes: np.ndarray | float,
    ) -> np.ndarray:
        """Return how long each of these clients takes to download, train and upload."""
        down = self.download_seconds(clients, down_bytes)
        train = self.train_seconds(clients, steps)
        return down + train + self.upload_seconds(clients, up_bytes)

    def download_seconds(
        self, clients: np.ndarray, num_bytes: np.ndarray | float
    ) -> np.ndarray:
        """Return how long each of these clients takes to receive these bytes."""
        return num_bytes / self.downlink[clients]

    def train_seconds(self, clients: np.ndarray, steps: np.ndarray | int) -> np.ndarray:
        """Return how long each of these clients takes for these local steps."""
        return steps * self.step_seconds / self.speed[clients]

    def upload_seconds(
        self, clients: np.ndarray, num_bytes: np.ndarray | float
    ) -> np.ndarray:
        """Return how long each of these clients takes to send these bytes."""
        return num_bytes / self.uplink[clients]

    def presence(self, clients: np.ndarray) -> Availability | None:
        """Return when these clients are available, by position; None: always."""
        return None if self.availability is None else self.availability.of(clients)

    def available(self, now: float) -> np.ndarray:
        """Return the ids of the clients available at this moment, ascending."""
        if self.availability is None:
            return np.arange(len(self.speed))
        return np.flatnonzero(self.availability.at(now))


def devices_of(config: RunConfig) -> Devices | None:
    """Return the devices of a run's clients; None without a virtual clock."""
    if config.devices == "none":
        return None
    if config.trace is not None:
        return _from_trace(config, read_trace(config.trace))
    # A row per client, so that adding clients does not change the first ones.
    shape = config.clients, 2
    generator = randomness.generator(config.seed_of_data, "devices")
    spreads = np.array([config.speed_spread, config.link_spread])
    if config.devices == "lognormal":
        factors = np.exp(spreads * generator.standard_normal(shape))
    else:
        factors = 1 + spreads * generator.uniform(-1, 1, shape)
    speed, link = factors.T
    # One draw for both directions: with poor reception, both are slow.
    return Devices(
        speed=speed.clip(LEAST, MOST),
        downlink=(config.downlink * link).clip(LEAST, MOST),
        uplink=(config.uplink * link).clip(LEAST, MOST),
        step_seconds=config.step_seconds,
    )


def _from_trace(config: RunConfig, trace: Trace) -> Devices:
    """Give every client its row of the trace. Clients beyond the last row draw one of
    all rows, with replacement.
    """
    rows, clients = len(trace.speed), config.clients
    generator = randomness.generator(config.seed_of_data, "devices")
    drawn = generator.integers(rows, size=max(0, clients - rows))
    row_of = np.concatenate([np.arange(min(rows, clients)), drawn])
    availability = trace.availability
    return Devices(
        speed=trace.speed[row_of],
        downlink=trace.downlink[row_of],
        uplink=trace.uplink[row_of],
        step_seconds=config.step_seconds,
        availability=None if availability is None else availability.of(row_of),
    )
