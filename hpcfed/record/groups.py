"""Groups of run.h5 that are written now and then: relocations, finals and newcomers."""

from collections.abc import Sequence

import h5py

from hpcfed.record.dataset import create, create_names

# Names, units and meanings are part of the file's format: readers of older and newer
# versions rely on them.

RELOCATIONS = "moves"
NEWCOMER_STARTS = ("random", "global model", "method", "random, guided")
"""The last is of methods that lead new clients on."""


def create_relocations(file: h5py.File, most: int, clients: int) -> None:
    """Create room for so many relocations; NaN and -1 stand for those that have not
    come.
    """
    create(
        file,
        f"{RELOCATIONS}/round",
        (most,),
        "move",
        unit="round",
        meaning="the first round, from 0, after clients moved to other ranks",
    )
    create(
        file,
        f"{RELOCATIONS}/seconds",
        (most,),
        "move",
        unit="s",
        meaning="what the move took",
    )
    create(
        file,
        f"{RELOCATIONS}/rank",
        (most, clients),
        "move",
        "client",
        unit="rank",
        meaning="rank of each client from then on",
        dtype="i4",
        fillvalue=-1,
    )


def create_finals(file: h5py.File, names: Sequence[str], clients: int) -> None:
    """Create room for what a method has evaluated at the end."""
    create_names(file, "finals/name", names)
    create(
        file,
        "finals/accuracy",
        (len(names), clients),
        "name",
        "client",
        unit="fraction",
        meaning="accuracy on the client's own test data at the end; NaN: not asked for",
    )


def create_newcomers(file: h5py.File, updates: int, clients: int) -> None:
    """Create room for new clients' accuracy from every start, after every local update."""
    create_names(file, "newcomers/start", NEWCOMER_STARTS)
    create(
        file,
        "newcomers/accuracy",
        (len(NEWCOMER_STARTS), updates, clients),
        "start",
        "update",
        "client",
        unit="fraction",
        meaning="accuracy of new clients on their own test data by local updates; "
        "NaN: not there",
    )
    create(
        file,
        "newcomers/bytes",
        (),
        unit="bytes",
        meaning="sent to a new client before its first local update, by the method's "
        "own accounting",
    )
