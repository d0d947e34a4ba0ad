"""`hpcfed attack`: the attack of a server, its table and its figure."""

import argparse
import time
from statistics import mean

import torch
from rich.table import Table

from hpcfed.attacks.idlg import METHODS, Attack, check_figure, save_figure
from hpcfed.config import RunConfig
from hpcfed.data.loading import load
from hpcfed.data.synthetic import SyntheticSize
from hpcfed.errors import UserError, remark, unknown
from hpcfed.report.console import Output, say


def steal(options: argparse.Namespace, config: RunConfig) -> None:
    """Runs the attack, prints what came of it, and writes the figure."""
    methods = options.methods.split(",")
    for method in methods:
        if method not in METHODS:
            raise unknown("method", method, METHODS)
    if options.out is not None:
        check_figure(options.out)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda, but there is no CUDA device here")
    cuda = options.device != "cpu" and torch.cuda.is_available()
    size = SyntheticSize(
        shape=config.shape, classes=config.synthetic_classes, train=100, test=100
    )
    dataset = load(
        config.dataset,
        root=config.root,
        download=False,
        seed=options.seed,
        synthetic=size,
    )
    attack = Attack(options.model, options.steps, options.noise, options.seed)
    thefts, begin = [], time.monotonic()
    for theft in attack.steal(
        dataset, methods, options.images, torch.device("cuda" if cuda else "cpu")
    ):
        thefts.append(theft)
        seconds, begin = time.monotonic() - begin, time.monotonic()
        number = sum(one.method == theft.method for one in thefts)
        remark(f"{theft.method}, image {number}: {theft.psnr:.1f} dB, {seconds:.1f} s")
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), show_edge=False)
    for number, column in enumerate(
        ("what is uploaded", "of the network", "label", "PSNR, dB", "least to most")
    ):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for method in methods:
        own = [theft for theft in thefts if theft.method == method]
        psnr = [theft.psnr for theft in own]
        label = "given" if own[0].label_given else "found"
        table.add_row(
            method,
            f"{own[0].share:.1%}",
            label,
            f"{mean(psnr):.2f}",
            f"{min(psnr):.1f} to {max(psnr):.1f}",
        )
    console = Output()
    say(
        console,
        f"iDLG on {config.dataset}, {options.model} network, {options.steps} steps",
    )
    console.print(table)
    if options.out is not None:
        save_figure(thefts, options.out)
        say(console, f"figure in {options.out}")
