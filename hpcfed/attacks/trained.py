"""Read the network that a run has trained, for `hpcfed attack`."""

from pathlib import Path

import numpy as np
import torch

from hpcfed.attacks.idlg import TrainedNetwork
from hpcfed.clients.initial import Tensors, read_weights
from hpcfed.data import DATASETS
from hpcfed.errors import UserError
from hpcfed.models.layout import Layout
from hpcfed.models.networks import build
from hpcfed.options import RunConfig
from hpcfed.results.folder import MODEL, RECORD, records, seed_folders, snapshots
from hpcfed.results.run import RunRecord
from hpcfed.results.sandbox import try_out
from hpcfed.results.snapshots import read_parameters
from hpcfed.results.stored import read_run


def read_trained(
    folder: Path, client: int | None, data_root: Path | None
) -> TrainedNetwork:
    """Read a run's global model, or a client's row from its last snapshot. Without
    `client` and without a global model, take the first client that took part.
    """
    if not (folder / RECORD).exists() and (seeds := seed_folders(folder)):
        raise UserError(f"--run {folder} has several seeds; name one, as in {seeds[0]}")
    # A damaged file can crash HDF5: a child process opens it first.
    try_out(records(folder))
    record = read_run(folder)
    config = _config(folder, record, data_root)
    seed = int(record.facts["seed"])
    if client is None and (folder / MODEL).is_file():
        weights = read_weights(folder)
        return TrainedNetwork(folder, config, seed, weights, "the global model")
    if not snapshots(folder):
        raise UserError(
            f"--run {folder} has no {MODEL} and no snapshot. A run writes {MODEL} when "
            "it completes, if its method has a global model; --snapshot-every 10 writes "
            "rows of clients"
        )
    try_out(snapshots(folder))
    weights, whose = _weights_of_client(folder, config, client)
    return TrainedNetwork(folder, config, seed, weights, whose)


def _config(folder: Path, record: RunRecord, data_root: Path | None) -> RunConfig:
    """Return the run's options that define its network and data."""
    known = {}
    for name, value in record.config.items():
        if name in RunConfig.model_fields and value is not None:
            known[name] = value
    config = RunConfig.model_validate(known | {"data_root": data_root})
    # The folder may be from someone else: never run code that its record names.
    ours = config.dataset in DATASETS or config.dataset.startswith("file:")
    if not ours or config.model_info() is None:
        raise UserError(
            f"--run {folder}: its data set ({config.dataset}) and its network "
            f"({config.model}) must be of hpcfed's own, and without adapters"
        )
    return config


def _weights_of_client(
    folder: Path, config: RunConfig, client: int | None
) -> tuple[Tensors, str]:
    """Return a client's tensors from the last snapshot, and whose they are."""
    snapshot = read_parameters(folder)
    took_part = ~np.isnan(snapshot.rows).any(1)
    there = snapshot.clients[took_part].tolist()
    if client is None and there:
        client = there[0]
    if client not in there:
        known = ", ".join(map(str, there)) or "no client"
        raise UserError(
            f"--client {client}: in round {snapshot.round}, the last with a snapshot, "
            f"{known} took part"
        )
    row = snapshot.rows[snapshot.clients == client]
    data = config.data()
    network = build(config.network(), shape=data.shape, classes=data.classes, seed=0)
    views = Layout.of(network).views(torch.from_numpy(row))
    weights = {name: tensor[0] for name, tensor in views.items()}
    return weights, f"client {client} in round {snapshot.round}"
