"""Options of the network, of local training, and of its optimiser."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Literal

from hpcfed import plugins
from hpcfed.data import DatasetInfo
from hpcfed.errors import UserError, count, unknown
from hpcfed.models import MODELS, ModelInfo, hugging_face
from hpcfed.options.declare import Choice, Need, option
from hpcfed.options.partition import PartitionOptions
from hpcfed.options.rates import RateSchedule
from hpcfed.options.tomlfile import Table, parse_table
from hpcfed.options.traits import MethodTraits

SGD = Need("--optimiser sgd", lambda run: run.optimiser == "sgd")
_LORA = Need("--lora 8", lambda run: run.lora is not None)


def _own_network(run: Any) -> bool:
    return run.model != "auto" and run.model not in MODELS


def has_later_rounds(run: Any) -> bool:
    """Tell whether anyone trains after the first round."""
    # Newcomers train after the last round, at the decayed learning rate.
    return bool(run.rounds > 1 or run.new_clients > 0)


class TrainingOptions(PartitionOptions):
    title: ClassVar[str] = "network and local training"

    # `network` resolves auto.
    model: str = option(
        "auto",
        "the network: one that `hpcfed list` names, or yours as FILE.py:NAME or "
        "package.module:NAME; auto: the usual one of the data set",
        told="beside the data set",
        names_code="model",
        also="network arch architecture net backbone model_name",
    )
    model_options: Table = option(
        None,
        "keywords for your own network, as JSON: '{\"depth\": 4}'",
        needs=Need("--model FILE.py:NAME", _own_network),
    )
    send_frozen: bool = option(
        False,
        "own networks: also send parameters that are frozen (requires_grad=False)",
        needs=Need(
            "--model FILE.py:NAME",
            lambda run: _own_network(run) or run.lora is not None,
        ),
    )
    # LoRA freezes the network; rows then hold the adapters alone.
    lora: int | None = option(
        None,
        "train adapters of this rank beside frozen linear layers (LoRA); the server "
        "averages their factors A and B, not the products B A (default: train the "
        "network itself)",
        ge=0,
    )
    lora_alpha: float | None = option(
        None,
        "LoRA: adapters count by alpha / rank (default: alpha = rank)",
        ge=0,
        needs=_LORA,
    )
    lora_layers: str = option(
        "*",
        "LoRA: names of the layers with adapters, as in '*.attention.*,head'",
        needs=_LORA,
    )
    lora_train: str | None = option(
        None,
        "LoRA: names of layers that are trained as a whole, as in head",
        needs=_LORA,
    )
    lora_clients: bool = option(
        False,
        "LoRA: when the run ends, also write every client's own adapters, in the files "
        "of PEFT",
        changes="nothing",
        needs=(_LORA, Need("--out", lambda run: run.out is not None)),
    )
    augment: Literal["none", "crop-flip"] = option(
        "none",
        "augmentation of training images; crop-flip: shift by up to 4 pixels each way "
        "and mirror, drawn again every time",
        also="augmentation data_augmentation transforms",
    )
    # Larger numbers overflow the engine's counters of steps and of slots in a batch.
    epochs: int = option(
        2,
        "local epochs per round",
        ge=1,
        le=100_000,
        also="local_epochs local_ep num_epochs E local_num_epochs "
        "epochs_per_round max_epochs client_epochs",
    )
    batch_size: int = option(
        16,
        "samples per local step",
        ge=1,
        lt=2**31,
        also="batch bs batchsize local_bs local_batch_size minibatch b B "
        "train_batch_size",
    )
    # Not 0: that would silently train nothing.
    lr: float = option(
        0.05,
        "learning rate",
        gt=0,
        stackable=True,
        also="learning_rate eta local_lr client_lr step_size learningrate "
        "local_learning_rate client_learning_rate init_lr",
    )
    lr_decay: float = option(
        1.0,
        "factor on the learning rate after every round",
        gt=0,
        le=1,
        stackable=True,
        also="decay gamma learning_rate_decay",
        needs=Need("--rounds 2 or more", has_later_rounds),
    )
    momentum: float = option(
        0.9, "momentum of local SGD; starts from zero each round", ge=0, lt=1, needs=SGD
    )
    weight_decay: float = option(
        0.0, "L2 decay of local training", ge=0, also="wd l2 l2_reg regularization"
    )
    # 0 means "off": gradients of norm 0 would make no sense.
    clip: float = option(
        0.0,
        "largest norm of a client's gradient; 0: no limit",
        ge=0,
        also="grad_clip max_grad_norm gradient_clipping clip_value clipping_norm "
        "clipping_bound",
    )

    def network(self) -> str:
        """Return the name of the network that clients train."""
        return self.data().model if self.model == "auto" else self.model

    def tokeniser_folder(self) -> Path | None:
        """Return the folder of the tokeniser: by default, that of the network."""
        of_model = hugging_face.is_hugging_face(self.model)
        if self.tokeniser is None and self.needs_tokeniser and of_model:
            return hugging_face.find_folder(self.model)
        return self.tokeniser

    def packs_apart(self) -> bool:
        """Tell whether samples that are packed into a row do not see each other."""
        return self.text_pack and hugging_face.is_hugging_face(self.model)

    @property
    def model_keywords(self) -> dict[str, Any]:
        """The keywords that the user's own network is built with."""
        return parse_table(self.model_options)

    def model_info(self) -> ModelInfo | None:
        """Return the catalogue's entry; None for own networks and with adapters."""
        return None if self.lora else MODELS.get(self.network())


