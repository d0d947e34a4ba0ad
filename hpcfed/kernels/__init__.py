"""CUDA kernels, each with its Python side."""

# Importing this makes a kernel draw the random streams from here on.
from hpcfed.kernels import rows as rows
