"""A server that tries to steal images by iDLG (Zhao et al. 2020) from each method's
uploads.

A client takes one step on one image, so the server knows the gradient of all uploaded
columns. Starting from noise, it searches by L-BFGS for the image with the same
gradient: it minimises Σ ‖g − g′‖² over the uploaded columns, or 1 − cos(g, g′), and may
prefer images of little total variation. Its network has the client's weights in
uploaded columns, and random ones elsewhere. The label follows from the gradient of the
last layer, whose row is negative only for the right class. If that layer is not
uploaded, the server is given the label.

The client's network is untrained, or one that a run has trained: GENE-FL's paper
attacks "the same network" as it trains.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from hpcfed.attacks.matching import LOSSES, total_variation
from hpcfed.clients.initial import Tensors, read_weights, start_from
from hpcfed.data import DATASETS
from hpcfed.data.datasets import Dataset
from hpcfed.errors import UserError
from hpcfed.methods import fedlg, genefl, parfed
from hpcfed.models.layout import Layout
from hpcfed.models.networks import build
from hpcfed.options import Options, RunConfig
from hpcfed.results.folder import MODEL, RECORD, records, seed_folders, snapshots
from hpcfed.results.run import RunRecord
from hpcfed.results.sandbox import try_out
from hpcfed.results.snapshots import read_parameters
from hpcfed.results.stored import read_run
from hpcfed.runtime import randomness

AnyOptions = TypeVar("AnyOptions", bound=Options)
Named = dict[str, Tensor]
"""Tensors by the names of their parameters."""
METHODS = ("fedavg", "fedavg-noise", "parfed", "fedlg", "genefl")
STEP = 0.01
"""Learning rate of the client's step, by which FedLG and GENE-FL choose layers."""
SMOOTH_LAYERS = {"parfed": "conv1,conv3", "fedlg": "conv1,conv2,conv3"}
"""Layers of the smooth network that replace those of ResNet-18."""


class Theft(NamedTuple):
    """The result of the attack on one image."""

    method: str
    share: float
    """The share of the network's parameters that was uploaded."""
    label_given: bool
    """Whether the server had to be given the label."""
    original: Tensor
    stolen: Tensor
    psnr: float


class TrainedNetwork(NamedTuple):
    """A network that a run has trained."""

    folder: Path
    config: RunConfig
    """The options of that run."""
    seed: int
    weights: Tensors
    whose: str
    """Whose network it is, in words."""


