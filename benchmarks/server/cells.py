"""The cells of benchmarks/server/matrix.py: which there are, and the options of each."""

import argparse
from dataclasses import dataclass

LAYOUTS = {"alone": (1, 0), "1+1": (2, 1), "1+2": (3, 2)}
"""Ranks in all, and server ranks among them."""
BATCH = 32
COMMON = f"--method pfedgpa --clients 20 --rounds 6 --bank-rounds 5 --evaluate-every 6 --server-batch {BATCH}"
# Clients in float64, so that all cells learn from the same uploads.
COMMON += " --precision fp64 --no-server-save"
DIGITS = "--autoencoder-samples 320 --denoiser-samples 640"
CIFAR = "--dataset synthetic --model cnn-cifar --partition dominant --train-per-client 60 --test-per-client 10"
CIFAR += f" --autoencoder-samples {2 * BATCH} --denoiser-samples {2 * BATCH} --inversion-depth 5"
WORK = {"small": DIGITS, "paper": DIGITS, "large": CIFAR}
"""Options by size; the largest has its billion parameters over the last two layers of a
CIFAR-10 network only.
"""
FURTHER = {
    "checkpointing": ("--server-checkpointing", (0, 1, 2, 3)),
    "offload optimizer": ("--server-offload optimizer", (1, 2, 3)),
    "offload parameters": ("--server-offload parameters", (3,)),
}
"""Options of further cells, and the stages that they are tried with."""
AGAIN = "the plain loop again"


@dataclass(frozen=True)
class Cell:
    """One way to ask for the server, and the layout of ranks."""

    size: str
    precision: str
    stage: int
    further: str
    layout: str

    @property
    def row(self) -> str:
        """The name of the line of the table that this cell is in."""
        if self.further == AGAIN:
            return f"{self.size:6} {self.precision:5} {AGAIN}"
        return f"{self.size:6} {self.precision:5} ZeRO {self.stage}{self.further and ', ' + self.further}"

    @property
    def folder(self) -> str:
        """The name of the run's folder."""
        names = [self.size, self.precision, str(self.stage), self.layout]
        return "-".join([*names, *self.further.split()])

    @property
    def reference(self) -> str:
        """The folder of the plain loop with the same micro-batches."""
        return f"plain-{self.size}-{self.precision}-{self.micro}"

    @property
    def micro(self) -> int:
        """The micro-batch of a server rank."""
        return BATCH // max(1, LAYOUTS[self.layout][1])

    def words(self) -> str:
        """Return the options of the cell's run."""
        ranks, servers = LAYOUTS[self.layout]
        if self.further == AGAIN:
            return self.plain_words()
        own = f"--server {self.size} --server-precision {self.precision} --zero-stage {self.stage}"
        own += f" {FURTHER[self.further][0]}" if self.further else ""
        own += (
            f" --server-ranks {servers} --server-micro-batch {self.micro}"
            if servers
            else ""
        )
        return f"{COMMON} {WORK[self.size]} {own} --backend {'nccl' if ranks > 2 else 'auto'}"

    def plain_words(self) -> str:
        """Return the options of the plain loop that the cell is compared with."""
        own = f"--server {self.size} --server-precision {self.precision}"
        return f"{COMMON} {WORK[self.size]} {own} --server-engine torch --server-micro-batch {self.micro}"


def cells(options: argparse.Namespace) -> list[Cell]:
    """Return all cells that were asked for; further ones once per stage and layout."""
    chosen = [
        Cell(size, precision, stage, "", layout)
        for layout in options.layouts
        for size in options.sizes
        for precision in options.precisions
        for stage in options.stages
    ]
    if options.basic:
        return chosen
    again = [
        Cell(size, precision, 0, AGAIN, "alone")
        for size in options.sizes
        for precision in options.precisions
    ]
    further = [
        Cell(options.sizes[-1], options.precisions[0], stage, name, layout)
        for layout in options.layouts
        for name, (_, stages) in FURTHER.items()
        for stage in stages
        if stage in options.stages
    ]
    return again + chosen + further
