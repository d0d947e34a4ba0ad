"""Run iDLG for `hpcfed attack`; print a table, and draw originals above what the server
reconstructs from each method's uploads.
"""

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from hpcfed.analysis.render.console import Output, bare_table, say
from hpcfed.attacks.idlg import METHODS, ImageThief, Theft, TrainedNetwork
from hpcfed.data.datasets import Dataset, SyntheticSize
from hpcfed.data.loading import load
from hpcfed.errors import UserError, remark, unknown
from hpcfed.options import RunConfig
from hpcfed.results.folder import check_export
from hpcfed.runtime.location import choose_device

SIDE, GAP, NAMES = 96, 8, 150
"""Pixels of an image's side, between two images, and for the names on the left."""
COLUMNS = ("what is uploaded", "of the network", "label", "PSNR, dB", "least to most")


def steal(
    options: argparse.Namespace,
    config: RunConfig,
    trained: TrainedNetwork | None = None,
) -> None:
    """Attack each method, by a fresh or a `trained` network, and show the images."""
    methods = options.methods.split(",")
    for method in methods:
        if method not in METHODS:
            raise unknown("method", method, METHODS)
    if options.out is not None:
        _check_figure(options.out)
    device = choose_device(options.device, 0)
    # Synthetic images are made from the seed of the run that has trained on them.
    dataset = _dataset(config, trained.seed if trained else options.seed)
    model = config.network() if trained else options.model or "smooth"
    thief = ImageThief(
        model,
        options.steps,
        options.noise,
        options.seed,
        trained,
        loss=options.loss,
        prior=options.prior,
    )
    # Each theft takes seconds to minutes: print each as soon as it is done.
    thefts: list[Theft] = []
    begin = time.monotonic()
    for theft in thief.steal(dataset, methods, options.images, device):
        thefts.append(theft)
        now = time.monotonic()
        seconds, begin = now - begin, now
        number = len(_of_method(thefts, theft.method))
        remark(f"{theft.method}, image {number}: {theft.psnr:.1f} dB, {seconds:.1f} s")
    console = Output()
    say(console, f"iDLG on {config.dataset}, {model} network, {_search(thief)}")
    if trained is not None:
        say(console, f"trained by {trained.folder}: {trained.whose}")
    console.print(_table(thefts, methods))
    if options.out is not None:
        _save_figure(thefts, options.out)
        say(console, f"figure in {options.out}")


def _search(thief: ImageThief) -> str:
    """Say how the server searches."""
    text = f"{thief.steps} steps"
    if thief.loss != "squares":
        text += f", {thief.loss} loss"
    if thief.prior:
        text += f", total variation × {thief.prior:g}"
    return text


def _dataset(config: RunConfig, seed: int) -> Dataset:
    # Only test images are stolen: a few synthetic samples are enough.
    size = SyntheticSize(
        shape=config.shape, classes=config.synthetic_classes, train=100, test=100
    )
    return load(
        config.dataset, root=config.root, download=False, seed=seed, synthetic=size
    )


def _of_method(thefts: Sequence[Theft], method: str) -> list[Theft]:
    return [theft for theft in thefts if theft.method == method]


def _table(thefts: Sequence[Theft], methods: Sequence[str]) -> Table:
    table = bare_table(*COLUMNS)
    for method in methods:
        stolen = _of_method(thefts, method)
        psnr = [theft.psnr for theft in stolen]
        table.add_row(
            method,
            f"{stolen[0].share:.1%}",
            "given" if stolen[0].label_given else "found",
            f"{mean(psnr):.2f}",
            f"{min(psnr):.1f} to {max(psnr):.1f}",
        )
    return table


def _check_figure(path: Path) -> None:
    """Refuse a path that cannot become a figure, before hours of work."""
    from PIL import Image

    known = Image.registered_extensions()
    if path.is_dir() or path.suffix.lower() not in known:
        raise UserError(f"--out {path}: name a file that ends in .png")
    check_export("--out", path)
    there = next(folder for folder in path.absolute().parents if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UserError(f"--out {path}: {there} cannot be written to")


def _save_figure(thefts: Sequence[Theft], path: Path) -> None:
    """Draw a PNG with a line of images per method, and its mean PSNR."""
    from PIL import Image, ImageDraw, ImageFont

    lines = _lines(thefts)
    pitch = SIDE + GAP
    width = NAMES + len(lines["original"]) * pitch
    height = GAP + len(lines) * pitch
    sheet = Image.new("RGB", (width, height), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(14)
    for number, (name, images) in enumerate(lines.items()):
        top = GAP + number * pitch
        pen.text((GAP, top + SIDE // 2), name, "black", font, anchor="lm")
        for column, image in enumerate(images):
            drawn = Image.fromarray(_pixels(image))
            # Nearest, so that an image of 8 × 8 pixels shows its pixels.
            drawn = drawn.resize((SIDE, SIDE), Image.Resampling.NEAREST)
            sheet.paste(drawn, (NAMES + column * pitch, top))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        sheet.save(path)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write --out {path}: {error}") from None


def _lines(thefts: Sequence[Theft]) -> dict[str, list[Tensor]]:
    """Return the images of every line of the figure, by its name."""
    methods = list(dict.fromkeys(theft.method for theft in thefts))
    # All methods were attacked on the same images.
    first = _of_method(thefts, methods[0])
    lines = {"original": [theft.original for theft in first]}
    for method in methods:
        stolen = _of_method(thefts, method)
        psnr = mean(theft.psnr for theft in stolen)
        lines[f"{method}\n{psnr:.1f} dB"] = [theft.stolen for theft in stolen]
    return lines


def _pixels(image: Tensor) -> np.ndarray:
    """Return an image of values in [0, 1] as bytes, [height, width, 3]."""
    rgb = image.expand(3, -1, -1).permute(1, 2, 0)
    bytes_ = (255 * rgb.float().cpu()).round().to(torch.uint8)
    return bytes_.numpy()
