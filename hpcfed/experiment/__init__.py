"""One run: assemble it, run its rounds, evaluate, record, checkpoint and resume."""
