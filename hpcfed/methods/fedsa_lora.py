"""FedSA-LoRA (Guo et al. 2025): adapters whose A is shared, while each client keeps its
own B; both are trained together.

Section 4: Ā = Σ pᵢ Aᵢ is sent back, and client i goes on with W + (α / r) Bᵢ Ā. A learns
what is common, B what is a client's own. Layers of --lora-train are shared.
"""

from hpcfed.methods import Cohort, Federation, _adapters, _partial
from hpcfed.methods._adapters import columns_of
from hpcfed.methods._partial import State, aggregate, download

EXTENDS = _partial
PRIVATE_MEAN = True


class Options(_adapters.Options):
    """It adds no options of its own."""


def init(fed: Federation[Options]) -> State:
    return _partial.begin(fed, shared=~columns_of(fed.layout, "B"))


def round(fed: Federation[Options], state: State, cohort: Cohort) -> State:
    rows = download(fed, state, cohort)
    rows = fed.train(rows, cohort)
    return aggregate(fed, state, rows, cohort)
