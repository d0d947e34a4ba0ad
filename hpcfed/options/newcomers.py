"""Options of clients that join after the last round."""

from typing import ClassVar, Literal

from hpcfed.errors import UserError
from hpcfed.options.declare import LEFT_OUT, Need, option
from hpcfed.options.run import RunOptions
from hpcfed.options.traits import MethodTraits

NEWCOMERS = Need("--new-clients 10", lambda run: run.new_clients > 0)
"""What turns on all options of new clients."""
_ALONE = Need("leaving --new-rounds out", lambda run: run.new_rounds == 0)


class NewcomerOptions(RunOptions):
    title: ClassVar[str] = "new clients"

    # 0 is an amount: no clients join.
    new_clients: int = option(
        0,
        "clients that join after the last round, to see how fast they catch up",
        ge=0,
        calibration=LEFT_OUT,
        also="novel_clients unseen_clients num_new_clients",
    )
    new_updates: int = option(
        5,
        "local updates, each of --epochs, that new clients make",
        ge=1,
        calibration=LEFT_OUT,
        needs=(_ALONE, NEWCOMERS),
    )
    new_rounds: int = option(
        0,
        "rounds of the method among new clients, in place of local updates on their "
        "own; each of the first --join-rounds is made by the clients that join in "
        "it, later ones by a sample of all; 0: none",
        ge=0,
        calibration=LEFT_OUT,
        needs=NEWCOMERS,
    )
    join_rounds: int = option(
        1,
        "updates or rounds over which new clients join, equally many in each",
        ge=1,
        calibration=LEFT_OUT,
        needs=NEWCOMERS,
    )
    new_starts: Literal["all", "method"] = option(
        "all",
        "where new clients start: as the method says, or (all) from a random row (also "
        "guided, where the method guides) and from the global model as well",
        calibration=LEFT_OUT,
        needs=(_ALONE, NEWCOMERS),
    )


def check_newcomers(config: NewcomerOptions, method: MethodTraits) -> None:
    """Refuse too many --join-rounds, and those that a server cannot guide."""
    # Without new clients, `check_switches` says what --join-rounds needs.
    joining = config.new_clients or config.join_rounds
    length, flag = config.new_updates, "--new-updates"
    if config.new_rounds:
        length, flag = config.new_rounds, "--new-rounds"
    if config.join_rounds > min(joining, length):
        raise UserError(
            f"--join-rounds {config.join_rounds} is more than --new-clients "
            f"{config.new_clients} or {flag} {length}"
        )
    if config.join_rounds > 1 and method.has_server:
        raise UserError(
            f"--join-rounds: the server of method {config.method} guides all new "
            "clients at once"
        )
