"""Results, snapshots, timing and environment. Told by the run, never asking; reading
needs no torch.
"""
