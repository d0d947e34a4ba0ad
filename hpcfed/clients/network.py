"""The network of a run's clients, built by its options."""

import torch
from torch import nn

from hpcfed import plugins
from hpcfed.clients.footprint import FLOAT, too_large
from hpcfed.clients.initial import (
    BaseReference,
    Tensors,
    base_of,
    model_of,
    read_weights,
    start_from,
)
from hpcfed.errors import UserError
from hpcfed.models import MODELS, hugging_face, peft_files
from hpcfed.models.blocks import is_large
from hpcfed.models.frozen import HALF, META, frozen_weights_of
from hpcfed.models.layout import Layout
from hpcfed.models.lora import add_adapters
from hpcfed.models.networks import build
from hpcfed.models.own import Sample
from hpcfed.options import RunConfig
from hpcfed.runtime import accelerator, machine, randomness


def sample_of(config: RunConfig) -> Sample:
    """Return the shapes of the network's input and output, without reading the data."""
    data = config.data()
    outputs: tuple[int, ...] = (data.classes,)
    if data.task == "next-token":
        outputs = (*data.shape, data.classes)
    return Sample(data.shape, outputs, data.vocabulary, config.packs_apart())


def client_network(
    config: RunConfig,
    *,
    seed: int | None = None,
    double: bool = False,
    onto: torch.device | None = None,
) -> nn.Module:
    """Build the network. Its first weights are those of --init, or depend on `seed`, by
    default the run's; `double` keeps given float64 weights exact. `onto`: the network
    below adapters is on this device, in bfloat16, as `keeps_halves` allows.
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
        onto=onto,
    )
    if double:
        network.double()
    init = config.first_weights
    weights = None if init is None else read_weights(init)
    # Another run's adapters only fit the adapters here; other weights fit the network.
    of_adapters = False
    if config.lora is not None and weights is not None:
        of_adapters = not set(weights) <= set(network.state_dict())
        if of_adapters:
            _check_base(config)
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


def base_reference(config: RunConfig) -> BaseReference | None:
    """Return where the frozen network of a run's adapters is; None if rows hold it, or
    if no folder of transformers has these weights.
    """
    name = config.network()
    if config.lora is None or config.send_frozen:
        return None
    if not hugging_face.is_hugging_face(name):
        return None
    # A classifier's head is drawn: the folder of a language model lacks it.
    if config.data().task != "next-token":
        return None
    init = config.first_weights
    # Weights of --init may have replaced those of the folder.
    if init is not None and not peft_files.is_folder(init) and base_of(init) is None:
        return None
    drawn = "" if hugging_face.has_weights(name) else f"--seed {config.seed}"
    if drawn and keeps_halves(config, _expected_device(config)):
        # By the device's generator, which draws others.
        drawn += f" --precision {config.precision}"
    folder = hugging_face.find_folder(name).resolve()
    return BaseReference(str(folder), drawn, hugging_face.checksum(folder))


def _check_base(config: RunConfig) -> None:
    """Refuse adapters beside weights other than those that they were trained with."""
    init = config.first_weights
    assert init is not None
    theirs, ours = base_of(init), base_reference(config)
    if theirs is None or ours is None:
        return
    whose = f"--init {init}: its adapters belong to "
    # Older files have no checksum.
    if theirs.weights and ours.weights and theirs.weights != ours.weights:
        raise UserError(
            f"{whose}other weights than {ours.folder} has now; they were in "
            f"{theirs.folder}"
        )
    if theirs.drawn == ours.drawn:
        return
    if theirs.drawn:
        raise UserError(
            f"{whose}random weights of {theirs.folder}; give {theirs.drawn}"
        )
    raise UserError(
        f"{whose}the weights in {theirs.folder}; give --model hf:that folder"
    )


def _start(network: nn.Module, weights: Tensors, config: RunConfig) -> None:
    """Load the weights of --init; refuse another network's weights by name."""
    init = config.first_weights
    assert init is not None
    try:
        start_from(network, weights, init)
    except UserError:
        theirs, ours = model_of(init), plugins.label(config.network())
        if theirs in (None, ours):
            raise
        add = f"add --model {theirs}" if theirs in MODELS else "give the same --model"
        raise UserError(
            f"--init {init} has model {theirs}, this run has {ours}; {add}"
        ) from None


