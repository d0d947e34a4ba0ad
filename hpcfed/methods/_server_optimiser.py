"""Shared by methods whose server has a learning rate, or treats the clients' mean update
as a gradient, and moves the global row by its own optimiser.

Reddi et al. 2021, Algorithm 2: Δ = Σ weightᵢ (rowᵢ − w) is the pseudo-gradient. Running
statistics of batch norm are not parameters: they are averaged as in FedAvg.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from hpcfed import options
from hpcfed.errors import UserError
from hpcfed.methods import fedavg
from hpcfed.methods._interface import Cohort, Federation, Tensor
from hpcfed.options import Need, RunConfig, option
from hpcfed.options.rates import RateSchedule
from hpcfed.options.training import check_within

EXTENDS = fedavg

SecondMoment = Callable[[Tensor, Tensor], Tensor]
"""Takes v and Δ², and returns the next v."""
_LATER = Need("--rounds 2 or more", lambda run: run.rounds > 1)
_STEP = Need("--server-lr-schedule step", lambda run: run.server_lr_schedule == "step")


class RateOptions(options.Options):
    """Options of methods whose server has a learning rate, which may change by round."""

    server_lr: float = option(
        1.0,
        "η_g, the server's learning rate",
        gt=0,
        also="global_lr eta_g server_learning_rate global_learning_rate central_lr",
    )
    server_lr_decay: float = option(
        1.0,
        "factor on --server-lr after every round, as in 0.99",
        gt=0,
        le=1,
        needs=_LATER,
    )
    server_lr_schedule: Literal[
        "constant", "step", "cosine", "warmup", "warmup-cosine"
    ] = option(
        "constant",
        "how --server-lr changes from round to round, beside --server-lr-decay; warmup "
        "rises to it and stays",
        needs=Need(
            lambda run: f"--rounds {run.server_schedule.least(run.rounds)} or more",
            lambda run: run.server_schedule.least(run.rounds) == run.rounds,
        ),
    )
    server_lr_step_size: int | None = option(
        None,
        "rounds between two drops of the server's schedule step (default: a third of "
        "all)",
        ge=0,
        counts="rounds",
        needs=_STEP,
    )
    server_lr_step_factor: float = option(
        0.1,
        "factor at every drop of the server's schedule step",
        gt=0,
        le=1,
        needs=_STEP,
    )
    server_lr_min: float = option(
        0.0,
        "rate towards which the server's schedule cosine falls",
        ge=0,
        needs=Need(
            "--server-lr-schedule cosine",
            lambda run: run.server_lr_schedule.endswith("cosine"),
        ),
    )
    server_lr_warmup: int | None = option(
        None,
        "N rounds in which the server's schedules with warmup rise; the first has 1/N of "
        "the rate, so 1 is no rise (default: a tenth of all)",
        ge=0,
        counts="rounds",
        needs=Need(
            "--server-lr-schedule warmup",
            lambda run: run.server_lr_schedule.startswith("warmup"),
        ),
    )

    @property
    def server_schedule(self) -> RateSchedule:
        """How the server's learning rate changes, beside --server-lr-decay."""
        return RateSchedule(
            self.server_lr_schedule,
            drop_every=self.server_lr_step_size,
            drop=self.server_lr_step_factor,
            # A share, because the schedule only knows factors on the rate.
            lowest=self.server_lr_min / self.server_lr,
            warmup=self.server_lr_warmup,
        )

    def check(self, config: RunConfig) -> None:
        super().check(config)
        if self.server_lr_min > self.server_lr:
            raise UserError(
                f"--server-lr-min {self.server_lr_min:g} is above --server-lr "
                f"{self.server_lr:g}"
            )
        check_within(config.rounds, "--server-lr-step-size", self.server_lr_step_size)
        check_within(config.rounds, "--server-lr-warmup", self.server_lr_warmup)


def server_rate(fed: Federation[RateOptions], round: int) -> float:
    """Return the server's learning rate in a round."""
    o = fed.options
    # Rounds count from 0, so the first one has the full rate.
    rate = o.server_lr * o.server_lr_decay**round
    return rate * o.server_schedule.factor(round, fed.config.rounds)


class Options(RateOptions):
    """Options of the methods that adapt the rate of every column."""

    server_lr: float = option(0.03, "η, the server's learning rate", gt=0)
    server_momentum: float = option(
        0.9,
        "β₁: what the server's momentum keeps of its past",
        ge=0,
        lt=1,
        also="server_beta1",
    )
    server_tau: float = option(
        1e-3, "τ, added to √v: the larger, the less the rates adapt", gt=0, also="tau"
    )


@dataclass(frozen=True)
class State(fedavg.State):
    m: Tensor
    """The momentum, of every parameter."""
    v: Tensor
    """The mean or the sum of Δ², of every parameter."""


def init(fed: Federation[Options]) -> State:
    w = fed.initial_row()
    m = w.new_zeros(fed.layout.num_parameters)
    # Algorithm 2 asks for v ≥ τ² at the start.
    v = m + fed.options.server_tau**2
    return State(w, m, v)


def adaptive_round(
    fed: Federation[Options],
    state: State,
    cohort: Cohort,
    *,
    second_moment: SecondMoment,
) -> State:
    """Run a round of Algorithm 2; methods differ only in `second_moment`."""
    # Without uploads there is no step to take.
    if not fed.hears(cohort):
        return state
    mean = mean_row(fed, state.w, cohort)
    delta = (mean - state.w)[: len(state.m)]
    beta, tau = fed.options.server_momentum, fed.options.server_tau
    m = beta * state.m + (1 - beta) * delta
    v = second_moment(state.v, delta.square())
    rate = server_rate(fed, cohort.round)
    # Without Adam's bias correction, as in Algorithm 2.
    step = rate * m / (v.sqrt() + tau)
    return State(moved(state.w, step, mean), m, v)


def mean_row(fed: Federation, w: Tensor, cohort: Cohort) -> Tensor:
    """Train the cohort from w, and return the mean Σ weightᵢ rowᵢ.

    The mean minus w is Δ, because the weights sum to one.
    """
    rows = fed.download(w, cohort)
    rows = fed.train(rows, cohort)
    rows = fed.upload(rows, cohort)
    return fed.mean(rows, cohort)


def moved(w: Tensor, step: Tensor, mean: Tensor) -> Tensor:
    """Return w with parameters moved by `step`, and running statistics of `mean`."""
    num_parameters = len(step)
    return torch.cat([w[:num_parameters] + step, mean[num_parameters:]])
