"""Attacks by malicious clients and by a malicious server, on any method.

Clients: `label_flip` changes the attackers' training data; in `tampering` they replace
their honest uploads. The server: `idlg` reconstructs clients' images from uploads.
"""
