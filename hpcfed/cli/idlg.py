"""Run iDLG for `hpcfed attack`; print a table and write a figure."""

import argparse
import time
from collections.abc import Sequence
from statistics import mean

import torch
from rich.table import Table

from hpcfed.analysis.render.console import Output, say
from hpcfed.attacks.figure import check_figure, save_figure
from hpcfed.attacks.idlg import METHODS, ImageThief, Theft, TrainedNetwork
from hpcfed.data.datasets import Dataset, SyntheticSize
from hpcfed.data.loading import load
from hpcfed.errors import UserError, remark, unknown
from hpcfed.options import RunConfig

COLUMNS = ("what is uploaded", "of the network", "label", "PSNR, dB", "least to most")


def steal(
    options: argparse.Namespace,
    config: RunConfig,
    trained: TrainedNetwork | None = None,
) -> None:
    """Run the attack on each method, print what it stole, and write the figure.

    The network is a fresh one, or one that a run has `trained`.
    """
    methods = options.methods.split(",")
    for method in methods:
        if method not in METHODS:
            raise unknown("method", method, METHODS)
    if options.out is not None:
        check_figure(options.out)
    device = _device(options.device)
    # Synthetic images are made from the seed of the run that has trained on them.
    dataset = _dataset(config, trained.seed if trained else options.seed)
    model = config.network() if trained else options.model or "smooth"
    thief = ImageThief(model, options.steps, options.noise, options.seed, trained)
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
    say(console, f"iDLG on {config.dataset}, {model} network, {options.steps} steps")
    if trained is not None:
        say(console, f"trained by {trained.folder}: {trained.whose}")
    console.print(_table(thefts, methods))
    if options.out is not None:
        save_figure(thefts, options.out)
        say(console, f"figure in {options.out}")


def _device(wanted: str) -> torch.device:
    there = torch.cuda.is_available()
    if wanted == "cuda" and not there:
        raise UserError("--device cuda, but there is no CUDA device here")
    return torch.device("cuda" if there and wanted != "cpu" else "cpu")


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
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), show_edge=False)
    # Names to the left, figures to the right.
    for name in COLUMNS:
        justify = "left" if name == COLUMNS[0] else "right"
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
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
