"""Not a test: faults that tests of the swarm plant in the processes of its runs."""

import time
from dataclasses import replace
from typing import Any

import torch

from hpcfed.errors import UserError
from hpcfed.experiment import resume
from hpcfed.federation.cohort import Cohort
from hpcfed.federation.server_side import ServerSide
from hpcfed.methods import fedprox
from hpcfed.options import Settings
from hpcfed.runtime.launcher import launched

aggregated = ServerSide._aggregated
load = resume.load
of_seed = Settings.of_seed
prox_round = fedprox.round


def double_weight_of_rank_1() -> None:
    def planted(self: ServerSide, rows: torch.Tensor, cohort: Cohort) -> torch.Tensor:
        return aggregated(self, rows * (1 + launched().rank), cohort)

    ServerSide._aggregated = planted  # type: ignore[method-assign]


def prefer_client_0() -> None:
    def planted(self: ServerSide, rows: torch.Tensor, cohort: Cohort) -> torch.Tensor:
        is_first = torch.from_numpy(cohort.clients[cohort.chosen] == 0)
        return aggregated(self, rows * (1 + 0.01 * is_first[:, None]), cohort)

    ServerSide._aggregated = planted  # type: ignore[method-assign]


def forget_momentum() -> None:
    def planted(setup: Any, checkpoint: Any, state: Any) -> Any:
        state = load(setup, checkpoint, state)
        return replace(state, velocity=torch.zeros_like(state.velocity))

    resume.load = planted


def refuse_to_resume() -> None:
    def planted(setup: Any, checkpoint: Any, state: Any) -> Any:
        raise UserError("planted")

    resume.load = planted


def train_seeds_more_slowly() -> None:
    def planted(self: Settings, seed: int) -> Settings:
        settings = of_seed(self, seed)
        slower = settings.config.model_copy(update={"lr": 0.99 * settings.config.lr})
        return replace(settings, config=slower)

    Settings.of_seed = planted  # type: ignore[method-assign]


def prox_of_its_own() -> None:
    def planted(fed: Any, state: Any, cohort: Cohort) -> Any:
        after = prox_round(fed, state, cohort)
        return replace(after, w=after.w * 1.0001)

    fedprox.round = planted


def hang() -> None:
    def planted(self: ServerSide, rows: torch.Tensor, cohort: Cohort) -> torch.Tensor:
        time.sleep(1000)
        raise AssertionError

    ServerSide._aggregated = planted  # type: ignore[method-assign]
