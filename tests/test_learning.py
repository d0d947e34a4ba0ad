"""On real data the methods learn what they should."""

import pytest

from hpcfed.experiment.evaluate import evaluate
from tests.federations import assembled


def learned(
    method: str, *, alpha: float, rounds: int, seed: int = 0
) -> tuple[float, float]:
    """Accuracy on clients' own tests and of the global model, with the documented
    defaults.
    """
    s = assembled(
        method=method,
        model="auto",
        clients=20,
        alpha=alpha,
        precision="fp32",
        batch_size=16,
        seed=seed,
    )
    state = s.method.init(s.federation)
    for round in range(rounds):
        state = s.method.round(s.federation, state, s.federation.sample(round))
    result = evaluate(s, state)
    return result.accuracy, result.global_accuracy


@pytest.mark.parametrize("seed", [0, 1])
def test_fedavg_learns_the_digits(seed: int) -> None:
    _, common = learned("fedavg", alpha=0.5, rounds=20, seed=seed)
    assert common >= 0.95


def test_fine_tuning_beats_fedavg_on_clients_own_tests() -> None:
    plain, _ = learned("fedavg", alpha=0.1, rounds=8)
    tuned, _ = learned("fedavg-ft", alpha=0.1, rounds=8)
    assert tuned > plain + 0.02
