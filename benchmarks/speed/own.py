"""Speed of networks that users bring: ours beside a plain loop over clients, and beside
plain torch.func.vmap.

  vit    benchmarks/examples/vit.py, images of 3×32×32
  resnet benchmarks/examples/resnet.py, group norm, images of 3×32×32
  gpt    benchmarks/examples/gpt.py, 128 tokens of 100
  lora   the same with adapters of rank 8
  gru    benchmarks/examples/gru.py, 128 tokens of 100

A round is one epoch of all clients. The loop is what a careful user writes: data on the
device, fused SGD, nothing waits. vmap is per-client gradients of stacked parameters and
SGD on them. All three do the same steps; warm-up rounds are not counted.

examples:
  python -m benchmarks.speed.own
  python -m benchmarks.speed.own --networks vit gru --clients 50 --rounds 10
"""

import argparse
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from benchmarks import measuring
from benchmarks.arguments import parser_of
from hpcfed.clients.engine import Engine
from hpcfed.clients.job import Recipe, TrainingJob
from hpcfed.data.shards import Shard
from hpcfed.models.layout import Layout
from hpcfed.models.lora import add_adapters
from hpcfed.models.own import Sample, answers, build_own
from hpcfed.runtime import randomness

IMAGES = Sample((3, 32, 32), (100,))
TEXT = Sample((128,), (128, 100), vocabulary=100)
NETWORKS = {
    "vit": ("vit.py:ViT", IMAGES),
    "resnet": ("resnet.py:ResNet", IMAGES),
    "gpt": ("gpt.py:GPT", TEXT),
    "lora": ("gpt.py:GPT", TEXT),
    "gru": ("gru.py:GRU", TEXT),
}
LR, MOMENTUM = 0.01, 0.9


def some_data(
    sample: Sample, clients: int, samples: int, device: torch.device
) -> Shard:
    """Return random samples, as many for every client."""
    torch.manual_seed(0)
    total = clients * samples
    if sample.vocabulary:
        inputs = torch.randint(sample.vocabulary, (total, *sample.shape))
    else:
        inputs = torch.randn(total, *sample.shape)
    targets = torch.randint(sample.outputs[-1], (total, *sample.outputs[:-1]))
    inputs = inputs.to(device)
    if inputs.dim() == 4:
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    return Shard(
        inputs=inputs,
        targets=targets.to(device),
        index=torch.arange(total, device=device).view(clients, samples),
        sizes=(samples,) * clients,
        clients=np.arange(clients),
        task="next-token" if len(sample.outputs) == 2 else "classification",
    )


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    logits = answers(outputs)
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def ours(
    network: nn.Module, sample: Sample, shard: Shard, batch: int, mode: Any
) -> tuple[Callable[[], object], Engine]:
    """Return a round of the engine, and the engine."""
    device = shard.inputs.device
    layout = Layout.of(network)
    engine = Engine(
        network, layout, shape=sample.shape, trial=sample, device=device, mode=mode
    )
    clients = len(shard.sizes)
    rows = layout.row(network).to(device).expand(clients, -1)
    ids = torch.arange(clients, device=device)
    keys = randomness.client_keys(0, "training", 0, ids)
    recipe = Recipe(1, batch, LR, momentum=MOMENTUM)
    job = TrainingJob(rows, shard, np.arange(clients), recipe, keys=keys)
    return lambda: engine.train(job), engine


def loop(network: nn.Module, shard: Shard, batch: int) -> Callable[[], object]:
    """Return a round as a careful user writes it, client after client."""
    device = shard.inputs.device
    network = network.to(device).train()
    trained: list[Tensor] = [p for p in network.parameters() if p.requires_grad]
    start = [p.detach().clone() for p in trained]

    def one() -> None:
        for index in shard.index:
            with torch.no_grad():
                torch._foreach_copy_(trained, start)
            optimiser = torch.optim.SGD(trained, LR, momentum=MOMENTUM, fused=True)
            order = index[torch.randperm(len(index), device=device)]
            for own in order.split(batch):
                optimiser.zero_grad(set_to_none=True)
                loss_of(network(shard.inputs[own]), shard.targets[own]).backward()
                optimiser.step()

    return one