@dataclass(frozen=True)
class ImageThief:
    """A server that reconstructs images, each from one client's upload."""

    model: str = "smooth"
    steps: int = 300
    """Outer steps of L-BFGS."""
    noise: float = 0.001
    """Variance of the noise on the gradient of fedavg-noise."""
    seed: int = 0
    trained: TrainedNetwork | None = None
    """The client's trained network; None for an untrained one."""
    loss: str = "squares"
    """How gradients are compared: one of `LOSSES`."""
    prior: float = 0.0
    """The weight of the image's total variation beside it."""

    def steal(
        self,
        dataset: Dataset,
        methods: Sequence[str],
        images: int,
        device: torch.device,
    ) -> Iterator[Theft]:
        """Try to steal some test images, which the seed selects, from every method."""
        # In float64 the search gets near a loss of 1e-20, where it ends. ResNet-18
        # would take too long in float64.
        dtype = torch.float32 if self.model == "resnet18" else torch.float64
        labels = dataset.labels("test")
        generator = randomness.generator(self.seed, "victims")
        count = min(images, len(labels))
        index = generator.choice(len(labels), count, replace=False)
        originals = dataset.inputs("test", index, device=device, dtype=dtype)
        # Data sets are standardised; scale them to [0, 1], where PSNR is defined.
        least, most = originals.min(), originals.max()
        originals = (originals - least) / (most - least)
        clients = self._network(dataset, 0).to(device, dtype)
        servers = self._network(dataset, 1).to(device, dtype)
        if self.trained is not None:
            start_from(clients, self.trained.weights, self.trained.folder)
            low, high = float(least), float(most)
            # It was trained on standardised images, so its input is scaled back.
            clients.register_forward_pre_hook(
                lambda _, inputs: low + (high - low) * inputs[0]
            )
        for method in methods:
            for original, label in zip(originals, labels[index], strict=True):
                victim = original.unsqueeze(0)
                yield self._stolen(method, clients, servers, victim, int(label))

    def _network(self, dataset: Dataset, number: int) -> nn.Module:
        """Build network 0, the client's, or 1, the server's where nothing is sent."""
        generator = randomness.generator(self.seed, "networks", number)
        seed = int(generator.integers(2**62))
        if self.model == "smooth":
            return smooth(dataset.shape, dataset.classes, seed)
        return build(
            self.model, shape=dataset.shape, classes=dataset.classes, seed=seed
        ).eval()

    def _stolen(
        self,
        method: str,
        clients: nn.Module,
        servers: nn.Module,
        original: Tensor,
        label: int,
    ) -> Theft:
        """Let a client take its step on the image, and the server reconstruct it."""
        weights, random = _weights(clients), _weights(servers)
        statistics, fresh = dict(clients.named_buffers()), dict(servers.named_buffers())
        layout = Layout.of(clients)
        labels = torch.tensor([label], device=original.device)
        gradient = _gradient(clients, weights, original, labels)
        names = self._uploaded(method, layout, weights, gradient)
        target = {name: gradient[name].detach() for name in names}
        if method == "fedavg-noise":
            # As a private client would; drawn on the host: the same on every device.
            draw = torch.Generator().manual_seed(self.seed)
            for name, tensor in target.items():
                noise = torch.randn(tensor.shape, generator=draw, dtype=tensor.dtype)
                target[name] = tensor + math.sqrt(self.noise) * noise.to(tensor.device)
        # iDLG: only the right class's row of the last layer has a negative gradient.
        head = f"{layout.head}.weight"
        guess = int(target[head].sum(1).argmin()) if head in names else label
        # For weights that are not uploaded, the server uses its own random ones.
        known = random | {name: weights[name] for name in names}
        # Running statistics of batch norm are sent with their layer.
        layers = {name.rpartition(".")[0] for name in names}
        for name, tensor in statistics.items():
            sent = method.startswith("fedavg") or name.rpartition(".")[0] in layers
            known[name] = tensor if sent else fresh[name]
        stolen = self._reconstruct(clients, known, target, guess, original)
        uploaded = sum(weights[name].numel() for name in names)
        return Theft(
            method,
            share=uploaded / layout.num_parameters,
            label_given=head not in names,
            original=original[0],
            stolen=stolen[0],
            psnr=psnr(stolen, original),
        )

    def _uploaded(
        self, method: str, layout: Layout, weights: Named, gradient: Named
    ) -> list[str]:
        """Return the parameters that a client of this method sends."""
        if method.startswith("fedavg"):
            return list(weights)
        before = torch.cat([weights[name].flatten() for name in weights])[None]
        update = torch.cat([gradient[name].flatten() for name in weights])[None]
        layers = self._layers_sent(method, layout, before, update)
        return [e.name for e in layout.entries if e.trainable and e.layer in layers]

    def _layers_sent(
        self, method: str, layout: Layout, before: Tensor, update: Tensor
    ) -> set[str]:
        if method == "parfed":
            few = self._fitted(parfed.Options(), shared_layers=SMOOTH_LAYERS["parfed"])
            return set(few.names)
        if method == "fedlg":
            options = self._fitted(fedlg.Options(), gene_pools=SMOOTH_LAYERS["fedlg"])
            sent = fedlg.chosen(options, layout, fedlg.shares(options, layout, update))
            candidates = fedlg.candidates(options, layout)
            return set(compress(candidates, sent[0].tolist()))
        gene = self._fitted(genefl.Options())
        scores = genefl.scores(gene, layout, before - STEP * update, before)
        # A late round, in which the gene has shrunk to its final size.
        sent = genefl.gene(gene, scores, round=10**6)
        blocks = compress(layout.blocks, sent[0].tolist())
        return set(chain.from_iterable(blocks))

    def _fitted(self, options: AnyOptions, **smooth: str) -> AnyOptions:
        """Return a method's options as fitted to the attacked network. The catalogue
        does not know the smooth network's layers, so `smooth` gives them.
        """
        if self.model == "smooth":
            return options.model_copy(update=smooth)
        if self.trained is None:
            return options
        fitted = options.fit(self.trained.config, ranks=1)
        chosen = {choice.option: choice.value for choice in fitted}
        return options.model_copy(update=chosen)

    def _reconstruct(
        self,
        network: nn.Module,
        weights: Named,
        target: Named,
        label: int,
        like: Tensor,
    ) -> Tensor:
        """Search, from noise, for the image whose gradient is nearest to the target.

        Return the best image of the whole search, with values in [0, 1].
        """
        draw = torch.Generator().manual_seed(self.seed)
        noise = torch.rand(like.shape, generator=draw, dtype=like.dtype)
        image = noise.to(like.device).requires_grad_()
        labels = torch.tensor([label], device=like.device)
        search = torch.optim.LBFGS([image], lr=1.0, line_search_fn="strong_wolfe")
        best, least = image.detach().clone(), math.inf

        def closure() -> Tensor:
            search.zero_grad()
            gradient = _gradient(
                network, weights, image, labels, names=list(target), differentiable=True
            )
            loss = LOSSES[self.loss](gradient, target)
            if self.prior:
                loss = loss + self.prior * total_variation(image)
            loss.backward()
            return loss

        for step in range(self.steps + 1):
            found = image.detach().clone()
            # A step returns the loss before it, so the last image needs one more
            # evaluation.
            last = step == self.steps
            loss = (closure() if last else search.step(closure)).item()
            if loss < least:
                best, least = found, loss
            if not math.isfinite(loss) or loss < 1e-20:
                break
        return best.clamp(0, 1)


