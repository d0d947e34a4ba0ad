"""A server that tries to steal images: iDLG (Zhao et al. 2020) on what each method
uploads.

A client takes one step on one image, so that the server knows the gradient of all that
is uploaded. From noise it searches, by L-BFGS, the image whose gradient is the same: Σ
‖g − g′‖² over the uploaded columns. Its network has the client's weights where they are
uploaded, and random ones elsewhere. The label follows from the gradient of the last
layer, whose row is negative for the right class alone; where that layer is not
uploaded, the server is given it.
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from hpcfed.data.datasets import Dataset
from hpcfed.errors import UserError
from hpcfed.methods import fedlg, genefl, parfed
from hpcfed.models.layout import Layout
from hpcfed.models.networks import build
from hpcfed.record.publish import check_target
from hpcfed.runtime import randomness

METHODS = ("fedavg", "fedavg-noise", "parfed", "fedlg", "genefl")
STEP = 0.01
"""Learning rate of the client's step, by which FedLG and GENE-FL judge their layers."""
SMOOTH_LAYERS = {"parfed": "conv1,conv3", "fedlg": "conv1,conv2,conv3"}
"""What stands for ResNet-18's layers in the smooth network."""


SIDE, GAP, NAMES = 96, 8, 150
"""Pixels of the figure: of an image, between two, and for the names at the left."""


class Theft(NamedTuple):
    """What became of one image."""

    method: str
    share: float
    """Of the network's parameters that was uploaded."""
    label_given: bool
    """Whether the server had to be given the label."""
    original: Tensor
    stolen: Tensor
    psnr: float


@dataclass(frozen=True)
class Attack:
    model: str = "smooth"
    steps: int = 300
    """Outer steps of L-BFGS."""
    noise: float = 0.001
    """Variance of the noise on the gradient of fedavg-noise."""
    seed: int = 0

    def steal(
        self,
        dataset: Dataset,
        methods: Sequence[str],
        images: int,
        device: torch.device,
    ) -> Iterator[Theft]:
        """Some images of the test set, drawn by the seed, by every method."""
        dtype = torch.float64 if self.model == "smooth" else torch.float32
        count = min(images, len(dataset.labels("test")))
        index = randomness.generator(self.seed, "victims").choice(
            len(dataset.labels("test")), count, replace=False
        )
        originals = dataset.images("test", index, device=device, dtype=dtype)
        originals = (originals - originals.min()) / (originals.max() - originals.min())
        labels = dataset.labels("test")[index]
        nets = [self._network(dataset, number).to(device, dtype) for number in (0, 1)]
        for method in methods:
            for original, label in zip(originals, labels, strict=True):
                yield self._stolen(method, nets, original.unsqueeze(0), int(label))

    def _network(self, dataset: Dataset, number: int) -> nn.Module:
        """The client's is number 0; number 1 is what the server has where nothing is
        uploaded.
        """
        seed = int(randomness.generator(self.seed, "networks", number).integers(2**62))
        if self.model == "smooth":
            return smooth(dataset.shape, dataset.classes, seed)
        return build(
            self.model, shape=dataset.shape, classes=dataset.classes, seed=seed
        ).eval()

    def _stolen(
        self, method: str, nets: Sequence[nn.Module], original: Tensor, label: int
    ) -> Theft:
        own, other = (
            {name: p.detach() for name, p in net.named_parameters()} for net in nets
        )
        layout = Layout.of(nets[0])
        gradient = _gradient(
            nets[0], own, original, torch.tensor([label], device=original.device)
        )
        names = self._uploaded(method, layout, own, gradient)
        target = {name: gradient[name].detach() for name in names}
        if method == "fedavg-noise":
            draw = torch.Generator().manual_seed(self.seed)
            for name, tensor in target.items():
                noise = torch.randn(
                    tensor.shape, generator=draw, dtype=tensor.dtype
                ).to(tensor.device)
                target[name] = tensor + math.sqrt(self.noise) * noise
        head = f"{layout.head}.weight"
        guess = int(target[head].sum(1).argmin()) if head in names else label
        known = {name: own[name] if name in names else other[name] for name in own}
        stolen = self._reconstruct(nets[0], known, target, guess, original)
        share = sum(own[name].numel() for name in names) / layout.num_parameters
        return Theft(
            method,
            share,
            head not in names,
            original[0],
            stolen[0],
            psnr(stolen, original),
        )

    def _uploaded(
        self,
        method: str,
        layout: Layout,
        own: dict[str, Tensor],
        gradient: dict[str, Tensor],
    ) -> list[str]:
        """The parameters that a client of this method sends."""
        if method.startswith("fedavg"):
            return list(own)
        before, update = (
            torch.cat([of[name].flatten() for name in own])[None]
            for of in (own, gradient)
        )
        plain = self.model == "smooth"
        if method == "parfed":
            layers = set(
                parfed.Options(
                    shared_layers=SMOOTH_LAYERS["parfed"] if plain else ""
                ).names
            )
        elif method == "fedlg":
            options = (
                fedlg.Options(gene_pools=SMOOTH_LAYERS["fedlg"])
                if plain
                else fedlg.Options()
            )
            sent = fedlg.chosen(options, layout, fedlg.shares(options, layout, update))[
                0
            ].tolist()
            layers = {
                name
                for name, yes in zip(
                    fedlg.candidates(options, layout), sent, strict=True
                )
                if yes
            }
        else:
            gene = genefl.Options()
            scores = genefl.scores(gene, layout, before - STEP * update, before)
            sent = genefl.gene(gene, scores, round=10**6)[
                0
            ].tolist()  # when the gene has shrunk to its last size
            layers = {
                layer
                for block, yes in zip(layout.blocks, sent, strict=True)
                if yes
                for layer in block
            }
        return [e.name for e in layout.entries if e.trainable and e.layer in layers]

    def _reconstruct(
        self,
        network: nn.Module,
        weights: dict[str, Tensor],
        target: dict[str, Tensor],
        label: int,
        like: Tensor,
    ) -> Tensor:
        """The image, among all that the search came by, whose gradient is nearest;
        values in [0, 1].
        """
        draw = torch.Generator().manual_seed(self.seed)
        image = (
            torch.rand(like.shape, generator=draw, dtype=like.dtype)
            .to(like.device)
            .requires_grad_()
        )
        labels = torch.tensor([label], device=like.device)
        search = torch.optim.LBFGS([image], lr=1.0, line_search_fn="strong_wolfe")
        best, least = image.detach().clone(), math.inf

        def closure() -> Tensor:
            search.zero_grad()
            gradient = _gradient(
                network, weights, image, labels, names=list(target), differentiable=True
            )
            loss = torch.stack(
                [
                    (gradient[name] - wanted).square().sum()
                    for name, wanted in target.items()
                ]
            ).sum()
            loss.backward()
            return loss

        for step in range(self.steps + 1):
            found = image.detach().clone()
            loss = (
                search.step(closure) if step < self.steps else closure()
            ).item()  # of the image before the step
            if loss < least:
                best, least = found, loss
            if not math.isfinite(loss) or loss < 1e-20:
                break
        return best.clamp(0, 1)


