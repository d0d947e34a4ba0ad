"""The network of a run's clients, built by its options."""

import torch
from torch import nn

from hpcfed import plugins
from hpcfed.clients.initial import Tensors, model_of, read_weights, start_from
from hpcfed.errors import UserError
from hpcfed.models import MODELS
from hpcfed.models.layout import Layout
from hpcfed.models.lora import add_adapters
from hpcfed.models.networks import build
from hpcfed.models.own import Sample
from hpcfed.options import RunConfig
from hpcfed.runtime import randomness


def sample_of(config: RunConfig) -> Sample:
    """Return the shapes of the network's input and output, without reading the data."""
    data = config.data()
    outputs: tuple[int, ...] = (data.classes,)
    if data.task == "next-token":
        outputs = (*data.shape, data.classes)
    return Sample(data.shape, outputs, data.vocabulary)


def client_network(
    config: RunConfig, *, seed: int | None = None, double: bool = False
) -> nn.Module:
    """Build the network. Its first weights are those of --init, or depend on `seed`, by
    default the run's; `double` keeps given float64 weights exact.
    """
    data = config.data()
    seed = config.seed if seed is None else seed
    network = build(
        config.network(),
        shape=data.shape,
        classes=data.classes,
        seed=seed,
        options=config.model_keywords,
        sample=sample_of(config),
    )
    if double:
        network.double()
    weights = None if config.init is None else read_weights(config.init)
    # Another run's adapters only fit the adapters here; other weights fit the network.
    of_adapters = False
    if config.lora is not None and weights is not None:
        of_adapters = not set(weights) <= set(network.state_dict())
    if weights is not None and not of_adapters:
        _start(network, weights, config)
    if config.lora is not None:
        # torch draws adapters by its global generator: seed it here, and restore it
        # after.
        with torch.random.fork_rng(devices=[]):
            draw = randomness.generator(seed, "adapters").integers(2**62)
            torch.manual_seed(int(draw))
            add_adapters(
                network,
                rank=config.lora,
                alpha=config.lora_alpha or config.lora,
                layers=config.lora_layers,
                train=config.lora_train or "",
            )
        if double:
            # Again, for the adapters.
            network.double()
    if weights is not None and of_adapters:
        _start(network, weights, config)
    return network


def _start(network: nn.Module, weights: Tensors, config: RunConfig) -> None:
    """Load the weights of --init; refuse another network's weights by name."""
    assert config.init is not None
    try:
        start_from(network, weights, config.init)
    except UserError:
        theirs, ours = model_of(config.init), plugins.label(config.network())
        if theirs in (None, ours):
            raise
        add = f"add --model {theirs}" if theirs in MODELS else "give the same --model"
        raise UserError(
            f"--init {config.init} has model {theirs}, this run has {ours}; {add}"
        ) from None


_tried: list[tuple[RunConfig, nn.Module]] = []


def tried_network(config: RunConfig) -> nn.Module:
    """Build the network before a run, to find mistakes; the run takes this one."""
    network = client_network(config)
    _tried[:] = [(config, network)]
    return network


def network_of_run(config: RunConfig) -> nn.Module:
    """Return the network that was tried with the same options, or build it.

    Reading a language model takes long, so it should happen once.
    """
    known = list(_tried)
    _tried.clear()
    for other, network in known:
        if other == config:
            return network
    return client_network(config)


def client_layout(config: RunConfig, network: nn.Module | None = None) -> Layout:
    """Return the columns of the clients' rows."""
    network = network or client_network(config)
    return Layout.of(network, send_frozen=config.send_frozen)
