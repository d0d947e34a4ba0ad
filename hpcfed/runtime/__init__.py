"""Who we are among the ranks, and how ranks talk: the only room that calls MPI or
torch.distributed.
"""
