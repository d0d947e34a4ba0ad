"""The first lines of a run's output: what it is, and what may surprise the user."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from hpcfed import plugins
from hpcfed.clients import initial
from hpcfed.clients.placement import Clients
from hpcfed.data.brought import is_brought, notes
from hpcfed.data.tokeniser import has_tokeniser
from hpcfed.errors import count
from hpcfed.experiment.assemble import Setup
from hpcfed.federation.channel.accountant import guarantee
from hpcfed.kernels import cuda
from hpcfed.models.hugging_face import find_folder, is_hugging_face
from hpcfed.models.layout import Layout
from hpcfed.models.own import outputs_probabilities
from hpcfed.options import Settings, named
from hpcfed.options.channel import channel_parts
from hpcfed.options.compression import packing
from hpcfed.options.declare import Choice
from hpcfed.runtime import own_kernels
from hpcfed.runtime.accelerator import is_gpu


def opening_lines(setup: Setup) -> Iterator[str]:
    """Describe the run; if several run at once, describe the first one's data."""
    yield _title(setup)
    for choice in setup.settings.choices:
        if choice.because:
            yield str(choice)
    yield from _network(setup)
    yield from _probabilities(setup)
    if setup.engine.reason:
        yield f"--engine {setup.engine.mode}: {setup.engine.reason}"
    yield from _kernels(setup.world.device)
    if setup.engine.footprint is not None:
        yield str(setup.engine.footprint)
    yield from _threads(setup)
    yield from _sampled(setup)
    yield from _read(setup)
    yield from _unused_tokeniser(setup)
    config = setup.settings.config
    if (
        config.lora is not None
        and config.init is None
        and not is_hugging_face(config.model)
    ):
        yield "--lora: adapters beside random weights; --init gives trained ones"
    if config.first_weights is not None and not initial.is_kept(config.first_weights):
        yield f"--init {config.init}: too large to copy; a stopped run needs it to go on"
    layout = setup.federation.layout
    yield from setup.settings.options.remarks(layout, config.network())
    yield from _arithmetic(setup)
    parts = channel_parts(config, setup.settings.options)
    if len(parts) > 1:
        # Every upload is aggregated, so that alone is not worth a line.
        yield f"uploads: {' → '.join(parts)}"
    if config.compress_down != "none":
        yield f"downloads: compress: {packing(config.compress_down, config)}"
    if config.sample_noise is not None:
        yield f"privacy: {guarantee(config)}"
    if config.privacy != "none":
        yield f"privacy: {guarantee(config)}"
        yield from _noised_statistics(layout)
    yield from _supplement(setup)
    # A client without data is easily overlooked: it causes no error, only bad figures.
    yield from _dataless(setup, setup.clients, "")
    if setup.newcomers is not None:
        yield from _dataless(setup, setup.newcomers.clients, "new ")


def _kernels(device: torch.device) -> Iterator[str]:
    """Say that hpcfed's own kernels are not used, if it is so."""
    if not own_kernels.are_allowed():
        yield "--kernels torch: by torch's operators alone"
    elif is_gpu(device) and not cuda.available(device):
        yield "kernels: by torch's operators alone; hpcfed's own do not run on this GPU"


def _title(setup: Setup) -> str:
    config = setup.settings.config
    world = setup.world
    runs = ""
    if setup.stacked > 1:
        runs = f"{setup.stacked} runs × "
    clients = count(config.clients, "client")
    columns = f"{setup.federation.layout.num_columns:,} columns"
    ranks = count(world.num_workers, "rank")
    if world.server_ranks:
        ranks += f" and {count(world.server_ranks, 'server rank')}"
    names = {location.device_name for location in world.locations}
    devices = ", ".join(sorted(names))
    if world.backend != "none":
        devices += f", {world.backend}: {world.reason}"
    return (
        f"{plugins.label(config.method)} on {plugins.label(config.dataset)}: "
        f"{runs}{clients} × {columns} "
        f"({plugins.label(config.network())}, {setup.engine.mode}) on {ranks} ({devices})"
    )


def _network(setup: Setup) -> Iterator[str]:
    """Say which network was chosen for the user's own data."""
    config = setup.settings.config
    if config.model == "auto" and is_brought(config.dataset):
        shape = "×".join(map(str, config.data().shape))
        yield str(
            Choice(
                "model",
                config.network(),
                f"for samples of {shape}; --model takes others",
            )
        )


