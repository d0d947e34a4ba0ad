"""Measure hpcfed: its speed, its rivals, papers' tables, and what it bears.

Programs start from the checkout's top folder, e.g. `python -m benchmarks.speed.round`;
hpcfed need not be installed for that.
"""
