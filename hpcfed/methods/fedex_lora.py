"""FedEx-LoRA (Singhal et al. 2025): FedAvg of the factors, and what the mean of the
products has beyond the product of the means is added to the frozen weights.

Section 3: W ← W + (α / r) (Σ pᵢ Bᵢ Aᵢ − B̄ Ā), B̄ = Σ pᵢ Bᵢ, Ā = Σ pᵢ Aᵢ. So the sum W +
(α / r) B̄ Ā is exactly the mean of the clients' own. W changes from round to round, and
is part of the rows here: every client takes a copy of the network while it trains. It
is sent to clients as a whole; they send their adapters alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch

from hpcfed.clients.network import client_network
from hpcfed.errors import UserError
from hpcfed.methods import FIXED, Cohort, Federation, Tensor, _adapters, fedavg
from hpcfed.methods._adapters import adapters, rank_of
from hpcfed.models.lora import frozen_weights
from hpcfed.models.stacking import Names
from hpcfed.options import Choice, RunConfig

EXTENDS = fedavg


class Options(_adapters.Options):
    def fit(self, config: RunConfig, ranks: int) -> Iterable[Choice]:
        yield from super().fit(config, ranks)
        reason = "fedex-lora changes the layers below adapters"
        yield Choice("send_frozen", True, reason)

    def check(self, config: RunConfig) -> None:
        if not config.send_frozen:
            raise UserError(
                "method fedex-lora changes frozen layers, so rows must hold them; add "
                "--send-frozen"
            )


@dataclass(frozen=True)
class State(fedavg.State):
    bases: Tensor = field(metadata=FIXED)
    """[adapters, 2]: the first column of the layer's frozen weight, and 1 if that is
    stored as [inputs, outputs].
    """
    frozen_from: Tensor = field(metadata=FIXED)
    """The first frozen column: training may change those before it."""


def init(fed: Federation[Options]) -> State:
    starts = {e.name: e.start for e in fed.layout.entries}
    network = client_network(fed.config)
    frozen = [n for n, p in network.named_parameters() if not p.requires_grad]
    weights = frozen_weights(network)
    tied = Names.of(network, fed.layout).tied
    bases = []
    for adapter in adapters(fed.layout):
        found = weights[adapter.a.name]
        if found.name not in starts or found.name in tied:
            raise UserError(
                f"method fedex-lora would change {found.name}, which is tied to another "
                "layer's weight; name layers without it, as in --lora-layers '*.attn.*'"
            )
        bases.append([starts[found.name], int(found.is_transposed)])
    return State(
        fed.initial_row(),
        torch.tensor(bases, device=fed.device),
        torch.tensor(min(starts[name] for name in frozen), device=fed.device),
    )


def round(fed: Federation[Options], state: State, cohort: Cohort) -> State:
    # Frozen columns come last: clients send the others.
    sent = slice(0, int(state.frozen_from))
    rows = fed.download(state.w, cohort)
    rows = fed.train(rows, cohort)
    uploads = fed.upload(rows[:, sent], cohort, columns=sent)
    uploads, cohort = fed.arrived(uploads, cohort)
    if not len(cohort.clients):
        return state
    # A client whose row has diverged anywhere is left out everywhere.
    uploads = uploads.where(uploads.isfinite().all(1, keepdim=True), torch.nan)
    w = state.w.clone()
    w[sent] = fed.mean(uploads, cohort)
    scale = (fed.config.lora_alpha or rank_of(fed)) / rank_of(fed)
    for adapter, base in zip(adapters(fed.layout), state.bases.tolist(), strict=True):
        residual = fed.mean(adapter.products(uploads), cohort)
        residual = residual - adapter.products(w[None])[0]
        start, is_transposed = base
        change = residual.view(adapter.b.shape[0], -1)
        change = change.mT if is_transposed else change
        w[start : start + change.numel()] += scale * change.flatten()
    return replace(state, w=w)
