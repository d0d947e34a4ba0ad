"""CUDA kernels, each with its Python side."""
