"""Data of one's own with natural clients: patients, each of one hospital.

Every hospital has another mix of patients and measures with another error, as real ones
do. Replace the random numbers by what you read from your files.

  hpcfed run --dataset benchmarks/examples/hospitals.py:patients --lr 0.02
  hpcfed run --dataset benchmarks/examples/hospitals.py:patients --dataset-options '{"hospitals": 40}'
"""

import numpy as np

FEATURES = 12


def patients(hospitals: int = 10, seed: int = 0) -> dict[str, np.ndarray]:
    """Return measurements, who falls ill, and the hospital of every patient."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=FEATURES)
    measured, ill, where = [], [], []
    for hospital in range(hospitals):
        size = int(rng.integers(40, 400))
        typical = rng.normal(size=FEATURES)
        state = typical + rng.normal(size=(size, FEATURES))
        error = rng.normal(scale=0.3, size=(size, FEATURES))
        measured.append(state + error)
        ill.append(state @ truth > 0)
        where += [f"hospital {hospital:02}"] * size
    # Without a test set, a tenth of every hospital's patients is held out.
    return {
        "train_inputs": np.concatenate(measured),
        "train_labels": np.concatenate(ill).astype(np.int64),
        "train_clients": np.array(where),
    }
