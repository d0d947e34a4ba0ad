"""The figure of stolen images: originals on top, and below what the server reconstructs
from each method's uploads.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from hpcfed.attacks.idlg import Theft
from hpcfed.errors import UserError
from hpcfed.results.folder import check_export

SIDE, GAP, NAMES = 96, 8, 150
"""Pixels of an image's side, between two images, and for the names on the left."""


def check_figure(path: Path) -> None:
    """Refuse a path that cannot become a figure, before hours of work."""
    from PIL import Image

    known = Image.registered_extensions()
    if path.is_dir() or path.suffix.lower() not in known:
        raise UserError(f"--out {path}: name a file that ends in .png")
    check_export("--out", path)
    there = next(folder for folder in path.absolute().parents if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UserError(f"--out {path}: {there} cannot be written to")


def save_figure(thefts: Sequence[Theft], path: Path) -> None:
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
    by_method: dict[str, list[Theft]] = {}
    for theft in thefts:
        by_method.setdefault(theft.method, []).append(theft)
    # All methods were attacked on the same images.
    first = next(iter(by_method.values()))
    lines = {"original": [theft.original for theft in first]}
    for method, stolen in by_method.items():
        psnr = fmean(theft.psnr for theft in stolen)
        lines[f"{method}\n{psnr:.1f} dB"] = [theft.stolen for theft in stolen]
    return lines


def _pixels(image: Tensor) -> np.ndarray:
    """Return an image of values in [0, 1] as bytes, [height, width, 3]."""
    rgb = image.expand(3, -1, -1).permute(1, 2, 0)
    bytes_ = (255 * rgb.float().cpu()).round().to(torch.uint8)
    return bytes_.numpy()
