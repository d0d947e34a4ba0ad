"""Adapters of PEFT that a run starts from decide the shape of its own."""

from collections.abc import Iterable
from math import isclose
from pathlib import Path

from hpcfed.errors import UserError
from hpcfed.models import peft_files
from hpcfed.options.declare import Choice
from hpcfed.options.training import TrainingOptions


def adapter_choices(init: Path | None) -> Iterable[Choice]:
    """Take the adapters' shape from a folder of PEFT that the run starts from."""
    if init is None or not peft_files.is_folder(init):
        return
    found = peft_files.read_config(init)
    yield Choice("lora", found.rank, f"the adapters of --init {init} have this rank")
    yield Choice("lora_alpha", found.alpha, "theirs")
    yield Choice("lora_layers", found.layers, "theirs")
    if found.train is not None:
        yield Choice("lora_train", found.train, "theirs")


def check_adapters(config: TrainingOptions, init: Path | None) -> None:
    """Refuse adapters of another shape than those that the run starts from."""
    if init is None or not peft_files.is_folder(init):
        return
    found = peft_files.read_config(init)
    if config.lora is None:
        raise UserError(
            f"--init {init} holds adapters; leave --lora out, or give their rank"
        )
    alpha = config.lora_alpha or config.lora
    for flag, ours, theirs in (
        ("--lora", config.lora, found.rank),
        ("--lora-alpha", alpha, found.alpha),
    ):
        if not isclose(ours, theirs):
            raise UserError(
                f"{flag} {ours:g}, but the adapters of --init {init} have {theirs:g}; "
                f"leave {flag} out, or give theirs"
            )
