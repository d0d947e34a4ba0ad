"""The table at the end of a campaign of simulated lives."""

import zlib
from collections import Counter

from benchmarks.simulated.told import Told
from hpcfed.errors import count


class Summary:
    """Counts what stories were, and what was found."""

    def __init__(self) -> None:
        self.seeds = self.lives = self.rounds = self.findings = 0
        self._seconds = 0.0
        self._digest = 0
        self._faults: Counter[str] = Counter()
        self._outcomes: Counter[str] = Counter()

    def add(self, told: Told) -> None:
        self.seeds += 1
        self.lives += told.lives
        self._seconds += told.seconds
        self.rounds += told.rounds
        self.findings += len(told.findings)
        # In the order of seeds, so that two campaigns can be compared.
        self._digest = zlib.crc32(f"{told.seed} {told.digest}".encode(), self._digest)
        self._faults += told.faults
        self._outcomes += told.outcomes

    def progress(self, seeds: int) -> str:
        """Return a line of how far it has come."""
        found = count(self.findings, "finding")
        return f"{self.seeds} of {count(seeds, 'seed')}, {self.lives:,} lives, {found}"

    def table(self, seconds: float) -> str:
        """Return what there was, by kind of fault and by outcome."""
        rows = [
            ("seeds", f"{self.seeds:,}"),
            ("lives", f"{self.lives:,}"),
            ("rounds reported", f"{self.rounds:,}"),
            ("findings", f"{self.findings:,}"),
            ("checksum of all events", f"{self._digest:08x}"),
            ("seconds", f"{seconds:.0f}"),
            ("seconds of processors", f"{self._seconds:.0f}"),
        ]
        rows += [
            (f"fault: {name}", f"{number:,}")
            for name, number in self._faults.most_common()
        ]
        rows += [
            (f"outcome: {name}", f"{number:,}")
            for name, number in self._outcomes.most_common()
        ]
        return "\n".join(f"{name:24}{value:>10}" for name, value in rows)
