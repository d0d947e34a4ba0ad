"""Sweeps over options, what their runs have in common, and the page that shows it.
Planning does not import torch.
"""