def _probabilities(setup: Setup) -> Iterator[str]:
    """Say if a user's network takes a softmax that the loss takes as well."""
    config = setup.settings.config
    if config.data().task == "regression":
        return
    if outputs_probabilities(config.network()):
        yield (
            f"model {plugins.label(config.network())} outputs probabilities; the loss "
            "takes a softmax of them: return the logits"
        )


def _threads(setup: Setup) -> Iterator[str]:
    """Say if a rank leaves cores idle that it could use."""
    share = setup.world.threads
    if setup.threads < share:
        yield (
            f"{count(setup.threads, 'thread')} for a small network, though a rank has "
            f"{share} cores: more ranks use them, OMP_NUM_THREADS={share} asks for them"
        )


def _sampled(setup: Setup) -> Iterator[str]:
    """Say if the run does not have all natural clients."""
    config = setup.settings.config
    if setup.dealt.owners is None:
        return
    taken, there = len(setup.dealt.owners), config.data().owners
    if taken < there:
        yield (
            f"{taken:,} of {there:,} natural clients, drawn by --data-seed "
            f"{config.seed_of_data}: run.h5 names them in clients/owner"
        )


def _read(setup: Setup) -> Iterator[str]:
    """Say what was cut, left out or chosen while the user's own data was read."""
    config = setup.settings.config
    if is_brought(config.dataset):
        yield from notes(config.dataset, root=config.root, reading=config.reading)


def _unused_tokeniser(setup: Setup) -> Iterator[str]:
    """Say if a trained network reads a text in tokens that it has not learnt."""
    config = setup.settings.config
    if not is_hugging_face(config.model) or not config.dataset.startswith("text:"):
        return
    folder = find_folder(config.model)
    if config.text_tokens != "tokeniser" and has_tokeniser(folder):
        yield (
            f"--text-tokens {config.text_tokens}, though {folder} has a tokeniser: "
            "--text-tokens tokeniser uses it"
        )


def _arithmetic(setup: Setup) -> Iterator[str]:
    """Say if bf16 was asked for but has no effect."""
    if setup.settings.config.precision == "bf16" and not setup.engine.bf16:
        yield (
            "--precision bf16 is for clients that a GPU trains one by one, or that share "
            "a frozen network: these are computed as with tf32"
        )


def _supplement(setup: Setup) -> Iterator[str]:
    """Say how many validation samples clients were given to train on."""
    if not setup.settings.config.supplement:
        return
    # A server that selects by validation data then judges by what it has given away.
    given = setup.dealt.supplement
    whole = len(setup.dealt.partition.validation)
    asked = int(np.count_nonzero(given.samples))
    if not asked:
        yield (
            f"supplement: every client has at least {given.below:g} samples, so none "
            "gets more"
        )
        return
    yield (
        f"supplement: {count(asked, 'client')} with fewer than {given.below:g} samples "
        f"got {given.samples.max()} validation samples each; {given.leaked} of the "
        f"{whole} are now trained on"
    )


def _dataless(setup: Setup, clients: Clients, whose: str) -> Iterator[str]:
    """Say how many clients have no data, and what helps."""
    config = setup.settings.config
    untrained = int(np.count_nonzero(clients.train_samples == 0))
    unjudged = int(np.count_nonzero(clients.test_samples == 0))
    if not untrained and not unjudged:
        return
    helps = "use fewer clients"
    if config.partition == "dirichlet":
        helps += " or a larger --alpha"
    if config.partition == "natural":
        helps = "the data has none for them"
    lacks = []
    if untrained:
        lacks.append(f"{untrained:,} without training data (never trained)")
    if unjudged:
        lacks.append(f"{unjudged:,} without test data (never judged)")
    yield f"{len(clients.rank):,} {whose}clients, {', '.join(lacks)}; {helps}"


def _noised_statistics(layout: Layout) -> Iterator[str]:
    """Warn of variances that noise may make negative."""
    if layout.num_columns > layout.num_parameters:
        yield (
            "buffers, such as those of batch norm, are clipped and noised like all "
            "columns; networks without buffers, such as cnn-pfl, suffer less from "
            "privacy"
        )


def distinct_names(runs: Sequence[Settings]) -> list[str]:
    """Name runs by the options in which they differ, as in `lr 0.1, seed 2`."""
    every = [one.flat() for one in runs]
    swept = []
    for option, value in every[0].items():
        differs = any(values[option] != value for values in every)
        if differs and option not in named(changes="nothing"):
            swept.append(option)
    # Nothing differs: a single seed is left of several that were given.
    swept = swept or ["seed"]
    names = []
    for values in every:
        names.append(", ".join(f"{option} {values[option]}" for option in swept))
    return names
