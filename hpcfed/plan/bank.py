"""Passes of --server-model span through the bank: what they have to do, and how long
that takes at the speed of passes that were measured.

A pass loads every number of the bank, converts it to float64 and centres it, whatever
is then multiplied. Server ranks share the columns. The eigenvectors of the Gram matrix
are found on every rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from hpcfed.analysis.costmodel import FittedCost, fit_cost
from hpcfed.plan.constants import BankPoint
from hpcfed.plan.speeds import LinkSpeed, ring_allreduce
from hpcfed.server.bank import AT_ONCE
from hpcfed.server.options import ServerOptions

DOUBLE = 8.0
"""Bytes of a float64."""
COPIES = 3
"""Blocks that are alive at once: as loaded, joined, and centred."""
ROWS_ALIVE = 4
"""Matrices of the clients' rows that are alive at once while rows are generated: newest
uploads, generated rows, their updates, and the answer.
"""


@dataclass(frozen=True)
class BankWork:
    """What passes through the bank have to do."""

    numbers: float = 0.0
    """Numbers that are loaded or written, over all passes: of the bank, and of the
    clients' rows beside it.
    """
    flops: float = 0.0
    """FLOPs of products in float64."""
    cubes: float = 0.0
    """Rows to the power of three, for each time that eigenvectors are found."""

    def __add__(self, other: "BankWork") -> "BankWork":
        return BankWork(
            self.numbers + other.numbers,
            self.flops + other.flops,
            self.cubes + other.cubes,
        )

    def shared(self, ranks: int) -> "BankWork":
        """Return the work of one of several ranks."""
        return BankWork(self.numbers / ranks, self.flops / ranks, self.cubes)


def learning_work(rows: int, columns: int) -> BankWork:
    """Count what it takes to find the coordinates of all rows."""
    # One pass for the tensors' deviations, one for the Gram matrix.
    return BankWork(
        numbers=2.0 * rows * columns,
        flops=2.0 * rows**2 * columns,
        cubes=float(rows) ** 3,
    )


def generating_work(rows: int, columns: int, clients: int) -> BankWork:
    """Count what it takes to map the clients' uploads to coordinates and back."""
    # Products with the rows, and with the combinations of rows that are axes.
    each_way = 2.0 * clients * rows * (columns + rows - 1)
    numbers = 2.0 * (rows + clients) * columns
    return BankWork(numbers=numbers, flops=2 * each_way)


def recognising_work(
    rows: int, columns: int, clients: int, *, sets: int = 1
) -> BankWork:
    """Count what it takes to find the client whose direction each of the clients' rows
    has: lengths, the clients' directions, and products with them. `sets` of the clients'
    rows are compared in the same passes.
    """
    directions = 2.0 * clients * rows * columns
    products = 2.0 * clients**2 * columns
    # Directions are written, and each set is loaded.
    numbers = (2.0 * rows + (1 + sets) * clients) * columns
    return BankWork(numbers=numbers, flops=directions + sets * products)


def answer_work(rows: int, columns: int, clients: int) -> BankWork:
    """Count what an answer with generated rows takes besides denoising: they and the
    uploads are recognised.
    """
    recognised = recognising_work(rows, columns, clients, sets=2)
    return generating_work(rows, columns, clients) + recognised


def fit_passes(points: Sequence[BankPoint]) -> FittedCost:
    """Fit the seconds of a number, a FLOP and a cube to measured passes."""
    return fit_cost(points, _terms, lambda point: point.seconds)


def misfit(points: Sequence[BankPoint]) -> float:
    """Return the mean relative error of the fit; 0 without points."""
    if not points:
        return 0.0
    cost = fit_passes(points)
    return fmean(abs(cost(point) / point.seconds - 1) for point in points)


def _terms(work: BankPoint | BankWork) -> tuple[float, float, float]:
    return work.numbers, work.flops, work.cubes


def bank_exchange(rows: int, clients: int, ranks: int, link: LinkSpeed) -> float:
    """Return the seconds in which ranks add up the Gram matrix, and the products and
    distances of the clients' rows.
    """
    numbers = rows**2 + clients * rows + 2 * clients**2
    return ring_allreduce(DOUBLE * numbers, ranks, link)


def bank_memory(
    options: ServerOptions, *, rows: int, columns: int, clients: int, ranks: int
) -> float:
    """Return the bytes that bank, blocks and generated rows take on a server rank."""
    numbers = rows * -(-columns // ranks)
    each = 2 if options.bank_precision == "bf16" else 4
    # Uploads are kept with the rows that their rounds started from.
    held = each * numbers * (1 if options.bank_of == "updates" else 2)
    if options.bank_on == "host":
        held = 0
    block = DOUBLE * min(numbers, AT_ONCE)
    # The answer holds whole rows on every rank.
    return held + COPIES * block + ROWS_ALIVE * 4.0 * clients * columns
