"""FedJAX's rounds.

With one process its default backend compiles a client's step and runs one client after
the other, in as many threads as XLA takes. With several its `pmap` backend trains that
many clients at once, each on a device of the host's.
"""

import os
import sys
from importlib.metadata import version
from typing import Any

import numpy as np

from benchmarks.rivals.cpu.work import (
    CLASSES,
    LR,
    MOMENTUM,
    SEED,
    WEIGHT_DECAY,
    Part,
    Turns,
    Work,
    data_of,
    part_of,
)
from hpcfed.models import MODELS, ConvNet


def network_of(work: Work) -> Any:
    """Return the network as a haiku function; images have their channels last."""
    import haiku as hk
    import jax

    structure = MODELS[work.model].structure
    assert isinstance(structure, ConvNet)
    activation = jax.nn.leaky_relu if structure.leaky else jax.nn.relu

    def dropped(x: Any, share: float, training: bool) -> Any:
        if not share or not training:
            return x
        return hk.dropout(hk.next_rng_key(), share, x)

    def forward(x: Any, training: bool) -> Any:
        for conv in structure.convs:
            padding = [(conv.padding, conv.padding)] * 2
            x = hk.Conv2D(conv.channels, conv.kernel, padding=padding)(x)
            x = activation(x)
            if conv.pool:
                x = hk.max_pool(x, (2, 2, 1), (2, 2, 1), "VALID")
        x = dropped(x, structure.dropout[0], training)
        x = hk.Flatten()(x)
        for units in structure.hidden:
            x = activation(hk.Linear(units)(x))
        x = dropped(x, structure.dropout[1], training)
        return hk.Linear(CLASSES)(x)

    return hk.transform(forward)


def is_older(jax: Any) -> bool:
    """Return whether JAX still has all that FedJAX 0.0.17 calls."""
    return hasattr(jax, "tree_map")


def run(part: Part, turns: Turns) -> None:
    """Train with its federated averaging."""
    import fedjax
    import jax
    import optax

    if not is_older(jax):
        if part.processes > 1:
            turns.tell(skipped="its pmap backend needs JAX 0.4.25 or older")
            return
        # A newer JAX is faster, and lacks but this name.
        jax.tree_map = jax.tree_util.tree_map
    work = part.work
    network = network_of(work)

    def loss(params: Any, batch: Any, rng: Any) -> Any:
        logits = network.apply(params, rng, batch["x"], True)
        wrong = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return wrong.mean()

    sgd = optax.chain(
        optax.add_decayed_weights(WEIGHT_DECAY), optax.sgd(LR, momentum=MOMENTUM)
    )
    images, labels = data_of(work)
    # Channels last: as XLA's convolutions on a CPU want them.
    images = np.ascontiguousarray(np.moveaxis(images, 2, -1))
    keys = jax.random.split(jax.random.PRNGKey(SEED), work.clients)
    clients = []
    for client in range(work.clients):
        examples = {"x": images[client], "y": labels[client].astype(np.int32)}
        clients.append((client, fedjax.ClientDataset(examples), keys[client]))
    fedjax.set_for_each_client_backend("pmap" if part.processes > 1 else "jit")
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        jax.grad(loss),
        fedjax.optimizers.create_optimizer_from_optax(sgd),
        fedjax.optimizers.sgd(learning_rate=1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=work.batch, num_epochs=1),
    )
    params = network.init(keys[0], images[0, : work.batch], False)
    state = algorithm.init(params)
    names = ", ".join(f"{name} {version(name)}" for name in ("fedjax", "jax"))
    turns.tell(version=names)
    for _ in range(part.rounds):
        turns.begin()
        state, _ = algorithm.apply(state, clients)
        jax.block_until_ready(state.params)
        turns.end()


if __name__ == "__main__":
    own = part_of(sys.argv[1:])
    if own.processes > 1:
        # JAX reads it when it is loaded.
        count = f"--xla_force_host_platform_device_count={own.processes}"
        os.environ["XLA_FLAGS"] = count
    run(own, Turns())
