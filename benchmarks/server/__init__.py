"""Measure how the server's model learns."""
