"""GenFed (Zheng et al. 2025): FedAvg of the ρ_t uploads that do best on the server's
validation set.

In round t = 0, 1, … the server selects ρ_t uploads: the schedule's value, rounded down,
at least 1, and at most ρ_max and the cohort size. The paper prints only the second
branch of schedule (5); we take the first from (4) and the text. It does not print
ρ_max, b and c either, nor who wins a tie. The supplement, the algorithm's
initialisation phase, is an option of every method.
"""

import math
from typing import Literal

from hpcfed import options
from hpcfed.methods import Cohort, Federation, Tensor, fedavg
from hpcfed.options import Need, option

EXTENDS = fedavg
VALIDATES = True


class Options(options.Options):
    schedule: Literal["constant", "power", "linear", "sine", "arch"] = option(
        "linear",
        "how many uploads are selected: ρ_max; ρ_max(1 − b^t) + 1; ρ_max·t/c + 1; the same "
        "by a quarter of a sine; up and down again by a half: the paper's (1) to (5)",
        stackable=True,
    )
    rho_max: int = option(
        5,
        "ρ_max, the most uploads that are selected",
        ge=1,
        counts="uploads",
        stackable=True,
    )
    schedule_base: float = option(
        0.98,
        "b of the schedule power",
        gt=0,
        lt=1,
        stackable=True,
        needs=Need("--schedule power", lambda run: run.schedule == "power"),
    )
    schedule_rounds: int = option(
        200,
        "c of the schedules linear, sine and arch, in rounds",
        ge=1,
        stackable=True,
        needs=Need(
            "--schedule linear", lambda run: run.schedule in ("linear", "sine", "arch")
        ),
    )

    ties: Literal["id", "loss"] = option(
        "id",
        "which of the uploads with equally many right answers is selected first: the "
        "lowest client id, or the smallest loss on the validation set",
        stackable=True,
    )

    def rho(self, t: int, uploads: int) -> int:
        """Return ρ_t, the number to select from `uploads` uploads in round t."""
        most = min(self.rho_max, uploads)
        return max(1, min(math.floor(self._schedule(t)), most))

    def _schedule(self, t: int) -> float:
        """Return ρ_t by Eqs. 5 to 9, the schedules (1) to (5)."""
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


def round(
    fed: Federation[Options], state: fedavg.State, cohort: Cohort
) -> fedavg.State:
    """Run Algorithm 2, the training phase: S_t is the cohort, C_t the selected part."""
    rows = fed.train(fed.download(state.w, cohort), cohort)
    rows, selected, _ = best(fed, rows, cohort)
    # w ← Σ over C_t; weights by samples are renormalised to sum to one.
    return fedavg.State(fed.mean(rows, selected))


def best(
    fed: Federation[Options], rows: Tensor, cohort: Cohort
) -> tuple[Tensor, Cohort, Cohort]:
    """Upload rows; return the best, their cohort, and that of all arrived."""
    rows, cohort = fed.arrived(fed.upload(rows, cohort), cohort)
    rho = fed.options.rho(cohort.round, len(cohort.clients))
    # Algorithm 1: C_t, the ρ_t uploads of S_t that do best on the validation set.
    by_loss = fed.options.ties == "loss"
    rows, selected = fed.select(rows, cohort, rho, ties_by_loss=by_loss)
    return rows, selected, cohort
