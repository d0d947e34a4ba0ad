"""Where the time goes: timelines of all ranks, kernels, memory, and how close a device
comes to its own ceilings.
"""
