"""What a story tells in the end."""

from collections import Counter
from dataclasses import dataclass, field

from benchmarks.simulated.processes import Job


@dataclass
class Told:
    """What a story has been, and what was found in it."""

    seed: int
    lives: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    """Faults that came, by kind."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Lives by how they ended."""
    rounds: int = 0
    """Rounds that were reported."""
    findings: list[str] = field(default_factory=list)
    seconds: float = 0.0
    """Seconds of the processor, with those of undisturbed runs to compare with."""
    digest: int = 0
    """Checksum of all that has happened."""
    trace: list[str] = field(default_factory=list)


def last(job: Job, lines: int = 6) -> str:
    """Return the last lines that a job has told."""
    return "\n".join(f"    {line}" for line in job.told.splitlines()[-lines:])


def outcome(code: int | None, complete: bool) -> str:
    """Say how a life has ended."""
    if code == 0 and complete:
        return "complete"
    return {75: "stopped", 137: "killed", 1: "failed", 2: "refused"}.get(
        code or 0, f"code {code}"
    )
