"""Measure hpcfed beside other simulators on a CPU."""
