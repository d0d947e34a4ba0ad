"""Inject faults into real runs."""
