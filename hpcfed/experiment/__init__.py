"""One run: assemble it, go round after round, evaluate, record, checkpoint and resume."""
