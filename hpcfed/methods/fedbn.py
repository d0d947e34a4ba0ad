"""FedBN (Li et al. 2021), in clusters: all but batch norm is shared, each client has
its own.

As in the authors' code a layer is batch norm if its name has `bn` in it: ResNet's
shortcuts share theirs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from hpcfed.config import Choice, RunConfig
from hpcfed.errors import UserError
from hpcfed.methods import _clusters
from hpcfed.methods._clusters import State, begin
from hpcfed.methods.clustered_fedavg import global_row, personal, round, welcome
from hpcfed.models import MODELS

if TYPE_CHECKING:
    from hpcfed.federation.federation import Federation
    from hpcfed.models.layout import Layout

__all__ = ["Options", "State", "global_row", "init", "personal", "round", "welcome"]


class Options(_clusters.Options):
    names_layers = True

    def fit(self, config: RunConfig, ranks: int) -> Iterable[Choice]:
        yield from super().fit(config, ranks)
        usual = config.network()
        fits = min(config.data().shape[1:]) >= MODELS["cnn-bn"].smallest
        if usual in MODELS and not MODELS[usual].norm and fits:
            reason = f"{usual}, the data set's usual one, has no batch norm; --model resnet18 has, too"
            yield Choice("model", "cnn-bn", reason)

    def check_layout(self, layout: Layout, network: str) -> None:
        if not _norms(layout):
            raise UserError(
                f"model {network} has no batch norm, which fedbn is about; use --model "
                "resnet18 or cnn-bn"
            )


def init(fed: Federation) -> State:
    return begin(fed, shared=~fed.layout.mask(_norms(fed.layout)))


def _norms(layout: Layout) -> list[str]:
    return [layer for layer in layout.layers if "bn" in layer]
