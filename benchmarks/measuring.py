"""Settings and clocks that several benchmarks share."""

from typing import Any

import torch

from hpcfed import methods
from hpcfed.options import Settings, resolve


def settings_of(values: dict[str, Any]) -> Settings:
    """Return the settings of a FedAvg run with these options."""
    # Sources are for messages about mistakes, of which there are none.
    sources = {name: name for name in values}
    return resolve(values, sources, methods.load("fedavg").Options)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done its work, so that a clock counts all of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
