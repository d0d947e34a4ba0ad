"""CUDA kernels, each with its Python side."""

# Random streams are drawn by a kernel from here on.
from hpcfed.kernels import mixing as mixing
