"""Predicts seconds, memory and the best split of ranks on machines not at hand."""
