"""Findings about the server's model in a study: tables of its costs and their growth,
and the verdicts on them.
"""

from collections.abc import Sequence
from math import nan

from hpcfed.analysis.findings import (
    COUNT,
    IN_SECONDS,
    MEBIBYTES,
    PER_CENT_OF,
    PLAIN,
    Cell,
    Row,
    Table,
)
from hpcfed.analysis.labels import few, label, text
from hpcfed.analysis.server_costs import (
    ServerCost,
    ServerGrowth,
    of_the_network,
    over_clients,
    over_columns,
    over_server_ranks,
    zero_stages,
)
from hpcfed.errors import count
from hpcfed.words import DASH, MIB, bytes_text, number, seconds_text

MILLION = 1e6
LEAST_GROWTH = 0.01
"""A slope is told if it adds more than this share of the longest time."""
WHICH = ("options", "clients", "columns")
"""The first columns of a table of points; the last are generated columns."""
TIMES = (
    "seconds of a run's last learning, mean over runs; share: of the time from one "
    "learning to the next, in which the server works"
)
RESULTS = (
    "memory: peak of each server rank, in the device's allocator on a GPU, of the whole "
    "process on a CPU; own client: generated updates that have their own client's "
    "direction, and the same of uploads; accuracy: of uploads, and of generated rows"
)
GROWTH = (
    "time grows as the number to this power: 1 is proportional, 0 is flat; each: a "
    "million columns, a client, a server rank"
)


def server_tables(costs: Sequence[ServerCost]) -> list[Table]:
    """Return all tables; none without costs."""
    if not costs:
        return []
    tables = [_times(costs), _results(costs)]
    growths = [*over_columns(costs), *over_clients(costs), *over_server_ranks(costs)]
    rows = [_growth_row(one) for one in growths if len(set(one.sizes)) > 1]
    if rows:
        columns = ("the server", "over", "from … to", "power", "s fixed", "s each",
                   "MiB fixed", "MiB each", "limited by")  # fmt: skip
        tables.append(Table(columns, rows, GROWTH))
    return tables


def _which(one: ServerCost) -> list[str | Cell]:
    # The columns tell what is generated.
    following = of_the_network(one.options["method"])
    name = label(one.key.without("method", *following)) or label(one.key)
    return [name, COUNT(one.clients), COUNT(one.columns)]


def _times(costs: Sequence[ServerCost]) -> Table:
    """Return the seconds of every point by part, or the reason why it has none."""
    # Models of rows have different parts.
    parts: dict[str, None] = {}
    for one in costs:
        parts |= dict.fromkeys(one.seconds)
    figures = [*parts, "server, s", "clients between, s", "share, %"]
    rows: list[Row] = []
    for one in costs:
        cells: list[str | Cell] = [DASH] * len(figures)
        if not one.why:
            cells = [IN_SECONDS(one.seconds.get(part, nan)) for part in parts]
            cells += [IN_SECONDS(one.whole), IN_SECONDS(one.between)]
            cells.append(PER_CENT_OF(one.share))
        rows.append([*_which(one), *cells, one.why])
    return _without_empty((*WHICH, *figures, "no figures because"), rows, TIMES)


def _results(costs: Sequence[ServerCost]) -> Table:
    """Return memory, identity and accuracy of every point that has them."""
    columns = (*WHICH, "server ranks", "bank, MiB", "memory, MiB", "own client, %",
               "uploads, %", "accuracy before, %", "after, %")  # fmt: skip
    rows: list[Row] = []
    for one in costs:
        if one.why:
            continue
        bank = MEBIBYTES(sum(one.bank))
        cells = [COUNT(one.server_ranks), bank, _of_ranks(one.memory)]
        shares = (one.own, one.own_uploads, one.before, one.after)
        rows.append([*_which(one), *cells, *map(PER_CENT_OF, shares)])
    return Table(columns, rows, RESULTS)


def _of_ranks(sizes: Sequence[float]) -> Cell:
    """Return the fullest rank's bytes, shown beside those of all others."""
    every = " + ".join(number(size / MIB) for size in sizes)
    return MEBIBYTES(max(sizes), every)


def _without_empty(columns: Sequence[str], rows: list[Row], caption: str) -> Table:
    """Return a table without its last column, if no row has it."""
    if any(row[-1] for row in rows):
        return Table(columns, rows, caption)
    return Table(columns[:-1], [row[:-1] for row in rows], caption)


