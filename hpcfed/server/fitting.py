"""Whether the server's model fits into the memory of its device, before it is built."""

import torch

from hpcfed.server.networks import Autoencoder, num_parameters
from hpcfed.server.options import ServerOptions, batching
from hpcfed.server.zero_memory import promised_memory
from hpcfed.words import bytes_text

INSTEAD = {
    "p-diff": "--server-model span, which does not grow with them, a smaller --server "
    "or fewer --generated-layers",
    "span": "--bank-on host, --bank-precision bf16, fewer --bank-rounds or more "
    "--server-ranks",
    "tokens": "--server-checkpointing, a smaller --server or --server-batch, "
    "--bank-on host, or ZeRO with more --server-ranks",
}
"""What to use if a model does not fit."""


def least_memory(
    options: ServerOptions, columns: int, *, uploads: int, ranks: int
) -> float:
    """Return bytes without which p-diff cannot train on the device of a rank: what its
    ZeRO stage promises for the autoencoder, activations, and copies of the bank.
    """
    with torch.device("meta"):
        network = Autoencoder(columns, options.size, input_noise=0, latent_noise=0)
    promised = promised_memory(num_parameters(network), options, ranks).total
    number = 2 if options.server_precision == "bf16" else 4
    kept = 0
    if not options.server_checkpointing:
        batch = batching(options, ranks, "autoencoder").micro
        kept = number * batch * network.activations
    # All rows as one tensor, and the same standardised. The bank itself may lie elsewhere.
    return promised + kept + 2 * 4.0 * uploads * columns


def shortage(
    options: ServerOptions, columns: int, *, uploads: int, ranks: int, memory: int
) -> str:
    """Say by how much p-diff exceeds a device with this memory; empty if it may fit, for
    other models, and if the memory is unknown (0).
    """
    if options.server_model != "p-diff" or not memory:
        return ""
    taken = least_memory(options, columns, uploads=uploads, ranks=ranks)
    if taken <= memory:
        return ""
    return (
        f"p-diff takes at least {bytes_text(taken)} for {columns:,} columns, and its "
        f"device has {bytes_text(memory)}"
    )
