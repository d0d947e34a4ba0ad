"""What runs and studies found: collect it, compare it, draw it, print it."""
