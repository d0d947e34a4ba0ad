"""What runs leave on disk: the folder, results, snapshots, checkpoints, safe readers.

A run tells this room what to write; it asks no other room. Reading needs no torch, so that
`hpcfed show` and `hpcfed report` start at once.
"""
