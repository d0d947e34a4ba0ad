"""Options of the local optimiser and of how its learning rate changes."""

from collections.abc import Iterable
from typing import ClassVar, Literal

from hpcfed.errors import UserError, count
from hpcfed.options.declare import Choice, Need, option
from hpcfed.options.training import TrainingOptions, has_later_rounds
from hpcfed.options.traits import MethodTraits

USUAL_RATE = 0.001
"""The default learning rate of Adam and AdamW."""

_ADAM = Need("--optimiser adam or adamw", lambda run: run.optimiser != "sgd")
_STEP = Need("--lr-schedule step", lambda run: run.lr_schedule == "step")


class OptimiserOptions(TrainingOptions):
    title: ClassVar[str] = "local optimiser and learning rate"

    optimiser: Literal["sgd", "adam", "adamw"] = option(
        "sgd",
        "local optimiser; its moments start from zero each round; --weight-decay is L2 "
        "for adam, decoupled for adamw",
        also="optimizer optim local_optimizer client_optimizer opt optimizer_name",
    )
    nesterov: bool = option(
        False,
        "Nesterov's form of --momentum, as torch.optim.SGD has it",
        needs=Need(
            "--optimiser sgd --momentum 0.9",
            lambda run: run.optimiser == "sgd" and run.momentum > 0,
        ),
    )
    beta1: float = option(
        0.9,
        "Adam's decay of the gradient's mean",
        ge=0,
        lt=1,
        also="betas adam_beta1 beta_1",
        needs=_ADAM,
    )
    beta2: float = option(
        0.999,
        "Adam's decay of the gradient's square",
        ge=0,
        lt=1,
        also="adam_beta2 beta_2",
        needs=_ADAM,
    )
    # Not 0: a gradient that has always been 0 would give 0 / 0.
    adam_epsilon: float = option(
        1e-8,
        "Adam's term against division by zero",
        gt=0,
        also="eps adam_eps",
        needs=_ADAM,
    )
    lr_schedule: Literal["constant", "step", "cosine", "warmup-cosine"] = option(
        "constant",
        "how the learning rate changes, beside --lr-decay",
        also="scheduler lr_scheduler learning_rate_schedule",
        needs=Need(
            "--rounds 2 or more, or --lr-schedule-by step",
            lambda run: (
                run.lr_schedule == "constant"
                or run.lr_schedule_by == "step"
                or has_later_rounds(run)
            ),
        ),
    )
    lr_schedule_by: Literal["round", "step"] = option(
        "round",
        "whether it changes from round to round, or from step to step within each "
        "client's local training",
        needs=Need("--lr-schedule cosine", lambda run: run.lr_schedule != "constant"),
    )
    lr_step_size: int | None = option(
        None,
        "rounds or steps between two drops of the schedule step (default: a third of "
        "all)",
        ge=0,
        counts="rounds",
        also="lr_step decay_steps milestones",
        needs=_STEP,
    )
    lr_step_factor: float = option(
        0.1,
        "factor on the learning rate at every drop of the schedule step",
        gt=0,
        le=1,
        also="lr_gamma",
        needs=_STEP,
    )
    lr_min: float = option(
        0.0,
        "learning rate towards which the schedule cosine falls",
        ge=0,
        also="min_lr eta_min lr_end",
        needs=Need(
            "--lr-schedule cosine", lambda run: run.lr_schedule.endswith("cosine")
        ),
    )
    lr_warmup: int | None = option(
        None,
        "rounds or steps in which the schedule warmup-cosine rises to --lr (default: a "
        "tenth of all; 0: it never rises)",
        zero=True,
        ge=0,
        counts="rounds",
        also="warmup warmup_rounds warmup_steps warm_up num_warmup_steps",
        needs=Need(
            "--lr-schedule warmup-cosine",
            lambda run: run.lr_schedule == "warmup-cosine",
        ),
    )


def optimiser_choices(config: OptimiserOptions) -> Iterable[Choice]:
    """Replace the default learning rate, which suits SGD, for Adam."""
    if config.optimiser != "sgd":
        reason = f"usual for {config.optimiser}; --lr sets another"
        yield Choice("lr", USUAL_RATE, reason)


def check_plain_sgd(config: OptimiserOptions, flag: str) -> None:
    """Refuse local training other than SGD at one rate on the unmodified gradient."""
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
    """Refuse a schedule that would have no effect, and optimisers for which the
    method's formulas do not hold.
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
