"""Checks of the machine before a long run: each rank measures, the root judges."""
