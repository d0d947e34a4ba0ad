"""FedBN (Li et al. 2021), in clusters: all but batch norm is shared, each client has
its own.

As in the authors' code, a layer is batch norm if its name contains `bn`. So the batch
norm in ResNet's shortcuts is shared. Without batch norm all layers are shared.
"""

from collections.abc import Iterable

from hpcfed.methods import Federation, Layout, _clusters, clustered_fedavg
from hpcfed.models import MODELS
from hpcfed.options import Choice, RunConfig

EXTENDS = clustered_fedavg


class Options(_clusters.Options):
    whole_rows = False

    def fit(self, config: RunConfig, ranks: int) -> Iterable[Choice]:
        yield from super().fit(config, ranks)
        usual = config.network()
        fits = config.data().side >= MODELS["cnn-bn"].smallest
        if usual in MODELS and not MODELS[usual].norm and fits:
            yield Choice(
                "model",
                "cnn-bn",
                f"{usual}, the data set's usual one, has no batch norm; --model "
                "resnet18 has, too",
            )

    def remarks(self, layout: Layout, network: str) -> Iterable[str]:
        if not _norms(layout):
            yield (
                f"model {network} has no batch norm: fedbn is clustered-fedavg here; "
                "--model resnet18 or cnn-bn has"
            )


def init(fed: Federation[Options]) -> _clusters.State:
    # Weights, biases and running statistics of batch norm alike.
    norms = fed.layout.mask(_norms(fed.layout))
    return _clusters.begin(fed, shared=~norms)


def _norms(layout: Layout) -> list[str]:
    return [layer for layer in layout.layers if "bn" in layer]
