"""Which CUDA kernels a run's clients will need, known before its data is read."""

from collections.abc import Iterator

import torch

from hpcfed.clients.engine import LOOP_ABOVE_COLUMNS
from hpcfed.clients.objective import OBJECTIVES
from hpcfed.kernels import cuda, rows
from hpcfed.models import ConvNet
from hpcfed.models.cost import cost
from hpcfed.models.networks import build
from hpcfed.models.own import Sample
from hpcfed.models.stack import StackedNetwork
from hpcfed.options import RunConfig
from hpcfed.runtime.world import World


def foresee_kernels(config: RunConfig, world: World) -> None:
    """Have kernels compiled in the background: those of every run, and the layers of a
    small network of the catalogue, which take longest.

    Any kernel that is missing here is compiled when it is needed.
    """
    if not cuda.available(world.device):
        return
    sources = [*rows.SOURCES, *_layers(config, world.device)]
    # This thread is busy: the others' cores are free until the first round.
    cuda.foresee(sources, world.device, processes=max(1, world.threads - 1))


def _layers(
    config: RunConfig, device: torch.device
) -> Iterator[tuple[str, cuda.Macros]]:
    known = config.model_info()
    # Clients of ResNets train one by one, by torch's own kernels.
    if known is None or not isinstance(known.structure, ConvNet):
        return
    if config.engine not in ("auto", "batched") or config.precision == "fp64":
        return
    data = config.data()
    network = build(config.network(), shape=data.shape, classes=data.classes, seed=0)
    # Those of any large network, too.
    if sum(p.numel() for p in network.parameters()) > LOOP_ABOVE_COLUMNS:
        return
    yield from StackedNetwork(network).kernel_sources(
        cost(network, Sample(data.shape, ())),
        torch.empty(0, device=device),
        config.batch_size,
        bounded=OBJECTIVES[data.task].bounded,
    )
