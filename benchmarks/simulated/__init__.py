"""Simulate a cluster in one process: its ranks, network, clock, disk and faults, all
drawn from one seed and replayed by it.
"""
