"""Options of malicious clients."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from hpcfed.data import DatasetInfo
from hpcfed.errors import UserError, count, unknown
from hpcfed.options.declare import Choice, Need, option
from hpcfed.options.run import RunOptions
from hpcfed.options.traits import MethodTraits

# The attacks that a run can name. Nothing here imports torch, so a command line is
# checked quickly.


@dataclass(frozen=True)
class Attack:
    """What the checks of a run need to know about an attack."""

    summary: str
    """Its line in `hpcfed list`."""
    reads_others: bool = False
    """Whether attackers forge their uploads from those of benign clients. Then the
    attack needs benign clients. Also, one client's update reaches the server several
    times, and clipping each upload does not bound that.
    """
    scaled: bool = False
    """Whether it has a strength."""


ATTACKS: dict[str, Attack] = {
    "none": Attack("all clients are honest"),
    "label-flip": Attack("trains honestly on labels y → classes − 1 − y"),
    "mimic": Attack(
        "uploads a copy of the upload of a benign client, drawn at random",
        reads_others=True,
    ),
    "ipm": Attack(
        "inner-product manipulation: uploads w − strength × the mean update of benign "
        "clients",
        reads_others=True,
        scaled=True,
    ),
    "sign-flip": Attack("uploads w − strength × its own update", scaled=True),
    "noise": Attack(
        "adds Gaussian noise to its upload, strength × as large as its own update",
        scaled=True,
    ),
}
"""Every attack by its name."""


def _has_strength(run: Any) -> bool:
    # `check_malicious` has refused unknown attacks before.
    attack = ATTACKS.get(run.attack)
    return attack is not None and attack.scaled


class MaliciousOptions(RunOptions):
    title: ClassVar[str] = "malicious clients"
    poses_problem: ClassVar[bool] = True

    # Not a Literal: ATTACKS has a line about each for `hpcfed list`.
    attack: str = option(
        "none",
        "what malicious clients do; `hpcfed list` names all",
        acts_on="uploads",
        told="always",
        off=True,
        also="attack_type attack_method",
    )
    # A share by default, so that sweeps over --clients keep the proportion.
    attackers: float = option(
        0.2,
        "malicious clients: a share of the clients below 1, a number from 1 on",
        gt=0,
        also="malicious byzantine num_attackers num_byzantine malicious_clients "
        "adversaries f num_malicious",
        needs=Need("--attack ipm", lambda run: run.attack != "none"),
    )
    attack_strength: float = option(
        1.0,
        "ipm: ε; sign-flip and noise: size relative to the attacker's own update",
        ge=0,
        also="strength attack_scale",
        needs=Need("--attack ipm, sign-flip or noise", _has_strength),
    )

    @property
    def num_attackers(self) -> int:
        """The number of malicious clients."""
        if self.attack == "none":
            return 0
        if self.attackers < 1:
            return round(self.attackers * self.clients)
        return int(self.attackers)


def malicious_choices(config: MaliciousOptions) -> Iterable[Choice]:
    """Use one attacker if the default share rounds to none."""
    if config.attack != "none" and not config.num_attackers:
        clients = count(config.clients, "client")
        reason = f"a share of {config.attackers} of {clients} would be none"
        yield Choice("attackers", 1.0, f"{reason}; --attackers takes other numbers")


def check_flip(config: MaliciousOptions, dataset: str, data: DatasetInfo) -> None:
    """Refuse to flip labels of data without classes."""
    if config.attack == "label-flip" and data.task != "classification":
        raise UserError(
            f"--attack label-flip needs classes, and {dataset} is for {data.task}; use "
            "--attack sign-flip"
        )


def check_malicious(config: MaliciousOptions, method: MethodTraits) -> None:
    """Refuse an attack that is unknown, lacks attackers, or has nothing to attack."""
    attack, attackers = config.attack, config.num_attackers
    clients = count(config.clients, "client")
    if attack not in ATTACKS:
        raise unknown("attack", attack, ATTACKS)
    if config.attackers > 1 and config.attackers % 1:
        raise UserError(
            f"--attackers {config.attackers} is neither a share below 1 nor a whole "
            "number"
        )
    if attackers > config.clients:
        raise UserError(f"--attackers {attackers}, but there are {clients}")
    if attack != "none" and not attackers:
        raise UserError(
            f"--attackers {config.attackers} of {clients} round to none; use "
            "--attackers 1"
        )
    # A round may still sample attackers only: the attack itself deals with that.
    if ATTACKS[attack].reads_others and attackers == config.clients:
        raise UserError(
            f"--attack {attack} needs benign clients, and all {config.clients} are "
            "attackers; use fewer --attackers, or --attack sign-flip"
        )
    # A label flip acts on the attackers' data, before anything is uploaded.
    if attack not in ("none", "label-flip") and not method.uploads:
        raise UserError(
            f"--attack {attack}, but clients of method {config.method} upload nothing"
        )
