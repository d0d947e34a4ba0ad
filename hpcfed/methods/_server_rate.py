"""What methods have in common whose server steps by a learning rate of its own, which may
change from round to round.
"""

from collections.abc import Iterable
from typing import Literal

from hpcfed import options
from hpcfed.errors import UserError, count
from hpcfed.methods._interface import Federation
from hpcfed.options import RunConfig, Switch, option


class Options(options.Options):
    server_lr: float = option(1.0, "η_g, the server's learning rate", gt=0)
    server_lr_decay: float = option(
        1.0, "factor on --server-lr after every round, as in 0.99", gt=0, le=1
    )
    server_lr_schedule: Literal[
        "constant", "step", "cosine", "warmup", "warmup-cosine"
    ] = option(
        "constant",
        "how --server-lr changes from round to round, beside --server-lr-decay; warmup "
        "rises to it and stays",
    )
    server_lr_step_size: int | None = option(
        None,
        "rounds between two drops of the server's schedule step (default: a third of "
        "all)",
        ge=0,
    )
    server_lr_step_factor: float = option(
        0.1, "factor at every drop of the server's schedule step", gt=0, le=1
    )
    server_lr_min: float = option(
        0.0, "rate towards which the server's schedule cosine falls", ge=0
    )
    server_lr_warmup: int | None = option(
        None,
        "rounds in which the server's schedules with warmup rise (default: a tenth of "
        "all)",
        ge=0,
    )

    def switches(self, config: RunConfig) -> Iterable[Switch]:
        yield from super().switches(config)
        kind, several = self.server_lr_schedule, config.rounds > 1
        flag = "--server-lr-schedule"
        yield Switch("server_lr_decay", "--rounds 2 or more", several)
        acts = kind == "constant" or several
        yield Switch("server_lr_schedule", "--rounds 2 or more", acts)
        for name in ("server_lr_step_size", "server_lr_step_factor"):
            yield Switch(name, f"{flag} step", kind == "step")
        yield Switch("server_lr_min", f"{flag} cosine", kind.endswith("cosine"))
        yield Switch("server_lr_warmup", f"{flag} warmup", kind.startswith("warmup"))

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
    from hpcfed.clients.rates import RateSchedule

    o = fed.options
    rate = o.server_lr * o.server_lr_decay**round
    if o.server_lr_schedule == "constant":
        return rate
    schedule = RateSchedule(
        o.server_lr_schedule,
        drop_every=o.server_lr_step_size,
        drop=o.server_lr_step_factor,
        lowest=o.server_lr_min / o.server_lr,
        warmup=o.server_lr_warmup,
    )
    return rate * schedule.factor(round, fed.config.rounds)
