"""Groups of run.h5 that are written now and then: relocations, finals and newcomers."""

from collections.abc import Sequence

import h5py

from hpcfed.results.dataset import create, create_names

# Names, units and meanings are part of the file's format: readers of older and newer
# versions rely on them.

RELOCATIONS = "moves"
NEWCOMER_STARTS = ("random", "global model", "method", "random, guided")
"""The last is of methods that lead new clients on."""
NEW_ROUNDS = "new_rounds"


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


def create_figures(file: h5py.File, names: Sequence[str], clients: int) -> None:
    """Create room for what a method measures of every client at the end."""
    create_names(file, "figures/name", names)
    create(
        file,
        "figures/value",
        (len(names), clients),
        "name",
        "client",
        unit="1",
        meaning="what the method measures of a client at the end; NaN: not asked for",
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


def create_newcomer_bytes(file: h5py.File) -> None:
    """Create room for what a new client is sent to begin with."""
    create(
        file,
        "newcomers/bytes",
        (),
        unit="bytes",
        meaning="sent to a new client before its first local update, by the method's "
        "own accounting",
    )


def create_new_rounds(file: h5py.File, rounds: int, clients: int) -> None:
    """Create room for the rounds that new clients make with each other."""
    meanings = {
        "accuracy": "accuracy of new clients on their own test data after a round, of "
        "all that have joined; NaN: not there or not evaluated",
        "trained_accuracy": "accuracy of the round's participants as their local "
        "training left them; NaN: took no part or not evaluated",
    }
    for name, meaning in meanings.items():
        create(
            file,
            f"{NEW_ROUNDS}/{name}",
            (rounds, clients),
            "round",
            "client",
            unit="fraction",
            meaning=meaning,
        )
    for name, meaning in {
        "bytes_up": "sent by new clients",
        "bytes_down": "sent to new clients",
    }.items():
        create(
            file,
            f"{NEW_ROUNDS}/{name}",
            (rounds,),
            "round",
            unit="bytes",
            meaning=f"{meaning} in a round of theirs",
        )
