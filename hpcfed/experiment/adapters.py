"""Writes the adapters of a run with --lora when it ends, in the files of PEFT."""

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from hpcfed.clients.initial import save_adapters, tensors_of
from hpcfed.experiment.assemble import Setup
from hpcfed.experiment.evaluate import in_groups
from hpcfed.results.folder import adapter_folder


def write_adapters(setup: Setup, folder: Path, state: Any, row: Tensor | None) -> None:
    """Write the global adapters if there is a global row, and with --lora-clients those
    that each client of this rank is judged by.
    """
    if setup.adapters is None:
        return
    if row is not None and setup.world.is_root:
        _write(setup, adapter_folder(folder), row)
    if not setup.settings.config.lora_clients:
        return
    fed = setup.federation
    with setup.timer.phase("evaluate"):
        for members in in_groups(setup, np.arange(len(fed.clients))):
            rows = setup.method.personal(fed, state, members)
            for client, own in zip(fed.clients[members], rows, strict=True):
                _write(setup, adapter_folder(folder, int(client)), own)


def _write(setup: Setup, folder: Path, row: Tensor) -> None:
    assert setup.adapters is not None
    tensors = tensors_of(setup.federation.layout, row)
    save_adapters(folder, setup.adapters, tensors | setup.frozen)
