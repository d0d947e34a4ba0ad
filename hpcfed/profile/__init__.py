"""Where the time of a run goes: timelines, kernels, memory, and ceilings."""
