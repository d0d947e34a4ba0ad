"""Measure what hpcfed costs around a round: start, recording, waiting, long runs."""
