"""Texts that can be learnt: each client's tokens follow a chain of its own dialect.

hpcfed run --model benchmarks/examples/gpt.py:GPT --lora 4 --dataset benchmarks/workloads/chains.py:chains
--dataset-options '{"clients": 8, "samples": 32, "length": 32, "vocabulary": 32}'
"""

import numpy as np

OWN = 0.25
"""How often a client uses its dialect, and not what all have in common."""


def chains(
    *, clients: int, samples: int, length: int, vocabulary: int, test: int = 4
) -> dict[str, np.ndarray]:
    """Return `samples` texts of each client to train on, and `test` to be judged by.

    Each token is predicted from those before it, so a text has one more than `length`.
    """
    random = np.random.default_rng(0)
    common = random.integers(vocabulary, size=vocabulary)
    texts = []
    for _ in range(clients):
        dialect = random.integers(vocabulary, size=vocabulary)
        rows = samples + test
        tokens = np.empty((rows, length + 1), np.int64)
        tokens[:, 0] = random.integers(vocabulary, size=rows)
        for place in range(length):
            before = tokens[:, place]
            own = random.random(rows) < OWN
            tokens[:, place + 1] = np.where(own, dialect[before], common[before])
        texts.append(tokens)
    every = np.stack(texts)
    return {
        "train_inputs": every[:, :samples].reshape(-1, length + 1),
        "train_clients": np.arange(clients).repeat(samples),
        "test_inputs": every[:, samples:].reshape(-1, length + 1),
        "test_clients": np.arange(clients).repeat(test),
        "vocabulary": np.array(vocabulary),
    }
