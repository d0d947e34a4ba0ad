"""Shared by methods whose server has a learning rate, which may change by round."""

from typing import Literal

from hpcfed import options
from hpcfed.clients.job import RateSchedule
from hpcfed.errors import UserError, count
from hpcfed.methods._interface import Federation
from hpcfed.options import Need, RunConfig, option

_LATER = Need("--rounds 2 or more", lambda run: run.rounds > 1)
_STEP = Need("--server-lr-schedule step", lambda run: run.server_lr_schedule == "step")


class Options(options.Options):
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
            "--rounds 2 or more",
            lambda run: run.server_lr_schedule == "constant" or run.rounds > 1,
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
        "rounds in which the server's schedules with warmup rise (default: a tenth of "
        "all)",
        ge=0,
        counts="rounds",
        needs=Need(
            "--server-lr-schedule warmup",
            lambda run: run.server_lr_schedule.startswith("warmup"),
        ),
    )

    def check(self, config: RunConfig) -> None:
        super().check(config)
        if self.server_lr_min > self.server_lr:
            raise UserError(
                f"--server-lr-min {self.server_lr_min:g} is above --server-lr "
                f"{self.server_lr:g}"
            )
        for flag, value in (
            ("--server-lr-step-size", self.server_lr_step_size),
            ("--server-lr-warmup", self.server_lr_warmup),
        ):
            if value is not None and value >= config.rounds:
                rounds = count(config.rounds, "round")
                raise UserError(f"{flag} {value}, but there are only {rounds}")


def server_rate(fed: Federation[Options], round: int) -> float:
    """Return the server's learning rate in a round."""
    o = fed.options
    # Rounds count from 0, so the first one has the full rate.
    rate = o.server_lr * o.server_lr_decay**round
    if o.server_lr_schedule == "constant":
        return rate
    schedule = RateSchedule(
        o.server_lr_schedule,
        drop_every=o.server_lr_step_size,
        drop=o.server_lr_step_factor,
        # A share, because the schedule only knows factors on the rate.
        lowest=o.server_lr_min / o.server_lr,
        warmup=o.server_lr_warmup,
    )
    return rate * schedule.factor(round, fed.config.rounds)