def _gradient(
    network: nn.Module,
    weights: dict[str, Tensor],
    image: Tensor,
    label: Tensor,
    *,
    names: Sequence[str] | None = None,
    differentiable: bool = False,
) -> dict[str, Tensor]:
    """Of the loss by the named parameters, or by all."""
    leaves = {
        name: tensor.detach().requires_grad_() for name, tensor in weights.items()
    }
    loss = F.cross_entropy(functional_call(network, leaves, (image,)), label)
    wanted = list(weights) if names is None else list(names)
    found = torch.autograd.grad(
        loss, [leaves[name] for name in wanted], create_graph=differentiable
    )
    return dict(zip(wanted, found, strict=True))


def smooth(shape: tuple[int, int, int], classes: int, seed: int) -> nn.Module:
    """Three convolutions of 12 channels with sigmoids, and a linear layer: all
    derivatives exist, and none is small.
    """
    layers: dict[str, nn.Module] = {}
    channels = shape[0]
    for number in (1, 2, 3):
        layers[f"conv{number}"] = nn.Conv2d(channels, 12, 5, padding=2)
        layers[f"act{number}"] = nn.Sigmoid()
        channels = 12
    layers["flatten"] = nn.Flatten()
    layers["head"] = nn.Linear(12 * shape[1] * shape[2], classes)
    network = nn.Sequential()
    for name, layer in layers.items():
        network.add_module(name, layer)
    draw = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5, generator=draw)
    return network


def psnr(image: Tensor, original: Tensor) -> float:
    """Peak signal-to-noise ratio in dB, of values in [0, 1]; infinite for the very
    image.
    """
    error = float((image - original).square().mean())
    return 10 * math.log10(1 / error) if error else math.inf


def check_figure(path: Path) -> None:
    """Refuses, before hours of work, what cannot become a figure."""
    from PIL import Image

    if path.is_dir() or path.suffix.lower() not in Image.registered_extensions():
        raise UserError(f"--out {path}: name a file that ends in .png")
    check_target("--out", path)
    there = next(folder for folder in path.absolute().parents if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UserError(f"--out {path}: {there} cannot be written to")


def save_figure(thefts: Sequence[Theft], path: Path) -> None:
    """A PNG: the originals above, and below them what each method let the server see,
    with its mean PSNR.
    """
    from PIL import Image, ImageDraw, ImageFont

    methods = list(dict.fromkeys(theft.method for theft in thefts))
    rows = {
        "original": [theft.original for theft in thefts if theft.method == methods[0]]
    }
    for method in methods:
        own = [theft for theft in thefts if theft.method == method]
        rows[f"{method}\n{fmean(theft.psnr for theft in own):.1f} dB"] = [
            theft.stolen for theft in own
        ]
    height = SIDE + GAP
    sheet = Image.new(
        "RGB",
        (NAMES + len(rows["original"]) * height, GAP + len(rows) * height),
        "white",
    )
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(14)
    for line, (name, images) in enumerate(rows.items()):
        pen.text(
            (GAP, GAP + line * height + SIDE // 2), name, "black", font, anchor="lm"
        )
        for place, image in enumerate(images):
            pixels = (
                (255 * image.expand(3, -1, -1).permute(1, 2, 0).float().cpu())
                .round()
                .to(torch.uint8)
                .numpy()
            )
            drawn = Image.fromarray(pixels).resize(
                (SIDE, SIDE), Image.Resampling.NEAREST
            )
            sheet.paste(drawn, (NAMES + place * height, GAP + line * height))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        sheet.save(path)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write --out {path}: {error}") from None
