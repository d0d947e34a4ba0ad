"""Refuse runs that cannot fit into the host's memory, before anything starts."""

from math import prod
from pathlib import Path

from hpcfed.errors import UserError
from hpcfed.options.runconfig import RunConfig
from hpcfed.runtime import machine

GIB = 2**30


def check_results(config: RunConfig) -> None:
    """Refuse a run whose results alone would not fit into the memory of the writing
    rank.
    """
    # A round's record has four bytes per metric of a client and about a thousand more.
    evaluated = config.evaluate_clients or config.clients
    of_clients = 4 * evaluated * max(1, len(config.metrics or ()))
    rounds = config.rounds * (of_clients + 1000)
    # New clients are evaluated before and after each update, from up to three starts.
    updates = config.new_rounds or config.new_updates + 1
    newcomers = 24 * updates * config.new_clients
    needed, there = (rounds + newcomers) * config.num_seeds, machine.usable()
    if needed > there:
        raise UserError(
            f"--rounds {config.rounds} of --clients {config.clients} would make "
            f"{needed / GIB:,.0f} GiB of results, this machine has {there / GIB:,.0f}"
        )


def check_synthetic(config: RunConfig, workers: int) -> None:
    """Refuse synthetic data that would not fit into the host's memory.

    With a GPU the data is not in host memory, and a full GPU reports that itself.
    """
    # Asking torch would load it; the driver's device file says enough.
    on_gpu = config.device != "cpu" and Path("/dev/nvidiactl").exists()
    if config.dataset != "synthetic" or on_gpu:
        return
    needed, there = synthetic_bytes(config, workers), machine.usable()
    if needed > there:
        raise UserError(
            f"--synthetic-shape {config.synthetic_shape}: a rank would need about "
            f"{needed / GIB:,.0f} GiB, this machine has {there / GIB:,.0f}; use smaller "
            "images, fewer --clients, --train-per-client or --test-per-client"
        )


def synthetic_bytes(config: RunConfig, workers: int) -> int:
    """Return a lower bound on a rank's memory: labels, prototypes, images of its
    clients, and rows of an mlp.
    """
    pixels = prod(config.shape)
    number = 8 if config.precision == "fp64" else 4
    clients = config.clients + config.new_clients
    samples = clients * (config.train_per_client + config.test_per_client)
    # The global test set has as many samples as the clients' test sets together.
    all_samples = samples + clients * config.test_per_client
    of_rank = -(-all_samples // workers)
    images = of_rank * pixels * number * config.num_seeds
    # Three hashes per pixel generate an image.
    hashes = pixels * 8 * 3
    # Rows before and after training, gradient, momentum; the first layer has 64 units.
    rows = 4 * 64 * pixels * number if config.network() == "mlp" else 0
    prototypes = 2 * config.synthetic_classes * pixels * 4
    labels = 3 * 8 * samples
    return images + hashes + rows + prototypes + labels
