"""Comparison of two runs or studies, A and B: what changed, and its effect."""
