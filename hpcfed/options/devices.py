"""Options of the clients' devices: the virtual clock, stragglers and lost uploads.

Defaults are those of phones. The links are the medians that Wang et al. 2021, "A Field
Guide to Federated Optimization", Section 4.3, take for cross-device federations: 0.75
MB/s down and 0.25 MB/s up. With a spread of 0.75 the fastest tenth of the devices is
seven times as fast as the slowest tenth, roughly as in FedScale's traces of phones (Lai
et al. 2022). The 0.1 s of a step is our choice: it depends on the network.
"""

import os
from math import ceil
from pathlib import Path
from typing import Any, ClassVar

from pydantic import field_validator

from hpcfed.errors import UserError, did_you_mean
from hpcfed.options.compression import CompressionOptions
from hpcfed.options.declare import LEFT_OUT, Need, option
from hpcfed.options.traits import MethodTraits
from hpcfed.options.units import BytesPerSecond

DISTRIBUTIONS = ("lognormal", "uniform")
TRACE = "file:"
LEAST, MOST = 1e-9, 1e15
"""Bounds of devices' speeds and links: their quotients stay finite."""
_CLOCK = Need("--devices lognormal", lambda run: run.devices != "none")
_DRAWN = Need("--devices lognormal", lambda run: run.devices in DISTRIBUTIONS)


def _invites_more(run: Any) -> bool:
    """Tell whether a round invites more clients than its cohort; also true without a
    clock, because then `_CLOCK` is the unmet need to report.
    """
    return run.devices == "none" or bool(run.num_invited > run.cohort_size)


class DeviceOptions(CompressionOptions):
    title: ClassVar[str] = "devices and the virtual clock"

    # Not a Literal: file:PATH may name any file.
    devices: str = option(
        "none",
        "how fast clients' devices are, which turns on the virtual clock: none, "
        "lognormal, uniform, or file:TRACE.csv with a line client,speed,downlink,uplink "
        "for each client, as in --devices lognormal --deadline 30",
        acts_on="uploads",
        told="always",
        off=True,
        also="device_profile device_capacity system_heterogeneity",
    )
    step_seconds: float = option(
        0.1,
        "virtual seconds of a local step on a device of speed 1, as in 0.5",
        gt=0,
        le=1e9,
        needs=_CLOCK,
    )
    speed_spread: float = option(
        0.75,
        "lognormal: σ of the logarithm of speeds, whose median is 1; uniform: speeds "
        "lie within 1 ± this, as in 0.5",
        ge=0,
        le=10,
        needs=_DRAWN,
    )
    downlink: BytesPerSecond = option(
        750_000.0,
        "median bytes per second from the server to a client, or with a unit, as in "
        "6Mb/s",
        ge=LEAST,
        le=MOST,
        needs=_DRAWN,
    )
    uplink: BytesPerSecond = option(
        250_000.0,
        "median bytes per second from a client to the server, or with a unit, as in "
        "2Mb/s",
        ge=LEAST,
        le=MOST,
        needs=_DRAWN,
    )
    link_spread: float = option(
        0.75,
        "as --speed-spread, of links: a client's two directions are fast or slow "
        "together",
        ge=0,
        le=10,
        needs=_DRAWN,
    )
    deadline: float | None = option(
        None,
        "virtual seconds after which a round ends, as in 30: uploads that come later "
        "are dropped; if none has come by then, the server waits for the first "
        "(default: it waits for all)",
        ge=0,
        le=MOST,
        also="round_deadline round_timeout timeout",
        needs=_CLOCK,
    )
    oversample: float = option(
        1.0,
        "invite this many times the cohort, as in 1.3; only the first uploads count, "
        "up to the size of the cohort",
        ge=1,
        le=1000,
        off=True,
        calibration=LEFT_OUT,
        also="over_selection overcommit overcommitment over_sample",
        needs=(_CLOCK, Need("a smaller cohort", _invites_more)),
    )
    dropout_rate: float = option(
        0.0,
        "probability that an invited client vanishes in a round, as in 0.1: its upload "
        "never comes",
        ge=0,
        lt=1,
        also="client_dropout drop_rate dropout_probability failure_rate",
        needs=_CLOCK,
    )
    partial: bool = option(
        False,
        "clients that would miss --deadline do only the local steps that fit, and "
        "upload in time",
        needs=Need("--deadline 30", lambda run: run.deadline is not None),
    )

    @field_validator("devices")
    @classmethod
    def whole_trace(cls, value: str) -> str:
        """Make the path of a trace absolute: the record must be valid in any folder."""
        if not value.startswith(TRACE):
            return value
        # Shells do not expand the ~ of file:~/x. The ~ of an unknown user stays.
        path = os.path.expanduser(value.removeprefix(TRACE))
        return f"{TRACE}{os.path.abspath(path)}"

    @property
    def trace(self) -> Path | None:
        """The file of --devices file:TRACE.csv."""
        if not self.devices.startswith(TRACE):
            return None
        return Path(self.devices.removeprefix(TRACE))

    @property
    def num_invited(self) -> int:
        """The number of clients that a round invites."""
        return self.invited_among(self.clients)

    def invited_among(self, clients: int) -> int:
        """Return the number of clients that a round invites out of `clients`."""
        wanted = self.cohort_among(clients)
        # 1.1 × 50 is 55, although 1.1 * 50 computes to 55.00000000000001.
        return min(clients, ceil(self.oversample * wanted - 1e-9))


def check_devices(config: DeviceOptions, method: MethodTraits) -> None:
    """Refuse unknown devices, and options that cannot go with late or lost uploads."""
    known = ("none", *DISTRIBUTIONS)
    if config.trace is not None:
        if not config.trace.is_file():
            raise UserError(f"--devices {TRACE}{config.trace}: no such file")
    elif config.devices not in known:
        guess = did_you_mean(config.devices, known)
        hint = guess or f"; known: {', '.join(known)}, {TRACE}TRACE.csv"
        raise UserError(f"unknown --devices '{config.devices}'{hint}")
    for flag, spread in (
        ("--speed-spread", config.speed_spread),
        ("--link-spread", config.link_spread),
    ):
        if config.devices == "uniform" and spread >= 1:
            raise UserError(
                f"{flag} {spread}: with --devices uniform it must be below 1, or some "
                "devices would stand still"
            )
    if config.partial and not method.divides_training:
        raise UserError(
            f"--partial: clients of method {config.method} do something between their "
            "steps, and cannot stop after any of them"
        )
    losses = {
        "--deadline": config.deadline is not None,
        "--oversample": config.oversample > 1,
        "--dropout-rate": config.dropout_rate > 0,
    }
    for flag, loses in losses.items():
        if config.ef21 and loses:
            # Client and server would no longer have the same estimate.
            raise UserError(
                f"--ef21 needs all uploads, and {flag} loses some; use --feedback"
            )
