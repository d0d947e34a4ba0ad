"""The attacks that a run can name. Nothing here loads torch, so that a command line is
checked at once.
"""

ATTACKS: dict[str, str] = {
    "none": "everybody is honest",
    "label-flip": "trains honestly on labels y → classes − 1 − y",
    "mimic": "uploads a copy of the upload of a benign client, drawn at random",
    "ipm": "inner-product manipulation: uploads w − strength × the mean update of benign "
    "clients",
    "sign-flip": "uploads w − strength × its own update",
    "noise": "adds Gaussian noise to its upload, strength × as large as its own update",
}
"""Every attack with its line in `hpcfed list`."""

NEED_BENIGN = frozenset({"mimic", "ipm"})
"""Attacks that are made of what benign clients upload."""