def _gradient(
    network: nn.Module,
    weights: Named,
    image: Tensor,
    label: Tensor,
    *,
    names: Sequence[str] | None = None,
    differentiable: bool = False,
) -> Named:
    """Return the loss's gradient with respect to the named parameters, or all."""
    leaves = {}
    parameters = dict(network.named_parameters())
    for name, tensor in weights.items():
        # Running statistics have no gradient.
        leaves[name] = tensor.detach().requires_grad_(name in parameters)
    loss = F.cross_entropy(functional_call(network, leaves, (image,)), label)
    wanted = list(weights) if names is None else list(names)
    found = torch.autograd.grad(
        loss, [leaves[name] for name in wanted], create_graph=differentiable
    )
    return dict(zip(wanted, found, strict=True))


def smooth(shape: tuple[int, ...], classes: int, seed: int) -> nn.Module:
    """Build three convolutions of 12 channels with sigmoids, and a linear layer. All
    derivatives exist, and none is small.
    """
    network = nn.Sequential()
    channels = shape[0]
    for number in (1, 2, 3):
        network.add_module(f"conv{number}", nn.Conv2d(channels, 12, 5, padding=2))
        network.add_module(f"act{number}", nn.Sigmoid())
        channels = 12
    network.add_module("flatten", nn.Flatten())
    network.add_module("head", nn.Linear(12 * shape[1] * shape[2], classes))
    draw = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5, generator=draw)
    return network


def psnr(image: Tensor, original: Tensor) -> float:
    """Return the peak signal-to-noise ratio of values in [0, 1], in dB."""
    error = float((image - original).square().mean())
    return 10 * math.log10(1 / error) if error else math.inf


def _weights(network: nn.Module) -> Named:
    """Return a network's parameters by name."""
    return {name: p.detach() for name, p in network.named_parameters()}


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
    if client is not None and not snapshots(folder):
        raise UserError(
            f"--client {client}: {folder} has no snapshot; --snapshot-every 10 writes "
            "rows of clients"
        )
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
    fields = RunConfig.model_fields
    given = {n: v for n, v in record.config.items() if n in fields and v is not None}
    config = RunConfig.model_validate(given | {"data_root": data_root})
    # The folder may be from someone else: never run code that its record names.
    ours = config.dataset in DATASETS or config.dataset.startswith("file:")
    if not ours or config.model_info() is None:
        raise UserError(
            f"--run {folder}: its data set ({config.dataset}) and its network "
            f"({config.model}) must be hpcfed's own, without adapters"
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
