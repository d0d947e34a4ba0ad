"""GenFed's selection (Zheng et al. 2025): of a round's uploads the server keeps those
that do best on its own data.

ρ_t of them are kept in round t = 0, 1, …: floor of the schedule, then at least 1 and at
most ρ_max and the cohort. The paper prints only the second branch of schedule (5); its
first is read from (4) and the text. Nor does it print ρ_max, b and c.
"""

import math
from collections.abc import Iterable
from typing import Literal

import numpy as np

from hpcfed.config import Options, RunConfig, Switch, option


class SelectionOptions(Options):
    """Of a method whose uploads pass the selection: one that uploads whole rows and
    aggregates them by `fed.mean`.
    """

    schedule: Literal["constant", "power", "linear", "sine", "arch"] = option(
        "linear",
        "how many uploads are kept: ρ_max; ρ_max(1 − b^t) + 1; ρ_max·t/c + 1; the same "
        "by a quarter of a sine; up and "
        "down again by a half: the paper's (1) to (5)",
    )
    rho_max: int = option(5, "ρ_max, the most uploads that are kept", ge=1)
    schedule_base: float = option(0.98, "b of the schedule power", gt=0, lt=1)
    schedule_rounds: int = option(
        200, "c of the schedules linear, sine and arch, in rounds", ge=1
    )

    def switches(self, config: RunConfig) -> Iterable[Switch]:
        yield from super().switches(config)
        yield Switch("schedule_base", "--schedule power", self.schedule == "power")
        yield Switch(
            "schedule_rounds",
            "--schedule linear",
            self.schedule in ("linear", "sine", "arch"),
        )

    def keep(self, round: int, uploads: int) -> int:
        """ρ_t, of so many uploads."""
        return max(1, min(math.floor(self._schedule(round)), self.rho_max, uploads))

    def _schedule(self, t: int) -> float:
        most, c = self.rho_max, self.schedule_rounds
        match self.schedule:
            case "constant":
                return most
            case "power":
                return most * (1 - self.schedule_base**t) + 1
            case "linear":
                return most * t / c + 1
            case "sine":
                return most * math.sin(math.pi * min(t, c) / (2 * c)) + 1
            case "arch":
                return most * math.sin(math.pi * t / c) + 1 if t < c else 1


def best(scores: np.ndarray, count: int) -> np.ndarray:
    """Ascending positions of the highest scores; of equal ones the first come first."""
    return np.sort(np.argsort(-scores, kind="stable")[:count])
