"""Options of clients that join after the last round."""

from collections.abc import Iterable
from typing import ClassVar, Literal

from hpcfed.config.declare import Switch, option
from hpcfed.config.run import RunOptions
from hpcfed.config.traits import MethodTraits
from hpcfed.errors import UserError

TURN_ON = "--new-clients 10"
"""What turns on all options of new clients."""


class NewcomerOptions(RunOptions):
    title: ClassVar[str] = "new clients"

    # 0 is an amount here: none join.
    new_clients: int = option(
        0, "clients that join after the last round, to see how fast they catch up", ge=0
    )
    new_updates: int = option(
        5, "local updates, each of --epochs, that new clients make", ge=1
    )
    join_rounds: int = option(
        1, "updates over which new clients join, equally many in each", ge=1
    )
    new_starts: Literal["all", "method"] = option(
        "all",
        "where new clients start: as the method says, or (all) from a random row (also "
        "guided, where the method guides) and from the global model as well",
    )


def newcomer_switches(config: NewcomerOptions) -> Iterable[Switch]:
    """Name the options of this group that act only where something else is on."""
    on = config.new_clients > 0
    yield Switch("new_updates", TURN_ON, on)
    yield Switch("join_rounds", TURN_ON, on)
    yield Switch("new_starts", TURN_ON, on)


def check_newcomers(config: NewcomerOptions, method: MethodTraits) -> None:
    """Refuse to spread newcomers over more updates than there are, or than the server
    can guide.
    """
    # Without new clients, `newcomer_switches` speaks of --join-rounds instead.
    joining = config.new_clients or config.join_rounds
    if config.join_rounds > min(joining, config.new_updates):
        raise UserError(
            f"--join-rounds {config.join_rounds} are more than --new-clients "
            f"{config.new_clients} or --new-updates {config.new_updates}"
        )
    if config.join_rounds > 1 and method.has_server:
        raise UserError(
            f"--join-rounds: the server of method {config.method} guides all new "
            "clients at once"
        )
