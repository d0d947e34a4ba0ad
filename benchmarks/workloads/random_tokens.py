"""Random tokens, to time language models: a step takes as long as with real text.

hpcfed run --model hf:DIR --dataset benchmarks/workloads/random_tokens.py:tokens --dataset-options
'{"clients": 20, "samples": 160, "length": 512, "vocabulary": 32000}'
"""

import numpy as np


def tokens(
    *, clients: int, samples: int, length: int, vocabulary: int, test: int = 8
) -> dict[str, np.ndarray]:
    """Return texts of random tokens: `samples` of each client, and `test` in all.

    Each token is predicted from those before it, so a text has one more than `length`.
    """
    random = np.random.default_rng(0)
    shape = (clients * samples, length + 1)
    return {
        "train_inputs": random.integers(vocabulary, size=shape),
        "train_clients": np.arange(clients).repeat(samples),
        "test_inputs": random.integers(vocabulary, size=(test, length + 1)),
        "test_clients": np.arange(test) % clients,
        # Few texts need not contain the last token.
        "vocabulary": np.array(vocabulary),
    }
