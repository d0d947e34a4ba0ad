"""Options of the local optimiser and of how its learning rate changes."""

from collections.abc import Iterable
from typing import ClassVar, Literal

from hpcfed.errors import UserError, count
from hpcfed.options.declare import Choice, Switch, option
from hpcfed.options.training import TrainingOptions
from hpcfed.options.traits import MethodTraits

USUAL_RATE = 0.001
"""The learning rate of Adam and AdamW where the user names none."""


class OptimiserOptions(TrainingOptions):
    title: ClassVar[str] = "local optimiser and learning rate"

    optimiser: Literal["sgd", "adam", "adamw"] = option(
        "sgd",
        "local optimiser; its moments start from zero each round; --weight-decay is L2 "
        "for adam, decoupled for adamw",
    )
    nesterov: bool = option(
        False, "Nesterov's form of --momentum, as torch.optim.SGD has it"
    )
    beta1: float = option(0.9, "Adam's decay of the gradient's mean", ge=0, lt=1)
    beta2: float = option(0.999, "Adam's decay of the gradient's square", ge=0, lt=1)
    # 0 would divide 0 by 0 where a gradient has always been 0.
    adam_epsilon: float = option(1e-8, "Adam's term against division by zero", gt=0)
    lr_schedule: Literal["constant", "step", "cosine", "warmup-cosine"] = option(
        "constant", "how the learning rate changes, beside --lr-decay"
    )
    lr_schedule_by: Literal["round", "step"] = option(
        "round",
        "whether it changes from round to round, or from step to step within each "
        "client's local training",
    )
    lr_step_size: int | None = option(
        None,
        "rounds or steps between two drops of the schedule step (default: a third of "
        "all)",
        ge=0,
    )
    lr_step_factor: float = option(
        0.1,
        "factor on the learning rate at every drop of the schedule step",
        gt=0,
        le=1,
    )
    lr_min: float = option(
        0.0, "learning rate towards which the schedule cosine falls", ge=0
    )
    lr_warmup: int | None = option(
        None,
        "rounds or steps in which the schedule warmup-cosine rises to --lr (default: a "
        "tenth of all; 0: it never rises)",
        zero=True,
        ge=0,
    )


def optimiser_switches(config: OptimiserOptions) -> Iterable[Switch]:
    """Name the options of this group that act only where something else is on."""
    is_sgd = config.optimiser == "sgd"
    yield Switch("momentum", "--optimiser sgd", is_sgd)
    by_momentum = is_sgd and config.momentum > 0
    yield Switch("nesterov", "--optimiser sgd --momentum 0.9", by_momentum)
    for name in ("beta1", "beta2", "adam_epsilon"):
        yield Switch(name, "--optimiser adam or adamw", not is_sgd)
    kind = config.lr_schedule
    several_rounds = config.rounds > 1 or config.new_clients > 0
    acts = kind == "constant" or config.lr_schedule_by == "step" or several_rounds
    yield Switch("lr_schedule", "--rounds 2 or more, or --lr-schedule-by step", acts)
    yield Switch("lr_schedule_by", "--lr-schedule cosine", kind != "constant")
    yield Switch("lr_step_size", "--lr-schedule step", kind == "step")
    yield Switch("lr_step_factor", "--lr-schedule step", kind == "step")
    yield Switch("lr_min", "--lr-schedule cosine", kind.endswith("cosine"))
    yield Switch("lr_warmup", "--lr-schedule warmup-cosine", kind == "warmup-cosine")


def optimiser_choices(config: OptimiserOptions) -> Iterable[Choice]:
    """Replace the usual learning rate, which is SGD's, for Adam."""
    if config.optimiser != "sgd":
        reason = f"usual for {config.optimiser}; --lr sets another"
        yield Choice("lr", USUAL_RATE, reason)


def check_plain_sgd(config: OptimiserOptions, flag: str) -> None:
    """Refuse local training other than SGD at one rate, without more on its gradient."""
    others = {
        f"--optimiser {config.optimiser}": config.optimiser != "sgd",
        "--lr-schedule-by step": config.lr_schedule != "constant"
        and config.lr_schedule_by == "step",
        "--augment": config.augment != "none",
        "--clip": config.clip > 0,
    }
    for other, asked in others.items():
        if asked:
            raise UserError(f"{flag} goes without {other}")


def check_optimiser(config: OptimiserOptions, method: MethodTraits) -> None:
    """Refuse a schedule that never does what it says, and optimisers that the method's
    formulas do not hold for.
    """
    if config.lr_min > config.lr:
        raise UserError(f"--lr-min {config.lr_min:g} is above --lr {config.lr:g}")
    if config.lr_schedule_by == "round":
        for flag, value in (
            ("--lr-step-size", config.lr_step_size),
            ("--lr-warmup", config.lr_warmup),
        ):
            if value is not None and value >= config.rounds:
                rounds = count(config.rounds, "round")
                raise UserError(f"{flag} {value}, but there are only {rounds}")
    if not method.needs_sgd:
        return
    if config.optimiser != "sgd":
        raise UserError(
            f"--optimiser {config.optimiser}: method {config.method} takes local steps "
            "for those of SGD; use --optimiser sgd"
        )
    if config.lr_schedule != "constant" and config.lr_schedule_by == "step":
        raise UserError(
            f"--lr-schedule-by step: method {config.method} divides by one learning rate "
            "for all steps of a round; use --lr-schedule-by round"
        )
