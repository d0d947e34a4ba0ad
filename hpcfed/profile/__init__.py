"""Where the time goes: timelines of all ranks, kernels, memory, and how near a device
is to its own ceilings.
"""
