"""Measure hpcfed beside other simulators."""
