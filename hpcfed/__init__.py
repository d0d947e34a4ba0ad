"""hpcfed: a multi-GPU benchmark harness for federated learning."""

__version__ = "0.1.0"