def _growth_row(one: ServerGrowth) -> Row:
    unit = MILLION if one.over == "columns" else 1.0
    (fixed, each), (bytes_fixed, bytes_each) = one.seconds, one.memory
    part, share = one.points[-1].limit
    return [
        one.name,
        one.over,
        f"{one.sizes[0]:,.0f} … {one.sizes[-1]:,.0f}",
        PLAIN(one.power),
        IN_SECONDS(fixed),
        IN_SECONDS(unit * each),
        MEBIBYTES(bytes_fixed),
        MEBIBYTES(unit * bytes_each),
        f"{part}, {share:.0%}",
    ]


# Verdicts, in sentences.


def fit_answers(costs: Sequence[ServerCost]) -> list[str]:
    """Say up to how many columns each server fits between rounds, and where it ends."""
    sentences = []
    for one in over_columns(costs):
        if one.points:
            sentences.append(f"{one.name}: {_fits(one)}{_ends(one)}.")
        elif one.failed:
            first = one.failed[0]
            told = f"fails with {first.columns:,.0f} columns: {first.why}"
            sentences.append(f"{one.name}: {told}")
    return few(sentences, "server")


def _fits(one: ServerGrowth) -> str:
    """Say which of the points fit; only those below the first that does not count."""
    fitting = []
    for point in one.points:
        if not point.fits:
            break
        fitting.append(point)
    first, largest = one.points[0], one.points[-1]
    if not fitting:
        told = f"the server never fits between rounds, as with {_compared(first)}"
    else:
        told = f"the server fits between rounds up to {_compared(fitting[-1])}"
        if fitting[-1] is not largest:
            told += f", not with {_compared(one.points[len(fitting)])}"
    part, share = largest.limit
    return f"{told}; at {largest.columns:,.0f} it is limited by {part}, {share:.0%}"


def _compared(point: ServerCost) -> str:
    return (
        f"{point.columns:,.0f} columns ({seconds_text(point.whole)}, clients work "
        f"{seconds_text(point.between)})"
    )


def _ends(one: ServerGrowth) -> str:
    """Say why the next larger point has failed."""
    largest = one.points[-1].columns
    beyond = [point for point in one.failed if point.columns > largest]
    if not beyond:
        return ""
    return (
        f". It ends at {largest:,.0f} columns; with {beyond[0].columns:,.0f}: "
        f"{beyond[0].why.rstrip('.')}"
    )


def growth_answers(costs: Sequence[ServerCost]) -> list[str]:
    """Say how the server's time grows over columns, clients and server ranks, and what
    ZeRO saves.
    """
    sentences = []
    for found, each in (
        (over_columns(costs), "million columns"),
        (over_clients(costs), "client"),
        (over_server_ranks(costs), ""),
    ):
        grown = [one for one in found if len(set(one.sizes)) > 1]
        # The widest first: it says most about growth.
        grown.sort(key=lambda one: -one.sizes[-1] / one.sizes[0])
        sentences += few([_growth(one, each) for one in grown], "server")
    return [*sentences, *few([_zero(one) for one in zero_stages(costs)], "point")]


def _growth(one: ServerGrowth, each: str) -> str:
    unit = MILLION if one.over == "columns" else 1.0
    first, last = one.points[0], one.points[-1]
    told = (
        f"{one.name}: from {one.sizes[0]:,.0f} to {one.sizes[-1]:,.0f} {one.over} the "
        f"server takes {seconds_text(first.whole)}, then {seconds_text(last.whole)}: "
        f"{one.over} to the power of {text(one.power)}"
    )
    slope = one.seconds[1]
    grown = slope * (one.sizes[-1] - one.sizes[0])
    # A slope that makes no difference would read "0 µs".
    if each and grown > LEAST_GROWTH * last.whole:
        told += f", {seconds_text(unit * slope)} per {each}"
    return f"{told}."


def _zero(points: Sequence[ServerCost]) -> str:
    stages = ", ".join(str(one.options["zero_stage"]) for one in points)
    taken = ", ".join(bytes_text(max(one.memory)) for one in points)
    first = points[0]
    name = label(first.key.without("zero_stage"))
    return (
        f"{name}, {count(first.clients, 'client')}: ZeRO {stages} take {taken} of the "
        f"fullest of {first.server_ranks} server ranks."
    )
