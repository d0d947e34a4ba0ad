"""Train a wave of clients together, and hand their uploads to the server."""

from dataclasses import dataclass

import torch

from hpcfed.clients.pull import Pull, Strengths
from hpcfed.methods._asynchronous import Versions, Wave
from hpcfed.methods._interface import Cohort, Federation, Tensor


@dataclass(frozen=True)
class Received:
    """What the server receives of a wave. A row that is not finite is replaced by the
    row from which its client started.
    """

    starts: Tensor
    """The rows from which this rank's clients of the wave started."""
    rows: Tensor
    """The rows that they sent."""
    finite: Tensor
    """Whose row was finite; stays on the device, so that the host need not wait."""


def receive(
    fed: Federation, wave: Wave, versions: Versions, mu: float = 0.0
) -> Received:
    """Let the wave's clients on this rank download, train and upload. `mu` is the
    strength of a proximal term, as in FedProx.
    """
    cohort, log = wave.cohort, wave.cohort.log
    # For the channel's stages, each wave is its clients' first upload, not a second.
    cohort.in_flight.downloads = cohort.in_flight.uploads = 0
    cohort.in_flight.wave = wave.number
    # `upload` replaces the norms of the wave before, but the log is of all waves.
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
    """Wait for the device, and exclude clients of this rank whose uploads were not
    finite. `heard` is the number of finite uploads on all ranks.
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
    """Return the starting rows of the wave's clients on this rank."""
    chosen = wave.versions[wave.cohort.chosen].tolist()
    if len(set(chosen)) > 1:
        return torch.stack([versions[number] for number in chosen])
    # A view: the common row is in memory once. Without clients here it has no rows.
    one = chosen[0] if chosen else int(wave.versions[0])
    return versions[one].expand(len(chosen), -1)


def _pull(starts: Tensor, mu: float) -> Pull | None:
    return Pull(Strengths(squared=mu), reference=starts) if mu else None
