"""What malicious clients and a malicious server do; any method can be attacked.

Clients, one file per attack: `label_flip` changes the data that attackers train on. The
others have a function `forge`, which makes the attackers' uploads from an `AttackView`,
the round as attackers see it. `tampering` puts them in place of honest uploads.

The server: `idlg` tries to see clients' images in what they upload.
"""
