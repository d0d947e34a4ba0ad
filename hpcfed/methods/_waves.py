"""What the server has of a wave: clients that start together, train and upload."""

from dataclasses import dataclass

import torch

from hpcfed.clients.pull import Pull, Strengths
from hpcfed.methods._asynchronous import Versions, Wave
from hpcfed.methods._interface import Cohort, Federation, Tensor


@dataclass(frozen=True)
class Received:
    """What the server has of a wave, in which rows that are not finite are replaced by
    what their clients were given.
    """

    starts: Tensor
    """What this rank's clients of the wave were given."""
    rows: Tensor
    """What they have sent."""
    finite: Tensor
    """Whose row is their own; on the device, where nobody has to wait for it."""


def receive(
    fed: Federation, wave: Wave, versions: Versions, mu: float = 0.0
) -> Received:
    """Let the wave's clients on this rank download, train and upload; with `mu` their
    starts draw them as in FedProx.
    """
    cohort, log = wave.cohort, wave.cohort.log
    # To the parts of the channel every wave is one upload of its clients, not a second one.
    cohort.in_flight.downloads = cohort.in_flight.uploads = 0
    cohort.in_flight.wave = wave.number
    norms = log.update_norms
    starts = fed.download(_starts(wave, versions), cohort)
    rows = fed.train(starts, cohort, phase=wave.number, pull=_pull(starts, mu))
    rows = fed.upload(rows, cohort)
    if norms is not None and log.update_norms is not None:
        log.update_norms = torch.cat([norms, log.update_norms])
    finite = rows.isfinite().all(1)
    return Received(starts, rows.where(finite[:, None], starts), finite)


def kept(versions: Versions, wave: Wave) -> dict[int, Tensor]:
    """Return the versions that are needed after a wave."""
    return {number: versions[number] for number in versions if number in wave.needed}


def exclude(
    fed: Federation, cohort: Cohort, flags: list[tuple[Wave, Tensor]], heard: Tensor
) -> None:
    """Wait for the device, and count clients of this rank whose uploads were not finite
    as excluded; `heard` is how many uploads of all ranks were finite.
    """
    assert cohort.log.arrived is not None
    num_finite = int(heard)
    if num_finite == len(cohort.log.arrived):
        return
    bad: set[int] = set()
    for wave, finite in flags:
        here = wave.cohort.clients[wave.cohort.chosen]
        bad.update(here[~finite.cpu().numpy()].tolist())
    fed.exclude(bad, cohort, all_of_them=not num_finite)


def _starts(wave: Wave, versions: Versions) -> Tensor:
    """Return the row that each of the wave's clients on this rank has started from."""
    chosen = wave.versions[wave.cohort.chosen].tolist()
    if len(set(chosen)) > 1:
        return torch.stack([versions[number] for number in chosen])
    # A view: the row of all is in memory once. No client here gives no row.
    one = chosen[0] if chosen else int(wave.versions[0])
    return versions[one].expand(len(chosen), -1)


def _pull(starts: Tensor, mu: float) -> Pull | None:
    return Pull(Strengths(squared=mu), reference=starts) if mu else None