def plain_vmap(network: nn.Module, shard: Shard, batch: int) -> Callable[[], object]:
    """Return a round by torch.func.vmap over stacked parameters."""
    device = shard.inputs.device
    network = network.to(device).train()
    clients = len(shard.sizes)
    start = {}
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            start[name] = parameter.detach()

    def loss(tensors: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss_of(functional_call(network, tensors, (x,)), y)

    gradients = vmap(grad(loss))

    def one() -> None:
        rows = {}
        for name, tensor in start.items():
            rows[name] = tensor.expand(clients, *tensor.shape).clone()
        velocity = [torch.zeros_like(row) for row in rows.values()]
        keys = torch.rand(shard.index.shape, device=device)
        order = shard.index.gather(1, keys.argsort(1))
        for own in order.split(batch, 1):
            found = gradients(rows, shard.inputs[own], shard.targets[own])
            values = [found[name] for name in rows]
            torch._foreach_mul_(velocity, MOMENTUM)
            torch._foreach_add_(velocity, values)
            torch._foreach_add_(list(rows.values()), velocity, alpha=-LR)

    return one


def milliseconds(
    work: Callable[[], object], rounds: int, device: torch.device, *, warmup: int = 3
) -> float:
    """Return the median of counted rounds; NaN where the device's memory is too small,
    or torch cannot do it.
    """
    try:
        times = measuring.milliseconds(
            lambda _: work(), device, rounds=rounds, warmup=warmup
        )
    except (RuntimeError, NotImplementedError) as error:
        print(f"    cannot: {str(error).splitlines()[0][:100]}")
        return float("nan")
    finally:
        measuring.free()
    return float(np.median(times))


def measure(name: str, arguments: argparse.Namespace, device: torch.device) -> None:
    """Measure one network in all ways, and print a line."""
    where, sample = NETWORKS[name]

    def make() -> nn.Module:
        torch.manual_seed(0)
        reference = f"benchmarks/examples/{where}"
        network = build_own(reference, sample, sample.outputs[-1], {})
        if name == "lora":
            add_adapters(network, rank=8, alpha=16.0)
        return network

    shard = some_data(sample, arguments.clients, arguments.samples, device)
    work, engine = ours(make(), sample, shard, arguments.batch, arguments.engine)
    rounds = arguments.rounds
    own = milliseconds(work, rounds, device)
    peak = ""
    if device.type == "cuda":
        peak = f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
        torch.cuda.reset_peak_memory_stats()
    columns, mode = engine.layout.num_columns, engine.mode
    del work, engine
    print(f"  {name:7} {columns:>9,} columns: ours ({mode}) {own:8.2f} ms{peak}")
    if arguments.alone:
        return
    by_loop = milliseconds(loop(make(), shard, arguments.batch), rounds, device)
    by_vmap = milliseconds(plain_vmap(make(), shard, arguments.batch), rounds, device)
    best = float(np.nanmin([by_loop, by_vmap]))
    print(
        f"          plain loop {by_loop:8.2f} ms, plain vmap {by_vmap:8.2f} ms; ours is "
        f"{best / own:.2f} times as fast as the faster"
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=[*NETWORKS])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--samples", type=int, default=64, help="of each client")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--engine", default="auto", help="auto, batched, vmap or loop")
    parser.add_argument("--alone", action="store_true", help="measure ours only")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(
        f"{name}, torch {torch.__version__}, {datetime.now(UTC):%Y-%m-%d}: "
        f"{arguments.clients} clients × {arguments.samples} samples, batch "
        f"{arguments.batch}, a round of one epoch"
    )
    for network in arguments.networks:
        measure(network, arguments, device)


if __name__ == "__main__":
    main()
