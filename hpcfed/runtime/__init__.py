"""Ranks, devices, signals and random streams: who we are, and how ranks talk. The only
room that calls MPI or torch.distributed.
"""
