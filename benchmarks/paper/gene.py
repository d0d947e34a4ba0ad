"""What GENE-FL sends by Eq. 9, and what it would send by cosines alone.

The score of a layer is cos(θ, θ̃) / dim: how little training has turned it, by its size.
Reads a run with snapshots, and compares each participant's row with the one that it had
in its snapshot before. A line for every layer has its columns, how far its mean cosine
is from 1, and how many per cent of the participants send it by either score, once γ is
at its end.

examples:
  hpcfed run --method genefl --model cnn-bn --participation 1 --rounds 6 --snapshot-every 1 --out runs/genes
  python -m benchmarks.paper.gene runs/genes
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import hpcfed
from benchmarks.arguments import parser_of
from hpcfed.errors import UserError
from hpcfed.methods import genefl
from hpcfed.models.layout import Layout
from hpcfed.models.networks import build
from hpcfed.options import RunConfig
from hpcfed.results.run import RunRecord

LATE = 10**6
"""A round in which the gene has shrunk to its final size."""


def main() -> None:
    """Print a line for every layer."""
    parser = parser_of(__doc__)
    parser.add_argument("run", type=Path, help="folder of a run with snapshots")
    folder = parser.parse_args().run
    try:
        run = hpcfed.open(folder).seeds[0]
        layout = layout_of(run.records[0])
        before, after = pairs(run.folder, run.records[0])
    except UserError as error:
        raise SystemExit(f"gene.py: {error}") from None
    print("| layer | columns | 1 − cosine | sent by Eq. 9, % | by cosine alone, % |")
    print("|---|---:|---:|---:|---:|")
    layers = run.records[0].config.get("gene_layers")
    for line in lines(layout, before, after, layers):
        print(line)


def lines(
    layout: Layout, before: Tensor, after: Tensor, layers: int | None = None
) -> Iterator[str]:
    """Yield a line for every layer, of rows before and after training; `layers` are
    --gene-layers.
    """
    shares = []
    for score in ("same", "cosine"):
        options = genefl.Options(gene_score=score, gene_layers=layers)
        scores = genefl.scores(options, layout, after, before)
        sent = genefl.gene(options, scores, LATE)
        shares.append(100 * sent.double().mean(0))
    for number, (start, stop) in enumerate(layout.block_spans):
        one, other = after[:, start:stop].double(), before[:, start:stop].double()
        cosines = torch.cosine_similarity(one, other, dim=1)
        by_size, alone = (float(share[number]) for share in shares)
        name = layout.blocks[number][0]
        yield (
            f"| {name} | {stop - start:,} | {1 - cosines.mean():.1e} "
            f"| {by_size:.0f} | {alone:.0f} |"
        )


def layout_of(record: RunRecord) -> Layout:
    """Return the columns of a run's network."""
    fields = RunConfig.model_fields
    given = {n: v for n, v in record.config.items() if n in fields and v is not None}
    config = RunConfig.model_validate(given)
    if config.model_info() is None:
        raise UserError(f"{record.folder}: its network must be one of hpcfed's own")
    data = config.data()
    network = build(config.network(), shape=data.shape, classes=data.classes, seed=0)
    return Layout.of(network)


def pairs(folder: Path, record: RunRecord) -> tuple[Tensor, Tensor]:
    """Return rows of participants as they were in one snapshot and in their next."""
    every = int(record.config["snapshot_every"])
    last: dict[int, np.ndarray] = {}
    before, after = [], []
    for round in range(every, record.rounds_done + 1, every) if every else ():
        snapshot = hpcfed.open(folder).parameters(round)
        for client, row in zip(snapshot.clients.tolist(), snapshot.rows, strict=True):
            if np.isnan(row).any():
                continue
            if client in last:
                before.append(last[client])
                after.append(row)
            last[client] = row
    if not before:
        raise UserError(
            f"{folder}: no client has rows in two snapshots; run with --snapshot-every 1"
        )
    return torch.from_numpy(np.stack(before)), torch.from_numpy(np.stack(after))


if __name__ == "__main__":
    main()