def has_frozen_base(config: RunConfig) -> bool:
    """Tell whether rows hold adapters alone, and the language model below them is a
    folder's.
    """
    return (
        config.lora is not None
        and not config.lora_train
        and not config.send_frozen
        and hugging_face.is_hugging_face(config.network())
        and config.data().vocabulary > 0
    )


def keeps_halves(config: RunConfig, device: torch.device) -> bool:
    """Tell whether the frozen language model is on the device in bfloat16 alone."""
    # DP-SGD calls the network itself, for each sample's gradient.
    return (
        has_frozen_base(config)
        and config.precision == "bf16"
        and config.sample_noise is None
        and accelerator.is_gpu(device)
    )


def _expected_device(config: RunConfig) -> torch.device:
    """Return the kind of device that a run will have, before it is chosen."""
    found = None if config.device == "cpu" else accelerator.kind()
    return torch.device(found or "cpu")


_tried: list[tuple[RunConfig, nn.Module]] = []


def tried_network(config: RunConfig) -> nn.Module:
    """Build the network before a run, to find mistakes; the run takes this one.

    One that goes straight to the device is only described: its rank's device is not
    known yet.
    """
    if keeps_halves(config, _expected_device(config)):
        return client_network(config, onto=META)
    _check_fits(config, torch.device("cpu"))
    network = client_network(config)
    _tried[:] = [(config, network)]
    return network


def network_of_run(config: RunConfig, device: torch.device) -> nn.Module:
    """Return the network that was tried with the same options, or build it.

    Reading a language model takes long, so it should happen once.
    """
    known = list(_tried)
    _tried.clear()
    if accelerator.is_gpu(device):
        _check_fits(config, device)
    if keeps_halves(config, device):
        return client_network(config, onto=device)
    for other, network in known:
        if other == config:
            return network
    return client_network(config)


def _check_fits(config: RunConfig, device: torch.device) -> None:
    """Refuse a frozen language model that is larger than a GPU's free memory, or than
    the host's memory, through which all go that stay in float32.
    """
    if not has_frozen_base(config):
        return
    # Adapters from a file would be read, but do not count.
    described = client_network(config.model_copy(update={"init": None}), onto=META)
    parameters = sum(p.numel() for p in frozen_weights_of(described))
    size = HALF if keeps_halves(config, device) else FLOAT
    gpu = accelerator.is_gpu(device)
    if gpu:
        # What earlier seeds have left, and nothing uses any more.
        accelerator.return_memory()
    free = accelerator.free_memory(device) if gpu else machine.usable()
    why = too_large(parameters, size, free, gpu=gpu)
    if why:
        raise UserError(f"--model {config.network()}: {why}")


_described: list[tuple[RunConfig, nn.Module]] = []


def described_network(config: RunConfig) -> nn.Module:
    """Return a network for its layout and its cost; a large language model below
    adapters has no values.
    """
    for other, network in _described:
        if other == config:
            return network
    of_folder = hugging_face.is_hugging_face(config.network())
    if of_folder and config.lora is not None and config.data().vocabulary > 0:
        described = client_network(config, onto=META)
        if is_large(described):
            # A plan asks several times.
            _described[:] = [(config, described)]
            return described
    return client_network(config, seed=0)


_laid_out: list[tuple[RunConfig, Layout]] = []


def client_layout(config: RunConfig, network: nn.Module | None = None) -> Layout:
    """Return the columns of the clients' rows."""
    if network is not None:
        return Layout.of(network, send_frozen=config.send_frozen)
    for other, layout in _laid_out:
        if other == config:
            return layout
    layout = Layout.of(described_network(config), send_frozen=config.send_frozen)
    # Starts and plans ask several times, and a network of millions takes half a second
    # to build. Files of users may have changed by then.
    if config.network() in MODELS:
        _laid_out[:] = [(config, layout)]
    return layout
