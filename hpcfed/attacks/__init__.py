"""What malicious clients do, one file per attack; any method can be attacked.

`label_flip` changes the data that attackers train on. The others have a function
`forge`: what attackers upload in place of their rows, as a function of a `Scene`.
Attacks that copy or mirror benign clients need one in the round: where all that were
sampled are attackers, they upload what they trained, and the run says so once. The
others always act.

This page is the catalogue and imports no torch, so that a command line is checked at
once.
"""

NEED_BENIGN = frozenset({"mimic", "ipm"})
"""Attacks that are made of what benign clients upload."""

ATTACKS: dict[str, str] = {
    "none": "everybody is honest",
    "label-flip": "trains honestly on labels y → classes − 1 − y",
    "mimic": "uploads a copy of the upload of a benign client, drawn at random",
    "ipm": "inner-product manipulation: uploads w − strength × the mean update of benign clients",
    "sign-flip": "uploads w − strength × its own update",
    "noise": "adds Gaussian noise to its upload, strength × as large as its own update",
}
