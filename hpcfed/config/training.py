"""Options of the network and of local training."""

from collections.abc import Iterable
from typing import ClassVar, Literal

from hpcfed.config.declare import Switch, flag_of, option
from hpcfed.config.newcomers import TURN_ON
from hpcfed.config.partition import PartitionOptions
from hpcfed.config.traits import MethodTraits
from hpcfed.errors import UserError, unknown
from hpcfed.models import MODELS


class TrainingOptions(PartitionOptions):
    title: ClassVar[str] = "network and local training"

    # `network` says what auto stands for.
    model: str = option("auto", "the network; auto: the usual one of the data set")
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
    weight_decay: float = option(0.0, "L2 decay of local SGD", ge=0)
    # 0 is a plain "off": nobody wants gradients of norm 0.
    clip: float = option(0.0, "largest norm of a client's gradient; 0: no limit", ge=0)

    def network(self) -> str:
        """Return the name of the network that clients train."""
        return self.data().model if self.model == "auto" else self.model


def training_switches(
    config: TrainingOptions, method: MethodTraits
) -> Iterable[Switch]:
    """Name the options of this group that act only where something else is on."""
    # Newcomers train after the last round, at the rate to which it has decayed.
    decays = config.rounds > 1 or config.new_clients > 0
    yield Switch("lr_decay", "--rounds 2 or more", decays)
    # Newcomers train by the options of every run, also where the method has its own.
    for name, replacement in method.trains_by.items():
        acts = config.new_clients > 0
        if name == "batch_size" and config.supplement:
            # The batch size then says who has little data.
            acts = acts or config.supplement_below is None
        reason = f"method {config.method} trains by {flag_of(replacement)}"
        yield Switch(name, f"{TURN_ON}: {reason}", acts)


def check_training(config: TrainingOptions) -> None:
    """Refuse an unknown network, and one that needs larger images."""
    known = ("auto", *MODELS)
    if config.model not in known:
        raise unknown("model", config.model, known)
    network, shape = config.network(), config.data().shape
    # Pooling would leave nothing of smaller images.
    smallest = MODELS[network].smallest
    if min(shape[1:]) < smallest:
        size = "x".join(map(str, shape))
        raise UserError(
            f"model {network} needs images of at least {smallest} pixels a side, "
            f"{config.dataset} has {size}; use --model cnn-digits or mlp"
        )
