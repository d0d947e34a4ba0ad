"""Predicts what a run will take on machines that are not at hand: seconds, memory, and
the split of ranks between workers and server, from constants measured here.
"""
