"""Options of the network and of local training."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Literal

from hpcfed import plugins
from hpcfed.data import DatasetInfo
from hpcfed.errors import UserError, unknown
from hpcfed.models import MODELS, ModelInfo, hugging_face
from hpcfed.options.declare import Switch, flag_of, option
from hpcfed.options.newcomers import TURN_ON
from hpcfed.options.partition import PartitionOptions
from hpcfed.options.tables import Table, parse_table
from hpcfed.options.traits import MethodTraits


class TrainingOptions(PartitionOptions):
    title: ClassVar[str] = "network and local training"

    # `network` says what auto stands for.
    model: str = option(
        "auto",
        "the network: one that `hpcfed list` names, or yours as FILE.py:NAME or "
        "package.module:NAME; auto: the usual one of the data set",
    )
    model_options: Table = option(
        None, "keywords for your own network, as JSON: '{\"depth\": 4}'"
    )
    send_frozen: bool = option(
        False,
        "own networks: also send parameters that are frozen (requires_grad=False)",
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
        None, "LoRA: adapters count by alpha / rank (default: alpha = rank)", ge=0
    )
    lora_layers: str = option(
        "*", "LoRA: names of the layers with adapters, as in '*.attention.*,head'"
    )
    lora_train: str | None = option(
        None, "LoRA: names of layers that are trained as a whole, as in head"
    )
    augment: Literal["none", "crop-flip"] = option(
        "none",
        "augmentation of training images; crop-flip: shift by up to 4 pixels each way "
        "and mirror, drawn again every time",
    )
    # Larger numbers overflow the engine's counters of steps and of slots in a batch.
    epochs: int = option(2, "local epochs per round", ge=1, le=100_000)
    batch_size: int = option(16, "samples per local step", ge=1, lt=2**31)
    # A learning rate of 0 would train nothing and say nothing.
    lr: float = option(0.05, "learning rate", gt=0)
    lr_decay: float = option(
        1.0, "factor on the learning rate after every round", gt=0, le=1
    )
    momentum: float = option(
        0.9, "momentum of local SGD; starts from zero each round", ge=0, lt=1
    )
    weight_decay: float = option(0.0, "L2 decay of local training", ge=0)
    # 0 is a plain "off": nobody wants gradients of norm 0.
    clip: float = option(0.0, "largest norm of a client's gradient; 0: no limit", ge=0)

    def network(self) -> str:
        """Return the name of the network that clients train."""
        return self.data().model if self.model == "auto" else self.model

    @property
    def model_keywords(self) -> dict[str, Any]:
        """The keywords that the user's own network is built with."""
        return parse_table(self.model_options)

    def model_info(self) -> ModelInfo | None:
        """Return what the catalogue knows of the network; None for one of the user's,
        or one with adapters.
        """
        return None if self.lora else MODELS.get(self.network())


def training_switches(
    config: TrainingOptions, method: MethodTraits
) -> Iterable[Switch]:
    """Name the options of this group that act only where something else is on."""
    # Newcomers train after the last round, at the rate to which it has decayed.
    own = config.model != "auto" and config.model not in MODELS
    yield Switch("model_options", "--model FILE.py:NAME", own)
    frozen = own or config.lora is not None
    yield Switch("send_frozen", "--model FILE.py:NAME", frozen)
    for name in ("lora_alpha", "lora_layers", "lora_train"):
        yield Switch(name, "--lora 8", config.lora is not None)
    decays = config.rounds > 1 or config.new_clients > 0
    yield Switch("lr_decay", "--rounds 2 or more", decays)
    # Newcomers train by the options of every run, also where the method has its own.
    for name, replacement in method.replaced().items():
        acts = config.new_clients > 0
        if name == "batch_size" and config.supplement:
            # The batch size then says who has little data.
            acts = acts or config.supplement_below is None
        reason = f"method {config.method} trains by {flag_of(replacement)}"
        yield Switch(name, f"{TURN_ON}: {reason}", acts)


def check_training(config: TrainingOptions) -> None:
    """Refuse an unknown network, and one that cannot take the samples."""
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
    """Refuse a network of the user's that is not there; it is built later, by torch."""
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
    """Refuse a network of the catalogue that cannot take the data set's samples."""
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
    # Pooling would leave nothing of smaller images.
    smallest = MODELS[network].smallest
    if data.side and data.side < smallest:
        raise UserError(
            f"model {network} needs images of at least {smallest} pixels a side, "
            f"{config.dataset} has {size}; use --model cnn-digits or mlp"
        )
