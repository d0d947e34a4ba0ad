"""The attacks that a run can name. Nothing here loads torch, so that a command line is
checked at once.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Attack:
    """What the checks of a run need to know about an attack."""

    summary: str
    """Its line in `hpcfed list`."""
    reads_others: bool = False
    """Whether forgeries are made of what benign clients upload. Then an attack needs
    benign clients, and one client's update reaches the server several times, which no
    clipping of single uploads bounds.
    """
    scaled: bool = False
    """Whether it has a strength."""


ATTACKS: dict[str, Attack] = {
    "none": Attack("everybody is honest"),
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