def check_training(config: TrainingOptions) -> None:
    """Refuse an unknown network, and one that does not fit the samples."""
    if config.model not in ("auto", *MODELS):
        _check_own(config.model)
    network, data = config.network(), config.data()
    if config.augment != "none" and not data.side:
        raise UserError(
            f"--augment {config.augment} is for images, and {config.dataset} has none"
        )
    if network in MODELS or not network:
        _check_takes(config, network, data)


def _check_own(model: str) -> None:
    """Refuse a missing network of the user's own; torch builds it later."""
    if plugins.is_reference(model):
        where = model.rpartition(":")[0]
        if plugins.is_file(where) and not Path(where).expanduser().is_file():
            raise UserError(f"--model {model}: there is no file {where}")
        return
    if hugging_face.is_hugging_face(model):
        hugging_face.find_folder(model)
        return
    if plugins.is_file(model):
        raise UserError(
            f"--model {model}: say which class or function builds the network, as in "
            f"{model}:Net"
        )
    entries = plugins.installed("models")
    if model not in entries:
        raise unknown(
            "model", model, ("auto", *MODELS, *entries, "FILE.py:NAME", "hf:DIR")
        )


def _check_takes(config: TrainingOptions, network: str, data: DatasetInfo) -> None:
    """Refuse a network of the catalogue that does not fit the data set's samples."""
    if data.vocabulary:
        raise UserError(
            f"{config.dataset} has tokens, which no network of the catalogue takes; "
            "name one of yours, as in --model gpt.py:GPT"
        )
    size = "x".join(map(str, data.shape))
    if not data.side and network != "mlp":
        raise UserError(
            f"model {network} is for images, {config.dataset} has samples of {size} "
            "numbers; use --model mlp"
        )
    # Pooling would shrink smaller images to nothing.
    smallest = MODELS[network].smallest
    if data.side and data.side < smallest:
        raise UserError(
            f"model {network} needs images of at least {smallest} pixels a side, "
            f"{config.dataset} has {size}; use --model cnn-digits or mlp"
        )


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
            lambda run: (
                f"--rounds {run.rate_schedule.least(run.rounds)} or more, or "
                "--lr-schedule-by step"
            ),
            lambda run: (
                run.lr_schedule == "constant"
                or run.lr_schedule_by == "step"
                or run.rate_schedule.least(run.rounds) == run.rounds
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
        "N rounds or steps in which the schedule warmup-cosine rises to --lr; the first "
        "has 1/N of it, so 1 is no rise (default: a tenth of all; 0: it never rises)",
        zero=True,
        ge=0,
        counts="rounds",
        also="warmup warmup_rounds warmup_steps warm_up num_warmup_steps",
        needs=Need(
            "--lr-schedule warmup-cosine",
            lambda run: run.lr_schedule == "warmup-cosine",
        ),
    )

    @property
    def rate_schedule(self) -> RateSchedule:
        """How the learning rate changes, beside --lr-decay."""
        return RateSchedule(
            self.lr_schedule,
            drop_every=self.lr_step_size,
            drop=self.lr_step_factor,
            lowest=self.lr_min / self.lr,
            warmup=self.lr_warmup,
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
            raise UserError(f"{flag} cannot be combined with {other}")


def check_within(rounds: int, flag: str, asked: int | None) -> None:
    """Refuse a number of rounds after which no round is left."""
    if asked is not None and asked >= rounds:
        left = count(rounds, "round")
        raise UserError(f"{flag} {asked}, but there are only {left}")


def check_optimiser(config: OptimiserOptions, method: MethodTraits) -> None:
    """Refuse schedules without effect, and optimisers that the method excludes."""
    if config.lr_min > config.lr:
        raise UserError(f"--lr-min {config.lr_min:g} is above --lr {config.lr:g}")
    if config.lr_schedule_by == "round":
        check_within(config.rounds, "--lr-step-size", config.lr_step_size)
        check_within(config.rounds, "--lr-warmup", config.lr_warmup)
    if not method.needs_sgd:
        return
    if config.optimiser != "sgd":
        raise UserError(
            f"--optimiser {config.optimiser}: method {config.method} assumes that "
            "local steps are those of SGD; use --optimiser sgd"
        )
    if config.lr_schedule != "constant" and config.lr_schedule_by == "step":
        raise UserError(
            f"--lr-schedule-by step: method {config.method} divides by one learning rate "
            "for all steps of a round; use --lr-schedule-by round"
        )
