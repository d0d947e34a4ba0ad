"""Experiment trackers, in addition to the record: TensorBoard, Weights & Biases, MLflow.

Each has a file for what its package needs. `tracking` decides when they write,
continues after a resume, and lets no failure of a tracker end a run.
"""

from hpcfed.experiment.tracking.tracking import Tracking, check_account, tracked

__all__ = ["Tracking", "check_account", "tracked"]
