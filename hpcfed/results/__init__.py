"""What runs leave on disk: the folder, results, snapshots, checkpoints, safe readers.

A run tells this room what to write; this room calls no other. Reading does not need
torch, so `hpcfed show` and `hpcfed report` start at once.
"""
