"""Attacks by malicious clients and by a malicious server, on any method.

Clients have one file per attack. `label_flip` changes the attackers' training data. The
others have a function `forge`, which makes the attackers' uploads from an `AttackView`,
the round as attackers see it. `tampering` replaces the honest uploads by these.

The server: `idlg` tries to reconstruct clients' images from their uploads.
"""
